"""The VAE against linear-Gaussian models whose likelihood is known, quadrature, and its own definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oracles import linear_gaussian
from thalweg.energies import VAE, VAEConfig, VAETraining
from thalweg.errors import NotFittedError, ThalwegError
from thalweg.inference import expectation, linear_anneal
from thalweg.learning import Trainer, TrainerConfig, losses

QUICK = VAETraining(epochs=2, batch_size=16)


def images(N: int = 40, shape: tuple[int, ...] = (6, 5), seed: int = 0) -> Tensor:
    return (torch.rand(N, *shape, generator=torch.Generator().manual_seed(seed)) > 0.6).float()


def factor_data(N: int = 200) -> np.ndarray:
    draw = np.random.default_rng(2)
    return draw.normal(size=(N, 2)) @ draw.normal(size=(2, 4)) * 1.2 + 0.5 * draw.normal(size=(N, 4)) + 1


def linear_vae(X: np.ndarray) -> tuple[VAE, np.ndarray, float]:
    """A VAE without hidden layers whose decoder is the closed-form pPCA solution and whose encoder its posterior."""
    D, (values, vectors) = X.shape[1], np.linalg.eigh(np.cov(X.T, bias=True))
    values, vectors = values[::-1], vectors[:, ::-1]
    noise = values[2:].mean()
    W, mean = vectors[:, :2] * np.sqrt(values[:2] - noise), X.mean(0)
    gain = W.T @ np.linalg.inv(W @ W.T + noise * np.eye(D))
    spread = np.sqrt(np.diag(np.eye(2) - gain @ W))  # columns of W are orthogonal, and so the posterior is diagonal
    model = VAE(VAEConfig(shape=(D,), hidden=(), likelihood="gaussian")).double()
    encode, decode = model.encoder[1], model.decoder[0]
    assert isinstance(encode, nn.Linear)
    assert isinstance(decode, nn.Linear)
    assert model.log_scale is not None
    raw = 8 * np.arctanh(np.log(spread) / 8)
    with torch.no_grad():
        encode.weight.copy_(torch.tensor(np.concatenate([gain, np.zeros_like(gain)])))
        encode.bias.copy_(torch.tensor(np.concatenate([-gain @ mean, raw])))
        decode.weight.copy_(torch.tensor(W))
        decode.bias.copy_(torch.tensor(mean))
        model.log_scale.fill_(0.5 * math.log(noise))
    return model, W, noise


def test_v1_linear_vae_at_the_maximum_is_probabilistic_pca() -> None:
    """Every sample of z gives the likelihood itself, for the encoder is the posterior."""
    X = factor_data()
    model, W, noise = linear_vae(X)
    exact = linear_gaussian.log_likelihood(W, X.mean(0), np.full(4, noise), X)
    for samples in (1, 5):
        np.testing.assert_allclose(model.score_samples(X, samples), exact, atol=1e-8, rtol=0)
    best, _ = linear_gaussian.ppca_maximum(X, 2)
    assert model.score(X) == pytest.approx(best, abs=1e-8)


def test_v1_linear_vae_gap_is_the_divergence() -> None:
    """A spoilt encoder: the bound by quadrature is the likelihood less KL(q || posterior)."""
    X = factor_data(20)
    model, W, noise = linear_vae(X)
    with torch.no_grad():
        encode = model.encoder[1]
        encode.weight += 0.1
        encode.bias += torch.tensor([0.2, -0.3, 0.1, -0.2])
        x = torch.tensor(X)
        q = model.posterior(x)
        bound = expectation(lambda z: -model.energy(x, z), q, estimator="quadrature", samples=2) + q.entropy()
    means, covariance = linear_gaussian.posterior(W, X.mean(0), np.full(4, noise), X)
    exact = linear_gaussian.log_likelihood(W, X.mean(0), np.full(4, noise), X)
    gaps = [
        linear_gaussian.gaussian_kl(m, np.diag(s**2), p, covariance)
        for m, s, p in zip(q.mean.numpy(), q.stddev.numpy(), means, strict=True)
    ]
    np.testing.assert_allclose(exact - bound.numpy(), gaps, atol=1e-8, rtol=0)
    # forward has the same expectation: its divergence is exact, and the rest sampled.
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = -torch.stack([model(x, samples=50) for _ in range(100)])
    error = drawn.std(0) / 10
    assert bool(((drawn.mean(0) - bound).abs() < 4.5 * error).all())


def test_linear_vae_learns_probabilistic_pca() -> None:
    X = factor_data()
    how = VAETraining(epochs=600, batch_size=200, learning_rate=0.03, samples=4)
    model = VAE(VAEConfig(shape=(4,), hidden=(), likelihood="gaussian"), fitting=how).double().fit(X)
    best, noise = linear_gaussian.ppca_maximum(X, 2)
    assert best - 0.05 < model.score(X) < best + 1e-6
    assert model.log_scale is not None
    assert math.exp(2 * float(model.log_scale.detach())) == pytest.approx(noise, rel=0.1)
    assert model.history_[-1] > model.history_[0]


@pytest.mark.parametrize("network", ["dense", "convolution"])
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_energy_by_hand(network, likelihood) -> None:
    config = VAEConfig(shape=(3, 5, 4), latent=3, network=network, hidden=(4, 6), likelihood=likelihood)
    model, x = VAE(config).double(), images(2, (3, 5, 4)).double()
    z = torch.randn(7, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = model.energy(x, z)
    assert found.shape == (7, 2)
    for s in range(7):
        for b in range(2):
            out = model.decoder(z[s, b].unsqueeze(0))[0]
            if likelihood == "bernoulli":
                p = torch.sigmoid(out)
                fit = (x[b] * p.log() + (1 - x[b]) * (1 - p).log()).sum()
            else:
                fit = (-0.5 * (x[b] - out) ** 2 - 0.5 * math.log(2 * math.pi)).sum()
            prior = (-0.5 * z[s, b] ** 2 - 0.5 * math.log(2 * math.pi)).sum()
            torch.testing.assert_close(found[s, b], -(fit + prior), rtol=1e-10, atol=1e-10)


def test_free_energy_falls_to_that_of_quadrature() -> None:
    """A latent of size 2 can be summed over on a grid: bounds by 1, 8 and 4,000 samples against it."""
    x = images(30)
    model = VAE(VAEConfig(shape=(6, 5), hidden=(16,)), fitting=VAETraining(epochs=40, batch_size=10)).fit(x).double()
    x = x.double()
    grid = torch.linspace(-6, 6, 241, dtype=torch.float64)
    z = torch.cartesian_prod(grid, grid).unsqueeze(1)
    with torch.no_grad():
        cells = torch.cat([(-model.energy(item.unsqueeze(0), z)).logsumexp(0) for item in x])
        exact = cells + 2 * math.log(12 / 240)
        torch.manual_seed(0)
        once, few = (torch.stack([model.free_energy(x, k) for _ in range(200)]).mean(0) for k in (1, 8))
        many = model.free_energy(x, 4000)
    assert float(once.mean()) > float(few.mean()) > float(-exact.mean())
    torch.testing.assert_close(many, -exact, rtol=0, atol=0.05)


def test_gradients_reach_every_weight_and_agree_with_differences() -> None:
    model = VAE(VAEConfig(shape=(4,), hidden=(3,), likelihood="gaussian", latent=2)).double()
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        torch.manual_seed(3)  # the same noise each time
        return model(x, weight=0.7, samples=2).sum()

    loss().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        with torch.no_grad():
            first = parameter.view(-1)
            kept = first[0].clone()
            first[0] = kept + 1e-6
            up = float(loss())
            first[0] = kept - 1e-6
            down = float(loss())
            first[0] = kept
        assert float(parameter.grad.view(-1)[0]) == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-6)


def test_seed_fixes_the_fit_and_nothing_else_is_touched() -> None:
    x = images()
    config = VAEConfig(shape=(6, 5), hidden=(8,))
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    first, second = (VAE(config, fitting=QUICK, random_state=4).fit(x) for _ in range(2))
    scores = first.score_samples(x), second.score_samples(x)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert torch.equal(*scores)
    assert not torch.equal(VAE(config, fitting=QUICK, random_state=5).fit(x).transform(x), first.transform(x))
    again = first.fit(x).state_dict()
    assert all(map(torch.equal, again.values(), second.state_dict().values()))


@pytest.mark.parametrize("shape", [(1,), (7,), (5, 9), (1, 1), (3, 6, 4), (2, 11, 11)])
@pytest.mark.parametrize("network", ["dense", "convolution"])
def test_shapes(shape: tuple[int, ...], network) -> None:
    if network == "convolution" and len(shape) == 1:
        with pytest.raises(ThalwegError, match=r"needs model\.shape"):
            VAEConfig(shape=shape, network=network)
        return
    x = images(6, shape)
    model = VAE(VAEConfig(shape=shape, network=network, hidden=(4, 4, 4)), fitting=QUICK).fit(x)
    assert model.transform(x).shape == (6, 2)
    assert model.reconstruct(x).shape == x.shape
    assert model.sample(3).shape == (3, *shape)
    assert set(model.sample(50).unique().tolist()) <= {0.0, 1.0}
    assert model.latent_map(4).shape == (4, 4, *shape)
    flat = model.reconstruct(x.flatten(1).numpy())
    assert isinstance(flat, np.ndarray)
    np.testing.assert_allclose(flat, model.reconstruct(x).numpy(), rtol=1e-5, atol=1e-6)


def test_samples_follow_the_generator() -> None:
    model = VAE(VAEConfig(shape=(3,), likelihood="gaussian", scale=0.5, hidden=(4,)))
    draws = [model.sample(20_000, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*draws)
    means = model.sample(20_000, means=True, generator=torch.Generator().manual_seed(1))
    assert float((draws[0] - means).std()) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("annealing", ["linear", "cyclic"])
def test_annealing_weakens_the_divergence_at_first(annealing) -> None:
    x, config = images(), VAEConfig(shape=(6, 5), hidden=(8,))
    plain = VAE(config, fitting=VAETraining(epochs=1, batch_size=8)).fit(x)
    how = VAETraining(epochs=1, batch_size=8, annealing=annealing, annealing_epochs=4)
    gentle = VAE(config, fitting=how).fit(x)
    assert gentle.history_[0] > plain.history_[0]


def test_free_bits_keep_a_dimension_alive() -> None:
    """Data without structure: the posterior collapses to the prior, unless some nats are free."""
    x = images(200)
    nats = []
    for free in (0.0, 0.5):
        how = VAETraining(epochs=40, batch_size=50, learning_rate=0.01, free_bits=free)
        nats.append(VAE(VAEConfig(shape=(6, 5), hidden=(8,)), fitting=how).fit(x).divergences(x).detach().mean(0))
    assert float(nats[0].min()) < 0.2
    assert float(nats[1].min()) > 0.35


def test_the_trainer_trains_it(tmp_path) -> None:
    x = images(32)
    x[:, :3] = 1  # what is always so is learned in a few steps

    class Batches:
        def __len__(self) -> int:
            return 4

        def iterate(self, n: int, start: int = 0):
            yield from x.split(8)[start:]

    model = VAE(VAEConfig(shape=(6, 5), hidden=(8,)))
    with torch.no_grad():
        before = model.score(x)
    trainer = Trainer(
        model,
        TrainerConfig(epochs=8, device="cpu", learning_rate=0.01, metric="loss"),
        loss=lambda model, batch, moment: (model(batch, weight=linear_anneal(moment.step, 8)).sum(), len(batch)),
        evaluate=lambda model: {"loss": -model.score(x)},
        directory=tmp_path,
        meta={},
    )
    assert trainer.fit(Batches()).finished == "epochs"
    assert model.score(x) > before + 1


def test_scikit_learn_takes_it_as_one_of_its_own() -> None:
    from sklearn.base import clone
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    X = images(30).flatten(1).numpy()
    model = VAE(VAEConfig(shape=(30,), hidden=(6,)), fitting=QUICK, random_state=3)
    twin = clone(model)
    assert twin is not model
    assert twin.get_params() == model.get_params()
    assert make_pipeline(MinMaxScaler(), twin).fit_transform(X).shape == (30, 2)
    assert np.isfinite(cross_val_score(twin, X, cv=2)).all()
    changed = clone(model).set_params(config=VAEConfig(shape=(30,), latent=3, hidden=(6,)))
    assert changed.fit(X).transform(X).shape == (30, 3)


# Checks of scikit-learn that cannot hold, each with the reason.
EXPECTED_TO_FAIL = {
    "check_no_attributes_set_in_init": "`training` is a public attribute of every torch module",
    "check_do_not_raise_errors_in_init_or_set_params": "a config is a model at once, so a wrong one is refused at once",
    "check_methods_sample_order_invariance": "`score_samples` is drawn: a row's noise depends on its place",
    "check_methods_subset_invariance": "`score_samples` is drawn: a row's noise depends on its place",
}


@pytest.mark.filterwarnings("ignore:Estimator VAE does not inherit:UserWarning")
@pytest.mark.filterwarnings("ignore:.*occurred during set_params:UserWarning")
@pytest.mark.filterwarnings("ignore:Estimator's parameters changed after set_params:UserWarning")
def test_the_checks_of_scikit_learn_pass_but_for_those_named() -> None:
    from sklearn.utils.estimator_checks import check_estimator

    model = VAE(fitting=VAETraining(epochs=2))
    found = check_estimator(model, expected_failed_checks=EXPECTED_TO_FAIL, on_skip=None, on_fail="raise")
    status = {each["check_name"]: each["status"] for each in found}
    assert {name for name, what in status.items() if what == "xfail"} == EXPECTED_TO_FAIL.keys()
    assert sum(what == "passed" for what in status.values()) > 35


def test_without_a_config_the_data_gives_the_shape() -> None:
    x = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(0))
    model = VAE(fitting=QUICK, random_state=1)
    for ask in (lambda: model(x), lambda: model.sample(), lambda: model.transform(x), lambda: model.latent_map()):
        with pytest.raises(NotFittedError, match="this VAE has no parameters yet: call `fit` first"):
            ask()
    assert model.fit(x).reconstruct(x).shape == x.shape
    assert model.get_params()["config"] is None
    same = VAE(VAEConfig(shape=(3, 4), likelihood="gaussian"), fitting=QUICK, random_state=1).fit(x)
    assert torch.equal(same.transform(x), model.transform(x))
    assert model.fit(x[:, :, 0].numpy()).sample(2).shape == (2, 3)  # a fit begins anew


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("network", ["dense", "convolution"])
def test_a_gpu_fits_it_too(network) -> None:
    x = torch.rand(20, 6, 5, generator=torch.Generator().manual_seed(0)).cuda()
    there = VAE(fitting=QUICK).fit(x)
    other = VAE(VAEConfig(shape=(6, 5), network=network, hidden=(4, 4)), fitting=QUICK).cuda().fit(x)
    for model in (there, other):
        assert all(weight.is_cuda for weight in model.parameters())
        assert model.transform(x).is_cuda
        assert model.sample(2).is_cuda
        here = model.reconstruct(x.cpu().numpy())
        assert isinstance(here, np.ndarray)
        assert np.allclose(here, model.cpu().reconstruct(x.cpu().numpy()), atol=1e-4)


@pytest.mark.parametrize("loss", [losses.hinge, losses.log, losses.square_square])
def test_losses_of_energies_take_it(loss: Any) -> None:
    """A classifier of two models, and pairs of a right and a wrong x: gradients reach every weight."""
    models = [VAE(VAEConfig(shape=(4,), likelihood="gaussian", hidden=(3,)), random_state=n) for n in range(2)]
    x, gold = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0, 1])
    energies = torch.stack([model.free_energy(x, samples=4) for model in models], dim=1)
    value = losses.nll(energies, gold).sum() + loss(models[0](x), models[0](x + 1)).sum()
    value.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for m in models for weight in m.parameters())


BERNOULLI, GAUSSIAN = (VAE(VAEConfig(shape=(2, 2), likelihood=name, hidden=(3,))) for name in ("bernoulli", "gaussian"))
SIX: Any = VAE(VAEConfig(shape=(6,), latent=3, hidden=(3,)))


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: BERNOULLI.energy(torch.zeros(2, 3, 3), torch.zeros(2, 2)), "(B, 2, 2), got (2, 3, 3)"),
        (lambda: BERNOULLI.fit(np.zeros((3, 5))), "X has 5 features, but VAE is expecting 4"),
        (lambda: BERNOULLI.fit(np.full((3, 4), 2.0)), "values in [0, 1], got 2 to 2; scale them"),
        (lambda: BERNOULLI(torch.full((3, 4), -0.5)), "values in [0, 1], got -0.5 to -0.5"),
        (lambda: BERNOULLI(torch.full((3, 4), math.nan)), "values in [0, 1], got NaN"),
        (lambda: GAUSSIAN.fit(np.ones((3, 4))), "X has one distinct point in 3 sample(s)"),
        (lambda: BERNOULLI.fit(np.zeros((0, 2, 2))), "X is empty: 0 sample(s)"),
        (lambda: BERNOULLI.fit(np.array([[{}]], dtype=object)), "X must hold numbers"),
        (lambda: VAE().set_params(config=3).fit(np.zeros((2, 2))), "`config` must be a VAEConfig, got int"),
        (lambda: GAUSSIAN(torch.full((3, 4), math.nan)), "must be finite, got NaN"),
        (lambda: GAUSSIAN(torch.full((3, 4), math.inf)), "must be finite, got NaN or infinite"),
        (lambda: GAUSSIAN.fit([[0.0, 1.0, math.nan, 0.0]]), "X contains NaN at row 0, column 2"),
        (lambda: GAUSSIAN(torch.zeros(3, 4, dtype=torch.long)), "must be floating point"),
        (lambda: GAUSSIAN.energy(torch.zeros(3, 4), torch.zeros(3, 5)), "`z` must be (..., 2), got (3, 5)"),
        (lambda: GAUSSIAN.free_energy(torch.zeros(3, 4), 0), "at least 1, got 0"),
        (lambda: GAUSSIAN.score_samples(np.zeros((3, 4)), samples=-1), "at least 1, got -1"),
        (lambda: GAUSSIAN.sample(0), "`n` must be an integer of at least 1, got 0"),
        (lambda: SIX.latent_map(), "needs latent = 2"),
        (lambda: VAEConfig(shape=(4,), latent=0), "model.latent must be at least 1, got 0"),
        (lambda: VAEConfig(shape=()), "model.shape must be"),
        (lambda: VAEConfig(shape=(4,), hidden=(0,)), "model.hidden must be"),
        (lambda: VAEConfig(shape=(4,), likelihood="bernouli"), "did you mean `bernoulli`?"),
        (lambda: VAEConfig(shape=(4,), network="convolutional"), "did you mean `convolution`?"),
        (lambda: VAEConfig(shape=(4,), activation="relo"), "did you mean `relu`?"),
        (lambda: VAEConfig(shape=(4,), scale=-1.0), "model.scale must be 0 or more"),
        (lambda: VAETraining(samples=0), "training.samples must be at least 1"),
        (lambda: VAETraining(epochs=0), "training.epochs must be at least 1"),
        (lambda: VAETraining(annealing="lineal"), "did you mean `linear`?"),
        (lambda: VAETraining(free_bits=math.nan), "training.free_bits must be 0 or more"),
        (lambda: VAE((4,)), "`config` must be a VAEConfig, got tuple"),
        (lambda: VAE(VAEConfig(shape=(4,)), random_state=-1), "model.random_state must be 0 or more"),
        (lambda: VAE(VAEConfig(shape=(2**20,), hidden=(2**20,))), "lower `hidden`"),
    ],
)
def test_errors_are_one_line(call: Any, line: str) -> None:
    with pytest.raises(ThalwegError) as caught:
        call()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
