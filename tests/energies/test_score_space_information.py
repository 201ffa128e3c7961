"""The Fisher information where it is known exactly: against quadrature, sums over all sequences, and draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from oracles.score_spaces import fisher_information_1d
from thalweg.energies import HMM, GaussianEmission, GaussianMixture, ScoreSpace
from thalweg.energies.derivatives.information import exact_information
from thalweg.energies.score_space import derivatives_of


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def information(model, of, lengths=(1,), scales=None):
    lengths = torch.tensor(lengths, dtype=torch.float64)
    scales = torch.ones_like(lengths) if scales is None else torch.tensor(scales, dtype=torch.float64)
    return exact_information(derivatives_of(model), of, lengths, scales)


def close(one, other, tolerance=1e-9):
    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", ["full", "tied", "diagonal", "spherical"])
def test_one_gaussian_is_minus_the_expected_curvature(shape):
    """E[log p(x)] = -(log |S| + tr(S^-1 (V + (m - a)(m - a)'))) / 2 + ..., whose curvature is taken at S = V, a = m."""
    D = 3
    root, mean = normal(D, D, seed=1), normal(D, seed=2)
    whole = root @ root.mT + torch.eye(D, dtype=torch.float64)
    rows, columns = torch.tril_indices(D, D)

    def symmetric(half):
        found = half.new_zeros(D, D)
        found[rows, columns] = half
        found[columns, rows] = half
        return found

    free, matrix, given = {
        "full": (whole[rows, columns], symmetric, whole[None]),
        "tied": (whole[rows, columns], symmetric, whole),
        "diagonal": (whole.diagonal(), torch.diag, whole.diagonal()[None]),
        "spherical": (whole[0, :1], lambda v: v * torch.eye(D, dtype=torch.float64), whole[0, :1]),
    }[shape]
    truth = matrix(free)

    def expected(both):
        a, S = both[:D], matrix(both[D:])
        apart = (mean - a).unsqueeze(1)
        return -0.5 * (S.logdet() + (S.inverse() @ (truth + apart @ apart.mT)).trace())

    curvature = torch.autograd.functional.hessian(expected, torch.cat([mean, free]))
    mixture = GaussianMixture(covariance_type=shape, means=mean[None], covariances=given)
    chain = HMM([1.0], [[1.0]], GaussianEmission(mean[None], given, shape))
    for model in (mixture, chain):
        close(information(model, ["means", "variances"], (5,)), -5 * curvature)
    assert not information(mixture, ["weights"]).any()
    assert not information(chain, ["initial", "transitions"]).any()


@pytest.mark.parametrize("narrow", [1.0, 0.02])
def test_a_mixture_in_one_dimension_is_its_integral(narrow):
    weights, means, variances = [0.2, 0.5, 0.3], [-1.0, 0.5, 2.5], [0.5, 1.5 * narrow**2, 0.8]
    arrays = [torch.tensor(each, dtype=torch.float64) for each in (weights, means, variances)]
    model = GaussianMixture(
        covariance_type="spherical", weights=arrays[0], means=arrays[1][:, None], covariances=arrays[2]
    )
    found = information(model, ["means", "variances", "weights"], (4,))
    close(found, 4 * fisher_information_1d(weights, means, variances), 1e-6)
    assert torch.linalg.matrix_rank(found, rtol=1e-10) == 8  # logits of weights can be shifted together


def test_exact_whitening_is_what_empirical_whitening_tends_to():
    model = GaussianMixture(means=[[-1.0], [1.5]], covariances=[[[1.0]], [[0.5]]], weights=[0.4, 0.6]).double()
    lengths = (torch.arange(20_000) % 5) + 1
    values = model.sample(20_000 * 5, generator=torch.Generator().manual_seed(0)).view(20_000, 5, 1)
    for average in (False, True):
        settings = {"of": ("means", "weights"), "average": average}
        space = ScoreSpace(model, whiten="exact", **settings)
        white = space.fit_transform(values, lengths=lengths)
        sizes = torch.linalg.eigvalsh(white.mT @ white / len(white))
        close(sizes, torch.tensor([0.0, 1, 1, 1], dtype=torch.float64), 0.06)
        assert space.transform(values[:1], lengths=[3]).shape == (1, 4)
    empirical = ScoreSpace(model, whiten="empirical", **settings).fit(values, lengths=lengths).whitening_
    assert empirical is not None
    assert space.whitening_ is not None
    assert (empirical - space.whitening_).abs().max() < 0.05 * empirical.abs().max()


def told_chain():
    """Symbols 0 and 1 are of the first state, 2 of the second, 3 of the third; 4 is never seen."""
    table = torch.zeros(3, 5, dtype=torch.float64)
    table[0, :2] = torch.tensor([0.3, 0.7])
    table[1, 2] = table[2, 3] = 1.0
    moves = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], dtype=torch.float64)
    return HMM([0.6, 0.4, 0.0], moves, table)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_chain_whose_symbols_tell_its_states_is_the_sum_over_all_sequences(length):
    model, of = told_chain(), ("emissions", "initial", "transitions")
    likely = [
        x
        for x in itertools.product(range(4), repeat=length)
        if x[0] != 3 and all((a, b) not in {(0, 3), (1, 3)} for a, b in itertools.pairwise(x))
    ]
    chances = np.exp(model.score_samples([np.array(x) for x in likely]).astype(float))
    assert chances.sum() == pytest.approx(1.0, abs=1e-6)
    scores = ScoreSpace(model, of=of).fit_transform([np.array(x) for x in likely])
    close(information(model, of, (length,)), scores.T @ (chances[:, None] * scores), 1e-6)
    half = information(model, of, (length, length), (1.0, 0.0))
    close(2 * half, information(model, of, (length,)))


def test_exact_whitening_of_a_markov_chain_makes_a_sequence_of_its_own_white():
    model = told_chain()
    rolls = model.sample(6, 20_000, generator=torch.Generator().manual_seed(0))[1]
    white = ScoreSpace(model, of="transitions", whiten="exact").fit_transform(rolls).double()
    sizes = torch.linalg.eigvalsh(white.mT @ white / len(white))
    free = 2 - 1 + 3 - 1 + 3 - 1
    close(sizes, torch.tensor([0.0] * (9 - free) + [1.0] * free, dtype=torch.float64), 0.06)
