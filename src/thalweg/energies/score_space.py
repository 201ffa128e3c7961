"""Score spaces: a sequence of any length as the derivatives of its log-likelihood, a vector of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from thalweg.energies.derivatives.chains import ChainDerivatives
from thalweg.energies.derivatives.information import exact_information
from thalweg.energies.derivatives.mixtures import MixtureDerivatives
from thalweg.energies.estimator import Estimator
from thalweg.energies.hmm.model import HMM
from thalweg.energies.hmm.sequences import Sequences, read_sequences
from thalweg.energies.mixture.model import GaussianMixture
from thalweg.errors import ConfigError, ShapeError, nearest

_WHITENINGS = ("none", "diagonal", "empirical", "exact")


class ScoreSpace(Estimator):
    r"""Maps a sequence x to derivatives of log p(x) in a model's parameters: for a linear classifier, or as a kernel.

    .. math:: U(x) = \nabla_\theta \log p(x; \theta), \qquad z(x) = I^{-1/2} U(x), \qquad I = \mathbb{E}[U U^\top]

    Each answer has as many numbers as the chosen parameters, whatever the length. U has mean 0 under the model, and I
    is its Fisher information: z of two sequences have the Fisher kernel as inner product. Jaakkola and Haussler (1999);
    second order as Smith and Gales (2002).

    | model | ``of`` | derivatives in |
    |---|---|---|
    | `GaussianMixture`, points independent | ``means`` | the means, N D |
    | | ``variances`` | the covariances, in their shape; of matrices the lower triangle |
    | | ``weights`` | the logits of the weights, N |
    | `HMM` | ``initial``, ``transitions`` | the logits of pi, C, and of each row of P, C^2 or the edges |
    | ... with Gaussians | ``means``, ``variances`` | as above |
    | ... with mixtures | ``means``, ``variances``, ``weights`` | as above, of the J parts of each state |
    | ... with symbols | ``emissions`` | the logits of each state's symbols, K V |

    X is a list of sequences, a padded batch ``(B, T, D)`` with ``lengths`` (B,) where they differ, or all observations
    one after the other, ``(n, D)``, with lengths that sum to n (without: one sequence). Symbols have no D. Tensors are
    answered by tensors, anything else by arrays, in the type of the model.

    Args:
        model: a :class:`GaussianMixture` or an :class:`HMM` that has parameters. It is used as it is: ``fit`` does not
            change it, and clones share it.
        order: 2 adds the second derivatives in the means, which must be among ``of``: M (M + 1) / 2 numbers for
            M = N D, the lower triangle row by row. They are no linear transform of the first.
        of: which parameters, in that order; one may be named alone.
        whiten: ``none``; ``diagonal``, divide by the root of the mean square of each derivative; ``empirical``,
            multiply by the inverse root of their second moments, 0 in directions that never vary. Both are estimated by
            ``fit``. ``exact``: what ``empirical`` tends to if the model is right, from the lengths in ``fit`` alone;
            for first derivatives of one Gaussian, of a mixture in one dimension (by quadrature), and of a chain whose
            symbols tell its states. For other models no closed form is known, and an error says so.
        average: divide by the length first, so that long sequences do not speak louder.

    Attributes:
        whitening_: ``(F,)`` for ``diagonal``, ``(F, F)`` for ``empirical`` and ``exact``, otherwise None; float64.

    A mixture costs O(T N D), with full covariances or second order O(T N D^2) and O(T N^2 D^2); an HMM O(T C^2), to
    second order O(T (C^2 M + C D M)). Sequences of about the same length are done together, whatever their order.

    >>> model = GaussianMixture(means=[[-1.0], [1.0]], covariances=[[[1.0]], [[1.0]]])
    >>> ScoreSpace(model).fit_transform([[[0.0]], [[-2.0], [0.5], [3.0]]]).shape
    (2, 2)
    >>> ScoreSpace(model, order=2).fit_transform([[[0.0]]])
    array([[ 0.5 , -0.5 , -0.25,  0.25, -0.25]], dtype=float32)
    """

    whitening_: Tensor | None

    def __init__(
        self,
        model: Any,
        order: int = 1,
        *,
        of: str | Sequence[str] = ("means",),
        whiten: str = "none",
        average: bool = False,
    ):
        super().__init__()
        self.model, self.order, self.of = model, order, of
        self.whiten, self.average = whiten, average
        self.register_buffer("whitening_", None)

    def __sklearn_is_fitted__(self) -> bool:
        return "n_features_in_" in self.__dict__

    def __sklearn_clone__(self) -> Self:
        return type(self)(**self.get_params(deep=False))

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import TransformerTags

        tags = super().__sklearn_tags__()
        tags.transformer_tags = TransformerTags()
        return tags

    def fit(self, X: Any, y: Any = None, lengths: Any = None) -> Self:
        """Estimate the information of the scores of X, where they are whitened; y is not looked at."""
        self._begin(X, lengths)
        return self

    def transform(self, X: Any, lengths: Any = None) -> Any:
        """A row for each sequence, ``(B, F)``."""
        self._check_fitted()
        return self._answer(self._scores(X, lengths))

    def fit_transform(self, X: Any, y: Any = None, lengths: Any = None) -> Any:
        """Both, with one pass over X."""
        return self._answer(self._begin(X, lengths))

    def _begin(self, X: Any, lengths: Any) -> _Scores:
        found = self._scores(X, lengths)
        self.n_features_in_ = found.width
        if self.whiten != "none" and not bool(found.scores.isfinite().all()):
            raise ShapeError("derivatives must be finite to be whitened, got NaN or infinite ones; look at the model")
        ways: dict[str, Callable[[], Tensor | None]] = {
            "none": lambda: None,
            "diagonal": lambda: _diagonal(found.scores),
            "empirical": lambda: _empirical(found.scores),
            "exact": lambda: self._exact(found),
        }
        self.whitening_ = ways[self.whiten]()
        return found

    def _exact(self, found: _Scores) -> Tensor:
        ways = derivatives_of(self.model)
        lengths = found.lengths
        scales = 1 / lengths if self.average else torch.ones_like(lengths)
        return _inverse_root(exact_information(ways, self._checked(ways), lengths, scales))

    def _scores(self, X: Any, lengths: Any) -> _Scores:
        """The derivatives, not yet whitened."""
        ways = derivatives_of(self.model)
        of = self._checked(ways)
        if isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1:
            X = list(X)  # as searches of scikit-learn may hold sequences
        batch = read_sequences(X, ways.event_dim, lengths)
        _check(batch, ways)
        device = next((each.device for each in self.model.parameters()), batch.values.device)
        scores = ways(batch.values.to(device), batch.lengths, of, self.order)
        B, T = batch.values.shape[:2]
        lengths = torch.full((B,), T) if batch.lengths is None else batch.lengths
        if self.average:
            scores = scores / lengths.to(device).unsqueeze(1)
        return _Scores(scores, batch, ways.width, lengths.double())

    def _answer(self, found: _Scores) -> Any:
        scores, whitening = found.scores, self.whitening_
        if whitening is not None:
            if scores.size(1) != len(whitening):
                raise ShapeError(
                    f"the model or `of` has changed since `fit`: {scores.size(1)} derivatives, whitened were "
                    f"{len(whitening)}; call `fit` again"
                )
            whitening = whitening.to(scores)
            scores = scores * whitening if whitening.dim() == 1 else scores @ whitening
        return _like(found.batch, scores, self.model)

    def _checked(self, ways: MixtureDerivatives | ChainDerivatives) -> tuple[str, ...]:
        """``of`` as names; a ConfigError for a setting that the model does not offer."""
        of = (self.of,) if isinstance(self.of, str) or not isinstance(self.of, Iterable) else tuple(self.of)
        for name in of:
            if name not in ways.offered:
                kind = type(self.model).__name__
                raise ConfigError(f"`of` names `{name}`, no parameter of this {kind}; {nearest(name, ways.offered)}")
        if not of or len(set(of)) != len(of):
            raise ConfigError(f"`of` must name at least one parameter, each once, got {of!r}")
        if self.order not in (1, 2) or isinstance(self.order, bool):
            raise ConfigError(f"`order` must be 1 or 2, got {self.order!r}")
        if self.order == 2 and "means" not in of:
            raise ConfigError(
                f"`order` 2 is of the means of Gaussians, `of` must name them, got {', '.join(of)} of "
                f"{type(self.model).__name__}; use order 1"
            )
        if self.whiten not in _WHITENINGS:
            raise ConfigError(f"`whiten` is unknown: {self.whiten!r}; {nearest(str(self.whiten), _WHITENINGS)}")
        if self.whiten == "exact" and self.order == 2:
            raise ConfigError("`whiten` `exact` is of first derivatives, got `order` 2; use `empirical` or `diagonal`")
        return of


class _Scores(NamedTuple):
    """Derivatives ``(B, F)``, the sequences they are of, how many numbers an observation has, and ``(B,)`` lengths."""

    scores: Tensor
    batch: Sequences
    width: int
    lengths: Tensor


def fisher_vector(model: GaussianMixture, X: Any, lengths: Any = None, *, improved: bool = True) -> Any:
    r"""Fisher vectors of sequences under a mixture with diagonal covariances, ``(B, N + 2 N D)``.

    .. math::
        G_{w_k} = \frac{1}{T \sqrt{w_k}} \sum_t (r_{tk} - w_k), \quad
        G_{m_k} = \frac{1}{T \sqrt{w_k}} \sum_t r_{tk} \frac{x_t - m_k}{s_k}, \quad
        G_{s_k} = \frac{1}{T \sqrt{2 w_k}} \sum_t r_{tk} \Big(\frac{(x_t - m_k)^2}{s_k^2} - 1\Big)

    Averaged scores divided by the roots of the information where components hardly overlap, which needs no data.

    Args:
        model: with ``covariance_type="diagonal"`` and parameters.
        X, lengths: as :class:`ScoreSpace` takes them.
        improved: then take the root of each number's size, and divide each vector by its norm.

    scikit-image's ``fisher_vector`` has the same numbers in the same order, with the opposite sign where they belong to
    variances; inner products agree. Perronnin and Dance (2007), Perronnin, Sánchez and Mensink (2010).

    >>> model = GaussianMixture(covariance_type="diagonal", means=[[0.0], [4.0]], covariances=[[1.0], [1.0]])
    >>> fisher_vector(model, [[[0.0], [4.0]]], improved=False)[:, 4:].round(2)
    array([[-0.5, -0.5]], dtype=float32)
    """
    if isinstance(model, GaussianMixture) and model.__sklearn_is_fitted__() and model._shape != "diagonal":
        raise ConfigError(f"Fisher vectors need a GaussianMixture of `diagonal` covariances, got `{model._shape}`")
    if not isinstance(model, GaussianMixture):
        raise ConfigError(f"Fisher vectors need a GaussianMixture, got {type(model).__name__}")
    found = ScoreSpace(model, of=("weights", "means", "variances"), average=True)._scores(X, lengths)
    weights, variances = model.weights_.detach().double(), model.covariances_.detach().double()
    rooted = weights.rsqrt().unsqueeze(1)
    # The derivative in s is that in s^2 times 2 s; the information is w / s^2 of a mean and 2 w / s^2 of s.
    scales = [rooted, rooted * variances.sqrt(), rooted * variances * 2**0.5]
    vectors = found.scores * torch.cat([each.flatten() for each in scales])
    if improved:
        vectors = vectors.sign() * vectors.abs().sqrt()
        vectors = torch.nn.functional.normalize(vectors, dim=1)
    return _like(found.batch, vectors, model)


def _diagonal(scores: Tensor) -> Tensor:
    """One over the root of each mean square, (F,); 0 for what is 0 everywhere."""
    squares = scores.square().mean(dim=0)
    return torch.where(squares > 0, squares.rsqrt(), 0.0)


def _empirical(scores: Tensor) -> Tensor:
    """The symmetric inverse root of the second moments, (F, F), on the directions in which there are any."""
    # By singular values, whose squares are those of the moments: directions without any are told apart by more digits.
    _, sizes, rows = torch.linalg.svd(scores, full_matrices=False)
    least = sizes.amax() * max(scores.shape) * torch.finfo(scores.dtype).eps
    roots = torch.where(sizes > least, len(scores) ** 0.5 / sizes, 0.0)
    return (rows.mT * roots) @ rows


def _inverse_root(information: Tensor) -> Tensor:
    """The symmetric inverse root on the directions that tell anything, (F, F)."""
    sizes, columns = torch.linalg.eigh(information)
    least = sizes.amax().clamp(min=0) * len(sizes) * 1e-12
    roots = torch.where(sizes > least, sizes.clamp(min=torch.finfo(sizes.dtype).tiny).rsqrt(), 0.0)
    return (columns * roots) @ columns.mT


def _check(batch: Sequences, ways: MixtureDerivatives | ChainDerivatives) -> None:
    """One line for vectors of the wrong size, lengths out of range, and numbers that are none."""
    values, lengths = batch.values, batch.lengths
    B, T = values.shape[:2]
    if values.dim() > 2 and values.size(2) != ways.width:
        raise ShapeError(
            f"X has {values.size(2)} features, but the model is expecting {ways.width} features as input; "
            "pass what it was fitted on"
        )
    if lengths is not None:
        if lengths.shape != (B,):
            raise ShapeError(f"`lengths` must be (B,) with B = {B}, got {tuple(lengths.shape)}")
        wrong = (lengths < 1) | (lengths > T)
        if bool(wrong.any()):
            item = int(wrong.nonzero()[0])
            raise ShapeError(
                f"`lengths` must lie between 1 and T = {T}, got {int(lengths[item])} for sequence {item}; "
                "leave out what is empty"
            )
    if values.is_floating_point():
        bad = ~(values.isfinite() if values.dim() == 2 else values.isfinite().all(dim=2))
        if lengths is not None:
            bad &= (torch.arange(T) < lengths.unsqueeze(1)).to(bad.device)
        if bool(bad.any()):
            item, step = bad.nonzero()[0].tolist()
            raise ShapeError(f"X contains NaN or infinity at position {step} of sequence {item}; leave it out")


def _like(batch: Sequences, answer: Tensor, model: Any) -> Any:
    """In the type of the model, and as the sequences were given."""
    dtype = next((each.dtype for each in model.parameters()), answer.dtype)
    answer = answer.to(dtype=dtype, device=batch.values.device)
    return answer.cpu().numpy() if batch.array else answer


def derivatives_of(model: Any) -> MixtureDerivatives | ChainDerivatives:
    """What differentiates the likelihoods of a model; a ConfigError for one without, a NotFittedError before a fit.

    >>> derivatives_of(HMM([1.0], [[1.0]], [[0.5, 0.5]])).offered
    ('emissions', 'initial', 'transitions')
    """
    if not isinstance(model, GaussianMixture | HMM):
        raise ConfigError(f"`model` must be a GaussianMixture or an HMM of thalweg, got {type(model).__name__}")
    model._check_fitted()
    return MixtureDerivatives(model) if isinstance(model, GaussianMixture) else ChainDerivatives(model)
