"""Score spaces of mixtures and hidden Markov models against formulas, autograd and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal

from oracles.score_spaces import first_order, log_likelihood, second_order
from thalweg.energies import HMM, GaussianEmission, GaussianMixture, ScoreSpace
from thalweg.inference import SparseTransitions

SHAPES = ("full", "tied", "diagonal", "spherical")
LENGTHS = (4, 1, 6)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def gaussians(shape, K, D):
    """Means and covariances as leaves: of matrices the lower triangle, and how they become (K, D, D)."""
    root = normal(K, D, D, seed=1)
    matrices = root @ root.mT + 0.5 * torch.eye(D, dtype=torch.float64)
    rows, columns = torch.tril_indices(D, D)

    def symmetric(half):
        whole = half.new_zeros(*half.shape[:-1], D, D)
        whole[..., rows, columns] = half
        whole[..., columns, rows] = half
        return whole

    free, whole = {
        "full": (matrices[:, rows, columns], symmetric),
        "tied": (matrices[0, rows, columns], lambda half: symmetric(half).expand(K, D, D)),
        "diagonal": (matrices.diagonal(dim1=1, dim2=2), torch.diag_embed),
        "spherical": (matrices[:, 0, 0], lambda v: v.unsqueeze(1).expand(K, D).diag_embed()),
    }[shape]
    given = symmetric(free) if shape in ("full", "tied") else free
    return 1.5 * normal(K, D, seed=2), free.clone().requires_grad_(), whole, given.clone()


def a_mixture(shape="full", N=3, D=2):
    means, free, whole, given = gaussians(shape, N, D)
    logits = normal(N, seed=3)
    model = GaussianMixture(covariance_type=shape, weights=logits.softmax(0), means=means, covariances=given)
    leaves = {"means": means.clone().requires_grad_(), "variances": free, "weights": logits.requires_grad_()}

    def likelihood(x):
        parts = MultivariateNormal(leaves["means"], whole(leaves["variances"])).log_prob(x.unsqueeze(1))
        return (parts + leaves["weights"].log_softmax(0)).logsumexp(1).sum()

    return model, leaves, likelihood


def forward(densities, initial, transition):
    """log p(x) by the forward recursion, from logits."""
    alpha = initial.log_softmax(0) + densities[0]
    for step in densities[1:]:
        alpha = (alpha.unsqueeze(1) + transition.log_softmax(1)).logsumexp(0) + step
    return alpha.logsumexp(0)


def a_chain(shape="diagonal", C=3, D=2):
    means, free, whole, given = gaussians(shape, C, D)
    logits, moves = normal(C, seed=3), normal(C, C, seed=4)
    emission = GaussianEmission(means.clone(), given, shape)
    model = HMM(logits.softmax(0), moves.softmax(1), emission)
    leaves = {
        "means": means.clone().requires_grad_(),
        "variances": free,
        "initial": logits.requires_grad_(),
        "transitions": moves.requires_grad_(),
    }

    def likelihood(x):
        densities = MultivariateNormal(leaves["means"], whole(leaves["variances"])).log_prob(x.unsqueeze(1))
        return forward(densities, leaves["initial"], leaves["transitions"])

    return model, leaves, likelihood


def by_autograd(sequences, leaves, likelihood):
    found = []
    for x in sequences:
        gradients = torch.autograd.grad(likelihood(x), list(leaves.values()), materialize_grads=True)
        found.append(torch.cat([each.flatten() for each in gradients]))
    return torch.stack(found)


def ragged(D=2, lengths=LENGTHS):
    return [2 * normal(length, D, seed=10 + place) for place, length in enumerate(lengths)]


def close(one, other, tolerance=1e-10):
    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=tolerance, atol=tolerance)


def test_k3_score_space_of_a_gaussian_mixture_over_a_sequence():
    """First and second order in the means of a 1-D mixture: formulas, differences, and the dimension."""
    weights, means, variances = [0.2, 0.5, 0.3], [-1.0, 0.5, 2.0], [0.5, 1.5, 0.8]
    w, m, v = (torch.tensor(each, dtype=torch.float64) for each in (weights, means, variances))
    model = GaussianMixture(covariance_type="spherical", weights=w, means=m.unsqueeze(1), covariances=v)
    M, step = 3, 1e-4
    for length in (1, 2, 7):
        sequence = (2 * normal(length, seed=length)).tolist()
        found = ScoreSpace(model, order=2).fit_transform([np.array(sequence)[:, None]])[0]
        assert found.shape == (M + M * (M + 1) // 2,)
        exact = first_order(sequence, weights, means, variances) + second_order(sequence, weights, means, variances)
        np.testing.assert_allclose(found, exact, rtol=1e-11, atol=1e-12)

        def value(sequence=sequence, **moved):
            there = [m + moved.get(f"m{i}", 0.0) for i, m in enumerate(means)]
            return log_likelihood(sequence, weights, there, variances)

        def slope(i, sequence=sequence, **moved):
            there = [m + moved.get(f"m{k}", 0.0) for k, m in enumerate(means)]
            return first_order(sequence, weights, there, variances)[i]

        first = [(value(**{f"m{i}": step}) - value(**{f"m{i}": -step})) / (2 * step) for i in range(M)]
        second = [
            (slope(i, **{f"m{j}": step}) - slope(i, **{f"m{j}": -step})) / (2 * step)
            for i in range(M)
            for j in range(i + 1)
        ]
        np.testing.assert_allclose(found, first + second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_first_order_of_mixtures_is_what_autograd_says(shape):
    model, leaves, likelihood = a_mixture(shape)
    sequences = ragged()
    found = ScoreSpace(model, of=("means", "variances", "weights")).fit_transform(sequences)
    close(found, by_autograd(sequences, leaves, likelihood))


@pytest.mark.parametrize("shape", SHAPES)
def test_second_order_of_mixtures_is_what_autograd_says(shape):
    model, leaves, likelihood = a_mixture(shape)
    sequences, means = ragged(), leaves["means"]
    found = ScoreSpace(model, order=2).fit_transform(sequences)
    size = means.numel()
    assert found.shape == (3, size + size * (size + 1) // 2)
    rows, columns = torch.tril_indices(size, size)
    for x, row in zip(sequences, found, strict=True):
        (slopes,) = torch.autograd.grad(likelihood(x), means, create_graph=True)
        hessian = torch.stack(
            [torch.autograd.grad(each, means, retain_graph=True)[0].flatten() for each in slopes.flatten()]
        )
        close(row, torch.cat([slopes.detach().flatten(), hessian[rows, columns]]))


@pytest.mark.parametrize("shape", SHAPES)
def test_first_order_of_chains_is_what_autograd_says(shape):
    model, leaves, likelihood = a_chain(shape)
    sequences = ragged()
    found = ScoreSpace(model, of=("means", "variances", "initial", "transitions")).fit_transform(sequences)
    close(found, by_autograd(sequences, leaves, likelihood))


def test_first_order_of_chains_is_what_differences_say():
    _, leaves, _ = a_chain("diagonal")
    values = {name: leaf.detach() for name, leaf in leaves.items()}

    def model_of(means, variances, initial, transitions):
        return HMM(initial.softmax(0), transitions.softmax(1), GaussianEmission(means, variances, "diagonal"))

    of, x, step = ("means", "variances", "transitions"), ragged()[2], 1e-5
    found = ScoreSpace(model_of(**values), of=of).fit_transform([x])[0]
    slopes = []
    for name in of:
        for place in range(values[name].numel()):
            ends = []
            for sign in (1, -1):
                moved = values[name].clone()
                moved.view(-1)[place] += sign * step
                ends.append(model_of(**{**values, name: moved}).score(x))
            slopes.append((ends[0] - ends[1]) / (2 * step))
    close(found, torch.tensor(slopes, dtype=torch.float64), 1e-6)


def symbols_model(**how):
    initial = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)
    moves = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.6, 0.3], [0.0, 0.25, 0.75]], dtype=torch.float64)
    table = torch.tensor([[0.7, 0.2, 0.1, 0.0], [0.1, 0.1, 0.4, 0.4], [0.25] * 4], dtype=torch.float64)
    return HMM(initial, how.pop("moves", moves), how.pop("table", table), **how), initial, moves, table


def test_symbols_with_structure_are_what_autograd_says():
    model, initial, moves, table = symbols_model()
    sequences = [torch.tensor([0, 3, 1, 2, 2]), torch.tensor([1]), torch.tensor([2, 2, 0])]
    # What is structure has logits of -inf, whose derivative is 0; a very low one stands in for them.
    leaves = {
        name: given.log().clamp(min=-300).requires_grad_()
        for name, given in (("emissions", table), ("initial", initial), ("transitions", moves))
    }
    found = ScoreSpace(model, of=tuple(leaves)).fit_transform(sequences)

    def likelihood(x):
        return forward(leaves["emissions"].log_softmax(1).mT[x], leaves["initial"], leaves["transitions"])

    close(found, by_autograd(sequences, leaves, likelihood))
    assert not found[:, 3].any()
    assert not found[:, 12 + 3 + 2].any()


def test_shared_emissions_sum_and_sparse_moves_are_the_dense_ones():
    x = [torch.tensor([0, 3, 1, 2, 2]), torch.tensor([2, 2, 0])]
    dense, _, moves, table = symbols_model()
    sources, targets = moves.nonzero().unbind(1)
    sparse = symbols_model(moves=SparseTransitions(sources, targets, moves[sources, targets], 3))[0]
    whole = ScoreSpace(dense, of="transitions").fit_transform(x).view(2, 3, 3)
    close(ScoreSpace(sparse, of="transitions").fit_transform(x), whole[:, sources, targets])

    tied = symbols_model(table=table[:2], tied=[0, 1, 1])[0]
    apart = symbols_model(table=table[[0, 1, 1]])[0]
    each = ScoreSpace(apart, of="emissions").fit_transform(x).view(2, 3, 4)
    close(
        ScoreSpace(tied, of="emissions").fit_transform(x),
        torch.stack([each[:, 0], each[:, 1] + each[:, 2]], 1).flatten(1),
    )


@pytest.mark.parametrize("make", [a_mixture, a_chain])
def test_a_sequence_has_the_same_scores_in_any_company_and_form(make):
    space = ScoreSpace(make()[0], of=("means", "variances"), order=1)
    sequences = ragged()
    together = space.fit_transform(sequences)
    alone = torch.cat([space.transform([x]) for x in sequences])
    close(alone, together)
    padded = torch.full((3, 8, 2), torch.nan, dtype=torch.float64)
    for row, x in zip(padded, sequences, strict=True):
        row[: len(x)] = x
    close(space.transform(padded, torch.tensor(LENGTHS)), together)
    joined = space.transform(torch.cat(sequences).numpy(), lengths=list(LENGTHS))
    assert isinstance(joined, np.ndarray)
    assert joined.dtype == np.float64
    close(joined, together)
    close(space.transform(sequences[0]), together[:1])  # a table is one sequence
    assert {space.transform([normal(length, 2)]).shape for length in (1, 2, 50)} == {(1, together.size(1))}


def test_many_sequences_are_done_in_blocks(monkeypatch):
    space = ScoreSpace(a_mixture()[0], order=2)
    whole = space.fit_transform(ragged())
    monkeypatch.setattr("thalweg.energies.derivatives.blocks._AT_ONCE", 1)
    close(space.transform(ragged()), whole)
    padded = normal(3, 5, 2)
    close(space.transform(padded), torch.cat([space.transform(x) for x in padded]))


def test_averages_and_types():
    model = a_mixture()[0]
    sums, means = (ScoreSpace(model, average=average).fit_transform(ragged()) for average in (False, True))
    close(means * torch.tensor(LENGTHS).unsqueeze(1), sums)
    assert ScoreSpace(model.float()).fit_transform(ragged()).dtype == torch.float32
    integers = ScoreSpace(model).fit_transform([[[1, 2], [3, 4]]])
    close(integers, ScoreSpace(model).fit_transform(np.array([[[1.0, 2.0], [3.0, 4.0]]])))


def test_second_order_is_no_linear_transform_of_the_first():
    model = a_mixture("spherical", N=2, D=1)[0]
    found = ScoreSpace(model, order=2).fit_transform([normal(5, 1, seed=seed) for seed in range(60)]).numpy()
    first, second = np.c_[np.ones(60), found[:, :2]], found[:, 2:]
    assert np.linalg.matrix_rank(first, rtol=1e-6) == 3
    assert np.linalg.matrix_rank(np.c_[first, second], rtol=1e-6) == 6
    left = second - first @ np.linalg.lstsq(first, second, rcond=None)[0]
    assert (left.var(axis=0) > 1e-3 * second.var(axis=0)).all()  # rounding would leave 1e-30


def is_zero_on_average(values):
    mean, error = values.mean(0), values.std(0) / len(values) ** 0.5
    return (mean.abs() <= 4.5 * error + 1e-12).all()


def test_scores_have_mean_zero_under_the_mixture_and_the_information_is_minus_the_curvature():
    model = a_mixture("full", N=2)[0]
    sequences = model.sample(4000 * 3, generator=seeded()).view(4000, 3, 2)
    scores = ScoreSpace(model, of=("means", "variances", "weights")).fit_transform(sequences)
    assert is_zero_on_average(scores)
    shifted = ScoreSpace(model).fit_transform(sequences + 0.2)
    assert not is_zero_on_average(shifted)
    both = ScoreSpace(model, order=2).fit_transform(sequences)
    first, second = both[:, :4], both[:, 4:]
    rows, columns = torch.tril_indices(4, 4)
    assert is_zero_on_average(second + first[:, rows] * first[:, columns])


def test_scores_have_mean_zero_under_the_chain():
    model = a_chain("full", C=2)[0]
    sequences = model.sample(5, 3000, generator=seeded())[1]
    scores = ScoreSpace(model, of=("means", "variances", "initial", "transitions")).fit_transform(sequences)
    assert is_zero_on_average(scores)
    model = symbols_model()[0]
    of = ("emissions", "initial", "transitions")
    assert is_zero_on_average(ScoreSpace(model, of=of).fit_transform(model.sample(5, 3000, generator=seeded())[1]))
