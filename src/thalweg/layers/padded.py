"""Sequences of several lengths in one tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.kernels import on_cpu


class Padded(NamedTuple):
    """B sequences, padded at the end to a common length T.

    Attributes:
        tokens: ``(B, T)`` int64; past ``lengths[b]`` the padding symbol.
        lengths: ``(B,)`` int64, each at least 1; always on the CPU, where packing needs them.
        mask: ``(B, T)`` bool, true where a real symbol stands.

    Models take this; :func:`thalweg.data.pad` is the one place that makes it.

    >>> Padded(torch.tensor([[5, 6], [7, 1]]), torch.tensor([2, 1]), torch.tensor([[True, True], [True, False]])).size
    2
    """

    tokens: Tensor
    lengths: Tensor
    mask: Tensor

    @property
    def size(self) -> int:
        """Number of sequences B."""
        return self.tokens.size(0)

    def to(self, device: torch.device | str) -> Padded:
        """The same with tokens and mask on another device."""
        tokens, mask = (part.to(device, non_blocking=True) for part in (self.tokens, self.mask))
        return Padded(tokens, self.lengths, mask)

    def part(self, first: int, last: int) -> Padded:
        """The sequences first ... last - 1."""
        return Padded(self.tokens[first:last], self.lengths[first:last], self.mask[first:last])


def keeps_all(mask: Tensor) -> bool:
    """Whether a bool mask is known to keep everything; elsewhere than on the CPU it is not asked, for looking is dear.

    >>> keeps_all(torch.tensor([[True, True]])), keeps_all(torch.tensor([[True, False]]))
    (True, False)
    """
    return on_cpu(mask) and bool(mask.numpy().all())


def kept_lengths(mask: Tensor) -> Tensor:
    """How many positions of each row of a bool mask (B, T) are kept, (B,) int64; negative where they are not the first.

    >>> kept_lengths(torch.tensor([[True, True, False], [True, False, True], [False, False, False]]))
    tensor([ 2, -2,  0])
    """
    lengths = mask.sum(1)
    gaps = (mask[:, 1:] > mask[:, :-1]).any(1)
    return torch.where(gaps, -lengths, lengths)


def checked(source: Any, symbols: int, *, wait: bool = False) -> Padded:
    """The source as a model with ``symbols`` source symbols may follow it, on the CPU a copy that no caller can change.

    Raises :class:`ShapeError` unless it is a :class:`Padded` whose parts agree: lengths of 1 ... T, the mask that
    belongs to them, symbols 0 ... ``symbols`` - 1, those of the padding too. Tokens and mask on another device are
    taken as they are, the tokens looked at with ``wait``, because a look waits for it. Time O(B T).

    >>> checked(Padded(torch.tensor([[5, 6]]), torch.tensor([3]), torch.ones(1, 2, dtype=torch.bool)), 10)
    Traceback (most recent call last):
    ...
    thalweg.errors.ShapeError: `lengths` must be 1 ... 2, the width of `tokens`, got 3 for item 0; use thalweg.data.pad
    """
    if not isinstance(source, Padded) or not all(isinstance(part, Tensor) for part in source):
        raise ShapeError(f"sources must be a Padded of tensors, got {type(source).__name__}; use thalweg.data.pad")
    tokens, lengths, mask = source
    B, T = shape = tokens.shape if tokens.dim() == 2 else (-1, 0)
    if not (T or B == 0) or lengths.shape != (B,) or mask.shape != shape:
        got = ", ".join(str(tuple(part.shape)) for part in source)
        raise ShapeError(f"`tokens`, `lengths` and `mask` must be (B, T), (B,) and (B, T) with T >= 1, got {got}")
    if not (_whole(tokens) and _whole(lengths) and mask.dtype is torch.bool):
        got = ", ".join(str(part.dtype) for part in source)
        raise ShapeError(f"`tokens`, `lengths` and `mask` must be int64, int64 and bool, got {got}")
    lengths = _owned(lengths.cpu())
    if B:
        least, most = map(int, lengths.aminmax())
        if least < 1 or most > T:
            wrong = least if least < 1 else most
            item = int((lengths == wrong).nonzero()[0])
            raise ShapeError(
                f"`lengths` must be 1 ... {T}, the width of `tokens`, got {wrong} for item {item}; use thalweg.data.pad"
            )
    if not (tokens.is_cpu and mask.is_cpu):
        if wait:
            _check_symbols(tokens.cpu(), symbols)
        return Padded(tokens, lengths, mask)
    # In NumPy: for one source a call of torch takes longer than what it does.
    tokens, real = _owned(tokens), torch.from_numpy(np.arange(T) < lengths.numpy()[:, None])
    _check_symbols(tokens, symbols)
    if not torch.equal(mask, real):
        raise ShapeError("`mask` must be true at the first `lengths` positions alone; use thalweg.data.pad")
    return Padded(tokens, lengths, real)


def _check_symbols(tokens: Tensor, symbols: int) -> None:
    if not tokens.numel():
        return
    least, most = map(int, tokens.aminmax())
    if least < 0 or most >= symbols:
        wrong = least if least < 0 else most
        item, place = (tokens == wrong).nonzero()[0].tolist()
        raise ShapeError(
            f"`tokens` must be source symbols 0 ... {symbols - 1}, got {wrong} at item {item}, position {place}; "
            "encode with the alphabet that the model was built for"
        )


def _owned(x: Tensor) -> Tensor:
    return x.clone() if x.dtype is torch.long else x.long()


def _whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
