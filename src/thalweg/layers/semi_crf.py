"""The semi-Markov conditional random field as the last layer of a segmenter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError, nearest
from thalweg.inference.structures.inputs import require_tensor
from thalweg.inference.structures.semi_markov import Segment, SemiMarkov
from thalweg.kernels.tracing import uncompiled
from thalweg.layers.padded import kept_lengths

_REDUCTIONS = ("none", "sum", "mean")
Segments = Tensor | Sequence[Sequence[tuple[int, int, int]]]


class BestSegments(NamedTuple):
    """The k best segmentations of each item, best first.

    Attributes:
        segments: for each item at most K lists of :class:`~thalweg.inference.Segment`.
        scores: ``(B, K)``, falling; ``-inf`` where there are fewer.
        probabilities: ``(B, K)``, p(segments | content); 0 where missing.

    >>> best = SemiCRF(1, max_duration=2).k_best(torch.zeros(1, 2, 1), k=3)
    >>> [len(each) for each in best.segments[0]].count(1), best.probabilities.sum().round()
    (1, tensor(1., grad_fn=<RoundBackward0>))
    """

    segments: list[list[list[Segment]]]
    scores: Tensor
    probabilities: Tensor


@uncompiled
class SemiCRF(nn.Module):
    r"""Conditional random field over labelled segments of at most K positions (Sarawagi and Cohen, 2004).

    .. math:: \log p(y | e) = start(c_1) + \sum_n \Big( \sum_{t \in n} e_t(c_n) + D(|n|, c_n) \Big)
              + \sum_n A(c_n, c_{n+1}) + end(c_N) - \log Z(e)

    What a network says of position t and label c is the content e; how long segments of a label are (D), which follow
    one another (A), begin and end are parameters of the layer. A network may also score where segments begin.

    Segments are lists of (first, past, label) for each item that cover it without a gap, or the (B, T) tensor of
    :class:`~thalweg.inference.SemiMarkov`. A mask (B, T) is true up to the length of each item.

    Args:
        num_labels: C.
        max_duration: K.
        backend: as in :class:`~thalweg.inference.SemiMarkov`.

    >>> _ = torch.manual_seed(0)
    >>> crf = SemiCRF(num_labels=2, max_duration=3)
    >>> content = torch.tensor([[[4.0, 0.0], [4.0, 0.0], [0.0, 4.0]]], requires_grad=True)
    >>> crf.loss(content, [[(0, 2, 0), (2, 3, 1)]]).sum().backward()
    >>> [segment.label for segment in crf.decode(content)[0]][-1]
    1
    """

    def __init__(self, num_labels: int, max_duration: int, *, backend: str = "auto") -> None:
        super().__init__()
        for name, value in (("num_labels", num_labels), ("max_duration", max_duration)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"`{name}` must be an integer of at least 1, got {value!r}")
        self.num_labels, self.max_duration, self.backend = num_labels, max_duration, backend
        self.start = nn.Parameter(torch.empty(num_labels))
        self.end = nn.Parameter(torch.empty(num_labels))
        self.transitions = nn.Parameter(torch.empty(num_labels, num_labels))
        self.durations = nn.Parameter(torch.empty(max_duration, num_labels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw start, end, transition and duration scores from U(-0.1, 0.1), in this order."""
        for parameter in (self.start, self.end, self.transitions, self.durations):
            nn.init.uniform_(parameter, -0.1, 0.1)

    def distribution(self, content: Tensor, mask: Tensor | None = None, *, begins: Tensor | None = None) -> SemiMarkov:
        """p(segments | content) with all that a :class:`~thalweg.inference.SemiMarkov` offers.

        Args:
            content: ``(B, T, C)``; begins: ``(B, T, C)``, scores of segments that begin at a position, or None.
            mask: ``(B, T)`` bool or integers, true up to each length; all true when None.

        >>> SemiCRF(2, max_duration=4).distribution(torch.zeros(3, 5, 2)).entropy().shape
        torch.Size([3])
        """
        require_tensor("content", content)
        if content.dim() != 3 or content.shape[2] != self.num_labels:
            raise ShapeError(
                f"`content` must be (B, T, C) with C = {self.num_labels} (num_labels), got {tuple(content.shape)}"
            )
        edges = {"start": self.start, "end": self.end, "begins": begins}
        lengths = None if mask is None else self._lengths(content, mask)
        return SemiMarkov(content, self.durations, self.transitions, lengths=lengths, backend=self.backend, **edges)

    def forward(
        self,
        content: Tensor,
        segments: Segments,
        mask: Tensor | None = None,
        *,
        begins: Tensor | None = None,
        reduction: str = "sum",
    ) -> Tensor:
        """log p(segments | content): ``()``, or ``(B,)`` with ``reduction="none"``; the loss is its negative.

        >>> SemiCRF(2, max_duration=2)(torch.zeros(1, 2, 2), [[(0, 2, 1)]]) < 0
        tensor(True)
        """
        if reduction not in _REDUCTIONS:
            raise ConfigError(f"unknown reduction `{reduction}`; {nearest(reduction, _REDUCTIONS)}")
        p = self.distribution(content, mask, begins=begins)
        values = p.log_prob(segments if isinstance(segments, Tensor) else p.from_segments(segments))
        return values if reduction == "none" else values.sum() if reduction == "sum" else values.mean()

    def loss(
        self, content: Tensor, segments: Segments, mask: Tensor | None = None, *, begins: Tensor | None = None
    ) -> Tensor:
        """-log p(segments | content) of each item, ``(B,)``; arguments as in :meth:`forward`.

        >>> SemiCRF(2, max_duration=2).loss(torch.zeros(1, 2, 2), [[(0, 1, 1), (1, 2, 0)]]).shape
        torch.Size([1])
        """
        return -self(content, segments, mask, begins=begins, reduction="none")

    def decode(
        self, content: Tensor, mask: Tensor | None = None, *, begins: Tensor | None = None
    ) -> list[list[Segment]]:
        """The most probable segmentation of each item (Viterbi), as lists of segments.

        >>> crf = SemiCRF(2, max_duration=2)
        >>> _ = crf.durations.data.copy_(torch.tensor([[0.0, 0.0], [9.0, 9.0]]))
        >>> crf.decode(torch.tensor([[[0.0, 9.0], [0.0, 9.0]]]))
        [[Segment(first=0, past=2, label=1)]]
        """
        with torch.no_grad():
            p = self.distribution(content, mask, begins=begins)
            return p.segments(p.mode)

    def marginals(self, content: Tensor, mask: Tensor | None = None, *, begins: Tensor | None = None) -> Tensor:
        """The probability of each label, and that a segment of it begins, at each position, ``(B, T, 2, C)``.

        >>> SemiCRF(2, max_duration=2).marginals(torch.zeros(1, 3, 2))[0, :, 0].sum(-1).round()
        tensor([1., 1., 1.], grad_fn=<RoundBackward0>)
        """
        return self.distribution(content, mask, begins=begins).marginals

    def k_best(
        self, content: Tensor, k: int, mask: Tensor | None = None, *, begins: Tensor | None = None
    ) -> BestSegments:
        """The k most probable segmentations of each item with their scores and probabilities.

        >>> SemiCRF(2, max_duration=2).k_best(torch.zeros(1, 2, 2), k=6).scores.isfinite().all()
        tensor(True)
        """
        p = self.distribution(content, mask, begins=begins)
        scores, found = p.top_k(k)
        lists = [
            [each for each in map(list, row) if each] for row in zip(*map(p.segments, found.unbind(1)), strict=True)
        ]
        return BestSegments(lists, scores, (scores - p.log_partition.unsqueeze(1)).exp())

    def extra_repr(self) -> str:
        """The numbers of labels and positions."""
        return f"num_labels={self.num_labels}, max_duration={self.max_duration}"

    def _lengths(self, content: Tensor, mask: Tensor) -> list[int]:
        require_tensor("mask", mask)
        if mask.shape != content.shape[:2] or mask.is_floating_point():
            raise ShapeError(
                f"`mask` must be bool or integers (B, T) = {tuple(content.shape[:2])} as in `content`, "
                f"got {tuple(mask.shape)} {mask.dtype}"
            )
        found = kept_lengths(mask.to(device=content.device, dtype=torch.bool)).tolist()
        for item, count in enumerate(found):
            if count <= 0:
                what = "a gap in that" if count else "none"
                raise ShapeError(f"`mask` must keep the first positions of each item, got {what} of batch item {item}")
        return found
