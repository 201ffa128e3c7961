"""Normalisation by name: every scheme against its definition, padding, inference, gradients, weights."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from oracles.normalisation import groups_of, moments, normalised
from thalweg.errors import ConfigError, ShapeError
from thalweg.layers.norms import POSITIONWISE, BatchNorm, InstanceNorm, normalisation, normalise_weights
from thalweg.layers.recurrent import Recurrent

SHAPES = [(1, 1, 1), (1, 4, 1), (2, 1, 3), (3, 5, 4), (4, 6, 2)]
SCHEMES = ["batch", "layer", "instance", "rms"]


def case(shape, seed=0, dtype=torch.float64):
    B, T, D = shape
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw, dtype=torch.float64) * 2 + 1
    lengths = torch.randint(1, T + 1, (B,), generator=draw)
    lengths[0] = T
    mask = torch.arange(T) < lengths.unsqueeze(1)
    scale, shift = (torch.randn(D, generator=draw, dtype=torch.float64) for _ in range(2))
    return x.to(dtype), mask, scale, shift


def build(name, scale, shift, **settings):
    norm = normalisation(name, len(scale), **settings).to(scale.dtype)
    with torch.no_grad():
        norm.layer.weight.copy_(scale)
        if name != "rms":
            norm.layer.bias.copy_(shift)
    return norm


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_every_scheme_is_its_definition(name, shape, masked):
    x, mask, scale, shift = case(shape)
    mask = mask if masked else torch.ones_like(mask)
    norm = build(name, scale, shift)
    noisy = torch.where(mask.unsqueeze(-1), x, math.nan)
    found = norm(noisy, mask if masked else None)
    shift = torch.zeros_like(shift) if name == "rms" else shift
    expected = normalised(x.numpy(), mask.numpy(), name, scale.tolist(), shift.tolist(), eps=1e-5)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-10)


def test_the_oracle_can_fail():
    x, mask, scale, shift = case((3, 5, 4))
    found = build("batch", scale, shift)(x, mask).detach().numpy()
    twin = normalised(x.numpy(), mask.numpy(), "batch", scale.tolist(), shift.tolist(), eps=1e-5, unbiased=True)
    assert np.abs(found - twin).max() > 1e-2


@pytest.mark.parametrize("name", ["none", "weight"])
def test_nothing_is_done_to_activations(name):
    x, mask, _, _ = case((3, 5, 4))
    norm = normalisation(name, 4)
    assert norm(x, mask) is x
    assert norm(x) is x
    assert list(norm.parameters()) == []


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_without_positions(name):
    x, _, scale, shift = case((6, 1, 4))
    norm = build(name, scale, shift)
    torch.testing.assert_close(norm(x[:, 0]), norm(x)[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("training", [True, False])
def test_padding_is_inert(name, training):
    """Whatever stands there, values and gradients are those of the sequences alone."""
    x, mask, scale, shift = case((3, 5, 4), seed=1)
    results = []
    for filling in (0.0, 7.0, math.nan, math.inf):
        norm = build(name, scale, shift).train(training)
        filled = torch.where(mask.unsqueeze(-1), x, filling).requires_grad_()
        y = norm(filled, mask)
        assert (y[~mask] == 0).all()
        (y * torch.arange(4)).square().sum().backward()
        assert (filled.grad[~mask] == 0).all()
        results.append([y.detach(), filled.grad, *(p.grad for p in norm.parameters()), *norm.buffers()])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_running_statistics_follow_the_real_positions(shape, momentum):
    D = shape[-1]
    norm = normalisation("batch", D, momentum=momentum).double()
    mean, variance = np.zeros(D), np.ones(D)
    for number, seed in enumerate((1, 2, 3), start=1):
        x, mask, _, _ = case(shape, seed)
        norm(torch.where(mask.unsqueeze(-1), x, math.nan), mask)
        share = 1 / number if momentum is None else momentum
        for (d,), values in groups_of(x.numpy(), mask.numpy(), "batch").items():
            now, _ = moments(values)
            spread = moments(values, unbiased=True)[1] if len(values) > 1 else 0.0
            mean[d] += share * (now - mean[d])
            variance[d] += share * (spread - variance[d])
    np.testing.assert_allclose(norm.layer.running_mean.numpy(), mean, atol=1e-12)
    np.testing.assert_allclose(norm.layer.running_var.numpy(), variance, atol=1e-12)
    assert int(norm.layer.num_batches_tracked) == 3
    # Inference uses them, whatever the batch.
    norm.eval()
    x, mask, _, _ = case(shape, 9)
    expected = torch.where(mask.unsqueeze(-1), (x - torch.tensor(mean)) / (torch.tensor(variance) + 1e-5).sqrt(), 0)
    torch.testing.assert_close(norm(x, mask), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm(x)[mask], expected[mask], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm(x[:1], mask[:1]), expected[:1], rtol=1e-10, atol=1e-10)


def test_without_a_mask_it_is_torchs_batch_norm_to_the_bit():
    ours, torchs = normalisation("batch", 4), nn.BatchNorm1d(4)
    for seed in range(3):
        x = case((3, 5, 4), seed, torch.float32)[0]
        assert torch.equal(ours(x), torchs(x.view(15, 4)).view(3, 5, 4))
    assert torch.equal(ours.layer.running_var, torchs.running_var)
    x, mask, _, _ = case((3, 5, 4), 5, torch.float32)
    torch.testing.assert_close(ours(x, torch.ones_like(mask)), torchs(x.view(15, 4)).view(3, 5, 4))
    torch.testing.assert_close(ours.layer.running_var, torchs.running_var)


def test_a_batch_with_nothing_real_teaches_nothing():
    norm = normalisation("batch", 2)
    before = norm.layer.running_mean.clone(), norm.layer.running_var.clone()
    y = norm(torch.full((2, 3, 2), math.nan), torch.zeros(2, 3, dtype=torch.bool))
    assert (y == 0).all()
    assert torch.equal(norm.layer.running_mean, before[0])
    assert torch.equal(norm.layer.running_var, before[1])


@pytest.mark.parametrize("name", SCHEMES)
def test_empty_batches(name):
    norm = normalisation(name, 3)
    for shape in ((0, 3), (0, 4, 3), (2, 0, 3)):
        x = torch.zeros(shape, requires_grad=True)
        assert norm(x).shape == shape
        y = norm(x, torch.ones(shape[:-1], dtype=torch.bool))
        assert y.shape == shape
        y.sum().backward()
    assert all(torch.isfinite(b).all() for b in norm.buffers())


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients(name):
    x, mask, scale, shift = case((2, 3, 2), seed=2)
    norm = build(name, scale, shift)
    for given in (mask, None):
        assert torch.autograd.gradcheck(lambda v, m=given: norm(v, m), (x.clone().requires_grad_(),))
        weights = list(norm.parameters())

        def by_weights(*values, m=given):
            named = dict(zip(dict(norm.named_parameters()), values, strict=True))
            return torch.func.functional_call(norm, named, (x, m))

        assert torch.autograd.gradcheck(by_weights, weights)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(name, dtype):
    x, mask, _, _ = case((4, 200, 3), seed=3)
    x = x.to(dtype)
    half, single = normalisation(name, 3), normalisation(name, 3)
    found = half.to(dtype)(x, mask)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), single(x.float(), mask), atol=0.03, rtol=0.02)


def test_only_instance_norm_looks_ahead():
    """What a decoder may use: at inference the first positions do not depend on the later ones."""
    x = case((2, 5, 3))[0]
    for name in ("none", "batch", "layer", "instance", "rms", "weight"):
        norm = normalisation(name, 3).double().eval()
        same = torch.allclose(norm(x)[:, :2], norm(x[:, :2]))
        assert same == (name in POSITIONWISE), name


def test_settings():
    assert isinstance(normalisation("batch", 2, momentum=None).layer, BatchNorm)
    assert isinstance(normalisation("instance", 2).layer, InstanceNorm)
    assert type(normalisation("layer", 2).layer) is nn.LayerNorm
    assert type(normalisation("rms", 2).layer) is nn.RMSNorm
    for name in SCHEMES:
        assert list(normalisation(name, 2, affine=False).parameters()) == []
        x = case((2, 3, 2))[0]
        plain, learnt = normalisation(name, 2, affine=False), normalisation(name, 2).double()
        torch.testing.assert_close(plain.double()(x), learnt(x))
    assert "batch, 2" in repr(normalisation("batch", 2))


def test_errors_are_one_line():
    with pytest.raises(ConfigError, match="normalisation `bach` is not known; did you mean `batch`"):
        normalisation("bach", 2)
    with pytest.raises(ConfigError, match="at least 1 feature, got 0"):
        normalisation("layer", 0)
    norm = normalisation("layer", 2)
    with pytest.raises(ShapeError, match=r"`x` must be \(B, 2\) or \(B, T, 2\) as the norm was built, got \(3, 4\)"):
        norm(torch.zeros(3, 4))
    with pytest.raises(ShapeError, match=r"`mask` must be \(3, 4\) as `x` without features, got \(3,\)"):
        norm(torch.zeros(3, 4, 2), torch.ones(3, dtype=torch.bool))


def rows_of(u, g):
    return g * u / u.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_weight_normalised_recurrent_layers(kind):
    torch.manual_seed(0)
    plain = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True).double()
    layer = normalise_weights(copy.deepcopy(plain))
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], plain(x)[0], rtol=1e-12, atol=1e-12)
    for _ in range(2):
        optimiser = torch.optim.SGD(layer.parameters(), 0.1)
        layer(x)[0].square().sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
        optimiser.step()
        optimiser.zero_grad()
    # After training the plain layer with the matrices g u / |u| says the same.
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if name.startswith("weight"):
                parts = layer.parametrizations[name]
                p.copy_(rows_of(parts.original1, parts.original0))
            else:
                p.copy_(getattr(layer, name))
    torch.testing.assert_close(layer(x)[0], plain(x)[0], rtol=1e-12, atol=1e-12)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x)[0], layer(x)[0])
    fresh = normalise_weights(kind(3, 4, num_layers=2, bidirectional=True, batch_first=True).double())
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x)[0], layer(x)[0])


@pytest.mark.parametrize("cell", ["lstm", "gru", "gru-reset-before"])
def test_weight_normalised_stacks(cell):
    torch.manual_seed(0)
    stack = Recurrent(cell, 3, 4, layers=2)
    x = torch.randn(2, 3, 3)
    before = stack(x)[0].detach()
    count = sum(p.dim() > 1 for p in stack.parameters())
    normalise_weights(stack)
    assert sum(name.endswith("original1") for name, _ in stack.named_parameters()) == count
    torch.testing.assert_close(stack(x)[0], before, rtol=1e-5, atol=1e-6)
    stack(x)[0].sum().backward()
    assert all(p.grad is not None for p in stack.parameters())
    names = [name for name, _ in stack.named_parameters()]
    normalise_weights(stack)  # twice is once
    assert [name for name, _ in stack.named_parameters()] == names


def test_embeddings_norms_and_biases_keep_their_weights():
    net = nn.ModuleList([nn.Embedding(3, 2), nn.LayerNorm((2, 2)), nn.Bilinear(2, 2, 2), nn.Conv1d(2, 3, 2)])
    normalise_weights(net)
    assert {name.split(".")[0] for name, _ in net.named_parameters() if "original" in name} == {"2", "3"}


def test_masks_of_every_pattern():
    """Padding may stand anywhere."""
    x, _, scale, shift = case((2, 2, 2))
    for bits in itertools.product([False, True], repeat=4):
        mask = torch.tensor(bits).view(2, 2)
        for name in SCHEMES:
            b = torch.zeros_like(shift) if name == "rms" else shift
            expected = normalised(x.numpy(), mask.numpy(), name, scale.tolist(), b.tolist(), eps=1e-5)
            np.testing.assert_allclose(build(name, scale, shift)(x, mask).detach().numpy(), expected, atol=1e-10)
