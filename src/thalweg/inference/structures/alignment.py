"""Monotone alignments of two sequences: edit lattices, global, local and banded, and many-to-many alignments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.structures.inputs import counted, require_integers, require_tensor
from thalweg.inference.structures.lattice import PathStructure
from thalweg.kernels import lattice as ops
from thalweg.kernels.lattice import Lattice
from thalweg.kernels.tracing import traced, uncompiled

EDITS = ((1, 1), (1, 0), (0, 1))  # match or substitute, delete, insert
_MOST = 64  # moves: a kernel looks at each at every cell


def _moves(given: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    try:
        moves = tuple((index(a), index(b)) for a, b in given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`moves` must be pairs of numbers of symbols, got {given!r}") from error
    wrong = [move for move in moves if min(move) < 0 or max(move) < 1]
    if not 0 < len(moves) <= _MOST or len(set(moves)) < len(moves) or wrong:
        raise ConfigError(
            f"`moves` must be 1 to {_MOST} different pairs (a, b) with a, b >= 0 and not both 0, got {given!r}"
        )
    return moves


@uncompiled
class Alignment(PathStructure):
    r"""All monotone alignments of sequences x_1..x_I and y_1..y_J: paths from cell (0, 0) to cell (I, J).

    Cell (i, j) says that i symbols of x and j of y are done. Move m = (a, b) aligns the last a symbols of x with the
    last b of y, and a path is weighted by the exponential of the sum of its moves' scores:

    .. math:: s(y) = \sum_{(i, j, m) \in y} scores(i, j, m), \qquad (i - a_m, j - b_m) \to (i, j)

    Args:
        scores: ``(B, I + 1, J + 1, M)``: of move m *into* cell (i, j). What would come from outside of the grid counts
            for nothing, as all past the lengths. :meth:`of_edits` makes them of scores of pairs and of gaps.
        moves: M pairs (a, b); by default match or substitute (1, 1), delete (1, 0) and insert (0, 1). Larger ones
            align chunks: ``[(a, b) for a in range(1, 3) for b in range(1, 3)]``.
        lengths: ``(B,)`` with 0 <= length <= I, and ``target_lengths`` ``(B,)`` with 0 <= length <= J.
        local: paths begin and end in any cell and have at least one move, as in Smith and Waterman (1981).
        band: no cell further from the line between the corners: ``|j I - i J| <= band max(I, J)``, with the item's
            own lengths.
        backend: ``"auto"`` picks compiled kernels for the device; ``"reference"`` is plain PyTorch.
        validate_args: check values and feasibility (on by default).

    A structure is ``(S, 3)``: the moves in order as (i, j, m), -1 past the last; S is the most moves a path may have.
    ``marginals`` is the posterior of each move into each cell, ``(B, I + 1, J + 1, M)``. -inf forbids a move. Time
    O(B I J M), with a band O(B band (I + J) M). Needleman and Wunsch (1970); posteriors: Miyazawa (1995).

    >>> same = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])
    >>> pair = Alignment.of_edits(same, delete=-1.0, insert=-1.0)
    >>> pair.mode[0, :2].tolist(), pair.max_score
    ([[1, 1, 0], [2, 2, 0]], tensor([4.]))
    >>> pair.marginals[0, 1, 1, 0]
    tensor(0.9596)
    """

    def __init__(
        self,
        scores: Tensor,
        *,
        moves: Sequence[Sequence[int]] = EDITS,
        lengths: Tensor | Sequence[int] | None = None,
        target_lengths: Tensor | Sequence[int] | None = None,
        local: bool = False,
        band: int | None = None,
        backend: str = "auto",
        validate_args: bool | None = None,
    ):
        require_tensor("scores", scores)
        pairs = _moves(moves)
        if (
            scores.dim() != 4
            or not scores.is_floating_point()
            or scores.shape[3] != len(pairs)
            or 0 in scores.shape[1:]
        ):
            raise ShapeError(
                f"`scores` must be (B, I + 1, J + 1, M) with M = {len(pairs)} moves and a floating type, "
                f"got {tuple(scores.shape)} {scores.dtype}"
            )
        if band is not None and (isinstance(band, bool) or not isinstance(band, int) or not 1 <= band < 2**31):
            raise ConfigError(f"`band` must be an integer of at least 1 or None, got {band!r}")
        batch, height, width, _ = scores.shape
        device = scores.device
        lattice = Lattice(
            scores if scores.dtype in (torch.float32, torch.float64) else scores.float(),
            pairs,
            counted("lengths", lengths, batch, 0, height - 1).to(device),
            counted("target_lengths", target_lengths, batch, 0, width - 1).to(device),
            ends=0 if local else 1,
            band=band,
        )
        super().__init__(lattice, (ops.longest(lattice), 3), backend, validate_args)

    @classmethod
    def of_edits(cls, match: Tensor, delete: Tensor | float, insert: Tensor | float, **settings: object) -> Alignment:
        """The edit lattice of scores of pairs ``match`` (B, I, J) and of gaps; differentiable in all three.

        ``match[b, i, j]`` aligns x_i with y_j, both counted from 0. ``delete`` is a number or broadcasts against
        (B, I, J + 1): x_i with nothing, when j symbols of y are done; ``insert`` against (B, I + 1, J). Settings are
        those of the class.

        >>> Alignment.of_edits(torch.zeros(1, 2, 2), 0.0, 0.0).log_partition.exp()
        tensor([13.0000])
        """
        require_tensor("match", match)
        if match.dim() != 3:
            raise ShapeError(f"`match` must be (B, I, J), got {tuple(match.shape)}")
        batch, rows, columns = match.shape
        gaps = []
        for name, given, shape in (
            ("delete", delete, (batch, rows, columns + 1)),
            ("insert", insert, (batch, rows + 1, columns)),
        ):
            try:
                gap = torch.as_tensor(given, dtype=match.dtype, device=match.device)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ShapeError(f"`{name}` must be a number or a tensor, got {type(given).__name__}") from error
            try:
                gaps.append(gap.expand(shape))
            except RuntimeError as error:
                raise ShapeError(f"`{name}` must broadcast against {shape}, got {tuple(gap.shape)}") from error
        pad = torch.nn.functional.pad
        scores = (pad(match, (1, 0, 1, 0)), pad(gaps[0], (0, 0, 1, 0)), pad(gaps[1], (1, 0)))
        return cls(torch.stack(scores, -1), **settings)  # type: ignore[arg-type]

    @property
    def moves(self) -> tuple[tuple[int, int], ...]:
        """The M moves (a, b)."""
        return self.lattice.moves

    @property
    def inside(self) -> Tensor:
        """Which moves may be part of a path, (B, I + 1, J + 1, M)."""
        return ops.inside(self.lattice)

    def _differences(self, other: Alignment) -> Iterator[tuple[str, bool]]:
        yield "`moves`", self.lattice.moves == other.lattice.moves
        yield "`local`", self.lattice.ends == other.lattice.ends
        yield "lengths and `band`", torch.equal(self.inside, other.inside)

    def of_moves(self, moves: Tensor) -> Tensor:
        """Paths (.., B, S) as (.., B, S, 3)."""
        kinds, width = len(self.lattice.moves), self.lattice.width
        cell = moves.div(kinds, rounding_mode="floor")
        found = torch.stack((cell.div(width, rounding_mode="floor"), cell % width, moves % kinds), -1)
        return found.masked_fill((moves < 0).unsqueeze(-1), -1)

    def parts_of(self, value: Tensor) -> Tensor:
        """Paths (.., B, S, 3) as ones and zeros (.., B, I + 1, J + 1, M); rows of -1 count for nothing."""
        _, *sizes = self.lattice.scores.shape
        batch, (steps, _) = len(self.lattice.rows), self.event_shape
        require_integers("alignments", value, "(.., B, S, 3)", {"B": batch, "S": steps}, (batch, steps, 3))
        value = value.to(self.lattice.scores.device, torch.long)
        there = value[..., 0] >= 0
        if self.checked and not traced():
            self._require_paths(value, there)
        place = (value[..., 0] * sizes[1] + value[..., 1]) * sizes[2] + value[..., 2]
        marks = self.lattice.scores.new_zeros(*value.shape[:-2], sizes[0] * sizes[1] * sizes[2])
        marks = marks.scatter_add(-1, torch.where(there, place, 0), there.to(marks.dtype))
        return marks.view(*value.shape[:-2], *sizes)

    def _require_paths(self, value: Tensor, there: Tensor) -> None:
        """Raise a ShapeError for what is no path of the set; what is -1 throughout is no path, and passes."""
        grid = self.lattice
        sizes = tuple(grid.scores.shape[1:])
        low = (value >= 0).all(-1) & (value < torch.tensor(sizes, device=value.device)).all(-1)
        self._refuse(value, there & ~low, f"lie below {sizes}")
        i, j, m = torch.where(there.unsqueeze(-1), value, 0).unbind(-1)
        item = torch.arange(len(grid.rows), device=value.device).unsqueeze(-1)
        self._refuse(value, there & ~self.inside[item, i, j, m], "lie within the lengths and the band")
        cell = torch.stack((i, j), -1)
        origin = cell - torch.tensor(grid.moves, device=value.device)[m]
        follows = there.roll(1, -1) & (origin == cell.roll(1, -2)).all(-1)
        follows[..., :1] = grid.ends == 0 or (origin[..., :1, :] == 0).all(-1)
        self._refuse(value, there & ~follows, "begin where the move before ended, the first in (0, 0)")
        last = there & ~torch.nn.functional.pad(there[..., 1:], (0, 1))
        short = (i != grid.rows[item]) | (j != grid.columns[item])
        self._refuse(value, last & short & (grid.ends > 0), "end in the last cell")

    def _refuse(self, value: Tensor, wrong: Tensor, rule: str) -> None:
        if bool(wrong.any()):
            *_, item, step = at = wrong.nonzero()[0].tolist()
            got = tuple(value[tuple(at)].tolist())
            raise ShapeError(
                f"moves (i, j, m) of alignments must {rule}, got {got} at step {step} of batch item {item}"
            )

    def structure_of(self, parts: Tensor) -> Tensor:
        """The path whose moves are marked: sorted by cell they stand in its order."""
        flat = parts.flatten(-3) > 0
        found = flat.nonzero()
        rank = flat.cumsum(-1)[tuple(found.unbind(-1))] - 1
        moves = torch.full((*flat.shape[:-1], self.event_shape[0]), -1, dtype=torch.long, device=parts.device)
        moves[(*found[:, :-1].unbind(-1), rank)] = found[:, -1]
        return self.of_moves(moves)

    def __repr__(self) -> str:
        batch, height, width, kinds = self.lattice.scores.shape
        return f"Alignment(B={batch}, I={height - 1}, J={width - 1}, M={kinds}, backend={self.backend!r})"
