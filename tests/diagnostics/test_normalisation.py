"""Section N: statistics of every scheme, weight normalisation, and the Jacobians, against definitions and figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from oracles.normalisation import TENSOR, differences, groups_of, moments
from thalweg.diagnostics.normalisation import (
    compare_normalisations,
    layer_norm_jacobian,
    normalisation_statistics,
)
from thalweg.errors import ConfigError, ShapeError
from thalweg.layers.norms import normalisation, normalise_weights

X = torch.tensor(TENSOR, dtype=torch.float64)


def check(found, means, variances):
    torch.testing.assert_close(found.mean, torch.tensor(means, dtype=torch.float64), atol=5e-5, rtol=0)
    torch.testing.assert_close(found.variance, torch.tensor(variances, dtype=torch.float64), atol=5e-5, rtol=0)


def test_n1_batch_statistics():
    found = normalisation_statistics(X, "batch")
    check(found, [2.5, 2.5833], [7 / 12, 1.0764])
    assert float(found.variance[0]) == pytest.approx(7 / 12, abs=1e-15)
    assert found.count.tolist() == [12, 12]


def test_n1_layer_statistics():
    check(normalisation_statistics(X, "layer"), [2, 3, 2.5, 2.6667], [0.6667, 0.6667, 1.25, 0.2222])


def test_n1_instance_statistics():
    means = [[2, 2], [2.6667, 3.3333], [2.6667, 2.3333], [2.6667, 2.6667]]
    variances = [[0.6667, 0.6667], [0.2222, 0.8889], [0.8889, 1.5556], [0.2222, 0.2222]]
    check(normalisation_statistics(X, "instance"), means, variances)


def test_n1_figures_are_population_variances():
    """The broken twin: with n - 1 no figure comes out."""
    for scheme, of in (("batch", 12), ("layer", 6), ("instance", 3)):
        found = normalisation_statistics(X, scheme)
        wrong = found.variance * of / (of - 1)
        assert not torch.isclose(found.variance, wrong, atol=5e-5, rtol=0).any()


def test_n1_torchs_modules_use_these_statistics():
    eps = 1e-5
    modules = {
        "batch": torch.nn.BatchNorm1d(2, affine=False).double(),
        "layer": torch.nn.LayerNorm((2, 3), elementwise_affine=False),
        "instance": torch.nn.InstanceNorm1d(2),
    }
    shapes = {"batch": (1, 2, 1), "layer": (4, 1, 1), "instance": (4, 2, 1)}
    for scheme, module in modules.items():
        found = normalisation_statistics(X, scheme)
        mean, variance = (part.view(shapes[scheme]) for part in (found.mean, found.variance))
        torch.testing.assert_close(module(X), (X - mean) / (variance + eps).sqrt(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 3), (3, 4, 1), (3, 4, 5)])
def test_statistics_with_a_mask(shape):
    B, _, F = shape
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=draw, dtype=torch.float64)
    lengths = torch.randint(1, F + 1, (B,), generator=draw)
    mask = torch.arange(F) < lengths.unsqueeze(1)
    noisy = torch.where(mask.unsqueeze(1), x, math.nan)
    flipped = x.transpose(1, 2).numpy()
    for scheme, named in (("batch", "batch"), ("instance", "instance"), ("position", "layer")):
        found = normalisation_statistics(noisy, scheme, mask=mask)
        for key, values in groups_of(flipped, mask.numpy(), named).items():
            mean, variance = moments(values)
            assert float(found.mean[key]) == pytest.approx(mean, abs=1e-12)
            assert float(found.variance[key]) == pytest.approx(variance, abs=1e-12)
            assert int(found.count[key]) == len(values)


def test_statistics_of_rows_and_of_nothing():
    rows = normalisation_statistics(X[:, :, 0], "batch")
    assert rows.mean.tolist() == pytest.approx([2.75, 1.75])
    assert normalisation_statistics(X[:0], "layer").mean.shape == (0,)
    assert normalisation_statistics(X[:0], "batch").mean.isnan().all()
    assert normalisation_statistics(X.bfloat16(), "batch").mean.dtype == torch.float32


def test_statistics_refuse_what_they_cannot_take():
    with pytest.raises(ConfigError, match="scheme `bach` is not known; did you mean `batch`"):
        normalisation_statistics(X, "bach")
    with pytest.raises(ShapeError, match=r"must be \(B, C, F\) or \(B, C\) and floating, got \(4,\)"):
        normalisation_statistics(X[:, 0, 0], "batch")
    with pytest.raises(ShapeError, match=r"must be \(B, F\) = \(4, 3\) as in `x`, got \(4, 2\)"):
        normalisation_statistics(X, "batch", mask=torch.ones(4, 2, dtype=torch.bool))


def white(N=40, D=5, seed=0):
    """Rows with mean 0 and covariance I."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(N, D, generator=draw, dtype=torch.float64)
    x = torch.linalg.qr(rows - rows.mean(0))[0] * math.sqrt(N)
    torch.testing.assert_close(x.mean(0), torch.zeros(D, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(x.t() @ x / N, torch.eye(D, dtype=torch.float64), atol=1e-10, rtol=0)
    return x


def test_n2_batch_norm_of_white_inputs_is_weight_normalisation():
    x, draw = white(), torch.Generator().manual_seed(1)
    u = torch.randn(3, 5, generator=draw, dtype=torch.float64) * 7
    gamma, beta = torch.tensor([2.0, -0.5, 1.0]).double(), torch.tensor([0.3, 0.0, -1.0]).double()
    norm = normalisation("batch", 3, eps=1e-30).double()
    with torch.no_grad():
        norm.layer.weight.copy_(gamma)
        norm.layer.bias.copy_(beta)
    w = gamma.unsqueeze(1) * u / u.norm(dim=1, keepdim=True)
    torch.testing.assert_close(norm(x @ u.t()), x @ w.t() + beta, rtol=1e-10, atol=1e-10)
    # Torch's weight normalisation has the same w.
    layer = normalise_weights(torch.nn.Linear(5, 3).double())
    with torch.no_grad():
        layer.parametrizations.weight.original0.copy_(gamma.unsqueeze(1))
        layer.parametrizations.weight.original1.copy_(u)
    torch.testing.assert_close(layer.weight, w, rtol=1e-12, atol=1e-12)
    # Without white inputs the two differ.
    coloured = x * torch.tensor([1.0, 2, 3, 4, 5]).double()
    assert not torch.allclose(norm(coloured @ u.t()), coloured @ w.t() + beta, atol=0.1)


def test_n3_gradient_of_weight_normalisation_is_orthogonal():
    draw = torch.Generator().manual_seed(2)
    x, target = white(seed=4), torch.randn(40, 3, generator=draw, dtype=torch.float64)
    layer = normalise_weights(torch.nn.Linear(5, 3, bias=False).double())
    parts = layer.parametrizations.weight
    with torch.no_grad():
        parts.original0.copy_(torch.tensor([[2.0], [-0.5], [1.0]]))
        parts.original1.mul_(3.0)
    (layer(x) - target).pow(2).mean().backward()
    w = layer.weight.detach().requires_grad_()
    (x @ w.t() - target).pow(2).mean().backward()
    u, gamma = parts.original1.detach(), parts.original0.detach()
    length = u.norm(dim=1, keepdim=True)
    across = w.grad - u * (u * w.grad).sum(1, keepdim=True) / length.square()
    formula = gamma / length * across
    torch.testing.assert_close(parts.original1.grad, formula, rtol=1e-10, atol=1e-12)
    assert (formula * u).sum(-1).abs().max() < 1e-12
    assert w.grad.mul(u).sum(-1).abs().min() > 1e-3  # that of w is not


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_n4_layer_norm_jacobian(n, eps):
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) * 2 + 1
    found = layer_norm_jacobian(x, eps=eps)
    for row, matrix in zip(x, found, strict=True):
        mean, variance = moments(row.tolist())
        y, sigma = (row.numpy() - mean) / math.sqrt(variance + eps), math.sqrt(variance + eps)
        formula = (np.eye(n) - np.ones((n, n)) / n - np.outer(y, y) / n) / sigma
        np.testing.assert_allclose(matrix.numpy(), formula, atol=1e-12)
        module = torch.nn.LayerNorm(n, eps=eps, elementwise_affine=False)
        by_autograd = torch.autograd.functional.jacobian(module, row)
        np.testing.assert_allclose(matrix.numpy(), by_autograd.numpy(), atol=1e-10)
        measured = differences(lambda v, e=eps: (v - v.mean()) / np.sqrt(v.var() + e), row.numpy())
        np.testing.assert_allclose(matrix.numpy(), measured, atol=1e-6)


def test_n4_layer_norm_loses_two_directions_and_stretches_the_rest_alike():
    x = torch.tensor([1.0, 3, 2, 7, 4], dtype=torch.float64)
    sigma = x.std(correction=0)
    values = torch.linalg.svdvals(layer_norm_jacobian(x))
    torch.testing.assert_close(values, torch.tensor([1.0, 1, 1, 0, 0], dtype=torch.float64) / sigma, atol=1e-12, rtol=0)
    for lost in (torch.ones_like(x), x - x.mean()):
        assert (layer_norm_jacobian(x) @ lost).abs().max() < 1e-12
    # Centring alone is not the whole of it: the twin without yy'/n fails.
    assert not torch.allclose(layer_norm_jacobian(x), (torch.eye(5).double() - 1 / 5) / sigma, atol=1e-2)


def test_n4_holds_for_batch_and_instance_norm():
    """Each channel of the batch is a vector of its own."""
    matrix = layer_norm_jacobian(X[:, 0].flatten(), eps=1e-5)
    channel = X[:, 0].reshape(12, 1)
    norm = normalisation("batch", 1, affine=False).double()
    by_autograd = torch.autograd.functional.jacobian(norm, channel).view(12, 12)
    torch.testing.assert_close(matrix, by_autograd, rtol=1e-9, atol=1e-10)
    item = X[1, 1].view(1, 3, 1)
    norm = normalisation("instance", 1, affine=False)
    by_autograd = torch.autograd.functional.jacobian(norm, item).view(3, 3)
    torch.testing.assert_close(layer_norm_jacobian(X[1, 1], eps=1e-5), by_autograd, rtol=1e-9, atol=1e-10)


def test_gradient_of_the_layer_norm_jacobian():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer_norm_jacobian, (x,))


def test_batch_norm_needs_running_statistics_layer_norm_does_not():
    """At inference an item's answer must not depend on who else is in the batch."""
    draw = torch.Generator().manual_seed(6)
    x = torch.randn(8, 5, 4, generator=draw) * 3 + 1
    for name in ("batch", "layer", "instance", "rms"):
        norm = normalisation(name, 4)
        for _ in range(200):
            norm(x)
        alone_training, among_training = norm(x[:1]), norm(x)[:1]
        norm.eval()
        torch.testing.assert_close(norm(x[:1]), norm(x)[:1])
        assert torch.allclose(alone_training, among_training, atol=1e-5) == (name != "batch")
        buffers = {key for key, _ in norm.named_buffers()}
        wanted = {"layer.running_mean", "layer.running_var", "layer.num_batches_tracked"} if name == "batch" else set()
        assert buffers == wanted
    # What was kept is what the batches had: inference agrees with training on the same data.
    norm = normalisation("batch", 4)
    for _ in range(200):
        trained = norm(x)
    torch.testing.assert_close(norm.eval()(x), trained, atol=0.06, rtol=0)


def test_comparison_of_schemes():
    x = torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    x[:, :, 2] = 5.0  # a dead feature
    lengths = torch.tensor([7, 3, 1, 7])
    mask = torch.arange(7) < lengths.unsqueeze(1)
    report = compare_normalisations(torch.where(mask.unsqueeze(-1), x, math.nan), mask=mask)
    rows = {row.scheme: row for row in report.rows}
    assert (rows["batch"].groups, rows["batch"].smallest, rows["batch"].lost) == (3, 18, 6)
    assert (rows["layer"].groups, rows["layer"].smallest, rows["layer"].lost) == (18, 3, 36)
    # The item of length 1 has groups of one entry, with one direction each.
    assert (rows["instance"].groups, rows["instance"].smallest, rows["instance"].lost) == (12, 1, 9 * 2 + 3)
    assert rows["batch"].dead == pytest.approx(1 / 3)
    assert rows["instance"].dead == pytest.approx(6 / 12)
    assert rows["layer"].dead == 0
    for name, row in rows.items():
        assert row.entries == 18 * 3
        found = [moments(values) for values in groups_of(x.numpy(), mask.numpy(), name).values()]
        assert row.mean == pytest.approx((min(m for m, _ in found), max(m for m, _ in found)))
        assert row.deviation == pytest.approx(
            (math.sqrt(min(v for _, v in found)), math.sqrt(max(v for _, v in found))), abs=1e-9
        )
        assert row.gain[1] == pytest.approx(1 / math.sqrt(min(v for _, v in found) + 1e-5))
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines] == ["scheme", "batch", "layer", "instance"]
    assert len({len(line) for line in lines}) == 1


def test_comparison_at_the_edges():
    assert [row.groups for row in compare_normalisations(torch.zeros(0, 3, 2)).rows] == [0, 0, 0]
    assert "nan" in str(compare_normalisations(torch.zeros(0, 3, 2)))
    assert [row.smallest for row in compare_normalisations(torch.zeros(1, 1, 1)).rows] == [1, 1, 1]
    assert [row.groups for row in compare_normalisations(torch.randn(5, 2)).rows] == [2, 5, 10]
    with pytest.raises(ShapeError, match="must be"):
        compare_normalisations(torch.zeros(3))
