"""Sweeps that train: plans, the files they leave, kills and going on, the page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from toy_task import QUICK, SMALL

from thalweg.errors import CheckpointError, ConfigError
from thalweg.learning.checkpoint import load_checkpoint
from thalweg.sweeps.store import holding
from thalweg.tasks.config import read_config
from thalweg.tasks.registry import build_config, train
from thalweg.tasks.sweeping import SweepPlan, plan_sweep, run_sweep, saved_sweep

SOURCE = Path(__file__).resolve().parents[2] / "src"


def settings_of(data: Path, sweep: dict[str, Any], **training: Any) -> dict[str, Any]:
    return {
        "data": {"train": str(data)},
        "model": {**SMALL, "hidden": 4, "embedding": 4},
        "search": {"search": "greedy"},
        "training": {**QUICK, "epochs": 2, "metric": "loss", "batch_size": 80, **training},
        "sweep": sweep,
    }


def plan_of(data: Path, sweep: dict[str, Any], **training: Any) -> SweepPlan:
    return plan_sweep(settings_of(data, sweep, **training))


@pytest.fixture
def data(toy_files: tuple[Path, Path]) -> Path:
    return toy_files[0]


def test_values_reach_the_config(data: Path) -> None:
    space = {"model.hidden": [8], "learning_rate": [1e-5], "cell": ["gru"], "encoder_layers": {"low": 1, "high": 2}}
    plan = plan_of(data, {"space": space, "metric": "cer"})
    values = {"model.hidden": 8, "learning_rate": 1e-5, "cell": "gru", "encoder_layers": 2}
    settings = plan.settings(values, seed=5)
    assert [settings["model"][key] for key in ("hidden", "cell", "encoder_layers", "embedding")] == [8, "gru", 2, 4]
    training = settings["training"]
    assert (training["learning_rate"], training["seed"], training["metric"]) == (1e-5, 5, "cer")
    assert (plan.metric, plan.higher) == ("cer", False)


def test_a_sweep_over_families_of_models(data: Path) -> None:
    raw = settings_of(data, {"space": {"model.family": ["recurrent", "transformer"]}, "method": "grid"})
    raw["model"] = {"dropout": 0.0}
    plan = plan_sweep(raw)
    kinds = [plan.settings({"model.family": name}, 0)["model"]["family"] for name in ("recurrent", "transformer")]
    assert kinds == ["recurrent", "transformer"]
    raw["model"], raw["sweep"]["space"] = {"preset": "gru", "hidden": 8}, {"model": ["gru", "lstm"]}
    found = [plan_sweep(raw).settings({"model": name}, 0)["model"] for name in ("gru", "lstm")]
    assert [(model["cell"], model["hidden"]) for model in found] == [("gru", 8), ("lstm", 8)]


def test_settings_of_every_task() -> None:
    raw = {"task": "classify", "data": {"path": "digits"}, "sweep": {"space": {"model.channels": [[8], [8, 16]]}}}
    plan = plan_sweep(raw, ["sweep.seeds=0,1", "sweep.space.learning_rate=[0.1, 0.01]", "sweep.trials=3"])
    settings = plan.settings({"model.channels": [8, 16], "learning_rate": 0.01}, 1)
    assert settings["task"] == "classify"
    assert settings["model"]["channels"] == [8, 16]
    assert (plan.config.seeds, plan.config.trials) == ((0, 1), 3)


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({}, "sweep.space: expected at least one key"),
        ({"space": {"hiden": [1]}}, "did you mean `hidden`"),
        ({"space": {"model.hiden": [1]}}, "did you mean `hidden`"),
        ({"space": {"seed": [1, 2]}}, "use sweep.seeds"),
        ({"space": {"training.metric": ["cer"]}}, "use sweep.metric"),
        ({"space": {"hidden": [1], "model.hidden": [2]}}, "`model.hidden` twice"),
        ({"space": {"hidden": [8]}, "trails": 3}, "`sweep.trails` is not a setting; did you mean `trials`"),
        ({"space": {"hidden": [8]}, "trials": "many"}, "`sweep.trials`"),
        ([1], "expected settings under `sweep`, got list"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(sweep: Any, said: str, data: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(data, sweep)
    assert said in str(caught.value)


def test_grid_with_a_failing_trial(data: Path, tmp_path: Path) -> None:
    sweep = {"space": {"learning_rate": [0.02, 0.0001], "hidden": [6, -1]}, "method": "grid", "seeds": [3, 4]}
    events: list[dict[str, Any]] = []
    result = run_sweep(plan_of(data, sweep), tmp_path / "sweep", workers=0, listener=events.append)
    assert result.reason == "finished"
    assert [trial.state for trial in result.trials] == ["complete", "failed", "complete", "failed"]
    assert "model.hidden must be at least 1, got -1" in result.trials[1].error
    assert result.best is result.trials[0]
    assert result.best.runs.keys() == {3, 4}
    assert events[0]["event"] == "sweep"

    # The winning config is one that `train` takes, and gives the very run that the sweep had.
    best = read_config(tmp_path / "sweep" / "best.yaml")
    assert (best["model"]["hidden"], best["training"]["learning_rate"], best["training"]["seed"]) == (6, 0.02, 3)
    trained = train(build_config(best), tmp_path / "again")
    assert trained.best["loss"] == result.best.runs[3]["value"] == pytest.approx(result.best.runs[3]["metrics"]["loss"])
    first = load_file(tmp_path / "sweep" / "trials" / "000" / "seed-3" / "model.safetensors")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(first[key], again[key]) for key in again)

    rows = [line.split("\t") for line in (tmp_path / "sweep" / "trials.tsv").read_text().splitlines()]
    assert rows[0][:5] == ["trial", "state", "learning_rate", "hidden", "loss"]
    assert len(rows) == 5
    record = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert (record["best"], record["metric"], record["higher_is_better"]) == (0, "loss", False)
    assert record["trials"][0]["value"] == result.best.value

    with pytest.raises(ConfigError, match="holds a sweep already; resume it with --resume"):
        run_sweep(plan_of(data, sweep), tmp_path / "sweep", workers=0)
    before = (tmp_path / "sweep" / "journal.jsonl").read_bytes()
    over = run_sweep(plan_sweep(saved_sweep(tmp_path / "sweep")), tmp_path / "sweep", workers=0, resume=True)
    assert over.trials == result.trials
    assert (tmp_path / "sweep" / "journal.jsonl").read_bytes().startswith(before)
    check_page((tmp_path / "sweep" / "report.html").read_text())


class _Tags(HTMLParser):
    """Sees that every element that is opened is closed, and counts them."""

    EMPTY = frozenset({"meta", "br", "path", "use", "line", "rect", "circle", "i"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag


def check_page(page: str) -> None:
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen["svg"] == 4, "parallel axes, one for each key, curves"
    assert "script" not in tags.seen
    assert all(link.startswith("#") for link in tags.links), "nothing is loaded from elsewhere"
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for words in ("model.hidden must be at least 1, got -1", "best.yaml", "functional ANOVA", "trials/000/seed-3"):
        assert words in page


def test_words_of_a_page_cannot_become_markup(data: Path, tmp_path: Path) -> None:
    raw = settings_of(data, {"space": {"data.dev": ["<script>x</script>"]}, "method": "grid"})
    result = run_sweep(plan_sweep(raw), tmp_path / "<b>", workers=0)
    assert result.best is None
    assert not (tmp_path / "<b>" / "best.yaml").exists()
    page = (tmp_path / "<b>" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;b&gt;" in page
    assert "there is no best one" in page


def test_what_may_change_when_going_on(data: Path, tmp_path: Path) -> None:
    sweep: dict[str, Any] = {"space": {"learning_rate": {"low": 0.01, "high": 0.1}}, "method": "random", "trials": 1}
    few = run_sweep(plan_of(data, sweep), tmp_path / "s", workers=0)
    more = run_sweep(plan_of(data, sweep | {"trials": 2}), tmp_path / "s", workers=0, resume=True)
    assert more.trials[:1] == few.trials
    assert len(more.trials) == 2
    with pytest.raises(CheckpointError, match=r"expected sweep.seeds=\(0,\) as before, got \(1,\)"):
        run_sweep(plan_of(data, sweep | {"seeds": [1]}), tmp_path / "s", workers=0, resume=True)
    with pytest.raises(CheckpointError, match="the settings it was begun with"):
        run_sweep(plan_of(data, sweep, batch_size=7), tmp_path / "s", workers=0, resume=True)
    with pytest.raises(ConfigError, match="expected a sweep to resume"):
        saved_sweep(tmp_path)
    with pytest.raises(ConfigError, match="--engine `dask` is not known"):
        run_sweep(plan_of(data, sweep), tmp_path / "t", engine="dask")


def test_data_that_cannot_be(data: Path, tmp_path: Path) -> None:
    for name, said in (("", "no training data: give `data.train`"), ("-", "a sweep reads its data once for every run")):
        raw = settings_of(data, {"space": {"hidden": [4]}, "method": "grid"})
        raw["data"]["train"] = name
        with pytest.raises(ConfigError, match=said):
            run_sweep(plan_sweep(raw), tmp_path / "s", workers=0)
    assert not (tmp_path / "s").exists()


def test_what_fails_at_once_can_be_begun_again(data: Path, tmp_path: Path) -> None:
    plan = plan_of(data, {"space": {"hidden": [4]}, "method": "grid"}, epochs=1)
    with pytest.raises(ConfigError, match="not known"):
        run_sweep(plan, tmp_path / "s", engine="dask")
    assert run_sweep(plan, tmp_path / "s", workers=0).reason == "finished"


def epochs_done(run: Path) -> int:
    last = run / "last.safetensors"
    return int(load_checkpoint(last).meta["progress"]["epoch"]) if last.exists() else 0


def test_killed_sweep_goes_on_as_if_nothing_had_been(data: Path, tmp_path: Path) -> None:
    sweep = {"space": {"learning_rate": {"low": 1e-3, "high": 0.1, "log": True}}, "method": "tpe", "trials": 3}
    training = {"epochs": 16, "threads": 1, "batch_size": 40}
    raw = settings_of(data, sweep | {"startup": 1}, **training)
    raw["model"]["dropout"] = 0.3
    whole = run_sweep(plan_sweep(raw), tmp_path / "whole", workers=0)

    cut = tmp_path / "cut"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(raw))
    code = (
        "import sys, yaml\nfrom thalweg.tasks.sweeping import plan_sweep, run_sweep\n"
        "run_sweep(plan_sweep(yaml.safe_load(open(sys.argv[1]))), sys.argv[2], workers=1)"
    )
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(config), str(cut)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    second = cut / "trials" / "001" / "seed-0"
    until = time.monotonic() + 120
    while epochs_done(second) < 3:
        assert process.poll() is None, "ended too early"
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    at = epochs_done(second)
    assert at < 16, "killed before its end"
    # The worker ends with the sweep: its lock is free, and no checkpoint is written any more.
    with holding(second / ".lock", wait=True):
        at = epochs_done(second)
    record = (cut / "journal.jsonl").read_text()
    assert record.count('"seed-0"') == 1, "one trial was done"

    result = run_sweep(plan_sweep(saved_sweep(cut)), cut, workers=0, resume=True)
    assert result.reason == "finished"
    resumed = [json.loads(line) for line in (second / "log.jsonl").read_text().splitlines()]
    assert [event["epoch"] for event in resumed if event["event"] == "epoch"] == list(range(1, 17))
    assert sum(event["event"] == "start" for event in resumed) == 2, "it went on rather than beginning again"
    assert [trial.values for trial in result.trials] == [trial.values for trial in whole.trials]
    assert [trial.curve for trial in result.trials] == [trial.curve for trial in whole.trials]
    assert [trial.value for trial in result.trials] == [trial.value for trial in whole.trials]
    for number in range(3):
        for name in ("model.safetensors", "last.safetensors"):
            place = Path("trials") / f"{number:03}" / "seed-0" / name
            first, second_time = load_file(tmp_path / "whole" / place), load_file(cut / place)
            assert all(torch.equal(first[key], second_time[key]) for key in first), (number, name)
    assert (cut / "best.yaml").read_text() == (tmp_path / "whole" / "best.yaml").read_text()
