r"""How a memory tells its patterns apart: maps from scores to weights, with their regularisers and conjugates.

For a regulariser Omega over a polytope (the simplex, subsets, the marginals of a chain)

.. math:: p(s) = \arg\max_p \langle p, s\rangle - \Omega(p), \qquad
    \Omega^*(s) = \max_p \langle p, s\rangle - \Omega(p), \qquad \nabla \Omega^*(s) = p(s)

and the Fenchel-Young inequality Omega(p) + Omega*(s) >= <p, s> holds with equality at p = p(s) alone. The energy of a
memory is convex minus convex because Omega* is convex. Blondel, Martins and Niculae (2020); Santos et al. (2024).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError, nearest
from thalweg.inference.structures.chain import LinearChain
from thalweg.inference.structures.sparsemap import sparse_map
from thalweg.kernels.reference.sparse_maps import half_square, norm, softmax, tsallis
from thalweg.kernels.sparse import ENTMAX, K_SUBSETS, NORMMAX, Rule, conjugate_of_rows
from thalweg.layers.sparse import _alpha, _check_k, _in_rows, entmax, k_subsets, normmax

# The names that `separation` takes; a number is the alpha of entmax.
SEPARATIONS = ("softmax", "sparsemax", "entmax15", "normmax", "k-subsets")


class Separation(nn.Module):
    """Weights over N patterns from their scores; a module, so that a learned parameter is found.

    Subclasses give :meth:`weights`, :meth:`conjugate` and :meth:`regulariser`, all differentiable, all along the last
    axis. Scores of -inf are masked.

    >>> Softmax()(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """

    def weights(self, scores: Tensor) -> Tensor:
        """p(s) of ``(..., N)``, the same shape.

        >>> Softmax().weights(torch.zeros(2))
        tensor([0.5000, 0.5000])
        """
        raise NotImplementedError

    def conjugate(self, scores: Tensor) -> Tensor:
        """Omega*(s), ``(...)``; its gradient is the weights; -inf where every score is.

        >>> Softmax().conjugate(torch.zeros(2))
        tensor(0.6931)
        """
        raise NotImplementedError

    def regulariser(self, weights: Tensor) -> Tensor:
        """Omega(p), ``(...)``, for weights in the polytope.

        >>> Softmax().regulariser(torch.tensor([0.5, 0.5]))
        tensor(-0.6931)
        """
        raise NotImplementedError

    def forward(self, scores: Tensor) -> Tensor:
        """The same as :meth:`weights`."""
        return self.weights(scores)

    def _conjugate(self, scores: Tensor, parameter: float | Tensor, rule: Rule) -> Tensor:
        rows, parameter = _in_rows(scores, parameter)
        return conjugate_of_rows(rows, parameter, rule).reshape(scores.shape[:-1]).to(scores.dtype)

    def __str__(self) -> str:
        raise NotImplementedError

    def extra_repr(self) -> str:
        """What ``str`` says."""
        return str(self)


class Softmax(Separation):
    """Omega(p) = sum p log p over the simplex: every pattern has weight.

    >>> print(Softmax())
    softmax
    """

    def weights(self, scores: Tensor) -> Tensor:
        """exp(s) / sum exp(s); zeros where every score is -inf.

        >>> Softmax().weights(torch.tensor([0.0, -torch.inf]))
        tensor([1., 0.])
        """
        return softmax(scores)

    def conjugate(self, scores: Tensor) -> Tensor:
        """log sum exp(s).

        >>> Softmax().conjugate(torch.zeros(2))
        tensor(0.6931)
        """
        masked = (scores == -torch.inf).all(-1)
        kept = scores.masked_fill(masked.unsqueeze(-1), 0.0)
        return kept.logsumexp(-1).masked_fill(masked, -torch.inf)

    def regulariser(self, weights: Tensor) -> Tensor:
        """sum p log p, the negative entropy.

        >>> Softmax().regulariser(torch.tensor([1.0, 0.0]))
        tensor(0.)
        """
        return tsallis(weights, 1.0)

    def __str__(self) -> str:
        return "softmax"


class Entmax(Separation):
    r"""Omega(p) = (sum p^alpha - 1) / (alpha (alpha - 1)) over the simplex: softmax at 1, sparsemax at 2.

    Args:
        alpha: at least 1; a number, a tensor or an ``nn.Parameter`` that broadcasts over the rows with 1 along N.

    >>> Entmax(2.0).weights(torch.tensor([1.0, 0.5, -3.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """

    def __init__(self, alpha: float | Tensor = 1.5) -> None:
        super().__init__()
        self.alpha = _kept(self, _alpha(alpha))

    def weights(self, scores: Tensor) -> Tensor:
        """:func:`thalweg.layers.sparse.entmax`.

        >>> Entmax(2.0).weights(torch.tensor([1.0, 0.5, -3.0]))
        tensor([0.7500, 0.2500, 0.0000])
        """
        return entmax(scores, self.alpha)

    def conjugate(self, scores: Tensor) -> Tensor:
        """<p, s> - Omega(p) at p = p(s).

        >>> Entmax(2.0).conjugate(torch.ones(2))
        tensor(1.2500)
        """
        return self._conjugate(scores, self.alpha, ENTMAX)

    def regulariser(self, weights: Tensor) -> Tensor:
        """(sum p^alpha - 1) / (alpha (alpha - 1)).

        >>> Entmax(2.0).regulariser(torch.tensor([0.5, 0.5]))
        tensor(-0.2500)
        """
        return tsallis(weights, self.alpha)

    def __str__(self) -> str:
        known = {"1.5": "entmax15", "2": "sparsemax"}
        return known.get(_shown(self.alpha), f"entmax({_shown(self.alpha)})")


class NormMax(Separation):
    """Omega(p) = ||p||_alpha over the simplex, alpha > 1: Omega* grows by 1 when all scores do, and no faster.

    >>> NormMax(2.0).weights(torch.tensor([1.0, 1.0, -3.0]))
    tensor([0.5000, 0.5000, 0.0000])
    """

    def __init__(self, alpha: float | Tensor = 2.0) -> None:
        super().__init__()
        self.alpha = _kept(self, _alpha(alpha, "normmax"))

    def weights(self, scores: Tensor) -> Tensor:
        """:func:`thalweg.layers.sparse.normmax`.

        >>> NormMax(2.0).weights(torch.tensor([1.0, 1.0, -3.0]))
        tensor([0.5000, 0.5000, 0.0000])
        """
        return normmax(scores, self.alpha)

    def conjugate(self, scores: Tensor) -> Tensor:
        """<p, s> - ||p|| at p = p(s).

        >>> NormMax(2.0).conjugate(torch.zeros(4))
        tensor(-0.5000)
        """
        return self._conjugate(scores, self.alpha, NORMMAX)

    def regulariser(self, weights: Tensor) -> Tensor:
        """||p||_alpha.

        >>> NormMax(2.0).regulariser(torch.full((4,), 0.25))
        tensor(0.5000)
        """
        return norm(weights, self.alpha)

    def __str__(self) -> str:
        return f"normmax({_shown(self.alpha)})"


class KSubsets(Separation):
    """Omega(p) = ||p||^2 / 2 over the means of subsets of k patterns: 0 <= p <= 1, sum p = k.

    >>> KSubsets(2).weights(torch.tensor([1.0, 0.5, 0.5, -3.0]))
    tensor([1.0000, 0.5000, 0.5000, 0.0000])
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        if isinstance(k, bool) or not k > 0:
            raise ConfigError(f"`k` must be more than 0, got {k!r}")
        self.k = k

    def weights(self, scores: Tensor) -> Tensor:
        """:func:`thalweg.layers.sparse.k_subsets`.

        >>> KSubsets(1).weights(torch.tensor([1.0, 0.5, -3.0]))
        tensor([0.7500, 0.2500, 0.0000])
        """
        return k_subsets(scores, self.k)

    def conjugate(self, scores: Tensor) -> Tensor:
        """<p, s> - ||p||^2 / 2 at p = p(s).

        >>> KSubsets(2).conjugate(torch.ones(2))
        tensor(1.)
        """
        _check_k(self.k, scores, -1)
        return self._conjugate(scores, self.k, K_SUBSETS)

    def regulariser(self, weights: Tensor) -> Tensor:
        """||p||^2 / 2.

        >>> KSubsets(2).regulariser(torch.ones(2))
        tensor(1.)
        """
        return half_square(weights)

    def __str__(self) -> str:
        return f"{self.k}-subsets"


class _ChainSeparation(Separation):
    """Patterns in a row, each chosen (1) or not (0); transitions score neighbouring choices."""

    transitions: Tensor

    def __init__(self, transitions: float | Tensor = 1.0) -> None:
        super().__init__()
        if not isinstance(transitions, Tensor):
            transitions = torch.tensor([[0.0, 0.0], [0.0, float(transitions)]])
        if transitions.shape != (2, 2):
            raise ShapeError(
                "`transitions` must be (2, 2), [i, j] from i to j with 1 = chosen, or a number that two chosen "
                f"neighbours gain, got {tuple(transitions.shape)}"
            )
        if isinstance(transitions, nn.Parameter):
            self.transitions = transitions
        else:
            self.register_buffer("transitions", transitions)

    def _chain(self, scores: Tensor) -> LinearChain:
        kind = torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else scores.dtype
        chosen = scores.reshape(-1, scores.shape[-1]).to(kind)
        emissions = torch.stack([torch.zeros_like(chosen), chosen], dim=-1)  # (B, N, 2)
        return LinearChain(emissions, self.transitions.to(emissions))

    def _pairs(self, weights: Tensor, both: Tensor) -> Tensor:
        """The joint weights (..., N - 1, 2, 2) of neighbours whose joint weight of being chosen is ``both``."""
        left, right = weights[..., :-1], weights[..., 1:]
        rows = [torch.stack([1 - left - right + both, right - both], -1), torch.stack([left - both, both], -1)]
        return torch.stack(rows, -2).clamp(min=0.0)

    def _coupling(self) -> Tensor:
        """What two equal neighbours gain over two that differ."""
        A = self.transitions
        return A[1, 1] + A[0, 0] - A[0, 1] - A[1, 0]


def _negative_entropy(p: Tensor) -> Tensor:
    return torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0)


class ChainMarginals(_ChainSeparation):
    r"""Neighbours that are chosen together: the marginals of a chain over the N patterns (:class:`LinearChain`).

    A choice y in {0, 1}^N scores sum_i s_i y_i + sum_i A(y_i, y_{i+1}); the weights are p(y_i = 1), any number of them
    near 1, and the conjugate is log Z. Omega is the negative entropy of the chain less its expected transitions, of
    which there is a closed form: given its marginals, the chain's joint weights of two neighbours have the odds ratio
    exp(A_11 + A_00 - A_01 - A_10), a quadratic equation.

    Args:
        transitions: ``(2, 2)``, or a number that two chosen neighbours gain; an ``nn.Parameter`` is learned.

    Scores of -inf are never chosen; where all are, the conjugate is that of choosing none. Time O(N) a row.

    >>> ChainMarginals(2.0).weights(torch.tensor([[1.0, 0.0, -1.0]]))
    tensor([[0.9391, 0.9391, 0.7029]])
    """

    def weights(self, scores: Tensor) -> Tensor:
        """p(y_i = 1).

        >>> ChainMarginals(0.0).weights(torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]])
        """
        return self._chain(scores).marginals[..., 1].reshape(scores.shape).to(scores.dtype)

    def conjugate(self, scores: Tensor) -> Tensor:
        """log Z.

        >>> ChainMarginals(0.0).conjugate(torch.zeros(1, 2)).exp()
        tensor([4.])
        """
        return self._chain(scores).log_partition.reshape(scores.shape[:-1]).to(scores.dtype)

    def regulariser(self, weights: Tensor) -> Tensor:
        """-(entropy of the chain with these marginals) - (its expected transitions).

        >>> ChainMarginals(0.0).regulariser(torch.tensor([[0.5, 0.5]]))
        tensor([-1.3863])
        """
        A = self.transitions.to(weights)
        excess = torch.expm1(self._coupling().to(weights))  # the odds ratio less 1
        left, right = weights[..., :-1], weights[..., 1:]
        middle, product = 1 + excess * (left + right), (1 + excess) * left * right
        both = 2 * product / (middle + (middle.square() - 4 * excess * product).clamp(min=0.0).sqrt())
        pairs = self._pairs(weights, both)
        joint = (_negative_entropy(pairs) - pairs * A).sum((-1, -2, -3))
        single = _negative_entropy(weights) + _negative_entropy(1 - weights)
        if weights.shape[-1] == 1:
            return single.sum(-1)
        return joint - single[..., 1:-1].sum(-1)  # the pairs count the inner ones twice

    def __str__(self) -> str:
        return "chain-marginals"


class ChainSparseMAP(_ChainSeparation):
    r"""Neighbours that are chosen together, sparsely: SparseMAP over the same chain (Niculae et al., 2018).

    .. math:: \max_{\mu} \langle s, p\rangle + \langle A, \mu_{pairs}\rangle
        - \tfrac12 \sum_i \big(p_i^2 + (1 - p_i)^2\big)

    over the marginals mu of choices: the weights p mix a few whole choices exactly, and most patterns get exactly 0.

    Args:
        transitions: ``(2, 2)``, or a number that two chosen neighbours gain; an ``nn.Parameter`` is learned.

    Time O(N) for each of the steps of :func:`thalweg.inference.structures.sparsemap.sparse_map`.

    >>> ChainSparseMAP(1.0).weights(torch.tensor([[1.0, 0.0, -4.0]]))
    tensor([[1., 1., 0.]])
    """

    def weights(self, scores: Tensor) -> Tensor:
        """The weight of label 1 at each position.

        >>> ChainSparseMAP(0.0).weights(torch.tensor([[0.5, 0.0]]))
        tensor([[0.7500, 0.5000]])
        """
        return sparse_map(self._chain(scores)).marginals[..., 1].reshape(scores.shape).to(scores.dtype)

    def conjugate(self, scores: Tensor) -> Tensor:
        """The SparseMAP value.

        >>> ChainSparseMAP(0.0).conjugate(torch.zeros(1, 2))
        tensor([-0.5000])
        """
        return sparse_map(self._chain(scores)).value.reshape(scores.shape[:-1]).to(scores.dtype)

    def regulariser(self, weights: Tensor) -> Tensor:
        """Half the squares of p and 1 - p, less what the best joint weights of neighbours earn.

        >>> ChainSparseMAP(0.0).regulariser(torch.tensor([[0.5, 0.5]]))
        tensor([0.5000])
        """
        left, right = weights[..., :-1], weights[..., 1:]
        apart = (left + right - 1).clamp(min=0.0)
        both = torch.where(self._coupling().to(weights) > 0, torch.minimum(left, right), apart)
        earned = (self._pairs(weights, both) * self.transitions.to(weights)).sum((-1, -2, -3))
        return (weights.square() + (1 - weights).square()).sum(-1) / 2 - earned

    def __str__(self) -> str:
        return "chain-sparsemap"


def _kept(module: nn.Module, alpha: float | Tensor) -> float | Tensor:
    """Numbers and parameters as they are; another tensor becomes a buffer that moves with the module."""
    if isinstance(alpha, Tensor) and not isinstance(alpha, nn.Parameter) and not alpha.requires_grad:
        module.register_buffer("alpha", alpha)
    return alpha


def _shown(alpha: float | Tensor) -> str:
    if not isinstance(alpha, Tensor):
        return f"{alpha:g}"
    return f"{alpha.item():g}" if alpha.numel() == 1 else f"alpha of {tuple(alpha.shape)}"


def separation(
    name: str | float | Separation, *, k: int | None = None, alpha: float | Tensor | None = None
) -> Separation:
    """The separation of a name, of an alpha, or as it is given.

    Args:
        name: one of ``SEPARATIONS``, a number (entmax with this alpha), or a :class:`Separation`.
        k: for ``"k-subsets"``.
        alpha: for ``"normmax"``; 2 when None.

    >>> print(separation("sparsemax"), separation(1.3), separation("k-subsets", k=2))
    sparsemax entmax(1.3) 2-subsets
    """
    if isinstance(name, Separation):
        return name
    if isinstance(name, int | float) and not isinstance(name, bool):
        return Softmax() if name == 1 else Entmax(float(name))
    if name == "k-subsets":
        if k is None:
            raise ConfigError('separation "k-subsets" needs k, the size of the subsets; give k= or KSubsets(k)')
        return KSubsets(k)
    if name == "normmax":
        return NormMax(2.0 if alpha is None else alpha)
    made = {"softmax": Softmax, "sparsemax": lambda: Entmax(2.0), "entmax15": lambda: Entmax(1.5)}
    if not isinstance(name, str) or name not in made:
        raise ConfigError(f"unknown separation `{name}`; {nearest(str(name), SEPARATIONS)}, or give a number alpha")
    return made[name]()
