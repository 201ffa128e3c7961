"""Which sequences a search may give: prefixes, least lengths, masks of permitted symbols, lexicons, blocked n-grams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.search.protocol import Autoregressive, batch_size, check_at_least_one, device_of


class Allowed(Protocol):
    """Which symbols may follow, as a bool mask ``(R, V)``; eos among them where a sequence may end.

    Called at each step with the partial sequences ``(R, t)``, without bos (t is 0 at first), and the batch
    item of each row ``(R,)``.

    >>> def no_repetition(tokens, items):
    ...     mask = torch.ones(tokens.size(0), 5, dtype=torch.bool)
    ...     return mask.scatter(1, tokens, False)
    >>> rule: Allowed = no_repetition
    >>> rule(torch.tensor([[3, 4]]), torch.tensor([0]))
    tensor([[ True,  True,  True, False, False]])
    """

    def __call__(self, tokens: Tensor, items: Tensor, /) -> Tensor:
        """The mask."""
        ...


class _Edges(NamedTuple):
    """Transitions of a trie on one device; see :class:`Trie`."""

    keys: Tensor  # (E,) node * V + symbol, rising
    symbols: Tensor  # (E,)
    first: Tensor  # (nodes + 2,) where the edges of each node begin; the node after the last has none


class Trie:
    r"""A lexicon as :class:`Allowed`: only the given sequences may be produced.

    Nodes are numbered level by level and edges sorted by (node, symbol), so the e-th edge leads to node
    e + (number of roots): a node's children are a range, and following an edge is one binary search.

    Args:
        sequences: permitted sequences of symbols, with or without eos at the end; repetitions do no harm.
        vocab_size: V, that of the model.
        eos: the model's eos, allowed where a sequence ends; None where sequences end by length alone.

    A partial sequence that begins no permitted one may be followed by nothing. Building takes O(M log M) for
    M symbols in all, memory O(M); a mask for R rows of t symbols O(R (t log M + V)), without Python loops
    over rows.

    >>> words = Trie([[1, 2], [1, 3, 2]], vocab_size=5, eos=4)
    >>> words(torch.tensor([[1], [2]]), torch.tensor([0, 0])).int()
    tensor([[0, 0, 1, 1, 0],
            [0, 0, 0, 0, 0]], dtype=torch.int32)
    >>> words(torch.tensor([[1, 2]]), torch.tensor([0])).nonzero().tolist()  # eos alone
    [[0, 4]]
    >>> from thalweg.inference import TableModel, beam_search
    >>> model = TableModel.markov(torch.full((5, 5), 0.2), bos=0, eos=4, logarithms=False)
    >>> beam_search(model, torch.zeros(1, dtype=torch.long), width=3, max_length=9, allowed=words).sequences()
    [[[1, 2, 4], [1, 3, 2, 4]]]
    """

    def __init__(self, sequences: Iterable[Sequence[int]], *, vocab_size: int, eos: int | None) -> None:
        self._build([list(sequences)], vocab_size, eos)
        self._shared = True

    @classmethod
    def per_item(cls, lexicons: Iterable[Iterable[Sequence[int]]], *, vocab_size: int, eos: int | None) -> Trie:
        """A lexicon of its own for each batch item; an item with an empty one has no answer.

        >>> names = Trie.per_item([[[1]], [[2], [3]]], vocab_size=5, eos=4)
        >>> names(torch.empty(2, 0, dtype=torch.long), torch.tensor([0, 1])).int()
        tensor([[0, 1, 0, 0, 0],
                [0, 0, 1, 1, 0]], dtype=torch.int32)
        """
        trie = cls.__new__(cls)
        trie._build([list(lexicon) for lexicon in lexicons], vocab_size, eos)
        trie._shared = False
        return trie

    def _build(self, lexicons: list[list[Sequence[int]]], vocab_size: int, eos: int | None) -> None:
        self.vocab_size, self.eos, self.roots = vocab_size, eos, len(lexicons)
        sequences = list(chain.from_iterable(lexicons))
        flat, lengths = _flatten(sequences, vocab_size, eos)
        begins = np.cumsum(lengths) - lengths
        node = np.repeat(np.arange(self.roots), [len(lexicon) for lexicon in lexicons])
        nodes, levels = self.roots, []
        going = np.flatnonzero(lengths > 0)
        depth = 0
        while going.size:
            keys, which = np.unique(node[going] * vocab_size + flat[begins[going] + depth], return_inverse=True)
            node[going] = nodes + which.reshape(-1)
            nodes += len(keys)
            levels.append(keys)
            depth += 1
            going = going[lengths[going] > depth]
        keys = np.concatenate(levels) if levels else np.empty(0, dtype=np.int64)
        first = np.searchsorted(keys, np.arange(nodes + 2) * vocab_size)
        self._widest = int(np.diff(first).max())
        edges = _Edges(*(torch.from_numpy(part) for part in (keys, keys % vocab_size, first)))
        self._edges = {torch.device("cpu"): edges}

    def __call__(self, tokens: Tensor, items: Tensor) -> Tensor:
        """Mask ``(R, V)`` of symbols that may follow ``tokens`` (R, t) of batch items ``items`` (R,)."""
        keys, symbols, first = self._on(tokens.device)
        R, V = tokens.size(0), self.vocab_size
        if keys.numel() == 0:
            return torch.zeros((R, V), dtype=torch.bool, device=tokens.device)
        node = self._starts(items, check=tokens.size(1) == 0)
        nowhere = first.size(0) - 2
        for symbol in tokens.unbind(dim=1):
            key = node * V + symbol
            edge = torch.searchsorted(keys, key).clamp_(max=keys.size(0) - 1)
            node = torch.where(keys[edge] == key, edge + self.roots, nowhere)
        # Each row's children are a range; ranges are read to the widest, and what is past a row's own is put in a
        # column that is cut off, so that no size depends on the values.
        offset = torch.arange(self._widest, device=tokens.device)
        begin = first[node].unsqueeze(1)
        inside = offset < first[node + 1].unsqueeze(1) - begin
        following = symbols[(begin + offset).clamp_(max=keys.size(0) - 1)].masked_fill_(~inside, V)
        return torch.zeros((R, V + 1), dtype=torch.bool, device=tokens.device).scatter_(1, following, True)[:, :V]

    def _starts(self, items: Tensor, *, check: bool) -> Tensor:
        if self._shared:
            return torch.zeros_like(items)
        # Looked at once a search: on a GPU every look waits for it.
        if check and items.numel() and int(items.max()) >= self.roots:
            raise ShapeError(
                f"`per_item` must be given a lexicon for each batch item, got {self.roots} for at least "
                f"{int(items.max()) + 1} items; add an empty one where an item has none"
            )
        return items

    def _on(self, device: torch.device) -> _Edges:
        if device not in self._edges:
            self._edges[device] = _Edges(*(part.to(device) for part in self._edges[torch.device("cpu")]))
        return self._edges[device]


def _flatten(sequences: list[Sequence[int]], vocab_size: int, eos: int | None) -> tuple[np.ndarray, np.ndarray]:
    """All symbols one after the other, eos at each end where there is one, and the lengths."""
    if eos is not None:
        sequences = [s if len(s) and s[-1] == eos else (*s, eos) for s in sequences]
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    flat = np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=int(lengths.sum()))
    wrong = (flat < 0) | (flat >= vocab_size)
    if wrong.any():
        raise ConfigError(f"`sequences` must hold symbols 0 ... {vocab_size - 1}, got {int(flat[wrong][0])}")
    if eos is not None and int((flat == eos).sum()) != len(sequences):
        raise ConfigError(f"`sequences` must hold eos = {eos} only at the end, got one inside; cut the sequence there")
    return flat, lengths


class NoRepeat:
    """N-gram blocking as :class:`Allowed`: no n symbols may stand in a row twice (Paulus et al., 2018).

    A symbol is barred where it would complete an n-gram that the sequence has already. With ``size=1`` no symbol comes
    twice. eos is a symbol like any other: it stands once in any case.

    Args:
        size: n; vocab_size: V.

    Time O(R t n + R V) a step, without Python loops over rows.

    >>> NoRepeat(2, vocab_size=4)(torch.tensor([[1, 2, 1], [1, 1, 2]]), torch.tensor([0, 1])).int()  # not 1 2 again
    tensor([[1, 1, 0, 1],
            [1, 1, 1, 1]], dtype=torch.int32)
    """

    def __init__(self, size: int, *, vocab_size: int) -> None:
        check_at_least_one("size", size)
        self.size, self.vocab_size = size, vocab_size

    def __call__(self, tokens: Tensor, items: Tensor) -> Tensor:
        """Mask ``(R, V)`` of symbols that may follow ``tokens`` (R, t)."""
        (R, t), n, V = tokens.shape, self.size, self.vocab_size
        if t < n:
            return torch.ones((R, V), dtype=torch.bool, device=tokens.device)
        grams = tokens.unfold(1, n, 1)  # (R, t - n + 1, n)
        again = (grams[:, :, :-1] == tokens[:, None, t - n + 1 :]).all(dim=2)
        # What is not barred is put in a column that is cut off, so that no size depends on the values.
        barred = grams[:, :, -1].masked_fill(~again, V)
        return torch.ones((R, V + 1), dtype=torch.bool, device=tokens.device).scatter_(1, barred, False)[:, :V]


class Without:
    """Words that may stand nowhere, as :class:`Allowed`; a word is one symbol or several in a row.

    The last symbol of a word is barred after the others.

    Args:
        words: sequences of at least one symbol; vocab_size: V.

    Time O(R V + R M) a step for words of M symbols in all.

    >>> Without([[3], [1, 2]], vocab_size=4)(torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1])).int()
    tensor([[1, 1, 0, 0],
            [1, 1, 1, 0]], dtype=torch.int32)
    """

    def __init__(self, words: Iterable[Sequence[int]], *, vocab_size: int) -> None:
        self.words, self.vocab_size = [tuple(word) for word in words], vocab_size
        for word in self.words:
            if not word or not all(isinstance(symbol, int) and 0 <= symbol < vocab_size for symbol in word):
                raise ConfigError(
                    f"`words` must be sequences of symbols 0 ... {vocab_size - 1}, got {list(word)}; take it out"
                )

    def __call__(self, tokens: Tensor, items: Tensor) -> Tensor:
        """Mask ``(R, V)`` of symbols that may follow ``tokens`` (R, t)."""
        R, t = tokens.shape
        mask = torch.ones((R, self.vocab_size), dtype=torch.bool, device=tokens.device)
        for *begun, last in self.words:
            if len(begun) <= t:
                mask[:, last] &= ~(tokens[:, t - len(begun) :] == tokens.new_tensor(begun)).all(dim=1)
        return mask


@dataclass(frozen=True)
class Rules:
    """What every hypothesis must satisfy: eos not before symbol ``min_length``, a prefix, the caller's mask.

    >>> from thalweg.inference import TableModel
    >>> model, two = TableModel({}, vocab_size=3, bos=0, eos=2), torch.tensor([0, 1])
    >>> rules = Rules.check(model, two, 5, 2, torch.tensor([[1], [-1]]), None)
    >>> rules.forbid(torch.zeros(2, 3), 1, two, None)
    tensor([[-inf, 0., -inf],
            [0., 0., -inf]])
    """

    eos: int | None
    min_length: int
    prefix: Tensor | None
    allowed: Allowed | None

    @classmethod
    def check(
        cls,
        model: Autoregressive,
        inputs: Any,
        max_length: int,
        min_length: int,
        prefix: Tensor | None,
        allowed: Allowed | None,
    ) -> Rules | None:
        """The rules if they can be kept; None where there are none."""
        check_min_length(min_length, max_length)
        check_called(allowed=allowed)
        if prefix is not None:
            prefix = check_prefix(prefix, batch_size(inputs), max_length, model).to(device_of(model, inputs))
        if min_length <= 1 and prefix is None and allowed is None:
            return None
        return cls(model.eos, min_length, prefix, allowed)

    def binds(self, step: int) -> bool:
        """Whether they forbid anything at this step."""
        forced = self.prefix is not None and step <= self.prefix.size(1)
        return step < self.min_length or forced or self.allowed is not None

    def forbid(self, total: Tensor, step: int, items: Tensor, sequences: Tensor | None) -> Tensor:
        """``total`` (R, V) with -inf put, in place, at every symbol that may not be the row's ``step``-th, from 1 on.

        ``items`` (R,) is the batch item of each row; ``sequences`` (R, step - 1) is what ``allowed`` is asked about.
        """
        R, V = total.shape
        if self.eos is not None and step < self.min_length:
            total[:, self.eos] = -math.inf
        if self.prefix is not None and step <= self.prefix.size(1):
            forced = self.prefix[items, step - 1].unsqueeze(1)  # (R, 1)
            total.masked_fill_((forced >= 0) & (torch.arange(V, device=total.device) != forced), -math.inf)
        if self.allowed is not None:
            assert sequences is not None
            mask = self.allowed(sequences, items)
            if not isinstance(mask, Tensor) or mask.shape != (R, V) or mask.dtype != torch.bool:
                given = isinstance(mask, Tensor)
                got = f"{mask.dtype} of shape {tuple(mask.shape)}" if given else type(mask).__name__
                raise ShapeError(f"`allowed` must give a bool mask of shape (R, V) = ({R}, {V}), got {got}")
            total.masked_fill_(~mask, -math.inf)
        return total


def check_called(**functions: object) -> None:
    """Raise :class:`ConfigError` unless each is None or can be called.

    >>> check_called(allowed=None, on_step=print)
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"`{name}` must be a function or None, got {type(function).__name__}")


def check_min_length(min_length: object, max_length: int) -> None:
    """Raise :class:`ConfigError` unless ``min_length`` is an integer of 0 ... ``max_length``.

    >>> check_min_length(0, 5)
    """
    if isinstance(min_length, bool) or not isinstance(min_length, int) or not 0 <= min_length <= max_length:
        raise ConfigError(f"`min_length` must be an integer of 0 ... `max_length` = {max_length}, got {min_length!r}")


def check_prefix(prefix: Tensor, batch: int, max_length: int, model: Autoregressive) -> Tensor:
    """``prefix`` (B, P) if it is one: int64 symbols, -1 past each item's end, no eos, at most ``max_length`` long.

    >>> from thalweg.inference import TableModel
    >>> model = TableModel({}, vocab_size=4, bos=0, eos=3)
    >>> check_prefix(torch.tensor([[1, -1], [1, 2]]), 2, 5, model).shape
    torch.Size([2, 2])
    """
    given = isinstance(prefix, Tensor)
    if not given or prefix.dim() != 2 or prefix.size(0) != batch or prefix.dtype not in (torch.int64, torch.int32):
        got = f"{prefix.dtype} of shape {tuple(prefix.shape)}" if given else type(prefix).__name__
        raise ShapeError(f"`prefix` must be int64 of shape (B, P) with B = {batch} as in `inputs`, got {got}")
    prefix = prefix.long().clone()  # whoever is called at a step cannot change it
    if prefix.numel() == 0:
        return prefix
    if int(prefix.max()) >= model.vocab_size or int(prefix.min()) < -1:
        raise ShapeError(
            f"`prefix` must hold symbols 0 ... {model.vocab_size - 1}, or -1 past an item's end, "
            f"got {int(prefix.min())} ... {int(prefix.max())}"
        )
    if bool(((prefix[:, 1:] >= 0) & (prefix[:, :-1] < 0)).any()):
        raise ShapeError("`prefix` must have -1 only past an item's end, got a symbol after -1; move -1 to the end")
    if model.eos is not None and bool((prefix == model.eos).any()):
        raise ShapeError(f"`prefix` must not hold eos = {model.eos}, got one; a finished sequence needs no search")
    longest = int((prefix >= 0).sum(dim=1).max())
    if longest > max_length:
        raise ConfigError(f"`max_length` must be at least the longest prefix, {longest}, got {max_length}")
    return prefix
