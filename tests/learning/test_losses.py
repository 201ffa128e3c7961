"""The sequence loss against its formula in plain Python; smoothing, forbidden symbols, inert padding, gradients."""

import math

import pytest
import torch

from thalweg.errors import ShapeError
from thalweg.learning.losses import sequence_nll

B, T, V = 3, 4, 5
LENGTHS = torch.tensor([4, 2, 1])
MASK = torch.arange(T) < LENGTHS[:, None]
INF = math.inf


def plain(logits, gold, length, smoothing):
    """The docstring's sum, symbol by symbol."""
    total = 0.0
    for t in range(length):
        row = logits[t]
        top = max(row)
        norm = top + math.log(sum(math.exp(v - top) for v in row))
        allowed = [v for v in row if v != -INF]
        spread = sum(v - norm for v in allowed) / len(allowed)
        # Without smoothing the spread has no say, not even an infinite one.
        total -= (1 - smoothing) * (row[gold[t]] - norm) + (smoothing * spread if smoothing else 0.0)
    return total


def data(forbidden=()):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(B, T, V, dtype=torch.float64, generator=generator)
    logits[:, :, list(forbidden)] = -INF
    return logits, torch.randint(2 if forbidden else 0, V, (B, T), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("forbidden", [(), (0, 1)])
def test_equals_plain_python(smoothing, forbidden):
    logits, gold = data(forbidden)
    found = sequence_nll(logits, gold, MASK, smoothing=smoothing)
    rows = zip(logits.tolist(), gold.tolist(), LENGTHS.tolist(), strict=True)
    expected = [plain(*row, smoothing) for row in rows]
    assert found.shape == (B,)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_the_oracle_can_disagree():
    logits, gold = data((0, 1))
    found = sequence_nll(logits, gold, MASK, smoothing=0.1)[0].item()
    # A twin that spreads the smoothing over all V symbols, as if none were forbidden.
    twin = (
        (
            plain(logits[0].tolist(), gold[0].tolist(), T, 0.1)
            - 0.9 * plain(logits[0].tolist(), gold[0].tolist(), T, 0.0)
        )
        * 3
        / V
    )
    assert found != pytest.approx(twin + 0.9 * plain(logits[0].tolist(), gold[0].tolist(), T, 0.0), abs=1e-3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equals_torch(smoothing):
    logits, gold = data()
    ours = sequence_nll(logits, gold, MASK, smoothing=smoothing).sum()
    theirs = torch.nn.functional.cross_entropy(logits[MASK], gold[MASK], reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("filling", [1e30, -INF, INF, math.nan])
def test_padding_changes_neither_value_nor_gradient(smoothing, filling):
    def run(value):
        logits, gold = data((0, 1))
        logits = logits.masked_fill(~MASK[:, :, None], value).requires_grad_()
        losses = sequence_nll(logits, gold, MASK, smoothing=smoothing)
        losses.sum().backward()
        return losses.detach(), logits.grad

    clean, filled = run(0.0), run(filling)
    torch.testing.assert_close(filled[0], clean[0], rtol=0, atol=0)
    torch.testing.assert_close(filled[1], clean[1], rtol=0, atol=0)
    assert (filled[1][~MASK] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_is_probability_minus_target(smoothing):
    logits, gold = data((0, 1))
    logits.requires_grad_()
    sequence_nll(logits, gold, MASK, smoothing=smoothing).sum().backward()
    target = (1 - smoothing) * torch.nn.functional.one_hot(gold, V).double()
    target[:, :, 2:] += smoothing / 3
    expected = (logits.detach().softmax(2) - target) * MASK[:, :, None]
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradcheck(smoothing):
    logits, gold = data()
    assert torch.autograd.gradcheck(
        lambda x: sequence_nll(x, gold, MASK, smoothing=smoothing), (logits.requires_grad_(),)
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_forbidden_gold_symbol_costs_infinitely_much(smoothing):
    logits, gold = data((0, 1))
    gold[0, 0] = 1
    losses = sequence_nll(logits, gold, MASK, smoothing=smoothing)
    assert losses[0] == INF
    assert losses[1:].isfinite().all()


def test_one_symbol_one_position():
    logits, gold, mask = torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    assert sequence_nll(logits, gold, mask, smoothing=0.1).item() == 0


def test_the_callers_tensors_are_left_alone():
    logits, gold = data((0, 1))
    before = logits.clone()
    sequence_nll(logits, gold, MASK, smoothing=0.1)
    assert torch.equal(before, logits)


@pytest.mark.parametrize(
    ("logits", "gold", "mask"), [((2, 3), (2,), (2,)), ((2, 3, 4), (2, 4), (2, 3)), ((2, 3, 4), (2, 3), (3, 2))]
)
def test_wrong_shapes(logits, gold, mask):
    with pytest.raises(ShapeError, match=r"`logits` must be \(B, T, V\)"):
        sequence_nll(torch.zeros(logits), torch.zeros(gold, dtype=torch.int64), torch.ones(mask, dtype=torch.bool))
