from __future__ import annotations

import itertools
import random

import pytest
import torch

from oracles import search as oracle
from oracles.beams import Book, begins
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference import TableModel, Trie, beam_search
from thalweg.inference.search.constraints import Rules


def lexicon(seed, *, vocab, eos, size, longest):
    rng = random.Random(seed)
    symbols = [v for v in range(vocab) if v != eos]
    return [tuple(rng.choices(symbols, k=rng.randint(0, longest))) for _ in range(size)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("closed", [False, True])
def test_masks_are_those_of_brute_force(seed, closed):
    vocab, eos = 4, (3, 0, 2)[seed % 3]
    words = lexicon(seed, vocab=vocab, eos=eos, size=(0, 1, 3, 8, 20, 40)[seed], longest=4)
    trie = Trie([(*w, eos) if closed else w for w in words], vocab_size=vocab, eos=eos)
    for length in range(6):
        rows = list(itertools.product(range(vocab), repeat=length))
        tokens = torch.tensor(rows).view(len(rows), length)
        mask = trie(tokens, torch.zeros(len(rows), dtype=torch.long))
        expected = [[begins(words, row, symbol, eos) for symbol in range(vocab)] for row in rows]
        assert mask.tolist() == expected
        assert mask.dtype == torch.bool


def test_without_eos_sequences_end_by_length():
    trie = Trie([(1, 2), (1, 0), (2, 2)], vocab_size=3, eos=None)
    model = TableModel.markov(torch.full((3, 3), -1.0, dtype=torch.float64), bos=0)
    found = beam_search(model, torch.tensor([0]), width=9, max_length=2, allowed=trie)
    assert sorted(found.sequences()[0]) == [[1, 0], [1, 2], [2, 2]]


def test_a_lexicon_for_each_item():
    vocab, eos = 5, 4
    own = [lexicon(10 + n, vocab=vocab, eos=eos, size=n, longest=3) for n in (0, 1, 5, 12)]
    trie = Trie.per_item(own, vocab_size=vocab, eos=eos)
    every = [oracle.random_table(50 + n, vocab=vocab, eos=eos, depth=4) for n in range(4)]
    model = TableModel(every, vocab_size=vocab, bos=0, eos=eos)
    for rows in (None, 6):
        found = beam_search(model, torch.arange(4), width=3, max_length=4, allowed=trie, rows_at_once=rows)
        for item, table in enumerate(every):

            def permitted(words, symbol, item=item):
                return begins(own[item], words, symbol, eos)

            book = Book(table, eos=eos, width=3, k=3, max_length=4, permitted=permitted)
            assert [tuple(s) for s in found.sequences()[item]] == [h[0] for h in book.hypotheses]
            assert bool(found.optimal[item]) == book.proved
            assert {tuple(s[:-1]) for s in found.sequences()[item]} <= set(own[item])
    with pytest.raises(ShapeError, match="got 4 for at least 5 items"):
        beam_search(model, torch.arange(5) % 4, width=3, max_length=4, allowed=trie)


def test_a_wide_beam_gives_the_whole_lexicon_in_order():
    table = oracle.random_table(3, vocab=5, eos=4, depth=5)
    words = sorted(set(lexicon(7, vocab=5, eos=4, size=30, longest=4)))
    trie = Trie(words, vocab_size=5, eos=4)
    model = TableModel(table, vocab_size=5, bos=0, eos=4)
    found = beam_search(model, torch.tensor([0]), width=200, max_length=5, allowed=trie)
    known = {h[0]: h[1] for h in oracle.all_sequences(table, eos=4, max_length=5) if h[2]}
    expected = sorted(((*w, 4) for w in words), key=lambda w: -known[w])
    assert [tuple(s) for s in found.sequences()[0]] == expected
    assert found.optimal.all()


def test_many_words():
    rng = random.Random(0)
    words = [rng.choices(range(4, 60), k=rng.randint(2, 14)) for _ in range(20_000)]
    trie = Trie(words, vocab_size=60, eos=3)
    tokens = torch.tensor([w[:2] for w in words[:2000]])
    mask = trie(tokens, torch.zeros(2000, dtype=torch.long))
    for row, word in zip(mask.tolist(), words[:2000], strict=True):
        assert row[word[2] if len(word) > 2 else 3]


def test_rules_together_on_rows():
    total = torch.zeros(3, 4)
    prefix = torch.tensor([[1], [-1]])
    rules = Rules(3, 2, prefix, None)
    rules.forbid(total, 1, torch.tensor([0, 1, 1]), None)
    assert total.exp().tolist() == [[0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    rules.forbid(total, 2, torch.tensor([0, 1, 1]), None)
    assert total.exp().tolist() == [[0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    trie = Trie([(2,)], vocab_size=4, eos=3)
    fresh = torch.zeros(2, 4)
    Rules(None, 0, None, trie).forbid(fresh, 2, torch.tensor([0, 1]), torch.tensor([[2], [1]]))
    assert fresh.exp().tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]


def test_wrong_sequences():
    with pytest.raises(ConfigError, match=r"0 \.\.\. 3, got 4"):
        Trie([(1, 4)], vocab_size=4, eos=3)
    with pytest.raises(ConfigError, match=r"0 \.\.\. 3, got -1"):
        Trie([(-1,)], vocab_size=4, eos=3)
    with pytest.raises(ConfigError, match="only at the end"):
        Trie([(3, 1)], vocab_size=4, eos=3)
