"""Connectionist temporal classification: the frame-wise labellings of a target, and labellings without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thalweg.errors import InfeasibleError, ShapeError
from thalweg.inference.search.protocol import Hypotheses
from thalweg.inference.structures.inputs import INTEGERS, counted, require_integers, require_tensor
from thalweg.inference.structures.lattice import PathStructure
from thalweg.kernels.lattice import Lattice
from thalweg.kernels.tracing import traced, uncompiled

_MOVES = ((1, 0), (1, 1), (1, 2))  # per frame: stay, go on, leave out the blank between unlike labels


def _frames(log_probs: Tensor, lengths: Tensor | Sequence[int] | None, blank: int) -> tuple[Tensor, Tensor]:
    require_tensor("log_probs", log_probs)
    if log_probs.dim() != 3 or not log_probs.is_floating_point() or 0 in log_probs.shape[1:]:
        raise ShapeError(
            "`log_probs` must be (B, T, C) with T and C at least 1 and a floating type, "
            f"got {tuple(log_probs.shape)} {log_probs.dtype}"
        )
    batch, steps, size = log_probs.shape
    if isinstance(blank, bool) or not isinstance(blank, int) or not 0 <= blank < size:
        raise ShapeError(f"`blank` must be a label in 0..{size - 1}, got {blank!r}")
    if log_probs.dtype not in (torch.float32, torch.float64):
        log_probs = log_probs.float()
    return log_probs, counted("lengths", lengths, batch, 1, steps)


def _spaced(targets: Tensor, counts: Tensor | Sequence[int] | None, shape: torch.Size, blank: int):
    """Targets with a blank before, between and after their symbols, and past them, (B, 2 U + 1), and their lengths."""
    batch, _, size = shape
    if not isinstance(targets, Tensor) or targets.dtype not in INTEGERS or targets.shape[:-1] != (batch,):
        got = f"{tuple(targets.shape)} {targets.dtype}" if isinstance(targets, Tensor) else type(targets).__name__
        raise ShapeError(f"`targets` must be integers (B, U) with B = {batch}, got {got}")
    width = targets.shape[1]
    counts = counted("target_lengths", counts, batch, 0, width)
    given = targets.cpu().numpy()  # a few numbers, which torch takes longer to look at
    there = np.arange(width) < counts.numpy()[:, None]
    symbols = given[there]
    if symbols.size and (symbols.min() < 0 or symbols.max() >= size or (symbols == blank).any()):
        item, place = np.argwhere(((given < 0) | (given >= size) | (given == blank)) & there)[0]
        raise ShapeError(
            f"`targets` must be labels in 0..{size - 1} other than the blank {blank}, "
            f"got {given[item, place]} at place {place} of batch item {item}"
        )
    spaced = np.full((batch, 2 * width + 1), blank, np.int64)
    spaced[:, 1::2][there] = symbols
    return torch.from_numpy(spaced), counts


@uncompiled
class CTC(PathStructure):
    r"""All ways to spread a target over frames: sequences of labels and blanks that become the target.

    A sequence of one label per frame becomes a labelling by joining runs of equal labels and then leaving out blanks.
    Those that become the target are weighted by the product of their frames' probabilities,

    .. math:: p(target) = \sum_{\pi : joined(\pi) = target} \prod_t p_t(\pi_t) = Z

    so that ``log_partition`` is the log-likelihood of the target and ``-log_partition`` what ``ctc_loss`` of torch
    gives.

    Args:
        log_probs: ``(B, T, C)``, normalised by the caller or not; the gradient in them is the posterior of each label
            in each frame. (Torch's gives the difference to the probabilities instead, which is the same behind a
            ``log_softmax`` alone.)
        targets: ``(B, U)`` labels without blanks; anything past the target's length.
        lengths: ``(B,)`` with 1 <= length <= T; ``target_lengths`` ``(B,)`` with 0 <= length <= U. All, if not given.
        blank: the label that stands for none.
        backend: ``"auto"`` picks compiled kernels for the device; ``"reference"`` is plain PyTorch.
        validate_args: check feasibility (on by default): a target that needs more frames than there are raises
            :class:`~thalweg.errors.InfeasibleError`; off, its log Z is -inf and its gradient 0.

    A structure is (B, T) int64: the label of each frame, -1 past the length. ``mode`` is the forced alignment, and
    :meth:`positions` says which symbol of the target each frame belongs to. Time O(B T U). Graves et al. (2006).

    >>> log_probs = torch.tensor([[[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.2, 0.1, 0.7]]]).log()
    >>> spread = CTC(log_probs, torch.tensor([[1, 2]]))
    >>> spread.mode, spread.log_partition.exp()
    (tensor([[1, 0, 2]]), tensor([0.4700]))
    >>> spread.positions(spread.mode)
    tensor([[ 0, -1,  1]])
    """

    def __init__(
        self,
        log_probs: Tensor,
        targets: Tensor,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        target_lengths: Tensor | Sequence[int] | None = None,
        blank: int = 0,
        backend: str = "auto",
        validate_args: bool | None = None,
    ):
        log_probs, frames = _frames(log_probs, lengths, blank)
        labels, counts = _spaced(targets, target_lengths, log_probs.shape, blank)
        self.blank, self.target_lengths = blank, counts
        device = log_probs.device
        rows, columns, labels = frames.to(device), (counts + counts).to(device), labels.to(device)
        lattice = Lattice(log_probs, _MOVES, rows, columns, labels=labels, ends=2)
        super().__init__(lattice, (log_probs.shape[1],), backend, validate_args)

    @property
    def targets(self) -> Tensor:
        """(B, U) int64, blanks past the length of each."""
        assert self.lattice.labels is not None
        return self.lattice.labels[:, 1::2]

    @property
    def lengths(self) -> Tensor:
        """(B,) int64."""
        return self.lattice.rows.clone()

    @property
    def frames_needed(self) -> Tensor:
        """The fewest frames that each target fits into, (B,): one for each symbol and one between equal neighbours.

        >>> CTC(torch.zeros(1, 4, 2), torch.tensor([[1, 1]])).frames_needed
        tensor([3])
        """
        targets = self.targets.cpu()
        equal = (targets[:, 1:] == targets[:, :-1]) & (targets[:, 1:] != self.blank)
        return self.target_lengths + equal.sum(-1)

    @property
    def inside(self) -> Tensor:
        """Which frames belong to an item, (B, T, 1)."""
        frames = torch.arange(self.lattice.scores.shape[-2], device=self.lattice.rows.device)
        return (frames < self.lattice.rows.unsqueeze(-1)).unsqueeze(-1)

    def _feasible(self, values: Tensor) -> Tensor:
        try:
            return super()._feasible(values)
        except InfeasibleError:
            short = (self.frames_needed > self.lattice.rows.cpu()).nonzero()
            if not len(short):
                raise
            item = int(short[0])
            raise InfeasibleError(
                f"the target of batch item {item} needs {int(self.frames_needed[item])} frames or more, "
                f"got {int(self.lattice.rows[item])}: every structure has score -inf; give it more frames"
            ) from None

    def _differences(self, other: CTC) -> Iterator[tuple[str, bool]]:
        yield from super()._differences(other)
        yield "`blank`", self.blank == other.blank
        yield "`targets`", torch.equal(self.targets, other.targets)
        yield "`target_lengths`", torch.equal(self.target_lengths, other.target_lengths)

    def of_moves(self, moves: Tensor) -> Tensor:
        """Paths (.., B, T) as the labels of frames."""
        labels, width, kinds = self.lattice.labels, self.lattice.width, len(_MOVES)
        assert labels is not None
        lanes = moves.clamp(min=0).div(kinds, rounding_mode="floor") % width
        return torch.where(moves < 0, -1, labels.expand(*moves.shape[:-1], -1).gather(-1, lanes))

    def parts_of(self, value: Tensor) -> Tensor:
        """One-hot vectors (.., B, T, C) of labels (.., B, T), 0 past the length."""
        size = self.lattice.scores.shape[-1]
        self._require_labels(value)
        own = value.to(self.lattice.scores.device).unsqueeze(-1) == torch.arange(size, device=self.lattice.rows.device)
        return (own & self.inside).to(self.lattice.scores.dtype)

    def _require_labels(self, value: Tensor) -> None:
        batch, steps = self.lattice.scores.shape[-3:-1]
        require_integers("labels", value, "(.., B, T)", {"B": batch, "T": steps}, (batch, steps))

    def structure_of(self, parts: Tensor) -> Tensor:
        """The labels that one-hot vectors mark, -1 where they mark none."""
        return torch.where(parts.sum(-1) > 0, parts.argmax(-1), -1)

    def score(self, value: Tensor) -> Tensor:
        """The score of labels of frames (.., B, T), as (.., B); -inf where they do not become the target."""
        scores = super().score(value)
        if not self.checked or traced():
            return scores
        return torch.where(self._becomes_target(value.to(scores.device)), scores, -torch.inf)

    def _becomes_target(self, value: Tensor) -> Tensor:
        first, inside = self._begins(value), self.inside.squeeze(-1)
        place = (first.cumsum(-1) - 1).clamp(0, max(self.targets.shape[1] - 1, 0))
        wanted = self.targets.to(value.device)
        if not wanted.shape[1]:
            return ((value == self.blank) | ~inside).all(-1)
        right = wanted.expand(*value.shape[:-1], -1).gather(-1, place) == value
        return (first.sum(-1) == self.target_lengths.to(value.device)) & (right | ~first).all(-1)

    def _begins(self, value: Tensor) -> Tensor:
        """Where a symbol begins: a label that is no blank and not that of the frame before."""
        before = torch.nn.functional.pad(value[..., :-1], (1, 0), value=-1)
        return (value != before) & (value != self.blank) & self.inside.squeeze(-1)

    def positions(self, value: Tensor) -> Tensor:
        """The place in the target that each frame belongs to, (.., B, T), -1 for blanks and past the length.

        >>> CTC(torch.zeros(1, 3, 3), torch.tensor([[1, 2]])).positions(torch.tensor([[1, 1, 2]]))
        tensor([[0, 0, 1]])
        """
        self._require_labels(value)
        value = value.to(self.lattice.scores.device)
        there = (value != self.blank) & self.inside.squeeze(-1)
        return torch.where(there, self._begins(value).cumsum(-1) - 1, -1)

    def __repr__(self) -> str:
        batch, steps, size = self.lattice.scores.shape
        return f"CTC(B={batch}, T={steps}, C={size}, U={self.targets.shape[1]}, backend={self.backend!r})"


class _Prefix(NamedTuple):
    """Rows of prefixes: log-probability that t frames become the prefix and end in a blank, or in its last symbol."""

    item: Tensor  # (R,)
    token: Tensor  # (R,) the last symbol, -1 of the empty prefix
    blank: Tensor  # (R, T + 1)
    last: Tensor  # (R, T + 1)
    begun: bool  # whether bos was fed


class CTCLabellings:
    r"""CTC without a target, as a model of labellings symbol by symbol: any search finds the best ones.

    The probability of a labelling is the sum over all frame-wise sequences that become it, and so is the probability
    that a labelling *begins* with a prefix (Graves et al., 2006); their quotients are p(next symbol | prefix). The
    blank, which no labelling contains, ends a labelling. So ``exact_search`` is prefix search and proves the best
    labelling, ``beam_search`` gives the k best, and ``sample_sequences`` draws labellings. The inputs of a search are
    the items' numbers, ``torch.arange(B)``; ``max_length`` T + 1 is always enough.

    ``log_probs`` (B, T, C), ``lengths`` and ``blank`` are those of :class:`CTC`; frames are normalised. Time O(T C) for
    each prefix that is extended.

    >>> from thalweg.inference import exact_search
    >>> model = CTCLabellings(torch.tensor([[[0.6, 0.4], [0.6, 0.4]]]).log())
    >>> model.joined(model.best_path())  # all blanks, which has probability 0.36
    [[]]
    >>> best = exact_search(model, torch.arange(1), max_length=3)
    >>> model.labels(best), best.scores.exp(), best.optimal
    ([[[1]]], tensor([[0.6400]]), tensor([True]))
    """

    def __init__(self, log_probs: Tensor, *, lengths: Tensor | Sequence[int] | None = None, blank: int = 0):
        log_probs, counts = _frames(log_probs, lengths, blank)
        self.device = log_probs.device
        self.lengths = counts.to(self.device)
        self.bos = self.eos = blank
        self.vocab_size = log_probs.shape[-1]
        there = torch.arange(log_probs.shape[1], device=self.device) < self.lengths.unsqueeze(-1)
        frames = torch.where(there.unsqueeze(-1), log_probs.detach(), 0.0).log_softmax(-1)
        wrong = frames.isnan().any(-1).nonzero()
        if len(wrong):
            item, frame = wrong[0].tolist()
            raise ShapeError(
                f"`log_probs` must have a finite label in every frame, got none in frame {frame} of batch item {item}"
            )
        self.frames = torch.where(there.unsqueeze(-1), frames, -torch.inf)

    def best_path(self) -> Tensor:
        """The likeliest label of each frame by itself, (B, T), -1 past the length: quick, and not the best labelling.

        >>> CTCLabellings(torch.tensor([[[0.6, 0.4], [0.3, 0.7]]]).log()).best_path()
        tensor([[0, 1]])
        """
        there = torch.arange(self.frames.shape[1], device=self.device) < self.lengths.unsqueeze(-1)
        return torch.where(there, self.frames.argmax(-1), -1)

    def joined(self, path: Tensor) -> list[list[int]]:
        """What labels of frames (B, T) become: runs joined, blanks left out.

        >>> CTCLabellings(torch.zeros(1, 4, 2)).joined(torch.tensor([[1, 1, 0, 1]]))
        [[1, 1]]
        """
        if path.dim() != 2 or path.dtype not in INTEGERS:
            raise ShapeError(f"labels must be integers (B, T), got {tuple(path.shape)} {path.dtype}")
        before = torch.nn.functional.pad(path[:, :-1], (1, 0), value=-1)
        kept = (path != before) & (path != self.eos) & (path >= 0)
        return [row[keep].tolist() for row, keep in zip(path, kept, strict=True)]

    def labels(self, found: Hypotheses) -> list[list[list[int]]]:
        """The labellings that a search found, without the blank at their ends: item, answer, symbol."""
        return [[[label for label in each if label != self.eos] for each in item] for item in found.sequences()]

    def begin(self, inputs: Tensor) -> _Prefix:
        """The empty prefix of the items with these numbers."""
        items = len(self.frames)
        rows = len(inputs) if isinstance(inputs, Tensor) and inputs.dim() == 1 else 0
        require_integers("`inputs`", inputs, "(R,), numbers of items,", {"B": items}, (rows,))
        if rows and not 0 <= int(inputs.min()) <= int(inputs.max()) < items:
            raise ShapeError(f"`inputs` must be numbers of items in 0..{items - 1}, got {inputs.tolist()}")
        inputs = inputs.to(self.device, torch.long)
        blank = torch.nn.functional.pad(self.frames[inputs][..., self.eos].cumsum(-1), (1, 0))
        return _Prefix(inputs, torch.full_like(inputs, -1), blank, torch.full_like(blank, -torch.inf), False)

    def select(self, state: _Prefix, rows: Tensor) -> _Prefix:
        """Rows of the state, in any order."""
        return _Prefix(state.item[rows], state.token[rows], state.blank[rows], state.last[rows], state.begun)

    def step(self, tokens: Tensor, state: _Prefix) -> tuple[Tensor, _Prefix]:
        """Extend each prefix by a symbol (bos by none): log p(next symbol | prefix), (R, C), and the state."""
        frames = self.frames[state.item]  # (R, T, C)
        state = self._extended(tokens, state, frames) if state.begun else state._replace(begun=True)
        blank, last = state.blank[:, :-1], state.last[:, :-1]  # before frame t
        children = (frames + torch.logaddexp(blank, last).unsqueeze(-1)).logsumexp(1)
        # After the same symbol a blank must come first.
        again = state.token.clamp(min=0).unsqueeze(-1)
        own = frames.gather(-1, again.unsqueeze(1).expand(-1, frames.shape[1], 1)).squeeze(-1)
        repeated = torch.where(
            state.token.unsqueeze(-1) < 0, children.gather(-1, again), (own + blank).logsumexp(1, True)
        )
        children = children.scatter(-1, again, repeated)
        end = self.lengths[state.item].unsqueeze(-1)
        children[:, self.eos] = torch.logaddexp(state.blank.gather(-1, end), state.last.gather(-1, end)).squeeze(-1)
        return (children - children.logsumexp(-1, True).nan_to_num(neginf=0.0)).clamp(max=0.0), state

    def _extended(self, tokens: Tensor, state: _Prefix, frames: Tensor) -> _Prefix:
        emitted = frames.gather(-1, tokens.view(-1, 1, 1).expand(-1, frames.shape[1], 1)).squeeze(-1)
        fresh = torch.where((tokens == state.token).unsqueeze(-1), -torch.inf, state.last)
        entry, blanks = torch.logaddexp(state.blank, fresh), frames[..., self.eos]
        none = torch.full_like(emitted[:, 0], -torch.inf)
        last, blank = [none], [none]
        for t in range(frames.shape[1]):
            ended = torch.logaddexp(blank[t], last[t])
            last.append(emitted[:, t] + torch.logaddexp(last[t], entry[:, t]))
            blank.append(blanks[:, t] + ended)
        return state._replace(token=tokens, last=torch.stack(last, -1), blank=torch.stack(blank, -1))
