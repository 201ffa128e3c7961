"""The semi-Markov random field as a layer: it learns, decodes and says what is wrong."""

from __future__ import annotations

import math

import pytest
import torch

from oracles import segments as oracle
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference import Segment
from thalweg.layers import SemiCRF

C, K, T = 2, 3, 5
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
GOLD = [[(0, 2, 1), (2, 5, 0)], [(0, 1, 0), (1, 2, 0)]]


def layer() -> SemiCRF:
    torch.manual_seed(3)
    return SemiCRF(C, K).double()


def weighted(crf: SemiCRF, content, begins):
    found = []
    for b, length in enumerate((5, 2)):
        scores = (x.detach().tolist() for x in (crf.durations, crf.transitions, crf.start, crf.end))
        item = oracle.Item(content[b, :length].tolist(), begins[b, :length].tolist(), *scores)
        found.append(oracle.segmentations(item))
    return found


def test_everything_is_that_of_enumeration():
    crf = layer()
    content, begins = torch.randn(2, 2, T, C, dtype=torch.float64).unbind(0)
    content[1, 2:] = begins[1, 2:] = math.nan
    every = weighted(crf, content, begins)
    logs = [oracle.log_probabilities(w)[tuple(y)] for w, y in zip(every, GOLD, strict=True)]
    expected = torch.tensor(logs, dtype=torch.float64)
    torch.testing.assert_close(crf.loss(content, GOLD, MASK, begins=begins), -expected)
    torch.testing.assert_close(crf(content, GOLD, MASK, begins=begins), expected.sum())
    torch.testing.assert_close(crf(content, GOLD, MASK, begins=begins, reduction="mean"), expected.mean())
    found = crf.decode(content, MASK, begins=begins)
    assert [tuple(y) for y in found] == [oracle.top_k(w, 1)[0][0] for w in every]
    best = crf.k_best(content, 4, MASK, begins=begins)
    for b, w in enumerate(every):
        assert [tuple(y) for y in best.segments[b]] == [y for y, _ in oracle.top_k(w, 4)]
        shares = [math.exp(oracle.log_probabilities(w)[y]) for y, _ in oracle.top_k(w, 4)]
        assert best.probabilities[b, : len(shares)].tolist() == pytest.approx(shares)
    marginals = crf.marginals(content, MASK, begins=begins).detach()
    for (t, kind, c), p in oracle.marginals(every[0], oracle.parts).items():
        assert float(marginals[0, t, kind, c]) == pytest.approx(p, abs=1e-9)
    assert (marginals[1, 2:] == 0).all()


def test_it_learns_how_long_segments_are():
    """Content says nothing: that label 0 lasts for 3 positions and label 1 for 2 is left to the durations."""
    torch.manual_seed(0)
    crf = SemiCRF(C, K)
    gold = [[(0, 3, 0), (3, 5, 1), (5, 8, 0), (8, 10, 1)]]
    content = torch.zeros(1, 10, C)
    optimiser = torch.optim.Adam(crf.parameters(), lr=0.3)
    for _ in range(40):
        optimiser.zero_grad()
        loss = crf.loss(content, gold).sum()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.1
    assert crf.decode(content) == [[Segment(*each) for each in gold[0]]]
    assert crf.durations.argmax(0).tolist() == [2, 1]


def test_a_tensor_of_segments_is_the_same():
    crf, content = layer(), torch.randn(2, T, C, dtype=torch.float64)
    y = crf.distribution(content, MASK).from_segments(GOLD)
    torch.testing.assert_close(crf.loss(content, y, MASK), crf.loss(content, GOLD, MASK))


def test_state_goes_round():
    crf, other = layer(), SemiCRF(C, K).double()
    other.load_state_dict(crf.state_dict())
    content = torch.randn(1, T, C, dtype=torch.float64)
    assert torch.equal(crf.marginals(content), other.marginals(content))
    assert "num_labels=2, max_duration=3" in repr(crf)


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda crf, x: SemiCRF(0, 3), ConfigError, "`num_labels` must be an integer of at least 1, got 0"),
        (lambda crf, x: SemiCRF(2, True), ConfigError, "`max_duration`"),
        (lambda crf, x: crf.decode(x[..., :1]), ShapeError, r"C = 2 \(num_labels\), got \(2, 5, 1\)"),
        (lambda crf, x: crf.decode(x, MASK[:1]), ShapeError, "`mask` must be"),
        (lambda crf, x: crf.decode(x, MASK * 0), ShapeError, "got none of batch item 0"),
        (lambda crf, x: crf.decode(x, torch.tensor([[1, 0, 1, 1, 1]] * 2)), ShapeError, "a gap"),
        (lambda crf, x: crf(x, GOLD, MASK, reduction="summ"), ConfigError, "unknown reduction `summ`"),
        (lambda crf, x: crf(x, GOLD), ShapeError, "must reach the item's length 5, got 2 for batch item 1"),
        (lambda crf, x: crf(x, [[(0, 5, 0)], GOLD[1]], MASK), ShapeError, "begin anew after K = 3 positions"),
        (
            lambda crf, x: crf(x, [[(0, 2, 2), (2, 5, 0)], GOLD[1]], MASK),
            ShapeError,
            r"labels in 0..1, got \(0, 2, 2\)",
        ),
        (lambda crf, x: crf(x, [[(1, 5, 0)], GOLD[1]], MASK), ShapeError, "after position 0 of item 0"),
        (lambda crf, x: crf(x, GOLD[:1], MASK), ShapeError, "each of B = 2 items, got 1"),
        (lambda crf, x: crf(x, [[(0, 2)], GOLD[1]], MASK), ShapeError, r"\(first, past, label\), integers"),
        (
            lambda crf, x: crf(x, [[(0, 2.5, 1)], GOLD[1]], MASK),
            ShapeError,
            r"lists of \(first, past, label\), integers",
        ),
        (lambda crf, x: crf.decode(x.tolist()), ShapeError, "`content` must be a dense tensor"),
        (lambda crf, x: crf.decode(x, MASK.tolist()), ShapeError, "`mask` must be a dense tensor"),
        (lambda crf, x: crf.distribution(x).segments([[0]]), ShapeError, "T = 5, got list"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(ask, error, said):
    with pytest.raises(error, match=said) as caught:
        ask(layer(), torch.zeros(2, T, C, dtype=torch.float64))
    assert "\n" not in str(caught.value)
