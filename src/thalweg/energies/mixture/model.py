"""The mixture of Gaussians: an energy, a density whose moments are known, and an estimator fitted by EM."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from thalweg.energies.estimator import Estimator
from thalweg.energies.mixture.covariances import SHAPES, Covariances
from thalweg.energies.mixture.em import Climb, State, climb, expect, maximise, mix
from thalweg.energies.mixture.given import check_shape, read_given
from thalweg.energies.mixture.missing import observed_log_density
from thalweg.energies.mixture.start import begin, distinct
from thalweg.energies.rows import Rows, read_weights
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.search.protocol import real
from thalweg.kernels.tracing import traced
from thalweg.limits import COUNT, SEED, WIDTH, check_numbers, enough_memory


class DegenerateComponentWarning(UserWarning):
    """A fitted mixture has components without points, or with no more variance than the floor."""


class GaussianMixture(Estimator):
    r"""A mixture of N Gaussians, z the component: an energy, normalised, and an estimator like scikit-learn's.

    .. math:: E(x, z) = -\log w_z N(x; m_z, S_z), \qquad
              F(x) = -\log \sum_z \exp(-E(x, z)) = -\log p(x), \qquad p(z \mid x) = \exp(F(x) - E(x, z))

    Called, it gives F(x), which can be differentiated in x and in the parameters as often as wanted: `logits_`
    (w = softmax), `means_`, and `factors_` of the precisions, P = FF' with F upper triangular. :meth:`fit` finds them
    by EM; an optimiser and any loss of energies can do so too.

    What is given of ``weights``, ``means`` and ``covariances`` is where ``fit`` begins; the rest begins by k-means++.
    With ``means`` and ``covariances`` it is a model at once, without ``fit``.

    Args:
        n_components: N; by default as many as ``means``, or 1.
        covariance_type: ``full`` (N, D, D), ``tied`` (D, D), ``diagonal`` (N, D) or ``spherical`` (N,).
        weights: ``(N,)``, above 0; scaled to sum 1. Even by default.
        means: ``(N, D)``.
        covariances: in the shape that ``covariance_type`` says, positive definite; for ``spherical`` also a number.
        n_restarts: how many starts are tried; the best end is kept.
        max_iter: steps of EM, at most.
        tol: EM ends when a step gains less than this in the mean of log p(x), 0 or more.
        floor: the least variance in any direction, above 0. The maximum under that bound, so EM stays monotone.
        missing: NaN is a missing value, and points are judged by what is observed of them.
        random_state: the seed of the starts; torch's own generator without.
        warm_start: ``fit`` goes on from the parameters that are there, if any.

    Attributes:
        weights_, means_, covariances_: the parameters.
        history_: the mean log p(x) before each step of EM.
        n_iter_, converged_: how many steps, and whether the last gained less than ``tol``.
        degenerate_: what is wrong with which component, ``{}`` where nothing is.

    A point of X costs O(N D^2) a step, O(N D) where covariances are diagonal or spherical, and no memory: X is read in
    blocks, so that a memory-mapped array may be larger than memory. Tensors are fitted where they lie, and answered
    there; arrays and frames are answered by arrays.

    >>> two = GaussianMixture(covariance_type="spherical", means=torch.tensor([[-1.0], [1.0]]), covariances=0.25)
    >>> two.mean(), two.covariance()
    (tensor([0.]), tensor([[1.2500]]))
    >>> points = two.sample(2000, generator=torch.Generator().manual_seed(0))
    >>> found = GaussianMixture(2, random_state=0).fit(points)
    >>> found.means_.detach().sort(dim=0).values.round(decimals=1).flatten(), found.converged_
    (tensor([-1.,  1.]), True)
    """

    logits_: nn.Parameter
    means_: nn.Parameter
    factors_: nn.Parameter

    def __init__(
        self,
        n_components: int | None = None,
        covariance_type: str = "full",
        *,
        weights: Any = None,
        means: Any = None,
        covariances: Any = None,
        n_restarts: int = 1,
        max_iter: int = 200,
        tol: float = 1e-5,
        floor: float = 1e-6,
        missing: bool = False,
        random_state: int | None = None,
        warm_start: bool = False,
    ):
        super().__init__()
        self.n_components, self.covariance_type = n_components, covariance_type
        self.weights, self.means, self.covariances = weights, means, covariances
        self.n_restarts, self.max_iter, self.tol, self.floor = n_restarts, max_iter, tol, floor
        self.missing, self.random_state, self.warm_start = missing, random_state, warm_start
        self._take_given()

    def set_params(self, **params: Any) -> Self:
        """Change settings by name; new ``means`` and ``covariances`` are the model from then on."""
        super().set_params(**params)
        if params.keys() & {"weights", "means", "covariances"}:
            self._take_given()
        return self

    def _take_given(self) -> None:
        """Where means and covariances are given, they are the model."""
        if self.means is None or self.covariances is None:
            return
        given = self._given()
        means = given["means"]
        weights = given.get("weights", means.new_full((len(means),), 1 / len(means)))
        factors = SHAPES[self.covariance_type].factors(given["covariances"])
        self._store(self.covariance_type, {"logits_": weights.log(), "means_": means, "factors_": factors})
        self.n_features_in_ = means.size(1)

    def _given(self, D: int | None = None) -> dict[str, Tensor]:
        shape = check_shape(self.covariance_type)
        return read_given(
            shape, self.n_components, D, weights=self.weights, means=self.means, covariances=self.covariances
        )

    def _store(self, shape: str, values: dict[str, Tensor]) -> None:
        """Take parameters over, in place where they fit, so that an optimiser keeps its hold of them."""
        self._shape = shape
        for name, value in values.items():
            there = self._parameters.get(name)
            if there is not None and (there.shape, there.dtype, there.device) == (
                value.shape, value.dtype, value.device,
            ):  # fmt: skip
                with torch.no_grad():
                    there.copy_(value)
            else:
                setattr(self, name, nn.Parameter(value.detach().clone()))

    def __sklearn_is_fitted__(self) -> bool:
        return "means_" in self._parameters

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.estimator_type = "density_estimator"
        tags.input_tags.allow_nan = self.missing is True
        return tags

    @property
    def weights_(self) -> Tensor:
        """w, ``(N,)``."""
        return self.logits_.softmax(dim=0)

    @property
    def covariances_(self) -> Tensor:
        """In their shape: ``(N, D, D)``, ``(D, D)``, ``(N, D)`` or ``(N,)``."""
        return self._covariances.covariances(self.factors_)

    @property
    def _covariances(self) -> Covariances:
        return SHAPES[self._shape]

    def joint(self, points: Tensor) -> Tensor:
        """E(x, z) of points ``(..., D)`` for every z, ``(..., N)``."""
        self._check_fitted()
        if not isinstance(points, Tensor):
            raise ShapeError(f"points must be a tensor (..., D), got {type(points).__name__}")
        if points.dim() < 1 or points.size(-1) != self.means_.size(1) or not points.is_floating_point():
            raise ShapeError(
                f"points must be floating point (..., D) with D = {self.means_.size(1)}, "
                f"got {tuple(points.shape)} {points.dtype}"
            )
        points = points.to(self.means_.dtype)
        log_weights = self.logits_.log_softmax(dim=0)
        if self.missing and bool(points.isnan().any()):
            N, D = self.means_.shape
            matrices = self._covariances.matrices(self.covariances_, N, D)
            density = observed_log_density(points.reshape(-1, D), self.means_, matrices)
            return -(log_weights + density.view(*points.shape[:-1], N))
        squares = self._covariances.whiten(points, self.means_, self.factors_).square().sum(dim=-1)
        D = points.size(-1)
        normal = self._covariances.log_det(self.factors_, D) - D / 2 * math.log(2 * math.pi)
        return squares / 2 - (log_weights + normal)

    def energy(self, points: Tensor, components: Tensor) -> Tensor:
        """E(x, z) = -log p(x, z) of points ``(..., D)`` with components z ``(...)``, ``(...)``."""
        N = len(self.means_)
        if components.is_floating_point() or (not traced() and bool(((components < 0) | (components >= N)).any())):
            raise ShapeError(f"`components` must be integers 0 ... {N - 1}, got others")
        return self.joint(points).gather(-1, components.unsqueeze(-1)).squeeze(-1)

    def free_energy(self, points: Tensor) -> Tensor:
        """F(x) = -log p(x) of points ``(..., D)``, ``(...)``."""
        return -(-self.joint(points)).logsumexp(dim=-1)

    def forward(self, points: Tensor) -> Tensor:
        """F of points ``(..., D)``, ``(...)``."""
        return self.free_energy(points)

    def posterior(self, points: Tensor) -> Tensor:
        """p(z | x) of points ``(..., D)``, ``(..., N)``."""
        return (-self.joint(points)).softmax(dim=-1)

    def mean(self) -> Tensor:
        """Of p(x), ``(D,)``."""
        self._check_fitted()
        return (self.weights_ @ self.means_).detach()

    def covariance(self) -> Tensor:
        """Of p(x), ``(D, D)``."""
        self._check_fitted()
        centred = self.means_ - self.mean()
        own = self._covariances.matrices(self.covariances_, *self.means_.shape)
        return (torch.tensordot(self.weights_, own, dims=1) + (self.weights_ * centred.mT) @ centred).detach()

    def smoothed(self, noise: float) -> GaussianMixture:
        """The mixture of these points after Gaussian noise of that deviation: variances grow by its square."""
        self._check_fitted()
        if not 0 <= real(noise) < math.inf:
            raise ConfigError(f"`noise` must be a number, 0 or more, got {noise!r}")
        covariances = self._covariances.widened(self.covariances_.detach(), noise**2)
        weights, means = self.weights_.detach(), self.means_.detach()
        return GaussianMixture(covariance_type=self._shape, weights=weights, means=means, covariances=covariances)

    @torch.no_grad()
    def sample(self, count: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """So many independent points, ``(count, D)``."""
        self._check_fitted()
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(f"`count` must be an integer of at least 0, got {count!r}")
        means, weights = self.means_.detach(), self.weights_
        if not bool(weights.isfinite().all()):
            raise ShapeError("the weights of components must be finite, got NaN; fit the model again")
        with enough_memory(count * (means.size(1) + 1), count=count):
            chosen = torch.multinomial(weights, max(count, 1), replacement=True, generator=generator)[:count]
            points = torch.randn(count, means.size(1), dtype=means.dtype, device=means.device, generator=generator)
        for component in range(len(means)):
            rows = (chosen == component).nonzero()[:, 0]
            points[rows] = means[component] + self._covariances.coloured(points[rows], self.factors_, component)
        return points

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Maximise the likelihood of X ``(B, D)`` by EM.

        Args:
            X: numbers; see the class.
            y: not looked at.
            sample_weight: ``(B,)``, 0 or more; a weight of 2 is the same point twice.
        """
        rows, weight, N, device = self._prepare(X, sample_weight)
        if not distinct(rows, weight):
            raise ShapeError(
                f"X has one distinct point in {len(rows)} sample(s), and a density needs at least two; pass more"
            )
        given, generator = self._given(rows.width), self._generator()
        best: Climb | None = None
        warm = self.warm_start and self.__sklearn_is_fitted__()
        random = "means" not in given and not warm
        for _ in range(self.n_restarts if random else 1):
            how = {"floor": float(self.floor), "device": device, "generator": generator}
            state = self._state(device) if warm else begin(rows, weight, given, N, self.covariance_type, **how)
            found = climb(
                rows, weight, state, floor=float(self.floor), max_iter=self.max_iter, tol=self.tol, missing=self.missing
            )
            if not math.isfinite(found.history[-1]):
                raise ShapeError(
                    f"the likelihood became {found.history[-1]} after {len(found.history)} steps; expected a finite "
                    "number: standardise X, raise `floor`, or ask for fewer components"
                )
            if best is None or found.history[-1] > best.history[-1]:
                best = found
        assert best is not None
        self.history_, self.n_iter_, self.converged_ = best.history, len(best.history), best.converged
        self._finish(best.state, rows)
        self.n_batches_seen_ = 0
        return self

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        r"""One step of online EM: the model's own moments, mixed with those of a batch X ``(B, D)``.

        .. math:: s \leftarrow (1 - \rho_t)\, s + \rho_t\, s(X), \qquad \rho_t = (t + 2)^{-0.7}

        with t the number of batches before. The first batch also is where a model without parameters begins. Here the
        likelihood may fall. Cappé and Moulines (2009).

        >>> generator = torch.Generator().manual_seed(0)
        >>> model = GaussianMixture(random_state=0)
        >>> for _ in range(50):
        ...     model = model.partial_fit(3 + torch.randn(200, 1, generator=generator))
        >>> model.mean().round(decimals=1)
        tensor([3.])
        """
        first = not self.__sklearn_is_fitted__()
        rows, weight, N, device = self._prepare(X, sample_weight, fitting=first)
        if first:
            given = self._given(rows.width)
            how = {"floor": float(self.floor), "device": device, "generator": self._generator()}
            state = begin(rows, weight, given, N, self.covariance_type, **how)
        else:
            state = self._state(device)
        step = (getattr(self, "n_batches_seen_", 0) + 2) ** -0.7
        moments = expect(rows, weight, state, missing=self.missing).moments
        mixed = mix(state, moments, step)
        self._finish(maximise(state, mixed, floor=float(self.floor), count=len(rows)), rows)
        self.n_batches_seen_ = getattr(self, "n_batches_seen_", 0) + 1
        return self

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Fit, then the most probable component of each point, ``(B,)``."""
        return self.fit(X, y, sample_weight).predict(X)

    def predict(self, X: Any) -> Any:
        """The most probable component of each point of X ``(B, D)``, ``(B,)``."""
        return self._answer(X, lambda points: self.joint(points).argmin(dim=1))

    def predict_proba(self, X: Any) -> Any:
        """p(z | x) of each point of X ``(B, D)``, ``(B, N)``."""
        return self._answer(X, self.posterior)

    def score_samples(self, X: Any) -> Any:
        """log p(x) of each point of X ``(B, D)``, ``(B,)``."""
        return self._answer(X, lambda points: -self.free_energy(points))

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of log p(x) over X ``(B, D)``."""
        return float(self.score_samples(X).mean())

    def n_parameters(self) -> int:
        """How many numbers are free: N - 1 weights, N D means, and the covariances."""
        self._check_fitted()
        N, D = self.means_.shape
        return N - 1 + N * D + self._covariances.free(N, D)

    def bic(self, X: Any) -> float:
        """-2 log p(X) + (free numbers) log B, the Bayesian information criterion of X ``(B, D)``; lower is better."""
        values = self.score_samples(X)
        return -2 * float(values.sum()) + self.n_parameters() * math.log(len(values))

    def aic(self, X: Any) -> float:
        """-2 log p(X) + 2 (free numbers), Akaike's information criterion of X ``(B, D)``; lower is better."""
        return -2 * float(self.score_samples(X).sum()) + 2 * self.n_parameters()

    @torch.no_grad()
    def _answer(self, X: Any, ask: Callable[[Tensor], Tensor]) -> Any:
        """An answer for each row, block by block, in the form of X."""
        rows = self._read(X, missing=self.missing)
        size = max(64, 2**22 // self.means_.numel())
        how = {"device": self.means_.device, "dtype": self.means_.dtype}
        return rows.like(torch.cat([ask(points) for _, points in rows.blocks(size, **how)]))

    def _prepare(self, X: Any, sample_weight: Any, *, fitting: bool = True) -> tuple[Rows, Tensor | None, int, Any]:
        """X, the weights of its rows, N, and where to calculate, all checked."""
        name = type(self).__name__
        check_numbers(self, name, 1, COUNT, "n_restarts", "max_iter")
        check_numbers(self, name, 0, math.inf, "tol", whole=False)
        check_numbers(self, name, 0, math.inf, "floor", whole=False, strict=True)
        if self.n_components is not None:
            check_numbers(self, name, 1, WIDTH, "n_components")
        check_shape(self.covariance_type)
        rows = self._read(X, fitting=fitting, missing=self.missing)
        weight = read_weights(sample_weight, len(rows))
        there = self._parameters.get("means_")
        device = rows.device or (torch.device("cpu") if there is None else there.device)
        weight = None if weight is None else weight.to(device)
        N = self.n_components or (1 if self.means is None else len(self.means))
        counted = len(rows) if weight is None else int((weight > 0).sum())
        if fitting and counted < N:
            raise ShapeError(f"{N} components need at least as many points, got {counted} sample(s) in X")
        return rows, weight, N, device

    def _generator(self) -> torch.Generator | None:
        if self.random_state is None:
            return None
        check_numbers(self, type(self).__name__, 0, SEED, "random_state")
        return torch.Generator().manual_seed(int(self.random_state))

    def _state(self, device: torch.device) -> State:
        weights, means, factors = (
            each.detach().to(device=device, dtype=torch.float64) for each in (self.weights_, self.means_, self.factors_)
        )
        no = torch.zeros(len(means), dtype=torch.bool, device=device)
        return State(weights, means, factors, self._shape, no, no)

    def _finish(self, state: State, rows: Rows) -> None:
        """Keep a state, in the type of X, and report what is wrong with it."""
        values = {"logits_": state.weights.log(), "means_": state.means, "factors_": state.factors}
        self._store(state.shape, {name: value.to(rows.dtype) for name, value in values.items()})
        kinds = {"no point belongs to it": state.empty, f"at the variance floor {self.floor:g}": state.floored}
        self.degenerate_ = {int(place): what for what, where in kinds.items() for place in where.nonzero()[:, 0]}
        if self.degenerate_:
            said = "; ".join(f"{place}: {what}" for place, what in list(self.degenerate_.items())[:3])
            warnings.warn(
                f"{len(self.degenerate_)} of {len(state.means)} components are degenerate ({said}); "
                "try fewer components, other starts (`n_restarts`), or a higher `floor`",
                DegenerateComponentWarning,
                stacklevel=3,
            )
