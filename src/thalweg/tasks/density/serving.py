"""A density as a service asks it: rows of numbers in, how dense it is there and how unusual that is out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.data.tables import Table
from thalweg.energies.hmm.model import HMM
from thalweg.energies.variational.model import VAE
from thalweg.errors import ConfigError
from thalweg.tasks.density.model import Density, Rating
from thalweg.tasks.serving import Plan, Servant, measured_scores


class RowServant(Servant):
    """Rows of numbers, ``null`` where one is missing, to ratings; each row is a sequence of one for an HMM.

    >>> import torch
    >>> from thalweg.tasks.density.config import DensityConfig
    >>> from thalweg.tasks.density.model import build_estimator
    >>> servant = RowServant(Density(build_estimator(DensityConfig(), 1), torch.zeros(1), torch.ones(1)))
    >>> servant.answer(servant.questions([[0.0], [1.0]]), servant.plan_of({"k": 1}))[1].source
    'row 2'
    """

    view = "numbers"

    def __init__(self, density: Density, run: str | Path = ""):
        self.density, self.run = density, run

    def describe(self) -> dict[str, Any]:
        """How many numbers a row has."""
        return {
            "default": {"k": 1},
            "columns": len(self.density.centre),
            "scores": measured_scores(self.run) if self.run else {},
        }

    def plan_of(self, options: Mapping[str, Any]) -> Plan:
        """How many parts are named."""
        return Plan(options.get("k", 1))

    def questions(self, inputs: Sequence[Any], features: Sequence[str] = ()) -> list[tuple[str, np.ndarray]]:
        """Rows with the names that their records bear."""
        if features:
            raise ConfigError("this model reads no `features`")
        columns, found = len(self.density.centre), []
        for place, row in enumerate(inputs):
            if isinstance(row, str) or len(row) != columns:
                got = "a text" if isinstance(row, str) else f"{len(row)}"
                raise ConfigError(f"inputs[{place}] must be a row of {columns} numbers, got {got}")
            numbers = np.array([np.nan if each is None else each for each in row], dtype=np.float64)
            if isinstance(self.density.estimator, VAE) and np.isnan(numbers).any():
                raise ConfigError(f"inputs[{place}] must have every number, got a missing one; fill it in")
            found.append((f"row {place + 1}", numbers))
        return found

    def answer(self, questions: Sequence[tuple[str, np.ndarray]], plan: Plan) -> list[Rating]:
        """The records of ``thalweg predict``, named by their place."""
        values = np.stack([row for _, row in questions])
        lengths = (1,) * len(values) if isinstance(self.density.estimator, HMM) else ()
        names = tuple(f"x{n}" for n in range(1, values.shape[1] + 1))
        ratings = self.density.predict(Table("rows", values, names, lengths), plan.k)
        return [dataclasses.replace(r, source=name) for (name, _), r in zip(questions, ratings, strict=True)]
