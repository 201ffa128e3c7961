"""Spectra of Hessians against those that are known: quadratics, log-sum-exp, the two parts of a Hopfield energy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from thalweg.diagnostics import convex_concave_report, convexity
from thalweg.errors import ConfigError, ShapeError

METHODS = ("dense", "lanczos")
every_method = pytest.mark.parametrize("method", METHODS)


def quadratic(spectrum, seed=0):
    """x'Hx/2 with a Hessian of known spectrum, and that Hessian."""
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(spectrum), len(spectrum))))
    matrix = torch.as_tensor(rotation @ np.diag(spectrum) @ rotation.T)
    return lambda x: 0.5 * ((x @ matrix.to(x)) * x).sum(-1), matrix


def near(actual: Tensor, expected, slack=1e-9) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=slack, atol=slack)


def points(*shape, seed=0, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@every_method
def test_quadratic_with_a_known_spectrum(method):
    function, _ = quadratic(np.array([-3.0, -1.0, 0.0, 0.5, 2.0, 7.0]))
    found = convexity(function, points(6), method=method)
    near(found.lowest, -3.0)
    near(found.highest, 7.0)


def test_a_wrong_hessian_is_noticed():
    function, _ = quadratic(np.array([-3.0, 0.0, 7.0]))
    found = convexity(lambda x: function(x) + 0.05 * x[..., 0] ** 2, points(3))
    with pytest.raises(AssertionError):
        near(found.highest, 7.0)


@every_method
def test_logsumexp_at_many_points(method):
    x = points(4, 5, seed=1)
    found = convexity(lambda q: torch.logsumexp(q, -1), x, method=method)
    for item, row in enumerate(x.numpy()):
        p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        values = np.linalg.eigvalsh(np.diag(p) - np.outer(p, p))
        near(found.lowest[item], values[0])
        near(found.highest[item], values[-1])


class Hopfield:
    """The two parts as section H writes them down, in plain torch."""

    def __init__(self, patterns: Tensor, beta: float):
        self.patterns, self.beta = patterns, beta

    def convex(self, q: Tensor) -> Tensor:
        constant = np.log(len(self.patterns)) / self.beta + 0.5 * float(self.patterns.square().sum(1).max())
        return 0.5 * q.square().sum(-1) + constant

    def concave(self, q: Tensor) -> Tensor:
        return -torch.logsumexp(self.beta * q @ self.patterns.mT, -1) / self.beta

    def hessian(self, q: np.ndarray) -> np.ndarray:
        """b X'(diag(p) - p p')X, of minus the concave part."""
        patterns = self.patterns.numpy()
        scores = self.beta * patterns @ q
        p = np.exp(scores - scores.max())
        p /= p.sum()
        return self.beta * patterns.T @ (np.diag(p) - np.outer(p, p)) @ patterns


@every_method
def test_h1_the_split_of_a_hopfield_energy(method):
    """H1: the Hessian of E1 is I; that of -E2 is b X'(diag(p) - pp')X, positive semi-definite."""
    memory, q = Hopfield(points(7, 4, seed=2), 1.5), 0.5 * points(3, 4, seed=3)
    report = convex_concave_report(memory, q, method=method)
    near(report.convex.lowest, [1.0] * 3)
    near(report.convex.highest, [1.0] * 3)
    for item, row in enumerate(q.numpy()):
        values = np.linalg.eigvalsh(memory.hessian(row))
        near(report.negated_concave.lowest[item], values[0])
        near(report.negated_concave.highest[item], values[-1])
        near(report.energy.lowest[item], 1 - values[-1])
    assert report.holds
    assert report.convex.kinds == report.negated_concave.kinds == ("convex",) * 3
    lines = str(report).splitlines()
    assert len(lines) == 4
    assert lines[1].split()[:4] == ["E1", "convex", "convex", "convex"]


def test_the_report_finds_a_split_that_is_wrong():
    class Swapped(Hopfield):
        def convex(self, q):
            return super().concave(q)

        def concave(self, q):
            return super().convex(q)

    report = convex_concave_report(Swapped(points(7, 4), 1.0), points(2, 4))
    assert not report.holds
    assert report.convex.kind == report.negated_concave.kind == "concave"


def test_the_library_s_own_memory():
    from thalweg.energies.hopfield.memory import HopfieldMemory

    patterns, q = points(6, 3, seed=4), 0.3 * points(2, 3, seed=5)
    report = convex_concave_report(HopfieldMemory(patterns, beta=2.0), q)
    assert report.holds
    plain = Hopfield(patterns, 2.0)
    for item, row in enumerate(q.numpy()):
        near(report.negated_concave.highest[item], np.linalg.eigvalsh(plain.hessian(row))[-1], 1e-6)
    near(report.convex.highest, [1.0, 1.0], 1e-6)


def test_lanczos_in_five_thousand_dimensions():
    """A low-rank memory: the non-zero spectrum of b X'(diag(p) - pp')X is that of an N x N matrix."""
    size, count, beta = 5000, 40, 1.0
    patterns = points(count, size, seed=6) / size**0.5 * torch.linspace(1, 4, count, dtype=torch.float64).unsqueeze(1)
    memory, q = Hopfield(patterns, beta), points(size, seed=7) / size**0.5
    found = convexity(lambda x: -memory.concave(x), q)
    x = patterns.numpy()
    p = np.exp(beta * x @ q.numpy())
    p /= p.sum()
    root = np.diag(np.sqrt(p)) @ (np.eye(count) - np.outer(np.ones(count), p)) @ x  # its Gram matrix is the Hessian
    values = np.linalg.eigvalsh(beta * root @ root.T)
    near(found.highest, values[-1], 1e-10)
    near(found.lowest, 0.0, 1e-12)
    energy = convexity(lambda x: memory.convex(x) + memory.concave(x), q)
    near(energy.lowest, 1 - values[-1], 1e-8)
    near(energy.highest, 1.0, 1e-8)


def test_lanczos_of_a_tridiagonal_hessian():
    """Where the lower end is crowded the value has not arrived after all steps, and the tolerance says so."""
    size = 5000
    bend = torch.ones(size, dtype=torch.float64)
    bend[0] = 50.0  # one eigenvalue apart from the others, whose vector dies out within a few entries
    function = lambda x: 0.5 * (x.diff(dim=-1).square().sum(-1) + (bend * x * x).sum(-1))  # noqa: E731
    found = convexity(function, points(size))
    diagonal = np.full(200, 3.0)
    diagonal[0] = 51.0
    top = np.linalg.eigvalsh(np.diag(diagonal) - np.eye(200, k=1) - np.eye(200, k=-1))[-1]
    near(found.highest, top, 1e-10)
    # The rest of the spectrum fills [1, 5], as 3 - 2 cos does.
    assert 1 - 1e-9 <= float(found.lowest) <= 1.002
    assert 1e-5 < float(found.tolerance) < 0.2


@every_method
def test_errors_hold_the_truth(method):
    spectrum = np.sort(np.random.default_rng(5).normal(size=60))
    function, _ = quadratic(spectrum, seed=1)
    found = convexity(function, points(60), method=method)
    for value in (found.lowest, found.highest):
        assert np.abs(spectrum - float(value)).min() <= float(found.tolerance)
    assert spectrum[0] - 1e-9 <= float(found.lowest)
    assert float(found.highest) <= spectrum[-1] + 1e-9


@every_method
def test_batch_equals_loop(method):
    function = lambda x: (x**4).sum(-1) - x.prod(-1)  # noqa: E731
    x = points(5, 4, seed=8)
    x[3] = 0.0
    together = convexity(function, x, method=method)
    for item in range(5):
        alone = convexity(function, x[item], method=method)
        near(together.lowest[item], alone.lowest)
        near(together.highest[item], alone.highest)


@every_method
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x.square().sum(-1), "convex"),
        (lambda x: -x.square().sum(-1), "concave"),
        (lambda x: x[..., 0] * x[..., 1], "neither"),
        (lambda x: x.sum(-1), "flat"),
        (lambda x: x[..., 0] * 0 + 3, "flat"),
        (lambda x: torch.zeros(x.shape[:-1]), "flat"),
        (lambda x: x[..., 0].exp(), "convex"),
        (lambda x: torch.logsumexp(x, -1), "convex"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kinds(function, kind, dtype, method):
    found = convexity(function, points(2, 3, dtype=dtype), method=method)
    assert found.kinds == (kind, kind)
    assert found.kind == kind
    assert kind in str(found)
    assert found.lowest.shape == (2,)
    assert found.lowest.dtype == torch.float64


def test_kinds_of_different_points_and_tolerances():
    function = lambda x: x.pow(3).sum(-1)  # noqa: E731
    found = convexity(function, torch.tensor([[1.0], [0.0], [-1.0]]))
    assert found.kinds == ("convex", "flat", "concave")
    assert found.kind == "neither"
    assert convexity(function, torch.tensor([[1.0], [0.0]])).kind == "convex"
    assert convexity(function, torch.tensor([-1e-3]), tolerance=0.1).kind == "flat"


class _Once(torch.autograd.Function):
    """x^2 / 2 with a gradient that autograd may not differentiate."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x.square().sum(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, weight):
        (x,) = ctx.saved_tensors
        return weight.unsqueeze(-1) * x


@every_method
def test_a_gradient_without_a_derivative(method):
    with pytest.raises(ConfigError, match="twice differentiable"):
        convexity(_Once.apply, points(2, 3), method=method)


def test_degenerate_sizes():
    for method in METHODS:
        assert float(convexity(lambda x: 3 * x[..., 0] ** 2, torch.ones(1), method=method).highest) == 6
        empty = convexity(lambda x: x.square().sum(-1), torch.zeros(0, 3), method=method)
        assert empty.kinds == ()
        assert str(empty) == "no points"


def test_the_point_is_left_alone():
    x = points(3).requires_grad_()
    convexity(lambda q: q.square().sum(-1), x)
    assert x.grad is None
    with torch.no_grad():
        assert convexity(lambda q: q.square().sum(-1), x).kind == "convex"


def test_wrong_arguments():
    function = lambda x: x.square().sum(-1)  # noqa: E731
    with pytest.raises(ConfigError, match="did you mean `lanczos`"):
        convexity(function, torch.zeros(2), method="lancos")
    with pytest.raises(ShapeError, match=r"\(D,\) or \(B, D\)"):
        convexity(function, torch.zeros(2, 2, 2))
    with pytest.raises(ShapeError, match="floating"):
        convexity(function, torch.zeros(2, dtype=torch.long))
    with pytest.raises(ShapeError, match="one number for each point"):
        convexity(lambda x: x.square(), torch.zeros(2, 3))


def test_a_part_that_has_gone_flat_is_judged_on_the_scale_of_the_other() -> None:
    """Where the softmax has decided, the curvature of -E2 is rounding of either sign."""
    from thalweg.energies import HopfieldMemory

    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(6, 16, generator=generator, dtype=torch.float64)
    report = convex_concave_report(HopfieldMemory(patterns, beta=8.0), patterns)
    assert float(report.negated_concave.highest.abs().amax()) < 1e-6
    assert report.holds
