"""The dual by a model of the Gram matrix: an independent solver, the gap by its definition, tiles, slow cases."""

import numpy as np
import pytest
import torch
from sklearn.svm import SVC

from oracles import kernel_machines as oracle
from thalweg.energies import RBF, KernelSVC, Linear, Polynomial, Spectrum
from thalweg.energies.kernel_machine import solver
from thalweg.energies.kernel_machine.solver import solve_dual
from thalweg.errors import ShapeError


def problem(N, seed=0, D=3, noise=0.2):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, D))
    t = np.where(X[:, 0] * X[:, 1] + noise * rng.normal(size=N) > 0, 1.0, -1.0)
    t[:2] = 1.0, -1.0
    return torch.from_numpy(X), torch.from_numpy(t)


def primal_and_dual(kernel, X, t, C, alpha, b):
    """Both by their definitions, in float64."""
    K, t, C, alpha = (each.double().numpy() for each in (kernel(X.double()), t, C, alpha))
    f = K @ (alpha * t)
    norm = (alpha * t) @ f
    return norm / 2 + (C * np.maximum(0, 1 - t * (f + b))).sum(), alpha.sum() - norm / 2


def solve(kernel, X, t, C, **how):
    return solve_dual(kernel, kernel.prepare(X), t, C, **how)


@pytest.mark.parametrize("kernel", [RBF(0.5), Polynomial(2), Linear(), Linear() + RBF(2.0)], ids=repr)
@pytest.mark.parametrize("C", [0.05, 1.0, 20.0])
def test_the_objective_is_that_of_an_independent_solver(kernel, C):
    X, t = problem(60)
    bounds = C * torch.linspace(0.5, 2.0, 60, dtype=torch.float64)
    found = solve(kernel, X, t, bounds, tolerance=1e-4, max_steps=1000)
    _, best = oracle.dual(kernel(X).numpy(), t.numpy(), bounds.numpy())
    assert best * (1 - 1e-4) <= found.objective <= best * (1 + 1e-9)
    assert bool((found.alpha >= 0).all())
    assert bool((found.alpha <= bounds).all())
    assert float(found.alpha @ t) == pytest.approx(0.0, abs=1e-9 * C * 60)
    primal, dual = primal_and_dual(kernel, X, t, bounds, found.alpha, found.intercept)
    assert dual == pytest.approx(found.objective, rel=1e-9)
    assert primal - dual == pytest.approx(found.gap, rel=1e-3, abs=1e-9 * abs(dual))
    assert found.gap <= 1e-4 * found.objective


@pytest.mark.parametrize("N", [2, 3, 17, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_size_ends_with_a_proved_gap(N, dtype):
    X, t = (each.to(dtype) for each in problem(N, seed=N))
    found = solve(RBF(0.5), X, t, torch.ones_like(t))
    primal, dual = primal_and_dual(RBF(0.5), X, t, torch.ones_like(t), found.alpha, found.intercept)
    assert primal - dual <= 1.01e-3 * dual
    assert found.alpha.dtype is dtype


def test_one_point_of_a_class_and_points_that_coincide():
    X = torch.tensor([[0.0], [1.0], [1.0], [1.0], [5.0]], dtype=torch.float64)
    t = torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    found = solve(RBF(0.5), X, t, torch.full_like(t, 3.0), tolerance=1e-6)
    _, best = oracle.dual(RBF(0.5)(X).numpy(), t.numpy(), np.full(5, 3.0))
    assert found.objective == pytest.approx(best, rel=1e-5)


def test_never_more_than_a_tile_or_the_landmarks_columns(monkeypatch):
    monkeypatch.setattr(solver, "_TILE", (7, 11))
    X, t = problem(100)
    asked = []

    class Watched(RBF):
        def block(self, rows, columns):
            asked.append((len(rows), len(columns)))
            return super().block(rows, columns)

    whole = solve(RBF(0.5), X, t, torch.ones_like(t), tolerance=1e-5)
    tiled = solve(Watched(0.5), X, t, torch.ones_like(t), tolerance=1e-5, landmarks=20)
    assert tiled.objective == pytest.approx(whole.objective, rel=2e-5)
    assert all(a * b <= 7 * 11 or a <= 80 for a, b in asked)
    assert not any(a == b == 100 for a, b in asked)
    assert (7, 11) in asked


def test_few_landmarks_move_to_where_they_are_needed(monkeypatch):
    """Of a hundred free multipliers four landmarks explain little: the model is made again, at free points."""
    X, t = problem(300, noise=0.0)
    made = []
    make = solver._Model.of.__func__

    def of(cls, kernel, items, t, C, chosen):
        made.append(len(chosen))
        return make(cls, kernel, items, t, C, chosen)

    monkeypatch.setattr(solver._Model, "of", classmethod(of))
    C = torch.full_like(t, 100.0)
    found = solve(RBF(1.0), X, t, C, landmarks=4, max_steps=500)
    assert found.gap <= 1e-3 * found.objective
    assert len(made) > 1
    assert max(made) > 4


def test_seeds_choose_landmarks_and_nothing_else():
    X, t = problem(200)
    one, same, other = (solve(RBF(0.5), X, t, torch.ones_like(t), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.alpha, same.alpha)
    assert not torch.equal(one.alpha, other.alpha)
    assert one.objective == pytest.approx(other.objective, rel=2e-3)


@pytest.mark.parametrize("steepness", [1e-6, 0.3])
def test_an_offset_balances_the_classes(steepness):
    rng = np.random.default_rng(0)
    t = torch.from_numpy(np.where(rng.random(50) > 0.3, 1.0, -1.0))
    wanting, C = torch.from_numpy(rng.normal(size=50)), torch.from_numpy(rng.random(50) + 0.1)
    D = torch.full_like(C, steepness)
    b = solver._offset(wanting, t, C, D)
    unbalanced = [float((t * ((wanting - t * at) / D).clamp(min=0).minimum(C)).sum()) for at in (b - 1e-5, b + 1e-5)]
    assert unbalanced[0] >= -1e-6
    assert unbalanced[1] <= 1e-6


@pytest.mark.parametrize("kernel", [RBF(), Linear(), 2.0 * RBF(0.5)], ids=repr)
def test_the_classifier_is_that_of_libsvm(kernel):
    X, t = problem(150, noise=1.0)
    y = np.array(["no", "yes", "other"])[((t.numpy() + 1) / 2).astype(int) + (np.arange(150) % 5 == 0)]
    ours = KernelSVC(kernel, solver="gap", tolerance=1e-4, max_iter=1000).fit(X.numpy(), y)
    theirs = KernelSVC(kernel, tolerance=1e-6).fit(X.numpy(), y)
    duals = [[pair.dual for pair in machine.kkt_report().pairs] for machine in (ours, theirs)]
    assert duals[0] == pytest.approx(duals[1], rel=2e-4)
    if kernel != Linear():  # there an offset of the rarest class has room
        decisions = [machine.decision_function(X.numpy()) for machine in (ours, theirs)]
        assert decisions[0] == pytest.approx(decisions[1], abs=5e-2)


def test_strings_too():
    words = ["abba", "baab", "aabb", "bbaa", "cddc", "dccd", "ccdd", "ddcc"]
    machine = KernelSVC(Spectrum(2), solver="gap").fit(words, [0] * 4 + [1] * 4)
    assert machine.predict(["abab", "cdcd"]).tolist() == [0, 1]


def test_steps_that_run_out_are_told():
    X, t = problem(300, noise=0.0)
    with pytest.warns(match=r"the gap is .* of the objective after 1 steps, above 0.001; raise `max_iter`"):
        KernelSVC(RBF(1.0), C=100.0, solver="gap", max_iter=1).fit(X.numpy(), t.numpy())


@pytest.mark.parametrize(
    ("t", "C", "said"),
    [
        ([1.0, -1.0], [1.0] * 3, r"`t` must be floating point \(3,\)"),
        ([1.0, -1.0, 0.5], [1.0] * 3, "`t` must be 1 or -1"),
        ([1.0, 1.0, 1.0], [1.0] * 3, "with both among them"),
        ([1.0, -1.0, float("nan")], [1.0] * 3, "`t` must be 1 or -1"),
        ([1.0, -1.0, 1.0], [1.0, 0.0, 1.0], "`C` must be above 0 and finite"),
        ([1.0, -1.0, 1.0], [1.0, float("nan"), 1.0], "`C` must be above 0 and finite"),
    ],
)
def test_wrong_labels_and_bounds_are_told(t, C, said):
    with pytest.raises(ShapeError, match=said):
        solve(RBF(0.5), torch.zeros(3, 2), torch.tensor(t), torch.tensor(C))


@pytest.mark.slow
def test_twenty_thousand_points_beside_libsvm():
    X, t = problem(20_000, D=20, noise=2.0)
    gamma = 1 / (20 * float(X.var()))
    ours = solve(RBF(gamma), X.float(), t.float(), torch.ones(20_000))
    theirs = SVC(C=1.0, gamma=gamma).fit(X.numpy(), t.numpy())
    alpha = torch.zeros(20_000)
    alpha[theirs.support_] = torch.from_numpy(np.abs(theirs.dual_coef_[0])).float()
    f = solver._mixed_columns(RBF(gamma), RBF(gamma).prepare(X.float()), alpha * t.float())
    best = float(alpha.sum(dtype=torch.float64) - (alpha * t.float() * f).sum(dtype=torch.float64) / 2)
    assert ours.objective == pytest.approx(best, rel=1e-3)
