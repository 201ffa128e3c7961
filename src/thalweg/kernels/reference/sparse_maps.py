r"""Sparse maps from scores to weights in plain PyTorch: what the compiled kernels must give.

Every function works along the last axis. Thresholds are found in float64, by a bracketed Newton iteration on the
logarithm c of the largest weight, in which the limit of softmax is an ordinary point:

.. math:: p_i = \exp\Big(-c + \tfrac1d \log\big(1 + d\, e^{dc} (s_i - \max s)\big)\Big), \qquad d = \alpha - 1

Products with the transposed Jacobian (``*_vjp``) need the weights alone, are written in differentiable operations, and
so give second derivatives too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STEPS = 120  # Newton needs some six; every third may halve the bracket, so that 53 bits are had in any case
_TOLERANCE = 1e-14


def _centred(scores: Tensor, pivot: Tensor) -> tuple[Tensor, Tensor]:
    """Scores less a pivot of each row in float64, and the factor that makes the row's answer: 1, 0 if all is masked.

    The factor is NaN for a row with NaN or +inf.
    """
    masked = pivot == -torch.inf
    factor = torch.where(masked, 0.0, torch.where(pivot < torch.inf, 1.0, torch.nan)).double()
    return scores.double() - pivot.double().masked_fill(masked | (factor != factor), 0.0), factor


def _answer(weights: Tensor, factor: Tensor, scores: Tensor) -> Tensor:
    """``weights`` in the type of ``scores``, with rows that have no answer all 0 or all NaN."""
    return torch.where(factor == 1, weights, factor).to(scores.dtype)


def softmax(scores: Tensor) -> Tensor:
    """exp(s) / sum exp(s), with 0 throughout a row that is all -inf; differentiable by PyTorch itself.

    >>> softmax(torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]]))
    tensor([[1., 0.],
            [0., 0.]])
    """
    masked = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0)


def _solve(x: Tensor, z: Tensor, d: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    r"""t_i = exp(-c + log(1 + e^{dc} z_i) / d) with c such that sum t^power = 1, and the sum that was reached.

    ``x`` takes the place of the logarithm's limit where d = 0. Every t falls in c, so the powers differ from their
    true values by |sum - 1| in all at most: that is what the iteration looks at.
    """
    low = torch.zeros_like(d)
    high = torch.full_like(d, math.log(x.shape[-1])) / power
    limit, divisor = d == 0, torch.where(d == 0, 1.0, d)
    c, t, total = low, x, low
    for step in range(_STEPS):
        inside = torch.where(z < 0, torch.exp(d * c) * z, 0.0).clamp(min=-1.0)
        t = torch.exp(torch.where(limit, x, torch.log1p(inside) / divisor) - c)
        raised = t**power
        total = raised.sum(-1, keepdim=True)
        if bool(((total - 1).abs() <= _TOLERANCE).logical_or(high - low <= 1e-16).all()):
            break
        slope = -power * (raised / (1 + inside)).nan_to_num(0.0).sum(-1, keepdim=True) / total
        low, high = torch.where(total > 1, c, low), torch.where(total > 1, high, c)
        c, middle = c - total.log() / slope, (low + high) / 2
        c = torch.where((c > low) & (c < high) & (step % 3 != 2), c, middle)
    return t, total


def entmax(scores: Tensor, alpha: Tensor) -> Tensor:
    """Entmax for any alpha >= 1, a tensor that broadcasts over the scores with 1 along the last axis.

    >>> entmax(torch.tensor([1.0, 0.5, -3.0]), torch.tensor(2.0))
    tensor([0.7500, 0.2500, 0.0000])
    """
    if not scores.numel():
        return scores.clone()
    x, factor = _centred(scores, scores.amax(-1, keepdim=True))
    d = (alpha.double() - 1).clamp(min=0.0).expand(*x.shape[:-1], 1)
    x = torch.where(factor == 1, x, 0.0)
    t, total = _solve(x, d * x.clamp(min=-1e300), d, torch.ones_like(d))
    return _answer(t / total, factor, scores)


def normmax(scores: Tensor, alpha: Tensor) -> Tensor:
    """argmax <p, s> - ||p||_alpha over the simplex, alpha > 1, by t = p / ||p||, t_i^(alpha - 1) = (s_i - lambda)_+.

    >>> normmax(torch.tensor([1.0, 1.0, -3.0]), torch.tensor(2.0))
    tensor([0.5000, 0.5000, 0.0000])
    """
    if not scores.numel():
        return scores.clone()
    x, factor = _centred(scores, scores.amax(-1, keepdim=True))
    alpha = alpha.double().expand(*x.shape[:-1], 1)
    x = torch.where(factor == 1, x, 0.0)
    t, _ = _solve(x, x, alpha - 1, alpha)
    return _answer(t / t.sum(-1, keepdim=True), factor, scores)


def k_subsets(scores: Tensor, k: float) -> Tensor:
    """p_i = min(max(s_i - tau, 0), 1) with sum p = k, by sorting the 2 N places where an entry meets a bound.

    A row with k or fewer entries that are not -inf gives each of them 1.

    >>> k_subsets(torch.tensor([1.0, 0.5, 0.5, -3.0]), 2)
    tensor([1.0000, 0.5000, 0.5000, 0.0000])
    """
    size = scores.shape[-1]
    if not scores.numel() or k >= size:
        whole = torch.where(scores == -torch.inf, 0.0, 1.0).to(scores.dtype)
        return torch.where(scores < torch.inf, whole, torch.nan)
    # The threshold lies at most 1 below the entry of this rank and never above it.
    pivot = scores.topk(math.ceil(k), dim=-1).values[..., -1:]
    x, factor = _centred(scores, pivot)
    few, x = factor == 0, x.clamp(-1.0, 1.0)
    places = torch.cat([x, x - 1], -1)
    change = torch.cat([torch.ones_like(x), -torch.ones_like(x)], -1)
    places, order = places.sort(-1, descending=True)
    slope = change.gather(-1, order).cumsum(-1)  # of the sum as the threshold falls below each place
    reached = torch.cat([torch.zeros_like(slope[..., :1]), (slope[..., :-1] * -places.diff(dim=-1)).cumsum(-1)], dim=-1)
    last = (reached < k).sum(-1, keepdim=True).clamp(min=1) - 1  # the last place before the sum is k
    missing = k - reached.gather(-1, last)
    threshold = places.gather(-1, last) - missing / slope.gather(-1, last).clamp(min=1.0)
    weights = x - threshold
    # The threshold is a sum; what it leaves of an entry that meets a bound is rounding, and no share of the whole.
    near = 16 * max(1.0, k) * torch.finfo(weights.dtype).eps
    weights = torch.where(
        (weights <= near) | (scores == -torch.inf), 0.0, torch.where(weights >= 1 - near, 1.0, weights)
    )
    weights = torch.where(few, (scores > -torch.inf).double(), weights)
    return _answer(weights, torch.where(few, 1.0, factor), scores)


def _powers(weights: Tensor, exponent: Tensor | float) -> Tensor:
    """weights ** exponent on the support and 0 off it, finite also where a tiny weight has a negative exponent."""
    support = weights > 0
    return torch.where(support, torch.where(support, weights, 1.0) ** exponent, 0.0).clamp(
        max=torch.finfo(weights.dtype).max / weights.shape[-1]
    )


def entmax_vjp(weights: Tensor, grad: Tensor, alpha: Tensor | float) -> Tensor:
    r"""The gradient in the scores: w (g - <w, g> / sum w) with w = p^(2 - alpha) on the support."""
    local = _powers(weights, 2 - alpha)
    total = local.sum(-1, keepdim=True)
    shares = local / torch.where(total > 0, total, 1.0)
    grad = torch.where(weights > 0, grad, 0.0)
    return local * (grad - (shares * grad).sum(-1, keepdim=True))


def _second_order(weights: Tensor, logs: Tensor, d: Tensor) -> Tensor:
    """p (p^-d - 1 + d log p) / d^2, whose limit at d = 0 is p (log p)^2 / 2."""
    x = -d * logs
    series, term = torch.full_like(x, 0.5), torch.full_like(x, 0.5)
    near = x.abs() < 0.3
    small = torch.where(near, x, 0.0)
    for k in range(3, 14):
        term = term * small / k
        series = series + term
    far = torch.where(near, 1.0, d)
    return torch.where(near, weights * logs.square() * series, (_powers(weights, 1 - d) - weights * (1 + x)) / far**2)


def entmax_in_alpha(weights: Tensor, alpha: Tensor) -> Tensor:
    r"""The derivative of the weights in alpha; exact also at alpha = 1.

    With L = log p, d = alpha - 1, A = p (p^{-d} - 1 + d L) / d^2, Q = sum A and H = sum p L,

    .. math:: \frac{\partial p}{\partial\alpha}
        = \frac{p\,Q - A - d\,(p\,L\,Q - H A)}{\sum p^{1-d}}

    which is the formula of Correia, Niculae and Martins (2019) without its differences of nearly equal numbers.
    """
    d = alpha - 1
    support = weights > 0
    logs = torch.where(support, weights, 1.0).log()
    second = torch.where(support, _second_order(weights, logs, d), 0.0)
    scale, entropy = second.sum(-1, keepdim=True), (weights * logs).sum(-1, keepdim=True)
    change = weights * scale - second - d * (weights * logs * scale - entropy * second)
    total = _powers(weights, 1 - d).sum(-1, keepdim=True)
    return change / torch.where(total > 0, total, 1.0)


def _normed(weights: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """1 / ||p|| and t = p / ||p||."""
    raised = _powers(weights, alpha).sum(-1, keepdim=True)
    inverse = torch.where(raised > 0, raised, 1.0) ** (-1 / alpha)
    return inverse, weights * inverse


def normmax_vjp(weights: Tensor, grad: Tensor, alpha: Tensor) -> Tensor:
    """The gradient in the scores: h r - p <h, r>, where h = (g - <g, p>) ||p|| and r = t^(2 - alpha) / (alpha - 1)."""
    inverse, t = _normed(weights, alpha)
    grad = torch.where(weights > 0, grad, 0.0)
    pulled = (grad - (grad * weights).sum(-1, keepdim=True)) / inverse * _powers(t, 2 - alpha) / (alpha - 1)
    return pulled - weights * pulled.sum(-1, keepdim=True)


def normmax_in_alpha(weights: Tensor, alpha: Tensor) -> Tensor:
    r"""The derivative of the weights in alpha: (t' - p sum t') ||p||, where t = p / ||p||, d = alpha - 1 and

    .. math:: t' = -\frac{t \log t + t^{2-\alpha} \lambda'}{d}, \qquad
        \lambda' = -\frac{\sum t^\alpha \log t}{\alpha \sum t} d
    """
    d = alpha - 1
    inverse, t = _normed(weights, alpha)
    logs = torch.where(weights > 0, t, 1.0).log()
    total = t.sum(-1, keepdim=True)
    shift = -(_powers(t, alpha) * logs).sum(-1, keepdim=True) / (alpha * torch.where(total > 0, total, 1.0))
    change = torch.where(weights > 0, -(t * logs + _powers(t, 2 - alpha) * shift) / d, 0.0)
    return (change - weights * change.sum(-1, keepdim=True)) / inverse


def k_subsets_vjp(weights: Tensor, grad: Tensor, _: float = 0.0) -> Tensor:
    """The gradient in the scores: g less its mean, over the entries that are strictly between 0 and 1."""
    free = (weights > 0) & (weights < 1)
    grad = torch.where(free, grad, 0.0)
    mean = grad.sum(-1, keepdim=True) / free.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(free, grad - mean, 0.0)


def norm(weights: Tensor, alpha: Tensor | float) -> Tensor:
    """Omega(p) = ||p||_alpha of each row; differentiable, with gradient 0 in a row of zeros."""
    alpha = torch.as_tensor(alpha, dtype=weights.dtype, device=weights.device)
    raised = _powers(weights, alpha).sum(-1, keepdim=True)
    some = raised > 0
    return torch.where(some, torch.where(some, raised, 1.0) ** (1 / alpha), 0.0).squeeze(-1)


def half_square(weights: Tensor, _: float = 0.0) -> Tensor:
    """Omega(p) = ||p||^2 / 2 of each row."""
    return weights.square().sum(-1) / 2


def tsallis(weights: Tensor, alpha: Tensor | float) -> Tensor:
    r"""Omega(p) = (sum p^alpha - sum p) / (alpha (alpha - 1)); at alpha = 1 its limit sum p log p; differentiable.

    >>> tsallis(torch.tensor([0.5, 0.5]), 2.0)
    tensor(-0.2500)
    """
    alpha = torch.as_tensor(alpha, dtype=weights.dtype, device=weights.device)
    d, support = alpha - 1, weights > 0
    logs = torch.where(support, weights, 1.0).log()
    x = d * logs
    near = x.abs() < 1e-4
    # expm1(x) / d without its division at d = 0
    series = logs * (1 + x / 2 * (1 + x / 3 * (1 + x / 4)))
    power = torch.where(near, series, torch.expm1(x) / torch.where(near, 1.0, d))
    return (torch.where(support, weights, 0.0) * power / alpha).sum(-1)
