"""Evaluation: every file agrees with the others, and the scores with an oracle that reads the predictions."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
import sacrebleu
from toy_task import toy_config, write_pairs

from oracles.metrics import all_scores, closest, levenshtein
from thalweg.errors import CheckpointError, ConfigError, DataError
from thalweg.learning import checkpoint
from thalweg.tasks import Evaluation, SearchConfig, evaluate, load, train

GAP = "∅"


def records(evaluation: Evaluation) -> list[dict]:
    lines = (evaluation.directory / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def table(evaluation: Evaluation, name: str) -> list[list[str]]:
    lines = (evaluation.directory / name).read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines]


def metrics(evaluation: Evaluation) -> dict:
    return json.loads((evaluation.directory / "metrics.json").read_text(encoding="utf-8"))


def recomputed(evaluation: Evaluation, split=tuple, ks=(), words="item") -> dict[str, float]:
    rows = records(evaluation)
    hypotheses = [[split(a["text"]) for a in row["answers"]] for row in rows]
    return all_scores(hypotheses, [[split(r) for r in row["references"]] for row in rows], ks=ks, words=words)


@pytest.fixture
def run(halfway: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(halfway, tmp_path / "run"))


SEARCHES = {
    "beam": (SearchConfig(search="beam", width=4), 4, (3, 4)),
    "greedy": (SearchConfig(search="greedy"), 5, ()),
    "nucleus": (SearchConfig(search="nucleus", temperature=1.2), 3, (3,)),
}


def test_the_weights_are_read_once(run, toy_files, monkeypatch):
    read, whole = checkpoint.read_tensors, []

    def counted(path, *args, values, **options):
        whole.append(values)
        return read(path, *args, values=values, **options)

    monkeypatch.setattr(checkpoint, "read_tensors", counted)
    evaluate(run, str(toy_files[1]), device="cpu")
    assert sorted(whole) == [False, True], "once for its task, once for all"


@pytest.mark.parametrize("search", SEARCHES)
def test_scores_follow_from_the_predictions(run, toy_files, search):
    how, k, ks = SEARCHES[search]
    found = evaluate(run, str(toy_files[1]), k=k, how=how, device="cpu")
    assert found.directory == run / "evaluation" / "test"
    facts, expected = metrics(found), recomputed(found, ks=ks)
    assert facts["scores"].keys() == expected.keys() == found.scores.keys()
    for name, value in expected.items():
        score = facts["scores"][name]
        assert score["value"] == pytest.approx(value, abs=1e-9), name
        assert score["value"] == found.scores[name].value
        assert score["low"] <= score["value"] <= score["high"]
        assert score["n"] == 56
        assert score["higher_is_better"] == (name in ("accuracy", "bleu"))
    assert 0 < expected["accuracy"] < 1, "a model that is neither perfect nor hopeless tells most"
    assert (facts["pairs"], facts["items"], found.items) == (56, 56, 56)
    assert facts["references"] == "each"
    assert facts["file"] == str(toy_files[1])
    assert facts["search"]["name"] == search
    assert facts["search"]["k"] == (1 if search == "greedy" else k)
    assert facts["words_per_second"] > 0


def test_the_oracle_would_notice(run, toy_files):
    found = evaluate(run, str(toy_files[1]), device="cpu")
    path = found.directory / "predictions.jsonl"
    rows = records(found)
    right = next(row for row in rows if row["correct"])
    right["answers"][0]["text"] += "A"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert recomputed(found)["accuracy"] != pytest.approx(metrics(found)["scores"]["accuracy"]["value"])


def test_predictions(run, toy_files):
    found = evaluate(run, str(toy_files[1]), k=3, device="cpu")
    pairs = [line.split("\t") for line in toy_files[1].read_text().splitlines()]
    rows = records(found)
    assert [[row["source"], *row["references"]] for row in rows] == pairs
    for row in rows:
        assert len(row["answers"]) == 3
        for a in row["answers"]:
            assert a["probability"] == pytest.approx(math.exp(a["log_prob"]))
        keys = [(not a["finished"], -a["log_prob"]) for a in row["answers"]]
        assert keys == sorted(keys)
        assert row["edits"] == levenshtein(row["answers"][0]["text"], row["references"][0])
        assert row["correct"] == (row["edits"] == 0) == (row["answers"][0]["text"] == row["references"][0])
    again = load(run, device="cpu").predict([source for source, _ in pairs], k=3)
    assert [[a["text"] for a in row["answers"]] for row in rows] == [[a.text for a in p.answers] for p in again]


def test_worst_and_confusions(run, toy_files):
    found = evaluate(run, str(toy_files[1]), device="cpu")
    rows = records(found)
    header, *worst = table(found, "worst.tsv")
    assert header == ["source", "references", "prediction", "edits"]
    expected = {
        (row["source"], row["references"][0], row["answers"][0]["text"], str(row["edits"]))
        for row in rows
        if not row["correct"]
    }
    assert {tuple(line) for line in worst} == expected
    assert len(worst) == len(expected)
    edits = [int(line[3]) for line in worst]
    assert edits == sorted(edits, reverse=True)

    header, *lines = table(found, "confusions.tsv")
    assert header == ["gold", "predicted", "count"]
    counts = [int(count) for *_, count in lines]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == sum(edits) == sum(row["edits"] for row in rows)
    assert all(gold != predicted for gold, predicted, _ in lines)
    # Words of equal length that differ at one place leave no doubt about what was taken for what.
    sure = Counter()
    for row in rows:
        gold, mine = row["references"][0], row["answers"][0]["text"]
        if row["edits"] == 1 and len(gold) == len(mine):
            sure.update((a, b) for a, b in zip(gold, mine, strict=True) if a != b)
    written = {(gold, predicted): int(count) for gold, predicted, count in lines}
    assert sure
    assert all(written[pair] >= count for pair, count in sure.items())
    # What is inserted and deleted balances the lengths.
    gaps = sum(c for (g, _), c in written.items() if g == GAP) - sum(c for (_, p), c in written.items() if p == GAP)
    assert gaps == sum(len(row["answers"][0]["text"]) - len(row["references"][0]) for row in rows)


def attention(evaluation: Evaluation) -> list[dict]:
    return json.loads((evaluation.directory / "attention.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("search", SEARCHES)
def test_attention_pictures_belong_to_the_predictions(run, toy_files, search):
    how, k, _ = SEARCHES[search]
    found = evaluate(run, str(toy_files[1]), k=k, how=how, device="cpu")
    pictures = attention(found)
    rows = {row["source"]: row for row in records(found)}
    for picture in pictures:
        row = rows["".join(picture["source"])]
        assert picture["reference"] == row["references"][0]
        best = row["answers"][0]
        ending = ["</s>"] if best["finished"] else []
        assert picture["prediction"] == [*best["text"], *ending]
        assert len(picture["weights"]) == len(picture["prediction"])
        for weights in picture["weights"]:
            assert len(weights) == len(picture["source"])
            assert sum(weights) == pytest.approx(1.0, abs=0.001)
    right = [rows["".join(picture["source"])]["correct"] for picture in pictures]
    several = Counter(row["correct"] for row in rows.values())
    assert Counter(right) == Counter({True: min(6, several[True]), False: min(6, several[False])})


def test_no_attention_no_pictures(toy_files, tmp_path):
    train(toy_config(toy_files[0], epochs=1, model={"attention": "none"}), tmp_path / "run")
    folder = tmp_path / "run" / "evaluation" / "test"
    folder.mkdir(parents=True)
    (folder / "attention.json").write_text("[]")  # of an earlier model
    evaluate(tmp_path / "run", str(toy_files[1]), device="cpu")
    assert not (folder / "attention.json").exists()


def ambiguous_file(path: Path) -> Path:
    """Sources with one, two and three targets, one pair twice."""
    pairs = [
        ("abc", "CBA"),
        ("abc", "XXX"),
        ("fed", "DEF"),
        ("aab", "Q"),
        ("aab", "BAA"),
        ("aab", "BA"),
        ("fed", "DEF"),
    ]
    return write_pairs(path, pairs)


def test_references_each_and_any(run, tmp_path):
    path = str(ambiguous_file(tmp_path / "many.tsv"))
    each = evaluate(run, path, references="each", name="each", device="cpu")
    any_ = evaluate(run, path, references="any", name="any", device="cpu")
    assert (metrics(each)["pairs"], metrics(each)["items"]) == (7, 7)
    assert (metrics(any_)["pairs"], metrics(any_)["items"]) == (7, 3)
    assert [row["references"] for row in records(each)] == [["CBA"], ["XXX"], ["DEF"], ["Q"], ["BAA"], ["BA"], ["DEF"]]
    assert [row["references"] for row in records(any_)] == [["CBA", "XXX"], ["DEF"], ["Q", "BAA", "BA"]]
    for found in (each, any_):
        expected = recomputed(found, ks=(3, 5))
        for name, score in found.scores.items():
            assert score.value == pytest.approx(expected[name], abs=1e-9), name
        for row in records(found):
            assert row["edits"] == closest(row["answers"][0]["text"], row["references"])[0]
    wrong = [line for line in table(any_, "worst.tsv")[1:] if line[0] == "aab"]
    assert all(line[1] == "Q | BAA | BA" for line in wrong)


def test_phones_are_called_per_and_compared_whole(tmp_path):
    pairs = [("ab", "AH B"), ("ba", "B AH"), ("aa", "AH AH"), ("bb", "B B")] * 5
    path = write_pairs(tmp_path / "phones.tsv", pairs)
    train(toy_config(path, dev=path, epochs=2), tmp_path / "run")
    found = evaluate(tmp_path / "run", str(path), k=2, device="cpu")
    assert found.scores["cer"].name == "PER"
    expected = recomputed(found, split=lambda text: tuple(text.split()), ks=(2,))
    assert {name: score.value for name, score in found.scores.items()} == pytest.approx(expected, abs=1e-9)


def test_sentences_have_words(tmp_path):
    pairs = [("ab a", "BA A"), ("ba b", "AB B"), ("a b a", "A B A"), ("bb aa", "BB AA")] * 5
    path = write_pairs(tmp_path / "sentences.tsv", pairs)
    symbols = {"source_symbols": "characters", "target_symbols": "characters"}
    train(toy_config(path, dev=path, epochs=2, data=symbols), tmp_path / "run")
    found = evaluate(tmp_path / "run", str(path), k=2, device="cpu")
    expected = recomputed(found, ks=(2,), words="space")
    rows = records(found)
    texts, gold = [row["answers"][0]["text"] for row in rows], [[row["references"][0] for row in rows]]
    expected |= {
        "bleu-13a": sacrebleu.corpus_bleu(texts, gold, force=True).score,
        "chrf": sacrebleu.corpus_chrf(texts, gold).score,
    }
    assert {name: score.value for name, score in found.scores.items()} == pytest.approx(expected, abs=1e-9)
    signatures = {key: score["signature"] for key, score in metrics(found)["scores"].items() if "signature" in score}
    for key, part in {"bleu": "tok:none", "bleu-13a": "tok:13a", "chrf": "nc:6"}.items():
        assert part in signatures[key]
    assert [line.split()[-1] for line in found.remarks()] == list(signatures.values())


def test_unknown_symbols_in_the_test_file(run, tmp_path):
    path = write_pairs(tmp_path / "strange.tsv", [("aXb", "B?A"), ("éé", "ÉÉ"), ("abc", "CBA")])
    found = evaluate(run, str(path), device="cpu")
    rows = records(found)
    assert [row["references"] for row in rows] == [["B?A"], ["ÉÉ"], ["CBA"]]
    assert not rows[0]["correct"]
    assert found.scores["accuracy"].value == pytest.approx(recomputed(found)["accuracy"])


def test_names_listener_and_model_file(run, toy_files):
    seen = []
    found = evaluate(run / "model.safetensors", str(toy_files[1]), name="again", device="cpu", listener=seen.append)
    assert found.directory == run / "evaluation" / "again"
    assert seen == [{"event": "predicted", "done": 56, "of": 56}]
    first = metrics(found)["scores"]
    second = metrics(evaluate(run, str(toy_files[1]), name="again", device="cpu"))["scores"]
    assert first == second, "the intervals too are the same every time"
    assert not [file for file in found.directory.iterdir() if file.name.endswith(".tmp")]


def test_mistakes(run, toy_files, tmp_path):
    with pytest.raises(ConfigError, match="references must be `each` or `any`, got `all`"):
        evaluate(run, str(toy_files[1]), references="all")
    with pytest.raises(ConfigError, match="k must be at least 1"):
        evaluate(run, str(toy_files[1]), k=0, device="cpu")
    with pytest.raises(DataError, match="no such file"):
        evaluate(run, str(tmp_path / "absent.tsv"), device="cpu")
    with pytest.raises(CheckpointError, match="no such file"):
        evaluate(tmp_path / "absent", str(toy_files[1]))
    assert not (run / "evaluation").exists()
