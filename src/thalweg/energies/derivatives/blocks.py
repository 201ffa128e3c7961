"""A ragged batch in parts whose sequences are about as long, so that little is computed for padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Numbers of an intermediate result, for as many sequences as are done together.
_AT_ONCE = 2**22

# By how much the longest sequence of a block may be longer than its shortest.
_LONGER = 1.25


def inside_of(values: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values with 0 past each length, whatever lay there, and which lie inside, ``(B, T)`` bool.

    >>> inside_of(torch.tensor([[3.0, torch.nan]]), torch.tensor([1]))
    (tensor([[3., 0.]]), tensor([[ True, False]]))
    """
    B, T = values.shape[:2]
    if lengths is None:
        return values, torch.ones(B, T, dtype=torch.bool, device=values.device)
    inside = torch.arange(T, device=values.device) < lengths.to(values.device).unsqueeze(1)
    past = ~inside if values.dim() == 2 else ~inside.unsqueeze(2)
    return values.masked_fill(past, 0), inside


def blocks(lengths: Tensor, numbers: Callable[[int], int]) -> Iterator[Tensor]:
    """Which sequences are done together, by length: each block's are at most a quarter longer than its shortest.

    Args:
        lengths: ``(B,)`` on the host.
        numbers: how many numbers an intermediate result has for a sequence of that length; a block has a few millions.

    >>> [each.tolist() for each in blocks(torch.tensor([9, 2, 8, 2]), lambda T: T)]
    [[1, 3], [2, 0]]
    """
    order = lengths.argsort(stable=True)
    ranked = lengths[order].tolist()
    begin = 0
    while begin < len(ranked):
        end = begin + 1
        while (
            end < len(ranked)
            and ranked[end] <= _LONGER * ranked[begin]
            and (end + 1 - begin) * numbers(ranked[end]) <= _AT_ONCE
        ):
            end += 1
        yield order[begin:end]
        begin = end


def in_blocks(
    some: Callable[[Tensor, Tensor | None], Tensor],
    values: Tensor,
    lengths: Tensor | None,
    numbers: Callable[[int], int],
) -> Tensor:
    """Rows of ``some(values, lengths)`` for a padded batch ``(B, T, ...)``, computed block by block.

    >>> in_blocks(lambda x, lengths: inside_of(x, lengths)[0].sum(1), torch.ones(2, 3), torch.tensor([3, 1]), int)
    tensor([3., 1.])
    """
    if lengths is None:
        size = max(1, _AT_ONCE // numbers(values.size(1)))
        return torch.cat([some(part, None) for part in values.split(size)])
    lengths = lengths.cpu()
    order = list(blocks(lengths, numbers))
    found = [some(values[rows.to(values.device), : int(lengths[rows[-1]])], lengths[rows]) for rows in order]
    answer = torch.cat(found)
    return torch.empty_like(answer).index_copy_(0, torch.cat(order).to(answer.device), answer)
