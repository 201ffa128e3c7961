"""Associative memories: one association, retrieval until rest, and the nearest patterns, without the Q x N weights.

Compiled kernels where they exist, plain PyTorch otherwise; gradients compute the weights anew block by block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.kernels.dispatch import memory_kernels, on_cpu
from thalweg.kernels.reference import memory as reference
from thalweg.kernels.reference.memory import Settled
from thalweg.kernels.tracing import traced
from thalweg.limits import enough_memory


def _check(queries: Tensor, keys: Tensor, mask: Tensor | None, block: int | None, name: str = "keys") -> None:
    asked, stored = queries.shape, keys.shape
    if len(asked) != 2 or len(stored) != 2 or asked[1] != stored[1]:
        raise ShapeError(f"`queries` must be (Q, D) and `{name}` (N, D), got {tuple(asked)} and {tuple(stored)}")
    if queries.dtype is not keys.dtype or not queries.is_floating_point():
        raise ShapeError(
            f"`queries` and `{name}` must be floating-point numbers of one type, got {queries.dtype} and {keys.dtype}"
        )
    if mask is not None and (mask.shape != stored[:1] or mask.dtype != torch.bool):
        raise ShapeError(
            f"`mask` must be (N,) bool with N = {stored[0]}, True where a pattern is present, "
            f"got {tuple(mask.shape)} {mask.dtype}"
        )
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ConfigError(f"`block` must be at least 1 pattern, got {block!r}")


def _check_beta(beta: float | Tensor) -> None:
    if isinstance(beta, Tensor):
        if beta.dim():
            raise ShapeError(f"`beta` must be a number or a tensor of shape (), got {tuple(beta.shape)}")
        if on_cpu(beta) and not traced():  # elsewhere a look is dear
            _check_beta(beta.item())
    elif not 0 < beta < math.inf:
        raise ConfigError(f"`beta` must be positive and finite, got {beta}")


def _backend(queries: Tensor, keys: Tensor, values: Tensor) -> Any:
    """The kernels for these tensors, the first of which decides; the reference where another is of another kind."""
    kernels = memory_kernels(queries)
    if kernels is None or values.dtype is not queries.dtype or not keys.numel() or not values.numel():
        return reference
    return kernels if keys.device == values.device == queries.device else reference


class _Associate(torch.autograd.Function):
    """:func:`associate` whose gradient holds no more than one block of weights; differentiable again by autograd."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, beta: Any, mask: Any, block: Any) -> Any:
        mixed, lse = _backend(queries, keys, values).associate(queries, keys, values, beta, mask, block)
        ctx.save_for_backward(queries, keys, values, mixed, lse, *([beta] if torch.is_tensor(beta) else []))
        ctx.others = beta, mask, block
        return mixed, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        queries, keys, values, mixed, lse, *learned = ctx.saved_tensors
        beta, mask, block = ctx.others
        beta = learned[0] if learned else beta
        inputs, outputs = (queries, keys, values, beta, mask), (mixed, lse)
        *found, of_beta = reference.associate_gradient(inputs, outputs, gradients, block)
        return *found, of_beta if learned else None, None, None


def associate(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    beta: float | Tensor,
    mask: Tensor | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""What a memory of N patterns answers to Q queries in one association, and the log-sum-exp of their scores.

    .. math:: y_q = \sum_i p_{qi} v_i, \quad p_{q\cdot} = \mathrm{softmax}_i(\beta\, q \cdot k_i), \qquad
        l_q = \frac{1}{\beta} \log \sum_i \exp(\beta\, q \cdot k_i)

    Args:
        queries: ``(Q, D)``.
        keys: ``(N, D)``, in the type of ``queries``.
        values: ``(N, E)``.
        beta: inverse temperature, positive; a tensor of shape () has a gradient too.
        mask: ``(N,)`` bool, True where a pattern is present; absent ones may hold anything, NaN included.
        block: patterns looked at together; none leaves the choice to the kernel.
    Returns:
        mixed ``(Q, E)`` in the type of ``values`` and lse ``(Q,)``, float32 for half precision. Where no pattern is
        present they are 0 and -inf. Both are differentiable, twice too; a second derivative holds all Q N weights.

    Time O(Q N (D + E)), memory O(Q (D + E + block)); the gradient computes the weights anew. Ramsauer et al. (2021).

    >>> associate(torch.zeros(1, 2), torch.eye(2), torch.tensor([[1.0], [3.0]]), beta=1.0)
    (tensor([[2.]]), tensor([0.6931]))
    """
    _check(queries, keys, mask, block)
    _check_beta(beta)
    if len(shape := values.shape) != 2 or shape[0] != keys.shape[0] or not values.is_floating_point():
        raise ShapeError(f"`values` must be (N, E) numbers with N = {len(keys)}, got {tuple(shape)}")
    learned = queries.requires_grad or keys.requires_grad or values.requires_grad
    learned = learned or (isinstance(beta, Tensor) and beta.requires_grad)
    if traced():
        return reference.associate(queries, keys, values, beta, mask, block)
    if not learned or not torch.is_grad_enabled():
        return _backend(queries, keys, values).associate(queries, keys, values, beta, mask, block)
    return _Associate.apply(queries, keys, values, beta, mask, block)  # pyright: ignore[reportReturnType]


def _untouched(queries: Tensor, patterns: Tensor) -> bool:
    """Whether a kernel may have them: float32, no gradient is wanted, nobody follows what PyTorch does to them."""
    return (
        not torch.compiler.is_compiling()
        and queries.dtype is patterns.dtype is torch.float32
        and type(queries) is type(patterns) is Tensor
        and not ((queries.requires_grad or patterns.requires_grad) and torch.is_grad_enabled())
        and not traced()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        and not torch.is_autocast_enabled(queries.device.type)
    )


def attend(queries: Tensor, patterns: Tensor, beta: float) -> Tensor:
    r"""X' softmax(beta X q) for queries ``(Q, D)`` and patterns ``(N, D)``, or ``(B, Q, D)`` and ``(B, N, D)``.

    The caller has looked at shapes and types. A kernel of our own where there is one memory in float32 and nothing is
    to be differentiated; else PyTorch's attention, also where that is faster; plain operations under ``torch.func``.

    >>> attend(torch.zeros(1, 2), torch.eye(2), 1.0)
    tensor([[0.5000, 0.5000]])
    """
    shape, stored = queries.shape, patterns.shape
    if (len(shape) == 2 or shape[0] == 1) and stored[-2] and _untouched(queries, patterns):
        kernels = memory_kernels(queries)
        if kernels is not None and queries.device == patterns.device and stored[-2] >= kernels.LEAST:
            kept = patterns.reshape(stored[-2:])
            return kernels.associate(queries.reshape(-1, stored[-1]), kept, kept, beta, None, None)[0].view(shape)
    if traced():  # PyTorch's attention has no forward derivative
        return torch.softmax(beta * (queries @ patterns.mT), -1) @ patterns
    batch = shape[:-2] or (1,)
    given, kept = queries.reshape(*batch, 1, *shape[-2:]), patterns.reshape(*batch, 1, *stored[-2:])
    return torch.nn.functional.scaled_dot_product_attention(given, kept, kept, scale=beta).reshape(shape)


def settle(
    queries: Tensor,
    patterns: Tensor,
    *,
    beta: float | Tensor,
    max_steps: int,
    tol: float,
    mask: Tensor | None = None,
    block: int | None = None,
) -> Settled:
    r"""Queries that repeat their association with a memory until they come to rest, each by itself.

    .. math:: q \leftarrow X^\top \mathrm{softmax}(\beta X q) \text{ until } \|q_{\mathrm{new}} - q\| \le \mathrm{tol},
        \qquad E(q) = -\frac{1}{\beta} \log \sum_i e^{\beta x_i \cdot q} + \frac{\log N}{\beta}
        + \frac{\|q\|^2}{2} + \frac{M^2}{2}

    with N the number of patterns that are present and M their largest norm. The energy never rises.

    Args:
        queries, patterns, beta, mask, block: as of :func:`associate`, whose keys and values the patterns are.
        max_steps: updates at most; 0 gives the energies alone.
        tol: how far an update may move a query that is at rest; negative never stops before ``max_steps``.
    Returns:
        :class:`Settled`, without gradient. Where no pattern is present the state is 0 and its energy infinite.

    Time O(steps Q N D) where queries at rest take no further part; memory O(Q (D + max_steps)). Ramsauer et al. (2021).

    >>> found = settle(torch.tensor([[0.9, 0.2]]), torch.eye(2), beta=50.0, max_steps=10, tol=1e-4)
    >>> found.state.round(), found.steps, found.converged
    (tensor([[1., 0.]]), tensor([2]), tensor([True]))
    """
    _check(queries, patterns, mask, block, "patterns")
    _check_beta(beta)
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 0 or math.isnan(tol):
        raise ConfigError(f"`max_steps` must be 0 or more and `tol` a number, got {max_steps} and {tol}")
    queries, patterns = queries.detach(), patterns.detach()
    kernels = _backend(queries, patterns, patterns)
    with enough_memory(len(queries) * max_steps, max_steps=max_steps):
        return kernels.settle(queries, patterns, float(beta), max_steps, tol, mask, block)


def nearest(
    queries: Tensor, keys: Tensor, k: int, *, mask: Tensor | None = None, block: int | None = None
) -> tuple[Tensor, Tensor]:
    r"""The k patterns with the largest dot product for every query, best first.

    Args:
        queries, keys, mask, block: as of :func:`associate`.
        k: how many, at least 1; more than are present is allowed.
    Returns:
        scores ``(Q, k)`` and indices ``(Q, k)`` int64, without gradient; places that no pattern fills have score -inf
        and index -1. Among equal scores any order may come.

    Time O(Q N (D + log k)), memory O(Q (k + block)).

    >>> nearest(torch.ones(1, 2), torch.eye(2) * torch.tensor([1.0, 5.0]), 1)
    (tensor([[5.]]), tensor([[1]]))
    """
    _check(queries, keys, mask, block)
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ConfigError(f"`k` must be an integer of at least 1, got {k!r}")
    queries, keys = queries.detach(), keys.detach()
    with enough_memory(2 * len(queries) * k, k=k):
        return _backend(queries, keys, keys).nearest(queries, keys, k, mask, block)
