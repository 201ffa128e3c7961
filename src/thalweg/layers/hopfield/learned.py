"""Hopfield layers with learned parts: pooling by learned states, and lookup in learned patterns."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError
from thalweg.layers.hopfield.layer import Hopfield, HopfieldOptions


class HopfieldPooling(nn.Module):
    """A set of patterns summed up by what learned states find in it, ``(B, queries * output)``.

    Args:
        size: width of a learned state, and of stored patterns unless ``stored`` says otherwise.
        queries: number of learned states; their readings stand in a row.
        options: as in :class:`Hopfield`.

    The states are projected once for the whole batch.

    >>> pooling = HopfieldPooling(8, queries=2, output=4)
    >>> pooling(torch.randn(3, 10, 8)).shape
    torch.Size([3, 8])
    """

    def __init__(self, size: int, *, queries: int = 1, **options: Unpack[HopfieldOptions]):
        super().__init__()
        _check_count("queries", queries)
        self.hopfield = Hopfield(size, **options)
        self.queries = nn.Parameter(torch.randn(queries, size) * size**-0.5)

    def forward(
        self,
        stored: Tensor,
        values: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """``stored (B, N, stored)`` -> ``(B, queries * output)``; others as in :meth:`Hopfield.forward`."""
        found = self.hopfield(
            stored, self._states(), values, key_padding_mask=key_padding_mask, attention_mask=attention_mask
        )
        return (found if self.hopfield.batch_first else found.transpose(0, 1)).flatten(1)

    def associations(
        self, stored: Tensor, *, key_padding_mask: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """The weight of each pattern for each learned state, ``(B, H, queries, N)``.

        >>> HopfieldPooling(8).associations(torch.randn(3, 10, 8)).shape
        torch.Size([3, 1, 1, 10])
        """
        masks = {"key_padding_mask": key_padding_mask, "attention_mask": attention_mask}
        return self.hopfield.associations(stored, self._states(), **masks)

    def energy(
        self,
        stored: Tensor,
        *,
        after: int = 0,
        key_padding_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Energy of each learned state among the patterns, ``(B, H, queries)``; see :meth:`Hopfield.energy`.

        >>> HopfieldPooling(8).energy(torch.randn(3, 10, 8)).shape
        torch.Size([3, 1, 1])
        """
        masks = {"key_padding_mask": key_padding_mask, "attention_mask": attention_mask}
        return self.hopfield.energy(stored, self._states(), after=after, **masks)

    def _states(self) -> Tensor:
        return self.queries.unsqueeze(0 if self.hopfield.batch_first else 1)


class HopfieldLookup(nn.Module):
    """States look up N learned patterns, ``(B, T, output)``.

    Args:
        size: width of states, and of learned patterns unless ``stored`` says otherwise.
        patterns: N.
        separate: values are learned too, apart from the patterns; otherwise they are made from the patterns.
        options: as in :class:`Hopfield`.

    Patterns are projected once for the whole batch, and the states of all items meet them in one product.

    >>> lookup = HopfieldLookup(8, patterns=20, steps=2)
    >>> lookup(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, size: int, *, patterns: int, separate: bool = False, **options: Unpack[HopfieldOptions]):
        super().__init__()
        _check_count("patterns", patterns)
        self.hopfield = Hopfield(size, **options)
        stored, values = self.hopfield.stored, self.hopfield.values
        if not separate and values != stored:
            raise ConfigError(f"values of another width than patterns ({values}, {stored}) need `separate=True`")
        self.patterns = nn.Parameter(torch.randn(patterns, stored) * stored**-0.5)
        self.targets = nn.Parameter(torch.randn(patterns, values) * values**-0.5) if separate else None

    def forward(
        self, state: Tensor, *, key_padding_mask: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """``state (B, T, size)`` -> ``(B, T, output)``; masks as in :meth:`Hopfield.forward`."""
        if not isinstance(state, Tensor):
            raise ShapeError(f"`state` must be a tensor of floating point, got {type(state).__name__}")
        stored, values = self._stored(self.patterns), None if self.targets is None else self._stored(self.targets)
        if key_padding_mask is not None or attention_mask is not None or state.dim() != 3:
            return self.hopfield(
                stored, state, values, key_padding_mask=key_padding_mask, attention_mask=attention_mask
            )
        # One long row of states: the patterns are the same for all items.
        found = self.hopfield(stored, state.flatten(0, 1).unsqueeze(0 if self.hopfield.batch_first else 1), values)
        return found.reshape(*state.shape[:2], found.size(2))

    def associations(
        self, state: Tensor, *, key_padding_mask: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """The weight of each learned pattern for each state, ``(B, H, T, N)``.

        >>> HopfieldLookup(8, patterns=20).associations(torch.randn(3, 5, 8)).shape
        torch.Size([3, 1, 5, 20])
        """
        masks = {"key_padding_mask": key_padding_mask, "attention_mask": attention_mask}
        return self.hopfield.associations(self._stored(self.patterns), state, **masks)

    def energy(
        self,
        state: Tensor,
        *,
        after: int = 0,
        key_padding_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Energy of each state among the learned patterns, ``(B, H, T)``; see :meth:`Hopfield.energy`.

        >>> HopfieldLookup(8, patterns=20).energy(torch.randn(3, 5, 8)).shape
        torch.Size([3, 1, 5])
        """
        masks = {"key_padding_mask": key_padding_mask, "attention_mask": attention_mask}
        return self.hopfield.energy(self._stored(self.patterns), state, after=after, **masks)

    def _stored(self, patterns: Tensor) -> Tensor:
        return patterns.unsqueeze(0 if self.hopfield.batch_first else 1)


def _check_count(name: str, given: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f"`{name}` must be an integer of at least 1, got {given!r}")
