r"""The recursion of segmentations in plain PyTorch, over any algebra of :mod:`thalweg.kernels.semirings`.

Segments that are open at position t are held one by one, for each label and each number of positions so far:

.. math:: w_t(1, c) = b_t(c) \bigoplus_i a_{t-1}(i) \otimes A(i, c), \qquad w_t(d, c) = w_{t-1}(d - 1, c)

each times the content of position t; closing them gives :math:`a_t(c) = \bigoplus_d w_t(d, c) \otimes D(d, c)`. No
prefix sums are taken, so that nothing cancels and -inf needs no care. All of it in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from thalweg.kernels.reference.recursion import inside
from thalweg.kernels.semirings import Semiring
from thalweg.kernels.tracing import traced

__all__ = ["BLOCK", "Scores", "fold", "score"]

Scores = tuple[Tensor, ...]  # parts (.., B, T, 2, C), durations (.., K, C) or (B, T, K, C), moves (.., C, C)
BLOCK = 64  # positions between what is kept for a backward pass, at least


def fold(semiring: Semiring, lengths: Tensor, *scores: Scores) -> Tensor:
    """The sum over all segmentations in an algebra, (.., B), in float64; the parts past a length must be 0.

    ``scores`` are one tuple, or several for algebras that take further scores of the same parts. Time O(B T (K C +
    C^2)). For a backward pass blocks of positions are gone through twice, and O(B (T C + sqrt(T) K C)) is kept.

    >>> from thalweg.kernels.semirings import Log
    >>> two = torch.zeros(1, 3, 2, 2), torch.zeros(3, 2), torch.zeros(2, 2)
    >>> fold(Log(), torch.tensor([3]), two).exp().round()  # 2 whole, 2 * 4 in two, 8 in three
    tensor([18.], dtype=torch.float64)
    """
    wide = [_wide(each, lengths) for each in scores]
    steps = wide[0][0].shape[-3]
    block = max(BLOCK, math.isqrt(steps))
    pieces = zip(*(_split(each, block) for each in wide), strict=True)
    first = semiring.lift(*(each[0][..., 0, 1, :] for each in wide))
    state = first.unsqueeze(-2)[..., :0, :], first, first
    for number, piece in enumerate(pieces):
        run = _Block(semiring, lengths, number * block)
        tensors = [x for each in piece for x in each]
        if steps <= block or traced() or not torch.is_grad_enabled():
            state = run(*state, *tensors)
        else:
            state = checkpoint(run, *state, *tensors, use_reentrant=False, preserve_rng_state=False)
    return semiring.sum(state[2], -1)  # type: ignore[index]


def _wide(scores: Scores, lengths: Tensor) -> Scores:
    """In float64; what lies past a length counts for nothing."""
    parts, durations, moves = (x.double() for x in scores)
    if durations.dim() == 4:
        durations = torch.where(inside(lengths, parts.shape[-3])[:, :, None, None], durations, 0.0)
    if parts.shape[-3] == 1:  # nobody moves: a gradient of 0 rather than none
        parts = parts + moves.flatten()[:0].sum()
    return parts, durations, moves


def _split(scores: Scores, block: int) -> list[Scores]:
    """The scores of blocks of positions."""
    parts, durations, moves = scores
    pieces = parts.split(block, -3)
    tables = durations.split(block, 1) if durations.dim() == 4 else [durations] * len(pieces)
    return [(piece, table, moves) for piece, table in zip(pieces, tables, strict=True)]


class _Block:
    """Some positions of the recursion, as a function of tensors: the open segments, those closed at the position
    before, those closed at the end of an item, and the scores of the positions.
    """

    def __init__(self, semiring: Semiring, lengths: Tensor, low: int) -> None:
        self.semiring, self.lengths, self.low = semiring, lengths, low

    def __call__(self, open_: Tensor, closed: Tensor, final: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        semiring, every = self.semiring, [tensors[k : k + 3] for k in range(0, len(tensors), 3)]
        # Unbound once: a slice for each step would each fill a gradient as large as the whole.
        positions = [each[0].unbind(-3) for each in every]
        tables = [each[1].unbind(1) if each[1].dim() == 4 else [each[1]] * len(positions[0]) for each in every]
        most, moves = every[0][1].shape[-2], [each[2] for each in every]
        for k in range(len(positions[0])):
            content, begins = ([each[k][..., n, :] for each in positions] for n in (0, 1))
            if self.low + k == 0:
                entry = semiring.lift(*begins)
            else:
                entry = semiring.act(semiring.sum(semiring.act(closed.unsqueeze(-1), *moves), -2), *begins)
            open_ = torch.cat((entry.unsqueeze(-2), open_[..., : most - 1, :]), -2)
            open_ = semiring.act(open_, *(each.unsqueeze(-2) for each in content))
            count = open_.shape[-2]
            closed = semiring.sum(semiring.act(open_, *(each[k][..., :count, :] for each in tables)), -2)
            final = torch.where((self.lengths == self.low + k + 1).unsqueeze(-1), closed, final)
        return open_, closed, final


def score(scores: Scores, lengths: Tensor, labels: Tensor, begins: Tensor) -> Tensor:
    """The scores (.., B) of segmentations in float64, given as labels (.., B, T) and where segments begin, bool.

    >>> one = torch.zeros(1, 2, 2, 2), torch.tensor([[1.0, 1.0], [5.0, 5.0]]), torch.ones(2, 2)
    >>> score(one, torch.tensor([2]), torch.tensor([[0, 0]]), torch.tensor([[True, False]]))
    tensor([5.], dtype=torch.float64)
    """
    parts, durations, moves = scores
    steps = parts.shape[-3]
    there = inside(lengths, steps)
    own = parts.expand(*labels.shape, 2, parts.shape[-1]).gather(
        -1, labels[..., None, None].expand(*labels.shape, 2, 1)
    )
    content, begin = own.squeeze(-1).double().unbind(-1)
    items, at = (
        torch.arange(len(lengths), device=lengths.device).unsqueeze(-1),
        torch.arange(steps, device=lengths.device),
    )
    first = torch.where(begins, at, 0).cummax(-1).values
    ends = torch.cat((begins[..., 1:], begins.new_zeros(()).expand(*begins.shape[:-1], 1)), -1)
    ends = there & (ends | (at == lengths.unsqueeze(-1) - 1))
    size = (at - first).clamp(max=durations.shape[-2] - 1)
    where = {2: (), 3: (items,), 4: (items, at)}[durations.dim()]
    lasting = durations[(*where, size, labels)].double()
    from_, to = labels[..., :-1], labels[..., 1:]
    moved = (moves[from_, to] if moves.dim() == 2 else moves[items, from_, to]).double()
    total = torch.where(there, content, 0.0).sum(-1) + torch.where(begins & there, begin, 0.0).sum(-1)
    total = total + torch.where(ends, lasting, 0.0).sum(-1)
    return total + torch.where((begins & there)[..., 1:], moved, 0.0).sum(-1)
