"""Optimisers by name, learning-rate schedules, plateau and teacher forcing against closed forms."""

import itertools
import math

import pytest
import torch

from thalweg.errors import ConfigError
from thalweg.learning.optimisers import Plateau, build_optimiser, learning_rate_factor, teacher_forcing_at

GRADIENTS = [[1.0, -0.01, 0.0], [0.5, 0.02, 0.0], [2.0, -0.03, 0.0]]
START = [1.0, -2.0, 3.0]


def run(name, *, fused, decay, rate=0.1, **settings):
    """Three steps of the library's optimiser with the gradients above."""
    weight = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    optimiser = build_optimiser(name, [weight], learning_rate=rate, weight_decay=decay, fused=fused, **settings)
    for gradient in GRADIENTS:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimiser.step()
    return weight.detach().tolist()


def plain_sgd(decay, rate=0.1, momentum=0.0):
    result = []
    for i, w in enumerate(START):
        velocity = 0.0
        for step, gradient in enumerate(GRADIENTS):
            g = gradient[i] + decay * w
            velocity = g if step == 0 else momentum * velocity + g
            w -= rate * velocity
        result.append(w)
    return result


def plain_adam(decay, rate=0.1, *, decoupled, beta1=0.9, beta2=0.999, epsilon=1e-8):
    result = []
    for i, w in enumerate(START):
        m = v = 0.0
        for step, gradient in enumerate(GRADIENTS, start=1):
            g = gradient[i]
            if decoupled:
                w *= 1 - rate * decay
            else:
                g += decay * w
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w -= rate * (m / (1 - beta1**step)) / (math.sqrt(v / (1 - beta2**step)) + epsilon)
        result.append(w)
    return result


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_names_mean_what_they_say(fused, decay):
    close = {"rel": 1e-9, "abs": 1e-9}
    assert run("sgd", fused=fused, decay=decay) == pytest.approx(plain_sgd(decay), **close)
    with_momentum = run("sgd", fused=fused, decay=decay, momentum=0.9)
    assert with_momentum == pytest.approx(plain_sgd(decay, momentum=0.9), **close)
    assert run("adam_l2", fused=fused, decay=decay) == pytest.approx(plain_adam(decay, decoupled=False), **close)
    assert run("adamw", fused=fused, decay=decay) == pytest.approx(plain_adam(decay, decoupled=True), **close)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("name", "decoupled"), [("adam_l2", False), ("adamw", True)])
def test_beta2_is_the_decay_of_the_squares(name, decoupled, fused):
    close = {"rel": 1e-9, "abs": 1e-9}
    expected = plain_adam(0.2, decoupled=decoupled, beta2=0.98)
    assert expected != pytest.approx(plain_adam(0.2, decoupled=decoupled), **close)
    assert run(name, fused=fused, decay=0.2, beta2=0.98) == pytest.approx(expected, **close)


def test_the_two_adams_differ_by_their_decay():
    assert plain_adam(0.2, decoupled=False) != pytest.approx(plain_adam(0.2, decoupled=True), abs=1e-3)
    # Decoupled decay shrinks a weight without gradient by the same factor each step; L2 moves it by whole steps.
    assert run("adamw", fused=True, decay=0.2)[2] == pytest.approx(3.0 * (1 - 0.1 * 0.2) ** 3)
    assert run("adam_l2", fused=True, decay=0.2)[2] == pytest.approx(3.0 - 3 * 0.1, abs=1e-2)


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam_l2", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_they_are_torchs_own(name, kind):
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    optimiser = build_optimiser(name, [torch.nn.Parameter(torch.zeros(2)), frozen], learning_rate=0.5)
    assert type(optimiser) is kind
    assert [len(group["params"]) for group in optimiser.param_groups] == [1]
    assert optimiser.defaults["lr"] == 0.5


@pytest.mark.parametrize("name", ["adam", "Adamw", "adagrad", ""])
def test_unknown_optimiser(name):
    with pytest.raises(ConfigError, match=r"is not known; (did you mean|choose one of)"):
        build_optimiser(name, [torch.nn.Parameter(torch.zeros(1))], learning_rate=0.1)


WARMUP, TOTAL = 8, 100


@pytest.mark.parametrize("schedule", ["constant", "plateau", "inverse_sqrt", "cosine"])
def test_warm_up_is_a_straight_rise(schedule):
    found = [learning_rate_factor(schedule, s, warmup=WARMUP, total=TOTAL) for s in range(WARMUP)]
    assert found == pytest.approx([(s + 1) / WARMUP for s in range(WARMUP)])
    assert found[-1] == 1.0


def test_schedules_after_the_warm_up():
    after = range(WARMUP, TOTAL)

    def curve(schedule):
        return [learning_rate_factor(schedule, s, warmup=WARMUP, total=TOTAL) for s in after]

    assert curve("constant") == curve("plateau") == [1.0] * len(after)
    # The n-th step (from 1) has sqrt(w / n): continuous with the end of the warm-up.
    assert curve("inverse_sqrt") == pytest.approx([math.sqrt(WARMUP / (s + 1)) for s in after])
    half_turn = [math.cos(math.pi * (s - WARMUP) / (TOTAL - WARMUP) / 2) ** 2 for s in after]
    assert curve("cosine") == pytest.approx(half_turn)
    for name in ("inverse_sqrt", "cosine"):
        values = curve(name)
        assert values == sorted(values, reverse=True)
        assert all(0 < v <= 1 for v in values)


def test_schedules_at_the_edges():
    assert learning_rate_factor("cosine", TOTAL, warmup=WARMUP, total=TOTAL) == pytest.approx(0.0)
    assert learning_rate_factor("cosine", 10 * TOTAL, warmup=WARMUP, total=TOTAL) == pytest.approx(0.0)
    for schedule in ("constant", "plateau", "inverse_sqrt", "cosine"):
        assert learning_rate_factor(schedule, 0, warmup=0, total=1) == 1.0
        # A warm-up as long as the training, or longer, is all rise.
        assert learning_rate_factor(schedule, 3, warmup=10, total=4) == pytest.approx(0.4)
    assert learning_rate_factor("inverse_sqrt", 99, warmup=0, total=100) == pytest.approx(0.1)


def test_unknown_schedule():
    with pytest.raises(ConfigError, match="schedule `cosin` is not known; did you mean `cosine`"):
        learning_rate_factor("cosin", 0, warmup=0, total=1)


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_plateau_cuts_after_patience(patience):
    plateau = Plateau(factor=0.1, patience=patience)
    assert plateau.update(True) == 1.0
    for cuts in (1, 2):
        for _ in range(patience):
            assert plateau.update(False) == pytest.approx(0.1 ** (cuts - 1))
        assert plateau.update(False) == pytest.approx(0.1**cuts)
    # An improvement starts the waiting anew but raises nothing.
    for _ in range(patience):
        plateau.update(False)
    assert plateau.update(True) == pytest.approx(0.01)
    for _ in range(patience):
        assert plateau.update(False) == pytest.approx(0.01)
    assert plateau.update(False) == pytest.approx(0.001)


def test_teacher_forcing():
    shares = [n / 20 for n in range(21)]
    assert [teacher_forcing_at("constant", 0.7, 0.1, s) for s in shares] == [0.7] * 21
    linear = [teacher_forcing_at("linear", 0.9, 0.1, s) for s in shares]
    assert linear == pytest.approx([0.9 - 0.8 * s for s in shares])
    curve = [teacher_forcing_at("inverse_sigmoid", 0.9, 0.1, s) for s in shares]
    assert curve[0] == pytest.approx(0.9)
    assert curve[10] == pytest.approx(0.5)
    assert curve[20] == pytest.approx(0.1)
    assert curve == sorted(curve, reverse=True)
    # A sigmoid through both ends: symmetric about the middle, steepest there.
    assert [a + b for a, b in zip(curve, curve[::-1], strict=True)] == pytest.approx([1.0] * 21)
    slopes = [a - b for a, b in itertools.pairwise(curve)]
    assert max(slopes) == pytest.approx(slopes[9])
    stretch = (1 / (1 + math.exp(-3)) - 0.5) / (1 / (1 + math.exp(-6)) - 0.5)
    assert curve[15] == pytest.approx(0.5 - 0.4 * stretch)


def test_forcing_may_rise_and_stays_a_probability():
    for schedule in ("linear", "inverse_sigmoid"):
        values = [teacher_forcing_at(schedule, 0.0, 1.0, n / 50) for n in range(51)]
        assert values == sorted(values)
        assert all(-1e-12 <= v <= 1 + 1e-12 for v in values)


def test_unknown_forcing_schedule():
    with pytest.raises(ConfigError, match="teacher-forcing schedule `liner` is not known; did you mean `linear`"):
        teacher_forcing_at("liner", 1.0, 0.0, 0.5)
