"""Linear chains with gradients: compiled kernels where they exist, plain PyTorch otherwise and beyond.

The kernels give values and first derivatives; derivatives of those come from the reference by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.chain_checks import check_lengths, sound
from thalweg.kernels.dispatch import chain_kernels, on_cpu, usual_defaults
from thalweg.kernels.potentials import Chain, SparseTransitions
from thalweg.kernels.reference import chain as reference
from thalweg.kernels.reference.chain import score as score
from thalweg.kernels.reference.recursion import fold as fold
from thalweg.kernels.reference.recursion import inside as inside
from thalweg.kernels.tracing import derived, traced


def inputs_of(chain: Chain) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four tensors that gradients flow to."""
    return chain.emissions, chain.moves, chain.start, chain.end


def with_inputs(chain: Chain, inputs: Sequence[Tensor]) -> Chain:
    """The chain with those four tensors replaced."""
    emissions, scores, start, end = inputs
    moves = chain.transitions
    moves = moves._replace(scores=scores) if isinstance(moves, SparseTransitions) else scores
    return Chain(emissions, moves, start, end, chain.lengths)


def carries_graph(chain: Chain) -> bool:
    """Whether what is computed from the chain now will be differentiable."""
    return traced() or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs_of(chain)))


def trusted_kernels(backend: str, chain: Chain) -> ModuleType | None:
    """The compiled kernels that may be given this chain; None where the reference has to answer.

    That is the backend's own choice; under the transforms of ``torch.func``, which a kernel cannot follow; and, on the
    CPU, where new tensors lie elsewhere by default, and for scores of NaN or +inf, which maxima of vectors pass over.
    Lengths out of range are a ShapeError there: a kernel follows them. On a GPU nothing is looked at: that would wait.

    >>> chain = Chain(torch.zeros(1, 1, 1), *[torch.zeros(1, 1)] * 3, torch.tensor([1]))
    >>> trusted_kernels("auto", chain._replace(emissions=torch.full((1, 1, 1), torch.nan))) is None
    True
    """
    kernels = None if traced() else chain_kernels(backend, chain)
    if kernels is not None and on_cpu(chain.emissions):
        check_lengths(chain.lengths, chain.steps)
        if not usual_defaults() or not sound(chain):
            return None
    return kernels


def _plain(chain: Chain) -> Chain:
    """Contiguous, as kernels take it; they are called where nothing is recorded."""
    inputs = inputs_of(chain)
    return chain if all(x.is_contiguous() for x in inputs) else with_inputs(chain, [x.contiguous() for x in inputs])


def _reference_value(chain: Chain, gold: Tensor | None, method: str = "auto") -> Tensor:
    value = reference.log_partition(chain, method=method)
    return value if gold is None else torch.where(torch.isneginf(value), value, value - score(chain, gold))


class _Call:
    """What :class:`_Value` is asked for, and in ``told`` whether it saw that every value is finite, None if not.

    One argument, for torch looks at each by itself. The gold labels are its own: a backward pass may follow them.
    """

    __slots__ = ("chain", "gold", "kernels", "low_memory", "told", "total")

    def __init__(self, kernels: ModuleType, chain: Chain, gold: Tensor | None, low_memory: bool, total: bool):
        gold = None if gold is None else gold.clone(memory_format=torch.contiguous_format)
        self.kernels, self.chain, self.gold, self.low_memory, self.total = kernels, chain, gold, low_memory, total
        self.told = None


class _Value(torch.autograd.Function):
    """log Z, or score(gold) - log Z, by a kernel; (B,), or the sum of all.

    Where it is cheaper than to begin again later, the gradient for weights of 1 is made at once.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor):
        keep, kernels, gold, plain = True in ctx.needs_input_grad, call.kernels, call.gold, _plain(call.chain)
        found = kernels.at_once(plain, gold, call.total) if keep and not call.low_memory else None
        if found is None:
            sign = 1 if gold is None else -1
            values, saved = kernels.forward(plain, gold, keep=keep, low_memory=call.low_memory, sign=sign)
            values, unit = values.sum() if call.total else values, None
        else:
            values, saved, unit, call.told = found
        if keep:
            ctx.save_for_backward(*inputs)
            ctx.rest = call, saved, unit
        return values

    @staticmethod
    def backward(ctx: Any, *weights: Tensor):
        call, saved, unit = ctx.rest
        kernels, gold = call.kernels, call.gold
        inputs = ctx.saved_tensors  # torch complains here if one was changed in place since
        again = torch.is_grad_enabled()
        if unit is not None and not again:
            ctx.rest = call, saved, None  # it may be given away only once
            gradients = kernels.times(unit, weights[0], gold)
            if gradients is not None:
                return (None, *gradients)
        # The kernels take the gradient of log Z - score(gold).
        share = (weights[0] if gold is None else -weights[0]).expand(len(call.chain.emissions))
        if again:
            return (None, *_Gradient.apply(kernels, call.chain, gold, saved, share, *inputs))  # type: ignore[misc]
        return (None, *_gradient(kernels, call.chain, gold, saved, share))


def _gradient(kernels: ModuleType, chain: Chain, gold: Tensor | None, saved: Any, weights: Tensor) -> Any:
    plain = _plain(chain)
    saved = kernels.forward(plain, gold, keep=True)[1] if saved is None else saved
    return kernels.backward(plain, saved, weights.detach().contiguous(), gold)


class _Gradient(torch.autograd.Function):
    """The gradient of sum_b weights[b] value[b] by a kernel; its own derivative by the reference."""

    @staticmethod
    def forward(
        ctx: Any, kernels: ModuleType, chain: Chain, gold: Tensor | None, saved: Any, weights: Tensor, *inputs: Tensor
    ):
        ctx.save_for_backward(weights, *inputs)
        ctx.rest = chain, gold
        return _gradient(kernels, chain, gold, saved, weights)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor):
        chain, gold = ctx.rest

        def gradient(weights: Tensor, *inputs: Tensor) -> Sequence[Tensor]:
            value = (_reference_value(with_inputs(chain, inputs), gold) * weights).sum()
            return torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True)

        return derived(ctx, 4, gradient, cotangents)


class _Expectation(torch.autograd.Function):
    """E_p[score_q(y)] by the posteriors that a kernel gives; its derivative by the reference."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, p: Chain, q: Chain, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.rest = p, q
        labels, moves = kernels.posteriors(_plain(p), by_step=4 in (p.moves.dim(), q.moves.dim()))
        last = labels[torch.arange(len(labels), device=labels.device), p.lengths - 1]
        scores = q.moves.unsqueeze(1) if q.moves.dim() == 3 else q.moves
        pairs = (labels, q.emissions), (labels[:, 0], q.start), (last, q.end), (moves, scores)
        # In float64, where what is impossible counts nothing.
        terms = [torch.where(x == 0, 0.0, x.double() * y.double()).flatten(1).sum(1) for x, y in pairs]
        return torch.stack(terms).sum(0).to(labels.dtype)

    @staticmethod
    def backward(ctx: Any, *weights: Tensor):
        p, q = ctx.rest

        def value(*inputs: Tensor) -> Sequence[Tensor]:
            return (reference.expectation(with_inputs(p, inputs[:4]), with_inputs(q, inputs[4:])),)

        return derived(ctx, 3, value, weights)


def log_partition(chain: Chain, *, backend: str = "auto", low_memory: bool = False) -> Tensor:
    """log Z of each item, (B,), -inf for one without a feasible labelling; differentiable to any order.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> log_partition(chain).exp()
    tensor([8.])
    """
    return _value(chain, None, backend, low_memory, False)


def log_likelihood(
    chain: Chain, gold: Tensor, *, backend: str = "auto", low_memory: bool = False, total: bool = False
) -> Tensor:
    """score(gold) - log Z of each item, with gold (B, T); (B,), in one pass and with the digits of float64.

    ``total`` gives their sum alone, which takes fewer steps of autograd. +inf stands for an item without a feasible
    labelling. The compiled kernels check the labels: one out of range is a ShapeError on the CPU and NaN on the GPU.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> log_likelihood(chain, torch.zeros(1, 3, dtype=torch.long)).exp()
    tensor([0.1250])
    """
    return _value(chain, gold, backend, low_memory, total)


def watched_log_likelihood(
    chain: Chain, gold: Tensor | None, kernels: ModuleType, *, low_memory: bool = False, total: bool = False
) -> tuple[Tensor, bool | None]:
    """:func:`log_likelihood` by kernels, and whether all of it is finite; None where only a wait would tell."""
    call = _Call(kernels, chain, gold, low_memory, total)
    values: Any = _Value.apply(call, *inputs_of(chain))
    return values, call.told


def _value(chain: Chain, gold: Tensor | None, backend: str, low_memory: bool, total: bool) -> Tensor:
    kernels = trusted_kernels(backend, chain)
    if kernels is not None:
        return watched_log_likelihood(chain, gold, kernels, low_memory=low_memory, total=total)[0]
    # Where kernels stood aside the loop answers: it lets NaN go no further than it must.
    method = "auto" if chain_kernels(backend, chain) is None else "loop"
    method = {"scan": "scan", "reference": "loop"}.get(backend, method)
    value = _reference_value(chain, gold, method)
    value = value if gold is None else -value
    return value.sum() if total else value


def marginals(chain: Chain, *, backend: str = "auto") -> Tensor:
    """p(y_t = c) as (B, T, C), zero past each length; differentiable.

    >>> chain = Chain(torch.zeros(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([1]))
    >>> marginals(chain)
    tensor([[[0.5000, 0.5000],
             [0.0000, 0.0000]]])
    """
    kernels = trusted_kernels(backend, chain)
    if kernels is not None:
        ones = chain.emissions.new_ones(len(chain.emissions))
        return _Gradient.apply(kernels, chain, None, None, ones, *inputs_of(chain))[0]  # type: ignore[index]
    if traced():
        return torch.func.grad(lambda x: log_partition(chain._replace(emissions=x)).sum())(chain.emissions)
    create_graph = carries_graph(chain)
    with torch.enable_grad():
        own = create_graph and chain.emissions.requires_grad
        emissions = chain.emissions if own else chain.emissions.detach().requires_grad_()
        value = log_partition(chain._replace(emissions=emissions), backend=backend)
        return torch.autograd.grad(value.sum(), emissions, create_graph=create_graph)[0]


def expectation(p: Chain, q: Chain, *, backend: str = "auto") -> Tensor:
    """E_{y ~ p}[score_q(y)] of each item, with 0 * -inf = 0; (B,), differentiable in both."""
    kernels = trusted_kernels(backend, p)
    alike = isinstance(p.transitions, SparseTransitions) == isinstance(q.transitions, SparseTransitions)
    if kernels is None or not alike or trusted_kernels(backend, q) is None:
        return reference.expectation(p, q)
    return _Expectation.apply(kernels, p, q, *inputs_of(p), *inputs_of(q))  # type: ignore[return-value]


@torch.no_grad()
def viterbi(chain: Chain, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The highest score (B,) and the labelling that has it (B, T), -1 past the length."""
    return (trusted_kernels(backend, chain) or reference).viterbi(_plain(chain))


@torch.no_grad()
def top_k(chain: Chain, k: int, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The k highest scores (B, k), falling, and their labellings (B, k, T); missing ones are -inf and -1."""
    return (trusted_kernels(backend, chain) or reference).top_k(_plain(chain), k)


@torch.no_grad()
def sample(chain: Chain, uniforms: Tensor, *, backend: str = "auto") -> Tensor:
    """Exact samples (S, B, T), one for each row of uniform numbers in [0, 1) of that shape."""
    return (trusted_kernels(backend, chain) or reference).sample(_plain(chain), uniforms)


def edge_marginals(chain: Chain, *, backend: str = "auto") -> Tensor:
    """p(y_t = i, y_t+1 = j) as (B, T-1, C, C), or (B, T-1, E) for sparse transitions; differentiable."""
    kernels = trusted_kernels(backend, chain)
    if kernels is None or carries_graph(chain):
        return reference.edge_marginals(chain)
    return kernels.posteriors(_plain(chain), by_step=True)[1]
