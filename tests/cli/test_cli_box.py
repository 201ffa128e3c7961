"""The model in the box, and exports, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_first_command(cli):
    found = cli("predict", "english", "--text", "Hannah")
    assert (found.exit_code, found.stdout) == (0, "Hannah\tHH AE N AH\t0.000000\t1\tdictionary\n")


def test_lines_of_a_file(cli):
    Path("words.txt").write_text("Hannah\nblorptastic\n\n£5\n", encoding="utf-8")
    found = cli("predict", "english", "words.txt", "--k", 2, "--format", "jsonl")
    assert found.exit_code == 0
    records = [json.loads(line) for line in found.stdout.splitlines()]
    assert [len(record["answers"]) for record in records] == [1, 2, 0, 1]
    assert records[3]["unknown"] == ["£"]
    assert "`£` (U+00A3)" in found.stderr
    assert "left out" in found.stderr


def test_options_that_do_not_go_with_it(cli):
    for words in (("--features", "V"), ("--unknown", "copy"), ("--ensemble", "english")):
        found = cli("predict", "english", "--text", "a", *words)
        assert found.exit_code == 2
        assert "model in the box" in found.stderr


def test_show_and_evaluate(cli):
    assert "trainable parameters" in cli("show", "english").stdout
    Path("test.tsv").write_text("thalweg\tTH AA L W EH G\n", encoding="utf-8")
    found = cli("evaluate", "english", "test.tsv", "--device", "cpu")
    assert found.exit_code == 0, found.stderr
    assert (Path("runs") / "english-boxed" / "report.html").is_file()


def test_export(cli):
    found = cli("export", "english", "--format", "onnx", "--out", "out", "--text", "hannah", "--text", "a")
    assert found.exit_code == 0, found.stderr
    assert "verified on 2 sources" in found.stderr
    assert (Path("out") / "runner.py").is_file()
    absent = cli("export", "absent", "--out", "out2")
    assert (absent.exit_code, Path("out2").exists()) == (2, False)
    assert "expected a checkpoint" in absent.stderr
    assert cli("export", "english").exit_code == 2
