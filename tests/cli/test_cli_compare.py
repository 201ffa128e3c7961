"""``thalweg evaluate RUN RUN ... TEST``: several runs side by side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def two(cli: Any, run: Path, pairs: Path, tiny: tuple[str, ...], tmp_path: Path) -> tuple[Path, Path]:
    other = tmp_path / "other"
    done = cli("train", "--data", pairs, "--dev", pairs, "--out", other, *tiny, "hidden=12")
    assert done.exit_code == 0, done.output
    return run, other


def test_compare_prints_and_writes(cli: Any, two: tuple[Path, Path], pairs: Path) -> None:
    done = cli("evaluate", *two, pairs, "--k", 3)
    assert done.exit_code == 0, done.output
    head, _, *rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert head[:3] == ["metric", "run", "value"]
    assert [row[:2] for row in rows[:4]] == [
        ["accuracy", "run"],
        ["accuracy", "other"],
        ["CER", "run"],
        ["CER", "other"],
    ]
    assert "tok:none" in done.stdout
    assert "60 items, 2 runs, differences from run" in done.stderr
    folder = two[0] / "evaluation" / "pairs" / "comparison"
    for name in ("comparison.json", "answers.tsv", "report.html"):
        assert (folder / name).is_file()
        assert str(folder / name) in done.stdout
    for run in two:
        assert (run / "evaluation" / "pairs" / "metrics.json").is_file()
        assert "First answers" in (run / "report.html").read_text(encoding="utf-8")


def test_compare_json(cli: Any, two: tuple[Path, Path], pairs: Path) -> None:
    words = [*two, pairs, "--search", "greedy", "--name", "here", "--json"]
    done = cli("evaluate", *words)
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["report"] == str(two[0] / "evaluation" / "here" / "comparison" / "report.html")
    first, second = facts["models"]
    assert "differences" not in first
    expected = second["scores"]["cer"]["value"] - first["scores"]["cer"]["value"]
    assert second["differences"]["cer"]["value"] == pytest.approx(expected)
    assert cli("evaluate", *words).stdout == done.stdout


def test_compare_mistakes(cli: Any, two: tuple[Path, Path], pairs: Path, tmp_path: Path) -> None:
    cases = {
        "got it twice": [two[0], two[1], two[0], pairs],
        "absent/model.safetensors: expected a checkpoint, got no such file": [two[0], tmp_path / "absent", pairs],
        "no test pairs": two,
        "standard input can be read once": [*two, "-"],
        "pairs.tsv: expected": [two[0], pairs, pairs],
    }
    for said, words in cases.items():
        done = cli("evaluate", *words)
        assert done.exit_code == 2, said
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""


def test_runs_of_one_name(cli: Any, two: tuple[Path, Path], pairs: Path, tmp_path: Path) -> None:
    same = shutil.copytree(two[0], tmp_path / "deep" / "run")
    done = cli("evaluate", two[0], same, two[1], pairs, "--search", "greedy")
    assert done.exit_code == 0, done.output
    assert "p (Holm)" in done.stdout
    assert "deep/run" in done.stdout
