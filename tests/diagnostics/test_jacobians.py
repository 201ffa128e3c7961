"""Jacobians of blocks and spans against numpy; the bound of R2 and its limits; the eigenvalues of R3."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from oracles import jacobians as oracle
from thalweg.diagnostics import (
    graph_jacobians,
    jacobian,
    jacobian_spectrum,
    linear_recurrence,
    span_spectra,
    vanishing_bound,
)
from thalweg.errors import ConfigError, ShapeError


def block(D: int = 5, M: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, M)).double()


def plain(D: int, scale: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    W = draw.normal(size=(D, D))
    return scale * W / np.linalg.norm(W, 2), draw.normal(size=(D, 3)), draw.normal(size=D) * 0.1


def cell(W: np.ndarray, U: np.ndarray, b: np.ndarray):
    W_, U_, b_ = (torch.from_numpy(part) for part in (W, U, b))
    return lambda x, h: torch.tanh(h @ W_.T + x @ U_.T + b_)


@pytest.mark.parametrize(("D", "M"), [(5, 4), (1, 1), (3, 6)])
def test_jacobian_of_a_module_is_that_by_differences(D: int, M: int) -> None:
    net = block(D, M)
    points = torch.randn(3, D, dtype=torch.float64)

    def numpy_net(x: np.ndarray) -> np.ndarray:
        return net(torch.from_numpy(x)).detach().numpy()

    found = jacobian(net, points)
    assert found.shape == (3, M, D)
    for row, point in zip(found, points, strict=True):
        np.testing.assert_allclose(row, oracle.differences(numpy_net, point.numpy()), atol=1e-8)
    torch.testing.assert_close(jacobian(net, points[1]), found[1])


def test_singular_values_dense_and_by_lanczos_agree_with_numpy() -> None:
    net = block(12, 7)
    points = torch.randn(4, 12, dtype=torch.float64)
    dense = jacobian_spectrum(net, points, k=2, method="dense")
    quick = jacobian_spectrum(net, points, k=2, method="lanczos")
    assert dense.values is not None
    assert dense.values.shape == (4, 7)
    for n, point in enumerate(points):
        wanted = oracle.singular_values(jacobian(net, point).numpy())
        np.testing.assert_allclose(dense.values[n], wanted, atol=1e-7)
        for found in (dense, quick):
            np.testing.assert_allclose(found.largest[n], wanted[:2], rtol=1e-6)
            # The inner width is 6: one of seven values is 0.
            np.testing.assert_allclose(found.smallest[n, 0], 0, atol=1e-7)
    assert quick.method == "lanczos"
    assert "lanczos" in str(quick)


def test_lanczos_says_how_far_it_may_be_off() -> None:
    scales = torch.linspace(0.1, 2.0, 400, dtype=torch.float64)
    found = jacobian_spectrum(
        lambda x: scales * x.sin(), torch.zeros(400, dtype=torch.float64), method="lanczos", max_steps=40
    )
    assert abs(float(found.largest) - 2.0) <= float(found.largest_error) + 1e-3
    assert float(found.smallest_error) > 0  # forty steps do not settle the other end


@pytest.mark.parametrize("method", ["dense", "lanczos"])
def test_one_direction_a_constant_and_no_rows(method: str) -> None:
    one = jacobian_spectrum(lambda x: 3 * x, torch.ones(1, 1), method=method)
    assert float(one.largest) == pytest.approx(3)
    none = jacobian_spectrum(lambda x: torch.ones(2, 3), torch.ones(2, 3), method=method)
    assert float(none.largest.abs().max()) == 0
    empty = jacobian(lambda x: 2 * x, torch.ones(0, 3))
    assert empty.shape == (0, 3, 3)


def test_wide_and_float32_blocks() -> None:
    matrix = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    found = jacobian_spectrum(lambda x: x @ matrix.T, torch.zeros(2, 300), k=3, method="lanczos")
    torch.testing.assert_close(found.largest[0], torch.linalg.svdvals(matrix.double()), rtol=1e-4, atol=1e-5)


def test_functions_and_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"must map \(3,\) to"):
        jacobian(lambda x: x.sum(), torch.ones(3))
    with pytest.raises(ConfigError, match="did you mean `dense`"):
        jacobian_spectrum(lambda x: x, torch.ones(3), method="dens")
    with pytest.raises(ConfigError, match="`k` must lie in"):
        jacobian_spectrum(lambda x: x, torch.ones(3), k=4)
    with pytest.raises(ShapeError, match="keep the state's shape"):
        span_spectra(lambda x, h: h[:, :1], torch.ones(1, 2), [None])
    with pytest.raises(ConfigError, match="`spans` must lie in"):
        span_spectra(lambda x, h: h, torch.ones(1, 2), [None], spans=[2])
    with pytest.raises(ShapeError, match=r"\(D, D\)"):
        vanishing_bound(torch.ones(2, 3))


def test_jacobians_in_a_graph_follow_positions() -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    y = x.cumsum(1).tanh()
    found = graph_jacobians(y[:, 2], [x], position=1)
    slope = 1 - y[:, 2].square()
    torch.testing.assert_close(found[0], torch.diag_embed(slope).detach())
    assert not graph_jacobians(y[:, 0], [x], position=2).any()


def test_operations_that_cannot_be_batched_are_done_one_by_one() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            assert g.dim() == 2  # a batch of gradients would have three axes
            return 2 * g * ctx.saved_tensors[0]

    found = jacobian(lambda x: Square.apply(x), torch.tensor([[1.0, 3.0]]))
    assert found[0].tolist() == [[2.0, 0.0], [0.0, 6.0]]


@pytest.mark.parametrize("D", [1, 4])
def test_spans_are_products_of_steps(D: int) -> None:
    W, U, b = plain(D, 1.2)
    xs = np.random.default_rng(1).normal(size=(6, 3))
    report = span_spectra(
        cell(W, U, b), torch.zeros(2, D, dtype=torch.float64), [torch.from_numpy(x).expand(2, 3) for x in xs]
    )
    for n, wanted in enumerate(oracle.tanh_spans(W, U, b, np.zeros(D), xs)):
        values = oracle.singular_values(wanted)
        np.testing.assert_allclose(report.largest[n], values[0], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(report.smallest[n], values[-1], rtol=1e-4, atol=1e-7)


def test_spans_oracle_can_fail() -> None:
    W, U, b = plain(3, 0.9)
    xs = np.random.default_rng(1).normal(size=(4, 3))
    right, wrong = (f(W, U, b, np.zeros(3), xs)[-1] for f in (oracle.tanh_spans, oracle.broken_spans))
    assert np.linalg.norm(right - wrong, 2) > 0.01


@pytest.mark.parametrize("delta", [0.3, 0.7, 0.99])
def test_r2_gradients_vanish_where_the_norm_is_below_one(delta: float) -> None:
    """||Ds|| <= gamma and lambda_1(W'W) <= delta^2/gamma^2, delta < 1: ||dh_T/dh_0|| <= delta^T."""
    W, U, b = plain(6, delta)
    bound = vanishing_bound(torch.from_numpy(W))
    assert bound.vanishes
    assert bound.delta == pytest.approx(delta)
    xs = torch.randn(20, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    report = span_spectra(cell(W, U, b), torch.zeros(5, 6, dtype=torch.float64), list(xs), bound=bound)
    assert report.bound is not None
    assert bool((report.largest <= report.bound[:, None] * (1 + 1e-12)).all())
    assert float(report.bound[-1]) == pytest.approx(delta**20)


def test_r2_slope_of_the_sigmoid_lets_the_matrix_be_four_times_as_large() -> None:
    """gamma = 1/4: a norm of 3 still makes gradients vanish, delta = 0.75."""
    W = plain(4, 3.0)[0]
    bound = vanishing_bound(torch.from_numpy(W), slope=0.25)
    assert bound.delta == pytest.approx(0.75)
    W_ = torch.from_numpy(W)
    report = span_spectra(
        lambda x, h: torch.sigmoid(h @ W_.T), torch.zeros(1, 4, dtype=torch.float64), [None] * 12, bound=bound
    )
    assert float(report.largest[-1]) <= 0.75**12


def test_r2_the_bound_is_reached_by_the_identity() -> None:
    """The bound cannot be made smaller: a multiple of I without saturation attains it."""
    W = 0.5 * torch.eye(3, dtype=torch.float64)
    report = span_spectra(
        lambda x, h: h @ W.T, torch.zeros(1, 3, dtype=torch.float64), [None] * 9, bound=vanishing_bound(W)
    )
    torch.testing.assert_close(report.largest[:, 0], report.bound)


def test_r2_the_reverse_is_not_sufficient_for_explosion() -> None:
    """Norms above 1, and yet no explosion: a nilpotent matrix, and units that saturate."""
    W = torch.tensor([[0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    bound = vanishing_bound(W)
    assert bound.delta == 2
    assert not bound.vanishes
    assert "may explode, or vanish all the same" in str(bound)
    nilpotent = span_spectra(lambda x, h: h @ W.T, torch.ones(1, 2, dtype=torch.float64), [None] * 5)
    assert float(nilpotent.largest[0]) == 2
    assert float(nilpotent.largest[1:].max()) == 0
    large = 3 * torch.eye(2, dtype=torch.float64)
    saturated = span_spectra(lambda x, h: torch.tanh(h @ large + 5), torch.zeros(1, 2, dtype=torch.float64), [None] * 5)
    assert vanishing_bound(large).delta == 3
    assert float(saturated.largest[-1]) < 1e-15


def test_r2_explosion_needs_a_norm_above_one() -> None:
    """Where gradients do explode the norm is above 1."""
    W = 1.5 * torch.eye(2, dtype=torch.float64)
    report = span_spectra(
        lambda x, h: h @ W.T, torch.zeros(1, 2, dtype=torch.float64), [None] * 10, bound=vanishing_bound(W)
    )
    assert float(report.largest[-1]) == pytest.approx(1.5**10)
    assert report.rate == pytest.approx(1.5)
    assert "delta^span" in str(report)


def test_r3_linear_recurrence_by_eigenvectors() -> None:
    """h_t = Q L^t Q^-1 h_0."""
    W = np.random.default_rng(3).normal(size=(5, 5)) / 2
    report = linear_recurrence(torch.from_numpy(W))
    h = torch.randn(4, 5, dtype=torch.float64)
    for t in (0, 1, 7):
        np.testing.assert_allclose(report.at(h, t), h.numpy() @ oracle.power(W, t).T, atol=1e-10)
    assert not report.defective
    np.testing.assert_allclose(report.norms(6), [np.linalg.norm(oracle.power(W, t), 2) for t in range(7)], rtol=1e-10)


def test_r3_the_leading_eigenvalue_takes_over() -> None:
    """h_t ~ lambda^t q v'h_0: the rest is smaller by (|lambda_2|/|lambda_1|)^t."""
    W = torch.tensor([[0.9, 0.5, 0.0], [0.0, 0.5, 0.2], [0.0, 0.0, 0.3]], dtype=torch.float64)
    report = linear_recurrence(W)
    h = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for t in (5, 20, 40):
        gap = (report.at(h, t) - report.leading(h, t)).norm() / report.at(h, t).norm()
        assert float(gap) < 5 * (0.5 / 0.9) ** t


@pytest.mark.parametrize(("scale", "verdict"), [(1.1, "explodes"), (0.9, "vanishes"), (1.0, "stays")])
def test_r3_explodes_above_one_and_vanishes_below(scale: float, verdict: str) -> None:
    """|lambda| > 1 explodes, |lambda| < 1 vanishes; a rotation stays."""
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    report = linear_recurrence(scale * turn)
    assert report.verdict == verdict
    assert report.radius == pytest.approx(scale)
    np.testing.assert_allclose(report.norms(30)[-1], scale**30, rtol=1e-9)
    assert abs(report.eigenvalues[0].imag) > 0  # a complex pair
    h = torch.tensor([1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(report.leading(h, 9), report.at(h, 9))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("turned", [False, True])
def test_r3_defective_matrices_are_said_to_be_so(size: int, turned: bool) -> None:
    """A Jordan block has one eigenvector: powers grow as t^(m-1) |lambda|^t, and none are made of eigenvectors."""
    W = oracle.jordan(0.9, size)
    if turned:
        Q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))
        W = Q @ W @ Q.T
    report = linear_recurrence(torch.from_numpy(W))
    assert report.defective
    assert report.radius == pytest.approx(0.9, abs=1e-3)
    h = torch.ones(size, dtype=torch.float64)
    np.testing.assert_allclose(report.at(h, 12), oracle.power(W, 12) @ np.ones(size), rtol=1e-9)
    assert report.verdict == "vanishes"
    assert float(report.norms(3)[-1]) > 0.9**3  # it grows first
    with pytest.raises(ShapeError, match="defective"):
        report.leading(h, 2)
    assert "defective" in str(report)


def test_r3_a_repeated_eigenvalue_is_not_a_defect() -> None:
    for W in (torch.eye(3), torch.zeros(2, 2), torch.diag(torch.tensor([0.5, 0.5, 2.0]))):
        report = linear_recurrence(W)
        assert not report.defective
    assert linear_recurrence(torch.eye(3)).verdict == "stays"


def test_r3_on_the_circle_a_jordan_block_grows() -> None:
    report = linear_recurrence(torch.from_numpy(oracle.jordan(1.0, 2)))
    assert report.verdict == "explodes"
    assert float(report.norms(50)[-1]) > 49
    assert "powers of t" in str(report)


def test_r3_growth_before_decay_is_measured() -> None:
    W = torch.tensor([[0.5, 50.0], [0.0, 0.4]], dtype=torch.float64)
    report = linear_recurrence(W)
    assert report.verdict == "vanishes"
    assert float(report.norms(5)[1]) > 50
    assert report.condition > 100
    assert "first grows" in str(report)
    assert float(linear_recurrence(torch.tensor([[-2.0]])).radius) == 2
