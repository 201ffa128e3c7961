"""Segmentations: semi-Markov conditional random fields, hidden Markov models with explicit durations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import index
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.inference.structures.base import Structure
from thalweg.inference.structures.inputs import counted, require_integers, require_tensor
from thalweg.kernels import segments as ops
from thalweg.kernels.dispatch import segment_kernels
from thalweg.kernels.reference import segments as reference
from thalweg.kernels.reference.recursion import inside
from thalweg.kernels.semirings import Semiring
from thalweg.kernels.tracing import traced, uncompiled


class Segment(NamedTuple):
    """Positions ``first`` .. ``past - 1`` of one label.

    >>> Segment(2, 5, 1).past
    5
    """

    first: int
    past: int
    label: int


@uncompiled
class SemiMarkov(Structure):
    r"""All ways to cut the L positions of each item into labelled segments of at most K positions, weighted by exp of

    .. math:: s(y) = start(c_1) + end(c_N) + \sum_n \Big( b_{f_n}(c_n) + \sum_{t=f_n}^{p_n - 1} e_t(c_n)
              + D(p_n - f_n, c_n) \Big) + \sum_{n<N} A(c_n, c_{n+1})

    for segments :math:`[f_n, p_n)` of label :math:`c_n`, the first from 0, each from where the one before ends, the
    last to L. With K = 1 it is a :class:`LinearChain`; a geometric D makes it one too.

    A segmentation is written as (B, T) int64: at the position where a segment of label c begins c, where it goes on
    C + c, past the length -1. :meth:`segments` and :meth:`from_segments` go between this and lists of :class:`Segment`.
    Its parts are (B, T, 2, C): ``[b, t, 0, c]``, position t lies in a segment of label c, and ``[b, t, 1, c]``, one
    begins there. So marginals hold both probabilities, and ``given(allowed=..)`` fixes labels, cuts or both.

    Args:
        content: ``(B, T, C)``, e; float32 or float64, lower precision is computed in float32.
        durations: D, ``(K, C)`` shared or ``(B, K, C)`` per item, ``[.., d - 1, c]`` for d positions; or ``(B, T, K,
            C)``, any score of the segment that ends at position t: the general semi-Markov field.
        transitions: A, ``(C, C)`` or ``(B, C, C)``, ``[.., i, j]`` scores a segment of j after one of i.
        begins: b, ``(B, T, C)``; zero when not given.
        start: ``(C,)`` and ``end``: ``(C,)``, zero when not given.
        lengths: ``(B,)`` with 1 <= length <= T; all T when not given. What lies past a length counts for nothing.
        backend: ``"auto"`` picks compiled kernels for the device; ``"reference"`` is plain PyTorch; ``"cpu"`` and
            ``"gpu"`` insist on the kernels. Scores of each segment, (B, T, K, C), are always plain PyTorch's.
        validate_args: check structures and feasibility (on by default).

    Sums are taken in float64 whatever the type. A score of -inf forbids; gradients stay finite. Time O(B T (K C +
    C^2)), never K C^2; memory O(B (T C + K C)). Sarawagi and Cohen (2004).

    >>> content = torch.tensor([[[2.0, 0.0], [2.0, 0.0], [0.0, 3.0]]])
    >>> y = SemiMarkov(content, torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.zeros(2, 2))
    >>> y.mode, y.segments(y.mode)
    (tensor([[0, 2, 1]]), [[Segment(first=0, past=2, label=0), Segment(first=2, past=3, label=1)]])
    >>> y.log_prob(y.mode).exp()
    tensor([0.5627])
    """

    def __init__(
        self,
        content: Tensor,
        durations: Tensor,
        transitions: Tensor,
        *,
        begins: Tensor | None = None,
        start: Tensor | None = None,
        end: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        backend: str = "auto",
        validate_args: bool | None = None,
    ):
        _check("content", content, "(B, T, C) with T and C at least 1", 3)
        batch, steps, _ = content.shape
        super().__init__(torch.Size((batch,)), torch.Size((steps,)), validate_args=validate_args)
        self._lengths = counted("lengths", lengths, batch, 1, steps).to(content.device)
        self.scores = _scores(content, durations, transitions, (begins, start, end), self._lengths)
        self.backend = backend
        if backend != "auto":
            segment_kernels(backend, self.scores[0])  # an unknown or unusable backend is told of here

    @property
    def lengths(self) -> Tensor:
        """(B,) int64."""
        return self._lengths.clone()

    @property
    def num_labels(self) -> int:
        """C."""
        return self.scores[0].shape[-1]

    @property
    def max_duration(self) -> int:
        """K."""
        return self.scores[1].shape[-2]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Scores of the parts (B, T, 2, C), start and end among them, durations and transitions."""
        return self.scores

    @property
    def inside(self) -> Tensor:
        """Which positions belong to an item, (B, T, 1, 1)."""
        return inside(self._lengths, self.event_shape[0])[:, :, None, None]

    def with_inputs(self, inputs: tuple[Tensor, ...]) -> SemiMarkov:
        """The same set under other scores of the same shapes and type."""
        other = object.__new__(type(self))
        Structure.__init__(other, self.batch_shape, self.event_shape, validate_args=self.checked)
        other._lengths, other.backend = self._lengths, self.backend
        other.scores = tuple(inputs)  # type: ignore[assignment]
        return other

    def _differences(self, other: SemiMarkov) -> Iterator[tuple[str, bool]]:
        yield from super()._differences(other)
        dims = {self.scores[1].dim(), other.scores[1].dim()}
        alike = self.max_duration == other.max_duration and dims != {3, 4}
        yield "K, and `durations` by item or by position", alike

    def fold(self, semiring: Semiring, *inputs: tuple[Tensor, ...]) -> Tensor:
        """The recursion by plain PyTorch, in float64."""
        return reference.fold(semiring, self._lengths, *inputs).to(inputs[0][0].dtype)

    def parts_of(self, value: Tensor) -> Tensor:
        """Segmentations (.., B, T) as ones and zeros (.., B, T, 2, C), zero past each length.

        >>> SemiMarkov(torch.zeros(1, 2, 1), torch.zeros(2, 1), torch.zeros(1, 1)).parts_of(torch.tensor([[0, 1]]))
        tensor([[[[1.],
                  [1.]],
        <BLANKLINE>
                 [[1.],
                  [0.]]]])
        """
        size = self.num_labels
        value = self._looked_at(value)
        labels = torch.arange(size, device=value.device)
        own = torch.stack((value.unsqueeze(-1) % size == labels, value.unsqueeze(-1) == labels), -2)
        return (own & (value >= 0)[..., None, None] & self.inside).to(self.scores[0].dtype)

    def structure_of(self, parts: Tensor) -> Tensor:
        """The segmentation that ones mark, -1 where they mark none."""
        there, begins = parts.sum(-1).unbind(-1)
        value = parts[..., 0, :].argmax(-1) + torch.where(begins > 0, 0, self.num_labels)
        return torch.where(there > 0, value, -1)

    def score(self, value: Tensor) -> Tensor:
        """The scores of segmentations (.., B, T), as (.., B); what lies past a length is ignored."""
        return self._score(value).to(self.scores[0].dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y) of segmentations (.., B, T), as (.., B); the difference is taken in float64."""
        return (self._score(value) - self._log_partition()).to(self.scores[0].dtype)

    def _score(self, value: Tensor, *, look: bool = True) -> Tensor:
        value = self._looked_at(value) if look else value
        size = self.num_labels
        tidy = torch.where(self.inside.squeeze((-1, -2)), value, 0)
        return reference.score(self._tidy(self.scores), self._lengths, tidy % size, tidy < size)

    def _log_partition(self) -> Tensor:
        """log Z in float64."""
        return self._feasible(ops.log_partition(self.scores, self._lengths, backend=self.backend))

    def _kernels(self) -> ModuleType | None:
        return ops.trusted_kernels(self.backend, self.scores, self._lengths)

    @property
    def log_partition(self) -> Tensor:
        """log Z, (B,); its gradient in the scores of the parts are the marginals."""
        return self._log_partition().to(self.scores[0].dtype)

    @property
    def marginals(self) -> Tensor:
        """The probability that t lies in a segment of c, and that one begins there, (B, T, 2, C); differentiable."""
        kernels = self._kernels()
        if kernels is None:
            return super().marginals
        self._require_feasible()
        return ops.marginals(kernels, self.scores, self._lengths)

    @property
    def mode(self) -> Tensor:
        """The segmentation with the highest score, (B, T); a tie goes to the shorter last segment and lower label."""
        kernels = self._kernels()
        return super().mode if kernels is None else self._found(kernels.viterbi(self.scores, self._lengths))

    @property
    def max_score(self) -> Tensor:
        """The score of the mode, (B,); differentiable, with the mode's own parts as gradient."""
        return self._score(self.mode, look=False).to(self.scores[0].dtype)

    def sample(
        self, sample_shape: Sequence[int] | torch.Size = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Exact samples, (\\*sample_shape, B, T): forward filtering, backward sampling.

        >>> SemiMarkov(torch.zeros(2, 3, 4), torch.zeros(3, 4), torch.zeros(4, 4)).sample((5,)).shape
        torch.Size([5, 2, 3])
        """
        kernels = self._kernels()
        if kernels is None or not hasattr(kernels, "sample"):
            return super().sample(sample_shape, generator=generator)
        shape = torch.Size(sample_shape)
        drawn = (shape.numel(), *self.batch_shape, *self.event_shape, 2)
        uniforms = torch.rand(drawn, generator=generator, dtype=torch.float64, device=self._lengths.device)
        found = kernels.sample(self.scores, self._lengths, uniforms)
        return self._found(found).view(*shape, *self.batch_shape, *self.event_shape)

    def _found(self, value: Tensor) -> Tensor:
        """Structures (.., B, T), unless an item has none."""
        missing = (value[..., 0] < 0).reshape(-1, len(self._lengths)).any(0)
        self._feasible(torch.where(missing, -math.inf, 0.0))
        return value

    def _looked_at(self, value: Tensor) -> Tensor:
        """The segmentation, if it is one; what lies past a length is not looked at, nor one that is -1 throughout."""
        batch, steps = self.scores[0].shape[:2]
        size, most = self.num_labels, self.max_duration
        require_integers("a segmentation", value, "(.., B, T)", {"B": batch, "T": steps}, (batch, steps))
        value = value.to(device=self._lengths.device, dtype=torch.long)
        if not self.checked or traced() or not value.numel():
            return value
        there = inside(self._lengths, steps) & (value >= 0).any(-1, keepdim=True)
        self._refuse(value, there & ((value < 0) | (value >= 2 * size)), f"lie in 0..{2 * size - 1} (2 C - 1)")
        before = torch.cat((torch.full_like(value[..., :1], -1), value[..., :-1] % size), -1)
        astray = there & (value >= size) & (value % size != before)
        self._refuse(value, astray, f"go on ({size} + c) only after label c")
        at = torch.arange(steps, device=value.device)
        first = torch.where(value < size, at, 0).cummax(-1).values
        self._refuse(value, there & (at - first >= most), f"begin anew after K = {most} positions")
        return value

    def _refuse(self, value: Tensor, wrong: Tensor, rule: str) -> None:
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            raise ShapeError(
                f"a segmentation must {rule}, got {int(value[tuple(at)])} at position {at[-1]} of batch item {at[-2]}"
            )

    def segments(self, value: Tensor) -> list[list[Segment]]:
        """The segments of each item of a segmentation (B, T); none for one that is -1 throughout.

        >>> p = SemiMarkov(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2, 2))
        >>> p.segments(torch.tensor([[1, 3, 0]]))
        [[Segment(first=0, past=2, label=1), Segment(first=2, past=3, label=0)]]
        """
        value = self._looked_at(value)
        if value.dim() != 2:
            raise ShapeError(f"a segmentation must be (B, T), got {tuple(value.shape)}")
        found = []
        for row, length in zip(value.tolist(), self._lengths.tolist(), strict=True):
            firsts = [t for t in range(length) if 0 <= row[t] < self.num_labels]
            pasts = [*firsts[1:], length]
            found.append([Segment(f, p, row[f]) for f, p in zip(firsts, pasts, strict=False)])
        return found

    def from_segments(self, segments: Sequence[Sequence[tuple[int, int, int]]]) -> Tensor:
        """The inverse: (B, T) from triples (first, past, label) of each item, which must cover it without a gap.

        >>> p = SemiMarkov(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2, 2))
        >>> p.from_segments([[(0, 2, 1), (2, 3, 0)]])
        tensor([[1, 3, 0]])
        """
        lengths = self._lengths.tolist()
        try:
            found = [[(index(first), index(past), index(label)) for first, past, label in each] for each in segments]
        except (TypeError, ValueError) as error:
            told = "lists of (first, past, label), integers, one list for each item"
            raise ShapeError(f"`segments` must be {told}: {error}") from error
        if len(found) != len(lengths):
            raise ShapeError(f"`segments` must have an entry for each of B = {len(lengths)} items, got {len(found)}")
        rows = torch.full((len(lengths), self.event_shape[0]), -1)
        for item, (each, length) in enumerate(zip(found, lengths, strict=True)):
            reached = 0
            for first, past, label in each:
                if first != reached or not first < past <= length or not 0 <= label < self.num_labels:
                    raise ShapeError(
                        f"segments must follow one another within the item's {length} positions with labels in 0.."
                        f"{self.num_labels - 1}, got {(first, past, label)} after position {reached} of item {item}"
                    )
                rows[item, first:past] = self.num_labels + label
                rows[item, first] = label
                reached = past
            if reached < length:
                raise ShapeError(f"segments must reach the item's length {length}, got {reached} for batch item {item}")
        return self._looked_at(rows)

    def __repr__(self) -> str:
        (batch, steps, _, size), most = self.scores[0].shape, self.max_duration
        return f"SemiMarkov(B={batch}, T={steps}, K={most}, C={size})"


def _check(name: str, x: Any, what: str, dims: int) -> None:
    require_tensor(name, x)
    if x.dim() != dims or not x.is_floating_point() or 0 in x.shape[1:]:
        raise ShapeError(f"`{name}` must be {what} and a floating type, got {tuple(x.shape)} {x.dtype}")


def _scores(
    content: Tensor, durations: Tensor, transitions: Tensor, edges: tuple[Tensor | None, ...], lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Parts (B, T, 2, C), durations and transitions in one type on one device, or a ShapeError.

    Every segmentation begins at 0 and covers the last position, so start and end are scores of parts there.
    """
    batch, steps, size = content.shape
    dtype = content.dtype if content.dtype in (torch.float32, torch.float64) else torch.float32
    begins, start, end = edges
    most = durations.shape[-2] if isinstance(durations, Tensor) and durations.dim() > 1 else 0
    told = f"with B = {batch}, T = {steps}, C = {size} as in `content`"
    shapes = {
        "durations": (durations, ((most, size), (batch, most, size), (batch, steps, most, size))),
        "transitions": (transitions, ((size, size), (batch, size, size))),
        "begins": (begins, ((batch, steps, size),)),
        "start": (start, ((size,),)),
        "end": (end, ((size,),)),
    }
    names = {
        "durations": "(K, C), (B, K, C) or (B, T, K, C) with K at least 1",
        "transitions": "(C, C) or (B, C, C)",
        "begins": "(B, T, C)",
    }
    for name, (x, allowed) in shapes.items():
        if x is None and name not in ("durations", "transitions"):
            continue
        require_tensor(name, x)
        assert x is not None
        if tuple(x.shape) not in allowed or not x.is_floating_point() or (name == "durations" and not most):
            raise ShapeError(
                f"`{name}` must be {names.get(name, '(C,)')} and a floating type, {told}, "
                f"got {tuple(x.shape)} {x.dtype}"
            )
        if x.device != content.device:
            raise ShapeError(f"`{name}` must lie on {content.device} as `content` does, got {x.device}")
    first = content.new_zeros(batch, steps, size, dtype=dtype) if begins is None else begins.to(dtype)
    inner = content.to(dtype)
    at = torch.arange(steps, device=content.device)
    if start is not None:
        first = torch.where((at == 0)[:, None], first + start.to(dtype), first)
    if end is not None:
        inner = torch.where((at == lengths.unsqueeze(1) - 1).unsqueeze(-1), inner + end.to(dtype), inner)
    return torch.stack((inner, first), -2), durations.to(dtype), transitions.to(dtype)
