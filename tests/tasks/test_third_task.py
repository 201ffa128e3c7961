"""A third task, all of it in ``line_task.py``, does from the command line what the other two do."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import thalweg
from thalweg.tasks import registry
from thalweg.tasks.boxed.models import list_boxed

SOURCE = Path(thalweg.__file__).parent


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    monkeypatch.setenv("NO_COLOR", "1")
    registry.register("line", "line_task:TASK")


@pytest.fixture
def points(tmp_path: Path) -> Path:
    path = tmp_path / "points.tsv"
    path.write_text("".join(f"{x / 8}\t{x / 4 + 1}\n" for x in range(-8, 9)))
    return path


def run(*words: object) -> str:
    from thalweg.cli.main import app

    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output + str(done.stderr)
    return done.stdout


def test_a_task_of_one_file_does_everything(tmp_path: Path, points: Path) -> None:
    out = tmp_path / "run"
    assert f"model   {out / 'model.safetensors'}" in run("train", "--task", "line", points, "--out", out)
    found = json.loads(run("evaluate", out, points, "--json"))
    assert found["scores"]["mae"]["value"] < 0.2
    assert found["items"] == 17
    assert "MAE" in run("evaluate", out, points)
    x, y = run("predict", out, "2.0").strip().split("\t")
    assert (x, round(float(y))) == ("2.0", 5)
    assert json.loads(run("predict", out, "2.0", "--format", "jsonl"))["source"] == "2.0"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "17 points" in page
    assert "MAE" in page
    assert "trainable parameters" in run("show", out)
    assert "page " in run("diagnose", out, "--rows", 8, "--steps", 2)
    assert json.loads((out / "diagnosis.json").read_text())["reading"]["shuffled"] > 0.1
    run("train", "--resume", "--out", out)
    assert next(thalweg.load(out).predict(["2.0"])).text == y
    assert thalweg.evaluate(out, str(points)).scores["mae"].value == found["scores"]["mae"]["value"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_task_of_one_file_is_swept(tmp_path: Path, points: Path, workers: int) -> None:
    settings = {"task": "line", "data": {"path": str(points)}, "training": {"epochs": 5}}
    settings["sweep"] = {"space": {"learning_rate": [1e-6, 0.1]}, "method": "grid"}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    said = run("sweep", config, "--out", tmp_path / "sweep", "--workers", workers)
    assert "best    trial 1" in said
    assert "learning_rate: 0.1" in (tmp_path / "sweep" / "best.yaml").read_text()


def test_what_it_does_not_take_is_one_line(tmp_path: Path, points: Path) -> None:
    from thalweg.cli.main import app

    out = tmp_path / "run"
    run("train", "--task", "line", points, "--out", out, "epochs=1")
    for words in (["--width", 3], ["--text", "x"], ["--vote"]):
        done = CliRunner().invoke(app, ["predict", str(out), "1", *map(str, words)])
        assert done.exit_code == 2
        assert f"{words[0]} does not go with such a run; leave it out" in done.stderr


def test_a_task_may_have_no_subject_and_no_example() -> None:
    from thalweg.errors import ConfigError
    from thalweg.tasks.base import Task

    task = registry.task_named("line")
    for ask, said in ((Task.subject, "thalweg diagnose"), (Task.example, "thalweg show")):
        with pytest.raises(ConfigError, match=f"the task line has nothing for `{said}`"):
            ask(task, None)


# No room above the tasks, and nothing that tasks share, knows one of them by name.
NAMELESS = ("cli", "recipes", "serve", "sweeps", "tasks/report", "tasks/diagnosis", "tasks/boxed")
KNOWN = registry.list_tasks()
MODELS = {name for task in KNOWN for name in registry.task_named(task).presets} - {"auto"}  # devices are called so too
MODELS |= set(list_boxed())
TASK = re.compile(rf"\b(?:{'|'.join(KNOWN)})\b")
FOLDERS = tuple(f"thalweg.tasks.{path.parent.name}." for path in (SOURCE / "tasks").glob("*/task.py"))


def named_tasks(tree: ast.Module) -> Iterator[str]:
    """Where code names a task or a model of one: in a string, or by an import of its folder. Prose does not count."""
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and node not in prose else None
        if isinstance(text, str) and (TASK.search(text) or text in MODELS):
            yield f"{node.lineno}: {text!r}"
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(FOLDERS):
            yield f"{node.lineno}: {node.module}"


def test_no_room_names_a_task() -> None:
    files = [path for room in NAMELESS for path in (SOURCE / room).rglob("*.py")]
    files += (path for path in (SOURCE / "tasks").glob("*.py") if path.name != "__init__.py")  # which lists them all
    assert len(files) > 70
    found = [
        f"{path.relative_to(SOURCE)}:{line}" for path in files for line in named_tasks(ast.parse(path.read_text()))
    ]
    # Experiments measure models of their own and train none; what they borrow is no choice between tasks.
    assert not [line for line in found if not line.startswith("recipes/experiments/")]


def test_the_checker_can_fail() -> None:
    imported = "from thalweg.tasks.transduce.transducer import load", "from thalweg.tasks.pronounce import task"
    for code in (
        "x == 'classify'",
        *imported,
        "run == 'english'",
        "{'transduce': 1}",
        "f(help='classify, or not')",
        "MODELS = ('lstm',)",
    ):
        assert list(named_tasks(ast.parse(code)))
    assert not list(named_tasks(ast.parse("'''Images to classify.'''\nfrom thalweg.tasks import load")))
