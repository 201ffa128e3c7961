"""Help, version, errors in general, and the commands that need no model."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import thalweg
from thalweg.errors import ConfigError

HELP_PAGES = [
    *([], ["train"], ["evaluate"], ["predict"], ["serve"], ["align"]),
    *(["recipe"], ["recipe", "list"], ["recipe", "show"], ["recipe", "run"]),
    *(["data"], ["data", "list"], ["data", "show"], ["data", "check"]),
]


@pytest.mark.parametrize("command", HELP_PAGES, ids=" ".join)
def test_every_help_page_has_an_example(cli: Any, command: list[str]) -> None:
    shown = cli(*command, "--help")
    assert shown.exit_code == 0
    _, _, example = shown.stdout.partition("Example:")
    assert f"thalweg {' '.join(command)}".strip() in example


def test_version(cli: Any) -> None:
    assert cli("--version").stdout == f"thalweg {thalweg.__version__}\n"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, thalweg.cli.main; print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_env())
    assert ran.stdout.strip() == "[]"


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(thalweg.__file__).parents[1])}


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "")]
)
def test_idle_threads_sleep_soon_unless_told_otherwise(given: dict[str, str], expected: str) -> None:
    code = "import os, sys, thalweg.cli.main; print(os.environ.get('GOMP_SPINCOUNT', ''), 'torch' in sys.modules)"
    own = {name: value for name, value in _env().items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=own | given)
    assert ran.stdout.split(" ") == [expected, "False\n"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frobnicate"], "frobnicate"),
        (["--frobnicate"], "--frobnicate"),
        (["train", "--frobnicate"], "--frobnicate"),
        (["evaluate"], "RUN"),
        (["recipe", "frobnicate"], "frobnicate"),
        (["predict", "run", "--search", "beem"], "'beam'"),
        (["predict", "run", "--k", "0"], "--k"),
        (["predict", "run", "--precision", "int4"], "'int8'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_with_2(cli: Any, words: list[str], said: str) -> None:
    refused = cli(*words)
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert said in refused.stderr
    assert "; see `" in refused.stderr
    assert refused.stderr.endswith(" --help`\n")


@pytest.mark.parametrize("words", [[], ["recipe"], ["data"]])
def test_a_group_alone_shows_its_page(cli: Any, words: list[str]) -> None:
    shown = cli(*words)
    assert "Commands" in shown.stdout + shown.stderr
    assert "error" not in shown.stderr


@pytest.mark.parametrize("place", ["first", "last"])
def test_debug_keeps_the_exception_and_its_absence_does_not(cli: Any, place: str) -> None:
    command = ["data", "check", "absent.tsv"]
    quiet = cli(*command)
    assert quiet.exit_code == 2
    assert quiet.stdout == ""
    assert quiet.stderr == "error: absent.tsv: expected a text file, got no such file; check the path\n"
    loud = cli("--debug", *command) if place == "first" else cli(*command, "--debug")
    assert type(loud.exception).__name__ == "DataError"


def test_defects_keep_their_traceback(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("thalweg.data.text.named_pairs.open_pairs", broken)
    assert isinstance(cli("data", "check", "x.tsv").exception, ZeroDivisionError)


def test_message_of_an_error_is_one_line(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise ConfigError("first [bold]line\nsecond line " + "long " * 60)

    monkeypatch.setattr("thalweg.data.text.named_pairs.open_pairs", refuse)
    shown = cli("data", "check", "x.tsv").stderr
    assert shown.count("\n") == 1
    assert shown.startswith("error: first [bold]line second line long")


def test_data_check_says_what_is_there(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "phones.tsv"
    file.write_text("cat\tK AE T\ncat\tK AE T\ndog\tD AO G\ndog\tD AA G\n")
    shown = cli("data", "check", file)
    assert shown.exit_code == 0
    assert f"{file}: 4 pairs, 1 duplicate, 1 source with several targets" in shown.stdout
    assert "source  characters, NFC (guessed), 10 symbols" in shown.stdout
    assert "target  spaced, NFC (guessed), 11 symbols" in shown.stdout


def test_data_check_reads_standard_input(cli: Any) -> None:
    shown = cli("data", "check", "-", stdin="ab\tba\ncd\tdc\n")
    assert "<stdin>: 2 pairs" in shown.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "got an empty file"),
        (b"a\tb\nc\n", "bad.tsv:2: expected 2 columns"),
        (b"a\tb\tc\n", "bad.tsv:1: expected 2 columns (source, tab, target), got 3"),
        (b"a\t\n", "bad.tsv:1: expected a target, got an empty field"),
        (b"a\tb\n\xff\tb\n", "bad.tsv:2: expected UTF-8"),
        (gzip.compress(b"a\tb\n" * 1000, mtime=0)[:-9], "cut short or damaged"),
    ],
)
def test_data_check_says_what_is_wrong(cli: Any, tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "bad.tsv"
    file.write_bytes(content)
    shown = cli("data", "check", file)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert said in shown.stderr
    assert shown.stderr.count("\n") == 1


def test_data_list_and_show(cli: Any, tmp_path: Path) -> None:
    listed = cli("data", "list")
    assert listed.exit_code == 0
    assert "cmudict" in listed.stdout
    assert "SIGMORPHON 2021" in listed.stdout
    shown = cli("data", "show", "cmudict:dev", "--lines", 2)
    assert [line.count("\t") for line in shown.stdout.splitlines()] == [1, 1]
    unknown = cli("data", "show", "cmudic:dev")
    assert unknown.exit_code == 2
    assert "did you mean `cmudict`?" in unknown.stderr
    absent = cli("data", "show", "ar2en:train", "--data-root", tmp_path)
    assert absent.exit_code == 2
    assert "github.com/google/transliteration" in absent.stderr


@pytest.mark.parametrize(
    ("started", "on_path", "said"),
    [
        ("/x/.venv/bin/thalweg", None, ".venv/bin/thalweg serve runs/demo"),
        ("/x/.venv/bin/thalweg", "/usr/bin/thalweg", "thalweg serve runs/demo"),
        ("/x/pytest", None, "thalweg serve runs/demo"),
    ],
)
def test_the_next_command_can_be_typed_as_it_stands(
    started: str, on_path: str | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from thalweg.cli import output

    monkeypatch.setattr(sys, "argv", [started])
    monkeypatch.setattr(output.shutil, "which", lambda name: on_path)
    monkeypatch.setattr(output.os.path, "relpath", lambda path: str(path).removeprefix("/x/"))
    output.note_next(["thalweg serve runs/demo"])
    assert capsys.readouterr().err == f"next:\n  {said}\n"


def test_recipe_list_and_show(cli: Any) -> None:
    assert "demo" in cli("recipe", "list").stdout
    assert "cmudict:train" in cli("recipe", "show", "demo").stdout
    wrong = cli("recipe", "show", "demos")
    assert wrong.exit_code == 2
    assert "did you mean `demo`?" in wrong.stderr


@pytest.mark.parametrize("finished", [True, False])
def test_recipe_run_passes_everything_on(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    seen: dict[str, Any] = {}

    def fake(recipe: Any, out: Path, **options: Any) -> SimpleNamespace:
        seen.update(options, recipe=recipe.name, out=out)
        row = {"metric": "wer", "published": "0.2000", "mean": "0.1900", "spread": "0.0100", "runs": "3"}
        return SimpleNamespace(directory=out, report=out / "report.html", table=[row], examples=[], finished=finished)

    monkeypatch.setattr("thalweg.recipes.run_recipe", fake)
    words = ["epochs=1", "hidden=8"]
    options = ["--out", tmp_path / "r", "--data-root", tmp_path, "--seeds", 3, "--fresh"]
    shown = cli("recipe", "run", "demo", *options, *words)
    listener = seen.pop("listener")
    assert callable(listener)
    assert seen == {
        "recipe": "demo",
        "out": tmp_path / "r",
        "root": tmp_path,
        "seeds": 3,
        "overrides": words,
        "fresh": True,
    }
    assert shown.exit_code == (0 if finished else 130)
    assert ("0.1900" in shown.stdout) is finished
