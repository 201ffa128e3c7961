"""A variational autoencoder: a decoder p(x | z), and an encoder that says which z may have made an x."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Independent, Normal, kl_divergence

from thalweg.energies.estimator import Estimator
from thalweg.energies.rows import Rows
from thalweg.energies.variational.config import VAEConfig, VAETraining
from thalweg.energies.variational.networks import build_decoder, build_encoder
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.variational.bounds import cyclic_anneal, free_bits, importance_bound, linear_anneal
from thalweg.inference.variational.expectations import expectation
from thalweg.limits import SEED, check_fits, check_numbers, enough_memory

Listener = Callable[[dict[str, Any]], None]

# The logarithm of a posterior's scale stays within this, smoothly.
_WIDEST = 8.0
# Samples of z that are decoded together, for all items, where only a number is wanted.
_AT_ONCE = 2**14


class VAE(Estimator):
    r"""A latent-variable model with a network in it, and a network for its posterior.

    .. math:: p(x, z) = N(z; 0, I)\, p(x \mid f(z)), \qquad q(z \mid x) = N(z; m(x), \operatorname{diag}(s(x)^2))

    The energy is E(x, z) = -log p(x, z). Its free energy -log p(x) is out of reach and bounded from above:

    .. math:: F(x) \le \mathbb{E}_q[-\log p(x \mid z)] + KL(q(z \mid x) \,\|\, N(0, I))

    which training lowers in f, m and s at once. The weights are random before :meth:`fit`, and new at each call of it.

    Args:
        config: sizes, networks and likelihood. Without one there is no model before :meth:`fit`, which makes that of
            Gaussian numbers in the shape of its data.
        fitting: how :meth:`fit` goes about it; the defaults where None.
        random_state: the seed of the first weights, of the order of the data, and of every sample that :meth:`fit`
            and :meth:`score_samples` draw.

    Methods of tensors (:meth:`energy`, :meth:`posterior`, ...) are differentiable; those of an estimator
    (:meth:`fit`, :meth:`transform`, :meth:`score_samples`, :meth:`reconstruct`) take arrays or tensors and answer in
    kind. Kingma and Welling (2014); Rezende, Mohamed and Wierstra (2014).

    >>> model = VAE(VAEConfig(shape=(4,), likelihood="gaussian", hidden=(8,)))
    >>> model(torch.zeros(5, 4)).shape, model.posterior(torch.zeros(5, 4)).mean.shape
    (torch.Size([5]), torch.Size([5, 2]))
    """

    def __init__(
        self, config: VAEConfig | None = None, *, fitting: VAETraining | None = None, random_state: int = 0
    ) -> None:
        super().__init__()
        self.config, self.fitting, self.random_state = config, fitting, random_state
        self._built: VAEConfig | None = None
        if config is not None:
            self._build(_checked(config))

    def _build(self, config: VAEConfig) -> None:
        """New networks, and the config that they have from then on."""
        check_numbers(self, "model", 0, SEED, "random_state")
        remedy = "lower `hidden`, `latent` or `shape`"
        check_fits(lambda: nn.ModuleList([build_encoder(config), build_decoder(config)]), trained=True, remedy=remedy)
        self.n_features_in_ = config.size
        self.history_: list[float] = []
        with _seeded(self.random_state):
            self.encoder, self.decoder = build_encoder(config), build_decoder(config)
        learned = config.likelihood == "gaussian" and not config.scale
        self.log_scale = nn.Parameter(torch.zeros(()), requires_grad=True) if learned else None
        self._built = config

    def _own(self) -> VAEConfig:
        """That of the networks that are there."""
        self._check_fitted()
        assert self._built is not None
        return self._built

    # Tensors.

    def posterior(self, x: Tensor) -> Independent:
        """q(z | x) of ``(B, *shape)``: a Gaussian with independent dimensions, batch ``(B,)``, event ``(latent,)``."""
        return self._posterior(self._points(x))

    def decode(self, z: Tensor) -> Distribution:
        """p(x | z) of ``(..., latent)``: batch ``(...)``, event ``shape``."""
        config = self._own()
        if z.shape[-1:] != (config.latent,):
            raise ShapeError(f"`z` must be (..., {config.latent}), got {tuple(z.shape)}")
        found = self.decoder(z.reshape(-1, z.size(-1))).view(*z.shape[:-1], *config.shape)
        if config.likelihood == "bernoulli":
            # Grey pixels are let through: then the log-probability is minus a cross-entropy.
            single: Distribution = Bernoulli(logits=found, validate_args=False)
        else:
            scale = found.new_tensor(config.scale) if self.log_scale is None else self.log_scale.exp()
            single = Normal(found, scale.expand_as(found), validate_args=False)
        return Independent(single, len(config.shape), validate_args=False)

    def energy(self, x: Tensor, z: Tensor) -> Tensor:
        """E(x, z) = -log p(x | z) - log p(z) of x ``(B, *shape)`` and z ``(..., B, latent)``: ``(..., B)``.

        >>> model = VAE(VAEConfig(shape=(4,), hidden=(8,)))
        >>> model.energy(torch.ones(3, 4), torch.zeros(7, 3, 2)).shape
        torch.Size([7, 3])
        """
        return -self._log_joint(self._points(x), z)

    def free_energy(self, x: Tensor, samples: int = 64) -> Tensor:
        """An upper bound of F(x) = -log p(x), ``(B,)``: minus the importance-weighted bound with k samples.

        In expectation it falls with k towards F(x); with one sample it is a draw of the bound that trains. Nothing
        smaller than F(x) is to be expected, but a single draw may lie below it.

        >>> model = VAE(VAEConfig(shape=(4,), hidden=(8,)))
        >>> model.free_energy(torch.ones(3, 4), samples=10).shape
        torch.Size([3])
        """
        x = self._points(x)
        at_once = None if torch.is_grad_enabled() else max(1, _AT_ONCE // max(1, len(x)))
        return -importance_bound(lambda z: self._log_joint(x, z), self._posterior(x), samples=samples, at_once=at_once)

    def forward(self, x: Tensor, *, weight: float = 1.0, floor: float = 0.0, samples: int = 1) -> Tensor:
        """The loss ``(B,)``: minus the bound, with an exact divergence and the rest by samples of z.

        Args:
            x: ``(B, *shape)``.
            weight: of the divergence; 1 is the bound.
            floor: free bits of each latent dimension, in nats.
            samples: of z.

        >>> model = VAE(VAEConfig(shape=(4,), hidden=(8,)))
        >>> bool((model(torch.ones(3, 4), weight=0.0) <= model(torch.ones(3, 4), floor=100.0)).all())
        True
        """
        return self._loss(self._points(x), weight, floor, samples)

    def _loss(self, x: Tensor, weight: float, floor: float, samples: int) -> Tensor:
        q = self._posterior(x)
        fit = expectation(lambda z: self.decode(z).log_prob(x), q, samples=samples)
        return weight * free_bits(_divergences(q), floor) - fit

    def divergences(self, x: Tensor) -> Tensor:
        """KL(q(z_d | x) || N(0, 1)), what each latent dimension says about x in nats: ``(B, latent)``.

        >>> VAE(VAEConfig(shape=(4,), hidden=(8,))).divergences(torch.ones(3, 4)).shape
        torch.Size([3, 2])
        """
        return _divergences(self.posterior(x))

    def _posterior(self, x: Tensor) -> Independent:
        mean, raw = self.encoder(x).chunk(2, dim=-1)
        return Independent(Normal(mean, (_WIDEST * (raw / _WIDEST).tanh()).exp(), validate_args=False), 1)

    def _log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        prior = -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)
        return self.decode(z).log_prob(x) + prior

    def _points(self, x: Tensor) -> Tensor:
        """x as (B, *shape), if it is that or flat, with values that the likelihood has."""
        config = self._own()
        if not isinstance(x, Tensor):
            raise ShapeError(f"`x` must be a tensor, got {type(x).__name__}")
        if tuple(x.shape[1:]) not in (config.shape, (config.size,)) or not x.is_floating_point():
            expected = ", ".join(map(str, ("B", *config.shape)))
            raise ShapeError(f"`x` must be floating point ({expected}), got {tuple(x.shape)} {x.dtype}")
        low, high = x.detach().aminmax() if x.numel() else (x.new_zeros(()),) * 2
        if config.likelihood == "bernoulli" and not (low >= 0 and high <= 1):
            what = "NaN" if bool(low.isnan()) else f"{float(low):g} to {float(high):g}"
            raise ShapeError(
                f"a Bernoulli likelihood needs values in [0, 1], got {what}; scale them or use likelihood=gaussian"
            )
        if not bool((high - low).isfinite()):
            raise ShapeError("`x` must be finite, got NaN or infinite values; leave such rows out")
        return x.view(len(x), *config.shape)

    # The estimator.

    def __sklearn_is_fitted__(self) -> bool:
        return self._built is not None  # weights may come from anywhere

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import TransformerTags

        tags = super().__sklearn_tags__()
        tags.transformer_tags = TransformerTags(preserves_dtype=["float32"])  # the type of the weights
        return tags

    def fit(self, X: Any, y: Any = None, *, listener: Listener | None = None) -> Self:
        """Train from new weights on ``(N, *shape)`` or ``(N, D)``; the same seed gives the same weights on a CPU.

        Args:
            X: array or tensor; training happens on the device of the model's weights, or where a tensor lies if there
                are none yet.
            y: not looked at.
            listener: called after each epoch with ``epoch`` from 1 and the mean ``bound`` in it, as it was
                trained: weight and free bits included. These are also in ``history_``.
        """
        how = self.fitting or VAETraining()
        if not isinstance(how, VAETraining):
            raise ConfigError(f"`fitting` must be a VAETraining, got {type(how).__name__}")
        data = self._begin(X)
        device = data.device
        with _seeded(self.random_state, device):
            optimiser = torch.optim.Adam(self.parameters(), lr=how.learning_rate)
            steps = -(-len(data) // how.batch_size)
            for epoch in range(how.epochs):
                total = torch.zeros((), dtype=torch.float64, device=device)
                for step, rows in enumerate(torch.randperm(len(data)).split(how.batch_size), epoch * steps):
                    weight = _weight(how, step, steps)
                    loss = self._loss(data[rows.to(device)], weight, how.free_bits, how.samples)
                    optimiser.zero_grad()
                    loss.mean().backward()
                    optimiser.step()
                    total += loss.detach().sum()
                self._note(epoch, -float(total) / len(data), listener)
        return self

    def _begin(self, X: Any) -> Tensor:
        """New networks where the old ones were, and X there as they take it."""
        given = self.config if self.config is None else _checked(self.config)
        rows = self._read(_flat(X, None if given is None else given.shape), fitting=True)
        width, shape = rows.width, tuple(getattr(X, "shape", ()))[1:]
        config = given or VAEConfig(shape=shape or (width,), likelihood="gaussian")
        new = rows.device or torch.device("cpu"), torch.get_default_dtype()
        device, dtype = self._place() if self._built else new
        self._build(config)
        self.to(device=device, dtype=dtype)
        if width != config.size:
            raise ShapeError(f"X has {width} features, but VAE is expecting {config.size} features as input")
        data = self._points(rows.block(0, len(rows), dtype=dtype, device=device))
        if config.likelihood == "gaussian" and not config.scale and bool((data == data[0]).all()):
            raise ShapeError(
                f"X has one distinct point in {len(data)} sample(s), and a density needs at least two; pass more"
            )
        return data

    def _note(self, epoch: int, bound: float, listener: Listener | None) -> None:
        if not math.isfinite(bound):
            raise ConfigError(f"the bound became {bound} in epoch {epoch + 1}; lower training.learning_rate")
        self.history_.append(bound)
        if listener is not None:
            listener({"event": "epoch", "epoch": epoch + 1, "bound": bound})

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Fit, then the posterior's mean for each row, ``(N, latent)``.

        >>> VAE(fitting=VAETraining(epochs=1)).fit_transform([[0.0, 1.0], [1.0, 0.5]]).shape
        (2, 2)
        """
        return self.fit(X, y).transform(X)

    def transform(self, X: Any) -> Any:
        """The posterior's mean for each row, ``(N, latent)``.

        >>> VAE(VAEConfig(shape=(4,), hidden=(8,))).transform([[0.0, 1.0, 1.0, 0.0]]).shape
        (1, 2)
        """
        x, rows = self._read_points(X)
        with torch.no_grad():
            return rows.like(self._posterior(x).mean)

    def reconstruct(self, X: Any) -> Any:
        """The mean of p(x | z) at the posterior's mean, as ``X`` but ``(N, *shape)``."""
        x, rows = self._read_points(X)
        with torch.no_grad():
            return rows.like(self.decode(self._posterior(x).mean).mean)

    def score_samples(self, X: Any, samples: int = 64) -> Any:
        """A lower bound of log p(x) for each row, ``(N,)``: minus :meth:`free_energy`, by the seed."""
        x, rows = self._read_points(X)
        with torch.no_grad(), _seeded(self.random_state, x.device):
            return rows.like(torch.cat([-self.free_energy(part, samples) for part in x.split(1024)]))

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of :meth:`score_samples`."""
        return float(self.score_samples(X).mean())

    def sample(self, n: int = 1, *, means: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """n new x, ``(n, *shape)``: z from its prior, and x from p(x | z) or, with ``means``, its mean.

        >>> VAE(VAEConfig(shape=(8, 8), hidden=(8,))).sample(3).shape
        torch.Size([3, 8, 8])
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"`n` must be an integer of at least 1, got {n!r}")
        config = self._own()
        device, dtype = self._place()
        with torch.no_grad(), enough_memory(n * (config.latent + 2 * config.size), n=n):
            z = torch.randn(n, config.latent, generator=generator, dtype=dtype, device=device)
            found = self.decode(z)
            if means:
                return found.mean
            if config.likelihood == "bernoulli":
                return torch.bernoulli(found.mean, generator=generator)
            return found.mean + found.stddev * torch.randn(
                found.mean.shape, generator=generator, dtype=dtype, device=device
            )

    def latent_map(self, side: int = 12) -> Tensor:
        """Decoded means over the plane of a latent of size 2, ``(side, side, *shape)``, equally probable cells apart.

        Rows go from high to low z_2, columns from low to high z_1, as in a picture.

        >>> VAE(VAEConfig(shape=(8, 8), hidden=(8,))).latent_map(3).shape
        torch.Size([3, 3, 8, 8])
        """
        latent = self._own().latent
        if latent != 2 or side < 1:
            raise ConfigError(f"a map needs latent = 2 and side >= 1, got {latent} and {side}")
        device, dtype = self._place()
        shares = (torch.arange(side, dtype=torch.float64) + 0.5) / side
        places = Normal(0.0, 1.0).icdf(shares).to(device, dtype)
        with torch.no_grad():
            rows, columns = torch.meshgrid(places.flip(0), places, indexing="ij")
            return self.decode(torch.stack([columns, rows], dim=-1)).mean

    def _read_points(self, X: Any) -> tuple[Tensor, Rows]:
        """X, images or flat rows, as (N, *shape) where the weights are."""
        rows = self._read(_flat(X, self._own().shape))
        device, dtype = self._place()
        return self._points(rows.block(0, len(rows), dtype=dtype, device=device)), rows

    def _place(self) -> tuple[torch.device, torch.dtype]:
        first = next(self.parameters())
        return first.device, first.dtype


def _checked(config: Any) -> VAEConfig:
    if not isinstance(config, VAEConfig):
        raise ConfigError(f"`config` must be a VAEConfig, got {type(config).__name__}")
    return config


def _flat(X: Any, wanted: tuple[int, ...] | None) -> Any:
    """Images of the wanted shape, or of any, as rows; all else as it is."""
    shape: tuple[int, ...] = tuple(getattr(X, "shape", ()))
    if len(shape) > 2 and wanted in (None, shape[1:]):
        return X.reshape(shape[0], math.prod(shape[1:]))
    return X


def _divergences(q: Independent) -> Tensor:
    base: Any = q.base_dist
    return kl_divergence(base, Normal(torch.zeros_like(base.loc), torch.ones_like(base.scale)))


def _weight(how: VAETraining, step: int, epoch_steps: int) -> float:
    if how.annealing == "none":
        return 1.0
    rise = linear_anneal if how.annealing == "linear" else cyclic_anneal
    return rise(step, how.annealing_epochs * epoch_steps)


@contextmanager
def _seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Torch's own generator from a seed, and afterwards as it was; on a device that one's too."""
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
