"""The files that people read of a sweep, up to date while it goes on."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.files import write_text
from thalweg.sweeps.loop import run_key
from thalweg.sweeps.store import Store, Trial

if TYPE_CHECKING:
    from thalweg.tasks.sweeping import SweepPlan


class Book:
    """Keeps the files that people read up to date while a sweep goes on: ``best.yaml``, ``trials.tsv``, ``sweep.json``.

    Args:
        plan: of the sweep; store: its trials; out: its directory.
        listener: called with every event, after it was taken in.
    """

    def __init__(self, plan: SweepPlan, store: Store, out: Path, listener: Callable[[dict[str, Any]], None] | None):
        self.plan, self.store, self.out = plan, store, out
        self.pass_on = listener or (lambda event: None)

    def __call__(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        if event["event"] == "run" and "trace" in event["of"]:
            place = self.out / "trials" / run_key(event["trial"], event["seed"])
            write_text(place / "error.txt", str(event["of"]["trace"]))
        if event["event"] == "trial" and event["trial"].state != "running":
            self.write()
        self.pass_on(event)

    def write(self) -> None:
        """``best.yaml``, ``trials.tsv`` and ``sweep.json`` as things stand."""
        best = self.store.best()
        if best is not None:
            write_text(self.out / "best.yaml", best_yaml(self.plan, best))
        rows = [_row(self.plan, trial) for trial in self.store.trials]
        if rows:
            lines = ["\t".join(rows[0]), *("\t".join(row.values()) for row in rows)]
            write_text(self.out / "trials.tsv", "".join(f"{line}\n" for line in lines))
        record = {
            "metric": self.plan.metric,
            "higher_is_better": self.plan.higher,
            "best": None if best is None else best.number,
            "trials": [dataclasses.asdict(trial) | _scores(trial) for trial in self.store.trials],
        }
        write_text(self.out / "sweep.json", json.dumps(record, ensure_ascii=False, indent=1) + "\n")


def best_yaml(plan: SweepPlan, trial: Trial) -> str:
    """The config of a trial with its first seed, and in a comment what it reached."""
    import yaml

    seeds = f"{len(trial.runs)} seed{'s' if len(trial.runs) > 1 else ''}"
    values = ", ".join(f"{key}={written(value)}" for key, value in trial.values.items())
    head = f"# Trial {trial.number} of a sweep: {plan.metric} {trial.score} on the dev data ({seeds}).\n"
    settings = plan.settings(trial.values, plan.config.seeds[0])
    return f"{head}# {values}\n" + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def _scores(trial: Trial) -> dict[str, float | None]:
    return {"value": _finite(trial.value), "error_of_mean": _finite(trial.error_of_mean)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _row(plan: SweepPlan, trial: Trial) -> dict[str, str]:
    scores = {key: "" if value is None else f"{value:.6g}" for key, value in _scores(trial).items()}
    values = {key: written(value) for key, value in trial.values.items()}
    row = {"trial": str(trial.number), "state": trial.state, **values, plan.metric: scores["value"]}
    row |= {"error_of_mean": scores["error_of_mean"], "seeds": str(len(trial.runs)), "error": trial.error}
    return {key.replace("\t", " "): value.replace("\t", " ").replace("\n", " ") for key, value in row.items()}


def written(value: Any) -> str:
    """A value as a ``key=value`` word has it.

    >>> written([1, 2.5]), written(True)
    ('[1, 2.5]', 'true')
    """
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.strip().removesuffix("...").strip()
