from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributions as td

from oracles.chains import frequency_bound, total_variation, variation_bound
from thalweg.energies.hmm.model import HMM
from thalweg.errors import ConfigError, InfeasibleError, ShapeError
from thalweg.inference.structures.chain import LinearChain
from thalweg.kernels.potentials import SparseTransitions

C, V, B, T = 3, 4, 3, 5
LENGTHS = [5, 1, 3]
OBSERVED = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1]], dtype=torch.bool)


def rows(*shape: int, seed: int, zeros: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.05
    if zeros:
        weights[..., 1:] *= torch.rand(weights[..., 1:].shape, generator=generator) < 0.6
    return weights / weights.sum(-1, keepdim=True)


def table(zeros: bool = False) -> HMM:
    return HMM(rows(C, seed=1, zeros=zeros), rows(C, C, seed=2, zeros=zeros), rows(C, V, seed=3))


def symbols() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(4))


class Enumerated:
    """p(z, x) of every state sequence of one item, by the definition; x is None where it is missing."""

    def __init__(self, model: HMM, densities: list[list[float] | None]) -> None:
        initial = model.log_initial.exp().tolist()
        transition = torch.as_tensor(model.log_transition).exp().tolist()
        self.joint: dict[tuple[int, ...], float] = {}
        for path in itertools.product(range(len(initial)), repeat=len(densities)):
            value = initial[path[0]] * math.prod(transition[i][j] for i, j in itertools.pairwise(path))
            value *= math.prod(d[z] for d, z in zip(densities, path, strict=True) if d is not None)
            self.joint[path] = value
        self.likelihood = math.fsum(self.joint.values())

    def posterior(self, t: int, c: int) -> float:
        return math.fsum(p for path, p in self.joint.items() if path[t] == c) / self.likelihood


def densities_of(model: HMM, x: Tensor, length: int, known: Tensor | None) -> list[list[float] | None]:
    """p(x_t | z) for each state, from the parameters alone."""
    if model.log_emission is not None:
        every = model.log_emission.exp()[:, x[:length]].t().tolist()
    else:
        assert model.emission is not None
        every = [model.emission.log_prob(value).exp().tolist() for value in x[:length]]
    return [d if known is None or bool(known[t]) else None for t, d in enumerate(every)]


def models() -> dict[str, tuple[HMM, Tensor]]:
    pi, P = rows(C, seed=1), rows(C, C, seed=2)
    generator = torch.Generator().manual_seed(8)
    values = torch.randn(B, T, generator=generator, dtype=torch.float64)
    points = torch.randn(B, T, 2, generator=generator, dtype=torch.float64)
    means = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    spread = torch.eye(2, dtype=torch.float64) * torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64).view(-1, 1, 1)
    mixture = td.MixtureSameFamily(
        td.Categorical(rows(C, 2, seed=5)), td.Normal(rows(C, 2, seed=6), rows(C, 2, seed=7))
    )
    return {
        "table": (table(), symbols()),
        "zeros": (table(zeros=True), symbols()),
        "normal": (HMM(pi, P, td.Normal(means, means.abs() + 0.5)), values),
        "multivariate": (HMM(pi, P, td.MultivariateNormal(means.unsqueeze(1).expand(C, 2), spread)), points),
        "independent": (HMM(pi, P, td.Independent(td.Normal(means.unsqueeze(1).expand(C, 2), 1.0), 1)), points),
        "mixture": (HMM(pi, P, mixture), values),
        "poisson": (HMM(pi, P, td.Poisson(means.exp())), values.abs().ceil()),
    }


@pytest.fixture(params=list(models()))
def case(request) -> tuple[HMM, Tensor]:
    return models()[request.param]


@pytest.mark.parametrize("missing", [False, True])
def test_matches_enumeration(case, missing):
    model, x = case
    observed = OBSERVED if missing else None
    arguments = (x, LENGTHS)
    likelihood = model.log_likelihood(*arguments, observed=observed)
    smoothed = model.smooth(*arguments, observed=observed)
    filtered = model.filter(*arguments, observed=observed)
    scores, states = model.viterbi(*arguments, observed=observed)
    for item, length in enumerate(LENGTHS):
        densities = densities_of(model, x[item], length, OBSERVED[item] if missing else None)
        exact = Enumerated(model, densities)
        assert likelihood[item].item() == pytest.approx(math.log(exact.likelihood))
        for t, c in itertools.product(range(length), range(C)):
            assert smoothed[item, t, c].item() == pytest.approx(exact.posterior(t, c))
            early = Enumerated(model, densities[: t + 1])
            assert filtered[item, t, c].item() == pytest.approx(early.posterior(t, c))
        best = max(exact.joint.values())
        assert scores[item].item() == pytest.approx(math.log(best))
        assert exact.joint[tuple(states[item, :length].tolist())] == pytest.approx(best)
        assert states[item, length:].tolist() == [-1] * (T - length)
        assert not smoothed[item, length:].any()
        assert not filtered[item, length:].any()


def test_enumeration_can_fail():
    model, x = table(), symbols()
    twin = HMM(model.log_initial.exp(), rows(C, C, seed=99), rows(C, V, seed=3))
    exact = Enumerated(twin, densities_of(twin, x[0], T, None))
    assert model.log_likelihood(x)[0].item() != pytest.approx(math.log(exact.likelihood), rel=1e-4)


@pytest.mark.parametrize("zeros", [False, True])
def test_filter_is_the_bayes_recursion(zeros):
    """The textbook way, in plain probabilities: predict, weigh by the evidence, normalise."""
    model, x = table(zeros), symbols()
    found = model.filter(x)
    pi, P, E = (
        model.log_initial.exp(),
        torch.as_tensor(model.log_transition).exp(),
        torch.as_tensor(model.log_emission).exp(),
    )
    for item in range(B):
        belief = pi
        for t in range(T):
            belief = belief if t == 0 else belief @ P
            belief = belief * E[:, x[item, t]]
            belief = belief / belief.sum()
            torch.testing.assert_close(found[item, t], belief)


def test_last_filtered_is_last_smoothed(case):
    model, x = case
    filtered, smoothed = model.filter(x, LENGTHS), model.smooth(x, LENGTHS)
    for item, length in enumerate(LENGTHS):
        torch.testing.assert_close(filtered[item, length - 1], smoothed[item, length - 1])


def test_filter_keeps_states_that_plain_probabilities_lose():
    model = HMM([1.0, 0.0], [[1 - 1e-30, 1e-30], [0.0, 1.0]], td.Normal(torch.tensor([0.0, 60.0]), torch.ones(2)))
    found = model.filter(torch.tensor([[0.0, 60.0, 60.0]]))
    torch.testing.assert_close(found[0, 1:, 1], torch.ones(2))


def test_zeros_are_exact():
    model = HMM([1.0, 0.0], [[0.5, 0.5], [0.0, 1.0]], [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    assert torch.isneginf(model.log_initial).tolist() == [False, True]
    assert model.smooth(torch.tensor([[0, 1, 0]]))[0].tolist() == [[1, 0], [0, 1], [0, 1]]
    with pytest.raises(InfeasibleError, match="batch item 1"):
        model.log_likelihood(torch.tensor([[0, 0], [1, 0]]))  # the first state cannot say 1
    for ask in (model.filter, model.smooth, model.viterbi):
        with pytest.raises(InfeasibleError, match="batch item 0"):
            ask(torch.tensor([[2]]))


@pytest.mark.parametrize("zeros", [False, True])
def test_gradients(zeros):
    model, x = table(zeros), symbols()
    logits = [v.exp().clone().requires_grad_() for v in (model.log_initial, model.log_transition, model.log_emission)]

    def parameters(*given: Tensor) -> HMM:
        return HMM(*(w / w.sum(-1, keepdim=True) for w in given))

    inside = [w.detach().clone().requires_grad_() for w in logits]
    values = parameters(*inside)
    total = values.log_likelihood(x, LENGTHS).sum() + values.filter(x, LENGTHS)[:, 0].square().sum()
    for grad in torch.autograd.grad(total, inside):
        assert bool(grad.isfinite().all())
    if not zeros:
        assert torch.autograd.gradcheck(lambda *w: parameters(*w).log_likelihood(x, LENGTHS), logits)
        assert torch.autograd.gradcheck(lambda *w: parameters(*w).filter(x, LENGTHS), logits)


def test_missing_values_are_not_looked_at():
    model, x = models()["multivariate"]
    x = x.masked_fill(~OBSERVED.unsqueeze(2), math.nan)
    assert bool(model.smooth(x, observed=OBSERVED).isfinite().all())
    assert bool(table().smooth(symbols().masked_fill(~OBSERVED, -7), observed=OBSERVED).isfinite().all())
    nothing = torch.zeros(B, T, dtype=torch.bool)
    prior = table()
    torch.testing.assert_close(prior.log_likelihood(symbols(), observed=nothing), torch.zeros(B, dtype=torch.float64))
    expected = prior.log_initial.exp() @ torch.as_tensor(prior.log_transition).exp()
    torch.testing.assert_close(prior.smooth(symbols(), observed=nothing)[0, 1], expected)


def test_padding_is_not_looked_at():
    model, x = models()["normal"]
    padded = x.clone()
    padded[1, 1:], padded[2, 3:] = math.nan, math.inf
    torch.testing.assert_close(model.log_likelihood(padded, LENGTHS), model.log_likelihood(x, torch.tensor(LENGTHS)))
    torch.testing.assert_close(model.filter(padded, LENGTHS), model.filter(x, LENGTHS))


def test_sparse_transitions_give_the_same():
    P = rows(C, C, seed=2, zeros=True)
    where = (P > 0).nonzero(as_tuple=True)
    sparse = SparseTransitions.of_edges(*where, P[where], size=C)
    pi, E, x = rows(C, seed=1), rows(C, V, seed=3), symbols()
    dense, edges = HMM(pi, P, E), HMM(pi, sparse, E)
    logs = HMM(pi.log(), sparse._replace(scores=sparse.scores.log()), E.log(), logarithms=True)
    for other in (edges, logs):
        assert isinstance(other.log_transition, SparseTransitions)
        torch.testing.assert_close(other.log_likelihood(x, LENGTHS), dense.log_likelihood(x, LENGTHS))
        torch.testing.assert_close(other.filter(x, LENGTHS), dense.filter(x, LENGTHS))
        torch.testing.assert_close(other.smooth(x, LENGTHS), dense.smooth(x, LENGTHS))
        assert torch.equal(other.viterbi(x)[1], dense.viterbi(x)[1])
    assert edges.sample(4, 5)[0].shape == (5, 4)
    with pytest.raises(ShapeError, match="row 1 of `transition` must be probabilities that sum to one, got the sum 0"):
        HMM([0.5, 0.5], SparseTransitions.of_edges([0], [0], torch.ones(1), size=2), [[1.0], [1.0]])


def test_samples_follow_the_model():
    model, n = table(), 4000
    states, seen = model.sample(2, n, generator=torch.Generator().manual_seed(0))
    assert states.shape == seen.shape == (n, 2)
    exact = {}
    for x in itertools.product(range(V), repeat=2):
        exact[x] = model.log_likelihood(torch.tensor([x])).exp().item()
    assert sum(exact.values()) == pytest.approx(1)
    assert total_variation(Counter(map(tuple, seen.tolist())), exact) < variation_bound(n, len(exact))
    pairs = torch.as_tensor(model.log_transition).exp() * model.log_initial.exp().unsqueeze(1)
    chances = {(i, j): pairs[i, j].item() for i in range(C) for j in range(C)}
    assert total_variation(Counter(map(tuple, states.tolist())), chances) < variation_bound(n, C * C)


def test_samples_of_distributions(case):
    model, x = case
    torch.manual_seed(0)
    states, seen = model.sample(3, 7)
    assert states.shape == (7, 3)
    assert seen.shape == (7, 3, *x.shape[2:])
    assert bool(model.log_likelihood(seen).isfinite().all())


def test_samples_come_from_their_own_state():
    model = HMM([0.5, 0.5], [[0.5, 0.5], [0.5, 0.5]], td.Normal(torch.tensor([0.0, 100.0]), torch.ones(2)))
    torch.manual_seed(0)
    states, seen = model.sample(4, 500)
    assert torch.equal(states, (seen > 50).long())
    assert abs(states.double().mean().item() - 0.5) < frequency_bound(2000, 1)


def test_logarithms_and_types():
    probabilities = table()
    logs = HMM(probabilities.log_initial, probabilities.log_transition, probabilities.log_emission, logarithms=True)
    torch.testing.assert_close(logs.log_likelihood(symbols()), probabilities.log_likelihood(symbols()))
    lists = HMM([1, 0], [[0, 1], [1, 0]], [[1, 0], [0, 1]])
    assert lists.viterbi(torch.tensor([[0, 1, 0]], dtype=torch.uint8))[1].tolist() == [[0, 1, 0]]
    assert lists.log_likelihood(torch.tensor([[0]])).dtype == torch.float32
    mixed = HMM([0.5, 0.5], torch.eye(2, dtype=torch.float64), [[0.5, 0.5]] * 2)
    assert mixed.log_initial.dtype == torch.float64
    assert isinstance(mixed.chain(torch.tensor([[0, 1]])), LinearChain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([0.5, 0.4], [[1, 0], [0, 1]], [[1], [1]]),
            "`initial` must be probabilities that sum to one, got the sum 0.9",
        ),
        (
            ([1, 0], [[1, 0], [0.5, 0.6]], [[1], [1]]),
            "row 1 of `transition` must .* got the sum 1.1; divide by its sum",
        ),
        (([1, 0], [[1, 0], [0, 1]], [[0.5, 0.5], [0, 0]]), "row 1 of `emission` must .* got the sum 0;"),
        (([1, 0], [[2, -1], [0, 1]], [[1], [1]]), "row 0 of `transition` .* got a negative entry; .*logarithms=True"),
        (([1, math.nan], [[1, 0], [0, 1]], [[1], [1]]), "`initial` must be probabilities"),
        (([[1, 0]], [[1, 0], [0, 1]], [[1], [1]]), r"`initial` must be \(C,\)"),
        (([1, 0], [[1]], [[1], [1]]), r"`transition` must be \(C, C\) with C = 2 as in `initial`, got \(1, 1\)"),
        (([1, 0], [[1, 0], [0, 1]], [[1]]), r"`emission` must be \(C, V\) with C = 2"),
        (([1, 0], [[1, 0], [0, 1]], td.Normal(torch.zeros(3), 1.0)), r"batch shape \(C,\) = \(2,\) .* got \(3,\)"),
    ],
)
def test_parameters_that_do_not_fit(arguments, message):
    with pytest.raises(ShapeError, match=message):
        HMM(*arguments)


def test_logarithms_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"row 1 of `transition` .* got the sum 2; normalise with log_softmax"):
        HMM([0.0, -math.inf], [[0.0, -math.inf], [0.0, 0.0]], [[0.0], [0.0]], logarithms=True)


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (torch.zeros(3).long(), {}, r"`observations` must be \(B, T\), got \(3,\); add the batch with unsqueeze"),
        (torch.zeros(1, 3, 1).long(), {}, r"must be \(B, T\), got \(1, 3, 1\)$"),
        (torch.zeros(1, 3), {}, "must be integers, symbols 0 ... 3, got torch.float32"),
        (
            torch.tensor([[0, 0], [1, 4]]),
            {},
            "symbols 0 ... 3, got 4 at position 1 of batch item 1; mark what is missing",
        ),
        (torch.tensor([[0, 4]]), {"lengths": [1, 1]}, r"`lengths` must be \(B,\) with B = 1"),
        (torch.tensor([[0, 3]]), {"lengths": [3]}, "`lengths` must lie in 1..T"),
        (torch.tensor([[0, 3]]), {"observed": torch.ones(1, 2)}, r"`observed` must be bool \(B, T\) = \(1, 2\)"),
    ],
)
def test_observations_that_do_not_fit(x, kwargs, message):
    with pytest.raises(ShapeError, match=message):
        table().log_likelihood(x, **kwargs)


def test_other_errors():
    with pytest.raises(ConfigError, match="`length` must be an integer of at least 1"):
        table().sample(0)
    with pytest.raises(ConfigError, match="`generator` must be None here"):
        models()["normal"][0].sample(3, generator=torch.Generator())


# Beside hmmlearn


@pytest.fixture
def peer():
    return pytest.importorskip("hmmlearn.hmm", reason="hmmlearn is not installed: pip install hmmlearn")


def compare(model: HMM, theirs, sequences: list[np.ndarray], x: Tensor) -> None:
    lengths = [len(sequence) for sequence in sequences]
    together = np.concatenate(sequences)
    together = together if together.ndim == 2 else together[:, None]
    total, posteriors = theirs.score_samples(together, lengths)
    assert model.log_likelihood(x, lengths).sum().item() == pytest.approx(total)
    smoothed = model.smooth(x, lengths)
    ours = np.concatenate([smoothed[b, :n].numpy() for b, n in enumerate(lengths)])
    np.testing.assert_allclose(ours, posteriors, atol=1e-9)
    best, path = theirs.decode(together, lengths)
    scores, states = model.viterbi(x, lengths)
    assert scores.sum().item() == pytest.approx(best)
    assert np.concatenate([states[b, :n].numpy() for b, n in enumerate(lengths)]).tolist() == path.tolist()


def test_symbols_beside_hmmlearn(peer):
    model, x = table(), symbols()
    theirs = peer.CategoricalHMM(n_components=C, n_features=V, init_params="", params="")
    theirs.startprob_, theirs.transmat_ = (
        model.log_initial.exp().detach().numpy(),
        model.log_transition.exp().detach().numpy(),
    )
    theirs.emissionprob_ = model.log_emission.exp().detach().numpy()
    compare(model, theirs, [x[b, :n].numpy() for b, n in enumerate(LENGTHS)], x)


def test_gaussians_beside_hmmlearn(peer):
    model, x = models()["multivariate"]
    theirs = peer.GaussianHMM(n_components=C, covariance_type="full", init_params="", params="")
    theirs.startprob_, theirs.transmat_ = (
        model.log_initial.exp().detach().numpy(),
        model.log_transition.exp().detach().numpy(),
    )
    theirs.means_, theirs.covars_ = model.emission.mean.numpy(), model.emission.covariance_matrix.numpy()
    compare(model, theirs, [x[b, :n].numpy() for b, n in enumerate(LENGTHS)], x)
