"""A tiny task (write the letters backwards), a model trained on it, and two ways to call the command line."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

SOURCE = Path(__file__).resolve().parents[2] / "src"
TINY = ("hidden=8", "embedding=8", "epochs=1", "batch_size=16", "device=cpu")

Cli = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[str]"]


def invoke(*args: object, stdin: str | bytes | None = None) -> Result:
    from thalweg.cli.main import app

    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


def write_pairs(path: Path, count: int = 60, letters: str = "abcdef") -> Path:
    rng = random.Random(0)
    words = ["".join(rng.choices(letters, k=rng.randint(2, 6))) for _ in range(count)]
    path.write_text("".join(f"{word}\t{word[::-1]}\n" for word in words), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No colour, no data sets of the machine."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.delenv("THALWEG_DATA", raising=False)


@pytest.fixture
def cli() -> Cli:
    """Run a command in this process."""
    return invoke


@pytest.fixture
def tiny() -> tuple[str, ...]:
    """Settings of a model that trains in a moment."""
    return TINY


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "pairs.tsv")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("trained")
    pairs = write_pairs(folder / "pairs.tsv")
    done = invoke("train", "--data", pairs, "--out", folder / "run", *TINY)
    assert done.exit_code == 0, done.output
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run that may be written to."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command in a process of its own, which a signal can hit; none outlives its test."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: object, **options: object) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
        code = "from thalweg.cli.main import run; run()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""},
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            **options,  # type: ignore[call-overload]
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
