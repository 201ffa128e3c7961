"""Mixtures, hidden Markov models, autoencoders and score spaces that are given what nobody should: one line each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from thalweg.data.tables import read_table
from thalweg.energies import HMM, VAE, GaussianMixture, ScoreSpace, VAEConfig
from thalweg.energies.hmm.emissions import CategoricalEmission
from thalweg.energies.variational.config import VAETraining
from thalweg.errors import DataError, ThalwegError
from thalweg.files import write_tensors

NAN, INF, LARGE = math.nan, math.inf, 10**12
ROWS = np.random.default_rng(0).normal(size=(40, 2))
SHAPE = VAEConfig(shape=(2,), likelihood="gaussian", hidden=(4,))
BRIEF = VAETraining(epochs=1)


def spoiled(value: float) -> np.ndarray:
    rows = ROWS.copy()
    rows[3, 1] = value
    return rows


def mixture(**settings: Any) -> GaussianMixture:
    return GaussianMixture(2, **{"random_state": 0, "max_iter": 3, **settings})


def hmm(**settings: Any) -> HMM:
    return HMM(**{"n_states": 2, "max_iter": 3, **settings})


def vae(**settings: Any) -> VAE:
    return VAE(SHAPE, fitting=VAETraining(**{"epochs": 1, **settings}))


FITTED = {"mixture": mixture().fit(ROWS), "hmm": hmm().fit(ROWS), "vae": vae().fit(ROWS)}
MAKE: dict[str, Callable[..., Any]] = {"mixture": mixture, "hmm": hmm, "vae": vae}
ASKED = {
    "mixture": ("predict", "predict_proba", "score", "score_samples", "bic", "aic"),
    "hmm": ("predict", "predict_proba", "score", "score_samples", "bic", "aic"),
    "vae": ("transform", "reconstruct", "score", "score_samples"),
}
NO_TABLES = (
    *(None, "abc", [], [[]], [[1, 2], [3]], {}, 3, [None, None], object(), np.array([["a", "b"]])),
    *(ROWS[:0], ROWS[:, :0], ROWS.astype(complex), np.zeros((2, 2, 2, 2)), torch.ones(4, 2).to_sparse()),
)


def _tables() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, make in MAKE.items():
        for value in (NAN, INF, -INF):
            yield f"{name}: fit {value}", lambda make=make, value=value: make().fit(spoiled(value))
            for ask in ASKED[name]:
                yield f"{name}: {ask} {value}", partial(getattr(FITTED[name], ask), spoiled(value))
        for number, table in enumerate(NO_TABLES):
            yield f"{name}: table {number}", lambda make=make, table=table: make().fit(table)
    for value in (1e160, 1e300):
        yield f"mixture: square of {value}", lambda value=value: mixture().fit(spoiled(value))
        yield f"hmm: square of {value}", lambda value=value: hmm().fit(spoiled(value))
    for weight in (1e308, INF, NAN, -1.0, 0.0):
        yield f"weights {weight}", lambda weight=weight: mixture().fit(ROWS, sample_weight=np.full(40, weight))


def _settings() -> Iterator[tuple[str, Callable[[], object]]]:
    wrong = {
        "mixture": {"n_restarts": (0, NAN, None), "tol": (-1, NAN, "x"), "floor": (0, NAN, None), "max_iter": (0, 1.5)},
        "hmm": {"n_states": (0, LARGE, 1.5), "tol": (NAN, "x"), "floor": (0, NAN), "pseudo_count": (-1, NAN, INF)},
        "vae": {"learning_rate": (0, NAN, INF, 1e300), "free_bits": (NAN, 1e300, 10**30), "samples": (0, LARGE)},
    }
    for name, settings in wrong.items():
        for setting, values in settings.items():
            for value in values:
                given = {setting: value}
                yield f"{name}: {given}", lambda name=name, given=given: MAKE[name](**given).fit(ROWS)
    for parts in (0, 41, LARGE, 10**30, 1.5):
        yield f"n_mix {parts}", lambda parts=parts: hmm(emission="mixture", n_mix=parts).fit(ROWS)
    for symbol in (-1, 10**9, 2**62):
        symbols = np.array([[0], [symbol], [1]])
        yield f"symbol {symbol}", lambda symbols=symbols: hmm(emission="categorical").fit(symbols)
    yield "symbols", lambda: CategoricalEmission(symbols=LARGE)
    for observed in ("a", np.ones(40), [True]):
        yield f"observed {observed!s:.9}", lambda observed=observed: hmm().fit(ROWS, observed=observed)
    yield "shape", lambda: VAE(VAEConfig(shape=(10**6,) * 3))
    yield "widths", lambda: VAEConfig(shape=(2,), hidden=(True,))
    yield "fitting", lambda: VAE(SHAPE, fitting="x").fit(ROWS)  # type: ignore[arg-type]


def _questions() -> Iterator[tuple[str, Callable[[], object]]]:
    gaussians, chain, network = FITTED["mixture"], FITTED["hmm"], FITTED["vae"]
    for count in (-1, LARGE, 1.5, None, True, NAN, "a"):
        yield f"mixture: sample {count}", partial(gaussians.sample, count)
        yield f"hmm: sample {count}", partial(chain.sample, count)
        yield f"vae: sample {count}", partial(network.sample, count)
        yield f"vae: score {count}", partial(network.score_samples, ROWS, samples=count)
    for component in (-1, 2, 10**9):
        yield f"component {component}", partial(gaussians.energy, torch.zeros(1, 2), torch.tensor([component]))
    for noise in (-1, NAN, INF, "a", None):
        yield f"noise {noise}", partial(gaussians.smoothed, noise)
    for points in (None, [[1.0, 2.0]], torch.ones(1, 2).long(), torch.ones(1, 3)):
        yield f"mixture: points {points}", partial(gaussians.free_energy, points)
        yield f"vae: points {points}", partial(network.posterior, points)
    for whiten in ("diagonal", "empirical"):
        space = ScoreSpace(gaussians, whiten=whiten)
        yield f"{whiten}: overflow", partial(space.fit, [ROWS, spoiled(1e300)])
    for sequences in (None, [], [ROWS, None], [ROWS, ROWS[:0]], [ROWS, ROWS[:, :1]], [spoiled(NAN)]):
        yield f"sequences {sequences!s:.9}", lambda sequences=sequences: ScoreSpace(gaussians).fit(sequences)


CASES = {**dict(_tables()), **dict(_settings()), **dict(_questions())}


@pytest.mark.parametrize("name", CASES)
def test_one_line(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ThalwegError) as caught:
            CASES[name]()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", MAKE)
def test_a_diverged_model_shows(kind: str) -> None:
    model = MAKE[kind]().fit(ROWS)
    for parameter in model.parameters():
        before = parameter.data.clone()
        parameter.data.view(-1)[0] = NAN
        found = model.score_samples(ROWS)
        assert np.isnan(found).all(), parameter.shape
        parameter.data.copy_(before)


@pytest.mark.parametrize("emission", ["gaussian", "mixture", "categorical"])
def test_a_diverged_chain_shows_in_what_is_to_come_and_draws_nothing(emission: str) -> None:
    symbols = np.arange(40).reshape(-1, 1) % 3
    model = hmm(emission=emission).fit(symbols if emission == "categorical" else ROWS)
    x = torch.tensor(symbols).view(1, 40) if emission == "categorical" else torch.tensor(ROWS).unsqueeze(0)
    assert model.states is not None
    for parameter in model.states.parameters():
        before = parameter.data.clone()
        parameter.data.view(-1)[0] = NAN
        assert model.filter(x).isnan().any()
        with pytest.raises(ThalwegError, match="got NaN"):
            model.sample(5)
        parameter.data.copy_(before)
    with torch.no_grad():
        next(iter(model.emits.parameters())).fill_(NAN)  # type: ignore[union-attr]
    assert model.filter(x).isnan().any()


def test_a_diverged_mixture_draws_nothing_and_whitens_nothing() -> None:
    model = mixture().fit(ROWS)
    with torch.no_grad():
        model.means_[0, 0] = NAN
    assert np.isnan(ScoreSpace(model).fit_transform([ROWS])).any()
    for whiten in ("diagonal", "empirical"):
        with pytest.raises(ThalwegError, match="finite"):
            ScoreSpace(model, whiten=whiten).fit([ROWS])
    with torch.no_grad():
        model.logits_[0] = NAN
    with pytest.raises(ThalwegError, match="got NaN"):
        model.sample(5)


def test_a_table_without_end_is_refused() -> None:
    with pytest.raises(DataError, match=r"/dev/zero:1: expected less than 16,777,216 characters a line"):
        read_table("/dev/zero")


def test_a_writer_that_panics_is_a_lack_of_memory(tmp_path, monkeypatch) -> None:
    from thalweg.learning.checkpoint import _FILES

    class PanicException(BaseException):
        """As safetensors raises, outside of Exception."""

    def panic(*_: object, **__: object) -> bytes:
        raise PanicException

    monkeypatch.setattr("safetensors.torch.save", panic)
    with pytest.raises(ThalwegError, match=r"expected enough memory to write .*x\.safetensors"):
        write_tensors(tmp_path / "x.safetensors", {}, {}, _FILES)
