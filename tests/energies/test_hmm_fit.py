"""Learning a hidden Markov model: against an enumeration of all paths, its laws, and what it refuses."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributions as td

from oracles import hidden_markov as oracle
from thalweg.energies import (
    HMM,
    CategoricalEmission,
    GaussianEmission,
    MixtureEmission,
    choose_size,
    left_to_right,
)
from thalweg.errors import ConfigError, InfeasibleError, NotFittedError, ShapeError, ThalwegError
from thalweg.kernels.potentials import SparseTransitions
from thalweg.learning import losses

C, V, D = 3, 4, 2
LENGTHS = [4, 1, 3]
OBSERVED = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
EVERY = ["spherical", "diagonal", "tied", "full"]


def rows(*shape: int, seed: int) -> Tensor:
    weights = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2
    return weights / weights.sum(-1, keepdim=True)


def normals(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ramp(seed: int = 0, n: int = 6, length: int = 40) -> tuple[Tensor, Tensor]:
    """States and vectors of three well separated states."""
    means = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    P = torch.full((3, 3), 0.1, dtype=torch.float64) + 0.7 * torch.eye(3, dtype=torch.float64)
    model = HMM(torch.full((3,), 1 / 3, dtype=torch.float64), P, GaussianEmission(means))
    return model.sample(length, n, generator=torch.Generator().manual_seed(seed))


# One step, by enumeration


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("tied", [None, [0, 1, 0]])
def test_a_step_on_symbols_is_that_of_enumeration(missing, tied):
    pi, P, E = rows(C, seed=1), rows(C, C, seed=2), rows(C if tied is None else 2, V, seed=3)
    kinds = list(range(C)) if tied is None else tied
    x = torch.randint(V, (3, 4), generator=torch.Generator().manual_seed(4))
    known = OBSERVED if missing else torch.ones(3, 4, dtype=torch.bool)
    densities = [
        [E[kinds, x[b, t]].tolist() if known[b, t] else None for t in range(length)] for b, length in enumerate(LENGTHS)
    ]
    total, first, moves, posteriors = oracle.posteriors(pi.tolist(), P.tolist(), densities)
    counts = np.zeros((len(E), V))
    for b, states in enumerate(posteriors):
        for t in range(LENGTHS[b]):
            if known[b, t]:
                np.add.at(counts[:, x[b, t]], kinds, states[t])
    model = HMM(pi, P, E, tied=tied, max_iter=1).fit(x, LENGTHS, observed=OBSERVED if missing else None)
    assert model.history_ == [pytest.approx(total, rel=1e-12)]
    np.testing.assert_allclose(model.log_initial.exp().tolist(), oracle.rows(first), rtol=1e-10)
    np.testing.assert_allclose(model.log_transition.exp().tolist(), oracle.rows(moves), rtol=1e-10)
    np.testing.assert_allclose(model.emits.log_table.exp().tolist(), oracle.rows(counts), rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("missing", [False, True])
def test_a_step_on_vectors_is_that_of_enumeration(kind, missing):
    pi, P, means = rows(C, seed=1), rows(C, C, seed=2), normals(C, D, seed=3)
    x = normals(3, 4, D, seed=5) + 30  # far from 0: moments must not cancel
    means = means + 30
    known = OBSERVED if missing else torch.ones(3, 4, dtype=torch.bool)
    S = np.eye(D) * 1.5
    densities = [
        [[oracle.normal(x[b, t].numpy(), m.numpy(), S) for m in means] if known[b, t] else None for t in range(length)]
        for b, length in enumerate(LENGTHS)
    ]
    total, first, moves, posteriors = oracle.posteriors(pi.tolist(), P.tolist(), densities)
    values = np.array([x[b, t].tolist() for b, n in enumerate(LENGTHS) for t in range(n) if known[b, t]])
    weights = np.array([posteriors[b][t] for b, n in enumerate(LENGTHS) for t in range(n) if known[b, t]])
    moments = [oracle.weighted_moments(values, weights[:, c]) for c in range(C)]
    shares = weights.sum(0) / weights.sum()
    expected = {
        "spherical": [np.trace(S) / D for _, S in moments],
        "diagonal": [np.diag(S) for _, S in moments],
        "tied": sum(share * S for share, (_, S) in zip(shares, moments, strict=True)),
        "full": [S for _, S in moments],
    }[kind]
    start = {"spherical": [1.5] * C, "diagonal": [[1.5] * D] * C, "tied": S, "full": [S] * C}[kind]
    emission = GaussianEmission(means, torch.tensor(np.array(start)), kind)
    model = HMM(pi, P, emission, max_iter=1, floor=1e-300).fit(x, LENGTHS, observed=OBSERVED if missing else None)
    assert model.history_ == [pytest.approx(total, rel=1e-12)]
    np.testing.assert_allclose(model.emits.means.tolist(), [m for m, _ in moments], rtol=1e-10)
    np.testing.assert_allclose(model.emits.covariances.tolist(), expected, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(model.log_initial.exp().tolist(), oracle.rows(first), rtol=1e-10)
    np.testing.assert_allclose(model.log_transition.exp().tolist(), oracle.rows(moves), rtol=1e-10)
    assert torch.equal(emission.means, means)  # what was given stays as it is


def test_a_step_on_mixtures_is_that_of_enumeration():
    pi, P, weights, means = rows(2, seed=1), rows(2, 2, seed=2), rows(2, 2, seed=3), normals(2, 2, D, seed=4)
    x, S = normals(2, 4, D, seed=5), np.eye(D)
    parts = np.array(
        [[[oracle.normal(v.numpy(), m.numpy(), S) for m in state] for state in means] for v in x.flatten(0, 1)]
    )
    parts = parts * weights.numpy()  # (M, K, J)
    together = parts.sum(2).reshape(2, 4, 2)
    total, _, _, posteriors = oracle.posteriors(pi.tolist(), P.tolist(), [list(row) for row in together])
    shares = np.concatenate(posteriors)[:, :, None] * parts / parts.sum(2, keepdims=True)
    model = HMM(pi, P, MixtureEmission(weights, means, covariance_type="full"), max_iter=1).fit(x)
    assert model.history_ == [pytest.approx(total, rel=1e-12)]
    np.testing.assert_allclose(model.emits.log_weights.exp().tolist(), oracle.rows(shares.sum(0)), rtol=1e-10)
    flat = x.flatten(0, 1).numpy()
    for k in range(2):
        for j in range(2):
            mean, covariance = oracle.weighted_moments(flat, shares[:, k, j])
            np.testing.assert_allclose(model.emits.means[2 * k + j].tolist(), mean, rtol=1e-9)
            np.testing.assert_allclose(model.emits.covariances[2 * k + j].tolist(), covariance, rtol=1e-7)


@pytest.mark.parametrize("kind", ["spherical", "diagonal"])
def test_vectors_known_in_part(kind):
    """Entries that are missing count for nothing: as if that dimension had been summed out."""
    pi, P, means = rows(2, seed=1), rows(2, 2, seed=2), normals(2, D, seed=3)
    x = normals(2, 3, D, seed=5)
    present = torch.rand(2, 3, D, generator=torch.Generator().manual_seed(6)) < 0.7
    present[0, 1] = False
    densities = [
        [
            None
            if not present[b, t].any()
            else [
                math.prod(
                    oracle.normal([v], [m], np.eye(1))
                    for v, m in zip(x[b, t][present[b, t]], row[present[b, t]], strict=True)
                )
                for row in means
            ]
            for t in range(3)
        ]
        for b in range(2)
    ]
    total, _, _, posteriors = oracle.posteriors(pi.tolist(), P.tolist(), densities)
    weights = np.concatenate(posteriors)[:, :, None] * present.flatten(0, 1).numpy()[:, None]  # (M, C, D)
    flat = x.flatten(0, 1).numpy()[:, None]
    expected = (weights * flat).sum(0) / weights.sum(0)
    around = (weights * (flat - expected) ** 2).sum(0)
    variances = around / weights.sum(0) if kind == "diagonal" else around.sum(1) / weights.sum((0, 2))
    x = x.masked_fill(~present, math.nan)
    model = HMM(pi, P, GaussianEmission(means, covariance_type=kind), max_iter=1).fit(x, observed=present)
    assert model.history_ == [pytest.approx(total, rel=1e-12)]
    np.testing.assert_allclose(model.emits.means.tolist(), expected, rtol=1e-10)
    np.testing.assert_allclose(model.emits.covariances.tolist(), variances, rtol=1e-8)
    with pytest.raises(ShapeError, match="take no vector in part"):
        HMM(pi, P, GaussianEmission(means, covariance_type="full")).fit(x, observed=present)


# Laws


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["categorical", "gaussian", "mixture"])
def test_v2_the_likelihood_never_falls_and_restarts_help(kind, dtype):
    states, x = ramp()
    data = (states + (x[..., 0] > 6)).long() if kind == "categorical" else x.to(dtype)
    model = HMM(emission=kind, n_states=3, max_iter=30, tol=1e-7).fit(data)
    gains = np.diff(model.history_)
    assert (gains > -1e-5 * abs(model.history_[-1])).all()
    assert model.history_[-1] > model.history_[0]
    more = HMM(emission=kind, n_states=3, max_iter=30, tol=1e-7, n_restarts=4).fit(data)
    assert more.history_[-1] >= model.history_[-1]
    again = HMM(emission=kind, n_states=3, max_iter=30, tol=1e-7, n_restarts=4).fit(data)
    assert again.history_ == more.history_  # a seed says it all


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("emission", ["gaussian", "mixture"])
def test_fitting_finds_the_states(kind, emission):
    states, x = ramp()
    model = HMM(n_states=3, emission=emission, covariance_type=kind, n_mix=2, n_restarts=3, max_iter=40).fit(x)
    found = model.predict(x)
    table = torch.zeros(3, 3)
    for i in range(3):
        table[i] = torch.bincount(found[states == i], minlength=3)
    assert table.amax(1).sum() / table.sum() > 0.95
    assert model.log_likelihood(x).sum().item() == pytest.approx(model.score(x))
    drawn = model.sample(5, 2, generator=torch.Generator().manual_seed(0))
    assert drawn[1].shape == (2, 5, D)


def test_a_fall_is_told_of(monkeypatch):
    _, x = ramp()
    sound = GaussianEmission.maximise
    calls = []

    def broken(self, statistics, limits):
        sound(self, statistics, limits)
        calls.append(1)
        if len(calls) == 4:
            with torch.no_grad():
                self.means.add_(3.0)

    monkeypatch.setattr(GaussianEmission, "maximise", broken)
    with pytest.raises(ThalwegError, match=r"must not fall, got -.* after -.* at iteration 3"):
        HMM(n_states=3, max_iter=10, tol=-math.inf).fit(x)


def test_structure_stays():
    pi, P = left_to_right(4, skip=1)
    x = torch.cat([torch.full((5, 6, 1), float(m)) for m in (0, 5, 9, 2)], 1).double()
    x = x + 0.3 * normals(*x.shape, seed=0)
    model = HMM(pi, P, "gaussian", max_iter=20).fit(x)
    assert bool(torch.isneginf(model.log_transition)[P == 0].all())
    assert torch.equal(torch.isneginf(model.log_initial), pi == 0)
    assert model.predict(x)[0].tolist() == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6
    with_prior = HMM(pi, P, "gaussian", max_iter=20, pseudo_count=0.5).fit(x)
    assert torch.equal(torch.isneginf(with_prior.log_transition), P == 0)
    assert (with_prior.log_transition.exp()[P > 0] > 0).all()
    cycle = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])
    other = HMM(transition=cycle, max_iter=5).fit(ramp()[1])
    assert torch.equal(torch.isneginf(other.log_transition), cycle == 0)


def test_sparse_transitions_learn_the_same():
    P = rows(C, C, seed=2)
    P[0, 2] = 0
    P = P / P.sum(-1, keepdim=True)
    sparse = SparseTransitions.of_dense(P.log())
    sparse = sparse._replace(scores=sparse.scores.exp())
    x = torch.randint(V, (4, 9), generator=torch.Generator().manual_seed(4))
    models = [HMM(rows(C, seed=1), moves, rows(C, V, seed=3), max_iter=5, tol=-math.inf) for moves in (P, sparse)]
    dense, edges = (model.fit(x, [9, 4, 1, 7]) for model in models)
    np.testing.assert_allclose(edges.history_, dense.history_, rtol=1e-12)
    torch.testing.assert_close(edges.log_transition.dense().exp(), dense.log_transition.exp())
    assert edges.free_parameters == dense.free_parameters == 2 + 5 + C * (V - 1)


def test_states_that_share_an_emission():
    """A minimum duration: a state of two that emit alike."""
    moves = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [0.3, 0.0, 0.7]])
    model = HMM(transition=moves, tied=[0, 0, 1], max_iter=5).fit(ramp()[1])
    assert model.emits.size == 2
    assert model.chain(ramp()[1]).num_labels == 3
    assert model.sample(4, 2)[1].shape == (2, 4, D)


def test_pseudo_counts_are_the_prior():
    x = torch.tensor([[0, 0, 1, 0]])
    model = HMM([1.0], [[1.0]], CategoricalEmission(symbols=3), pseudo_count=1.0).fit(x)
    np.testing.assert_allclose(model.log_emission.exp().tolist(), [[4 / 7, 2 / 7, 1 / 7]], rtol=1e-6)


@pytest.mark.parametrize("emission", ["categorical", "gaussian", "mixture"])
def test_the_gradient_climbs_to_where_em_does(emission):
    states, x = ramp(n=3, length=20)
    data = states if emission == "categorical" else x
    settings = {"n_states": 3, "emission": emission, "n_mix": 1, "max_iter": 60, "tol": 1e-8}
    em = HMM(**settings).fit(data)
    climbed = HMM(**settings, method="gradient").fit(data)
    assert climbed.score(data) == pytest.approx(em.score(data), abs=0.5)


@pytest.mark.parametrize("kind", EVERY)
def test_an_optimiser_trains_it(kind):
    _, x = ramp(n=2, length=20)
    covariances = torch.eye(D) if kind == "tied" else None
    model = HMM(
        torch.full((2,), 0.5), torch.tensor([[0.9, 0.1], [0.0, 1.0]]), GaussianEmission(torch.eye(2), covariances, kind)
    )
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"states", "emits"}
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    values = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimiser.step()
        values.append(loss.item())
    assert values[-1] < values[0] - 1
    assert torch.isneginf(model.log_transition[1, 0])
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_distribution_is_trained_by_gradient_and_left_alone_by_em():
    _, x = ramp(n=2, length=20)
    means = torch.eye(2, dtype=torch.float64).requires_grad_()
    half = torch.full((2, 2), 0.5, dtype=torch.float64)
    model = HMM(half[0], half, td.Independent(td.Normal(means, 1.0), 1), max_iter=4)
    model.log_likelihood(x).sum().backward()
    assert bool((means.grad != 0).any())
    before = means.detach().clone()
    model.fit(x)
    assert torch.equal(means.detach(), before)
    assert model.history_[-1] > model.history_[0]


def test_energies():
    model = HMM(rows(C, seed=1), rows(C, C, seed=2), rows(C, V, seed=3))
    x = torch.randint(V, (2, 3), generator=torch.Generator().manual_seed(4))
    every = torch.cartesian_prod(*[torch.arange(C)] * 3).unsqueeze(1).expand(-1, 2, -1)
    energies = model.energy(x, every)  # (27, B)
    torch.testing.assert_close(-(-energies).logsumexp(0), model.free_energy(x))
    torch.testing.assert_close(model.free_energy(x), -model.log_likelihood(x))
    torch.testing.assert_close(model.posterior(x).log_prob(every), -energies + model.free_energy(x))


def test_a_classifier_of_models():
    """Two models as two classes: the loss of their free energies trains both."""
    models = torch.nn.ModuleList([HMM(rows(2, seed=s), rows(2, 2, seed=s + 1), rows(2, V, seed=s + 2)) for s in (1, 5)])
    x = torch.tensor([[0, 0, 1, 0], [3, 3, 2, 3]])
    optimiser = torch.optim.Adam(models.parameters(), lr=0.1)
    for _ in range(20):
        optimiser.zero_grad()
        energies = torch.stack([model.free_energy(x) for model in models], 1)
        loss = losses.nll(energies, torch.tensor([0, 1])).mean()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.1
    assert losses.hinge(energies.diagonal(), energies.flip(1).diagonal()).shape == (2,)


# Forms of input


def test_every_form_gives_the_same():
    _, x = ramp(n=3, length=10)
    lengths = [10, 6, 3]
    parts = [row[:n] for row, n in zip(x, lengths, strict=True)]
    padded = x.clone()
    padded[1, 6:], padded[2, 3:] = math.nan, math.nan
    forms = {
        "padded": (padded, lengths),
        "list": (parts, None),
        "joined": (torch.cat(parts), lengths),
        "arrays": ([part.numpy() for part in parts], None),
        "array": (torch.cat(parts).numpy(), np.array(lengths)),
    }
    models = {name: HMM(n_states=2, max_iter=4).fit(*form) for name, form in forms.items()}
    expected = models["padded"]
    for name, (values, counts) in forms.items():
        model = models[name]
        np.testing.assert_allclose(model.history_, expected.history_, rtol=1e-12)
        states, chances = model.predict(values, counts), model.predict_proba(values, counts)
        scores = model.score_samples(values, counts)
        assert np.asarray(scores).shape == (3,)
        assert model.score(values, counts) == pytest.approx(float(sum(scores)))
        if name in ("list", "arrays"):
            assert [len(row) for row in states] == lengths
            assert isinstance(states[0], np.ndarray) == (name == "arrays")
            flat = np.concatenate([np.asarray(row) for row in states])
        elif name == "padded":
            assert states.shape == (3, 10)
            assert states[1, 6:].tolist() == [-1] * 4
            flat = np.concatenate([states[b, :n].numpy() for b, n in enumerate(lengths)])
        else:
            assert isinstance(states, np.ndarray) == (name == "array")
            assert chances.shape == (19, 2)
            flat = np.asarray(states)
        assert flat.tolist() == np.concatenate([models["array"].predict(p.numpy()) for p in parts]).tolist()


def test_symbols_in_every_form():
    model = HMM([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]], [[0.8, 0.2], [0.2, 0.8]])
    x = [0, 0, 1, 1, 0]
    assert model.predict(np.array(x)).shape == (5,)
    assert model.predict(np.array(x)[:, None]).tolist() == model.predict(torch.tensor([x]))[0].tolist()
    assert [row.tolist() for row in model.predict([x, x[:2]])] == [
        model.predict(np.array(y)).tolist() for y in (x, x[:2])
    ]
    column = HMM(emission="categorical", n_states=2, max_iter=2).fit(np.array(x)[:, None], [3, 2])
    assert column.history_ == HMM(emission="categorical", n_states=2, max_iter=2).fit([[0, 0, 1], [1, 0]]).history_
    assert column.log_emission.dtype == torch.float64


def test_states_and_pickles_and_state_dicts():
    _, x = ramp(n=2, length=15)
    model = HMM(n_states=2, covariance_type="full", max_iter=3).fit(x)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again.log_likelihood(x), model.log_likelihood(x))
    single = HMM(n_states=2, covariance_type="full", max_iter=3, random_state=5).fit(x)
    single.load_state_dict(model.state_dict())
    torch.testing.assert_close(single.log_likelihood(x), model.log_likelihood(x))


def test_settings_come_back_and_a_fit_begins_anew():
    _, x = ramp(n=2, length=15)
    model = HMM(n_states=2, max_iter=3)
    assert model.get_params()["n_states"] == 2
    first = model.fit(x).history_
    assert model.fit(x).history_ == first
    model.set_params(max_iter=4)
    assert len(model.predict(x)) == 2  # what was learned stays
    model.set_params(n_states=3)
    with pytest.raises(NotFittedError, match="call `fit` first"):
        model.predict(x)
    given = HMM([1.0, 0.0], [[0.5, 0.5], [0.0, 1.0]], [[0.5, 0.5], [0.1, 0.9]])
    given.set_params(transition=[[0.1, 0.9], [0.0, 1.0]])
    assert given.log_transition[0, 1].exp().item() == pytest.approx(0.9)


def test_the_number_of_states_is_found():
    _, x = ramp(n=4, length=50)
    found = choose_size(HMM(max_iter=30, n_restarts=2), x, [1, 2, 3, 4])
    assert found.best == 3 == found.model.num_states
    assert list(found.criteria) == [1, 2, 3, 4]
    k = 2 + 6 + 3 * D * 2
    assert found.model.free_parameters == k
    assert found.criteria[3] == pytest.approx(-2 * found.model.score(x) + k * math.log(200))
    assert choose_size(HMM(max_iter=5), x, [2], "aic").criteria[2] == pytest.approx(
        HMM(n_states=2, max_iter=5).fit(x).aic(x)
    )
    with pytest.raises(ShapeError, match="`n_states` must say C = 1"):
        choose_size(HMM([1.0]), x, [2])
    with pytest.raises(ConfigError, match="`counts` must be integers"):
        choose_size(HMM(), x, [0])


# What is refused or told of


def test_degenerate_states_are_told_of():
    x = torch.cat([torch.zeros(10, 1), 5 + normals(10, 1, seed=0)]).double()
    with pytest.warns(UserWarning, match=r"degenerate states after fitting: \d \(collapsed\); ask for fewer"):
        model = HMM(n_states=2).fit(x)
    assert [each.why for each in model.degenerate_] == ["collapsed"]
    far = GaussianEmission(torch.tensor([[0.0], [1e4]], dtype=torch.float64))
    with pytest.warns(UserWarning, match=r"1 \(unvisited\)"):
        model = HMM([1.0, 0.0], [[1.0, 0.0], [0.5, 0.5]], far).fit(normals(20, 1, seed=1))
    assert model.emits.means[1].item() == 1e4  # stays as it was
    with pytest.warns(UserWarning, match=r"1 \(unvisited\)"):
        HMM([1.0, 0.0], [[1.0, 0.0], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]).fit([[0, 1, 1]])


NONE = np.zeros((0, 2))


@pytest.mark.parametrize(
    ("settings", "X", "how", "message"),
    [
        ({"n_states": 2}, NONE, {}, r"X is empty: 0 sample\(s\)"),
        ({"n_states": 2}, [np.ones((3, 2)), NONE], {}, "sequence 1 is empty"),
        (
            {"n_states": 2},
            np.array([[0.0], [np.nan], [1.0]]),
            {},
            "X contains NaN at position 1 of batch item 0; mark what",
        ),
        ({"n_states": 2}, np.array([[0.0], [np.inf], [1.0]]), {}, r"X contains infinity \(inf\) at position 1"),
        ({"n_states": 2}, np.ones(5), {}, r"X must be \(n, D\) or \(B, T, D\), got \(5,\). Reshape your data"),
        ({"n_states": 2}, np.ones((1, 2, 3, 4)), {}, r"X must be \(n, D\)"),
        ({"n_states": 2}, [np.ones((3, 2)), np.ones((3, 1))], {}, r"one size, got \(2,\) in sequence 0 and \(1,\)"),
        ({"n_states": 2}, np.array([["a"], ["b"]], dtype=object), {}, "X must hold numbers"),
        ({"n_states": 2}, np.ones((5, 2)), {"lengths": [2, 2]}, "sum to the 5 observations of X, got 4"),
        ({"n_states": 2}, np.ones((5, 2)), {"lengths": [5, 0]}, "got 0 at place 1"),
        ({"n_states": 2}, np.ones((5, 2)), {"lengths": 2.5}, "`lengths` must be integers"),
        ({"n_states": 2}, np.ones((5, 2)), {"lengths": "ab"}, "`lengths` must be integers"),
        ({"n_states": 2}, [np.ones((5, 2))], {"lengths": [5]}, "`lengths` must be None with a list"),
        ({"n_states": 2}, np.ones((5, 2)), {"observed": np.ones(5)}, "`observed` must be bool"),
        ({"n_states": 2}, np.ones((5, 2)), {"observed": np.ones(4, dtype=bool)}, "`observed` must be bool with 5 rows"),
        ({"n_states": 2}, np.ones((5, 2)), {}, r"X has one distinct point in 5 sample\(s\)"),
        ({"n_states": 2, "emission": "mixture"}, np.ones((5, 2), dtype=int), {}, "one distinct point"),
        ({"n_states": 9}, np.ones((5, 2)), {}, "at most the number of observations, got 9 states for n_samples = 5"),
        ({}, np.ones((5, 2)), {}, "`n_states` must be given"),
        ({"n_states": 0}, None, {}, "`n_states` must be an integer of at least 1"),
        ({"n_states": 2, "emission": "gausian"}, None, {}, "`emission` is unknown: 'gausian'; did you mean `gaussian`"),
        ({"n_states": 2, "covariance_type": "round"}, None, {}, "`covariance_type` is unknown"),
        ({"n_states": 2, "n_mix": 0, "emission": "mixture"}, None, {}, "`n_mix` must be an integer"),
        ({"n_states": 2, "method": "vb"}, np.ones((5, 2)), {}, "`method` is unknown: 'vb'"),
        ({"n_states": 2, "max_iter": 0}, np.ones((5, 2)), {}, "max_iter must be at least 1"),
        ({"n_states": 2, "floor": 0.0}, np.ones((5, 2)), {}, "floor must be above 0"),
        ({"n_states": 2, "pseudo_count": -1.0}, np.ones((5, 2)), {}, "pseudo_count must be 0 or more"),
        ({"n_states": 3, "initial": [0.5, 0.5]}, None, {}, "`n_states` must say C = 2 states as `initial`, got 3"),
        ({"tied": [0, 2]}, None, {}, "`tied` must use every number"),
        ({"tied": [0.5]}, None, {}, "`tied` must be"),
        ({"n_states": 2, "emission": "categorical"}, np.array([0, 1, -1]), {}, "got -1 at position 2 of batch item 0"),
        ({"n_states": 2, "emission": "categorical"}, np.array([0.0, 1.0]), {}, "must be integers, symbols 0, 1, 2"),
        (
            {"n_states": 2, "emission": CategoricalEmission(symbols=2)},
            np.array([0, 1, 2]),
            {},
            r"must be symbols 0 ... 1, got 2 at position 2",
        ),
        ({"n_states": 2, "emission": GaussianEmission(np.eye(2))}, np.ones((5, 3)), {}, r"must have shape \(2,\)"),
        ({"emission": np.array([[{}]], dtype=object)}, None, {}, "`emission` must be a tensor"),
    ],
)
def test_what_does_not_fit(settings, X, how, message):
    with pytest.raises(ThalwegError, match=message) as caught:
        HMM(**settings).fit(X, **how)
    assert "\n" not in str(caught.value)


def test_asking_too_early_and_too_wide():
    with pytest.raises(NotFittedError, match="this HMM has no parameters yet: call `fit` first"):
        HMM(n_states=2).log_likelihood(torch.zeros(1, 2, 1))
    model = HMM(n_states=2, max_iter=1).fit(ramp()[1])
    with pytest.raises(ShapeError, match="X has 3 features, but HMM is expecting 2 features"):
        model.predict(np.ones((4, 3)))
    with pytest.raises(ShapeError, match=r"an observation must have shape \(2,\)"):
        model.log_likelihood(torch.ones(1, 4, 3))


def test_an_emission_in_a_graph_is_not_fitted():
    means = torch.zeros(2, 1).requires_grad_() * 1
    with pytest.raises(ConfigError, match="`emission` must be detached for `fit`"):
        HMM(n_states=2, emission=GaussianEmission(means)).fit(np.ones((5, 1)))
    table = torch.full((2, 2), 0.5).requires_grad_() * 1
    assert HMM(n_states=2, emission=table, max_iter=1).fit([[0, 1, 1]]).n_iter_ == 1


def test_data_that_the_structure_forbids():
    model = HMM([1.0, 0.0], [[0.5, 0.5], [0.0, 1.0]], [[1.0, 0.0], [0.5, 0.5]])
    with pytest.raises(InfeasibleError, match="batch item 1"):
        model.fit([[0, 0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianEmission(torch.zeros(2)), r"`means` must be \(K, D\)"),
        (lambda: GaussianEmission(torch.zeros(2, 1), torch.zeros(2, 1)), "variances above 0"),
        (lambda: GaussianEmission(torch.zeros(2, 2), -torch.eye(2), "tied"), "positive definite"),
        (lambda: GaussianEmission(torch.zeros(2, 2), torch.eye(2), "full"), r"must be \(2, 2, 2\) for full ones"),
        (lambda: MixtureEmission([[0.5, 0.5]], torch.zeros(1, 3, 2)), r"must be \(K, J\) and \(K, J, D\)"),
        (lambda: MixtureEmission([[0.5, 0.4]], torch.zeros(1, 2, 2)), "row 0 of `weights` must be probabilities"),
        (lambda: MixtureEmission(weights=[[1.0]]), "must be given together"),
        (lambda: CategoricalEmission(symbols=0), "`symbols` must be an integer"),
        (lambda: left_to_right(0), "`n` must be an integer of at least 1"),
        (lambda: left_to_right(2, stay=1.0), "`stay` must lie between 0 and 1"),
    ],
)
def test_emissions_that_do_not_fit(make, message):
    with pytest.raises(ThalwegError, match=message):
        make()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["categorical", "gaussian", "mixture"])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_fitting_on_a_gpu_is_the_same(kind, covariance):
    states, x = ramp()
    data = states if kind == "categorical" else x
    settings = {"n_states": 3, "emission": kind, "covariance_type": covariance, "max_iter": 8, "tol": -math.inf}
    here = HMM(**settings).fit(data, [40, 3, 7, 40, 1, 20])
    there = HMM(**settings).fit(data.cuda(), [40, 3, 7, 40, 1, 20])
    np.testing.assert_allclose(there.history_, here.history_, rtol=1e-6)
    assert there.predict(data.cuda()).is_cuda
    assert isinstance(there.predict(data.numpy()), np.ndarray)
