"""The sweep: the record, the loop and the engines, on work that trains nothing."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sweep_toy

from oracles import sweeps as oracle
from thalweg.errors import CheckpointError, ConfigError, ThalwegError
from thalweg.sweeps.local import LocalEngine, worker_places
from thalweg.sweeps.loop import Sweep, run_key
from thalweg.sweeps.settings import SweepConfig
from thalweg.sweeps.store import Store, Trial, holding, mean_and_error
from thalweg.sweeps.work import InlineEngine, find_work, perform

SPACE: dict[str, Any] = {"x": [3, 1, 2], "y": ["a", "b"]}
RANGES: dict[str, Any] = {"x": {"low": 1e-3, "high": 1.0, "log": True}, "n": {"low": 1, "high": 9}, "y": ["a", [1, 2]]}


def sweep_of(
    place: Path, config: SweepConfig, *, engine: Any = None, job: Any = None, higher: bool = True
) -> tuple[Sweep, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    store = Store(place, config, higher=higher)

    def make(trial: Trial, seed: int) -> dict[str, Any]:
        return {"epochs": 4, "seed": seed, **trial.values} | (job(trial, seed) if job else {})

    return Sweep(store, engine or InlineEngine(sweep_toy.work), make, events.append), events


def states(sweep: Sweep) -> list[str]:
    return [trial.state for trial in sweep.store.trials]


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [0.5], [3.0, 3.0]])
def test_mean_and_error(values: list[float]) -> None:
    assert mean_and_error(values) == pytest.approx(oracle.mean_and_error(values), nan_ok=True)


def test_mean_of_nothing() -> None:
    assert all(math.isnan(value) for value in mean_and_error([]))


def test_grid_is_every_combination_in_order(tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path, SweepConfig(space=SPACE, method="grid", seeds=(0, 1, 4)))
    assert sweep.run() == "finished"
    assert [trial.values for trial in sweep.store.trials] == oracle.grid(SPACE)
    for trial in sweep.store.trials:
        expected = [trial.values["x"] + seed for seed in (0, 1, 4)]
        assert [run["value"] for run in trial.runs.values()] == expected
        assert (trial.value, trial.error_of_mean) == pytest.approx(oracle.mean_and_error(expected))
    best = sweep.store.best()
    assert best is not None
    assert best.number == 0  # of the two with x = 3, the first


@pytest.mark.parametrize("method", ["random", "tpe", "halving"])
def test_same_seed_same_trials_whether_cut_or_not(method: Any, tmp_path: Path) -> None:
    config = SweepConfig(space=RANGES, method=method, trials=7, startup=3)
    whole, _ = sweep_of(tmp_path / "whole", config)
    assert whole.run() == "finished"
    seen = 0

    def die(trial: Trial, seed: int) -> dict[str, Any]:
        nonlocal seen
        seen += 1
        if seen == 5:
            raise OSError("as good as a kill: nothing is told or cleaned up")
        return {}

    cut, _ = sweep_of(tmp_path / "cut", config, job=die)
    with pytest.raises(OSError, match="as good as"):
        cut.run()
    again, _ = sweep_of(tmp_path / "cut", config)
    assert [trial.state for trial in again.store.trials][4:] == ["running"]
    assert again.run() == "finished"
    assert again.store.trials == whole.store.trials
    # The record on the disk says the same as the memory of the one who wrote it.
    assert Store(tmp_path / "cut", config, higher=True).trials == again.store.trials
    other, _ = sweep_of(tmp_path / "other", SweepConfig(space=RANGES, method=method, trials=1, seed=1))
    other.run()
    assert other.store.trials[0].values != whole.store.trials[0].values


def test_tpe_learns(tmp_path: Path) -> None:
    config = SweepConfig(space={"x": {"low": 0.0, "high": 1.0}}, trials=30, startup=5)
    sweep, _ = sweep_of(tmp_path, config)
    sweep.run()
    late = [trial.values["x"] for trial in sweep.store.trials[-10:]]
    assert sum(late) / 10 > 0.8, "a random one has 0.5 on average"


@pytest.mark.parametrize("higher", [True, False])
def test_halving_stops_what_the_oracle_stops(higher: bool, tmp_path: Path) -> None:
    config = SweepConfig(space={"x": {"low": 1.0, "high": 9.0}}, method="halving", trials=20, reduction=3)
    sweep, _ = sweep_of(tmp_path, config, job=lambda trial, seed: {"epochs": 9}, higher=higher)
    sweep.run()
    curves = [sweep_toy.curve(trial.values["x"], 9) for trial in sweep.store.trials]
    expected = oracle.halving_stops(curves, least=1, reduction=3, higher=higher)
    assert [trial.pruned_at for trial in sweep.store.trials] == expected
    assert 5 < sum(stop > 0 for stop in expected) < 20
    # The twin that looks the wrong way is found out.
    assert expected != oracle.halving_stops(curves, least=1, reduction=3, higher=not higher)


def test_halving_gives_every_setting_its_least_epochs(tmp_path: Path) -> None:
    config = SweepConfig(space={"x": {"low": 1.0, "high": 9.0}}, method="halving", trials=9, min_epochs=2)
    sweep, _ = sweep_of(tmp_path, config)
    sweep.run()
    stops = {trial.pruned_at for trial in sweep.store.trials}
    assert stops == {0, 2}


def test_median_pruning_and_the_seeds_that_wait(tmp_path: Path) -> None:
    space = {"x": [5, 4, 3, 9, 1]}
    config = SweepConfig(space=space, method="grid", prune="median", startup=3, seeds=(7, 8))
    sweep, events = sweep_of(tmp_path, config)
    sweep.run()
    assert states(sweep) == ["complete", "complete", "complete", "complete", "pruned"]
    hopeless = sweep.store.trials[4]
    assert (hopeless.pruned_at, hopeless.runs) == (1, {})
    assert {event["seed"] for event in events if event["event"] == "run" and event["trial"] is hopeless} == {7}
    stopped = [event["of"]["event"] for event in events if event["event"] == "run" and event["trial"] is hopeless]
    assert stopped == ["epoch", "stopped"]


def test_nothing_is_pruned_after_its_last_epoch(tmp_path: Path) -> None:
    config = SweepConfig(space={"x": [5, 4, 3]}, method="grid", prune="halving")
    sweep, _ = sweep_of(tmp_path, config, job=lambda trial, seed: {"epochs": 1})
    sweep.run()
    assert states(sweep) == ["complete"] * 3


def test_failures_are_recorded_and_stop_nothing(tmp_path: Path) -> None:
    fates = {1: "mistake", 2: "defect"}

    def job(trial: Trial, seed: int) -> dict[str, Any]:
        if trial.number == 3:
            raise ThalwegError("this combination\ncannot be")
        return {"fate": fates.get(trial.number) if seed == 1 else None}

    config = SweepConfig(space={"x": [1, 2, 3, 4, 5]}, method="grid", seeds=(0, 1, 2))
    sweep, _ = sweep_of(tmp_path, config, job=job)
    assert sweep.run() == "finished"
    assert states(sweep) == ["complete", "failed", "failed", "failed", "complete"]
    assert [trial.error for trial in Store(tmp_path, config, higher=True).trials] == [
        "",
        "seed 1: no such setting",
        "seed 1: KeyError: 'absent'",
        "this combination cannot be",
        "",
    ]
    # A setting that fails with one seed is not compared by its luckier ones.
    assert sweep.store.trials[1].runs.keys() == {0}
    assert sweep.store.best() is sweep.store.trials[4]


def test_a_value_that_is_no_number_fails(tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path, SweepConfig(space={"x": [math.inf]}, method="grid"))
    sweep.run()
    assert states(sweep) == ["failed"]
    assert sweep.store.best() is None


@pytest.mark.parametrize("damage", [b'{"op_code":5,"worker', b"\x00\xff"])
def test_half_a_line_and_a_dead_lock_are_mended(damage: bytes, tmp_path: Path) -> None:
    config = SweepConfig(space=SPACE, method="grid")
    sweep, _ = sweep_of(tmp_path, config)
    sweep.run()
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + damage)
    (tmp_path / "journal.jsonl.lock").symlink_to(journal)
    began = time.monotonic()
    again = Store(tmp_path, config, higher=True)
    assert again.trials == sweep.store.trials
    assert time.monotonic() - began < 20, "nobody waits the 30 s that a lock of the dead is believed"
    assert all(json.loads(line) for line in journal.read_text().splitlines())


def test_a_setting_half_drawn_is_drawn_again(tmp_path: Path) -> None:
    config = SweepConfig(space=SPACE, method="grid")
    store = Store(tmp_path, config, higher=True)
    store.ask()
    # What a kill leaves between enqueueing, drawing and numbering.
    store.study.ask()
    store.study.enqueue_trial({"x": "1"})
    again, _ = sweep_of(tmp_path, config)
    assert again.run() == "finished"
    assert [trial.values for trial in again.store.trials] == oracle.grid(SPACE)


def test_a_foreign_record_is_refused(tmp_path: Path) -> None:
    config = SweepConfig(space=SPACE, method="grid")
    store = Store(tmp_path, config, higher=True)
    trial = store.study.ask({key: p.distribution(grid=True) for key, p in store._keys.items()})
    trial.set_user_attr("number", 7)
    with pytest.raises(CheckpointError, match="numbered without gaps"):
        Store(tmp_path, config, higher=True)


def test_all_seeds_done_but_not_closed(tmp_path: Path) -> None:
    config = SweepConfig(space={"x": [1]}, method="grid")
    store = Store(tmp_path, config, higher=True)
    trial = store.ask()
    assert trial is not None
    store.complete = lambda trial: False  # type: ignore[method-assign] - killed before
    store.finish_run(trial, 0, {"value": 1.0})
    sweep, events = sweep_of(tmp_path, config)
    assert sweep.run() == "finished"
    assert states(sweep) == ["complete"]
    assert not events, "nothing is trained twice"


def test_more_trials_later(tmp_path: Path) -> None:
    few, _ = sweep_of(tmp_path / "a", SweepConfig(space=RANGES, method="random", trials=3))
    few.run()
    more, _ = sweep_of(tmp_path / "a", SweepConfig(space=RANGES, method="random", trials=6))
    more.run()
    once, _ = sweep_of(tmp_path / "b", SweepConfig(space=RANGES, method="random", trials=6))
    once.run()
    assert more.store.trials == once.store.trials


def test_importance_goes_to_the_key_that_matters(tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path, SweepConfig(space={"x": [1, 2, 3, 4], "y": ["a", "b", "c"]}, method="grid"))
    assert sweep.store.importances() == {}
    sweep.run()
    shares = sweep.store.importances()
    assert list(shares) == ["x", "y"]
    assert shares["x"] > 0.95
    assert sum(shares.values()) == pytest.approx(1.0)


def test_one_sweep_at_a_time(tmp_path: Path) -> None:
    with (
        holding(tmp_path / ".lock"),
        pytest.raises(ConfigError, match="another sweep is at work"),
        holding(tmp_path / ".lock"),
    ):
        pass
    with holding(tmp_path / ".lock"):
        pass


def test_time_is_up(tmp_path: Path) -> None:
    config = SweepConfig(space=SPACE, method="grid", hours=1e-9)
    sweep, _ = sweep_of(tmp_path, config)
    assert sweep.run() == "hours"


def test_work_is_found_by_name() -> None:
    assert find_work("sweep_toy:work") is sweep_toy.work
    for name in ("absent_module:work", "sweep_toy:absent", "sweep_toy"):
        with pytest.raises(ConfigError, match="module:function"):
            find_work(name)


def test_interrupted_work() -> None:
    def work(job: dict[str, Any], tell: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    assert perform(work, {}, lambda event: True) == {"event": "interrupted"}


def test_places_on_gpus() -> None:
    assert worker_places(0, 0.0, ["0", "1"]) == ["0", "1"]
    assert worker_places(3, 0.0, ["0", "1"]) == ["0", "1", "0"]
    assert worker_places(0, 0.4, ["3"]) == ["3", "3"]
    with pytest.raises(ConfigError, match="hold 2 runs"):
        worker_places(3, 0.5, ["0"])
    with pytest.raises(ConfigError, match="no GPU here"):
        worker_places(1, 0.5, [])
    with pytest.raises(ConfigError, match=r"must be in \[0, 1\]"):
        worker_places(1, 2.0, ["0"])


def test_processes_fail_die_and_are_replaced(tmp_path: Path) -> None:
    fates = {0: "killed once", 1: "mistake", 4: "defect"}

    def job(trial: Trial, seed: int) -> dict[str, Any]:
        return {"fate": fates.get(trial.number), "mark": str(tmp_path / "mark")}

    config = SweepConfig(space={"x": [1, 2, 3, 4, 5]}, method="grid")
    engine = LocalEngine("sweep_toy:work", tmp_path, workers=1)
    sweep, events = sweep_of(tmp_path, config, engine=engine, job=job)
    assert sweep.run() == "finished"
    assert states(sweep) == ["complete", "failed", "complete", "complete", "failed"]
    assert len({sweep.store.trials[number].runs[0]["pid"] for number in (0, 2, 3)}) == 1, "a worker is used again"
    lost = [event["of"] for event in events if event["event"] == "run" and event["of"]["event"] == "lost"]
    assert [event["error"] for event in lost] == [
        "the process of the run was ended by SIGKILL, perhaps for want of memory"
    ]


@pytest.mark.parametrize("retries", [0, 2])
def test_a_run_that_is_lost_again_and_again_fails(retries: int, tmp_path: Path) -> None:
    begun: list[str] = []

    class Losing(InlineEngine):
        workers = 1

        def step(self, handle: Any, timeout: float) -> None:
            key, _ = self._waiting.pop()
            begun.append(key)
            handle(key, {"event": "lost", "error": "gone"})

    config = SweepConfig(space={"x": [1, 2]}, method="grid", retries=retries)
    sweep, _ = sweep_of(tmp_path, config, engine=Losing(sweep_toy.work))
    assert sweep.run() == "finished"
    assert begun == ["000/seed-0"] * (1 + retries) + ["001/seed-0"] * (1 + retries)
    assert [trial.error for trial in sweep.store.trials] == ["seed 0: gone"] * 2


def test_ctrl_c_asks_the_runs_and_leaves_them_to_go_on(tmp_path: Path) -> None:
    config = SweepConfig(space={"x": [1]}, method="grid")
    engine = LocalEngine("sweep_toy:work", tmp_path, workers=1)
    job = {"fate": "slow", "mark": str(tmp_path / "mark")}
    sweep, _ = sweep_of(tmp_path, config, engine=engine, job=lambda trial, seed: job)
    # A signal that comes before the toy has its handler ends it at once, which must do no harm either.
    threading.Timer(3.0, signal.raise_signal, [signal.SIGINT]).start()
    assert sweep.run() == "interrupted"
    assert states(sweep) == ["running"]
    again, _ = sweep_of(tmp_path, config)
    assert again.run() == "finished"
    assert states(again) == ["complete"]


def test_names_of_runs() -> None:
    assert run_key(Trial(12, {}), 3) == "012/seed-3"
