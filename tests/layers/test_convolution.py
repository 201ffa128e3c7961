"""Layers of image networks against definitions, at edge sizes, with gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from oracles.convolution import convolve, normalise, sigmoid, squeeze_excite, windows
from thalweg.errors import ConfigError
from thalweg.layers.blocks import Residual
from thalweg.layers.convolution import (
    ACTIVATIONS,
    RISING,
    ConvHighway,
    DropPath,
    ImageBatchNorm,
    Separable,
    SqueezeExcite,
    connected_maps,
    convolution,
    image_norm,
)

SHAPES = [(1, 4, 1, 1), (2, 4, 1, 3), (3, 8, 4, 5)]


def maps(shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64) * 2 + 1


def doubled(module, seed=0):
    torch.manual_seed(seed)
    for p in module.parameters():
        nn.init.normal_(p)
    return module.double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("batch", lambda C: lambda b, c: c),
        ("layer", lambda C: lambda b, c: b),
        ("instance", lambda C: lambda b, c: (b, c)),
        ("group", lambda C: lambda b, c: (b, c // 2)),
    ],
)
def test_norms_are_their_definition(shape, name, group):
    norm = doubled(image_norm(name, shape[1]))
    x = maps(shape)
    expected = normalise(x.numpy(), group(shape[1]), norm.weight.detach().numpy(), norm.bias.detach().numpy())
    for layout in (torch.contiguous_format, torch.channels_last):
        given = x.contiguous(memory_format=layout)
        np.testing.assert_allclose(norm(given).detach().numpy(), expected, atol=1e-9)


def test_the_oracle_of_norms_can_fail():
    norm = doubled(image_norm("layer", 4))
    x = maps((3, 4, 2, 2))
    wrong = normalise(x.numpy(), lambda b, c: c, norm.weight.detach().numpy(), norm.bias.detach().numpy())
    assert not np.allclose(norm(x).detach().numpy(), wrong)


@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (16, 8), (24, 8), (21, 7)])
def test_groups_have_two_channels_or_more(channels, groups):
    assert image_norm("group", channels).num_groups == groups


def test_batch_norm_follows_torch_and_takes_one_value():
    ours, theirs = ImageBatchNorm(3), nn.BatchNorm2d(3)
    for seed in range(3):
        x = maps((4, 3, 2, 2), seed).float()
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    single = ImageBatchNorm(2)
    nn.init.constant_(single.bias, 0.5)
    assert single(torch.ones(1, 2, 1, 1)).flatten().tolist() == [0.5, 0.5]
    assert ImageBatchNorm(2)(torch.ones(0, 2, 3, 3)).shape == (0, 2, 3, 3)
    with pytest.raises(ConfigError, match="no mask"):
        single(torch.ones(1, 2, 1, 1), torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("size", [(1, 1), (4, 5)])
def test_convolutions_are_their_definition(stride, kernel, size):
    x = maps((2, 4, *size))
    plain = convolution(4, 3, kernel, stride=stride).double()
    w, b = (p.detach().numpy() for p in plain.parameters())
    np.testing.assert_allclose(plain(x).detach().numpy(), convolve(x.numpy(), w, b, stride=stride), atol=1e-9)
    apart = Separable(4, 3, kernel, stride=stride).double()
    deep, flat, bias = (p.detach().numpy() for p in apart.parameters())
    expected = convolve(convolve(x.numpy(), deep, stride=stride, groups=4), flat, bias)
    np.testing.assert_allclose(apart(x).detach().numpy(), expected, atol=1e-9)


def test_separable_only_where_it_saves():
    assert isinstance(convolution(16, 8, 3, separable=True), Separable)
    assert isinstance(convolution(3, 8, 3, separable=True), nn.Conv2d)
    assert isinstance(convolution(16, 8, 1, separable=True), nn.Conv2d)


def test_squeeze_and_excitation_is_its_definition():
    layer = doubled(SqueezeExcite(4, 2))
    x = maps((3, 4, 2, 5))
    weights = [p.detach().numpy() for p in layer.parameters()]
    np.testing.assert_allclose(layer(x).detach().numpy(), squeeze_excite(x.numpy(), *weights), atol=1e-12)
    assert torch.autograd.gradcheck(layer, (maps((2, 4, 2, 2)).requires_grad_(),))


@pytest.mark.parametrize(
    ("stride", "outputs", "size"), [(1, 4, (3, 3)), (2, 4, (5, 4)), (2, 6, (1, 1)), (3, 6, (7, 2))]
)
def test_units_with_a_path_round_them(stride, outputs, size):
    x = maps((2, 4, *size))
    for name in ("residual", "highway"):
        inner = convolution(4, outputs, 3, stride=stride)
        unit = doubled(connected_maps(name, inner, 4, outputs, stride=stride))
        carried = windows(x.numpy(), stride, np.mean, partial=True)
        if outputs != 4:
            carried = convolve(carried, unit.shortcut[-1].weight.detach().numpy())
        change = inner(x).detach().numpy()
        expected = carried + change
        if name == "highway":
            gate = sigmoid(
                convolve(x.numpy(), unit.gate.weight.detach().numpy(), unit.gate.bias.detach().numpy(), stride=stride)
            )
            expected = (1 - gate) * carried + gate * change
        np.testing.assert_allclose(unit(x).detach().numpy(), expected, atol=1e-9)
    assert connected_maps("none", inner, 4, outputs)(x).shape == inner(x).shape
    if stride == 1:
        beside = connected_maps("dense", inner, 4, outputs)(x)
        assert torch.equal(beside, torch.cat((x, inner(x)), 1))


def test_units_start_as_they_should():
    highway = connected_maps("highway", convolution(4, 4, 3), 4, 4)
    assert isinstance(highway, ConvHighway)
    assert set(highway.gate.bias.tolist()) == {-2.0}
    assert type(connected_maps("residual", convolution(4, 4, 3), 4, 4)) is Residual


def test_drop_path_drops_whole_images_and_keeps_the_mean():
    torch.manual_seed(0)
    layer = DropPath(0.25)
    y = layer(torch.ones(4000, 2, 1, 3))
    rows = y.flatten(1)
    assert torch.equal(rows.amin(1), rows.amax(1))
    assert abs(float(y.mean()) - 1) < 0.03
    assert torch.equal(layer.eval()(torch.ones(3, 1)), torch.ones(3, 1))
    assert layer.train()(torch.ones(0, 2)).shape == (0, 2)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_rising_activations_rise(name):
    x = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    rises = bool((ACTIVATIONS[name]()(x).diff() >= 0).all())
    assert rises == (name in RISING)


def test_wrong_names_and_numbers():
    with pytest.raises(ConfigError, match="did you mean `batch`"):
        image_norm("bacth", 4)
    with pytest.raises(ConfigError, match="did you mean `residual`"):
        connected_maps("residul", nn.Identity(), 4, 4)
    with pytest.raises(ConfigError, match=r"\[0, 1\)"):
        DropPath(1.0)
