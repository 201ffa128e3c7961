r"""Losses of energies; each returns one value per item, reduction is the trainer's business.

Lower energy is better. Energies come in three forms: a vector over answers, F (B, C); pairs of the right answer's
energy F (B,) and the energies G of contrasts, (B,) or (B, K); and structures, whose answers are too many to list
(:mod:`thalweg.learning.losses.structured`, which ``nll``, ``perceptron``, ``structured_hinge``, ``softmax_margin`` and
``fenchel_young`` call for a :class:`~thalweg.inference.Structure`). An energy of +inf says that there is no such
answer: it changes neither value nor gradient. Half precision is computed, and returned, in float32.

Several contrasts count in one of two ways: ``over="worst"`` looks at the most offending alone (the one that makes the
loss largest; of equal ones the first), ``over="sum"`` adds the loss of each, and F's own term once.

>>> hinge(torch.tensor([1.0]), torch.tensor([[1.5, 0.5, 9.0]]))
tensor([1.5000])
>>> hinge(torch.tensor([1.0]), torch.tensor([[1.5, 0.5, 9.0]]), over="sum")
tensor([2.])

LeCun, Chopra, Hadsell, Ranzato and Huang (2006), "A tutorial on energy-based learning".
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError, nearest
from thalweg.inference.structures.base import Structure
from thalweg.kernels.dispatch import on_cpu
from thalweg.layers.sparse import entmax_loss
from thalweg.learning.losses import structured

# Which of several contrasts count: the most offending alone, or all of them.
Over: TypeAlias = Literal["worst", "sum"]

# Entmax's alpha by the names that maps have everywhere.
_ALPHAS = {"softmax": 1.0, "entmax15": 1.5, "sparsemax": 2.0}


def gibbs(energies: Tensor, beta: float = 1.0) -> Tensor:
    r"""The Gibbs distribution of energies with inverse temperature beta.

    .. math:: P(y \mid x) = \frac{\exp(-\beta F(x, y))}{\sum_{y'} \exp(-\beta F(x, y'))}

    Args:
        energies: ``(..., C)``; +inf is no answer and gets 0. Each row needs one that is finite.
        beta: 0 is uniform over the answers, towards infinity all mass goes to the least energy.
    Returns:
        ``(..., C)``, sum 1.

    >>> gibbs(torch.tensor([[0.0, 1.0, torch.inf]]), beta=2.0)
    tensor([[0.8808, 0.1192, 0.0000]])
    """
    energies = _float("energies", energies)
    if not 0 <= beta < math.inf:
        raise ConfigError(f"`beta` must be 0 or more and finite, got {beta}")
    # Zero times infinity is no number, but an answer that is not there is none at any temperature.
    return (-beta * energies).masked_fill(torch.isposinf(energies), -torch.inf).softmax(dim=-1)


def nll(energies: Tensor | Structure, gold: Tensor, beta: float = 1.0) -> Tensor:
    r"""Negative log-likelihood under the Gibbs distribution, in units of energy.

    .. math:: \ell = F(x, y) + \frac1\beta \log \sum_{y'} \exp(-\beta F(x, y')), \qquad
              \partial\ell = \partial F(x, y) - \sum_{y'} P(y' \mid x)\, \partial F(x, y')

    The gradient pushes the right answer down and every answer up in proportion to its probability. Towards
    beta = infinity it becomes the :func:`perceptron` loss.

    Args:
        energies: ``(B, C)``, or a structure (E = -score).
        gold: ``(B,)`` int64 in 0 ... C - 1, or structures ``(B, ...)``.
        beta: inverse temperature, above 0.
    Returns:
        ``(B,)`` >= 0 with its full relative precision however small; +inf where the gold answer's energy is.

    >>> nll(torch.tensor([[0.0, 0.0, torch.inf], [-30.0, 0.0, 5.0]]), torch.tensor([1, 0]))
    tensor([6.9315e-01, 9.4207e-14])
    """
    if isinstance(energies, Structure):
        return structured.nll(energies, gold, beta)
    _check_beta(beta)
    return _soft(beta * _advantages(energies, gold)) / beta


def perceptron(energies: Tensor | Structure, gold: Tensor) -> Tensor:
    r"""How far the right answer lies above the lowest.

    .. math:: \ell = F(x, y) - \min_{y'} F(x, y')

    The gradient is dF(x, y) - dF(x, y*) with y* the lowest answer (of equal ones the first), and zero where no wrong
    answer lies below the right one. Collobert; LeCun et al. (2006), section 2.2.2.

    Args:
        energies: ``(B, C)``, or a structure.
        gold: ``(B,)`` int64 in 0 ... C - 1, or structures ``(B, ...)``.
    Returns:
        ``(B,)`` >= 0.

    >>> perceptron(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 0]))
    tensor([1., 0.])
    """
    if isinstance(energies, Structure):
        return structured.perceptron(energies, gold)
    return _over(_advantages(energies, gold), "worst").relu().sum(dim=1)


def structured_hinge(energies: Tensor | Structure, gold: Tensor, cost: Tensor | float = 1.0) -> Tensor:
    r"""Hinge loss with a margin that grows with how wrong an answer is (margin rescaling).

    .. math:: \ell = F(x, y) + \max_{y'} \big(\Delta(y, y') - F(x, y')\big)

    Zero where the right answer lies below every other by at least that one's cost. Taskar et al. (2003),
    Tsochantaridis et al. (2005).

    Args:
        energies: ``(B, C)``, or a structure.
        gold: ``(B,)`` int64 in 0 ... C - 1, or structures ``(B, ...)``.
        cost: what each answer costs, ``(B, C)``, relative to the right one's own entry; for a structure, what each part
            costs, as its marginals. A number is what every wrong answer, or every wrong part, costs.
    Returns:
        ``(B,)`` >= 0.

    >>> structured_hinge(torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([0]), torch.tensor([[0.0, 1.0, 3.0]]))
    tensor([2.])
    """
    if isinstance(energies, Structure):
        return structured.structured_hinge(energies, gold, cost)
    return _over(_advantages(energies, gold, cost), "worst").relu().sum(dim=1)


def softmax_margin(energies: Tensor | Structure, gold: Tensor, cost: Tensor | float = 1.0, beta: float = 1.0) -> Tensor:
    r"""Negative log-likelihood with every answer made more attractive by what it costs.

    .. math:: \ell = F(x, y) + \frac1\beta \log \sum_{y'} \exp\big(\beta (\Delta(y, y') - F(x, y'))\big)

    Above :func:`structured_hinge`, to which it falls towards beta = infinity; without cost it is :func:`nll`. Gimpel
    and Smith (2010). Arguments as there.

    >>> softmax_margin(torch.tensor([[0.0, 1.0]]), torch.tensor([0]))
    tensor([0.6931])
    """
    if isinstance(energies, Structure):
        return structured.softmax_margin(energies, gold, cost, beta)
    _check_beta(beta)
    return _soft(beta * _advantages(energies, gold, cost)) / beta


def fenchel_young(energies: Tensor | Structure, gold: Tensor, map: str | float = "softmax") -> Tensor:
    r"""The loss whose gradient is a map of the scores -F less the right answer.

    .. math:: \ell = \Omega^*(-F) + \Omega(e_y) + F(x, y), \qquad
              \partial\ell / \partial F = e_y - p, \quad p = \nabla\Omega^*(-F)

    Sparse maps reach zero: entmax with alpha where the right answer lies 1 / (alpha - 1) below every other. Blondel,
    Martins and Niculae (2020).

    Args:
        energies: ``(B, C)``, or a structure.
        gold: ``(B,)`` int64 in 0 ... C - 1, or structures ``(B, ...)``.
        map: ``softmax`` (then it is :func:`nll`), ``entmax15``, ``sparsemax`` or an alpha of at least 1; for a
            structure ``softmax`` or ``sparsemap``.
    Returns:
        ``(B,)`` >= 0.

    >>> fenchel_young(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 0]), "sparsemax")
    tensor([0.0000, 0.2500])
    """
    if isinstance(energies, Structure):
        return structured.fenchel_young(energies, gold, map)
    if isinstance(map, str) and map not in _ALPHAS:
        raise ConfigError(f"map `{map}` is not known and no alpha; {nearest(map, _ALPHAS)}")
    energies, gold = _vector(energies, gold)
    alpha = _ALPHAS[map] if isinstance(map, str) else map
    return nll(energies, gold) if alpha == 1 else entmax_loss(-energies, gold, alpha)


def label_smoothing(energies: Tensor, gold: Tensor, epsilon: float = 0.1, beta: float = 1.0) -> Tensor:
    r"""Negative log-likelihood of an answer that is right with probability 1 - epsilon, else drawn evenly from all.

    .. math:: \ell = (1 - \epsilon)\, \mathrm{nll}(y) + \frac{\epsilon}{|A|} \sum_{y' \in A} \mathrm{nll}(y')

    with A the answers whose energy is finite. Szegedy et al. (2016).

    Args:
        energies: ``(B, C)``.
        gold: ``(B,)`` int64 in 0 ... C - 1.
        epsilon: in [0, 1).
        beta: inverse temperature, above 0.
    Returns:
        ``(B,)``.

    >>> label_smoothing(torch.tensor([[0.0, 2.0]]), torch.tensor([0]))
    tensor([0.2269])
    """
    if not 0 <= epsilon < 1:
        raise ConfigError(f"`epsilon` must be in [0, 1), got {epsilon}")
    energies, gold = _vector(energies, gold)
    likelihood = nll(energies, gold, beta)
    present = ~torch.isposinf(energies)
    mean = energies.masked_fill(~present, 0.0).sum(dim=1) / present.sum(dim=1).clamp(min=1)
    even = mean - _at(energies, gold)
    # Where the right answer is not there, inf - inf is no number: its loss is infinite.
    return likelihood + epsilon * even.masked_fill(torch.isinf(likelihood), 0.0)


def risk(energies: Tensor, costs: Tensor, beta: float = 1.0) -> Tensor:
    r"""The expected cost under the Gibbs distribution of the answers given.

    .. math:: \ell = \sum_y P(y \mid x)\, \Delta(y), \qquad
              \partial\ell = \beta \sum_y P(y \mid x)\, (\ell - \Delta(y))\, \partial F(x, y)

    Over a list of an item's best answers it is minimum risk training (Och, 2003; Smith and Eisner, 2006; Shen et al.,
    2016).

    Args:
        energies: ``(B, C)``; +inf is no answer. Each row needs one that is finite.
        costs: ``(B, C)``; anything where there is no answer.
        beta: inverse temperature, 0 or more.
    Returns:
        ``(B,)``, between the least and the largest cost.

    >>> risk(torch.tensor([[0.0, 0.0, torch.inf]]), torch.tensor([[0.0, 3.0, 100.0]]))
    tensor([1.5000])
    """
    energies = _float("energies", energies)
    if energies.dim() != 2 or costs.shape != energies.shape:
        raise ShapeError(
            f"`energies` and `costs` must be (B, C) both, got {tuple(energies.shape)} and {tuple(costs.shape)}"
        )
    costs = costs.to(energies.dtype).masked_fill(torch.isposinf(energies), 0.0)
    return (gibbs(energies, beta) * costs).sum(dim=1)


def hinge(gold: Tensor, contrast: Tensor, margin: float | Tensor = 1.0, *, over: Over = "worst") -> Tensor:
    r"""[F - G + m]+: zero once every contrast lies at least a margin above the right answer.

    Its gradient is dF - dG where F - G + m > 0, else zero, at equality too.

    Args:
        gold: ``(B,)`` F, the right answer's energies.
        contrast: ``(B,)`` or ``(B, K)`` G, those of contrasts; +inf is none.
        margin: a number, or one for each contrast, as ``contrast``.
        over: which contrasts count, ``worst`` or ``sum``.
    Returns:
        ``(B,)`` >= 0.

    >>> hinge(torch.tensor([0.0, 0.0]), torch.tensor([0.25, 1.0]))
    tensor([0.7500, 0.0000])
    """
    gold, contrast, margin = _pair(gold, contrast, margin)
    return _over(_less(gold, contrast, margin), over).relu().sum(dim=1)


def log(gold: Tensor, contrast: Tensor, *, over: Over = "worst") -> Tensor:
    r"""log(1 + exp(F - G)): a hinge without a corner and with no end.

    Its gradient is s (dF - dG) with s = 1 / (1 + exp(G - F)). Arguments as in :func:`hinge`.

    >>> log(torch.tensor([0.0]), torch.tensor([0.0]))
    tensor([0.6931])
    """
    gold, contrast, _ = _pair(gold, contrast, 0.0)
    return _softplus(_over(_less(gold, contrast), over)).sum(dim=1)


def simple(gold: Tensor, contrast: Tensor, margin: float | Tensor = 1.0, *, over: Over = "worst") -> Tensor:
    r"""[F]+ + [m - G]+: the right answer below zero, contrasts above the margin, each by itself.

    Its gradient is dF where F > 0 and -dG where G < m, both strictly. Arguments as in :func:`hinge`.

    >>> simple(torch.tensor([0.5, -1.0]), torch.tensor([0.25, 2.0]))
    tensor([1.2500, 0.0000])
    """
    gold, contrast, margin = _pair(gold, contrast, margin)
    return gold.relu() + _over(margin - contrast, over).relu().sum(dim=1)


def square_square(gold: Tensor, contrast: Tensor, margin: float | Tensor = 1.0, *, over: Over = "worst") -> Tensor:
    r"""([F]+)^2 + ([m - G]+)^2: as :func:`simple`, but gently near the corners.

    Its gradient is 2 F dF where F > 0 and -2 (m - G) dG where G < m. Arguments as in :func:`hinge`. LeCun and Huang
    (2005), for energies of at least 0.

    >>> square_square(torch.tensor([0.5, -1.0]), torch.tensor([-1.0, 2.0]))
    tensor([4.2500, 0.0000])
    """
    gold, contrast, margin = _pair(gold, contrast, margin)
    return gold.relu().square() + _over(margin - contrast, over).relu().square().sum(dim=1)


def square_exponential(gold: Tensor, contrast: Tensor, gamma: float = 1.0, *, over: Over = "worst") -> Tensor:
    r"""([F]+)^2 + gamma exp(-G): contrasts are pushed up for ever, ever less.

    Its gradient is 2 F dF where F > 0, and -gamma exp(-G) dG. Chopra et al. (2005) and Osadchy et al. (2005), for
    energies of at least 0. Arguments as in :func:`hinge`.

    >>> square_exponential(torch.tensor([0.5]), torch.tensor([0.0]))
    tensor([1.2500])
    """
    gold, contrast, _ = _pair(gold, contrast, 0.0)
    return gold.relu().square() + gamma * _over(-contrast, over).exp().sum(dim=1)


def mce(gold: Tensor, contrast: Tensor, beta: float = 1.0, *, over: Over = "worst") -> Tensor:
    r"""1 / (1 + exp(-beta (F - G))): errors counted softly (minimum classification error).

    Towards beta = infinity it is 1 for an error and 0 for none. Its gradient is beta s (1 - s) (dF - dG), which leaves
    both the certain and the hopeless alone. Juang, Hou and Lee (1997). Arguments as in :func:`hinge`.

    >>> mce(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 50.0])).round(decimals=4)
    tensor([0.5000, 0.0000])
    """
    _check_beta(beta)
    gold, contrast, _ = _pair(gold, contrast, 0.0)
    return torch.sigmoid(beta * _over(_less(gold, contrast), over)).sum(dim=1)


def sequence_nll(logits: Tensor, gold: Tensor, mask: Tensor, *, smoothing: float = 0.0) -> Tensor:
    r"""Negative log-likelihood of symbol sequences, with label smoothing.

    .. math:: \ell_b = -\sum_{t \le T_b} \Big[(1 - \epsilon) \log p_t(y_t)
              + \frac{\epsilon}{|A|} \sum_{v \in A} \log p_t(v)\Big]

    Args:
        logits: ``(B, T, V)``; -inf marks symbols that can never stand; A is the set of all others.
        gold: ``(B, T)`` int64.
        mask: ``(B, T)`` bool, true on real positions; padding changes neither value nor gradient.
        smoothing: epsilon in [0, 1).
    Returns:
        ``(B,)`` summed over positions: dividing by the number of positions is left to the caller.

    >>> sequence_nll(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]), torch.tensor([[True, True]]))
    tensor([2.7726])
    """
    if logits.dim() != 3 or gold.shape != logits.shape[:2] or mask.shape != gold.shape:
        raise ShapeError(
            f"`logits` must be (B, T, V) with `gold` and `mask` (B, T), got {tuple(logits.shape)}, "
            f"{tuple(gold.shape)} and {tuple(mask.shape)}"
        )
    # Padding is cut out before anything is computed: what stands there may be -inf or NaN, and so would its gradient.
    log_probs = logits.masked_fill(~mask.unsqueeze(2), 0.0).log_softmax(dim=2)
    loss = -log_probs.gather(2, gold.unsqueeze(2)).squeeze(2).masked_fill(~mask, 0.0)
    if smoothing:
        reachable = ~torch.isinf(logits)
        spread = log_probs.masked_fill(~(reachable & mask.unsqueeze(2)), 0.0).sum(dim=2)
        even = -spread / reachable.sum(dim=2).clamp(min=1)
        loss = (1 - smoothing) * loss + smoothing * even  # lerp would make NaN of an infinite loss
    return loss.sum(dim=1)


def _float(name: str, energies: Tensor) -> Tensor:
    """The energies in the type that they are computed in."""
    if not energies.is_floating_point():
        raise ShapeError(f"`{name}` must be floating point, got {energies.dtype}; use {name}.float()")
    return energies.float() if energies.dtype in (torch.float16, torch.bfloat16) else energies


def _check_beta(beta: float) -> None:
    if not 0 < beta < math.inf:
        raise ConfigError(f"`beta` must be above 0 and finite, got {beta}")


def _vector(energies: Tensor, gold: Tensor) -> tuple[Tensor, Tensor]:
    energies = _float("energies", energies)
    if energies.dim() != 2 or gold.shape != energies.shape[:1] or gold.is_floating_point() or not energies.size(1):
        raise ShapeError(
            "`energies` must be (B, C) with C at least 1 and `gold` (B,) int64, "
            f"got {tuple(energies.shape)} and {tuple(gold.shape)} {gold.dtype}"
        )
    if on_cpu(gold) and gold.numel() and not 0 <= int(gold.min()) <= int(gold.max()) < energies.size(1):
        raise ShapeError(
            f"`gold` must lie in 0..{energies.size(1) - 1} as `energies` has C = {energies.size(1)}, "
            f"got {int(gold.min())} to {int(gold.max())}"
        )
    return energies, gold.long()


def _at(values: Tensor, gold: Tensor) -> Tensor:
    return values.gather(1, gold.unsqueeze(1)).squeeze(1)


def _advantages(energies: Tensor, gold: Tensor, cost: Tensor | float = 0.0) -> Tensor:
    """How far each wrong answer lies below the right one, (B, C), cost added; -inf at the right one and at none."""
    energies, gold = _vector(energies, gold)
    values = _at(energies, gold).unsqueeze(1) - energies
    if isinstance(cost, Tensor):
        if cost.shape != energies.shape:
            raise ShapeError(f"`cost` must be (B, C) = {tuple(energies.shape)} or a number, got {tuple(cost.shape)}")
        cost = cost.to(values.dtype)
        cost = cost - _at(cost, gold).unsqueeze(1)
    own = torch.arange(energies.size(1), device=energies.device) == gold.unsqueeze(1)
    return (values + cost).masked_fill(own | torch.isposinf(energies), -torch.inf)


def _soft(values: Tensor) -> Tensor:
    """log(1 + sum exp(values)) along the rows; the gradient of a row of -inf is zero."""
    barren = torch.isneginf(values).all(dim=1)
    total = values.masked_fill(barren.unsqueeze(1), 0.0).logsumexp(dim=1)
    return _softplus(total).masked_fill(barren, 0.0)


def _softplus(values: Tensor) -> Tensor:
    # Torch's own takes x for log(1 + exp(x)) from 20 on, which is 2e-9 off; from 40 on nothing of float64 is lost.
    return torch.nn.functional.softplus(values, threshold=40.0)


def _pair(gold: Tensor, contrast: Tensor, margin: float | Tensor) -> tuple[Tensor, Tensor, float | Tensor]:
    """Energies (B,) and (B, K), and margins that go with the latter."""
    gold, contrast = _float("gold", gold), _float("contrast", contrast)
    if gold.dim() != 1 or contrast.dim() not in (1, 2) or contrast.size(0) != gold.size(0):
        raise ShapeError(
            f"`gold` must be (B,) and `contrast` (B,) or (B, K), got {tuple(gold.shape)} and {tuple(contrast.shape)}"
        )
    if isinstance(margin, Tensor) and margin.dim():
        if margin.shape != contrast.shape:
            raise ShapeError(
                f"`margin` must be a number or as `contrast`, {tuple(contrast.shape)}, got {tuple(margin.shape)}"
            )
        margin = margin.view(len(gold), -1) if margin.dim() == 1 else margin
    contrast = contrast.unsqueeze(1) if contrast.dim() == 1 else contrast
    if not contrast.size(1):
        contrast = contrast.new_full((len(gold), 1), torch.inf)
        margin = 0.0 if isinstance(margin, Tensor) and margin.dim() else margin
    return gold, contrast, margin


def _less(gold: Tensor, contrast: Tensor, margin: float | Tensor = 0.0) -> Tensor:
    """F - G + m, (B, K), in that order, so that its sign is the condition's as written; -inf where no contrast is."""
    return (gold.unsqueeze(1) - contrast + margin).masked_fill(torch.isposinf(contrast), -torch.inf)


def _over(values: Tensor, over: Over) -> Tensor:
    """All columns (B, K), or the largest value of each row alone, (B, 1): of equal ones the first."""
    if over not in get_args(Over):
        raise ConfigError(f"`over` must be `worst` or `sum`, got `{over}`")
    return values if over == "sum" else values.gather(1, values.detach().argmax(dim=1, keepdim=True))
