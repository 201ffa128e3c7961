"""The tools are content, the documentation builds, and what it shows can be run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import yaml

import thalweg

ROOT = Path(__file__).resolve().parents[1]
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.is_file()]
NO_RUN = "<!-- no-run -->"


def tool(name: str) -> str:
    """The program installed beside this Python, not one that happens to be on the path."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not installed; `make setup` installs it")
    return str(path)


def run(*command: str, **environment: str) -> None:
    """A command that must succeed and warn of nothing."""
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    warnings = [line for line in ran.stdout.splitlines() if re.match(r"\W*warn(ing)?\b", line, re.IGNORECASE)]
    assert not warnings, ran.stdout


def test_ruff_check() -> None:
    run(tool("ruff"), "check", "--no-cache", "--output-format", "concise", ".")


def test_ruff_format() -> None:
    run(tool("ruff"), "format", "--no-cache", "--check", ".")


@pytest.mark.slow  # as long as a tenth of all others; `make lint`, the hook and the workflow run it
def test_pyright() -> None:
    # The wrapper would otherwise say that a newer version exists.
    quiet = {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    run(tool("pyright"), "--warnings", "--pythonpath", sys.executable, **quiet)


def without_ornaments(folder: Path) -> Path:
    """The configuration of the site without what takes half of the time and warns of nothing.

    That is the index of the search in the page, colours in code, and the line breaks of long signatures, for each of
    which a process is started. Paths are those of the repository.
    """
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    settings["docs_dir"] = str(ROOT / settings["docs_dir"])
    settings["plugins"] = [each for each in settings["plugins"] if "mkdocstrings" in each]
    python = settings["plugins"][0]["mkdocstrings"]["handlers"]["python"]
    python["paths"] = [str(ROOT / path) for path in python["paths"]]
    python["options"]["extensions"] = [str(ROOT / path) for path in python["options"]["extensions"]]
    python["options"]["separate_signature"] = False
    (colours,) = (each for each in settings["markdown_extensions"] if "pymdownx.highlight" in each)
    colours["pymdownx.highlight"] = {"use_pygments": False}
    written = folder / "mkdocs.yml"
    written.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return written


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_docs_build(tmp_path: Path, whole: bool) -> None:
    config = ROOT / "mkdocs.yml" if whole else without_ornaments(tmp_path)
    site = tmp_path / "site"
    program = tool("mkdocs")  # not --quiet: it hides warnings from --strict too
    run(program, "build", "--strict", "-f", str(config), "--site-dir", str(site), NO_MKDOCS_2_WARNING="1")
    assert (site / "index.html").is_file()
    rooms = [name for name in thalweg.__all__ if inspect.ismodule(getattr(thalweg, name))]
    for room in [*rooms, "learning.losses", "recipes"]:
        page = (site / "reference" / f"{room.split('.')[-1]}.html").read_text("utf-8")
        module = importlib.import_module(f"thalweg.{room}")
        names = [x for x in module.__all__ if isinstance(getattr(module, x), type | FunctionType)]
        # A function may stand in a module of its own name, under which its page then has it.
        assert [x for x in names if not re.search(rf'id="thalweg\.{room}\.({x}\.)?{x}"', page)] == [], room


def test_reference_pages_say_where_their_names_are() -> None:
    """A module that a page names in words is one that it shows."""
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        text = page.read_text("utf-8")
        named, shown = (re.findall(each, text, re.MULTILINE) for each in (r"`(thalweg[\w.]*)`", r"^::: (\S+)$"))
        assert named, page.name
        assert set(named) <= set(shown), page.name


def test_the_site_is_configured() -> None:
    """What a build without ornaments does not look at, by the program that builds it: it raises what is wrong."""
    load_config = pytest.importorskip("mkdocs.config", reason="mkdocs is not installed").load_config
    found = load_config(str(ROOT / "mkdocs.yml"))
    assert {"search", "mkdocstrings"} <= {name.split("/")[-1] for name in found.plugins}


def test_the_package_says_that_it_is_typed() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["scikit-build"]
    # All that is in it and not ignored, but what the extension is compiled from.
    assert build["wheel"] == {"packages": ["src/thalweg"], "exclude": ["thalweg/kernels/cpu/csrc"]}
    assert (ROOT / "src" / "thalweg" / "py.typed").is_file()
    assert "typed" not in (ROOT / ".gitignore").read_text("utf-8")


def test_hooks_and_workflow_run_what_make_runs() -> None:
    lint = (ROOT / "Makefile").read_text("utf-8").split("\nlint:")[1].split("\n\n")[0]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
    *quick, last = hooks
    asked = [hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude") for hook in quick]
    assert (last["entry"], last["stages"]) == (".ci/run", ["pre-push"])
    assert asked == [line.removeprefix("$(BIN)/").removesuffix(" .") for line in lint.split("\n\t")[1:]]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    assert [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step] == [".ci/run", "make lint"]


class Block(NamedTuple):
    """A fenced block of a page; ``line`` is the number of its first line of code."""

    language: str
    code: str
    line: int
    runs: bool


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown page, those indented in a list or an admonition included."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = re.match(r"(\s*)(`{3,}|~{3,})\s*\{?\s*\.?([\w+-]*)", lines[number])
        start, number = number, number + 1
        if not opening:
            continue
        indent, fence, language = opening.groups()
        while number < len(lines) and not re.fullmatch(rf"\s*{fence[0]}{{{len(fence)},}}\s*", lines[number]):
            number += 1
        if number == len(lines):
            raise ValueError(f"line {start + 1}: a fence is opened and never closed")
        code = "".join(f"{line.removeprefix(indent)}\n" for line in lines[start + 1 : number])
        before = next((line for line in reversed(lines[:start]) if line.strip()), "")
        yield Block(language.lower(), code, start + 2, before.strip() != NO_RUN)
        number += 1


def run_block(block: Block, namespace: dict[str, Any], where: str) -> None:
    """Compiles a block, and runs it unless it is marked; errors show the line of the page."""
    if re.match(r"\s*>>>", block.code):
        examples = doctest.DocTestParser().get_examples(block.code)
        for example in examples:
            compile(example.source, where, "single", dont_inherit=True)
        if block.runs:
            said: list[str] = []
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            case = doctest.DocTest(examples, namespace, where, where, block.line - 1, block.code)
            runner.run(case, out=said.append, clear_globs=False)
            assert not said, "".join(said)
            namespace.update(case.globs)  # the case worked on a copy
        return
    code = compile("\n" * (block.line - 1) + block.code, where, "exec", dont_inherit=True)
    if block.runs:
        exec(code, namespace)


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text(encoding="utf-8")) if block.language in {"python", "py"}]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = python_blocks(page)
    if not found:
        pytest.skip("no Python on this page")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        run_block(block, namespace, str(page.relative_to(ROOT)))


def commands(block: Block) -> Iterator[tuple[str, ...]]:
    """The words of every ``thalweg`` command in a shell block; in a session only those after a prompt."""
    text = block.code.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    if any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set("|&;()"):
                while command and re.match(r"\w+=", command[0]):
                    command.pop(0)  # an environment variable set for this command
                if command and Path(command[0]).name == "thalweg":
                    yield tuple(command[1:])
                command = []
            else:
                command.append(word)


def unknown_command(root: Any, words: tuple[str, ...]) -> str | None:
    """The first word of a command line that should be a subcommand and is not one."""
    command = root
    for word in words:
        if not hasattr(command, "commands"):
            return None
        if word.startswith(("-", "<", ">")):
            continue
        if word not in command.commands:
            return word
        command = command.commands[word]
    return None


def command_line() -> Any:
    """The root command as the console script has it."""
    import typer.main

    return typer.main.get_command(importlib.import_module("thalweg.cli.main").app)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_commands_exist(page: Path) -> None:
    shell = {"console", "bash", "sh", "shell"}
    found = [block for block in blocks(page.read_text(encoding="utf-8")) if block.language in shell]
    lines = [(block.line, words) for block in found for words in commands(block)]
    if not lines:
        pytest.skip("no thalweg command on this page")
    root = command_line()
    wrong = [
        f"{page.relative_to(ROOT)}:{line}: no command `{word}` in: thalweg {' '.join(words)}"
        for line, words in lines
        if (word := unknown_command(root, words))
    ]
    assert not wrong, "\n".join(wrong)


MADE_UP = """\
# A page

```python
x = 1
```

<!-- no-run -->
```python
x = missing
```

1. In a list:

    ```python title="again"
    x += 1
    assert x == 2
    ```

```python
>>> x + 1
3
>>> y = x
```

```python
assert y == 2
```

```console
$ THALWEG_DATA=d thalweg recipe run demo \\
    --out runs
thalweg is what this prints
$ cat words.txt | .venv/bin/thalweg --debug predict RUN - && thalweg
```
"""


def test_blocks_are_found_and_run_in_order() -> None:
    found = list(blocks(MADE_UP))
    assert [block.language for block in found] == ["python"] * 5 + ["console"]
    assert [block.runs for block in found] == [True, False, True, True, True, True]
    assert found[0].line == 4
    namespace: dict[str, Any] = {}
    for block in found[:-1]:
        run_block(block, namespace, "page.md")
    expected = [("recipe", "run", "demo", "--out", "runs"), ("--debug", "predict", "RUN", "-"), ()]
    assert list(commands(found[-1])) == expected


@pytest.mark.parametrize(
    ("code", "runs", "error"),
    [
        ("x = missing\n", True, NameError),
        ("x = = 1\n", False, SyntaxError),
        (">>> x = = 1\n", False, SyntaxError),
        (">>> 1 + 1\n3\n", True, AssertionError),
    ],
)
def test_block_runner_can_fail(code: str, runs: bool, error: type[Exception]) -> None:
    with pytest.raises(error):
        run_block(Block("python", code, 1, runs), {}, "page.md")


def test_command_checker_can_fail() -> None:
    class Node(NamedTuple):
        commands: dict[str, object]

    root = Node({"train": object(), "recipe": Node({"run": object()})})
    assert unknown_command(root, ("recipe", "run", "demo")) is None
    assert unknown_command(root, ("train", "x.yaml")) is None
    assert unknown_command(root, ("--help",)) is None
    assert unknown_command(root, ("recipe", "cook")) == "cook"
    assert unknown_command(root, ("trian", "x.yaml")) == "trian"
