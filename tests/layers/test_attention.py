"""Attention: the definition in plain Python, exact masking, inert padding, gradients."""

import math

import pytest
import torch

from oracles.recurrent import attend
from thalweg.errors import ConfigError, ShapeError
from thalweg.layers import Attention

SCORES = ["dot", "general", "additive"]
B, T, S, Q = 3, 2, 4, 3
MASK = torch.arange(S) < torch.tensor([4, 2, 1])[:, None]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def build(score, memory=Q):
    torch.manual_seed(0)
    return Attention(score, queries=Q, memory=memory).double()


def data(memory=Q):
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(B, T, Q, dtype=torch.float64, generator=generator)
    return queries, torch.randn(B, S, memory, dtype=torch.float64, generator=generator)


def read(attention, queries, memory, mask=MASK):
    return attention(queries, attention.memorise(memory, mask))


@pytest.mark.parametrize(("score", "width"), [("dot", Q), ("general", Q), ("general", 5), ("additive", 5)])
def test_equals_plain_python(score, width):
    attention = build(score, width)
    queries, memory = data(width)
    weights = {f"attention.{name}": value.tolist() for name, value in attention.state_dict().items()}
    contexts, found = read(attention, queries, memory)
    assert contexts.shape == (B, T, width)
    assert found.shape == (B, T, S)
    for b in range(B):
        real = memory[b, MASK[b]].tolist()
        for t in range(T):
            query = queries[b, t].tolist()
            expected = attend(weights, score, query, real)
            torch.testing.assert_close(contexts[b, t], torch.tensor(expected, dtype=torch.float64), **EXACT)


def test_the_oracle_can_disagree():
    attention, (queries, memory) = build("general"), data()
    weights = {f"attention.{name}": value.tolist() for name, value in attention.state_dict().items()}
    weights["attention.key.weight"][0][0] += 0.5
    expected = attend(weights, "general", queries[0, 0].tolist(), memory[0].tolist())
    found = read(attention, queries, memory)[0][0, 0]
    assert not torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-4)


@pytest.mark.parametrize("score", SCORES)
def test_weights_are_probabilities_and_exactly_zero_on_padding(score):
    contexts, weights = read(build(score), *data())
    torch.testing.assert_close(weights.sum(2), torch.ones(B, T, dtype=torch.float64), **EXACT)
    assert (weights >= 0).all()
    assert (weights[~MASK.unsqueeze(1).expand_as(weights)] == 0).all()
    assert (weights[MASK.unsqueeze(1).expand_as(weights)] > 0).all()
    # One real entry: it has all the weight and is what is read.
    assert (weights[2, :, 0] == 1).all()
    torch.testing.assert_close(contexts[2], data()[1][2, :1].expand(T, Q), **EXACT)


@pytest.mark.parametrize("score", SCORES)
def test_masked_equals_cut_off(score):
    attention, (queries, memory) = build(score), data()
    contexts, weights = read(attention, queries, memory)
    for b in range(B):
        n = int(MASK[b].sum())
        alone = read(attention, queries[b : b + 1], memory[b : b + 1, :n], MASK[b : b + 1, :n])
        torch.testing.assert_close(contexts[b], alone[0][0], **EXACT)
        torch.testing.assert_close(weights[b, :, :n], alone[1][0], **EXACT)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("filling", [1e30, -math.inf, math.inf, math.nan])
def test_whatever_stands_in_padding_changes_no_value(score, filling):
    attention, (queries, memory) = build(score), data()
    clean = read(attention, queries, memory)
    filled = read(attention, queries, memory.masked_fill(~MASK[:, :, None], filling))
    for ours, theirs in zip(filled, clean, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("filling", [7.0, math.nan])
def test_whatever_stands_in_padding_changes_no_gradient(score, filling):
    def gradients(value):
        attention, (queries, memory) = build(score), data()
        memory = memory.masked_fill(~MASK[:, :, None], value).requires_grad_()
        queries.requires_grad_()
        contexts, _ = read(attention, queries, memory)
        contexts.square().sum().backward()
        return [queries.grad, memory.grad, *(p.grad for p in attention.parameters())]

    filled = gradients(filling)
    for ours, theirs in zip(filled, gradients(0.0), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)
    assert (filled[1][~MASK] == 0).all()


@pytest.mark.parametrize("score", SCORES)
def test_gradcheck(score):
    attention = build(score)
    names, values = zip(*attention.named_parameters(), strict=True) if score != "dot" else ((), ())

    def forward(queries, memory, *parameters):
        # Keys are computed inside, so that their gradient takes part.
        bound = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(
            _Read(attention), {f"attention.{n}": p for n, p in bound.items()}, (queries, memory)
        )

    arguments = [part.requires_grad_() for part in data()]
    arguments += [value.detach().clone().requires_grad_() for value in values]
    assert torch.autograd.gradcheck(forward, tuple(arguments))


class _Read(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, queries, memory):
        return read(self.attention, queries, memory)


def test_permuting_the_batch_permutes_the_answer():
    attention, (queries, memory) = build("additive"), data()
    order = torch.tensor([2, 0, 1])
    together = read(attention, queries, memory)
    turned = read(attention, queries[order], memory[order], MASK[order])
    for ours, theirs in zip(turned, together, strict=True):
        torch.testing.assert_close(ours, theirs[order], **EXACT)


def test_wrong_settings():
    with pytest.raises(ConfigError, match="attention `aditive` is not known; did you mean `additive`"):
        Attention("aditive", queries=2, memory=2)
    with pytest.raises(ShapeError, match="one width, got 2 and 4; use `general`"):
        Attention("dot", queries=2, memory=4)


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0, 300.0])
def test_additive_without_gradients_equals_with(scale):
    """The exponential form used in decoding, inside its range and beyond it."""
    torch.manual_seed(0)
    attention = Attention("additive", queries=6, memory=5).double()
    queries, values = scale * torch.randn(3, 4, 6).double(), scale * torch.randn(3, 7, 5).double()
    mask = torch.arange(7) < torch.tensor([7, 1, 4])[:, None]
    with_gradients = attention(queries, attention.memorise(values, mask))
    with torch.no_grad():
        without = attention(queries, attention.memorise(values, mask))
    for one, other in zip(with_gradients, without, strict=True):
        torch.testing.assert_close(other, one.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("score", ["dot", "general", "additive"])
def test_launched_kernels_take_the_plain_way(score, monkeypatch):
    """Where values cannot be looked at for free, no shortcut is taken and the answer is the same."""
    torch.manual_seed(0)
    attention = Attention(score, queries=4, memory=4).double()
    queries, mask = torch.randn(2, 3, 4).double(), torch.ones(2, 5, dtype=torch.bool)
    with torch.no_grad():
        memory = attention.memorise(torch.randn(2, 5, 4).double(), mask)
        here = attention(queries, memory)
        monkeypatch.setattr("thalweg.layers.attention.on_cpu", lambda x: False)
        there = attention(queries, memory)
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
