"""Fits a density to a table: mixtures and HMMs by EM, a VAE by the gradient of its bound."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from thalweg.data.tables import Table, read_table
from thalweg.energies.hmm.model import HMM
from thalweg.energies.hmm.states import left_to_right
from thalweg.energies.mixture.model import GaussianMixture
from thalweg.energies.variational.model import VAE
from thalweg.errors import ConfigError, DataError
from thalweg.learning.settings import Moment
from thalweg.learning.trainer import resolve_device
from thalweg.limits import within_memory
from thalweg.tasks.density.config import DensityConfig, HMMShape, MixtureShape, VAEShape
from thalweg.tasks.density.model import Density, build_estimator
from thalweg.tasks.runs import RunLog, TrainResult, meta_of

# Iterations that a start is tried for.
_TRIED = 5


@within_memory("lower training.batch_size or the sizes of the model")
def fit(config: DensityConfig, log: RunLog) -> TrainResult:
    """Fit a density to a table; see :meth:`~thalweg.tasks.base.Task.fit`.

    >>> fit(DensityConfig(), RunLog("runs/x"))
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: no numbers: give a CSV file or a .npy, or `data.path` in the config
    """
    if not config.data.path:
        raise ConfigError("no numbers: give a CSV file or a .npy, or `data.path` in the config")
    device = torch.device(resolve_device(config.training.device))
    table = read_table(config.data.path, sequence=config.data.sequence)
    training, dev = _split(table, config)
    model = Density(build_estimator(config, training.values.shape[1]), *_units(training, config.data.standardise))
    model.check(training)
    _check_enough(training, config)
    model.to(device)
    torch.manual_seed(config.training.seed)
    gradient = isinstance(model.estimator, VAE)
    if not gradient:
        model.estimator = _begin(config, model, training)
    batches = Rows(model.standardised(training), config) if gradient else Whole()
    config = dataclasses.replace(config, training=config.training.planned(len(batches)))
    facts = _facts(table, training, dev)
    result = log.train(
        model,
        batches,
        config,
        meta=meta_of(config, columns=list(table.names), data=_digest(training)),
        facts=facts,
        loss=_bound if gradient else Climb(model, training),
        evaluate=lambda raw: {"nll": -float(np.mean(cast(Density, raw).learn_levels(dev)))},
        told={"lines": [f"{split:<7} {facts[split]['summary']}" for split in ("train", "dev")]},
    )
    if not gradient and log.listener and (wrong := getattr(model.estimator, "degenerate_", None)):
        log.listener(
            {"event": "message", "message": f"degenerate parts: {_said(wrong)}; ask for fewer, or other seeds"}
        )
    return result


def _split(table: Table, config: DensityConfig) -> tuple[Table, Table]:
    """Rows, or sequences, to learn from and to choose by; of a file without sequences, which is one, its end."""
    held, chain = max(1, round(config.data.held_out * len(table))), isinstance(config.model, HMMShape)
    kept = len(table) - held
    if kept < (1 if chain else 2):
        noun = "two sequences" if table.lengths else "three rows"
        raise DataError(f"{table.path}: expected {noun} or more, got {len(table)}; bring more")
    if chain and not table.lengths:
        return table.take(range(kept)), table.take(range(kept, len(table)))
    order = np.random.default_rng(config.data.split_seed).permutation(len(table)).tolist()
    return table.take(sorted(order[held:])), table.take(sorted(order[:held]))


def _check_enough(training: Table, config: DensityConfig) -> None:
    """Refuse tables whose rows are all the same, or fewer than the parts of the model."""
    rows, shape = np.asarray(training.values), config.model
    if bool(((rows == rows[0]) | (np.isnan(rows) & np.isnan(rows[0]))).all()):
        raise DataError(
            f"{training.path}: expected rows that differ, got one distinct point {len(rows):,} times; add some"
        )
    if isinstance(shape, VAEShape):
        return
    name = "states" if isinstance(shape, HMMShape) else "components"
    count = getattr(shape, name)
    if len(rows) < count:
        raise DataError(
            f"{training.path}: expected at least {count:,} rows to learn from for {name}={count}, got {len(rows):,} "
            f"beside those held out; bring more, or ask for fewer: {name}={min(len(rows), 2)}"
        )


def _units(training: Table, standardise: bool) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each column; a constant column has deviation 1."""
    values = torch.from_numpy(np.asarray(training.values, dtype=np.float64))
    if not standardise:
        return torch.zeros(values.size(1)), torch.ones(values.size(1))
    centre = values.nanmean(dim=0)
    scale = (values - centre).square().nanmean(dim=0).sqrt()
    absent = centre.isnan().nonzero()
    if len(absent):
        name = training.names[int(absent[0])]
        raise DataError(f"{training.path}: expected numbers in column `{name}`, got none; leave the column out")
    beyond = (~scale.isfinite()).nonzero()
    if len(beyond):
        name = training.names[int(beyond[0])]
        raise DataError(
            f"{training.path}: expected numbers whose squares are finite in column `{name}`, got larger ones; divide it"
        )
    return centre, torch.where(scale > 0, scale, 1.0)


def _begin(config: DensityConfig, model: Density, training: Table) -> GaussianMixture | HMM:
    """The best of some starts after a few iterations, ready to go on."""
    shape = config.model
    assert not isinstance(shape, VAEShape)
    how: dict[str, Any] = {"n_restarts": config.training.restarts, "max_iter": _TRIED, "floor": shape.floor}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is degenerate at the end is told then
        if isinstance(shape, MixtureShape):
            how |= {"random_state": config.training.seed, "missing": bool(training.missing)}
            return GaussianMixture(shape.components, shape.covariance, **how).fit(model.standardised(training))
        initial, moves = left_to_right(shape.states) if shape.topology != "any" else (None, None)
        emission = "gaussian" if shape.components == 1 else "mixture"
        kind = {"covariance_type": shape.covariance, "n_mix": shape.components, "n_states": shape.states}
        where, also = model.asked(training)
        return HMM(initial, moves, emission, random_state=config.training.seed, **kind, **how).fit(*where, **also)


class Whole:
    """All data, once an epoch: EM looks at everything."""

    def __len__(self) -> int:
        return 1

    def iterate(self, n: int, start: int = 0) -> Iterator[Tensor]:
        """One batch, which says nothing."""
        yield from [torch.zeros(())][start:]


class Rows:
    """Batches of rows, in another order each epoch."""

    def __init__(self, rows: Tensor, config: DensityConfig):
        self.rows, self.size, self.seed = rows, config.training.batch_size, config.training.seed

    def __len__(self) -> int:
        return -(-len(self.rows) // self.size)

    def iterate(self, n: int, start: int = 0) -> Iterator[Tensor]:
        """Batches of epoch ``n`` from number ``start`` on."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + n) % 2**63)
        for chosen in torch.randperm(len(self.rows), generator=generator).split(self.size)[start:]:
            yield self.rows[chosen.to(self.rows.device)]


class Climb:
    """One iteration of EM, as the trainer takes it: minus the log-likelihood before it, and how many rows."""

    def __init__(self, model: Density, training: Table):
        self.model, self.rows = model, len(training.values)
        self.data = model.asked(training) if isinstance(model.estimator, HMM) else ((model.standardised(training),), {})

    def __call__(self, model: nn.Module, batch: Tensor, moment: Moment) -> tuple[Tensor, int]:
        """The batch says nothing: the data are here."""
        estimator: Any = self.model.estimator
        where, also = self.data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is degenerate at the end is told then
            estimator.set_params(max_iter=1, warm_start=True).fit(*where, **also)
        total = estimator.history_[-1] * (1 if isinstance(estimator, HMM) else self.rows)
        return torch.tensor(-total, dtype=torch.float64), self.rows


def _bound(model: nn.Module, batch: Tensor, moment: Moment) -> tuple[Tensor, int]:
    return cast(VAE, cast(Any, model).estimator)(batch).sum(), len(batch)


def _digest(training: Table) -> str:
    """A fingerprint of the training rows, so that a run is never resumed on others."""
    digest = hashlib.sha256(repr((training.values.shape, training.names, training.lengths)).encode())
    digest.update(np.ascontiguousarray(training.values, dtype=np.float64).tobytes())
    return digest.hexdigest()[:16]


def _facts(table: Table, training: Table, dev: Table) -> dict[str, Any]:
    def fact(part: Table) -> dict[str, Any]:
        sequences = f" in {len(part.lengths):,} sequences" if part.lengths else ""
        gaps = f", {part.missing:,} numbers missing" if part.missing else ""
        summary = f"{table.path}: {len(part.values):,} rows of {len(table.names)} numbers{sequences}{gaps}"
        return {"path": table.path, "rows": len(part.values), "summary": summary}

    return {"task": "density", "columns": list(table.names), "train": fact(training), "dev": fact(dev)}


def _said(wrong: Any) -> str:
    parts = wrong.items() if isinstance(wrong, dict) else ((each.state, each.why) for each in wrong)
    return ", ".join(f"{place + 1} ({why})" for place, why in parts)
