"""A density over rows or sequences of a table, in the units of its file, and how usual each of them is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from thalweg.data.tables import Table, read_table
from thalweg.energies.hmm.gaussian import GaussianEmission
from thalweg.energies.hmm.mixture import MixtureEmission
from thalweg.energies.hmm.model import HMM
from thalweg.energies.hmm.states import left_to_right
from thalweg.energies.mixture.model import GaussianMixture
from thalweg.energies.variational.config import VAEConfig
from thalweg.energies.variational.model import VAE
from thalweg.errors import DataError
from thalweg.learning.trainer import resolve_device
from thalweg.tasks.density.config import DensityConfig, HMMShape, MixtureShape, VAEShape
from thalweg.tasks.runs import check_size, opened

# Held-out items are ranked by this many levels of their density.
LEVELS = 1001
# Rows that are scored together.
_AT_ONCE = 1 << 16


class Part(NamedTuple):
    """A component or state, and how probable it is that it made an item.

    >>> Part("component 2", 0.9).text
    'component 2'
    """

    text: str
    probability: float


@dataclass(frozen=True)
class Rating:
    """How dense it is where an item lies.

    Attributes:
        source: the file and the number of the row, or the name of the sequence.
        log_density: log p(x) in the units of the file; of a sequence the mean for each of its rows.
        rank: the share of held-out items that lie where it is less dense: near 0 is unusual.
        answers: the parts that most probably made it, where the model has parts.

    >>> next(Rating("x.csv row 3", -1.5, 0.25, (Part("component 2", 0.9),)).tsv())
    'x.csv row 3\\t-1.5000\\t0.2500\\tcomponent 2\\t0.9000'
    """

    source: str
    log_density: float
    rank: float
    answers: tuple[Part, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        answers = [part._asdict() for part in self.answers]
        return {"source": self.source, "log_density": self.log_density, "rank": self.rank, "answers": answers}

    def tsv(self) -> Iterator[str]:
        """Source, log density, rank; then for each part a line, or one line without."""
        head = f"{self.source}\t{self.log_density:.4f}\t{self.rank:.4f}"
        yield from (
            (f"{head}\t{part.text}\t{part.probability:.4f}" for part in self.answers) if self.answers else (head,)
        )


def build_estimator(config: DensityConfig, width: int) -> GaussianMixture | HMM | VAE:
    """A model of rows of ``width`` numbers as the config says, complete, its numbers still to be found.

    >>> build_estimator(DensityConfig(), 3).means_.shape
    torch.Size([8, 3])
    """
    shape, seed = config.model, config.training.seed
    if isinstance(shape, MixtureShape):
        N, kind = shape.components, shape.covariance
        matrix = torch.eye(width, dtype=torch.float64)
        spread = {"full": matrix.expand(N, -1, -1), "tied": matrix, "diagonal": matrix.new_ones(N, width)}
        means, spread = matrix.new_zeros(N, width), spread.get(kind, matrix.new_ones(N))
        return GaussianMixture(N, kind, means=means, covariances=spread, random_state=seed)
    if isinstance(shape, HMMShape):
        C, M = shape.states, shape.components
        even = torch.full((C, C), 1 / C, dtype=torch.float64)
        initial, moves = (even[0], even) if shape.topology == "any" else left_to_right(C)
        means = even.new_zeros(C, M, width)
        weights = even.new_full((C, M), 1 / M)
        if M == 1:
            emission = GaussianEmission(means[:, 0], covariance_type=shape.covariance)
        else:
            emission = MixtureEmission(weights, means, covariance_type=shape.covariance)
        emission.adopt(means[0], None)
        return HMM(initial.double(), moves.double(), emission, random_state=seed)
    return VAE(
        VAEConfig(shape=(width,), latent=shape.latent, hidden=shape.hidden, likelihood="gaussian"), random_state=seed
    )


class Density(nn.Module):
    """A model of standardised rows, what they were standardised by, and the densities of what was held out.

    Args:
        estimator: of rows with mean 0 and deviation 1.
        centre, scale: ``(D,)``, of the columns.

    >>> model = Density(build_estimator(DensityConfig(), 1), torch.zeros(1), torch.full((1,), 2.0))
    >>> model.log_densities(Table("x", np.zeros((1, 1)), ("x1",)))  # of N(0, 4)
    array([-1.61208571])
    """

    estimator: GaussianMixture | HMM | VAE
    centre: Tensor
    scale: Tensor
    levels: Tensor

    def __init__(self, estimator: GaussianMixture | HMM | VAE, centre: Tensor, scale: Tensor):
        super().__init__()
        self.estimator = estimator
        self.register_buffer("centre", centre.double())
        self.register_buffer("scale", scale.double())
        self.register_buffer("levels", torch.zeros(LEVELS, dtype=torch.float64))

    @property
    def device(self) -> torch.device:
        """Where it calculates."""
        return self.centre.device

    def standardised(self, table: Table, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a table as the estimator takes them, where it is."""
        values = torch.from_numpy(np.array(table.values[start:stop], dtype=np.float64)).to(self.device)
        values = (values - self.centre) / self.scale
        return values.float() if isinstance(self.estimator, VAE) else values

    def asked(self, table: Table) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What an HMM's methods take: all rows, how many make up each sequence, and which of them are whole."""
        values = self.standardised(table)
        whole = ~values.isnan().any(dim=1)
        return (values.nan_to_num(0.0), list(table.lengths) or [len(values)]), {"observed": whole}

    def log_densities(self, table: Table) -> NDArray[np.float64]:
        """log p of each row, or of each sequence for each of its rows, in the units of the file."""
        self.check(table)
        if isinstance(self.estimator, HMM):
            (values, lengths), how = self.asked(table)
            found = self.estimator.score_samples(values, lengths, **how).double().cpu().numpy()
            whole = how["observed"].double().cpu().numpy()
            begins = np.cumsum([0, *lengths[:-1]])
            units = np.add.reduceat(whole, begins) * float(self.scale.log().sum())
            return (found - units) / np.asarray(lengths)
        blocks = range(0, len(table.values), _AT_ONCE)
        return np.concatenate([self._row_densities(self.standardised(table, n, n + _AT_ONCE)) for n in blocks])

    def _row_densities(self, rows: Tensor) -> NDArray[np.float64]:
        units = (~rows.isnan()).double() @ self.scale.log()
        return (self.estimator.score_samples(rows).double() - units).cpu().numpy()

    def check(self, table: Table) -> None:
        """Refuse tables of other columns, and missing numbers where the model has no use for them."""
        if table.values.shape[1] != len(self.centre):
            raise DataError(
                f"{table.path}: expected {len(self.centre)} columns of numbers as in training, "
                f"got {table.values.shape[1]}; give such a table"
            )
        if isinstance(self.estimator, VAE) and table.missing:
            raise DataError(
                f"{table.path}: expected every number, got {table.missing:,} missing; fill them in, "
                "or use --model mixture"
            )

    def learn_levels(self, table: Table) -> NDArray[np.float64]:
        """Note the densities of what was held out, to rank others by; gives them."""
        found = self.log_densities(table)
        self.levels.copy_(torch.from_numpy(np.quantile(found, np.linspace(0, 1, LEVELS))))
        return found

    def ranks(self, log_densities: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of held-out items with a lower density."""
        return np.searchsorted(self.levels.cpu().numpy(), log_densities) / LEVELS

    def predict(self, table: Table | str | Path, k: int = 1, *, sequence: str = "") -> Iterator[Rating]:
        """Ratings of the rows, or the sequences, of a table or of the file that holds one."""
        table = table if isinstance(table, Table) else read_table(table, sequence=sequence)
        found = self.log_densities(table)
        ranks, parts = self.ranks(found), self.parts(table)
        noun = "sequence" if table.lengths or isinstance(self.estimator, HMM) else "row"
        for place, (density, rank) in enumerate(zip(found.tolist(), ranks.tolist(), strict=True)):
            name = table.labels[place] if table.labels else f"{noun} {place + 1}"
            answers = () if parts is None else self._best(parts[place], k)
            yield Rating(f"{Path(table.path).name} {name}", density, rank, answers)

    def _best(self, shares: NDArray[np.float64], k: int) -> tuple[Part, ...]:
        noun = "state" if isinstance(self.estimator, HMM) else "component"
        best = np.argsort(-shares, kind="stable")[:k].tolist()
        return tuple(Part(f"{noun} {each + 1}", float(shares[each])) for each in best)

    def parts(self, table: Table) -> NDArray[np.float64] | None:
        """The probability of each component for each row, or the share of each state in a sequence; none of a VAE."""
        if isinstance(self.estimator, HMM):
            where, how = self.asked(table)
            states = self.estimator.predict_proba(*where, **how).double().cpu().numpy()
            lengths = np.asarray(where[1])
            return np.add.reduceat(states, np.cumsum([0, *lengths[:-1]]), axis=0) / lengths[:, None]
        if isinstance(self.estimator, GaussianMixture):
            blocks = range(0, len(table.values), _AT_ONCE)
            rows = (self.standardised(table, n, n + _AT_ONCE) for n in blocks)
            return np.concatenate([self.estimator.predict_proba(each).cpu().numpy() for each in rows])
        return None


def load_density(run: str | Path, *, device: str = "auto") -> tuple[Density, DensityConfig]:
    """The best model of a run, and its config.

    >>> load_density("absent")
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent/model.safetensors: expected a checkpoint, got no such file; ...
    """
    with opened(run, "density", DensityConfig) as (checkpoint, config):
        width = len(checkpoint.tensors["centre"])
        _check_size(config, width, checkpoint.tensors)
        model = Density(build_estimator(config, width), torch.ones(width), torch.ones(width))
        model.load_state_dict(checkpoint.tensors)
        if isinstance(model.estimator, GaussianMixture):
            model.estimator.set_params(missing=True)
    return model.to(resolve_device(device)).eval(), config


def _check_size(config: DensityConfig, width: int, tensors: Mapping[str, Tensor]) -> None:
    """Refuse, by a ``ValueError``, settings that describe a larger model than there are numbers for."""
    shape = config.model
    if isinstance(shape, VAEShape):
        check_size(lambda: build_estimator(config, width), tensors)
        return
    states = shape.states if isinstance(shape, HMMShape) else 0
    needed = max(1, states) * shape.components * width + states**2
    if needed > sum(value.numel() for value in tensors.values()):
        raise ValueError(f"the settings describe a model of {needed:,} numbers and more, there are fewer")
