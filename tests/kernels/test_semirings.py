"""The algebras by themselves: their laws, their sums against plain Python, derivatives at -inf."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from thalweg.errors import ShapeError
from thalweg.kernels.semirings import Axis, Entropy, Expectation, KMax, Log, Max, Sample, Segments, Semiring

INF = math.inf
ALGEBRAS: list[Semiring] = [Log(), Max(), KMax(1), KMax(3), Sample(), Entropy(), Expectation()]
NAMES = ["log", "max", "1-max", "3-max", "sample", "entropy", "expectation"]
every_algebra = pytest.mark.parametrize("algebra", ALGEBRAS, ids=NAMES)


def elements(algebra: Semiring, shape: tuple[int, ...], seed: int, holes: float = 0.3) -> Tensor:
    """Random elements with every component in use and a share of zeros."""
    source = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    gone = torch.rand(shape, generator=source) < holes
    if isinstance(algebra, KMax):
        lists = torch.stack([draw() for _ in range(algebra.k)]).sort(0, descending=True).values
        lists[1:][:, torch.rand(shape, generator=source) < 0.5] = -INF  # short lists too
        return torch.where(gone, -INF, lists)
    if isinstance(algebra, Entropy | Expectation):
        return torch.stack((torch.where(gone, -INF, draw()), torch.where(gone, 0.0, draw())))
    return torch.where(gone, -INF, draw())


def same(algebra: Semiring, a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding; what hangs on an element of weight 0 does not count."""
    if isinstance(algebra, Entropy | Expectation):
        dead = a[0] == -INF
        a, b = (torch.stack((x[0], torch.where(dead, 0.0, x[1]))) for x in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def laws(algebra: Semiring) -> list[str]:
    """The names of the laws that do not hold."""
    a, b, c = (elements(algebra, (50,), seed) for seed in (1, 2, 3))
    like = torch.zeros(50, dtype=torch.float64)
    zero, one = algebra.zero(like), algebra.one(like)

    def plus(*terms: Tensor) -> Tensor:
        return algebra.sum(torch.stack(terms, -1), -1)

    times = algebra.times
    checks = {
        "sum associates": (plus(plus(a, b), c), plus(a, plus(b, c))),
        "sum is flat": (plus(plus(a, b), c), plus(a, b, c)),
        "sum commutes": (plus(a, b), plus(b, a)),
        "product associates": (times(times(a, b), c), times(a, times(b, c))),
        "product distributes on the left": (times(a, plus(b, c)), plus(times(a, b), times(a, c))),
        "product distributes on the right": (times(plus(a, b), c), plus(times(a, c), times(b, c))),
        "zero adds nothing": (plus(a, zero), a),
        "zero annihilates": (times(a, zero), zero),
        "one on the right": (times(a, one), a),
        "one on the left": (times(one, a), a),
    }
    return [name for name, (left, right) in checks.items() if not same(algebra, left, right)]


@every_algebra
def test_laws(algebra: Semiring) -> None:
    assert laws(algebra) == []


def test_laws_can_fail() -> None:
    class Mean(Log):
        def sum(self, x, over):
            assert isinstance(over, int)
            return super().sum(x, over) - math.log(x.shape[over])

    class Careless(Entropy):
        def sum(self, x, over):  # forgets that which of the sets it was is itself a surprise
            total = Log().sum(x[0], over)
            shares = (x[0] - total.unsqueeze(over)).exp().nan_to_num()
            return torch.stack((total, (shares * (x[1] + 1)).sum(over)))

    assert {"sum associates", "sum is flat", "zero adds nothing"} <= set(laws(Mean()))
    assert laws(Careless())


@every_algebra
def test_act_is_times_lift(algebra: Semiring) -> None:
    x = elements(algebra, (4, 5, 1), 0)
    scores = elements(Log(), (5, 3), 1)
    assert same(algebra, algebra.act(x, scores), algebra.times(x, algebra.lift(scores)))
    more = elements(Log(), (2, 4, 5, 3), 2)  # more axes than the element has
    assert same(algebra, algebra.act(x, more), algebra.times(x, algebra.lift(more)))


def test_act_of_expectation_takes_values() -> None:
    algebra = Expectation()
    x, scores, values = elements(algebra, (4, 1), 0), elements(Log(), (4, 3), 1), elements(Log(), (3,), 2, holes=0)
    assert same(algebra, algebra.act(x, scores, values), algebra.times(x, algebra.lift(scores, values)))


@every_algebra
def test_matmul_is_sums_of_products(algebra: Semiring) -> None:
    a, b = elements(algebra, (2, 3, 4), 0), elements(algebra, (2, 4, 5), 1)
    found = algebra.matmul(a, b)
    for n, i, k in itertools.product(range(2), range(3), range(5)):
        terms = [algebra.times(a[..., n, i, j], b[..., n, j, k]) for j in range(4)]
        assert same(algebra, found[..., n, i, k], algebra.sum(torch.stack(terms, -1), -1))


@every_algebra
def test_split_gives_back(algebra: Semiring) -> None:
    x = elements(algebra, (6, 4), 0, holes=0.5)
    x[..., 0, :] = algebra.zero(torch.zeros(4, dtype=torch.float64))
    vectors, taken = algebra.split(x)
    assert all(each.isfinite().all() and each.shape == (6,) for each in taken)
    assert same(algebra, algebra.act(vectors, *(each.unsqueeze(-1) for each in taken)), x)
    tops = algebra.weight(vectors).amax(-1)
    assert ((tops == 0) | (tops == -INF)).all()


@every_algebra
@pytest.mark.parametrize("index", [[0, 0, 0, 1, 3, 3], [2], [0, 1, 2, 3, 4], [4, 4]])
def test_segments_equal_sums_of_their_entries(algebra: Semiring, index: list[int]) -> None:
    x = elements(algebra, (2, 3, len(index)), 0)
    found = algebra.sum(x, Segments(torch.tensor(index), 5))
    for segment in range(5):
        places = [place for place, owner in enumerate(index) if owner == segment]
        expected = algebra.sum(x[..., places], -1) if places else algebra.zero(torch.zeros(2, 3, dtype=torch.float64))
        assert same(algebra, found[..., segment], expected)


@every_algebra
def test_sum_over_any_axis(algebra: Semiring) -> None:
    x = elements(algebra, (2, 3, 4), 0)
    for dim in (-1, -2, -3):
        assert same(algebra, algebra.sum(x, dim), algebra.sum(x.movedim(dim, -1), -1))
        assert same(algebra, algebra.sum(x, dim), algebra.sum(x, Axis(dim)))


def test_sums_against_plain_python() -> None:
    weights, values = [0.3, -1.2, -INF, 2.0], [1.0, -2.0, 7.0, 0.5]
    w, v = (torch.tensor(each, dtype=torch.float64) for each in (weights, values))
    total = math.log(sum(map(math.exp, weights)))
    shares = [math.exp(each - total) for each in weights]
    assert Log().sum(w, -1).item() == pytest.approx(total, rel=1e-14)
    assert Max().sum(w, -1).item() == 2.0
    assert KMax(2).sum(KMax(2).lift(w), -1).tolist() == [2.0, 0.3]
    assert KMax(5).sum(KMax(5).lift(w), -1).tolist() == [2.0, 0.3, -1.2, -INF, -INF]
    mean = sum(share * value for share, value in zip(shares, values, strict=True))
    assert Expectation().sum(Expectation().lift(w, v), -1)[1].item() == pytest.approx(mean, rel=1e-14)
    plain = -sum(share * math.log(share) for share in shares if share)
    assert Entropy().sum(Entropy().lift(w), -1)[1].item() == pytest.approx(plain, rel=1e-14)


def test_expectation_of_minus_infinity() -> None:
    algebra = Expectation()
    zero = torch.zeros(2, dtype=torch.float64)
    low = torch.tensor([-INF, 1.0], dtype=torch.float64)
    assert algebra.sum(algebra.lift(zero, low), -1)[1] == -INF  # it can happen
    gone = torch.tensor([-INF, 0.0], dtype=torch.float64)
    assert algebra.sum(algebra.lift(gone, low), -1)[1] == 1.0  # it cannot
    # Of positive weight, though its share rounds to 0: the mean is -inf all the same.
    far = torch.tensor([-1e4, 0.0], dtype=torch.float64)
    assert algebra.sum(algebra.lift(far, low), -1)[1] == -INF


@pytest.mark.parametrize("over", [-1, Segments(torch.tensor([0, 0, 0, 1, 1, 3]), 4)], ids=["axis", "segments"])
@pytest.mark.parametrize(
    "algebra", [Log(), Max(), KMax(2), Entropy(), Expectation()], ids=["log", "max", "2-max", "entropy", "expectation"]
)
def test_derivatives_pass_through_minus_infinity(algebra: Semiring, over) -> None:
    gone = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]], dtype=torch.bool)
    source = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 6, dtype=torch.float64, generator=source).masked_fill(gone, -INF).requires_grad_()
    values = torch.randn(3, 6, dtype=torch.float64, generator=source).requires_grad_()
    inputs = [scores, values] if isinstance(algebra, Expectation) else [scores]

    def total(*given: Tensor) -> Tensor:
        x = algebra.sum(algebra.lift(*given), over)
        return torch.where(x == -INF, 0.0, x)  # finite, for the differences that check it

    assert gradcheck(total, inputs)
    assert gradgradcheck(total, inputs)
    x = algebra.sum(algebra.lift(*inputs), over)  # not guarded: -inf itself is asked for its gradient
    for _ in range(3):
        if not x.requires_grad:  # the gradient of a maximum is constant
            break
        parts = torch.autograd.grad(x.sum(), inputs, create_graph=True, materialize_grads=True)
        assert all(each.isfinite().all() for each in parts)
        assert (parts[0][gone] == 0).all()
        x = torch.stack([each * torch.arange(18).view(3, 6).cos() for each in parts])


def test_log_sum_of_extreme_scores() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([[1e4, 1e4], [-1e4, -1e4], [1e4, -1e4]], dtype=dtype, requires_grad=True)
        total = Log().sum(x, -1)
        expected = torch.tensor([1e4 + math.log(2), -1e4 + math.log(2), 1e4], dtype=dtype)
        torch.testing.assert_close(total, expected)
        (gradient,) = torch.autograd.grad(total.sum(), x)
        assert gradient.tolist() == [[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]]


def test_first_of_equal_ones_wins() -> None:
    x = torch.tensor([1.0, 3.0, 3.0, -INF, 3.0], requires_grad=True)
    for over in (-1, Segments(torch.zeros(5, dtype=torch.long), 1)):
        (gradient,) = torch.autograd.grad(Max().sum(x, over).sum(), x)
        assert gradient.tolist() == [0, 1, 0, 0, 0]
    rank = torch.tensor(0)
    assert Max().choose(x.detach(), rank)[0] == 1
    lists = KMax(3).lift(x.detach())
    places = [KMax(3).choose(lists, torch.tensor(rank))[0].item() for rank in range(3)]
    assert places == [1, 2, 4]


def test_ranks_come_from_different_entries() -> None:
    algebra = KMax(4)
    x = elements(algebra, (3, 5), 0).round()  # many ties
    best = algebra.sum(x, -1)
    seen = []
    for rank in range(4):
        place, below = algebra.choose(x, torch.full((3,), rank))
        assert torch.equal(x[below, torch.arange(3), place], best[rank])
        seen.append(torch.stack((place, below)))
    for a, b in itertools.combinations(seen, 2):
        assert (a != b).any(0).all()


def test_draws_follow_the_cumulative_shares() -> None:
    x = torch.tensor([-INF, 0.0, -INF, math.log(3.0), -INF], dtype=torch.float64)
    rank = torch.tensor(0)
    for uniform, place in [(0.0, 1), (0.2499, 1), (0.2501, 3), (0.9999, 3), (1.0, 3)]:
        assert Sample().choose(x, rank, torch.tensor(uniform, dtype=torch.float64))[0] == place
    with pytest.raises(ShapeError, match="uniforms"):
        Sample().choose(x, rank)


def test_wrong_use_is_named() -> None:
    with pytest.raises(ShapeError, match="negative, got 0"):
        Log().sum(torch.zeros(2), 0)
    with pytest.raises(ShapeError, match="at least 1, got 0"):
        KMax(0)
