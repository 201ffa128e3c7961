"""Patterns that are stored: added, named, removed and searched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, DataError, ShapeError
from thalweg.kernels import memory as kernels

# Patterns by index or name: one, several, or a tensor of indices or of bool (N,).
Which: TypeAlias = int | str | Tensor | Iterable[int | str]


class Nearest(NamedTuple):
    """The k stored patterns with the largest dot product for each query, best first.

    Attributes:
        scores: ``(..., k)`` x'q; -inf where fewer than k patterns are present.
        indices: ``(..., k)`` int64; -1 there.
        names: the same as nested lists of names, None there; None for a store without names.

    >>> PatternStore(torch.eye(2), names=["east", "north"]).nearest(torch.tensor([[0.2, 0.9]]), k=1).names
    [['north']]
    """

    scores: Tensor
    indices: Tensor
    names: list | None


class PatternStore(nn.Module):
    """N patterns of D features, each with a value and a name if wanted.

    Args:
        patterns: ``(N, D)``, or ``(B, N, D)`` for a memory of its own for each batch item. A ``Parameter`` stays one;
            any other tensor is a buffer, through which gradients flow if it has them.
        values: ``(N, E)`` or ``(B, N, E)``, what the patterns are associated with.
        mask: ``(N,)`` or ``(B, N)`` bool, true where a pattern is present; absent ones may hold anything. At least one
            must be present.
        names: N strings; they may repeat, as labels do. Not for batched patterns.

    Patterns that are added one at a time cost O(D) each on average, as in a Python list.

    >>> store = PatternStore(torch.eye(3), names=["a", "b", "c"])
    >>> store.add(torch.ones(3), names="d")
    range(3, 4)
    >>> store.remove(["a", 1])
    2
    >>> store.names, len(store)
    (['c', 'd'], 2)
    """

    def __init__(
        self,
        patterns: Tensor,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        given = isinstance(patterns, Tensor)
        if not given or patterns.dim() not in (2, 3) or not patterns.is_floating_point() or 0 in patterns.shape[-2:]:
            got = f"{tuple(patterns.shape)} {patterns.dtype}" if given else type(patterns).__name__
            raise ShapeError(
                f"`patterns` must be floating point (N, D) or (B, N, D) with N and D at least 1, got {got}"
            )
        _check_values(patterns, values)
        _check_mask(patterns, mask)
        self.names = _checked_names(names, patterns)
        self._rooms: dict[str, Tensor] = {}
        for name, tensor in (("patterns", patterns), ("values", values), ("mask", mask)):
            self._hold(name, tensor)
        self.patterns: Tensor
        self.values: Tensor | None
        self.mask: Tensor | None

    def __len__(self) -> int:
        return self.patterns.size(-2)

    @property
    def is_batched(self) -> bool:
        """Whether each batch item has a memory of its own."""
        return self.patterns.dim() == 3

    def add(self, patterns: Tensor, values: Tensor | None = None, *, names: str | Sequence[str] | None = None) -> range:
        """Store more patterns, ``(M, D)`` or one ``(D,)``, with values and names exactly if the others have them.

        A ``Parameter`` is replaced by a longer one: an optimiser must be given it anew.

        Returns:
            The new indices.

        >>> store = PatternStore(torch.eye(2), values=torch.tensor([[1.0], [2.0]]))
        >>> store.add(torch.tensor([1.0, 1.0]), torch.tensor([3.0])), len(store)
        (range(2, 3), 3)
        """
        self._check_shared("added to")
        patterns = patterns.unsqueeze(0) if patterns.dim() == 1 else patterns
        values = values.unsqueeze(0) if values is not None and values.dim() == 1 else values
        if patterns.dim() != 2 or patterns.size(1) != self.patterns.size(1):
            raise ShapeError(f"`patterns` must be (M, D) with D = {self.patterns.size(1)}, got {tuple(patterns.shape)}")
        if (values is None) != (self.values is None):
            must = "must not have" if self.values is None else "must have"
            raise ConfigError(f"patterns added {must} `values`, as those stored")
        if values is not None and self.values is not None and values.shape != (len(patterns), self.values.size(1)):
            raise ShapeError(
                f"`values` must be (M, E) = ({len(patterns)}, {self.values.size(1)}), got {tuple(values.shape)}"
            )
        names = [names] if isinstance(names, str) else names
        if (names is None) != (self.names is None):
            raise ConfigError(
                f"patterns added must {'not ' if self.names is None else ''}have `names`, as those stored"
            )
        if self.names is not None:
            self.names = self.names + (_checked_names(names, patterns) or [])
        first = len(self)
        self._extend("patterns", patterns)
        self._extend("values", values)
        self._extend("mask", None if self.mask is None else self.mask.new_ones(len(patterns)))
        return range(first, first + len(patterns))

    def remove(self, which: Which) -> int:
        """Forget patterns by index or name (every pattern of that name); those that remain keep their order.

        Returns:
            How many were removed. At least one that is present must remain.

        >>> PatternStore(torch.eye(3)).remove([0, -1])
        2
        """
        self._check_shared("removed from")
        gone = self._which(which)
        keep = torch.ones(len(self), dtype=torch.bool, device=self.patterns.device)
        keep[gone] = False
        left = keep if self.mask is None else keep & self.mask
        if not bool(left.any()):
            raise ConfigError(
                "one pattern that is present must remain, got a removal of all; make a new memory instead"
            )
        places = keep.nonzero().flatten()
        for name in ("patterns", "values", "mask"):
            held = getattr(self, name)
            if held is not None:
                kept = held.detach()[places] if isinstance(held, nn.Parameter) else held[places]
                self._hold(name, nn.Parameter(kept, held.requires_grad) if isinstance(held, nn.Parameter) else kept)
        if self.names is not None:
            self.names = [self.names[place] for place in places.tolist()]
        return int((~keep).sum())

    def nearest(self, q: Tensor, k: int = 1) -> Nearest:
        """The k patterns nearest to queries ``(..., D)`` by dot product; no gradient.

        Time O(Q N D), memory O(Q (k + block)): patterns are looked at in blocks. Queries of a batched store are
        ``(B, ..., D)``, and their scores are held, (Q, N) in all.

        >>> PatternStore(torch.eye(3)).nearest(torch.tensor([0.1, 0.9, 0.2]), k=2).indices
        tensor([1, 2])
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"`k` must be an integer of at least 1, got {k!r}")
        with torch.no_grad():
            rows = self._rows(q)
            dtype = torch.promote_types(rows.dtype, self.patterns.dtype)
            rows, patterns = rows.to(dtype), self.patterns.to(dtype)
            if not self.is_batched:
                scores, indices = kernels.nearest(rows, patterns, k, mask=self.mask)
            else:
                scores = rows @ patterns.mT  # (B, Q, N)
                scores = scores if self.mask is None else scores.masked_fill(~self.mask.unsqueeze(1), -torch.inf)
                scores = nn.functional.pad(scores, (0, max(0, k - len(self))), value=-torch.inf)
                scores, indices = scores.topk(k, dim=-1)
                indices = indices.masked_fill(torch.isneginf(scores), -1)
        shape = (*q.shape[:-1], k)
        return Nearest(scores.view(shape), indices.view(shape), self._named(indices.view(shape).tolist()))

    def _named(self, places: Any) -> Any:
        if self.names is None:
            return None
        if isinstance(places, list):
            return [self._named(place) for place in places]
        return self.names[places] if places >= 0 else None

    def _rows(self, q: Tensor) -> Tensor:
        """Queries as (Q, D), or (B, Q, D) for batched patterns."""
        D = self.patterns.size(-1)
        leading = self.patterns.shape[:-2]
        if not isinstance(q, Tensor):
            raise ShapeError(f"`q` must be a tensor (..., {D}), got {type(q).__name__}; use torch.as_tensor")
        if q.dim() < 1 + len(leading) or q.size(-1) != D or q.shape[: len(leading)] != leading:
            wanted = f"({leading[0]}, ..., {D}) = (B, ..., D)" if leading else f"(..., {D}) = (..., D)"
            raise ShapeError(f"`q` must be {wanted} as the patterns, got {tuple(q.shape)}")
        if not q.is_floating_point():
            raise ShapeError(f"`q` must be floating point, got {q.dtype}; convert it with .float()")
        return q.reshape(*leading, q.shape[len(leading) : -1].numel(), D)

    def _check_shared(self, what: str) -> None:
        if self.is_batched:
            raise ConfigError(f"a batched memory cannot be {what}; give its `patterns` and `mask` anew")

    def _which(self, which: Which) -> Tensor:
        """Indices of what is named, in range."""
        device = self.patterns.device
        if isinstance(which, Tensor) and which.dtype == torch.bool:
            if which.shape != (len(self),):
                raise ShapeError(f"a bool tensor must be (N,) = ({len(self)},), got {tuple(which.shape)}")
            return which.to(device).nonzero().flatten()
        listed = [which] if isinstance(which, int | str) else which.tolist() if isinstance(which, Tensor) else which
        places: list[int] = []
        for one in listed if isinstance(listed, Iterable) else [listed]:
            if isinstance(one, str):
                found = [place for place, name in enumerate(self.names or ()) if name == one]
                if not found:
                    raise DataError(f"no stored pattern has the name `{one}`; `names` lists them")
                places += found
            elif not -len(self) <= one < len(self):
                raise DataError(f"indices must lie in -{len(self)} ... {len(self) - 1}, got {one}")
            else:
                places.append(one % len(self))
        return torch.tensor(places, dtype=torch.long, device=device)

    def _hold(self, name: str, tensor: Tensor | None) -> None:
        self._parameters.pop(name, None)
        self._buffers.pop(name, None)
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor)

    def _extend(self, name: str, rows: Tensor | None) -> None:
        """Append rows to a tensor, in room kept behind it where its rows are nobody's variables."""
        if rows is None:
            return
        held: Tensor = getattr(self, name)
        if isinstance(held, nn.Parameter):
            joined = torch.cat([held.detach(), rows.detach().to(held)])
            return self._hold(name, nn.Parameter(joined, held.requires_grad))
        if held.requires_grad or rows.requires_grad:
            return self._hold(name, torch.cat([held, rows.to(held)]))
        total, room = len(held) + len(rows), self._rooms.get(name)
        if room is None or room.data_ptr() != held.data_ptr() or room.dtype != held.dtype or total > len(room):
            room = held.new_empty(max(total, 2 * len(held)), *held.shape[1:])
            room[: len(held)] = held
            self._rooms[name] = room
        # Past `.data` no version counter moves: graphs that hold the first rows, which stay as they are, remain valid.
        room.data[len(held) : total] = rows.to(held)
        self._hold(name, room[:total])


def _check_values(patterns: Tensor, values: Tensor | None) -> None:
    if values is None:
        return
    if values.dim() != patterns.dim() or values.shape[:-1] != patterns.shape[:-1] or not values.is_floating_point():
        wanted = "(B, N, E)" if patterns.dim() == 3 else "(N, E)"
        raise ShapeError(
            f"`values` must be floating point {wanted} with {wanted[1:-4]} = {tuple(patterns.shape[:-1])} as the "
            f"patterns, got {tuple(values.shape)} {values.dtype}"
        )


def _check_mask(patterns: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        return
    if mask.shape != patterns.shape[:-1] or mask.dtype != torch.bool:
        raise ShapeError(
            f"`mask` must be bool {tuple(patterns.shape[:-1])}, true where a pattern is present, got "
            f"{tuple(mask.shape)} {mask.dtype}"
        )
    if not bool(mask.any(-1).all()):
        item = f" of batch item {int((~mask.any(-1)).nonzero()[0])}" if mask.dim() == 2 else ""
        raise ShapeError(f"`mask` must leave at least one pattern{item} present, got none; leave that memory out")


def _checked_names(names: Sequence[str] | None, patterns: Tensor) -> list[str] | None:
    if names is None:
        return None
    if patterns.dim() == 3:
        raise ConfigError("`names` are for patterns (N, D), got patterns (B, N, D); leave them out")
    if isinstance(names, str) or len(names) != len(patterns) or not all(isinstance(name, str) for name in names):
        got = repr(names) if isinstance(names, str) else f"{len(names)} entries"
        raise ConfigError(f"`names` must be {len(patterns)} strings, one for each pattern, got {got}")
    return list(names)
