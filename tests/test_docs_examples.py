"""The programs of the documentation, on a little of their data."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TAGGER = ROOT / "docs" / "examples" / "crf_tagger.py"


def sentences(path: Path, count: int) -> str:
    return "\n\n".join(path.read_text(encoding="utf-8").split("\n\n")[:count]) + "\n\n"


def test_tagger_runs(shared_data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    folder = shared_data / "ud"
    if not (folder / "atis-train.conllu").is_file():
        pytest.skip(f"needs atis-train.conllu and atis-dev.conllu, not in {folder}; set THALWEG_DATA")
    for part, count in (("train", 400), ("dev", 40)):
        name = f"atis-{part}.conllu"
        (tmp_path / name).write_text(sentences(folder / name, count), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(sys, "argv", [str(TAGGER), str(tmp_path)])
    runpy.run_path(str(TAGGER), run_name="__main__")
    from matplotlib import pyplot

    pyplot.close("all")
    said = re.fullmatch(r"dev: (\d+\.\d+)% of (\d+) words right\n", capsys.readouterr().out)
    assert said
    assert float(said[1]) > 75
    assert (tmp_path / "marginals.png").read_bytes().startswith(b"\x89PNG")


def test_tagger_is_the_one_on_its_page() -> None:
    program = TAGGER.read_text(encoding="utf-8")
    assert program in (ROOT / "docs" / "tagger.md").read_text(encoding="utf-8")
    lines = [line for line in program.splitlines() if line.strip() and not line.lstrip().startswith(('"""', "#"))]
    assert len(lines) < 40
