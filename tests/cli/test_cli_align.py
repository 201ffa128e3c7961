"""``thalweg align``: alignments as lines and records, and the audit of a lexicon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WORDS = ["back", "tack", "cat", "cab", "at", "tab", "kabb", "atta", "bat", "tact", "cack", "abba"]


@pytest.fixture
def lexicon(tmp_path: Path) -> Path:
    """Letters as they sound, and one entry that is wrong."""
    pairs = [(word, " ".join(word.replace("ck", "k").replace("c", "k").upper())) for word in WORDS]
    path = tmp_path / "words.tsv"
    lines = [f"{x}\t{y}\n" for x, y in [*pairs, ("cabb", "T A T A")]]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_lines_and_records(cli: Any, lexicon: Path):
    shown = cli("align", lexicon)
    assert shown.exit_code == 0
    rows = [line.split("\t") for line in shown.stdout.splitlines()]
    assert rows[0][:3] == ["back", "B A K", "b|B a|A c+k|K"]
    assert float(rows[0][3]) < 0
    records = [json.loads(line) for line in cli("align", lexicon, "--format", "jsonl").stdout.splitlines()]
    assert [each["line"] for each in records] == list(range(1, len(WORDS) + 2))
    assert records[0]["chunks"][2] == [["c", "k"], ["K"]]
    assert records[0]["log_prob"] == pytest.approx(float(rows[0][3]), abs=1e-4)


def test_audit_puts_the_wrong_entry_first(cli: Any, lexicon: Path):
    shown = cli("align", lexicon, "--audit", 2)
    first, second = (line.split("\t") for line in shown.stdout.splitlines())
    assert first[1:4] == ["13", "cabb", "T A T A"]
    assert float(first[0]) > float(second[0]) > 0
    record = json.loads(cli("align", lexicon, "--audit", 1, "--format", "jsonl").stdout)
    assert record["surprise"] == pytest.approx(float(first[0]), abs=1e-4)


def test_what_was_learned_is_kept(cli: Any, lexicon: Path, tmp_path: Path):
    path = tmp_path / "aligner.safetensors"
    learned = cli("align", lexicon, "--save", path)
    again = cli("align", lexicon, "--aligner", path)
    assert again.stdout == learned.stdout
    assert "passes" in learned.stderr
    assert "passes" not in again.stderr


def test_a_pair_that_nothing_fits(cli: Any, tmp_path: Path):
    path = tmp_path / "pairs.tsv"
    path.write_text("ab\tx y\nb\ty\na\tx y x y x\n", encoding="utf-8")
    rows = cli("align", path, "--no-insert", "--target", 1).stdout.splitlines()
    assert rows[2] == "a\tx y x y x\t\t-inf"
    record = json.loads(cli("align", path, "--no-insert", "--audit", 1, "--format", "jsonl").stdout)
    assert (record["line"], record["chunks"], record["surprise"]) == (3, None, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.tsv"], "no such file"),
        (["--source", "9"], "'--source'"),
        (["--audit", "0"], "'--audit'"),
        (["--format", "xml"], "'--format'"),
        (["--aligner", "absent.safetensors"], "a saved aligner"),
        (["--no-insert", "--no-delete", "--source", "1", "--target", "1"], "no pair can be aligned"),
    ],
)
def test_mistakes_are_one_line(cli: Any, tmp_path: Path, words: list[str], said: str):
    path = tmp_path / "pairs.tsv"
    path.write_text("abc\tx\n", encoding="utf-8")
    shown = cli("align", *(words if words[0].endswith(".tsv") else [path, *words]))
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert shown.stderr.count("\n") == 1
