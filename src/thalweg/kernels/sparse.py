r"""Sparse maps of rows and their convex conjugates with gradients, by whichever backend suits the device.

A map belongs to a strictly convex regulariser Omega over a polytope: its weights, its conjugate and its loss are

.. math:: p(s) = \arg\max_p \langle p, s\rangle - \Omega(p), \quad
    \Omega^*(s) = \max_p \langle p, s\rangle - \Omega(p), \quad \nabla\Omega^*(s) = p(s)

so that the Jacobian of p is a Hessian, hence symmetric: products from the left and from the right are one function.
Every function takes rows ``(R, N)`` of float32 or float64; ``layers.sparse`` brings other shapes and types here.
Gradients that are themselves differentiated, and what runs under ``torch.func``, are computed in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from thalweg.errors import ShapeError
from thalweg.kernels.dispatch import sparse_map_kernels
from thalweg.kernels.reference import sparse_maps as reference
from thalweg.kernels.tracing import traced

Parameter = Tensor | float  # (R, 1), one for each row, or a number for all


class Rule(NamedTuple):
    """What a map is: how it is computed, its Jacobian's product, its derivative in the parameter, and Omega."""

    weights: Callable[[Tensor, Any], Tensor]
    product: Callable[[Tensor, Tensor, Any], Tensor]
    in_parameter: Callable[[Tensor, Any], Tensor] | None
    omega: Callable[[Tensor, Any], Tensor]


def _entmax(scores: Tensor, alpha: Parameter) -> Tensor:
    kernels = sparse_map_kernels(scores)
    if kernels is not None:
        return kernels.entmax(scores, alpha)
    return reference.entmax(scores, torch.as_tensor(alpha, dtype=torch.float64, device=scores.device))


def _entmax_product(weights: Tensor, grad: Tensor, alpha: Parameter) -> Tensor:
    # A gradient that may be differentiated again must be made of differentiable operations.
    kernels = None if torch.is_grad_enabled() or traced() else sparse_map_kernels(weights)
    if kernels is None:
        return reference.entmax_vjp(weights, grad, alpha)
    return kernels.entmax_vjp(weights, grad, alpha)


def _normmax(scores: Tensor, alpha: Parameter) -> Tensor:
    return reference.normmax(scores, torch.as_tensor(alpha, dtype=torch.float64, device=scores.device))


# Entmax (Tsallis regulariser) with parameter alpha >= 1.
ENTMAX = Rule(_entmax, _entmax_product, reference.entmax_in_alpha, reference.tsallis)
# Norm-max (regulariser ||p||_alpha) with parameter alpha > 1.
NORMMAX = Rule(_normmax, reference.normmax_vjp, reference.normmax_in_alpha, reference.norm)
# k-subsets (regulariser ||p||^2 / 2 over the hypersimplex) with parameter k.
K_SUBSETS = Rule(reference.k_subsets, reference.k_subsets_vjp, None, reference.half_square)


def _keep(ctx: Any, parameter: Parameter, rule: Rule, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Save what a backward pass needs, a parameter that is a tensor last."""
    own = isinstance(parameter, Tensor)
    ctx.rule, ctx.number, kept = rule, None if own else parameter, (*tensors, parameter if own else None)
    ctx.save_for_backward(*kept)
    return kept


def _kept(ctx: Any) -> tuple[Any, ...]:
    *tensors, parameter = ctx.saved_tensors
    return *tensors, ctx.number if parameter is None else parameter


class _Weights(Function):
    """``(scores, parameter, rule)`` to weights; the weights are all that is kept."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, parameter: Parameter, rule: Rule) -> Tensor:  # pyright: ignore
        weights = rule.weights(scores, parameter)
        _keep(ctx, parameter, rule, weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        weights, parameter = _kept(ctx)
        d_scores = ctx.rule.product(weights, grad, parameter) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return d_scores, None, None
        change = ctx.rule.in_parameter(weights, parameter)
        return d_scores, (torch.where(weights > 0, grad, 0.0) * change).sum(-1, keepdim=True), None


class _TransformedWeights(Function):
    """The same under ``torch.func``, which asks for more than is quick."""

    @staticmethod
    def forward(scores: Tensor, parameter: Parameter, rule: Rule) -> Tensor:  # pyright: ignore
        return rule.weights(scores, parameter)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_forward(*_keep(ctx, inputs[1], inputs[2], output))

    backward = _Weights.backward  # pyright: ignore

    @staticmethod
    def jvp(ctx: Any, d_scores: Tensor | None, d_parameter: Tensor | None, _: None) -> Tensor:  # pyright: ignore
        weights, parameter = _kept(ctx)
        change = torch.zeros_like(weights)
        if d_scores is not None:
            change = change + ctx.rule.product(weights, d_scores, parameter)
        if d_parameter is not None:
            change = change + d_parameter * ctx.rule.in_parameter(weights, parameter)
        return change

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> Any:  # pyright: ignore
        """A further batch axis as more rows."""
        flat = []
        for x, dim in zip(given[:2], in_dims, strict=False):
            if isinstance(x, Tensor):
                x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
                x = x.reshape(-1, *x.shape[2:])
            flat.append(x)
        return weights_of_rows(flat[0], flat[1], given[2]).reshape(info.batch_size, -1, flat[0].shape[-1]), 0


def _value(scores: Tensor, weights: Tensor, parameter: Parameter, rule: Rule, pivot: Tensor) -> Tensor:
    """<p, s - pivot> - Omega(p) in float64, -inf for a row that is all -inf; pivot (R, 1) keeps huge scores exact."""
    p = weights.double()
    product = torch.where(p > 0, p * (scores.double() - pivot.double()), p * 0)  # NaN stays
    parameter = parameter.double() if isinstance(parameter, Tensor) else parameter
    value = product.sum(-1) - rule.omega(p, parameter)
    return value.masked_fill((scores == -torch.inf).all(-1), -torch.inf).to(scores.dtype)


def _conjugate(scores: Tensor, parameter: Parameter, gold: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Omega*(s), less s[gold] where it is given, and the gradient of this."""
    kernels = sparse_map_kernels(scores) if rule is ENTMAX else None
    if kernels is not None:
        return kernels.entmax_value(scores, parameter, gold)
    weights = rule.weights(scores, parameter)
    if gold is None:
        return _value(scores, weights, parameter, rule, scores.new_zeros(1)), weights
    own = scores.gather(1, gold.unsqueeze(1))
    infeasible = own == -torch.inf
    value = _value(scores, weights, parameter, rule, own.masked_fill(infeasible, 0.0))
    value = value.masked_fill(infeasible.squeeze(1), torch.inf)
    return value, weights.scatter_add(1, gold.unsqueeze(1), infeasible.to(weights.dtype) - 1)


class _Conjugate(Function):
    """``(scores, parameter, gold, rule)`` to Omega*(s), less s[gold] where that is given."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, parameter: Parameter, gold: Tensor | None, rule: Rule) -> Tensor:  # pyright: ignore
        value, gradient = _conjugate(scores, parameter, gold, rule)
        _keep(ctx, parameter, rule, gradient, scores, gold)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        gradient, scores, gold, parameter = _kept(ctx)
        if torch.is_grad_enabled():
            gradient = weights_of_rows(scores, parameter, ctx.rule)
            if gold is not None:
                there = scores.gather(1, gold.unsqueeze(1)) > -torch.inf
                gradient = gradient.scatter_add(1, gold.unsqueeze(1), -there.to(gradient.dtype))
        d_scores = grad.unsqueeze(1) * gradient if ctx.needs_input_grad[0] else None
        return d_scores, _in_parameter(ctx, grad, scores, parameter), None, None


def _in_parameter(ctx: Any, grad: Tensor, scores: Tensor, parameter: Any) -> Tensor | None:
    """The envelope theorem: the maximum changes with its parameter as -Omega does at the maximiser."""
    if not ctx.needs_input_grad[1]:
        return None
    weights = weights_of_rows(scores, parameter, ctx.rule)
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        own = parameter.clone() if again else parameter.detach().requires_grad_()  # apart from the weights' own
        omega = ctx.rule.omega(weights, own)
        return torch.autograd.grad(-omega, own, grad, create_graph=again)[0]


def _check_rows(scores: Tensor) -> None:
    if len(scores.shape) != 2:
        raise ShapeError(f"`scores` must be rows (R, N), got {tuple(scores.shape)}; `layers.sparse` takes other shapes")


def weights_of_rows(scores: Tensor, parameter: Parameter, rule: Rule) -> Tensor:
    """argmax_p <p, s> - Omega(p) of rows ``(R, N)``; differentiable in the scores and a tensor parameter ``(R, 1)``.

    >>> weights_of_rows(torch.tensor([[1.0, 0.5, -3.0]]), 2.0, ENTMAX)
    tensor([[0.7500, 0.2500, 0.0000]])
    """
    _check_rows(scores)
    if traced():
        return _TransformedWeights.apply(scores, parameter, rule)  # pyright: ignore
    return _Weights.apply(scores, parameter, rule)  # pyright: ignore


def conjugate_of_rows(scores: Tensor, parameter: Parameter, rule: Rule) -> Tensor:
    """max_p <p, s> - Omega(p) of rows ``(R, N)``, ``(R,)``; its gradient is the weights, -inf where all is masked."""
    _check_rows(scores)
    if traced():
        # The same derivatives to every order: on the support s - grad Omega is constant, which the Jacobian takes to 0.
        p = weights_of_rows(scores, parameter, rule)
        value = torch.where(p > 0, p * torch.where(p > 0, scores, 0.0), p * 0).sum(-1) - rule.omega(p, parameter)
        return value.masked_fill((scores == -torch.inf).all(-1), -torch.inf)
    return _Conjugate.apply(scores, parameter, None, rule)  # pyright: ignore


def loss_of_rows(scores: Tensor, gold: Tensor, parameter: Parameter, rule: Rule) -> Tensor:
    """Omega*(s) - s[gold], ``(R,)``, for gold ``(R,)`` int64 and Omega(onehot) = 0; its gradient is p - onehot."""
    _check_rows(scores)
    if traced():
        return conjugate_of_rows(scores, parameter, rule) - scores.gather(1, gold.unsqueeze(1)).squeeze(1)
    # A copy: the gradient must be that of the same gold.
    return _Conjugate.apply(scores, parameter, gold.clone(), rule)  # pyright: ignore
