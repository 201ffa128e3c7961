"""The conditional random field as the last layer of a tagger."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, DataError, ShapeError, nearest
from thalweg.inference.structures.chain import LinearChain
from thalweg.inference.structures.tag_schemes import TagConstraints
from thalweg.kernels.tracing import uncompiled
from thalweg.layers.padded import keeps_all, kept_lengths

_REDUCTIONS = ("none", "sum", "mean", "token_mean")


class KBest(NamedTuple):
    """The k best tag sequences of each item, best first.

    Attributes:
        tags: ``(B, K, T)`` int64, batch first whatever the layer's layout; -1 where the mask is off, and
            throughout a sequence that does not exist because there are fewer than K.
        scores: ``(B, K)``, falling; ``-inf`` where missing.
        probabilities: ``(B, K)``, p(tags | emissions); 0 where missing.

    >>> best = CRF(2, batch_first=True).k_best(torch.tensor([[[0.0, 9.0]]]), k=2)
    >>> best.tags.tolist()
    [[[1], [0]]]
    """

    tags: Tensor
    scores: Tensor
    probabilities: Tensor


class _Kept(NamedTuple):
    """The positions that a mask keeps: how many, and where, None where they are the first."""

    lengths: list[int] | None  # B numbers, which the host has: asking a GPU for them again would wait
    order: Tensor | None  # (B, T): the kept positions in order, then the others

    def compact(self, x: Tensor) -> Tensor:
        """``x`` (B, T, ...) with the kept positions moved to the front; the gradient goes back where it came from."""
        if self.order is None:
            return x
        return x.gather(1, self.order.view(*self.order.shape, *[1] * (x.dim() - 2)).expand_as(x))

    def spread(self, x: Tensor, axis: int) -> Tensor:
        """The opposite: the positions of ``x`` (B, ...), which ``axis`` counts, back to where they were."""
        if self.order is None:
            return x
        back = self.order.argsort(dim=1)
        shape = [1] * x.dim()
        shape[0], shape[axis] = back.shape
        return x.gather(axis, back.view(shape).expand_as(x))


_ALL = _Kept(None, None)


@uncompiled
class CRF(nn.Module):
    r"""Linear-chain conditional random field over tag sequences (Lafferty et al., 2001).

    .. math:: \log p(y | e) = start(y_1) + \sum_t e_t(y_t) + \sum_t A(y_t, y_{t+1}) + end(y_L) - \log Z(e)

    A drop-in for ``torchcrf.CRF`` of pytorch-crf 0.7: the same constructor, ``forward``, ``decode`` and parameters,
    drawn in the same order from the same range, so that state dicts load both ways and one seed gives one layer.

    A mask (bool or integers, like ``tags``) is true where a position counts. One that is true up to some length costs
    nothing. One with gaps, as for tags on the first pieces of words only, means the chain over the kept positions: the
    tag of a kept position follows the tag of the kept position before it, however far; what lies between counts for
    nothing and gets gradient 0. Results that have positions put them where they were. What is masked may hold anything,
    also tags such as -100. An item with no kept position is an error.

    Args:
        num_tags: C.
        batch_first: ``emissions`` are (B, T, C), ``tags`` and ``mask`` (B, T); otherwise (T, B, C) and (T, B).
        constraints: scores of -inf and 0, as :func:`thalweg.inference.tag_constraints` makes them, that are added to
            the parameters whenever they are used; they are no part of the state dict.
        backend: as in :class:`~thalweg.inference.LinearChain`.
        low_memory: as in :class:`~thalweg.inference.LinearChain`.

    >>> _ = torch.manual_seed(0)
    >>> crf = CRF(num_tags=3, batch_first=True)
    >>> emissions = torch.tensor([[[4.0, 0.0, 0.0], [0.0, 4.0, 0.0]]], requires_grad=True)
    >>> loss = -crf(emissions, torch.tensor([[0, 2]]))
    >>> loss.backward()
    >>> crf.decode(emissions)
    [[0, 1]]
    """

    def __init__(
        self,
        num_tags: int,
        batch_first: bool = False,
        *,
        constraints: TagConstraints | None = None,
        backend: str = "auto",
        low_memory: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(num_tags, bool) or not isinstance(num_tags, int) or num_tags < 1:
            raise ConfigError(f"`num_tags` must be an integer of at least 1, got {num_tags!r}")
        self.num_tags, self.batch_first = num_tags, batch_first
        self.backend, self.low_memory = backend, low_memory
        self.start_transitions = nn.Parameter(torch.empty(num_tags))
        self.end_transitions = nn.Parameter(torch.empty(num_tags))
        self.transitions = nn.Parameter(torch.empty(num_tags, num_tags))
        self.is_constrained = constraints is not None
        shapes = {"transitions": (num_tags, num_tags), "start": (num_tags,), "end": (num_tags,)}
        for name, shape in shapes.items():
            scores = None if constraints is None else getattr(constraints, name).detach().clone()
            if scores is not None and scores.shape != shape:
                raise ShapeError(
                    f"`constraints.{name}` must be {shape} for num_tags = {num_tags}, got {tuple(scores.shape)}; "
                    "make them from the names of all tags"
                )
            self.register_buffer(f"_{name}_constraints", scores, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw start, end and transition scores from U(-0.1, 0.1), in this order."""
        for parameter in (self.start_transitions, self.end_transitions, self.transitions):
            nn.init.uniform_(parameter, -0.1, 0.1)

    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor | None = None, reduction: str = "sum") -> Tensor:
        """log p(tags | emissions): ``()``, or ``(B,)`` with ``reduction="none"``; the loss is its negative.

        Args:
            emissions: ``(T, B, C)``, or ``(B, T, C)`` with ``batch_first``.
            tags: ``(T, B)`` or ``(B, T)``, 0 ... C - 1 where the mask is true.
            mask: the shape of ``tags``; all true when None.
            reduction: ``"sum"`` over the batch, ``"mean"`` over the batch, ``"token_mean"`` (the sum over the number of
                kept positions), or ``"none"``.

        Tags that the constraints forbid are a ``DataError`` that names the item and the position.
        Time O(B T C^2), memory O(B T C).

        >>> crf = CRF(num_tags=2)
        >>> crf(torch.zeros(3, 4, 2), torch.zeros(3, 4, dtype=torch.long), reduction="none").shape
        torch.Size([4])
        """
        if reduction not in _REDUCTIONS:
            raise ConfigError(f"unknown reduction `{reduction}`; {nearest(reduction, _REDUCTIONS)}")
        chain, kept = self._chain(emissions, mask)
        if tags.shape != emissions.shape[:2]:
            raise ShapeError(
                f"`tags` must be {self._layout} = {tuple(emissions.shape[:2])} as in `emissions`, "
                f"got {tuple(tags.shape)}"
            )
        tags = kept.compact(self._batch_first(tags))
        values = chain.log_prob(tags) if reduction == "none" else chain.total_log_prob(tags)
        if self.is_constrained and bool(torch.isneginf(values.detach()).any()):
            self._explain(chain, kept, tags)
        if reduction in ("none", "sum"):
            return values
        return values / (len(tags) if reduction == "mean" else chain.lengths.sum())

    def loss(self, emissions: Tensor, tags: Tensor, mask: Tensor | None = None) -> Tensor:
        """-log p(tags | emissions) of each item, ``(B,)``; arguments as in :meth:`forward`.

        >>> CRF(num_tags=2).loss(torch.zeros(1, 5, 2), torch.ones(1, 5, dtype=torch.long)).shape
        torch.Size([5])
        """
        return -self(emissions, tags, mask, reduction="none")

    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """The most probable tag sequence of each item (Viterbi), as plain lists of the kept positions.

        >>> CRF(num_tags=2).decode(torch.tensor([[[0.0, 9.0], [9.0, 0.0]], [[9.0, 0.0], [0.0, 9.0]]]))
        [[1, 0], [0, 1]]
        """
        with torch.no_grad():
            chain, _ = self._chain(emissions, mask)
            # -1 marks the end of a row; asking for the lengths would wait for a GPU once more.
            return [row[: row.index(-1)] if row[-1] < 0 else row for row in chain.mode.tolist()]

    def marginals(self, emissions: Tensor, mask: Tensor | None = None) -> Tensor:
        """p(y_t = c | emissions) in the shape of ``emissions``; 0 where the mask is off; differentiable.

        >>> [round(total, 4) for total in CRF(num_tags=2).marginals(torch.zeros(3, 1, 2)).sum(-1).flatten().tolist()]
        [1.0, 1.0, 1.0]
        """
        chain, kept = self._chain(emissions, mask)
        return self._batch_first(kept.spread(chain.marginals, axis=1))

    def k_best(self, emissions: Tensor, k: int, mask: Tensor | None = None) -> KBest:
        """The k most probable tag sequences of each item with their scores and probabilities.

        >>> best = CRF(num_tags=2).k_best(torch.zeros(3, 1, 2), k=8)
        >>> best.tags.shape, round(best.probabilities.sum().item(), 4)
        (torch.Size([1, 8, 3]), 1.0)
        """
        chain, kept = self._chain(emissions, mask)
        scores, tags = chain.top_k(k)
        return KBest(kept.spread(tags, axis=2), scores, (scores - chain.log_partition.unsqueeze(1)).exp())

    def sample(
        self,
        emissions: Tensor,
        sample_shape: Sequence[int] = (),
        mask: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Exact samples of p(tags | emissions): ``sample_shape`` and then the shape of ``tags``; -1 where masked.

        >>> CRF(num_tags=2).sample(torch.zeros(3, 4, 2), (5,)).shape
        torch.Size([5, 3, 4])
        """
        chain, kept = self._chain(emissions, mask)
        drawn = chain.sample((torch.Size(sample_shape).numel(),), generator=generator).transpose(0, 1)  # (B, S, T)
        drawn = kept.spread(drawn, axis=2).transpose(0, 1)
        drawn = drawn if self.batch_first else drawn.transpose(1, 2)
        return drawn.reshape(*sample_shape, *drawn.shape[1:])

    def distribution(self, emissions: Tensor, mask: Tensor | None = None) -> LinearChain:
        """p(tags | emissions) with all that a :class:`~thalweg.inference.LinearChain` offers, batch first.

        Under a mask with gaps its positions are the kept ones, moved to the front of each item.

        >>> CRF(num_tags=2).distribution(torch.zeros(3, 4, 2)).entropy().shape
        torch.Size([4])
        """
        return self._chain(emissions, mask)[0]

    def extra_repr(self) -> str:
        """The settings that are not the default, and the number of tags."""
        parts = [f"num_tags={self.num_tags}"]
        parts += ["batch_first=True"] if self.batch_first else []
        return ", ".join(parts + (["constrained"] if self.is_constrained else []))

    @property
    def _layout(self) -> str:
        return "(B, T)" if self.batch_first else "(T, B)"

    def _batch_first(self, x: Tensor) -> Tensor:
        return x if self.batch_first else x.transpose(0, 1)

    def _chain(self, emissions: Tensor, mask: Tensor | None) -> tuple[LinearChain, _Kept]:
        shape = emissions.shape
        if len(shape) != 3 or shape[2] != self.num_tags:
            raise ShapeError(
                f"`emissions` must be {self._layout[:-1]}, C) with C = {self.num_tags} (num_tags), got {tuple(shape)}"
            )
        kept = _ALL if mask is None else self._kept(emissions, mask)
        transitions, start, end = self._scores()
        if self.is_constrained:
            transitions = transitions + self.get_buffer("_transitions_constraints")
            start, end = start + self.get_buffer("_start_constraints"), end + self.get_buffer("_end_constraints")
        emissions = kept.compact(self._batch_first(emissions))
        settings = {"lengths": kept.lengths, "backend": self.backend, "low_memory": self.low_memory}
        return LinearChain(emissions, transitions, start=start, end=end, **settings), kept

    def _scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of moves, first and last tags; by name they would take as long as all other checks together."""
        found = self._parameters.get
        transitions, start, end = found("transitions"), found("start_transitions"), found("end_transitions")
        if transitions is None or start is None or end is None:  # something else computes them
            return self.transitions, self.start_transitions, self.end_transitions
        return transitions, start, end

    def _kept(self, emissions: Tensor, mask: Tensor) -> _Kept:
        if mask.shape != emissions.shape[:2] or mask.is_floating_point():
            raise ShapeError(
                f"`mask` must be bool or integers {self._layout} = {tuple(emissions.shape[:2])} as in `emissions`, "
                f"got {tuple(mask.shape)} {mask.dtype}"
            )
        if mask.dtype != torch.bool or mask.device != emissions.device:
            mask = mask.to(device=emissions.device, dtype=torch.bool)
        if keeps_all(mask):
            return _ALL
        mask = self._batch_first(mask)
        counts = kept_lengths(mask)
        host = counts.tolist()  # the one wait for the device
        if 0 in host:
            raise ShapeError(
                f"`mask` must keep at least one position of each item, got none for batch item {host.index(0)}; "
                "leave that item out"
            )
        least = min(host, default=mask.shape[1])
        if least == mask.shape[1]:
            return _ALL
        if least > 0:
            return _Kept(host, None)
        return _Kept([abs(count) for count in host], (~mask).to(torch.uint8).argsort(dim=1, stable=True))

    def _explain(self, chain: LinearChain, kept: _Kept, tags: Tensor) -> None:
        """Raise if the constraints are why a tag sequence has probability 0; scores of -inf have their own reasons."""
        moves, first, last = (self.get_buffer(f"_{name}_constraints") for name in ("transitions", "start", "end"))
        for item in torch.isneginf(chain.log_prob(tags)).nonzero().flatten().tolist():
            path = tags[item, : int(chain.lengths[item])].tolist()
            scores = [float(first[path[0]]), *(float(moves[i, j]) for i, j in pairwise(path)), float(last[path[-1]])]
            broken = [place for place, score in enumerate(scores) if score == float("-inf")]
            if not broken:
                continue
            place = min(broken[0], len(path) - 1)
            where = place if kept.order is None else int(kept.order[item, place])
            what = f"tag {path[place]} cannot follow tag {path[place - 1]}"
            what = f"tag {path[0]} cannot be the first" if broken[0] == 0 else what
            what = f"tag {path[-1]} cannot be the last" if broken[0] == len(path) else what
            raise DataError(
                f"`tags` must keep to the constraints, got a sequence where {what} (position {where} of batch item "
                f"{item}); mend the tags or give other constraints"
            )
