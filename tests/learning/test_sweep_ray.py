"""The same sweep on a Ray cluster: a local one, begun for this test."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thalweg.errors import ConfigError
from thalweg.sweeps.loop import Sweep
from thalweg.sweeps.ray import RayEngine
from thalweg.sweeps.settings import SweepConfig
from thalweg.sweeps.store import Store, Trial


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two cores, no GPU."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the toy is in no installed package
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the toy is in no installed package
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own pipes and sockets
        ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def test_trials_fail_are_pruned_and_complete_on_a_cluster(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 CPUs and 0 GPUs, a run needs 1 and 0\.5"):
        RayEngine("sweep_toy:work", share=0.5)

    fates = {0: "mistake", 1: "killed once"}

    def job(trial: Trial, seed: int) -> dict[str, Any]:
        return {"epochs": 4, "fate": fates.get(trial.number), "mark": str(tmp_path / "mark"), **trial.values}

    engine = RayEngine("sweep_toy:work")
    assert engine.workers == 2
    engine.workers = 1  # one after the other, so that what is pruned is known
    config = SweepConfig(space={"x": [6, 5, 4, 7, 1]}, method="grid", prune="median", startup=2)
    store = Store(tmp_path, config, higher=True)
    events: list[dict[str, Any]] = []
    assert Sweep(store, engine, job, events.append).run() == "finished"
    assert [trial.state for trial in store.trials] == ["failed", "complete", "complete", "complete", "pruned"]
    assert store.trials[0].error == "seed 0: no such setting"
    assert (tmp_path / "mark").exists()
    assert [event["trial"].number for event in events if event.get("of", {}).get("event") == "lost"] == [1]
    assert [trial.value for trial in store.trials[1:4]] == [5, 4, 7]
    assert Store(tmp_path, config, higher=True).trials == store.trials
