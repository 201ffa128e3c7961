"""Transformer layers: equal to torch's own attention, masks and pasts, the pointer's mixture, first weights."""

import pytest
import torch

from thalweg.errors import ConfigError
from thalweg.layers import (
    CrossAttention,
    FeedForward,
    Pointer,
    SelfAttention,
    TransformerLayer,
    TransformerStack,
    mean_weights,
)


def torchs(attention):
    """torch's MultiheadAttention with the same weights."""
    other = torch.nn.MultiheadAttention(attention.width, attention.heads, batch_first=True).double()
    parts = [attention.project] if isinstance(attention, SelfAttention) else [attention.query, attention.memory]
    with torch.no_grad():
        other.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        other.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        other.out_proj.weight.copy_(attention.out.weight)
        other.out_proj.bias.copy_(attention.out.bias)
    return other


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attentions_equal_torchs(heads):
    torch.manual_seed(0)
    x, memory = torch.randn(3, 5, 8).double(), torch.randn(3, 7, 8).double()
    mask = torch.arange(7) < torch.tensor([7, 1, 4])[:, None]
    cross = CrossAttention(8, heads).double()
    stored = cross.memorise(memory)
    expected, weights = torchs(cross)(x, memory, memory, key_padding_mask=~mask)
    found = cross(x, stored, mask=mask[:, None, None])
    torch.testing.assert_close(found.output, expected)
    looked = mean_weights(found.queries, stored[:, :, 0], heads, mask[:, None, None])
    torch.testing.assert_close(looked, weights)
    assert (looked[1, :, 1:] == 0).all()
    own = SelfAttention(8, heads).double()
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected, _ = torchs(own)(x, x, x, attn_mask=later)
    torch.testing.assert_close(own(x, causal=True).output, expected)


def test_what_is_masked_reaches_nothing():
    cross = CrossAttention(8, 2).double()
    x, memory = torch.randn(1, 2, 8).double(), torch.randn(1, 4, 8).double()
    mask = torch.tensor([[[[True, True, False, False]]]])
    expected = cross(x, cross.memorise(memory[:, :2])).output
    memory[:, 2:] = 1e6
    torch.testing.assert_close(cross(x, cross.memorise(memory), mask=mask).output, expected)


@pytest.mark.parametrize("rotary", [False, True])
def test_a_past_equals_the_whole(rotary):
    torch.manual_seed(0)
    own = SelfAttention(8, 2).double()
    x = torch.randn(2, 6, 8).double()
    angles = torch.randn(1, 6, 2).double()
    turns = (angles.cos(), angles.sin()) if rotary else None
    whole = own(x, causal=True, rotary=turns)
    past = None
    for t in range(6):
        now = None if turns is None else tuple(part[:, t : t + 1] for part in turns)
        step = own(x[:, t : t + 1], rotary=now, past=past)
        past = step.memory
        torch.testing.assert_close(step.output, whole.output[:, t : t + 1])
    torch.testing.assert_close(past, whole.memory)


def test_swiglu_and_activations():
    x = torch.randn(3, 4)
    block = FeedForward(4, 6, "swiglu")
    gate = block.gate(x)
    torch.testing.assert_close(block(x), block.down(gate * torch.sigmoid(gate) * block.up(x)))
    with pytest.raises(ConfigError, match="did you mean `relu`"):
        FeedForward(4, 6, "relo")
    with pytest.raises(ConfigError, match="choose one of: post, pre"):
        TransformerLayer(4, 1, 8, norm="between")
    with pytest.raises(ConfigError, match="multiple of heads"):
        SelfAttention(6, 4)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_outputs_start_with_unit_variance_at_any_depth(norm):
    torch.manual_seed(0)
    x = torch.randn(4, 9, 64)
    for layers in (1, 12):
        out = TransformerStack(layers, 64, 4, 128, norm=norm)(x).output
        assert out.std().item() == pytest.approx(1.0, abs=0.05)


def test_what_blocks_add_stays_small_at_any_depth():
    torch.manual_seed(0)
    x = torch.randn(4, 9, 64)
    stack = TransformerStack(24, 64, 4, 128, norm="pre")
    stack.norm = None
    assert 0.8 < stack(x).output.std().item() < 2.0


def test_dropout_acts_while_training_alone():
    torch.manual_seed(0)
    layer = TransformerLayer(8, 2, 16, dropout=0.5, attention_dropout=0.5)
    x = torch.randn(2, 3, 8)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_pointer_is_the_mixture():
    torch.manual_seed(0)
    pointer = Pointer(4).double()
    log_probs = torch.randn(2, 3, 5).double().log_softmax(2)
    parts = torch.randn(3, 2, 3, 4).double()
    weights = torch.randn(2, 3, 4).double().softmax(2)
    copies = torch.tensor([[1, 4, 1, -1], [-1, -1, -1, -1]])
    found = pointer(log_probs, *parts, weights=weights, copies=copies).exp()
    torch.testing.assert_close(found.sum(2), torch.ones(2, 3).double())
    torch.testing.assert_close(found[1], log_probs[1].exp())
    gate = torch.sigmoid(pointer.gate(torch.cat(tuple(parts), dim=2)))[0]
    expected = gate * log_probs[0].exp()
    total = weights[0, :, :3].sum(1)
    for s, symbol in ((0, 1), (1, 4), (2, 1)):
        expected[:, symbol] += (1 - gate[:, 0]) * weights[0, :, s] / total
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("gate", [-1e4, -50.0, 50.0, 1e4])
def test_pointer_is_exact_at_extreme_gates(gate):
    pointer = Pointer(2)
    with torch.no_grad():
        pointer.gate.bias.fill_(gate)
        pointer.gate.weight.zero_()
    log_probs = torch.tensor([[[0.5, 0.5, 0.0]]]).log().requires_grad_()
    weights = torch.tensor([[[1.0]]], requires_grad=True)
    parts = torch.zeros(3, 1, 1, 2)
    found = pointer(log_probs, *parts, weights=weights, copies=torch.tensor([[1]]))
    assert found[0, 0, 0].item() == pytest.approx(min(gate, 0.0) + torch.tensor(0.5).log().item(), rel=1e-5)
    found[0, 0, :2].sum().backward()
    for tensor in (log_probs, weights, pointer.gate.bias):
        assert tensor.grad.isfinite().all()
