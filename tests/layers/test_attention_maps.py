"""Attention by other maps than the softmax: values by definition, exact zeros on padding, gradients."""

import numpy as np
import pytest
import torch

from oracles.hopfield_layers import MAPS
from thalweg.errors import ConfigError
from thalweg.layers import Attention, CrossAttention, SelfAttention, mean_weights
from thalweg.layers.attention import attention_map

B, T, S, Q = 3, 2, 4, 6
MASK = torch.arange(S) < torch.tensor([4, 2, 1])[:, None]
SPARSE = ["sparsemax", "entmax15", 1.3]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def draw(*shape, seed=0):
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mapped(name, scores, seen):
    """The oracle's map of each row of scores (..., S) over what is seen."""
    found = np.zeros(scores.shape)
    for at in np.ndindex(*scores.shape[:-1]):
        found[at][seen[at]] = MAPS[name](scores[at][seen[at]])
    return torch.tensor(found)


@pytest.mark.parametrize("name", ["softmax", *SPARSE])
@pytest.mark.parametrize("score", ["dot", "general", "additive"])
def test_attention_equals_the_definition(score, name):
    torch.manual_seed(0)
    attention = Attention(score, queries=Q, memory=Q, map=name).double()
    queries, values = draw(B, T, Q), draw(B, S, Q, seed=1)
    memory = attention.memorise(values, MASK)
    if score == "additive":
        met = torch.tanh(attention.query(queries).unsqueeze(2) + memory.keys.unsqueeze(1))
        scores = 8 * attention.combine(met).squeeze(3)
        with torch.no_grad():
            attention.combine.weight *= 8  # scores far enough apart for zeros
    else:
        scores = queries @ memory.keys.transpose(1, 2)
    want = mapped(name, scores.detach().numpy(), MASK[:, None].expand(B, T, S).numpy())
    context, weights = attention(queries, memory)
    torch.testing.assert_close(weights, want, **EXACT)
    torch.testing.assert_close(context, want @ memory.values, **EXACT)
    assert bool((weights.transpose(1, 2)[~MASK] == 0).all())
    with torch.no_grad():  # the cheap additive score
        torch.testing.assert_close(attention(queries, memory)[1], want, **EXACT)
    assert name == "softmax" or bool(((weights == 0) & MASK[:, None]).any()) or name == 1.3


@pytest.mark.parametrize("name", SPARSE)
def test_self_attention_equals_the_definition(name):
    torch.manual_seed(0)
    attention = SelfAttention(Q, 2, map=name).double()
    x = draw(B, S, Q)
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    for given, seen in (
        ({"causal": True}, causal.expand(B, 2, S, S)),
        ({"mask": MASK[:, None, None]}, MASK[:, None, None].expand(B, 2, S, S)),
        ({}, torch.ones(B, 2, S, S, dtype=torch.bool)),
    ):
        found = attention(x, **given)
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in (found.queries, *found.memory.unbind(2)))
        scores = (q @ k.transpose(2, 3)) / 3**0.5
        weights = mapped(name, scores.detach().numpy(), seen.numpy())
        want = attention.out((weights @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(found.output, want, **EXACT)
        shown = mean_weights(found.queries, found.memory[:, :, 0], 2, seen, attention.map)
        torch.testing.assert_close(shown, weights.mean(1), **EXACT)


@pytest.mark.parametrize("name", SPARSE)
def test_cross_attention_ignores_padding_and_is_differentiable(name):
    torch.manual_seed(0)
    attention = CrossAttention(Q, 2, map=name).double()
    x, encoded = draw(B, T, Q), draw(B, S, Q, seed=1)
    seen = MASK[:, None, None]
    found = attention(x, attention.memorise(encoded), mask=seen).output
    changed = encoded.masked_fill(~MASK[..., None], 9.0)
    assert torch.equal(attention(x, attention.memorise(changed), mask=seen).output, found)
    alone = attention(x[1:2], attention.memorise(encoded[1:2, :2])).output
    torch.testing.assert_close(alone, found[1:2], **EXACT)
    inputs = [0.2 * x[:2], 0.2 * encoded[:2]]
    assert torch.autograd.gradcheck(
        lambda q, m: attention(q, attention.memorise(m), mask=seen[:2]).output,
        [part.requires_grad_() for part in inputs],
    )


def test_the_oracle_can_disagree():
    scores, seen = draw(2, S).numpy(), np.ones((2, S), dtype=bool)
    assert not torch.allclose(mapped("sparsemax", scores, seen), mapped("entmax15", scores, seen), atol=1e-3)


def test_dropout_falls_on_sparse_weights_while_training_alone():
    torch.manual_seed(0)
    attention = SelfAttention(Q, 2, dropout=0.5, map="sparsemax").double()
    x = draw(B, S, Q)
    still = attention.eval()(x).output
    assert torch.equal(attention(x).output, still)
    attention.train()
    torch.testing.assert_close(torch.stack([attention(x).output for _ in range(300)]).mean(0), still, atol=0.8, rtol=0)


def test_layers_keep_their_weights_whatever_the_map():
    for kind in (SelfAttention, CrossAttention):
        kind(8, 2, map="sparsemax").load_state_dict(kind(8, 2).state_dict())
    Attention("general", queries=4, memory=4, map=1.3).load_state_dict(
        Attention("general", queries=4, memory=4).state_dict()
    )


def test_unknown_maps_are_one_line():
    with pytest.raises(ConfigError) as error:
        Attention("dot", queries=2, memory=2, map="entmx15")
    assert str(error.value) == "attention map `entmx15` is no known map and no alpha; did you mean `entmax15`?"
    for wrong in (0.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="an alpha from 1 on, got"):
            attention_map(wrong)
    assert str(attention_map(2)) == "sparsemax"
