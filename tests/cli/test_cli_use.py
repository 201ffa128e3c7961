"""``thalweg evaluate`` and ``thalweg predict`` on a trained model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file


def test_evaluate_prints_scores_and_writes_files(cli: Any, run: Path, pairs: Path) -> None:
    report = (run / "report.html").read_text(encoding="utf-8")
    done = cli("evaluate", run, pairs, "--k", 3)
    assert done.exit_code == 0, done.output
    metrics = [line.split()[0] for line in done.stdout.splitlines()[2:8] if line.strip()]
    assert metrics[:4] == ["accuracy", "CER", "WER", "WER@3"]
    for name in ("metrics.json", "predictions.jsonl", "worst.tsv", "confusions.tsv", "attention.json"):
        path = run / "evaluation" / "pairs" / name
        assert path.is_file()
        assert str(path) in done.stdout
    assert str(run / "report.html") in done.stdout
    assert (run / "report.html").read_text(encoding="utf-8") != report
    assert "60 items" in done.stderr


def test_evaluate_json(cli: Any, run: Path, pairs: Path) -> None:
    options = ["--search", "greedy", "--references", "any", "--name", "here", "--json"]
    done = cli("evaluate", run, pairs, *options)
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["directory"] == str(run / "evaluation" / "here")
    assert facts["items"] == len({line.split("\t")[0] for line in pairs.read_text().splitlines()})
    score = facts["scores"]["cer"]
    assert score["low"] <= score["value"] <= score["high"]
    written = json.loads((run / "evaluation" / "here" / "metrics.json").read_text())
    assert written["scores"] == facts["scores"]


def test_evaluate_takes_the_model_file(cli: Any, run: Path, pairs: Path) -> None:
    done = cli("evaluate", run / "model.safetensors", pairs, "--search", "greedy")
    assert done.exit_code == 0, done.output
    assert (run / "evaluation" / "pairs" / "metrics.json").is_file()


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_run_without_a_model(cli: Any, tmp_path: Path, pairs: Path, command: str) -> None:
    done = cli(command, tmp_path, pairs)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "model.safetensors: expected a checkpoint, got no such file; train first" in done.stderr


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize("damage", ["foreign", "truncated"])
def test_model_that_is_none(cli: Any, run: Path, pairs: Path, command: str, damage: str) -> None:
    model = run / "model.safetensors"
    if damage == "foreign":
        save_file({"weight": torch.ones(2)}, model)
    else:
        model.write_bytes(model.read_bytes()[:200])
    done = cli(command, run, pairs)
    assert done.exit_code == 2
    said = "got a safetensors file of another kind" if damage == "foreign" else "expected a whole safetensors"
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_evaluate_wrong_input(cli: Any, trained: Path, tmp_path: Path) -> None:
    assert "absent.tsv: expected a text file" in cli("evaluate", trained, "absent.tsv").stderr
    file = tmp_path / "column.tsv"
    file.write_text("abc\n")
    assert "column.tsv:1: expected 2 columns" in cli("evaluate", trained, file).stderr
    assert cli("evaluate", trained, file, "--search", "astar").exit_code == 2
    assert cli("evaluate", trained, file, "--k", 0).exit_code == 2


def test_predict_tsv_from_standard_input(cli: Any, trained: Path) -> None:
    done = cli("predict", trained, "--k", 3, stdin="abc\nfed\n")
    assert done.exit_code == 0, done.output
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["abc"] * 3 + ["fed"] * 3
    for _, _, log_prob, probability in rows:
        assert math.isclose(math.exp(float(log_prob)), float(probability), rel_tol=1e-4)
    assert len({row[1] for row in rows[:3]}) == 3


def test_predict_jsonl_agrees_with_tsv(cli: Any, trained: Path) -> None:
    lines = cli("predict", trained, "--k", 3, "--format", "jsonl", stdin="abc\n\nfed\n").stdout.splitlines()
    objects = [json.loads(line) for line in lines]
    assert [item["source"] for item in objects] == ["abc", "", "fed"]
    assert objects[1] == {"source": "", "answers": [], "unknown": []}
    assert set(objects[0]["answers"][0]) == {"text", "log_prob", "probability", "share", "finished", "optimal"}
    assert sum(answer["share"] for answer in objects[0]["answers"]) == pytest.approx(1)
    rows = cli("predict", trained, "--k", 3, stdin="abc\n\nfed\n").stdout.splitlines()
    expected = [
        f"{item['source']}\t{answer['text']}\t{answer['log_prob']:.6f}\t{answer['probability']:.6g}"
        for item in objects
        for answer in item["answers"] or [None]
        if answer is not None
    ]
    assert [row for row in rows if row != "\t\t\t"] == expected
    assert rows[3] == "\t\t\t"


def test_predict_file_text_and_stdin_agree(cli: Any, trained: Path, pairs: Path) -> None:
    sources = [line.split("\t")[0] for line in pairs.read_text().splitlines()][:10]
    short = pairs.with_name("short.tsv")
    short.write_text("".join(f"{source}\tignored\n" for source in sources))
    by_file = cli("predict", trained, short).stdout
    by_text = cli("predict", trained, *(f"--text={source}" for source in sources)).stdout
    by_stdin = cli("predict", trained, "-", "--batch-size", 3, stdin="\n".join(sources)).stdout
    assert by_file == by_text == by_stdin
    assert len(by_file.splitlines()) == 10


def test_predict_attention(cli: Any, trained: Path) -> None:
    done = cli("predict", trained, "--text", "abc", "--attention", "--format", "jsonl")
    (answer,) = json.loads(done.stdout)["answers"]
    assert all(math.isclose(sum(row), 1, abs_tol=1e-4) and len(row) == 3 for row in answer["attention"])
    refused = cli("predict", trained, "--text", "abc", "--attention")
    assert refused.exit_code == 2
    assert "--attention needs --format jsonl" in refused.stderr


def test_unknown_symbols_are_reported_once(cli: Any, trained: Path) -> None:
    done = cli("predict", trained, stdin="aжb\nжa\naé\n")
    assert done.exit_code == 0
    notes = done.stderr.splitlines()
    assert len(notes) == 2
    assert notes[0].startswith("note: symbol `ж` (U+0436) was not in the training data, first in `aжb`")
    assert "`é` (U+00E9)" in notes[1]
    assert len(done.stdout.splitlines()) == 3


def test_unknown_symbols_are_copied(cli: Any, trained: Path) -> None:
    done = cli("predict", trained, "--unknown", "copy", "--format", "jsonl", stdin="aж b\nжж\n")
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert "ж" in first["answers"][0]["text"]
    assert first["unknown"] == ["ж", " "]
    copied = {"text": "жж", "log_prob": 0.0, "probability": 1.0, "share": 1.0, "finished": True, "optimal": True}
    assert second["answers"][0] == copied
    assert "copied" in done.stderr


def test_greedy_notes_that_it_gives_one_answer(cli: Any, trained: Path) -> None:
    done = cli("predict", trained, "--search", "greedy", "--k", 5, stdin="abc\n")
    assert len(done.stdout.splitlines()) == 1
    assert "greedy search gives one answer" in done.stderr


def test_nucleus_depends_on_its_seed_alone(cli: Any, trained: Path) -> None:
    def draw(seed: int) -> str:
        options = ["--search", "nucleus", "--k", 4, "--temperature", 2.0, "--top-p", 1.0, "--top-k", 0]
        return cli("predict", trained, *options, "--seed", seed, "--max-length", 6, stdin="abc\n").stdout

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["absent.txt"], "absent.txt: expected a text file, got no such file"),
        (["--text", "a\tb"], "--text must be one line without tabs"),
        (["--text", "a", "file.txt"], "give a file or --text, got both"),
        (["--search", "nucleus", "--top-p", "2"], "search.top_p must be in (0, 1], got 2.0"),
        (["--temperature", "0"], "search.temperature must be positive, got 0.0"),
        (["--max-length", "-1"], "must be 0 or more"),
        (["--device", "abacus"], "device `abacus`"),
    ],
)
def test_predict_wrong_input(cli: Any, trained: Path, options: list[str], said: str) -> None:
    done = cli("predict", trained, *options, stdin="abc\n")
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert said in done.stderr


def test_predict_invalid_utf8_names_the_line(cli: Any, trained: Path) -> None:
    done = cli("predict", trained, "--batch-size", 1, stdin=b"abc\n\xff\n")
    assert done.exit_code == 2
    assert "<stdin>:2: expected UTF-8" in done.stderr
    assert done.stdout.startswith("abc\t"), "what came before is answered"
