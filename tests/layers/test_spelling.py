"""Vectors that symbols share by their spelling, beside sums over characters written out."""

import unicodedata

import pytest
import torch

from thalweg.data import Alphabet, Symbols
from thalweg.energies.monotonic.model import MonotonicConfig
from thalweg.layers.spelling import SpeltEmbedding, SpeltLinear, spellings
from thalweg.tasks.registry import build_config
from thalweg.tasks.transduce.codec import Codec, tag_symbol
from thalweg.tasks.transduce.models import build_model, load_model

SYMBOLS = ["", "a", "A", "á", "aː", "t͡s", "s", "AA0", "각"]


def characters(symbol):
    return list(unicodedata.normalize("NFD", symbol).lower())


def test_counts_are_those_of_characters():
    counts = spellings(SYMBOLS)
    known = sorted({c for symbol in SYMBOLS for c in characters(symbol)})
    assert counts.tolist() == [[float(characters(symbol).count(c)) for c in known] for symbol in SYMBOLS]
    assert counts.max() == 2  # the broken twin of counting whether
    assert spellings(["", ""]).shape == (2, 0)
    assert spellings([]).shape == (0, 0)


@pytest.mark.parametrize("symbols", [SYMBOLS, ["", "", ""]])
def test_a_vector_is_its_own_and_those_of_its_characters(symbols):
    torch.manual_seed(0)
    counts = spellings(symbols)
    layer, head = SpeltEmbedding(counts, 3, padding=0), SpeltLinear(3, counts)
    tokens, z = torch.arange(len(symbols)).reshape(-1, 1), torch.randn(2, 3)
    found, scores = layer(tokens), head(z)
    for v in range(len(symbols)):
        own, weights = layer.weight[v].clone(), head.weight[v].clone()
        for u in range(counts.size(1)):
            own += counts[v, u] * layer.characters[u]
            weights += counts[v, u] * head.characters[u]
        torch.testing.assert_close(found[v, 0], own)
        torch.testing.assert_close(scores[:, v], z @ weights + head.bias[v])
    assert not found[0].any()  # padding has no characters and no vector


def test_what_one_symbol_learns_moves_those_that_share_a_character_alone():
    torch.manual_seed(0)
    layer = SpeltEmbedding(spellings(SYMBOLS), 4, padding=0)
    before = layer(torch.arange(len(SYMBOLS))).detach()
    layer(torch.tensor([4])).sum().backward()
    with torch.no_grad():
        for weight in layer.parameters():
            weight -= weight.grad
    moved = (layer(torch.arange(len(SYMBOLS))) != before).any(dim=1).tolist()
    expected = [bool({"a", "ː"} & set(characters(symbol))) for symbol in SYMBOLS]
    assert moved == expected


def side(*extra):
    return Codec(Symbols(), Alphabet.build([("a", "á", "b"), extra]))


def test_models_share_by_the_alphabets_of_their_sides():
    config = build_config({"model": {"family": "monotonic", "hidden": 8, "embedding": 8}})
    source, target = side(tag_symbol("A")), side()
    model = build_model(config, source, target)
    tag, *special = (source.features[0], *source.special.values())
    assert not model.source_embedding.counts[[tag, *special]].any()
    assert model.source_embedding.counts[source.alphabet.encode("á")[0]].sum() == 2
    again = load_model(config, source, target, model.state_dict())
    tokens = torch.arange(len(source.alphabet))
    assert torch.equal(again.source_embedding(tokens), model.source_embedding(tokens))
    plain = build_model(
        build_config({"model": {"family": "monotonic", "hidden": 8, "embedding": 8, "spelling": False}}), source, target
    )
    assert type(plain.output) is torch.nn.Linear
    assert MonotonicConfig().spelling
