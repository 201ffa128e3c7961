"""An aligner of strings: chunks of source symbols with chunks of target symbols, learned from pairs alone by EM."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thalweg.energies.aligner.grids import Grid, Side, Symbols, code_grids, sides_of
from thalweg.errors import ConfigError, DataError, NotFittedError
from thalweg.files import TensorFormat, making_sense, read_tensors, write_tensors
from thalweg.inference.structures.alignment import Alignment

_FILES = TensorFormat(
    kind="thalweg-aligner",
    version=1,
    name="a saved aligner",
    absent="save one or name another file",
    damaged="restore it from a copy",
    other="name a file that `save` wrote",
)
_UNSEEN = 0.1  # occurrences of a pair of chunks that none were seen of, where a pair of strings is judged


@dataclass(frozen=True, kw_only=True)
class AlignerConfig:
    """What the aligner may align.

    Attributes:
        source: most symbols of a source chunk; ``target`` most symbols of a target chunk.
        delete: a source symbol may be aligned with nothing.
        insert: a target symbol may be aligned with nothing.
        both: chunks of more than one symbol may be aligned with each other; otherwise one side has one.
        iterations: passes of EM at most.
        tolerance: EM ends when a pass gains less than this for each pair, in nats.

    >>> AlignerConfig(source=2, target=1, insert=False).moves
    ((1, 1), (2, 1), (1, 0))
    """

    source: int = 2
    target: int = 2
    delete: bool = True
    insert: bool = True
    both: bool = False
    iterations: int = 30
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("source", "target", "iterations"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or not 1 <= value <= (8 if name != "iterations" else 10**6)
            ):
                raise ConfigError(f"`{name}` must be an integer of at least 1 (chunks: at most 8), got {value!r}")
        if not self.tolerance >= 0:
            raise ConfigError(f"`tolerance` must be 0 or more, got {self.tolerance!r}")

    @property
    def moves(self) -> tuple[tuple[int, int], ...]:
        """Pairs (symbols of the source, symbols of the target)."""
        chunks = [(a, b) for a in range(1, self.source + 1) for b in range(1, self.target + 1)]
        chunks = [move for move in chunks if self.both or 1 in move]
        return (*chunks, *([(1, 0)] if self.delete else []), *([(0, 1)] if self.insert else []))


class AlignedPair(NamedTuple):
    """Two strings as pairs of chunks, and the log-probability of the pair (the sum over all alignments).

    >>> AlignedPair([(("p", "h"), ("F",))], -2.0).text()
    'ph|F'
    """

    chunks: list[tuple[tuple[str, ...], tuple[str, ...]]]
    log_prob: float

    def text(self, *, between: str = " ", within: str = "", empty: str = "_") -> str:
        """Pairs of chunks as ``source|target``; ``within`` stands between the symbols of a chunk."""
        return between.join("|".join(within.join(side) or empty for side in pair) for pair in self.chunks)


class ChunkAligner:
    r"""A distribution over pairs of chunks, and with it over the ways to cut two strings into the same number of them:

    .. math:: p(x, y) = \sum_{a} \prod_{(u, v) \in a} \theta(u, v), \qquad \sum_{u, v} \theta(u, v) = 1

    Alignments a are the paths of :class:`~thalweg.inference.Alignment` with a move for each size of chunks. EM counts
    how often each pair of chunks is expected to be used (posteriors of all alignments) and sets theta in proportion,
    which never lowers the likelihood. Bisani and Ney (2008); Jiampojamarn et al. (2007).

    Time of a pass O(pairs x I J M).

    >>> pairs = [("cab", "kab"), ("back", "bak"), ("cat", "kat"), ("tack", "tak"), ("at", "at"), ("taba", "taba")]
    >>> ChunkAligner().fit(pairs).align([("tack", "tak")])[0].text()
    't|t a|a ck|k'
    """

    def __init__(self, config: AlignerConfig | None = None, **settings: Any) -> None:
        self.config = config or AlignerConfig(**settings)
        self.history: list[float] = []  # log-likelihood before each pass, and after the last
        self._sides: tuple[Side, Side] | None = None
        self._codes, self.counts = np.zeros(0, np.int64), torch.zeros(0, dtype=torch.float64)

    # Learning.

    def fit(
        self, pairs: Sequence[tuple[Symbols, Symbols]], *, listener: Callable[[dict[str, Any]], None] | None = None
    ) -> ChunkAligner:
        """Learn from pairs of strings, or of sequences of symbols; those that no alignment fits count for nothing.

        The ``listener`` hears of each pass that is done.

        >>> ChunkAligner().fit([("ab", "xy"), ("b", "y")]).history[-1] < 0
        True
        """
        if not pairs:
            raise DataError("an aligner needs at least one pair to learn from, got none")
        self._sides = sides_of(pairs, (self.config.source, self.config.target))
        grids = code_grids(pairs, self._sides, self.config.moves)
        self._codes = np.unique(np.concatenate([np.unique(grid.codes) for grid in grids]))
        self._codes = self._codes[self._codes >= 0]
        places = [(grid, self._places(grid)) for grid in grids]
        size = len(self._codes)
        logs = torch.cat((torch.full((size,), -math.log(max(size, 1)), dtype=torch.float64), torch.zeros(1).double()))
        self.history = []
        for _ in range(self.config.iterations):
            counts, total, fitting = self._expected(places, logs)
            if not fitting:
                raise DataError(f"no pair can be aligned by moves {self.config.moves}; allow longer chunks or gaps")
            self.history.append(total)
            self.counts = counts
            logs[:size] = (counts / counts.sum()).log()
            if listener is not None:
                listener({"event": "passed", "done": len(self.history), "of": self.config.iterations})
            if len(self.history) > 1 and total - self.history[-2] < self.config.tolerance * fitting:
                break
        self.history.append(self._expected(places, logs)[1])
        return self

    def _places(self, grid: Grid) -> Tensor:
        """Which pair of chunks each move aligns, as a place in the table; one past the last where there is none."""
        places = np.searchsorted(self._codes, grid.codes)
        known = (
            self._codes[np.minimum(places, max(len(self._codes) - 1, 0))] == grid.codes if len(self._codes) else False
        )
        return torch.from_numpy(np.where(known, places, len(self._codes)))

    def _paths(self, grid: Grid, scores: Tensor) -> Alignment:
        rows, columns = torch.from_numpy(grid.rows), torch.from_numpy(grid.columns)
        moves = self.config.moves
        return Alignment(scores, moves=moves, lengths=rows, target_lengths=columns, validate_args=False)

    def _expected(self, places: list[tuple[Grid, Tensor]], logs: Tensor) -> tuple[Tensor, float, int]:
        """Expected uses of each pair of chunks, the log-likelihood and how many pairs it is of."""
        counts, total, fitting = torch.zeros(len(logs), dtype=torch.float64), 0.0, 0
        for grid, where in places:
            values, uses = self._posterior(grid, logs[where])
            fits = values > -math.inf
            total, fitting = total + float(values[fits].sum()), fitting + int(fits.sum())
            counts.index_add_(0, where.flatten(), uses.flatten())
        return counts[:-1], total, fitting

    def _posterior(self, grid: Grid, scores: Tensor) -> tuple[Tensor, Tensor]:
        """log p of each pair and the probability of each move."""
        scores = scores.detach().requires_grad_()
        values = self._paths(grid, scores).log_partition
        return values.detach(), torch.autograd.grad(values.sum(), scores)[0]

    # Use.

    @property
    def chunks(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """The pairs of chunks of the table, in the order of :attr:`counts`."""
        source, target = self._fitted()
        return [
            (source.chunk(code // target.chunks), target.chunk(code % target.chunks)) for code in self._codes.tolist()
        ]

    def _fitted(self) -> tuple[Side, Side]:
        if self._sides is None:
            raise NotFittedError("this aligner has learned nothing yet: call `fit` or `load` first")
        return self._sides

    def _smoothed(self, counts: Tensor) -> Tensor:
        """Log-probabilities from counts, with a little for what was never seen; the last is that of unknown pairs."""
        counts = torch.cat((counts, counts.new_zeros(1)))
        return ((counts + _UNSEEN) / (counts.sum() + _UNSEEN * len(counts))).log()

    def _scores(self, grid: Grid, logs: Tensor) -> Tensor:
        """Scores of moves; what was never seen is allowed to single symbols alone."""
        where = self._places(grid)
        single = torch.tensor([max(move) == 1 for move in self.config.moves])
        return torch.where((where == len(logs) - 1) & ~single, -math.inf, logs[where])

    def paths(self, pairs: Sequence[tuple[Symbols, Symbols]]) -> Alignment:
        """All alignments of each pair, in one batch and in order, for posteriors, k best and samples.

        >>> ChunkAligner().fit([("ab", "xy"), ("b", "y")]).paths([("ab", "xy")]).marginals.shape
        torch.Size([1, 3, 3, 5])
        """
        sides, moves = self._fitted(), self.config.moves
        [grid] = code_grids(pairs, sides, moves, at_once=2**40)
        back = np.argsort(grid.items)
        grid = Grid(*(part[back] for part in grid))
        return self._paths(grid, self._scores(grid, self._smoothed(self.counts)))

    def align(self, pairs: Sequence[tuple[Symbols, Symbols]]) -> list[AlignedPair | None]:
        """The best alignment of each pair, in order; None where no alignment fits.

        >>> ChunkAligner(insert=False).fit([("ab", "xy"), ("b", "y")]).align([("b", "xyxy")])
        [None]
        """
        logs = self._smoothed(self.counts)
        found: list[AlignedPair | None] = [None] * len(pairs)
        for grid in code_grids(pairs, self._fitted(), self.config.moves):
            paths = self._paths(grid, self._scores(grid, logs))
            for item, steps, value in zip(grid.items, paths.mode.tolist(), paths.log_partition.tolist(), strict=True):
                if value > -math.inf:
                    found[item] = AlignedPair(self._cut(pairs[item], steps), value)
        return found

    def _cut(
        self, pair: tuple[Symbols, Symbols], steps: list[list[int]]
    ) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        cuts = [(i, j, *self.config.moves[m]) for i, j, m in steps if m >= 0]
        return [(tuple(pair[0][i - a : i]), tuple(pair[1][j - b : j])) for i, j, a, b in cuts]

    def surprise(self, pairs: Sequence[tuple[Symbols, Symbols]]) -> Tensor:
        r"""How unlikely each pair of the lexicon that was learned from is by all others, (N,), in nats for each symbol.

        .. math:: -\log p_{-n}(x_n, y_n) / (I + J)

        where the pair's own expected counts are taken off those of its chunks: what occurs in no other entry is as good
        as never seen. A pair that was not learned from has at most what there is to take off. inf where no alignment
        fits. The highest are the entries to check by hand.

        >>> pairs = [("ab", "xy"), ("ba", "yx"), ("aab", "xxy"), ("bb", "yy"), ("ab", "yx")]
        >>> aligner = ChunkAligner().fit(pairs)
        >>> int(aligner.surprise(pairs).argmax())
        4
        """
        found = torch.empty(len(pairs), dtype=torch.float64)
        total, size = float(self.counts.sum()), len(self.counts) + 1
        logs = self._smoothed(self.counts)
        for grid in code_grids(pairs, self._fitted(), self.config.moves):
            where = self._places(grid)
            uses = self._posterior(grid, self._scores(grid, logs))[1]
            # Uses of a pair of chunks by an item, at each of the moves that align it.
            item = torch.arange(len(where)).view(-1, 1, 1, 1)
            keys, inverse = torch.unique((item * size + where).flatten(), return_inverse=True)
            own = torch.zeros(len(keys), dtype=torch.float64).index_add_(0, inverse, uses.flatten())
            counts = torch.cat((self.counts, torch.zeros(1).double()))
            own = torch.minimum(own, counts[keys % size])  # all there is, of a pair that was not learned from
            left = counts[where] - own[inverse].view(where.shape)
            taken = torch.zeros(len(where), dtype=torch.float64).index_add_(0, keys // size, own)
            less = total - taken.view(-1, 1, 1, 1)
            scores = ((left + _UNSEEN) / (less + _UNSEEN * size)).log()
            scores = torch.where(torch.isneginf(self._scores(grid, logs)), -math.inf, scores)
            values = self._paths(grid, scores).log_partition
            symbols = torch.from_numpy(grid.rows + grid.columns).clamp(min=1)
            found[torch.from_numpy(grid.items)] = -values / symbols
        return found

    # Files.

    def save(self, path: str | Path) -> None:
        """Write the table and the settings: one safetensors file with JSON inside, replaced atomically."""
        source, target = self._fitted()
        meta = {
            "config": asdict(self.config),
            "source": source.symbols,
            "target": target.symbols,
            "history": self.history,
        }
        tensors = {"codes": torch.from_numpy(self._codes), "counts": self.counts}
        write_tensors(Path(path), tensors, meta, _FILES)

    @classmethod
    def load(cls, path: str | Path) -> ChunkAligner:
        """Read what :meth:`save` wrote.

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "aligner.safetensors"
        >>> ChunkAligner().fit([("ab", "xy"), ("b", "y")]).save(path)
        >>> ChunkAligner.load(path).align([("b", "y")])[0].text()
        'b|y'
        """
        tensors, meta = read_tensors(Path(path), _FILES)
        with making_sense(Path(path), "expected the table of an aligner, got something else", _FILES.damaged):
            aligner = cls(AlignerConfig(**meta["config"]))
            config = aligner.config
            aligner._sides = (
                Side(tuple(map(str, meta["source"])), config.source),
                Side(tuple(map(str, meta["target"])), config.target),
            )
            aligner.history = [float(value) for value in meta["history"]]
            codes, counts = tensors["codes"], tensors["counts"]
            if codes.shape != counts.shape or codes.dim() != 1 or codes.dtype != torch.long:
                raise ValueError("the table must have a number for each pair of chunks")
            aligner._codes, aligner.counts = codes.numpy(), counts.double()
        return aligner
