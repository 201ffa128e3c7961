"""Stacks of Transformer layers with every kind of norm: statistics of real positions, gradients, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oracles.transformer import batch_normed_stack
from thalweg.errors import ConfigError
from thalweg.layers.norms import BatchNorm, Normalisation
from thalweg.layers.transformer import TransformerLayer, TransformerStack

KINDS = ["layer", "rms", "batch", "instance", "weight", "none"]
LENGTHS = [4, 1, 3]
REAL = torch.arange(4) < torch.tensor(LENGTHS).unsqueeze(1)


def build(kind, *, place="pre", layers=2, width=8, heads=2):
    torch.manual_seed(0)
    stack = TransformerStack(layers, width, heads, 12, norm=place, norm_kind=kind).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return stack


def inputs(width=8, seed=1):
    return torch.randn(3, 4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(stack, x, real=REAL):
    return stack(x, mask=real[:, None, None, :], real=real).output


@pytest.mark.parametrize("place", ["pre", "post"])
def test_batch_norm_while_training_equals_the_plain_one(place):
    stack, x = build("batch", place=place).train(), inputs()
    weights = {name: value.numpy() for name, value in stack.state_dict().items()}
    rows = [x[b, :length].numpy() for b, length in enumerate(LENGTHS)]
    expected = batch_normed_stack(weights, 2, 2, "relu", rows, pre=place == "pre")
    twin = batch_normed_stack(weights, 2, 2, "relu", rows, pre=place == "pre", count=12)  # padding counted
    found = run(stack, x).detach().numpy()
    for b, length in enumerate(LENGTHS):
        np.testing.assert_allclose(found[b, :length], expected[b], rtol=1e-9, atol=1e-9)
        assert not np.allclose(found[b, :length], twin[b], rtol=1e-3)


def test_running_statistics_are_those_of_real_positions():
    stack, x = build("batch", layers=1).train(), inputs()
    norm = stack.each[0].attention_norm
    assert isinstance(norm, Normalisation)
    assert isinstance(norm.layer, BatchNorm)
    run(stack, x)
    real = x[REAL]
    torch.testing.assert_close(norm.layer.running_mean, 0.1 * real.mean(0))
    torch.testing.assert_close(norm.layer.running_var, 0.9 + 0.1 * real.var(0))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_padding_changes_nothing(kind, place, training):
    found = []
    for fill in (0.0, -50.0):
        stack, x = build(kind, place=place).train(training), inputs().masked_fill(~REAL.unsqueeze(2), fill)
        x.requires_grad_()
        out = run(stack, x)[REAL]
        out.square().sum().backward()
        assert x.grad is not None
        assert (x.grad[~REAL] == 0).all()
        found.append([out.detach(), x.grad[REAL], *(p.grad for p in stack.parameters()), *stack.buffers()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_mask_is_no_mask(kind):
    full = torch.ones_like(REAL)
    one, other = build(kind).train(), build(kind).train()
    torch.testing.assert_close(run(one, inputs(), full), other(inputs()).output, rtol=1e-9, atol=1e-9)
    for first, second in zip(one.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, place):
    stack = build(kind, place=place, layers=1, width=4, heads=1).eval()
    x = inputs(4).requires_grad_()
    weights = dict(stack.named_parameters())

    def outputs(x, *values):
        given = dict(zip(weights, values, strict=True))
        about = {"mask": REAL[:, None, None, :], "real": REAL}
        return torch.func.functional_call(stack, given, (x,), about).output[REAL]

    assert torch.autograd.gradcheck(outputs, (x, *weights.values()), fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_edge_sizes(kind):
    for shape in ((1, 1, 1), (0, 3, 1), (1, 5, 2)):
        stack = TransformerStack(1, shape[2], 1, 1, norm_kind=kind).train()
        assert stack(torch.randn(shape)).output.shape == shape
        assert torch.isfinite(stack(torch.randn(shape)).output).all()


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_types(kind):
    torch.manual_seed(0)
    stack = TransformerStack(2, 8, 2, 12, norm_kind=kind).eval()
    x = inputs().float()
    narrow = TransformerStack(2, 8, 2, 12, norm_kind=kind).eval()
    narrow.load_state_dict(stack.state_dict())
    found = narrow.bfloat16()(x.bfloat16(), mask=REAL[:, None, None, :], real=REAL).output
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found[REAL].float(), run(stack, x)[REAL], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_statistics_over_positions_are_refused_where_they_would_look_ahead(kind):
    with pytest.raises(ConfigError, match=f"{kind} norm looks at later positions too") as caught:
        TransformerLayer(8, 2, 12, cross=True, norm_kind=kind)
    assert "\n" not in str(caught.value)
    stack, x = build(kind), inputs()
    with pytest.raises(ConfigError, match="got a layer of a decoder"):
        stack(x, causal=True)
    pasts = stack(x).memories
    with pytest.raises(ConfigError, match="got a layer of a decoder"):
        stack(x[:, :1], pasts=pasts)


def test_an_unknown_kind():
    with pytest.raises(ConfigError, match="did you mean `batch`"):
        TransformerLayer(4, 1, 8, norm_kind="bach")  # pyright: ignore[reportArgumentType]


def test_weight_norm_holds_lengths_and_directions():
    layer, stack = TransformerLayer(8, 2, 12, norm_kind="weight"), build("weight", layers=1)
    for module in (layer.attention.project, stack.each[0].feedforward.up):
        lengths, rows = module.parametrizations.weight.original0, module.parametrizations.weight.original1
        torch.testing.assert_close(module.weight, lengths * rows / rows.norm(dim=1, keepdim=True))
    assert not [name for name, _ in stack.named_parameters() if "norm" in name]
