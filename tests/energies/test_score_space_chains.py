"""Second derivatives in the means of hidden Markov models, and models whose states are mixtures."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal

from oracles.score_spaces import chain_second_order
from thalweg.energies import HMM, GaussianEmission, GaussianMixture, MixtureEmission, ScoreSpace

SHAPES = ("full", "tied", "diagonal", "spherical")
LENGTHS = (4, 1, 6, 2)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ragged(D=2):
    return [2 * normal(length, D, seed=10 + place) for place, length in enumerate(LENGTHS)]


def close(one, other, tolerance=1e-9):
    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=tolerance, atol=tolerance)


def covariances(shape, K, D):
    """In the shape of their type, and as matrices."""
    root = normal(K, D, D, seed=1)
    whole = root @ root.mT + 0.5 * torch.eye(D, dtype=torch.float64)
    if shape == "full":
        return whole, whole
    if shape == "tied":
        return whole[0], whole[:1].expand(K, D, D)
    if shape == "diagonal":
        return whole.diagonal(dim1=1, dim2=2), whole.diagonal(dim1=1, dim2=2).diag_embed()
    return whole[:, 0, 0], whole[:, 0, 0].view(K, 1).expand(K, D).diag_embed()


def forward(densities, initial, moves):
    # log 0 would have no slope; a very small number stands in for it.
    initial, moves = (each.clamp(min=1e-300).log() for each in (initial, moves))
    alpha = initial + densities[0]
    for step in densities[1:]:
        alpha = (alpha.unsqueeze(1) + moves).logsumexp(0) + step
    return alpha.logsumexp(0)


def curvature(likelihood, means):
    """Slopes and the lower triangle of the second derivatives, by autograd."""
    slopes = torch.autograd.functional.jacobian(likelihood, means).flatten()
    rows, columns = torch.tril_indices(len(slopes), len(slopes))
    second = torch.autograd.functional.hessian(likelihood, means).reshape(len(slopes), -1)
    return torch.cat([slopes, second[rows, columns]])


def a_chain(shape="diagonal", C=3, D=2, structure=False):
    initial, moves = normal(C, seed=3).softmax(0), normal(C, C, seed=4).softmax(1)
    if structure:  # from left to right, and nothing stays for ever
        initial, moves = torch.eye(C, dtype=torch.float64)[0], moves.triu() / moves.triu().sum(1, keepdim=True)
    means, (given, whole) = 1.5 * normal(C, D, seed=2), covariances(shape, C, D)
    model = HMM(initial, moves, GaussianEmission(means, given, shape))

    def likelihood(x, means):
        return forward(MultivariateNormal(means, whole).log_prob(x.unsqueeze(1)), initial, moves)

    return model, means, likelihood


@pytest.mark.parametrize("structure", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_second_order_of_chains_is_what_autograd_says(shape, structure):
    model, means, likelihood = a_chain(shape, structure=structure)
    sequences = ragged()
    found = ScoreSpace(model, order=2).fit_transform(sequences)
    assert found.shape == (4, 6 + 21)
    for x, row in zip(sequences, found, strict=True):
        close(row, curvature(lambda means, x=x: likelihood(x, means), means))


def test_second_order_of_a_chain_is_what_enumeration_and_differences_say():
    """In one dimension: all pairs of positions one by one, and differences of first derivatives."""
    initial, moves = [0.6, 0.4], [[0.7, 0.3], [0.2, 0.8]]
    means, variances = [-1.0, 1.5], [0.5, 2.0]

    def model(means):
        emission = GaussianEmission(np.array(means)[:, None], np.array(variances)[:, None])
        return HMM(np.array(initial), np.array(moves), emission)

    step = 1e-5
    for length in (1, 2, 5):
        x = (2 * normal(length, seed=length)).tolist()
        column = [np.array(x)[:, None]]
        found = ScoreSpace(model(means), order=2).fit_transform(column)[0]
        assert len(found) == 2 + 3
        np.testing.assert_allclose(found[2:], chain_second_order(x, initial, moves, means, variances), rtol=1e-10)
        for i, j in ((0, 0), (1, 0), (1, 1)):
            ends = []
            for sign in (1, -1):
                moved = [m + sign * step * (k == j) for k, m in enumerate(means)]
                ends.append(ScoreSpace(model(moved)).fit_transform(column)[0, i])
            np.testing.assert_allclose(found[2 + i * (i + 1) // 2 + j], (ends[0] - ends[1]) / (2 * step), rtol=1e-6)


def test_second_order_of_a_chain_without_memory_is_that_of_the_mixture():
    weights, means, (given, _) = normal(3, seed=3).softmax(0), normal(3, 2, seed=2), covariances("full", 3, 2)
    mixture = GaussianMixture(weights=weights, means=means, covariances=given)
    chain = HMM(weights, weights.expand(3, 3), GaussianEmission(means, given, "full"))
    single = HMM([1.0], [[1.0]], MixtureEmission(weights[None], means[None], given[None], "full"))
    for model in (chain, single):
        close(*(ScoreSpace(each, order=2).fit_transform(ragged()) for each in (model, mixture)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tied", [None, [0, 1, 1]])
def test_states_that_are_mixtures_are_what_autograd_says(shape, tied):
    K, J, D = (3 if tied is None else 2), 2, 2
    kinds = torch.tensor(list(range(K)) if tied is None else tied)
    initial, moves = normal(3, seed=3).softmax(0), normal(3, 3, seed=4).softmax(1)
    means, logits = 1.5 * normal(K * J, D, seed=2), normal(K, J, seed=5)
    flat, whole = covariances(shape, K * J, D)
    if shape == "tied":  # a matrix for the parts of each state
        flat = covariances("full", K, D)[0]
        whole = flat.repeat_interleave(J, 0)
    else:
        flat = flat.unflatten(0, (K, J))
    emission = MixtureEmission(logits.softmax(1), means.view(K, J, D), flat, shape)
    model = HMM(initial, moves, emission, tied=tied)

    def likelihood(x, means, logits):
        parts = MultivariateNormal(means, whole).log_prob(x.unsqueeze(1)).unflatten(1, (K, J))
        return forward((parts + logits.log_softmax(1)).logsumexp(2)[:, kinds], initial, moves)

    sequences = ragged()
    found = ScoreSpace(model, of=("weights", "means"), order=2).fit_transform(sequences)
    M = K * J * D
    assert found.shape == (4, K * J + M + M * (M + 1) // 2)
    for x, row in zip(sequences, found, strict=True):
        weights = torch.autograd.functional.jacobian(lambda logits, x=x: likelihood(x, means, logits), logits)
        close(row, torch.cat([weights.flatten(), curvature(lambda m, x=x: likelihood(x, m, logits), means)]))


@pytest.mark.parametrize("shape", SHAPES)
def test_variances_of_mixtures_in_states_are_what_differences_say(shape):
    K, J, D, step = 2, 2, 2, 1e-5
    initial, moves = normal(K, seed=3).softmax(0), normal(K, K, seed=4).softmax(1)
    means, weights = 1.5 * normal(K, J, D, seed=2), normal(K, J, seed=5).softmax(1)
    flat = covariances("full", K, D)[0] if shape == "tied" else covariances(shape, K * J, D)[0].unflatten(0, (K, J))
    matrices = shape in ("full", "tied")
    x = ragged()[2]

    def model(given):
        return HMM(initial, moves, MixtureEmission(weights, means, given, shape))

    found = ScoreSpace(model(flat), of="variances").fit_transform([x])[0]
    places = [place for place in itertools.product(*map(range, flat.shape)) if not matrices or place[-1] <= place[-2]]
    assert len(found) == len(places)
    for value, place in zip(found, places, strict=True):
        ends = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[place] += sign * step
            if matrices and place[-1] != place[-2]:
                moved[(*place[:-2], place[-1], place[-2])] += sign * step
            ends.append(model(moved).score(x))
        assert float(value) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-6)


def test_order_and_company_do_not_matter(monkeypatch):
    """Sequences are done in blocks of about the same length, and come back as they were given."""
    lengths = [7, 1, 30, 2, 30, 8, 31, 3]
    sequences = [normal(length, 2, seed=length + place) for place, length in enumerate(lengths)]
    for model in (a_chain()[0], GaussianMixture(means=normal(3, 2), covariances=covariances("full", 3, 2)[0])):
        space = ScoreSpace(model, order=2)
        together = space.fit_transform(sequences)
        close(torch.cat([space.transform([x]) for x in sequences]), together)
        monkeypatch.setattr("thalweg.energies.derivatives.blocks._AT_ONCE", 1)
        close(space.transform(sequences), together)
        monkeypatch.undo()


def test_very_improbable_sequences_have_finite_second_derivatives():
    model, means, likelihood = a_chain()
    x = torch.cat([300 + normal(5, 2), -300 + normal(5, 2)])
    found = ScoreSpace(model, order=2).fit_transform([x])[0]
    assert found.isfinite().all()
    close(found, curvature(lambda means: likelihood(x, means), means), 1e-7)
