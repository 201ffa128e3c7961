r"""Maps from scores to sparse weights, drop-ins for softmax, and the losses that belong to them.

Each is the maximiser of <p, s> - Omega(p) over a polytope, its loss the gap in the Fenchel-Young inequality (Blondel,
Martins and Niculae, 2020): Omega*(s) + Omega(y) - <s, y>, at least 0, and 0 exactly where the map gives y. Scores of
-inf are masked: weight 0 and gradient 0; a row that is all -inf gives zeros with gradient 0. A row with NaN or +inf
gives NaN. float32 and float64 are computed as they are, half precision in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.search.protocol import real
from thalweg.kernels.dispatch import on_cpu
from thalweg.kernels.reference.sparse_maps import softmax as _softmax
from thalweg.kernels.sparse import (
    ENTMAX,
    K_SUBSETS,
    NORMMAX,
    Rule,
    conjugate_of_rows,
    loss_of_rows,
    weights_of_rows,
)

_HALF = (torch.float16, torch.bfloat16)


def sparsemax(scores: Tensor, dim: int = -1) -> Tensor:
    r"""The point of the simplex nearest to the scores.

    .. math:: p = \arg\min_{p \in \Delta} \|p - s\|^2, \qquad p_i = \max(s_i - \tau, 0)

    Args:
        scores: any shape; -inf is masked.
        dim: the axis that becomes distributions.
    Returns:
        the shape of ``scores``, 1 in all along ``dim``; gradient and second derivatives are exact.

    Time O(N) in practice for each row of N, memory O(N). Martins and Astudillo (2016).

    >>> sparsemax(torch.tensor([1.0, 0.5, -3.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    return _mapped(scores, 2.0, dim, ENTMAX)


def entmax15(scores: Tensor, dim: int = -1) -> Tensor:
    r"""Entmax with alpha = 1.5, between softmax and sparsemax: p_i = max(s_i / 2 - tau, 0)^2, with sum 1.

    Args:
        scores: any shape; -inf is masked.
        dim: the axis that becomes distributions.
    Returns:
        the shape of ``scores``; gradient and second derivatives are exact.

    Time O(N) in practice for each row of N, memory O(N). Peters, Niculae and Martins (2019).

    >>> entmax15(torch.tensor([1.0, 0.0, -3.0]))
    tensor([0.8307, 0.1693, 0.0000])
    """
    return _mapped(scores, 1.5, dim, ENTMAX)


def entmax(scores: Tensor, alpha: float | Tensor = 1.5, dim: int = -1) -> Tensor:
    r"""Weights that maximise <p, s> plus a Tsallis entropy: softmax at alpha = 1, sparsemax at 2, sparser beyond.

    .. math:: p = \arg\max_{p \in \Delta} \langle p, s\rangle - \frac{\sum_i p_i^\alpha - 1}{\alpha(\alpha - 1)},
        \qquad p_i = \max\big((\alpha - 1) s_i - \tau, 0\big)^{1/(\alpha - 1)}

    Args:
        scores: any shape; -inf is masked.
        alpha: at least 1; a number, or a tensor that broadcasts to the shape of ``scores`` with 1 at ``dim`` (an alpha
            for each row, or for each head as (H, 1, 1)). A tensor gets a gradient, exact down to alpha = 1.
        dim: the axis that becomes distributions.
    Returns:
        the shape of ``scores``.

    The weights differ from the exact ones by 1e-12 in all at most, and by the rounding of their type. Time O(N) for
    each of some six steps. Peters, Niculae and Martins (2019); in alpha: Correia, Niculae and Martins (2019).

    >>> scores = torch.tensor([[1.0, 0.0, -1.0]])
    >>> [entmax(scores, alpha)[0, 2].item() > 0 for alpha in (1.0, 1.2, 1.5, 2.0)]
    [True, True, False, False]
    """
    return _mapped(scores, _alpha(alpha), dim, ENTMAX)


def normmax(scores: Tensor, alpha: float | Tensor = 2.0, dim: int = -1) -> Tensor:
    r"""Weights with an alpha-norm as regulariser, uniform over chosen entries of nearly equal scores for large alpha.

    .. math:: p = \arg\max_{p \in \Delta} \langle p, s\rangle - \|p\|_\alpha

    Args:
        scores: any shape; -inf is masked.
        alpha: more than 1; a number or a tensor as in :func:`entmax`, with gradient.
        dim: the axis that becomes distributions.
    Returns:
        the shape of ``scores``.

    Time O(N) for each of some six steps. Blondel, Martins and Niculae (2020), section 4.3.

    >>> normmax(torch.tensor([1.0, 1.0, -3.0]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    return _mapped(scores, _alpha(alpha, "normmax"), dim, NORMMAX)


def k_subsets(scores: Tensor, k: float, dim: int = -1) -> Tensor:
    r"""The mean of subsets of k entries that is nearest to the scores.

    .. math:: p = \arg\max_{0 \le p \le 1,\ \sum_i p_i = k} \langle p, s\rangle - \tfrac12 \|p\|^2,
        \qquad p_i = \min(\max(s_i - \tau, 0), 1)

    Args:
        scores: any shape; -inf is masked. A row with k unmasked entries or fewer gives each of them 1.
        k: more than 0 and at most N; whole for subsets, any number for a budget.
        dim: the axis whose entries are chosen.
    Returns:
        the shape of ``scores``; k = 1 is :func:`sparsemax`.

    Time O(N log N). Blondel, Martins and Niculae (2020), section 7.3.

    >>> k_subsets(torch.tensor([1.0, 0.5, 0.5, -3.0]), 2)
    tensor([1.0000, 0.5000, 0.5000, 0.0000])
    """
    _check_k(k, scores, dim)
    return _mapped(scores, k, dim, K_SUBSETS)


def sparsemax_loss(scores: Tensor, gold: Tensor) -> Tensor:
    r"""The loss whose gradient is sparsemax(s) less the gold one-hot.

    .. math:: \ell(s, y) = \tfrac12 \|y - s\|^2 - \tfrac12 \|p - s\|^2, \qquad p = \mathrm{sparsemax}(s)

    Args:
        scores: ``(B, C)``; -inf is masked.
        gold: ``(B,)`` int64 in 0 ... C - 1.
    Returns:
        ``(B,)``; 0 where the gold score leads every other by 1 or more, inf where it is masked.

    Value and gradient in one pass, time O(C) in practice. Martins and Astudillo (2016).

    >>> sparsemax_loss(torch.tensor([[3.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 1]))
    tensor([0.0000, 0.2500])
    """
    return _loss(scores, gold, 2.0)


def entmax15_loss(scores: Tensor, gold: Tensor) -> Tensor:
    """The loss whose gradient is entmax15(s) less the gold one-hot; arguments as in :func:`sparsemax_loss`.

    It is 0 where the gold score leads every other by 2 or more. Peters, Niculae and Martins (2019).

    >>> entmax15_loss(torch.tensor([[3.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 1]))
    tensor([0.0000, 0.3905])
    """
    return _loss(scores, gold, 1.5)


def entmax_loss(scores: Tensor, gold: Tensor, alpha: float | Tensor = 1.5) -> Tensor:
    r"""The Fenchel-Young loss of :func:`entmax`; cross-entropy at alpha = 1, :func:`sparsemax_loss` at 2.

    .. math:: \ell(s, y) = \langle p, s\rangle - s_y - \frac{\sum_i p_i^\alpha - 1}{\alpha (\alpha - 1)}

    Args:
        scores: ``(B, C)``; -inf is masked.
        gold: ``(B,)`` int64 in 0 ... C - 1.
        alpha: a number or a tensor that broadcasts to (B, 1); its gradient is that of -Omega at p.
    Returns:
        ``(B,)``; 0 where the gold score leads every other by 1 / (alpha - 1) or more, inf where it is masked.

    >>> entmax_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1]), 1.0)
    tensor([0.6931])
    """
    return _loss(scores, gold, _alpha(alpha))


def k_subsets_loss(scores: Tensor, gold: Tensor, k: int) -> Tensor:
    r"""The Fenchel-Young loss of :func:`k_subsets`: its gradient is k_subsets(s, k) less the gold multi-hot.

    .. math:: \ell(s, y) = \langle p, s\rangle - \tfrac12\|p\|^2 - \langle y, s\rangle + \tfrac{k}{2}

    Args:
        scores: ``(B, C)``; -inf is masked.
        gold: ``(B, k)`` int64, the entries of the gold subset, all different; or ``(B, C)`` bool or numbers, multi-hot
            with k ones in each row.
        k: 1 ... C.
    Returns:
        ``(B,)``; 0 where every gold score leads every other by 1 or more, inf where one is masked.

    >>> k_subsets_loss(torch.tensor([[3.0, 2.0, 0.0]]), torch.tensor([[1, 0]]), 2)
    tensor([0.])
    """
    _check_scores(scores)
    _check_k(k, scores, -1)
    if not isinstance(k, int) or not isinstance(gold, Tensor):
        got = f"{k!r} and {type(gold).__name__}"
        raise ShapeError(f"`k` must be a whole number and `gold` a tensor, got {got}; subsets have 1 ... C entries")
    if scores.dtype in _HALF:
        return k_subsets_loss(scores.float(), gold, k).to(scores.dtype)
    hot = _multi_hot(scores, gold, k)
    missing = ((scores == -torch.inf) & hot).any(-1)
    own = torch.where(hot & (scores > -torch.inf), scores, 0.0).sum(-1)
    value = conjugate_of_rows(scores, k, K_SUBSETS) - own + k / 2
    return value.masked_fill(missing, torch.inf)


def _multi_hot(scores: Tensor, gold: Tensor, k: int) -> Tensor:
    """``gold`` as (B, C) bool. On a GPU, where a look is dear, only its shape is looked at."""
    rows, size = scores.shape
    seen = on_cpu(gold)
    # All entries may be said either way, by k numbers or by k ones.
    whole = k == size and gold.shape == scores.shape and (not seen or bool((gold == 1).all()))
    if gold.dtype == torch.int64 and gold.shape == (rows, k) and not whole:
        if seen and not bool(((gold >= 0) & (gold < size)).all()):
            raise ShapeError(f"`gold` must lie in 0..{size - 1} (0..C-1), got {int(gold.min())}..{int(gold.max())}")
        hot = torch.zeros(rows, size, dtype=torch.bool, device=scores.device).scatter_(1, gold, True)
    elif gold.shape == scores.shape:
        hot = torch.ones_like(scores, dtype=torch.bool) if whole else gold.bool()
        if seen and not bool((gold == hot).all()):
            raise ShapeError("`gold` of shape (B, C) must be multi-hot, 0 or 1, got other numbers")
    else:
        raise ShapeError(
            f"`gold` must be (B, k) = ({rows}, {k}) int64 or multi-hot (B, C) = ({rows}, {size}), "
            f"got {tuple(gold.shape)} {gold.dtype}"
        )
    if seen:
        count = hot.sum(dim=1)
        wrong = (count != k).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ShapeError(
                f"`gold` must be k = {k} different entries of every row, got {int(count[row])} in row {row}"
            )
    return hot


def _alpha(alpha: float | Tensor, name: str = "entmax") -> float | Tensor:
    if not isinstance(alpha, Tensor):
        least = most = number = real(alpha)
    elif on_cpu(alpha) and alpha.numel():
        number, (least, most) = alpha, (end.item() for end in alpha.detach().aminmax())
    else:  # elsewhere a look is dear
        return alpha
    if not (least >= 1.0 and most < float("inf")) or (least == 1.0 and name != "entmax"):
        bound = "at least 1" if name == "entmax" else "more than 1"
        got = f"{least} ... {most}" if isinstance(alpha, Tensor) else repr(alpha)
        raise ConfigError(f"`alpha` of {name} must be {bound} and finite, got {got}")
    return number


def _check_k(k: float, scores: Tensor, dim: int) -> None:
    _check_axis(scores, dim)
    size = scores.shape[dim] if scores.dim() else 1
    if not 0 < real(k) <= size:
        raise ConfigError(
            f"`k` must be more than 0 and at most N = {size}, the size of `scores` along the axis, got {k}"
        )


def _check_numbers(scores: Tensor) -> None:
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        got = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise ShapeError(f"`scores` must be a tensor of floating point, got {got}; use scores.float()")


def _check_axis(scores: Tensor, dim: int) -> None:
    _check_numbers(scores)
    if not isinstance(dim, int) or not -max(1, scores.dim()) <= dim < max(1, scores.dim()):
        raise ShapeError(f"`dim` must be an axis of `scores`, which has shape {tuple(scores.shape)}, got {dim!r}")


def _check_scores(scores: Tensor) -> None:
    _check_numbers(scores)
    if scores.dim() != 2:
        raise ShapeError(f"`scores` must be (B, C), got {tuple(scores.shape)}")


def _parameter(alpha: Tensor, scores: Tensor) -> Tensor:
    """A tensor alpha as (..., 1) for scores (..., N)."""
    shape = (*scores.shape[:-1], 1)
    try:
        return alpha.to(device=scores.device, dtype=scores.dtype).expand(shape)
    except RuntimeError:
        raise ShapeError(
            f"`alpha` must broadcast over the rows of `scores`, {shape} with `dim` moved last, got {tuple(alpha.shape)}"
        ) from None


def _in_rows(scores: Tensor, parameter: float | Tensor) -> tuple[Tensor, float | Tensor]:
    """Scores (..., N) as contiguous rows (R, N) of a type that is computed in, and the parameter for each row."""
    if scores.dtype in _HALF:
        scores = scores.float()
    if isinstance(parameter, Tensor):
        parameter = _parameter(parameter, scores).reshape(-1, 1)
    if scores.dim() != 2:
        scores = scores.reshape(-1, scores.shape[-1]) if scores.shape[-1] else scores.new_empty(0, 0)
    return scores.contiguous(), parameter


def _mapped(scores: Tensor, parameter: float | Tensor, dim: int, rule: Rule) -> Tensor:
    _check_axis(scores, dim)
    if not scores.dim():
        return _mapped(scores.unsqueeze(0), parameter, 0, rule).squeeze(0)
    moved = scores
    if dim not in (-1, scores.dim() - 1):
        moved = scores.movedim(dim, -1)
        if isinstance(parameter, Tensor) and parameter.dim():
            missing = scores.dim() - parameter.dim()
            parameter = parameter.reshape(*[1] * missing, *parameter.shape).movedim(dim, -1)
    if rule is ENTMAX and not isinstance(parameter, Tensor) and parameter == 1.0:
        weights = _softmax(moved.float() if moved.dtype in _HALF else moved)
    else:
        rows, parameter = _in_rows(moved, parameter)
        weights = weights_of_rows(rows, parameter, rule)
    if weights.shape != moved.shape:
        weights = weights.reshape(moved.shape)
    if weights.dtype != scores.dtype:
        weights = weights.to(scores.dtype)
    return weights if moved is scores else weights.movedim(-1, dim)


def _loss(scores: Tensor, gold: Tensor, alpha: float | Tensor) -> Tensor:
    _check_scores(scores)
    if not isinstance(gold, Tensor) or gold.shape != scores.shape[:1] or gold.dtype != torch.int64:
        got = f"{tuple(gold.shape)} {gold.dtype}" if isinstance(gold, Tensor) else type(gold).__name__
        raise ShapeError(f"`gold` must be (B,) int64 with B = {scores.shape[0]} as in `scores`, got {got}")
    rows, alpha = _in_rows(scores, alpha)
    value = loss_of_rows(rows, gold, alpha, ENTMAX)
    return value if value.dtype == scores.dtype else value.to(scores.dtype)
