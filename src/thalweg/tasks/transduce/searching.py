"""From search settings to a search of the inference room and its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.data.text.readers import read_sources
from thalweg.errors import ConfigError, DataError
from thalweg.inference import (
    Hypotheses,
    Trie,
    beam_search,
    exact_search,
    greedy,
    minimum_bayes_risk,
    sample_sequences,
    stochastic_beam_search,
)
from thalweg.tasks.transduce.codec import Codec
from thalweg.tasks.transduce.search_settings import SearchConfig


class PlannedSearch(NamedTuple):
    """A search and what it is called with beside model and inputs.

    >>> found = planned_search(SearchConfig(search="beam"), k=3, max_length=20)
    >>> found.options["width"], found.options["k"]
    (5, 3)
    """

    search: Callable[..., Hypotheses]
    options: dict[str, Any]

    def run(self, model: Any, inputs: Any, **more: Any) -> Hypotheses:
        """The hypotheses."""
        return self.search(model, inputs, **self.options, **more)


def planned_search(
    how: SearchConfig,
    *,
    k: int,
    max_length: int,
    prefix: Tensor | None = None,
    allowed: Trie | None = None,
    generator: torch.Generator | None = None,
) -> PlannedSearch:
    """The search that settings ask for.

    Args:
        how: the settings.
        k: answers wanted.
        max_length: symbols at most, where ``how`` leaves it open.
        prefix: ``(B, P)`` that the answers begin with; allowed: a lexicon of answers.
        generator: of sampling.

    >>> planned_search(SearchConfig(search="typical"), k=2, max_length=9).options["typical"]
    0.95
    """
    limit = how.max_length or max(max_length, how.min_length)
    if how.search == "stochastic":
        options = {"n": k, "max_length": limit, "temperature": how.temperature, "generator": generator}
        return PlannedSearch(stochastic_beam_search, options)
    rules = {"max_length": limit, "min_length": how.min_length, "prefix": prefix, "allowed": allowed}
    if how.search == "exact":
        return PlannedSearch(exact_search, {"max_expansions": how.max_expansions or None, "width": how.width, **rules})
    if how.search == "greedy":
        return PlannedSearch(greedy, rules)
    if how.search in ("beam", "diverse"):
        width = max(how.width, k)
        beam = {"width": width, "k": k, "length_penalty": how.length_penalty, **rules}
        if how.search == "diverse":
            groups = how.groups or width
            beam |= {"width": -(-width // groups) * groups, "groups": groups, "diversity": how.diversity}
        return PlannedSearch(beam_search, beam)
    filters: dict[str, Any] = {"temperature": how.temperature, "top_k": how.top_k or None, "generator": generator}
    if how.search == "nucleus":
        filters["top_p"] = how.top_p
    elif how.search == "typical":
        filters["typical"] = how.typical
    elif how.search == "min-p":
        filters["min_p"] = how.min_p
    n = max(how.samples, k) if how.search == "mbr" else k
    return PlannedSearch(sample_sequences, {"n": n, **filters, **rules})


def forced_prefix(text: str, target: Codec) -> tuple[int, ...]:
    """Ids of the text that answers begin with; a symbol the model cannot write is a :class:`ConfigError`.

    >>> from thalweg.data import Alphabet, Symbols
    >>> forced_prefix("ba", Codec(Symbols(), Alphabet.build(["abc"])))
    (5, 4)
    """
    symbols = target.symbols.split(text)
    if strange := target.alphabet.unknown(symbols):
        raise ConfigError(f"the prefix must be of symbols that the model writes, got `{strange[0]}` in `{text}`")
    return tuple(target.alphabet.encode(symbols))


def lexicon_trie(path: str, target: Codec, vocab_size: int) -> Trie:
    """The answers in the first column of a file; those with symbols that the model cannot write are passed over.

    Args:
        vocab_size: of the model, which may have more rows than there are symbols.

    >>> from thalweg.data import Alphabet, Symbols
    >>> lexicon_trie("absent.txt", Codec(Symbols(), Alphabet.build(["abc"])), 7)
    Traceback (most recent call last):
    ...
    thalweg.errors.DataError: absent.txt: expected a text file, got no such file; check the path
    """
    words: Sequence[tuple[str, ...]] = [target.symbols.split(text) for _, text in read_sources(path) if text]
    if not words:
        raise DataError(f"{path}: expected answers, one a line, got an empty file; give a lexicon")
    writable = [word for word in words if not target.alphabet.unknown(word)]
    if not writable:
        shown = target.symbols.join(words[0])
        raise DataError(
            f"{path}: expected answers that the model can write, got none of {len(words)} such as `{shown}`"
        )
    ids = [target.alphabet.encode(word) for word in writable]
    return Trie(ids, vocab_size=vocab_size, eos=target.alphabet.eos)


def best_by_risk(found: Hypotheses, k: int) -> Hypotheses:
    """The k different samples with the least mean edit distance to all samples, nearest first; cut ones at the end.

    >>> tokens = torch.tensor([[[4, 5, 3], [4, 6, 3], [4, 6, 3], [7, 6, 3]]])
    >>> ones = torch.ones(1, 4, dtype=torch.long)
    >>> pool = Hypotheses(tokens, 3 * ones, -ones.double(), ones.bool(), torch.zeros(1, dtype=torch.bool))
    >>> best_by_risk(pool, 2).sequences()
    [[[4, 6, 3], [4, 5, 3]]]
    """
    chosen = minimum_bayes_risk(found, weights="uniform")
    place = []
    for choice, have, finished in zip(chosen, found.sequences(), found.finished.tolist(), strict=True):
        first = {tuple(sequence): n for n, sequence in reversed(list(enumerate(have)))}
        ranked = sorted((first[sequence] for sequence in choice.sequences), key=lambda n: not finished[n])[:k]
        place.append(ranked + [-1] * (k - len(ranked)))
    index = torch.tensor(place, device=found.tokens.device)  # (B, k)
    there, index = index >= 0, index.clamp(min=0)
    return Hypotheses(
        found.tokens.gather(1, index.unsqueeze(2).expand(-1, -1, found.tokens.size(2))).masked_fill(
            ~there.unsqueeze(2), -1
        ),
        found.lengths.gather(1, index).masked_fill(~there, 0),
        found.scores.gather(1, index).masked_fill(~there, -torch.inf),
        found.finished.gather(1, index) & there,
        torch.zeros_like(found.optimal),
    )
