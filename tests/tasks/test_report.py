"""The HTML report, on made-up runs: whole, hostile, damaged, resumed, and with parts missing."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest

from thalweg.errors import DataError
from thalweg.tasks.config import to_yaml
from thalweg.tasks.registry import build_config
from thalweg.tasks.report import write_report
from thalweg.tasks.report.plots import Curve, curve_svg
from thalweg.tasks.report.run import read_log, read_run
from thalweg.tasks.report.text import describe, difference, escape, symbol
from thalweg.tasks.transduce.report import EVERYWHERE, SETTINGS, StringReport
from thalweg.tasks.transduce.search_settings import SearchConfig, SearchName

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = '<script>alert("x")</script>'
CONFIG = """name: ar2en-demo
data: {train: train.tsv, dev: dev.tsv}
model: {cell: lstm, hidden_size: 256, layers: 2, bidirectional: true, attention: general, tied: false}
training: {epochs: 12, batch_size: 32}
"""
START = {
    "event": "start",
    "version": "0.1.0",
    "parameters": 1234567,
    "train": {"pairs": 12877, "path": "ar2en/train.tsv"},
    "source": {"symbols": "characters, NFC", "size": 51},
    "target": {"symbols": "characters, NFC", "size": 43},
    "device": "cpu",
}
WORDS = [
    ("سلام", ["salam"], ["salam", "salaam", "slam"], True),
    ("القاهرة", ["cairo", "al-qahira"], ["alqahra", "al-qahira", "alqahera"], False),
    ("phoneme", ["f oʊ n iː m"], ["f oʊ n iː m", "f oʊ n ɛ m"], True),
    ("though", ["ð oʊ"], ["θ ɔ t", "ð oʊ"], False),
    ("ភ្នំពេញ", ["pʰ n o m p e ɲ"], ["pʰ n u m p ɛ ɲ"], False),
    (HOSTILE, ["<b>bold</b>", "$title ${body} $$"], ["<b>bald</b>", '"><img src=x onerror=alert(1)>'], False),
]


class Page(HTMLParser):
    """A strict reading: counts elements, collects text and attributes, insists on balanced tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


def epoch(number: int, *, best: bool = False, **more: Any) -> dict[str, Any]:
    dev = {
        "loss": 2.2 - 0.11 * number,
        "accuracy": 0.02 * number,
        "cer": 0.5 * 0.9**number,
        "bleu": 3.0 * number,
    }
    return {
        "event": "epoch",
        "epoch": number,
        "step": 403 * number,
        "loss": 2.5 * 0.85**number,
        "learning_rate": 0.003 * 0.5 ** (number // 4),
        "teacher_forcing": 0.5,
        "gradient_norm": 1.0 + 0.1 * math.sin(number),
        "pairs_per_second": 2100.0,
        "seconds": 6.0 * number,
        "dev": dev,
        "best": best,
        **more,
    }


def lines(*records: object) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def score(name: str, value: float, width: float, *, higher: bool) -> dict[str, Any]:
    return {
        "name": name, "value": value, "low": value - width, "high": value + width, "n": 2590,
        "higher_is_better": higher,
    }  # fmt: skip


def write_evaluation(folder: Path, *, words: list[Any] = WORDS, repeat: int = 3) -> None:
    folder.mkdir(parents=True)
    scores = {
        "accuracy": score("accuracy", 0.2214, 0.0161, higher=True),
        "cer": score("CER", 0.2072, 0.0081, higher=False),
        "wer@5": score("wer@5", 0.5511, 0.019, higher=False),
        "bleu": score("BLEU", 61.25, 1.1, higher=True),
    }
    metrics = {
        "file": f"data dir/{folder.name}.tsv", "pairs": 2590, "items": 2590,
        "search": {"search": "beam", "name": "beam", "width": 5, "k": 3, "length_penalty": 0.0, "top_p": 0.9},
        "references": "any",
        "scores": scores, "words_per_second": 1311.4, "version": "0.1.0",
    }  # fmt: skip
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    items = []
    for source, references, texts, correct in words * repeat:
        answers = [
            {
                "text": text,
                "log_prob": -0.5 - rank,
                "probability": math.exp(-0.5 - rank),
                "finished": rank < 2,
            }
            for rank, text in enumerate(texts)
        ]
        items.append({"source": source, "references": references, "answers": answers, "correct": correct, "edits": 2})
    (folder / "predictions.jsonl").write_text(lines(*items), encoding="utf-8")
    worst = (
        "source\treferences\tprediction\tedits\n"
        + f"{HOSTILE}\t<b>\t<i>x</i>\t9\nالقاهرة\tcairo | alqahira\talqahra\t6\n"
    )
    (folder / "worst.tsv").write_text(worst, encoding="utf-8")
    confusions = "gold\tpredicted\tcount\na\te\t40\n∅\ta\t33\n \t∅\t12\n<\t>\t5\nʃ\ts\t61\n\u0301\t∅\t4\n"
    (folder / "confusions.tsv").write_text(confusions, encoding="utf-8")
    maps = []
    for source, prediction, reference in (
        (list("سلام"), [*"salam", "</s>"], "salam"),
        (list("though"), ["θ", "ɔ", "t", "</s>"], "ð oʊ"),
        (list("ភ្នំពេញ"), ["pʰ", "n", "u", "m", "p", "ɛ", "ɲ", "</s>"], "pʰ n o m p e ɲ"),
        (["<", "b", ">", '"', "&"], ["<", "</s>"], HOSTILE),
    ):
        weights = []
        for row in range(len(prediction)):
            at = row * (len(source) - 1) / max(1, len(prediction) - 1)
            raw = [math.exp(-1.5 * (column - at) ** 2) for column in range(len(source))]
            weights.append([round(each / sum(raw), 4) for each in raw])
        maps.append({"source": source, "prediction": prediction, "reference": reference, "weights": weights})
    (folder / "attention.json").write_text(json.dumps(maps), encoding="utf-8")


def write_run(run: Path) -> Path:
    """A whole run: 8 epochs, killed in the ninth (a torn line), resumed from the sixth, ended at 12."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG, encoding="utf-8")
    first = [epoch(number, best=True) for number in range(1, 9)]
    second = [epoch(number, best=number in (6, 7, 10), loss=9.9 if number == 6 else 0.5) for number in range(6, 13)]
    end = {"event": "end", "reason": "patience", "best_epoch": 10, "best": {"accuracy": 0.2}, "seconds": 90.0}
    text = lines(START, *first) + '{"event": "epo\n' + lines(START, *second, end)
    (run / "log.jsonl").write_text(text, encoding="utf-8")
    write_evaluation(run / "evaluation" / "test")
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "demo")


def page_of(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_whole_report(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    for expected in (
        "ar2en-demo", "0.1.0", "1,234,567", "12,877 pairs", "51 in the alphabet",
        "cell lstm · hidden size 256",
        "0.2214", "0.2053 – 0.2375", "61.25", "WER@5", "lower is better", "beam search (width 5 · k 3)",
        "stopped early · 1 min 30 s", "best epoch 10", "resumed before epoch 6", "سلام", "ភ្នំពេញ",
        "ð oʊ", "0.607",
        "Development Accuracy", "Learning rate", "left out", "added", "◌\u0301", "␣", "hidden_size: 256",
        "could not be read and are left out: 1.",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert page.tags["svg"] == 6  # loss, accuracy, CER, BLEU, learning rate, gradient norm; forcing is constant
    assert page.tags["text"] > 20  # text stays text
    assert page.tags["article"] == 8 + 6  # a sample of the 12 wrong, all 6 right


def test_first_answers_stand_beside_the_references(run: Path) -> None:
    html = write_report(run).read_text(encoding="utf-8")
    table = html[html.index("First answers") : html.index("Wrong predictions")]
    page = Page(table[table.index("<div") :].rpartition("<h3>")[0])
    assert page.tags["tr"] == 1 + 10, "ten of eighteen"
    assert page.tags["script"] == 0
    assert HOSTILE in page.text
    assert page.text.count("✓") == 4, "of the first ten words four are right"
    assert "cairooral-qahira" in page.text.replace(" ", "")
    assert "<mark>θ ɔ t</mark>" in table


def test_signatures_are_shown(run: Path) -> None:
    path = run / "evaluation" / "test" / "metrics.json"
    metrics = json.loads(path.read_text(encoding="utf-8"))
    metrics["scores"]["bleu"]["signature"] = "nrefs:1|tok:<none>"
    metrics["scores"]["chrf"] = {**score("chrF", 44.5, 1.0, higher=True), "signature": "nc:6"}
    path.write_text(json.dumps(metrics), encoding="utf-8")
    text = page_of(run).text
    assert "BLEU: nrefs:1|tok:<none>" in text
    assert "chrF: nc:6" in text
    assert "BLEU, chrF of 100" in text
    assert "43.50 – 45.50" in text


def test_commands_can_be_pasted(run: Path) -> None:
    text = page_of(run).text
    options = "--search beam --width 5 --k 3 --references any"
    assert f"thalweg evaluate {run} 'data dir/test.tsv' {options}" in text
    assert f"thalweg predict {run} - --k 5" in text
    assert f"thalweg train {run}/config.yaml --out {run} --resume" in text


SEARCHES = [
    ({"search": "exact", "width": 3, "max_expansions": 0}, "--width 3 --max-expansions 0"),
    ({"search": "diverse", "width": 6, "diversity": 0.0}, "--width 6 --diversity 0.0"),
    ({"search": "diverse", "width": 6, "groups": 3}, "--width 6 --groups 3 --diversity 0.5"),
    ({"search": "typical", "top_k": 4, "sampling_seed": 7}, "--typical 0.95 --temperature 1.0 --top-k 4 --seed 7"),
    ({"search": "min-p", "min_length": 2}, "--min-p 0.05 --temperature 1.0 --min-length 2"),
    ({"search": "stochastic", "temperature": 0.5}, "--temperature 0.5"),
    ({"search": "mbr", "prefix": "<b> x"}, "--samples 32 --temperature 1.0 --prefix '<b> x'"),
    ({"search": "beam", "lexicon": "w.txt"}, "--width 5 --lexicon w.txt"),
]


@pytest.mark.parametrize(("settings", "expected"), SEARCHES)
def test_every_search_shows_its_settings(run: Path, settings: dict[str, Any], expected: str) -> None:
    """What matters to a search is shown, and as options that ask for the same search again."""
    how = SearchConfig(**settings)
    path = run / "evaluation" / "test" / "metrics.json"
    metrics = json.loads(path.read_text())
    metrics["search"] = {**dataclasses.asdict(how), "name": how.search, "k": 1}
    metrics["ensemble"] = {"runs": ["runs/b", "runs/c"], "vote": True}
    metrics |= {"precision": "int8", "exact": {"width": 3, "proved": 0.75, "empty": 0.0}}
    path.write_text(json.dumps(metrics))
    text = page_of(run).text
    rest = "--k 1 --ensemble runs/b --ensemble runs/c --vote --precision int8 --references any"
    assert f"--search {how.search} {expected} {rest}" in text
    for shown in (f"{how.search} search (", "with runs/b, runs/c (vote)", "int8 weights", "75.00% of the answers"):
        assert shown in text, shown


def test_an_evaluation_keeps_its_name(run: Path) -> None:
    assert "--name" not in page_of(run).text
    (run / "evaluation" / "test").rename(run / "evaluation" / "exact")
    assert "--references any --name exact" in page_of(run).text


def test_every_search_has_its_settings() -> None:
    searches = set(get_args(SearchName)) - {"greedy"}
    assert searches == set(SETTINGS)
    known = {field.name for field in dataclasses.fields(SearchConfig)} | {"k"}
    assert {key for keys in SETTINGS.values() for key in keys} | set(EVERYWHERE) == known - {"search"}


def test_a_transformer_with_features(run: Path) -> None:
    config = build_config({"model": {"family": "transformer", "kind": "causal", "heads": 2}})
    (run / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    item = {"source": "run", "features": ["V", "<PST>"], "references": ["ran"], "correct": True}
    item["answers"] = [{"text": "ran", "log_prob": -0.1, "probability": 0.9, "votes": 2, "optimal": True}]
    (run / "evaluation" / "test" / "predictions.jsonl").write_text(lines(item), encoding="utf-8")
    text = page_of(run).text
    for shown in ("family transformer · kind causal · width 256 · heads 2", "V;<PST>", "2 votes", "sinusoidal"):
        assert shown in text, shown
    facts = text[text.index("family transformer") :].partition("Parameters")[0]
    assert not re.search("encoder layers|max positions|attention dropout", facts)


def test_nothing_is_loaded_and_nothing_runs(run: Path) -> None:
    html = write_report(run).read_text(encoding="utf-8")
    page = Page(html)
    assert "://" not in html
    assert "@import" not in html
    assert not page.tags.keys() & {"script", "link", "img", "iframe", "object"}
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        assert name != "src"
        if name in ("href", "xlink:href"):
            assert value.startswith("#")
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = [value[1:] for name, value in page.attributes if name in ("href", "xlink:href")]
    targets += re.findall(r"url\(#([^)]+)\)", html)
    assert set(targets) <= set(ids)


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    run = tmp_path / f"run {HOSTILE.replace('/', '')}"
    run.mkdir()
    (run / "config.yaml").write_text(f"model: {HOSTILE!r}\nname: '</title>{HOSTILE}'", encoding="utf-8")
    bad = epoch(1, best=True)
    bad["dev"] = {"$\\frac{": 0.5, HOSTILE: 1.0}
    start = {**START, "device": HOSTILE, "version": ["<i>"], "train": {"pairs": HOSTILE, "path": HOSTILE}}
    (run / "log.jsonl").write_text(lines(start, bad, epoch(2)), encoding="utf-8")
    write_evaluation(run / "evaluation" / "a&<b>")
    odd = {"source": "\ud800\x00\x1b[0m\u202e\u2028", "references": "x", "answers": [{"text": "\udfff"}]}
    with (run / "evaluation" / "a&<b>" / "predictions.jsonl").open("a", encoding="utf-8") as out:
        out.write(json.dumps(odd) + "\n")
    page = page_of(run)
    assert not page.tags.keys() & {"script", "img"}
    assert HOSTILE in page.text
    assert "$title ${body} $$" in page.text
    assert "\x00" not in page.text


def test_escaping_oracle_can_fail() -> None:
    """The broken twin: without escaping, the parser used above does see the script."""
    assert Page(f"<p>{HOSTILE}</p>").tags["script"] == 1
    assert Page(f"<p>{escape(HOSTILE)}</p>").tags["script"] == 0


def test_empty_run_says_what_is_missing(tmp_path: Path) -> None:
    text = page_of(tmp_path).text
    assert tmp_path.name in text
    assert "not been evaluated" in text
    assert "no log.jsonl" in text
    assert "no config.yaml" in text
    assert "thalweg evaluate" in text


def test_empty_evaluation_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "evaluation" / "test").mkdir(parents=True)
    (tmp_path / "evaluation" / "stray-file").write_text("")
    text = page_of(tmp_path).text
    for part in ("metrics.json is absent", "predictions.jsonl is absent", "worst.tsv is absent"):
        assert part in text
    assert "confusions.tsv is absent" in text
    assert "No attention weights" in text
    assert "stray-file" not in text


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[[1]]", '{"scores": 3}', '[{"source": 1}]', "\x00\xff"])
def test_damaged_files_do_not_stop_the_report(run: Path, content: str) -> None:
    folder = run / "evaluation" / "test"
    names = ["metrics.json", "predictions.jsonl", "worst.tsv", "confusions.tsv", "attention.json"]
    for path in [run / "config.yaml", run / "log.jsonl", *(folder / name for name in names)]:
        path.write_bytes(content.encode("latin-1"))
    assert "Results" in page_of(run).text


def test_wrong_types_inside_do_not_stop_the_report(run: Path) -> None:
    folder = run / "evaluation" / "test"
    scores = {
        "cer": {"value": "x"},
        "wer": 3,
        "accuracy": {"value": 0.5, "low": None},
        "z": {"value": float("nan")},
    }
    (folder / "metrics.json").write_text(json.dumps({"scores": scores, "search": "beam"}), encoding="utf-8")
    items = [
        {"answers": 3},
        {"source": None, "answers": [7, {"probability": "much"}], "references": {"a": 1}},
    ]
    (folder / "predictions.jsonl").write_text(lines(*items), encoding="utf-8")
    ragged = {"source": ["a", "b"], "prediction": ["c", "d", "e"], "weights": [[0.5], 7, [0.1, 2.0, 3.0]]}
    (folder / "attention.json").write_text(json.dumps([ragged, 5]), encoding="utf-8")
    (folder / "confusions.tsv").write_text("gold\tpredicted\tcount\na\tb\tmany\nc\td\n", encoding="utf-8")
    odd = [
        {**START, "source": 3, "train": "x.tsv"},
        {"event": "epoch"},
        {"event": "epoch", "epoch": 1, "dev": 4},
    ]
    (run / "log.jsonl").write_text(lines(*odd), encoding="utf-8")
    page = page_of(run)
    assert "0.5000 – 0.5000" in page.text
    assert "no answer" in page.text
    assert "The log holds no figures." in page.text
    assert sum(name == "style" and value.startswith("--w:") for name, value in page.attributes) == 6


def test_one_epoch(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(lines(START, epoch(1, best=True)), encoding="utf-8")
    page = page_of(tmp_path)
    assert "1 epoch ·" in page.text
    assert "not finished: running or interrupted" in page.text
    assert page.tags["svg"] == 6
    assert page.text.count("at best epoch") == 6


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    records = [epoch(1), epoch(2, loss=float("nan")), epoch(3, loss=float("inf"), learning_rate=10**400)]
    (tmp_path / "log.jsonl").write_text(lines(START, *records), encoding="utf-8")
    assert page_of(tmp_path).tags["svg"] == 6


def test_resumed_log_keeps_the_epochs_that_led_to_the_model(run: Path) -> None:
    log = read_log(run / "log.jsonl")
    assert log is not None
    assert [record["epoch"] for record in log.epochs] == list(range(1, 13))
    assert log.epochs[5]["loss"] == 9.9  # the later sixth epoch
    assert (log.resumed, log.unreadable, log.best_epoch) == ([6], 1, 10)


def test_resumed_after_the_end_and_started_afresh(tmp_path: Path) -> None:
    end = {"event": "end", "reason": "epochs", "best_epoch": 1}
    path = tmp_path / "log.jsonl"
    path.write_text(lines(START, epoch(1, best=True), end, START, epoch(2), epoch(3)), encoding="utf-8")
    log = read_log(path)
    assert log is not None
    assert (log.resumed, log.end, log.best_epoch) == ([2], None, 1)
    path.write_text(lines(START, epoch(1, best=True), epoch(2), START, epoch(1)), encoding="utf-8")
    log = read_log(path)
    assert log is not None
    assert ([record["epoch"] for record in log.epochs], log.resumed, log.best_epoch) == ([1], [], None)


def test_several_evaluations_each_have_their_part(run: Path) -> None:
    write_evaluation(run / "evaluation" / "dev", repeat=1)
    page = page_of(run)
    ids = [value for name, value in page.attributes if name == "id" and value.startswith("evaluation-")]
    assert ids == ["evaluation-1", "evaluation-2"]
    assert -1 < page.text.index("Answers on test") < page.text.index("Answers on dev")


def test_same_run_same_bytes_and_no_other_file(run: Path) -> None:
    before = set(run.rglob("*"))
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    assert set(run.rglob("*")) - before == {run / "report.html"}


def test_failed_write_keeps_the_old_report(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "report.html").write_text("old", encoding="utf-8")

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("thalweg.files.os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_report(run)
    assert (run / "report.html").read_text(encoding="utf-8") == "old"
    assert not list(run.glob(".report*"))


@pytest.mark.parametrize("exists", [True, False])
def test_not_a_directory(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "model.safetensors"
    if exists:
        path.write_bytes(b"")
    with pytest.raises(DataError, match="expected a run directory, got"):
        write_report(path)


def test_samples_are_fair_and_counts_exact(tmp_path: Path) -> None:
    folder = tmp_path / "evaluation" / "big"
    folder.mkdir(parents=True)
    items = [{"source": str(n), "references": ["x"], "answers": [], "correct": n % 4 == 0} for n in range(2000)]
    (folder / "predictions.jsonl").write_text(lines(*items), encoding="utf-8")
    record = read_run(tmp_path).evaluations[0]
    assert (record.items, record.correct, len(record.right), len(record.wrong)) == (2000, 500, 8, 8)
    assert all(int(item["source"]) % 4 == 0 for item in record.right)
    assert max(int(item["source"]) for item in record.wrong) > 1000


def test_long_attention_is_cut_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "evaluation" / "long"
    folder.mkdir(parents=True)
    item = {"source": ["a"] * 200, "prediction": ["b"] * 90, "reference": "", "weights": [[0.005] * 200] * 90}
    (folder / "attention.json").write_text(json.dumps([item]), encoding="utf-8")
    page = page_of(tmp_path)
    assert "the first 60 symbols" in page.text
    assert sum(value.startswith("--w:") for _, value in page.attributes) == 3600


def test_settings_that_do_nothing_are_left_out() -> None:
    model = {"family": "pretrained", "checkpoint": "byt5", "decoder": "", "shape": {}, "lora": 0, "lora_alpha": 0.0}
    shown = describe(StringReport().shape({**model, "masked_epochs": 0, "masked_share": 0.15, "freeze": []}))
    assert shown == "family pretrained · checkpoint byt5"
    assert "lora alpha 0.0" in describe(StringReport().shape({**model, "lora": 8}))


def test_difference_marks_only_what_differs() -> None:
    assert difference("θ ɔ t", "ð ɔ t") == "<bdi><mark>θ</mark> ɔ t</bdi>"
    assert difference("<a>", "<b>") == "<bdi>&lt;<mark>a</mark>&gt;</bdi>"
    assert difference("cafe\u0301", "cafe") == "<bdi>caf<mark>e\u0301</mark></bdi>"
    assert difference("same", "same") == "<bdi>same</bdi>"
    assert difference("", "x") == "<bdi></bdi>"


def test_symbols_can_be_seen() -> None:
    assert symbol("\t") == "<bdi>U+0009</bdi>"
    assert symbol("\u00a0") == "<bdi>␣</bdi>"
    assert symbol("") == "<bdi>∅</bdi>"
    assert symbol("</s>") == "<bdi>&lt;/s&gt;</bdi>"


@pytest.mark.parametrize(
    "values", [[0.0], [0.0, 0.0], [-3.0, -3.0], [1e-6, 1.0], [1e300, 1.0], [1e308, -1e308], [5e-324, 1.0]]
)
def test_curves_of_odd_values(values: list[float]) -> None:
    svg = curve_svg([Curve("x", "first", tuple(enumerate(values, start=1)))], prefix="p-", best=1, resumed=[1])
    Page(svg)
    assert "nan" not in svg.lower()
    assert "#0" not in svg  # every stand-in colour was exchanged
