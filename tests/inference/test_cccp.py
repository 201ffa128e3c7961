from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oracles import hopfield as oracle
from thalweg.errors import ConfigError, ShapeError, ThalwegError
from thalweg.inference.cccp import Descent, NotMonotoneError, cccp

PENALTY, GAMMA = 0.7, 3.0


class Sparse:
    """1/2 (x - y)^2 and the minimax concave penalty, by coordinate: lasso minus a convex function."""

    def __init__(self, y: Tensor) -> None:
        self.y = y
        self.sizes: list[int] = []

    def of(self, rows: Tensor | None) -> Tensor:
        return self.y if rows is None else self.y[rows]

    def concave(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        size = x.abs()
        inner, outer = -(size**2) / (2 * GAMMA), GAMMA * PENALTY**2 / 2 - PENALTY * size
        return torch.where(size <= GAMMA * PENALTY, inner, outer).sum(1)

    def slope(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        self.sizes.append(len(x))
        return -torch.where(x.abs() <= GAMMA * PENALTY, x / GAMMA, PENALTY * x.sign())

    def energy(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        return ((x - self.of(rows)) ** 2 / 2 + PENALTY * x.abs()).sum(1) + self.concave(x)

    def minimise(self, slope: Tensor, rows: Tensor | None = None) -> Tensor:
        pull = self.of(rows) - slope
        return pull.sign() * (pull.abs() - PENALTY).clamp(min=0)

    def solve(self, start: Tensor, **settings) -> Descent:
        parts = {"concave_gradient": self.slope, "energy": self.energy, "rows": "indexed"} | settings
        return cccp(start, minimise=self.minimise, **parts)


@pytest.fixture
def sparse() -> Sparse:
    return Sparse(torch.linspace(-4, 4, 33, dtype=torch.float64).view(11, 3))


@pytest.mark.parametrize("rows", ["indexed", "all"])
def test_concave_penalty_gives_the_firm_threshold(sparse, rows):
    found = sparse.solve(torch.zeros_like(sparse.y), rows=rows, tol=1e-12, max_steps=200)
    expected = [[oracle.firm_threshold(y, PENALTY, GAMMA) for y in row] for row in sparse.y.tolist()]
    torch.testing.assert_close(found.state, torch.tensor(expected, dtype=torch.float64), atol=1e-10, rtol=0)
    assert found.converged.all()
    assert found.energies is not None
    assert (found.energies.diff() <= 1e-12).all()
    torch.testing.assert_close(found.energies[:, -1], sparse.energy(found.state))


def test_broken_threshold_is_noticed():
    assert oracle.firm_threshold(1.5, PENALTY, GAMMA) != pytest.approx(1.5 - PENALTY)  # the lasso's answer, biased


def test_trimmed_location_is_the_mean_of_what_is_near():
    # sum_i min((x - y_i)^2, 1): convex sum of squares minus sum_i max((x - y_i)^2 - 1, 0).
    y = torch.tensor([0.0, 0.2, 0.4, 9.0, -30.0], dtype=torch.float64)
    found = cccp(
        torch.tensor([[0.5], [8.5]], dtype=torch.float64),
        concave=lambda x: -((x - y) ** 2 - 1).clamp(min=0).sum(1),
        minimise=lambda slope: (2 * y.sum() - slope) / (2 * len(y)),
        energy=lambda x: ((x - y) ** 2).clamp(max=1).sum(1),
        max_steps=500,
        tol=1e-12,
    )
    torch.testing.assert_close(found.state, torch.tensor([[0.2], [9.0]], dtype=torch.float64), atol=1e-10, rtol=0)
    assert found.energies is not None
    assert (found.energies.diff() <= 1e-12).all()


def test_autograd_slope_equals_the_given_one(sparse):
    start = torch.ones_like(sparse.y)
    given = sparse.solve(start)
    derived = sparse.solve(start, concave_gradient=None, concave=sparse.concave)
    torch.testing.assert_close(given.state, derived.state)
    torch.testing.assert_close(given.steps, derived.steps)


def test_each_row_stops_by_itself_and_leaves_the_work(sparse):
    whole = sparse.solve(torch.zeros_like(sparse.y))
    assert len(set(whole.steps.tolist())) > 1
    assert sparse.sizes[0] == len(sparse.y)
    assert sparse.sizes == sorted(sparse.sizes, reverse=True)
    assert sparse.sizes[-1] < len(sparse.y)
    assert sum(sparse.sizes) == int(whole.steps.sum()) + len(sparse.y)  # an evaluation for each step and one more
    for row in range(len(sparse.y)):
        alone = Sparse(sparse.y[row : row + 1]).solve(torch.zeros(1, 3, dtype=torch.float64))
        steps = int(alone.steps)
        assert steps == whole.steps[row]
        torch.testing.assert_close(alone.state[0], whole.state[row])
        assert alone.energies is not None
        assert whole.energies is not None
        torch.testing.assert_close(alone.energies[0], whole.energies[row, : steps + 1])
        assert (whole.energies[row, steps:] == whole.energies[row, steps]).all()


def test_rows_agree_between_all_ways(sparse):
    start = torch.zeros_like(sparse.y)
    indexed, everything = sparse.solve(start), sparse.solve(start, rows="all")
    for one, other in zip(indexed, everything, strict=True):
        torch.testing.assert_close(one, other)


def test_pair_gives_the_energies(sparse):
    start = torch.zeros_like(sparse.y)
    both = sparse.solve(start, concave_gradient=lambda x, r: (sparse.slope(x), sparse.energy(x, r)), energy=None)
    torch.testing.assert_close(both.energies, sparse.solve(start).energies)
    assert sparse.solve(start, energy=None).energies is None


def test_max_steps_and_empty_batches(sparse):
    start = torch.zeros_like(sparse.y)
    none = sparse.solve(start, max_steps=0)
    assert none.energies is not None
    assert none.energies.shape == (11, 1)
    assert not none.converged.any()
    torch.testing.assert_close(none.state, start)
    two = sparse.solve(start, max_steps=2, tol=0.0)
    assert two.energies is not None
    assert two.energies.shape == (11, 3)
    empty = Sparse(sparse.y[:0]).solve(sparse.y[:0])
    assert empty.state.shape == (0, 3)
    assert empty.steps.shape == (0,)


def test_start_is_left_as_it_was(sparse):
    start = torch.ones_like(sparse.y)
    sparse.solve(start)
    assert (start == 1).all()


def test_more_dimensions():
    start = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = cccp(
        start, minimise=lambda g: -g, concave_gradient=lambda x: -x / 2, energy=lambda x: (x**2).sum((1, 2)) / 4
    )
    torch.testing.assert_close(found.state, torch.zeros_like(start), atol=1e-5, rtol=0)


@pytest.mark.parametrize("by", ["gradient", "autograd"])
def test_gradient_goes_through_the_steps(by):
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(3, 3, dtype=torch.float64, generator=generator)

    def solve(start: Tensor, matrix: Tensor) -> Tensor:
        how = (
            {"concave": lambda x: -torch.logsumexp(x @ matrix, 1)}
            if by == "autograd"
            else {"concave_gradient": lambda x: -torch.softmax(x @ matrix, 1) @ matrix.T}
        )
        # Rows that stop at different steps: the second is nearly at rest.
        return cccp(start, minimise=lambda g: -g, max_steps=4, tol=1e-3, **how).state

    start = torch.randn(2, 3, dtype=torch.float64, generator=generator)
    start[1] = cccp(
        start[1:], minimise=lambda g: -g, concave_gradient=lambda x: -torch.softmax(x @ A, 1) @ A.T, tol=1e-9
    ).state[0]
    inputs = (start.requires_grad_(), A.requires_grad_())
    assert torch.autograd.gradcheck(solve, inputs)
    with torch.no_grad():
        assert not solve(*inputs).requires_grad


def test_rising_energy_is_named():
    # A step that overshoots: minimises the wrong problem.
    settings = {
        "concave_gradient": lambda x: torch.zeros_like(x),
        "minimise": lambda g: g + 3.0,
        "energy": lambda x: (x**2).sum(1),
        "max_steps": 1,
    }
    start = torch.tensor([[5.0], [1.0]])
    with pytest.raises(NotMonotoneError, match="step 1 of row 1") as caught:
        cccp(start, **settings)
    assert isinstance(caught.value, ThalwegError)
    assert "\n" not in str(caught.value)
    assert cccp(start, check=False, **settings).state.tolist() == [[3.0], [3.0]]
    assert cccp(start, slack=9.0, **settings).state.tolist() == [[3.0], [3.0]]
    assert cccp(start, slack=torch.tensor([0.0, 8.0]), **settings).steps.tolist() == [1, 1]


def test_energies_may_start_infinite_but_not_become_so_nor_nan():
    def run(values: list[float]) -> Descent:
        trace = iter(values)
        return cccp(
            torch.zeros(1, 1),
            minimise=lambda g: g + 1,
            concave_gradient=lambda x: x,
            energy=lambda x: torch.tensor([next(trace)]),
            max_steps=2,
            tol=0.0,
        )

    assert run([math.inf, math.inf, 1.0]).energies is not None
    with pytest.raises(NotMonotoneError, match="step 2"):
        run([math.inf, 1.0, math.inf])
    with pytest.raises(NotMonotoneError, match="NaN at step 1"):
        run([1.0, math.nan, 0.0])


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"start": torch.zeros(3)}, ShapeError, "(B, ...)"),
        ({"start": torch.zeros(3, 1, dtype=torch.long)}, ShapeError, "floating point"),
        ({"concave_gradient": None}, ConfigError, "neither"),
        ({"concave": lambda x: x}, ConfigError, "both"),
        ({"max_steps": -1}, ConfigError, "max_steps"),
        ({"max_steps": True}, ConfigError, "max_steps"),
        ({"tol": -1.0}, ConfigError, "tol"),
        ({"tol": math.nan}, ConfigError, "tol"),
        ({"rows": "alive"}, ConfigError, "did you mean"),
        ({"minimise": lambda g: g.sum(1)}, ShapeError, "keep the shape"),
        ({"concave_gradient": lambda x: x[:, :0]}, ShapeError, "slope"),
        ({"energy": lambda x: x}, ShapeError, "one for each row"),
    ],
)
def test_mistakes_are_one_line(change, error, says):
    parts = {"start": torch.zeros(3, 1), "minimise": lambda g: g, "concave_gradient": lambda x: x} | change
    with pytest.raises(error) as caught:
        cccp(parts.pop("start"), **parts)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
