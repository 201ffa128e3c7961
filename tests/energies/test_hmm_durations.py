"""Hidden Markov models whose states last: against an enumeration of all segmentations, and what they refuse."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from oracles import segments as oracle
from thalweg.energies import HMM, GaussianEmission, ScoreSpace
from thalweg.errors import ConfigError, InfeasibleError, ShapeError
from thalweg.inference import SemiMarkov

C, K, V = 2, 3, 4
LENGTHS = [5, 1, 4]


def rows(*shape: int, seed: int) -> Tensor:
    weights = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2
    return weights / weights.sum(-1, keepdim=True)


PI, P, E, D = rows(C, seed=1), rows(C, C, seed=2), rows(C, V, seed=3), rows(C, K, seed=5)
X = torch.randint(V, (3, 5), generator=torch.Generator().manual_seed(4))


def weighted(moves: Tensor = P, lasting: Tensor = D):
    """Every segmentation of each sequence with log p(z, x)."""
    zeros = [0.0] * C
    found = []
    for b, length in enumerate(LENGTHS):
        content = E.log()[:, X[b, :length]].T.tolist()
        item = oracle.Item(
            content, [zeros] * length, lasting.log().T.tolist(), moves.log().tolist(), PI.log().tolist(), zeros
        )
        found.append(oracle.segmentations(item))
    return found


def test_likelihood_states_and_energy_are_those_of_enumeration():
    model = HMM(PI, P, E, durations=D)
    every = weighted()
    expected = [oracle.log_partition(w) for w in every]
    np.testing.assert_allclose(model.log_likelihood(X, LENGTHS).tolist(), expected, rtol=1e-10)
    scores, states = model.viterbi(X, LENGTHS)
    smooth = model.smooth(X, LENGTHS)
    for b, w in enumerate(every):
        best, value = oracle.top_k(w, 1)[0]
        assert float(scores[b]) == pytest.approx(value, rel=1e-10)
        path = [label for first, past, label in best for _ in range(first, past)]
        assert states[b].tolist() == path + [-1] * (5 - len(path))
        shares = oracle.marginals(w, oracle.parts)
        for t in range(LENGTHS[b]):
            assert smooth[b, t].tolist() == pytest.approx([shares.get((t, 0, c), 0.0) for c in range(C)], abs=1e-10)
    chain = model.chain(X, LENGTHS)
    assert isinstance(chain, SemiMarkov)
    y = chain.mode
    torch.testing.assert_close(model.energy(X, y, LENGTHS), -scores)


def test_a_step_of_em_is_that_of_enumeration():
    first, lasting, moves, symbols = Counter(), Counter(), Counter(), Counter()
    for b, w in enumerate(weighted()):
        for y, value in oracle.log_probabilities(w).items():
            p = math.exp(value)
            first[y[0][2]] += p
            for (_, _, i), (_, _, j) in pairwise(y):
                moves[i, j] += p
            for start, past, c in y:
                lasting[c, past - start - 1] += p
                for t in range(start, past):
                    symbols[c, int(X[b, t])] += p

    def table(counts, *shape):
        found = np.array([counts[k if len(shape) > 1 else k[0]] for k in np.ndindex(*shape)]).reshape(shape)
        return found / found.sum(-1, keepdims=True)

    model = HMM(PI, P, E, durations=D, max_iter=1).fit(X, LENGTHS)
    assert model.history_ == [pytest.approx(sum(oracle.log_partition(w) for w in weighted()), rel=1e-12)]
    np.testing.assert_allclose(model.log_initial.exp().tolist(), table(first, C), rtol=1e-9)
    np.testing.assert_allclose(model.log_transition.exp().tolist(), table(moves, C, C), rtol=1e-9)
    np.testing.assert_allclose(model.log_duration.exp().tolist(), table(lasting, C, K), rtol=1e-9)
    np.testing.assert_allclose(model.log_emission.exp().tolist(), table(symbols, C, V), rtol=1e-9)


def test_zeros_stay_and_the_likelihood_climbs():
    moves = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    lasting = torch.tensor([[0.0, 0.5, 0.5], [0.4, 0.6, 0.0]], dtype=torch.float64)
    model = HMM(PI, moves, E, durations=lasting, max_iter=12, tol=0.0).fit(X[[0, 2]], [5, 4])
    assert all(b >= a - 1e-9 for a, b in pairwise(model.history_))
    assert model.history_[-1] > model.history_[0] + 0.1
    assert (model.log_duration.exp()[lasting == 0] == 0).all()
    assert (model.log_transition.exp()[moves == 0] == 0).all()
    with pytest.raises(InfeasibleError, match=r"\b0\b"):  # one position cannot be a stay of two or three
        HMM([1.0, 0.0], moves, E, durations=lasting).log_likelihood(torch.tensor([[0]]))


def test_stays_are_learned_from_vectors_alone():
    """Of two states that last 4 and 9 positions; a chain of states sees geometric stays only."""
    means = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    lasting = torch.zeros(2, 12, dtype=torch.float64)
    lasting[0, 3] = lasting[1, 8] = 1.0
    moves = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    true = HMM([0.5, 0.5], moves, GaussianEmission(means), durations=lasting)
    z, x = true.sample(65, 12, generator=torch.Generator().manual_seed(0))
    model = HMM(n_states=2, durations=12, max_iter=40).fit(x)
    found = model.log_duration.exp()
    order = model.emits.means.detach().flatten().argsort()
    assert found[order].argmax(-1).tolist() == [3, 8]
    assert found[order[0], 3] > 0.9
    assert found[order[1], 8] > 0.9
    right = (model.predict(x) == order.argsort().argsort()[z]).double().mean()
    assert max(float(right), 1 - float(right)) > 0.97
    plain = HMM(n_states=2, max_iter=40).fit(x)
    assert model.score(x) > plain.score(x) + 50
    assert model.free_parameters == plain.free_parameters + 2 * 11 - 2
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again.log_likelihood(x), model.log_likelihood(x))
    grown = HMM(n_states=2, durations=12, max_iter=2, warm_start=True).fit(x)
    before = grown.history_[-1]
    assert grown.fit(x).history_[0] > before - 1e-6


def test_gradient_finds_durations_too():
    model = HMM(PI, P, E, durations=D, method="gradient", max_iter=5).fit(X, LENGTHS)
    assert model.history_[-1] > model.history_[0]


@pytest.mark.parametrize(
    ("durations", "error", "said"),
    [
        (0, ConfigError, "K of at least 1, got 0"),
        ([[0.5, 0.5]], ShapeError, r"C = 2 states, or K, got \(1, 2\)"),
        ([[0.5, 0.6], [0.5, 0.5]], ShapeError, "row 0 of `durations` must be probabilities that sum to one"),
        ([0.5, 0.5], ShapeError, r"got \(2,\)"),
        ("long", ShapeError, "must be a tensor"),
        (True, ShapeError, "bool"),
    ],
)
def test_wrong_durations_are_told_of(durations, error, said):
    with pytest.raises(error, match=said):
        HMM(PI, P, E, durations=durations)


def test_what_durations_have_no_answer_for():
    model = HMM(PI, P, E, durations=D)
    with pytest.raises(ConfigError, match="filter"):
        model.filter(X)
    with pytest.raises(ConfigError, match="durations"):
        ScoreSpace(model).fit(X)
