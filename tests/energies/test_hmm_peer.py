"""Fitting beside hmmlearn: the same log-likelihood at every iteration from the same start."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thalweg.energies import HMM, GaussianEmission, MixtureEmission

hmm = pytest.importorskip("hmmlearn.hmm", reason="hmmlearn is not installed: pip install hmmlearn")

C, D, J, V = 3, 2, 2, 5
LENGTHS = [40, 25, 35]
STEPS = 8


def draws(seed: int = 0):
    rng = np.random.default_rng(seed)
    rows = [rng.dirichlet(np.ones(C) * 3, size=n) for n in (1, C)]
    centres = rng.normal(size=(C, D)) * 3
    labels = np.repeat(np.arange(20) % C, 5)
    x = centres[labels] + rng.normal(size=(100, D)) @ rng.normal(size=(D, D))
    return rng, rows[0][0], rows[1], centres + rng.normal(size=(C, D)), x


def spread(rng, *shape):
    """Random covariance matrices."""
    A = rng.normal(size=(*shape, D, D))
    return A @ np.swapaxes(A, -1, -2) + 2 * np.eye(D)


def ours(pi, P, emission, **settings) -> HMM:
    return HMM(torch.tensor(pi), torch.tensor(P), emission, max_iter=STEPS, tol=-np.inf, **settings)


def split(x: np.ndarray) -> list[np.ndarray]:
    return np.split(x, np.cumsum(LENGTHS)[:-1])


def compare(model: HMM, theirs, x: np.ndarray, bound: float = 1e-9) -> None:
    theirs.n_iter, theirs.tol = STEPS, -np.inf
    theirs.monitor_.n_iter, theirs.monitor_.tol = STEPS, -np.inf
    theirs.fit(x, LENGTHS)
    model.fit(x, LENGTHS)
    np.testing.assert_allclose(model.history_, list(theirs.monitor_.history), rtol=bound)
    np.testing.assert_allclose(model.log_initial.detach().exp().numpy(), theirs.startprob_, atol=1e-7)
    np.testing.assert_allclose(model.log_transition.detach().exp().numpy(), theirs.transmat_, atol=1e-7)
    assert model.score(x, LENGTHS) == pytest.approx(theirs.score(x, LENGTHS), rel=bound)
    best, path = theirs.decode(x, LENGTHS)
    rows = [torch.tensor(row).squeeze(1) if row.dtype == int else torch.tensor(row) for row in split(x)]
    assert sum(model.viterbi(row[None])[0].item() for row in rows) == pytest.approx(best, rel=bound)
    if x.dtype == float:  # symbols can be exchanged at no cost: their best path is one of several
        assert model.predict(x, LENGTHS).tolist() == path.tolist()
    np.testing.assert_allclose(model.predict_proba(x, LENGTHS), theirs.predict_proba(x, LENGTHS), atol=1e-6)


@pytest.mark.parametrize("pseudo_count", [0.0, 0.5])
def test_symbols(pseudo_count):
    rng, pi, P, _, _ = draws()
    table = rng.dirichlet(np.ones(V), size=C)
    x = rng.integers(V, size=(100, 1))
    prior = dict.fromkeys(("startprob_prior", "transmat_prior", "emissionprob_prior"), 1 + pseudo_count)
    theirs = hmm.CategoricalHMM(C, n_features=V, init_params="", **prior)
    theirs.startprob_, theirs.transmat_, theirs.emissionprob_ = pi, P, table
    model = ours(pi, P, torch.tensor(table), pseudo_count=pseudo_count)
    compare(model, theirs, x)
    np.testing.assert_allclose(model.log_emission.detach().exp().numpy(), theirs.emissionprob_, atol=1e-7)


def test_zeros_stay():
    rng, _, _, _, _ = draws()
    pi, P = np.array([1.0, 0.0, 0.0]), np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.3, 0.0, 0.7]])
    table = rng.dirichlet(np.ones(V), size=C)
    table[0, 0] = 0.0
    table /= table.sum(1, keepdims=True)
    x = rng.integers(1, V, size=(100, 1))
    theirs = hmm.CategoricalHMM(C, n_features=V, init_params="")
    theirs.startprob_, theirs.transmat_, theirs.emissionprob_ = pi, P, table
    model = ours(pi, P, torch.tensor(table))
    compare(model, theirs, x)
    assert torch.equal(torch.isneginf(model.log_transition), torch.tensor(P) == 0)


THEIRS = {"diagonal": "diag"}  # what hmmlearn calls a kind of covariances


def covariances_of(rng, kind: str, *shape: int) -> np.ndarray:
    return {
        "spherical": lambda: rng.random(shape) + 1,
        "diagonal": lambda: rng.random((*shape, D)) + 1,
        "tied": lambda: spread(rng, *shape[:-1]),
        "full": lambda: spread(rng, *shape),
    }[kind]()


@pytest.mark.parametrize("kind", ["spherical", "diagonal", "tied", "full"])
def test_gaussians(kind):
    rng, pi, P, means, x = draws()
    covariances = covariances_of(rng, kind, C)
    theirs = hmm.GaussianHMM(C, THEIRS.get(kind, kind), covars_prior=0.0, init_params="")
    theirs.startprob_, theirs.transmat_, theirs.means_ = pi, P, means
    theirs.covars_ = covariances
    if kind == "spherical":
        theirs._covars_ = np.tile(covariances[:, None], (1, D))  # a row of its own, as hmmlearn keeps it later
    model = ours(pi, P, GaussianEmission(means, covariances, kind))
    compare(model, theirs, x)
    np.testing.assert_allclose(model.emits.means.detach().numpy(), theirs.means_, atol=1e-6)


class Centred(hmm.GMMHMM):
    """hmmlearn takes a mixture's covariances around the means of the step before; EM's maximum is around the new."""

    def _do_mstep(self, stats):
        before = self.means_.copy()
        super()._do_mstep(stats)
        away = self.means_ - before  # (C, J, D)
        shares = stats["post_mix_sum"]
        if self.covariance_type == "diag":
            self.covars_ = self.covars_ - away**2
        elif self.covariance_type == "spherical":
            self.covars_ = self.covars_ - (away**2).mean(-1)
        elif self.covariance_type == "full":
            self.covars_ = self.covars_ - away[..., :, None] * away[..., None, :]
        else:
            outer = np.einsum("cj,cjd,cje->cde", shares, away, away)
            self.covars_ = self.covars_ - outer / shares.sum(1)[:, None, None]


@pytest.mark.parametrize("kind", ["spherical", "diagonal", "tied", "full"])
def test_mixtures(kind):
    rng, pi, P, means, x = draws()
    means = means[:, None] + rng.normal(size=(C, J, D))
    weights = rng.dirichlet(np.ones(J) * 4, size=C)
    covariances = covariances_of(rng, kind, C, J)
    # hmmlearn's priors, such that they have no effect: its default for spherical ones has some unless J = D.
    prior = {"covars_prior": -(D + 2) / 2, "covars_weight": 0.0} if kind == "spherical" else {}
    theirs = Centred(C, J, covariance_type=THEIRS.get(kind, kind), init_params="", **prior)
    theirs.startprob_, theirs.transmat_, theirs.means_ = pi, P, means
    theirs.weights_, theirs.covars_ = weights, covariances
    model = ours(pi, P, MixtureEmission(weights, means, covariances, kind))
    compare(model, theirs, x)
    np.testing.assert_allclose(model.emits.log_weights.detach().exp().numpy(), theirs.weights_, atol=1e-6)


def test_in_single_precision():
    _, pi, P, means, x = draws()
    theirs = hmm.GaussianHMM(C, "diag", covars_prior=0.0, init_params="", n_iter=STEPS, tol=-np.inf)
    theirs.startprob_, theirs.transmat_, theirs.means_, theirs.covars_ = pi, P, means, np.ones((C, D))
    theirs.fit(x, LENGTHS)
    single = [torch.tensor(v, dtype=torch.float32) for v in (pi, P, means)]
    model = HMM(single[0], single[1], GaussianEmission(single[2]), max_iter=STEPS, tol=-np.inf)
    model.fit(x.astype(np.float32), LENGTHS)
    assert model.emits.means.dtype == torch.float32
    np.testing.assert_allclose(model.history_, list(theirs.monitor_.history), rtol=2e-6)


def test_the_comparison_can_fail():
    _, pi, P, means, x = draws()
    theirs = hmm.GaussianHMM(C, "diag", covars_prior=1.0, init_params="")  # a prior that counts
    theirs.startprob_, theirs.transmat_, theirs.means_, theirs.covars_ = pi, P, means, np.ones((C, D))
    with pytest.raises(AssertionError):
        compare(ours(pi, P, GaussianEmission(means)), theirs, x)
