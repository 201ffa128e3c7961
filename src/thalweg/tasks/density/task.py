"""The task of learning where rows of numbers lie, and which of them lie where few do."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from thalweg.data.tables import Table, read_table
from thalweg.errors import ConfigError
from thalweg.files import write_text
from thalweg.metrics import Means, Measure, scored
from thalweg.tasks.base import Evaluation, Measured, Shown, Task
from thalweg.tasks.density.config import PRESETS, DensityConfig
from thalweg.tasks.density.model import Density, Rating, build_estimator, load_density
from thalweg.tasks.names import evaluation_folder
from thalweg.tasks.runs import Listener, RunLog, TrainResult

if TYPE_CHECKING:
    from thalweg.tasks.density.report import DensityReport
    from thalweg.tasks.density.serving import RowServant


UNUSUAL = 0.01
"""An item whose rank is below this is unusual."""
MEASURES = {"nll": Measure("NLL", False), "unusual": Measure("unusual", False)}

# Of an evaluation, so many points are drawn and so many items listed.
_DRAWN, _LISTED = 2000, 20


class DensityTask(Task):
    """Rows of numbers, or sequences of them, to a density; methods not described are as in :class:`Task`.

    >>> TASK.configure({"model": "hmm", "training": {"epochs": 3}}).model.states
    4
    """

    name = "density"
    about = "a density of rows of numbers, and which rows are unusual"
    noun = "density"
    items = "rows"
    kind = DensityConfig
    data = "data.path"
    missing = "no numbers; give a CSV file or a .npy, or a config file with `data: {path: ...}`"
    presets = PRESETS
    default_model = "mixture"
    refusal = "is for runs on strings; a density has no use for it"

    def recognises(self, word: str) -> bool:
        """Tables and arrays."""
        return word.endswith((".csv", ".npy"))

    def fit(self, config: DensityConfig, log: RunLog, root: Path | None) -> TrainResult:
        """Fit to a table."""
        from thalweg.tasks.density.training import fit

        return fit(config, log)

    def load(self, run: str | Path, *, device: str = "auto", **options: Any) -> Density:
        """The best model; ``predict`` takes a table or the name of a file."""
        self.check_options(options)
        return load_density(run, device=device)[0]

    def evaluate(
        self,
        run: str | Path,
        data: str | None = None,
        *,
        k: int = 5,
        name: str | None = None,
        device: str = "auto",
        root: Path | None = None,
        listener: Listener | None = None,
        **options: Any,
    ) -> Evaluation:
        """Measure how well a table fits: ``nll``, and the share that is unusual."""
        self.check_options(options)
        model, config = load_density(run, device=device)
        table = read_table(data or config.data.path, sequence=config.data.sequence)
        folder = evaluation_folder(run, name, Path(table.path).stem)
        began = time.perf_counter()
        ratings = list(model.predict(table, k))
        speed = len(ratings) / max(time.perf_counter() - began, 1e-9)
        values = {"nll": [-each.log_density for each in ratings], "unusual": [each.rank < UNUSUAL for each in ratings]}
        tally = Means(values, MEASURES)
        measured = Measured(
            sources=tuple(rating.source for rating in ratings),
            references=((),) * len(ratings),
            answers=tuple(f"log density {rating.log_density:.4f}" for rating in ratings),
            tally=tally,
        )
        result = Evaluation(folder, table.path, scored(tally), len(ratings), speed, measured=measured)
        lines = "".join(json.dumps(rating.to_json()) + "\n" for rating in ratings)
        write_text(folder / "predictions.jsonl", lines)
        write_text(folder / "pictures.json", json.dumps(_pictures(table, ratings)))
        write_text(folder / "metrics.json", json.dumps(result.to_json()))
        return result

    def predict(
        self,
        run: str | Path,
        inputs: Any = (),
        *,
        k: int = 1,
        device: str = "auto",
        listener: Listener | None = None,
        **options: Any,
    ) -> Iterator[Rating]:
        """How dense it is where each row, or sequence, of some tables lies, and how unusual that is."""
        self.check_options(options)
        if not inputs:
            raise ConfigError("no numbers; name CSV files or .npy: `thalweg predict RUN new.csv`")
        model, config = load_density(run, device=device)
        for path in inputs:
            yield from model.predict(read_table(path, sequence=config.data.sequence), k)

    def serving(self, run: str | Path, *, device: str = "auto") -> RowServant:
        """Rows as they come."""
        from thalweg.tasks.density.serving import RowServant

        return RowServant(self.load(run, device=device), run)

    def after_training(self, result: TrainResult, root: Path | None = None) -> None:
        """All rows are looked at, for the report."""
        if result.best_epoch:
            self.evaluate(result.run)

    def next_steps(self, run: str) -> list[str]:
        """Another table, its unusual rows, and a service for single ones."""
        return [f"thalweg evaluate {run} NEW.csv", f"thalweg predict {run} NEW.csv", f"thalweg serve {run}"]

    def report(self) -> DensityReport:
        """Where the rows lie, and the unusual ones."""
        from thalweg.tasks.density.report import DensityReport

        return DensityReport()

    def example(self, config: DensityConfig, run: Path | None = None, **sizes: Any) -> Shown:
        """The model with one row, or for an HMM one sequence of one row."""
        model = (
            Density(build_estimator(config, 2), torch.zeros(2), torch.ones(2)) if run is None else load_density(run)[0]
        )
        first = next(model.estimator.parameters())
        row = torch.zeros(*[1] * (2 if hasattr(model.estimator, "viterbi") else 1), len(model.centre)).to(first)
        return Shown(model.estimator, (row,), f"one row of {len(model.centre)} numbers")


def _pictures(table: Table, ratings: list[Rating]) -> dict[str, Any]:
    """What the report draws: densities, some points in the plane of the two first columns, and the least usual."""
    listed = [rating.to_json() for rating in heapq.nsmallest(_LISTED, ratings, key=lambda each: each.log_density)]
    shown: dict[str, Any] = {"log_densities": [rating.log_density for rating in ratings][:100_000], "listed": listed}
    if table.values.shape[1] > 1 and not table.lengths and len(ratings) == len(table.values):
        places = np.linspace(0, len(ratings) - 1, min(_DRAWN, len(ratings))).astype(int)
        points = np.nan_to_num(np.asarray(table.values[places, :2], dtype=np.float64))
        shown["axes"] = list(table.names[:2])
        shown["points"] = [[*point, ratings[place].rank] for place, point in zip(places, points.tolist(), strict=True)]
    return shown


TASK = DensityTask()
"""The task."""
