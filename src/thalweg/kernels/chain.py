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
from thalweg.kernels.reference import chain as dense_reference
from thalweg.kernels.reference import sparse_chain as sparse_reference
from thalweg.kernels.reference.recursion import inside
from thalweg.kernels.semirings import Semiring
from thalweg.kernels.tracing import traced

__all__ = [
    "carries_graph",
    "edge_marginals",
    "expectation",
    "fold",
    "inputs_of",
    "inside",
    "log_likelihood",
    "log_partition",
    "marginals",
    "sample",
    "score",
    "top_k",
    "trusted_kernels",
    "viterbi",
    "watched_log_likelihood",
    "with_inputs",
]


def _reference(chain: Chain) -> Any:
    return sparse_reference if isinstance(chain.transitions, SparseTransitions) else dense_reference


def inputs_of(chain: Chain) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four tensors that gradients flow to.

    >>> len(inputs_of(Chain(torch.zeros(1, 1, 1), *[torch.zeros(1, 1)] * 3, torch.tensor([1]))))
    4
    """
    moves = chain.transitions
    return chain.emissions, moves.scores if isinstance(moves, SparseTransitions) else moves, chain.start, chain.end


def with_inputs(chain: Chain, inputs: Sequence[Tensor]) -> Chain:
    """The chain with those four tensors replaced.

    >>> chain = Chain(torch.zeros(1, 1, 1), *[torch.zeros(1, 1)] * 3, torch.tensor([1]))
    >>> with_inputs(chain, [x + 1 for x in inputs_of(chain)]).emissions
    tensor([[[1.]]])
    """
    emissions, scores, start, end = inputs
    moves = chain.transitions
    moves = moves._replace(scores=scores) if isinstance(moves, SparseTransitions) else scores
    return Chain(emissions, moves, start, end, chain.lengths)


def carries_graph(chain: Chain) -> bool:
    """Whether what is computed from the chain now will be differentiable.

    >>> carries_graph(Chain(torch.zeros(1, 1, 1), *[torch.zeros(1, 1)] * 3, torch.tensor([1])))
    False
    """
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
    """Detached and contiguous, as kernels take it."""
    return with_inputs(chain, [x.detach() if x.is_contiguous() else x.detach().contiguous() for x in inputs_of(chain)])


def _reference_value(chain: Chain, gold: Tensor | None, method: str = "auto") -> Tensor:
    reference = _reference(chain)
    value = (
        reference.log_partition(chain)
        if reference is sparse_reference
        else reference.log_partition(chain, method=method)
    )
    return value if gold is None else torch.where(torch.isneginf(value), value, value - reference.score(chain, gold))


def _aliases(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors under new names: one that serves twice gets the derivative of each use by itself."""
    return [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in inputs]


class _Call:
    """What :class:`_Value` is asked for, and in ``told`` whether it saw that every value is finite, None if not.

    Where the caller is going to ``look`` it may also be a guess, which must be settled before anyone does.
    One argument, for torch looks at each by itself. The gold labels are its own: a backward pass may follow them.
    """

    __slots__ = ("chain", "gold", "kernels", "look", "low_memory", "told", "total")

    def __init__(
        self, kernels: ModuleType, chain: Chain, gold: Tensor | None, low_memory: bool, total: bool, look: bool = False
    ):
        gold = None if gold is None else gold.clone(memory_format=torch.contiguous_format)
        self.kernels, self.chain, self.gold, self.low_memory, self.total = kernels, chain, gold, low_memory, total
        self.look, self.told = look, None

    def at_once(self) -> tuple[Tensor, Any, Any, Any] | None:
        """Values or their total, what a backward pass needs, the gradient for weights of 1, and who can scale it."""
        kernels, chain = self.kernels, self.chain
        if not hasattr(kernels, "at_once"):
            return None
        if not all(x.is_contiguous() for x in inputs_of(chain)):
            chain = _plain(chain)
        found = kernels.at_once(chain, self.gold, self.total, self.look)
        if found is None:
            return None
        value, saved, unit, self.told = found
        return value, saved, unit, kernels.times

    def settle(self) -> bool | None:
        """Whether every value is finite, None if no one knows; what was guessed is as it should be from now on."""
        told, self.told = self.told, None
        return told if told is None or isinstance(told, bool) else told.settled() or None

    def in_turn(self, keep: bool) -> tuple[Tensor, Any, None, None]:
        """The same, as far as the forward pass alone gives it."""
        kernels, gold = self.kernels, self.gold
        signed = {} if gold is None or not getattr(kernels, "signs", False) else {"sign": -1}
        values, saved = kernels.forward(_plain(self.chain), gold, keep=keep, low_memory=self.low_memory, **signed)
        values = values if gold is None or signed else values.neg_()
        return values.sum() if self.total else values, saved, None, None


class _Value(torch.autograd.Function):
    """log Z, or score(gold) - log Z, by a kernel; (B,), or the sum of all.

    Where it is cheaper than to begin again later, the gradient for weights of 1 is made at once.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor):
        keep = True in ctx.needs_input_grad
        found = call.at_once() if keep and not call.low_memory else None
        if found is None:
            found = call.in_turn(keep)
        if keep:
            ctx.save_for_backward(*inputs)
            ctx.rest = call, found[1:]
        return found[0]

    @staticmethod
    def backward(ctx: Any, *weights: Tensor):
        call, (saved, unit, times) = ctx.rest
        inputs = ctx.saved_tensors  # torch complains here if one was changed in place since
        again, gold = torch.is_grad_enabled(), call.gold
        if unit is not None and not again:
            ctx.rest = call, (saved, None, None)  # they may be given away only once
            gradients = times(unit, weights[0], gold)
            if gradients is not None:
                return (None, *gradients)  # type: ignore[misc]
        # The kernels take the gradient of log Z - score(gold).
        kernels, share = call.kernels, (weights[0] if gold is None else -weights[0])
        share = share.expand(len(call.chain.emissions))
        if again:
            gradients = _Gradient.apply(kernels, call.chain, gold, saved, share, *inputs)
        else:
            plain = _plain(call.chain)
            saved = kernels.forward(plain, gold, keep=True)[1] if saved is None else saved
            gradients = kernels.backward(plain, saved, share.contiguous(), gold)
        return (None, *gradients)  # type: ignore[misc]


def _apply(call: _Call) -> Any:
    return _Value.apply(call, *inputs_of(call.chain))


class _Gradient(torch.autograd.Function):
    """The gradient of sum_b weights[b] value[b] by a kernel; its own derivative by the reference."""

    @staticmethod
    def forward(
        ctx: Any, kernels: ModuleType, chain: Chain, gold: Tensor | None, saved: Any, weights: Tensor, *inputs: Tensor
    ):
        ctx.save_for_backward(weights, *inputs)
        ctx.rest = chain, gold
        plain = _plain(chain)
        if saved is None:
            saved = kernels.forward(plain, gold, keep=True)[1]
        return kernels.backward(plain, saved, weights.detach().contiguous(), gold)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor):
        chain, gold = ctx.rest
        again = torch.is_grad_enabled()
        weights, *inputs = ctx.saved_tensors
        with torch.enable_grad():
            weights, *fresh = _aliases((weights, *inputs))
            wanted = [x for x, needed in zip((weights, *fresh), ctx.needs_input_grad[4:], strict=True) if needed]
            value = (_reference_value(with_inputs(chain, fresh), gold) * weights).sum()
            first = torch.autograd.grad(value, fresh, create_graph=True, materialize_grads=True)
            dot = sum((f * c).sum() for f, c in zip(first, cotangents, strict=True))
            # A chain of one label is linear in its scores: its gradient then depends on nothing.
            found = iter(
                torch.autograd.grad(dot, wanted, create_graph=again, materialize_grads=True, allow_unused=True)
                if isinstance(dot, Tensor) and dot.requires_grad
                else [torch.zeros_like(x) for x in wanted]
            )
        gradients = [next(found) if needed else None for needed in ctx.needs_input_grad[4:]]
        return (None, None, None, None, *gradients)


class _Expectation(torch.autograd.Function):
    """E_p[score_q(y)] by a kernel; its derivative by the reference."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, p: Chain, q: Chain, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.rest = p, q
        plain = _plain(p)
        return kernels.expectation(plain, None, _plain(q))

    @staticmethod
    def backward(ctx: Any, *weights: Tensor):
        p, q = ctx.rest
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = _aliases(ctx.saved_tensors)
            value = _reference(p).expectation(with_inputs(p, inputs[:4]), with_inputs(q, inputs[4:]))
            wanted = [x for x, needed in zip(inputs, ctx.needs_input_grad[3:], strict=True) if needed]
            found = iter(torch.autograd.grad(value, wanted, weights[0], create_graph=again, materialize_grads=True))
        return (None, None, None, *(next(found) if needed else None for needed in ctx.needs_input_grad[3:]))


def log_partition(chain: Chain, *, backend: str = "auto", low_memory: bool = False) -> Tensor:
    """log Z of each item, (B,), -inf for one without a feasible labelling; differentiable to any order.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> log_partition(chain).exp()
    tensor([8.])
    """
    return _value(chain, None, backend, low_memory)


def log_likelihood(
    chain: Chain,
    gold: Tensor,
    *,
    backend: str = "auto",
    low_memory: bool = False,
    total: bool = False,
) -> Tensor:
    """score(gold) - log Z of each item, with gold (B, T); (B,), in one pass and with the digits of float64.

    ``total`` gives their sum alone, which takes fewer steps of autograd.

    +inf stands for an item without a feasible labelling; the compiled kernels check the labels: one out of range is a
    ShapeError on the CPU and gives NaN on the GPU.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> log_likelihood(chain, torch.zeros(1, 3, dtype=torch.long)).exp()
    tensor([0.1250])
    """
    return _value(chain, gold, backend, low_memory, total)


def watched_log_likelihood(
    chain: Chain,
    gold: Tensor,
    kernels: ModuleType,
    *,
    low_memory: bool = False,
    total: bool = False,
    look: bool = True,
) -> tuple[Tensor, bool | None]:
    """:func:`log_likelihood` by compiled kernels, and whether all of it is finite; None where no one looked.

    Without ``look`` nothing waits for a GPU; with it, kernels may take shorter ways and wait to hear if they could.

    >>> from thalweg.kernels.dispatch import chain_kernels
    >>> none = torch.zeros(2)
    >>> chain = Chain(torch.zeros(16, 1, 2).requires_grad_(), torch.zeros(2, 2), none, none, torch.full((16,), 1))
    >>> watched_log_likelihood(chain, torch.zeros(16, 1).long(), chain_kernels("auto", chain))[1] in (True, None)
    True
    """
    call = _Call(kernels, chain, gold, low_memory, total, look)
    return _apply(call), call.settle()


def _value(chain: Chain, gold: Tensor | None, backend: str, low_memory: bool, total: bool = False) -> Tensor:
    kernels = trusted_kernels(backend, chain)
    if kernels is None:
        # Where kernels stood aside the loop answers: it lets NaN go no further than it must.
        method = "auto" if chain_kernels(backend, chain) is None else "loop"
        method = {"scan": "scan", "reference": "loop"}.get(backend, method)
        value = _reference_value(chain, gold, method)
        value = value if gold is None else -value
        return value.sum() if total else value
    return _apply(_Call(kernels, chain, gold, low_memory, total))


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
        emissions = chain.emissions if create_graph else chain.emissions.detach()
        emissions = emissions if emissions.requires_grad else emissions.detach().requires_grad_()
        value = log_partition(chain._replace(emissions=emissions), backend=backend)
        return torch.autograd.grad(value.sum(), emissions, create_graph=create_graph)[0]


def expectation(p: Chain, q: Chain, *, backend: str = "auto") -> Tensor:
    """E_{y ~ p}[score_q(y)] of each item, with 0 * -inf = 0; (B,), differentiable in both.

    >>> p = Chain(torch.zeros(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> expectation(p, p._replace(emissions=torch.tensor([[[1.0, 3.0], [0.0, 0.0]]])))
    tensor([2.])
    """
    kernels = trusted_kernels(backend, p)
    alike = isinstance(p.transitions, SparseTransitions) == isinstance(q.transitions, SparseTransitions)
    if kernels is None or not alike or trusted_kernels(backend, q) is None:
        return _reference(p).expectation(p, q)
    return _Expectation.apply(kernels, p, q, *inputs_of(p), *inputs_of(q))  # type: ignore[return-value]


def fold(semiring: Semiring, chain: Chain, *others: Chain) -> Tensor:
    """The sum over all labellings in an algebra, by plain PyTorch.

    >>> from thalweg.kernels.semirings import Max
    >>> fold(Max(), Chain(torch.ones(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2])))
    tensor([2.])
    """
    return _reference(chain).fold(semiring, chain, *others)


def score(chain: Chain, labels: Tensor) -> Tensor:
    """The score of labellings (..., B, T) as (..., B); labels past the length count for nothing.

    >>> chain = Chain(torch.ones(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> score(chain, torch.tensor([[0, 1]]))
    tensor([2.])
    """
    return _reference(chain).score(chain, labels)


def _decoder(backend: str, chain: Chain) -> Any:
    return trusted_kernels(backend, chain) or _reference(chain)


@torch.no_grad()
def viterbi(chain: Chain, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The highest score (B,) and the labelling that has it (B, T), -1 past the length.

    >>> none = torch.zeros(2)
    >>> chain = Chain(torch.tensor([[[0.0, 1.0]]]), torch.zeros(2, 2), none, none, torch.tensor([1]))
    >>> viterbi(chain)
    (tensor([1.]), tensor([[1]]))
    """
    return _decoder(backend, chain).viterbi(_plain(chain))


@torch.no_grad()
def top_k(chain: Chain, k: int, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The k highest scores (B, k), falling, and their labellings (B, k, T); missing ones are -inf and -1.

    >>> none = torch.zeros(2)
    >>> chain = Chain(torch.tensor([[[0.0, 1.0]]]), torch.zeros(2, 2), none, none, torch.tensor([1]))
    >>> top_k(chain, 3)[0]
    tensor([[1., 0., -inf]])
    """
    return _decoder(backend, chain).top_k(_plain(chain), k)


@torch.no_grad()
def sample(chain: Chain, uniforms: Tensor, *, backend: str = "auto") -> Tensor:
    """Exact samples (S, B, T), one for each row of uniform numbers in [0, 1) of that shape.

    >>> chain = Chain(torch.zeros(1, 1, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([1]))
    >>> sample(chain, torch.tensor([[[0.4]], [[0.6]]])).flatten()
    tensor([0, 1])
    """
    return _decoder(backend, chain).sample(_plain(chain), uniforms)


def edge_marginals(chain: Chain, *, backend: str = "auto") -> Tensor:
    """p(y_t = i, y_t+1 = j) as (B, T-1, C, C), or (B, T-1, E) for sparse transitions; differentiable.

    >>> chain = Chain(torch.zeros(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> edge_marginals(chain).flatten()
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    kernels = trusted_kernels(backend, chain)
    if kernels is None or carries_graph(chain):
        return _reference(chain).edge_marginals(chain)
    return kernels.edge_marginals(_plain(chain))
