from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from oracles.chains import total_variation, variation_bound
from thalweg.errors import ConfigError, InfeasibleError, ShapeError
from thalweg.inference import Autoregressive, Hypotheses, beam_search, greedy, sample_sequences
from thalweg.inference.search.markov import MarkovModel, viterbi

ONE = torch.zeros(1, dtype=torch.long)


def random_model(N: int, seed: int = 0, zeros: bool = False, eos: int | None = None) -> MarkovModel:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(N + 1, N, generator=generator, dtype=torch.float64) * 2
    if zeros:
        scores[torch.rand(N + 1, N, generator=generator) < 0.4] = -math.inf
        scores[:, 0] = 0.0  # something can always follow
    rows = scores.log_softmax(-1)
    return MarkovModel(rows[:N], rows[N], eos)


def enumerated(model: MarkovModel, length: int) -> list[tuple[tuple[int, ...], float]]:
    """Every sequence of the length with its log-probability, best first; with eos those that end there."""
    moves, start = model.transitions.tolist(), model.start.tolist()
    found = []
    for path in itertools.product(range(len(start)), repeat=length):
        if model.eos is not None and (path[-1] != model.eos or model.eos in path[:-1]):
            continue
        score = start[path[0]] + math.fsum(moves[i][j] for i, j in itertools.pairwise(path))
        if score > -math.inf:
            found.append((path, score))
    return sorted(found, key=lambda pair: -pair[1])


def check(found: Hypotheses, expected: list[tuple[tuple[int, ...], float]], k: int) -> None:
    """Sequences with the same moves in another order are equally probable, so which of them comes first is free."""
    own, missing = dict(expected), max(0, k - len(expected))
    scores = [score for _, score in expected[:k]]
    assert found.tokens.shape[:2] == found.scores.shape == found.lengths.shape == (1, k)
    paths = [tuple(row) for row in found.sequences()[0]]
    assert len(set(paths)) == len(paths) == len(scores)
    assert [own[path] for path in paths] == pytest.approx(scores)
    assert found.scores[0].tolist() == pytest.approx(scores + [-math.inf] * missing)
    assert found.finished[0].tolist() == [True] * len(scores) + [False] * missing
    assert found.optimal.tolist() == [True]


@pytest.mark.parametrize("eos", [None, 0, 2])
@pytest.mark.parametrize(("N", "length"), [(1, 1), (1, 4), (3, 1), (3, 2), (4, 5), (3, 7)])
@pytest.mark.parametrize("zeros", [False, True])
def test_viterbi_matches_enumeration(N, length, zeros, eos):
    if eos is not None and (eos >= N or N == 1):
        return
    model = random_model(N, seed=N + length, zeros=zeros, eos=eos)
    expected = enumerated(model, length)
    if not expected:
        with pytest.raises(InfeasibleError):
            model.viterbi(length)
        return
    for k in (1, 2, 7, len(expected) + 3):
        check(model.viterbi(length, k=k), expected, k)
        if eos is None:
            check(viterbi(model.transitions, model.start, length, k=k), expected, k)


def test_enumeration_can_fail():
    model = random_model(3)
    twin = MarkovModel(model.transitions.t().clone(), model.start)  # i and j exchanged
    with pytest.raises(AssertionError):
        check(twin.viterbi(4, k=9), enumerated(model, 4), 9)


@pytest.mark.parametrize(("N", "length"), [(2, 5), (3, 4), (4, 3)])
def test_viterbi_is_the_beam_that_holds_everything(N, length):
    model = random_model(N, seed=9)
    exact = model.viterbi(length, k=6)
    beam = beam_search(model, ONE, width=N**length, k=6, max_length=length)
    torch.testing.assert_close(exact.scores, beam.scores)
    torch.testing.assert_close(model.log_prob(exact.tokens), model.log_prob(beam.tokens))
    assert torch.equal(exact.tokens[:, 0], beam.tokens[:, 0])
    assert torch.equal(exact.finished, beam.finished)
    assert bool(beam.optimal.all())


def test_greedy_can_miss_what_viterbi_finds():
    model = MarkovModel([[0.9, 0.1], [0.5, 0.5]], [0.4, 0.6], logarithms=False)
    assert greedy(model, ONE, max_length=3).sequences() == [[[1, 0, 0]]]
    best = model.viterbi(3)
    assert best.sequences() == [[[0, 0, 0]]]
    assert best.scores.exp().item() == pytest.approx(0.4 * 0.9 * 0.9)


@pytest.mark.parametrize("eos", [None, 1])
def test_searches_run_on_it(eos):
    model = random_model(3, seed=4, eos=eos)
    protocol: Autoregressive = model
    for found in (
        greedy(protocol, torch.zeros(2, dtype=torch.long), max_length=6),
        beam_search(protocol, torch.zeros(2, dtype=torch.long), width=4, max_length=6),
        sample_sequences(protocol, torch.zeros(2, dtype=torch.long), n=5, max_length=6),
    ):
        assert found.size == 2
        torch.testing.assert_close(
            torch.where(found.lengths > 0, model.log_prob(found.tokens), -math.inf), found.scores
        )


def test_ancestral_samples_follow_the_chain():
    model, n, length = random_model(3, seed=6), 4000, 3
    drawn = sample_sequences(model, ONE, n=n, max_length=length, generator=torch.Generator().manual_seed(0))
    exact = {path: math.exp(score) for path, score in enumerated(model, length)}
    assert sum(exact.values()) == pytest.approx(1)
    bound = variation_bound(n, len(exact))
    assert total_variation(Counter(map(tuple, drawn.sequences()[0])), exact) < bound
    again = model.chain(length).sample((n,), generator=torch.Generator().manual_seed(0))[:, 0]
    assert total_variation(Counter(map(tuple, again.tolist())), exact) < bound


def test_chain_gives_the_probability_of_a_length():
    model = random_model(3, seed=5, eos=2)
    lengths = [model.chain(length).log_partition.exp().item() for length in range(1, 100)]
    assert sum(lengths) == pytest.approx(1, abs=1e-6)  # it ends some time
    expected = sum(math.exp(score) for _, score in enumerated(model, 4))
    assert lengths[3] == pytest.approx(expected)
    marginals = model.chain(4).marginals[0]
    assert marginals[:, 2].tolist() == pytest.approx([0, 0, 0, 1])
    assert random_model(3).chain(5).log_partition.item() == pytest.approx(0)


def test_gradients_flow_to_the_probabilities():
    model = random_model(3)
    moves = model.transitions.clone().requires_grad_()
    value = MarkovModel(moves, model.start).chain(4).max_score
    (grad,) = torch.autograd.grad(value.sum(), moves)
    assert grad.sum().item() == pytest.approx(3)  # one for each step of the best sequence
    assert not MarkovModel(moves, model.start).viterbi(4).scores.requires_grad


def test_log_prob():
    model = random_model(4, zeros=True)
    for path, score in enumerated(model, 3)[:20]:
        assert model.log_prob(torch.tensor(path)).item() == pytest.approx(score)
    assert model.log_prob(torch.tensor([[[2, -1, -1]]])).shape == (1, 1)
    for wrong in ([4], [-1], [0, -2]):
        with pytest.raises(ShapeError, match=r"must be 0 ... 3, -1 past the end"):
            model.log_prob(torch.tensor(wrong))
    with pytest.raises(ShapeError, match="integers"):
        model.log_prob(torch.zeros(3))


def test_long_sequences_in_float32():
    model = random_model(5, seed=1)
    single = viterbi(model.transitions.float(), model.start.float(), 2000)
    double = model.viterbi(2000)
    assert single.scores.dtype == torch.float32
    assert single.scores.item() == pytest.approx(double.scores.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("transitions", "start", "message"),
    [
        ([[0.0, 0.0]], [0.0], r"`transitions` must be \(N, N\), got \(1, 2\)"),
        ([[0.0]], [0.0, 0.0], r"`start` must be \(N,\) with N = 1 as in `transitions`, got \(2,\)"),
        ([[0.5]], [0.0], r"`transitions` must be log-probabilities, at most 0, got 0.5 at \[0, 0\].*logarithms=False"),
        ([[0.0]], [math.nan], r"`start` must be log-probabilities.*nan at \[0\]"),
    ],
)
def test_shape_errors(transitions, start, message):
    with pytest.raises(ShapeError, match=message):
        MarkovModel(transitions, start)


def test_other_errors():
    with pytest.raises(ShapeError, match=r"probabilities in \[0, 1\], got -1 at .*logarithms=True"):
        viterbi([[-1.0]], [0.0], 2, logarithms=False)
    with pytest.raises(ConfigError, match="`length` must be an integer of at least 1"):
        viterbi([[0.0]], [0.0], 0)
    with pytest.raises(ConfigError, match="`k` must be an integer of at least 1"):
        viterbi([[0.0]], [0.0], 1, k=0)
    with pytest.raises(ConfigError, match=r"`eos` must be 0 ... 0"):
        MarkovModel([[0.0]], [0.0], eos=1)
    with pytest.raises(InfeasibleError, match="item 0"):
        viterbi([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0], 2, logarithms=False)
