"""Saliency: gradients by differences, completeness, closed forms, and that models are left as they were."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from thalweg.diagnostics.saliency import (
    feature_maps,
    first_filters,
    grad_cam,
    heat,
    integrated_gradients,
    smooth_gradient,
)
from thalweg.energies.convnet.config import ConvNetConfig
from thalweg.energies.convnet.model import ConvNet
from thalweg.errors import ConfigError, ShapeError


def network(**changes):
    torch.manual_seed(0)
    config = ConvNetConfig(**{"channels": (4, 6), "hidden": (5,), "dropout": 0.5, "activation": "tanh", **changes})
    model = ConvNet(config, classes=3, channels=2, size=(8, 8)).double()
    for part in model.modules():  # statistics that are not those of a fresh network
        if isinstance(part, nn.BatchNorm1d):
            nn.init.uniform_(part.running_var, 0.5, 2)
    return model


def batch(count=3):
    return torch.randn(count, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def score(model, images, classes):
    model.eval()
    with torch.no_grad():
        found = -model(images).gather(1, classes[:, None])[:, 0]
    model.train()
    return found


CLASSES = torch.tensor([0, 2, 1])

plain_gradient = partial(smooth_gradient, noise=0.0, samples=1)


@pytest.mark.parametrize("changes", [{}, {"norm": "batch", "hidden_norm": True, "head": "average"}], ids=str)
def test_gradients_are_differences(changes):
    model, images = network(**changes), batch()
    grads = plain_gradient(model, images, CLASSES)
    for place in ((0, 0, 0), (1, 3, 4), (0, 7, 7)):
        step = torch.zeros_like(images)
        step[:, *place] = 1e-5
        slope = (score(model, images + step, CLASSES) - score(model, images - step, CLASSES)) / 2e-5
        torch.testing.assert_close(grads[:, *place], slope, rtol=1e-5, atol=1e-8)
    wrong = plain_gradient(model, images, CLASSES.flip(0))
    assert not torch.allclose(wrong, grads)


def test_nothing_of_the_model_changes():
    model, images = network(norm="batch"), batch()
    model.blocks[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for function in (smooth_gradient, integrated_gradients, grad_cam):
        function(model, images)
        assert images.grad is None
        assert not images.requires_grad
    feature_maps(model, images)
    assert model.training
    assert not model.blocks[0].training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert plain_gradient(model, images).abs().sum() > 0


def test_the_predicted_class_is_the_default():
    model, images = network(), batch()
    model.eval()
    guesses = model(images).argmin(1)
    for function in (plain_gradient, integrated_gradients, grad_cam):
        torch.testing.assert_close(function(model, images), function(model, images, guesses))


def test_smooth_gradients_are_means_over_noise():
    model, images = network(), batch()
    plain = smooth_gradient(model, images, CLASSES, noise=0.0, samples=2)
    torch.testing.assert_close(plain, plain_gradient(model, images, CLASSES))
    draw = torch.Generator().manual_seed(5)
    total = torch.zeros_like(images)
    for _ in range(3):
        noise = torch.randn(images.shape, generator=draw, dtype=torch.float64)
        for b in range(3):
            noise[b] *= 0.2 * (images[b].max() - images[b].min())
        total += plain_gradient(model, images + noise, CLASSES)
    found = smooth_gradient(model, images, CLASSES, noise=0.2, samples=3, seed=5)
    torch.testing.assert_close(found, total / 3)


@pytest.mark.parametrize(("activation", "pooling", "near"), [("tanh", "average", 1e-10), ("relu", "max", 1e-3)])
def test_integrated_gradients_are_complete(activation, pooling, near):
    model, images = network(activation=activation, pooling=pooling), batch()
    grey = torch.full((2, 8, 8), 0.3, dtype=torch.float64)
    for baseline in (None, grey):
        start = torch.zeros_like(images) if baseline is None else baseline.expand_as(images)
        change = score(model, images, CLASSES) - score(model, start, CLASSES)
        parts = integrated_gradients(model, images, CLASSES, baseline=baseline, steps=200)
        torch.testing.assert_close(parts.sum((1, 2, 3)), change, rtol=0, atol=near)
    # A plain gradient times the image is not complete: the test can fail.
    wrong = (images * plain_gradient(model, images, CLASSES)).sum((1, 2, 3))
    assert not torch.allclose(wrong, score(model, images, CLASSES) - score(model, images * 0, CLASSES), atol=1e-3)


class _Cubic(nn.Module):
    def forward(self, x):
        return torch.stack(((x**3).sum((1, 2, 3)), x.sum((1, 2, 3))), 1)


def test_integrated_gradients_of_a_polynomial():
    x = torch.rand(2, 1, 2, 2, dtype=torch.float64)
    found = integrated_gradients(_Cubic(), x, torch.tensor([0, 1]), steps=2)
    torch.testing.assert_close(found[0], -(x[0] ** 3))
    torch.testing.assert_close(found[1], -x[1])


def test_grad_cam_by_hand():
    model, images = network(head="average", hidden=()), batch()
    found = grad_cam(model, images, CLASSES, upsample=False)
    model.eval()
    maps = model.maps(images).detach().numpy()
    weights = model.classifier.output.weight.detach().numpy()
    for b in range(3):
        # With means and one matrix, ds / dA is W / (H W) everywhere.
        by_hand = np.maximum(0, np.tensordot(weights[CLASSES[b]] / 4, maps[b], axes=1))
        np.testing.assert_allclose(found[b].numpy(), by_hand, atol=1e-12)
    whole = grad_cam(model, images, CLASSES)
    assert whole.shape == (3, 8, 8)
    assert (whole >= 0).all()


def test_feature_maps_and_filters():
    model = network(stem=3, norm="weight")
    found = feature_maps(model, batch())
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "stem": (3, 3, 8, 8),
        "block 1": (3, 4, 4, 4),
        "block 2": (3, 6, 2, 2),
    }
    model.eval()
    torch.testing.assert_close(found["block 2"], model.maps(batch()).detach())
    assert torch.equal(first_filters(model), model.stem.convolution.weight)
    assert not any(part._forward_hooks for part in (model.stem, *model.blocks))
    with pytest.raises(ConfigError, match="must have a convolution"):
        first_filters(nn.Linear(2, 2))


def test_heat():
    values = torch.tensor([[[[3.0, -1.0]], [[-1.0, 0.0]]], [[[0.0, 0.0]], [[0.0, 0.0]]]])
    assert heat(values, quantile=1.0).tolist() == [[[1.0, 0.25]], [[0.0, 0.0]]]
    assert heat(torch.rand(2, 5, 5)).max() == 1
    assert heat(torch.zeros(0, 3, 4, 4)).shape == (0, 4, 4)


def test_empty_batches():
    model = network()
    for function in (smooth_gradient, integrated_gradients):
        assert function(model, batch()[:0]).shape == (0, 2, 8, 8)
    assert grad_cam(model, batch()[:0]).shape == (0, 8, 8)


def test_mistakes():
    model, images = network(), batch()
    with pytest.raises(ShapeError, match=r"`classes` must be \(3,\)"):
        plain_gradient(model, images, torch.tensor([0]))
    with pytest.raises(ShapeError, match=r"\(B, C, H, W\) floats"):
        plain_gradient(model, images[0])
    with pytest.raises(ConfigError, match="steps"):
        integrated_gradients(model, images, steps=0)
    with pytest.raises(ConfigError, match="samples"):
        smooth_gradient(model, images, samples=0)
    with pytest.raises(ConfigError, match="quantile"):
        heat(images, quantile=0.0)
    with pytest.raises(ShapeError, match="attributions"):
        heat(images[0, 0])
