"""What people give to segmentations by mistake: one line that says what was expected, or the right answer."""

from __future__ import annotations

import math

import pytest
import torch

from thalweg.errors import ConfigError, InfeasibleError, ShapeError
from thalweg.inference import SemiMarkov

B, T, K, C = 2, 4, 2, 3


def made(content=None, durations=None, transitions=None, **settings) -> SemiMarkov:
    content = torch.zeros(B, T, C) if content is None else content
    durations = torch.zeros(K, C) if durations is None else durations
    return SemiMarkov(content, durations, torch.zeros(C, C) if transitions is None else transitions, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"content": torch.zeros(B, T)}, r"`content` must be \(B, T, C\)"),
        ({"content": torch.zeros(B, 0, C)}, "at least 1"),
        ({"content": torch.zeros(B, T, 0)}, "at least 1"),
        ({"content": torch.zeros(B, T, C, dtype=torch.long)}, "floating"),
        ({"content": [[0.0]]}, "`content` must be a dense tensor"),
        ({"durations": torch.zeros(0, C)}, "K at least 1"),
        ({"durations": torch.zeros(K)}, "`durations` must be"),
        ({"durations": torch.zeros(K, C + 1)}, r"got \(2, 4\)"),
        ({"durations": torch.zeros(B + 1, K, C)}, "`durations` must be"),
        ({"durations": torch.zeros(B, T + 1, K, C)}, "`durations` must be"),
        ({"durations": 3}, "`durations` must be a dense tensor"),
        ({"transitions": torch.zeros(C, C + 1)}, r"`transitions` must be \(C, C\)"),
        ({"transitions": torch.zeros(C, C, dtype=torch.complex64)}, "real numbers"),
        ({"begins": torch.zeros(B, T + 1, C)}, "`begins` must be"),
        ({"start": torch.zeros(C + 1)}, "`start` must be"),
        ({"end": torch.zeros(1)}, "`end` must be"),
        ({"lengths": [T + 1, 1]}, "`lengths` must lie in 1..4, got"),
        ({"lengths": [0, 1]}, "`lengths` must lie in 1..4, got"),
        ({"lengths": [1]}, "B = 2"),
        ({"lengths": [1.0, 2.0]}, "integers"),
    ],
)
def test_wrong_scores_are_told_of_in_one_line(settings, said):
    with pytest.raises(ShapeError, match=said) as caught:
        made(**settings)
    assert "\n" not in str(caught.value)


def test_unknown_backends_are_told_of():
    with pytest.raises(ConfigError, match="unknown backend `cpuu`"):
        made(backend="cpuu")
    with pytest.raises(ConfigError, match="gpu"):
        made(backend="gpu")


@pytest.mark.parametrize(
    ("y", "said"),
    [
        ([[0, 3, 0, 0]], r"\(\.\., B, T\) with B = 2 and T = 4"),
        ([[0.0] * 4] * 2, "integers"),
        ([[0, 3, 6, 0], [0, 0, 0, 0]], r"lie in 0..5 \(2 C - 1\), got 6 at position 2 of batch item 0"),
        ([[0, 3, 0, 0], [0, -1, 0, 0]], "got -1 at position 1 of batch item 1"),
        ([[3, 0, 0, 0], [0, 0, 0, 0]], r"go on \(3 \+ c\) only after label c, got 3 at position 0"),
        ([[0, 4, 0, 0], [0, 0, 0, 0]], "only after label c, got 4 at position 1"),
        ([[0, 3, 3, 0], [0, 0, 0, 0]], "begin anew after K = 2 positions, got 3 at position 2"),
    ],
)
def test_what_is_no_segmentation_is_told_of(y, said):
    for ask in (made().score, made().log_prob, made().parts_of, made().energy):
        with pytest.raises(ShapeError, match=said):
            ask(torch.tensor(y))


def test_what_lies_past_a_length_is_not_looked_at():
    p = made(lengths=[2, 4])
    y = torch.tensor([[0, 3, 99, -7], [0, 1, 2, 0]])
    assert torch.equal(p.score(y), torch.zeros(2))


@pytest.mark.parametrize("name", ["content", "durations", "transitions", "begins", "start", "end"])
def test_nan_stays_where_it_is_and_plus_infinity_is_told_of(name):
    shapes = {"content": (B, T, C), "begins": (B, T, C), "durations": (K, C), "transitions": (C, C)}
    scores = torch.zeros(shapes.get(name, (C,)))
    scores[(0,) * scores.dim()] = math.nan
    found = made(**{name: scores}).log_partition.isnan().tolist()
    assert found == ([True, False] if scores.dim() == 3 else [True, True])
    scores[(0,) * scores.dim()] = math.inf
    for ask in (lambda p: p.log_partition, lambda p: p.sample(), lambda p: p.marginals):
        with pytest.raises(ShapeError, match=r"below \+inf"):
            ask(made(**{name: scores}))


def test_an_empty_batch_has_empty_answers():
    p = made(torch.zeros(0, T, C))
    assert p.log_partition.shape == (0,)
    assert p.marginals.shape == (0, T, 2, C)
    assert p.mode.shape == (0, T)
    assert p.sample((3,)).shape == (3, 0, T)
    assert p.segments(p.mode) == []


def test_lengths_that_no_durations_add_up_to():
    durations = torch.zeros(2, C)
    durations[0] = -math.inf  # two positions each
    for backend in ("auto", "reference"):
        with pytest.raises(InfeasibleError, match=r"batch item 1\b"):
            _ = made(durations=durations, lengths=[4, 3], backend=backend).mode
        assert made(durations=durations, lengths=[4, 2], backend=backend).marginals.isfinite().all()


def test_the_callers_lengths_are_copied():
    lengths = torch.tensor([4, 2])
    p = made(lengths=lengths)
    lengths[0] = 100
    assert p.mode.shape == (B, T)
    assert p.lengths.tolist() == [4, 2]


@pytest.mark.parametrize("k", [0, -1, 1.5, True])
def test_numbers_of_answers_are_checked(k):
    with pytest.raises(ShapeError, match="`k` must be"):
        made().top_k(k)


def test_what_fits_no_memory_and_what_is_another_set():
    with pytest.raises(ConfigError, match="`k` = 100000000 must fit into memory"):
        made().top_k(10**8)
    for other in (made(durations=torch.zeros(K + 1, C)), made(lengths=[T, 1])):
        with pytest.raises(ShapeError, match="must have the same"):
            made().kl_divergence(other)
    # What either is by item or by position has a divergence from what is shared, not from each other.
    by_item, by_position = made(durations=torch.zeros(B, K, C)), made(durations=torch.zeros(B, T, K, C))
    for other in (by_item, by_position):
        torch.testing.assert_close(made().kl_divergence(other), torch.zeros(B), atol=1e-6, rtol=0)
    with pytest.raises(ShapeError, match="must have the same"):
        by_item.kl_divergence(by_position)


def test_transforms_are_followed():
    """Under torch.func plain PyTorch answers."""
    content = torch.randn(3, B, T, C, dtype=torch.float64)
    tables = torch.zeros(K, C, dtype=torch.float64), torch.zeros(C, C, dtype=torch.float64)
    found = torch.func.vmap(lambda x: SemiMarkov(x, *tables).log_partition)(content)
    for row, own in zip(found, content, strict=True):
        torch.testing.assert_close(row, SemiMarkov(own, *tables).log_partition)
    first = torch.func.grad(lambda x: SemiMarkov(x, *tables).log_partition.sum())(content[0])
    torch.testing.assert_close(first, SemiMarkov(content[0], *tables).marginals[:, :, 0])
