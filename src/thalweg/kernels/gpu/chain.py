"""Exact inference over linear chains on the GPU: the backend functions, each a handful of launches and no waiting.

Shared and per-item transitions of up to 128 labels go through `chain_scaled` and, for the items that underflow there,
`chain_log`; everything else through `chain_log` alone. Which items those are is decided on the device. Results are the
same, bit for bit, every time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from thalweg.kernels.gpu import chain_decode, chain_decode_chunks, chain_launch, chain_posterior
from thalweg.kernels.gpu.chain_checkpoints import (
    Checkpoints,
    checkpointed_backward,
    checkpointed_forward,
    log_messages,
)
from thalweg.kernels.gpu.chain_launch import (
    Guess,
    Saved,
    dense,
    gradients,
    guessed,
    messages,
    plan_of,
    values_and_gradients,
)
from thalweg.kernels.gpu.launching import NOTHING, Launch, Layout, launch, numbered, on_device_of, replayed
from thalweg.kernels.potentials import Chain

checks_labels = True  # forward gives NaN to an item with a gold label out of range
signs = True  # forward takes the sign of its values

SMALL = 1 << 18  # numbers of a batch whose gradient takes less time to compute than to ask for
MOST_SEEN = 2048  # items that one program looks through in passing

__all__ = ["at_once", "backward", "edge_marginals", "expectation", "forward", "sample", "times", "top_k", "viterbi"]


def at_once(
    chain: Chain, gold: Tensor | None, total: bool, look: bool = False
) -> tuple[Tensor, Saved, tuple[Tensor, ...], Guess | None] | None:
    """log Z, or score(gold) - log Z; what :func:`backward` needs; the gradient of the sum of these values; no more.

    The values are (B,), or their sum where that is asked for. Whether they are finite only a wait would tell. A caller
    who is going to ``look`` saves two launches: last comes a guess then, and all is as it says once it is ``settled``.
    None where the batch is so large that computing the gradient takes longer than asking for it.

    >>> chain = Chain(torch.zeros(64, 512, 64), torch.zeros(64, 64), *[torch.zeros(64)] * 2, torch.full((64,), 512))
    >>> at_once(chain, None, False) is None
    True
    """
    emissions = chain.emissions
    if emissions.numel() > SMALL:
        return None
    plan, sign = plan_of(chain), 1 if gold is None else -1
    if plan.B == 0:
        return None
    weights = _units(plan.B, emissions.dtype, emissions.device, float(sign))
    gold = None if gold is None else gold.contiguous()
    look = look and plan.scaled and plan.B <= MOST_SEEN and not _captured(emissions)
    with on_device_of(emissions):
        if look:
            return guessed(plan, chain, gold, weights, total=total)
        values, saved, gradients = values_and_gradients(plan, chain, gold, weights)
    return values.sum() if total else values, saved, gradients, None


def _captured(x: Tensor) -> bool:
    """A graph cannot wait for the host."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=64)
def _units(count: int, dtype: torch.dtype, device: torch.device, value: float) -> Tensor:
    return torch.full((count,), value, dtype=dtype, device=device)


def times(gradients: tuple[Tensor, ...], weights: Tensor, gold: Tensor | None) -> tuple[Tensor, ...] | None:
    """The gradient of :func:`at_once` for weights (B,) of its values or one for all, in place; None if they may differ.

    >>> times((torch.ones(1),), torch.tensor(3.0).expand(2), None)
    (tensor([3.]),)
    """
    if weights.dim() and weights.stride(0):
        return None  # whether they are alike, only a wait for the device would tell
    if not weights.is_cuda:
        torch._foreach_mul_(gradients, weights[0] if weights.dim() else weights)  # pyright: ignore[reportPrivateImportUsage]
        return gradients
    with on_device_of(weights):
        _scale(gradients, weights)
    return gradients


def _scale(gradients: tuple[Tensor, ...], weight: Tensor) -> None:
    """Multiply all of them, in place, by the first entry of ``weight``: one launch, no view of that entry."""
    key, body = _scaling(gradients[0].shape, gradients[1].shape, weight.dtype)
    replayed(key, (*gradients, weight), NOTHING, body)


@lru_cache(maxsize=512)
def _scaling(emissions: torch.Size, transitions: torch.Size, dtype: torch.dtype) -> tuple[int, Callable[..., None]]:
    count, moves, C, block = emissions.numel(), transitions.numel(), emissions[-1], 1024

    def body(start_kernel: Launch, given: tuple[Tensor, ...], _: tuple[Tensor, ...]) -> None:
        programs = -(-max(count, moves) // block)
        width = max(16, 1 << (C - 1).bit_length())
        start_kernel(chain_posterior.scale, (programs,), *given, count, moves, C, CP=width, BLOCK=block)

    return numbered(("scale", emissions, transitions, dtype)), body


def forward(
    chain: Chain,
    gold: Tensor | None = None,
    *,
    keep: bool = True,
    low_memory: bool = False,
    method: str = "auto",
    sign: int = 1,
) -> tuple[Tensor, Saved | Checkpoints | None]:
    """log Z of each item, less the score of its gold labels where they are given.

    Args:
        chain: the scores; see :class:`thalweg.kernels.potentials.Chain`.
        gold: ``(B, T)`` int64; what lies past the length is not read.
        keep: whether to return what :func:`backward` needs.
        low_memory: keep messages at every ~sqrt(T)-th position only.
        method: "sequential" walks from end to end; "chunked" walks many chunks at once, each from a guess made some
            way before it, and falls back where the guesses do not fit; "auto" chooses by size.
        sign: what the values are multiplied by, 1 or -1.
    Returns:
        ``(B,)`` in the type of the emissions, -inf for an item with no structure, and what was kept.

    T steps one after another, forwards and backwards at once; O(T C^2) work and O(T C) memory an item, without ``keep``
    O(T + C).

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> if torch.cuda.is_available():
    ...     values, saved = forward(Chain(*(part.cuda() for part in chain)))
    ...     assert abs(values.item() - 3 * torch.log(torch.tensor(2.0)).item()) < 1e-6
    """
    plan = plan_of(chain, method)
    if plan.B == 0:
        return chain.emissions.new_empty(0), None
    gold = None if gold is None else gold.contiguous()
    with on_device_of(chain.emissions):
        if low_memory:
            values, checkpoints = checkpointed_forward(chain, gold, keep=keep)
            return values * sign, checkpoints
        values, saved = messages(plan, chain, gold, keep=keep, both=keep, sign=sign)
    return values, saved if keep else None


def backward(
    chain: Chain, saved: Saved | Checkpoints | None, weights: Tensor, gold: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of sum_b weights[b] values[b] for the values of :func:`forward` with the same ``gold``.

    Args:
        chain: as given to :func:`forward`.
        saved: what it kept.
        weights: ``(B,)``.
        gold: ``(B, T)`` int64 or None.
    Returns:
        ``(B, T, C)`` marginals less gold one-hots, times the weights, 0 past the length; the same for transitions, in
        their shape; for start and for end, ``(C,)``.

    No step waits for another: every position is by itself, and the sum over positions is a matrix product of float32
    accuracy. Partial sums are added in a fixed order.

    >>> chain = Chain(torch.zeros(1, 3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([3]))
    >>> if torch.cuda.is_available():
    ...     chain = Chain(*(part.cuda() for part in chain))
    ...     d_emissions, d_transitions, d_start, d_end = backward(chain, forward(chain)[1], chain.start.new_ones(1))
    ...     assert d_transitions.sum().item() == 2.0
    """
    emissions = chain.emissions
    if saved is None:  # no items
        empty = torch.zeros_like(chain.start)
        return torch.zeros_like(emissions), torch.zeros_like(dense(chain)), empty, empty.clone()
    if weights.dtype != emissions.dtype:
        weights = weights.to(emissions.dtype)
    weights, gold = weights.contiguous(), None if gold is None else gold.contiguous()
    with on_device_of(emissions):
        if isinstance(saved, Checkpoints):
            return checkpointed_backward(chain, saved, weights, gold)
        d_transitions = torch.empty_like(dense(chain))
        d_emissions, ends = gradients(plan_of(chain), chain, saved, weights, gold, d_transitions)
    return d_emissions, d_transitions, *ends


def viterbi(chain: Chain, method: str = "auto") -> tuple[Tensor, Tensor]:
    """The best labels of each item and their score.

    Args:
        chain: the scores.
        method: as of :func:`forward`.
    Returns:
        scores ``(B,)``, -inf for an item with no structure; labels ``(B, T)`` int64, -1 past the length. Among equals
        the lowest label wins, going backwards from the last position.

    T steps of O(C^2) and T back of O(C), or as many as two chunks have; memory O(T C) an item. The score is that of the
    labels, summed in float64.

    >>> chain = Chain(torch.eye(2)[None], torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> if torch.cuda.is_available():
    ...     assert viterbi(Chain(*(part.cuda() for part in chain)))[1].tolist() == [[0, 1]]
    """
    plan = plan_of(chain, method)
    emissions, _, start, end, lengths = chain
    transitions = dense(chain)
    B, T, C, width = plan.B, plan.T, plan.C, plan.width
    scores = emissions.new_empty(B)
    labels = lengths.new_empty((B, T))
    if B == 0:
        return scores, labels
    real, chunks = emissions.dtype, -(-T // plan.chunk) if plan.chunk else 0
    few, some = (B,), (B, chunks) if plan.chunk else (0,)
    layout = Layout.of(
        (real, (B, T, C)),
        (real, (plan.matrices, width, width) if plan.scaled else (0,)),
        (torch.int32, few),
        (real, (*some, width) if plan.chunk else (0,)),
        (torch.float64, some),
        (torch.int32, some),
    )

    def body(start_kernel: Launch, given: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> None:
        emissions, transitions, start, end, lengths, scores, labels = given
        delta, columns, redo, entries, sums, meetings = parts
        if plan.chunk:
            sizes = (T, C, plan.kind, plan.chunk, chain_launch.WARM_UP, chunks)
            start_kernel(
                chain_decode_chunks.max_chunks, (B, chunks),
                emissions, transitions, start, end, lengths, delta, columns, entries, redo, *sizes,
                CP=width, num_warps=plan.walk_warps,
            )  # fmt: skip
            start_kernel(
                chain_decode_chunks.trace_chunks, (B, chunks),
                emissions, transitions, columns, start, end, lengths, delta, entries, redo, sums, meetings, labels,
                *sizes, WIDTH=width, CP=max(32, width), num_warps=1,
            )  # fmt: skip
            start_kernel(
                chain_decode_chunks.join_chunks, few,
                lengths, redo, sums, meetings, labels, scores, T, plan.chunk, chunks, BK=128, num_warps=1,
            )  # fmt: skip
        if plan.scaled:
            start_kernel(
                chain_decode.max_walk, few,
                emissions, transitions, start, end, lengths, delta, columns, redo,
                T, C, plan.kind, CP=width, AGAIN=plan.chunk > 0, num_warps=plan.walk_warps,
            )  # fmt: skip
            strides = (plan.kind * width * width, 0, width, 1)
        else:
            columns = transitions
            start_kernel(
                chain_decode.max_walk_streamed, few,
                emissions, transitions, start, end, lengths, delta,
                T, C, plan.stride_item, plan.stride_step, CP=width, BR=plan.tile,
                num_warps=max(1, min(8, width // 32)),
            )  # fmt: skip
            strides = (plan.stride_item, plan.stride_step, 1, C)
        start_kernel(
            chain_decode.trace, few,
            emissions, transitions, columns, start, end, lengths, delta, redo, scores, labels,
            T, C, plan.stride_item, plan.stride_step, *strides, CP=max(32, width), AGAIN=plan.chunk > 0, num_warps=1,
        )  # fmt: skip

    key = ("viterbi", plan, chain_launch.WARM_UP)
    with on_device_of(emissions):
        replayed(key, (emissions, transitions, start, end, lengths, scores, labels), layout, body)
    return scores, labels


def sample(chain: Chain, uniforms: Tensor) -> Tensor:
    """Exact samples by inverting cumulative distributions, backwards from the last position.

    Args:
        chain: the scores.
        uniforms: ``(S, B, T)`` in [0, 1); position t of item b in sample s uses ``uniforms[s, b, t]``.
    Returns:
        ``(S, B, T)`` int64, -1 past the length.

    T steps of O(C^2) once, then T steps of O(C) for all S at once.

    >>> chain = Chain(torch.zeros(1, 1, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([1]))
    >>> if torch.cuda.is_available():
    ...     chain = Chain(*(part.cuda() for part in chain))
    ...     assert sample(chain, torch.tensor([0.2, 0.7], device="cuda").view(2, 1, 1)).tolist() == [[[0]], [[1]]]
    """
    plan = plan_of(chain)
    emissions, _, _, _, lengths = chain
    transitions = dense(chain)
    labels = lengths.new_empty(uniforms.shape)
    if labels.numel() == 0:
        return labels
    with on_device_of(emissions):
        _, saved = messages(plan, chain, None, keep=True, both=False)
        launch(
            chain_decode.sample_back, (plan.B, len(uniforms)),
            transitions, lengths, saved.flags, saved.messages, uniforms.contiguous(), labels,
            plan.B, plan.T, plan.C, plan.stride_item, plan.stride_step,
            CP=max(32, plan.width), ALWAYS=not plan.scaled, num_warps=1,
        )  # fmt: skip
    return labels


def edge_marginals(chain: Chain) -> Tensor:
    """p(y_t = i, y_(t+1) = j) as (B, T-1, C, C), 0 past the length; built only when asked for.

    >>> chain = Chain(torch.zeros(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> if torch.cuda.is_available():
    ...     assert (edge_marginals(Chain(*(part.cuda() for part in chain))) == 0.25).all()
    """
    emissions, _, _, end, lengths = chain
    transitions = dense(chain)
    plan = plan_of(chain)
    if plan.B == 0 or plan.T == 1:
        return emissions.new_zeros((plan.B, plan.T - 1, plan.C, plan.C))
    with on_device_of(emissions):
        _, saved = messages(plan, chain, None, keep=True, both=True)
        alpha, beta = log_messages(saved, scaled=plan.scaled)
        after = torch.arange(1, plan.T, device=lengths.device)
        onward = emissions[:, 1:] + beta[:, 1:]
        onward += torch.where((after == lengths[:, None] - 1)[:, :, None], end, 0.0)
        matrices = transitions[:, None] if plan.kind == 1 else transitions
        edges = alpha[:, :-1, :, None] + matrices
        edges += onward[:, :, None, :]
        # Past the length there may be anything, NaN included.
        edges.masked_fill_((after >= lengths[:, None])[:, :, None, None], -torch.inf)
        edges -= edges.amax((2, 3), keepdim=True).nan_to_num_(neginf=0.0)
        edges.exp_()
        edges /= edges.sum((2, 3), keepdim=True).clamp_(min=torch.finfo(edges.dtype).tiny)
    return edges


def _product(probabilities: Tensor, scores: Tensor) -> Tensor:
    """Their product summed over all but the batch, in float64, where what is impossible counts nothing."""
    scores = torch.where(probabilities == 0, 0.0, scores)
    return (probabilities.double() * scores).flatten(1).sum(1)


def expectation(chain: Chain, saved: Saved | Checkpoints | None, other: Chain) -> Tensor:
    """E[score of y under ``other``] for y drawn from ``chain``, (B,); 0 times -inf counts as 0.

    Both have the same B, T, C and lengths; ``saved`` is what :func:`forward` kept of ``chain``. No (B, T, C, C) tensor
    is made unless transitions of that shape were given.

    >>> chain = Chain(torch.zeros(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> if torch.cuda.is_available():
    ...     chain = Chain(*(part.cuda() for part in chain))
    ...     other = chain._replace(transitions=torch.eye(2, device="cuda"))
    ...     assert expectation(chain, forward(chain)[1], other).item() == 0.5
    """
    plan = plan_of(chain)
    emissions, _, _, _, lengths = chain
    transitions = dense(chain)
    if plan.B == 0:
        return emissions.new_empty(0)
    matrices = dense(other)
    kind = matrices.dim() - 2
    with on_device_of(emissions):
        if not isinstance(saved, Saved):
            _, saved = messages(plan, chain, None, keep=True, both=True)
        edges = torch.empty_like(transitions) if plan.kind else transitions.new_empty((plan.B, plan.C, plan.C))
        marginals, _ = gradients(plan, chain, saved, emissions.new_ones(plan.B), None, edges)
        if kind == 2 and plan.kind != 2:
            edges = edge_marginals(chain)
    rows = torch.arange(plan.B, device=lengths.device)
    matrices = matrices if kind == 2 or plan.kind != 2 else matrices.unsqueeze(-3)
    total = _product(marginals, other.emissions) + _product(edges, matrices.expand_as(edges))
    total += _product(marginals[:, 0], other.start.expand_as(marginals[:, 0]))
    last = marginals[rows, lengths - 1]
    return (total + _product(last, other.end.expand_as(last))).to(emissions.dtype)


def top_k(chain: Chain, k: int) -> tuple[Tensor, Tensor]:
    """The k best labellings of each item.

    Returns:
        scores ``(B, k)``, falling, and labels ``(B, k, T)`` int64, -1 past the length; where there are fewer than k,
        -inf and -1.

    T steps of tensor operations with O(k C^2) work an item each.

    >>> emissions = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    >>> chain = Chain(emissions, torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> top_k(chain, 2)[1].tolist()
    [[[0, 1], [1, 1]]]
    """
    emissions, _, start, end, lengths = chain
    transitions = dense(chain)
    plan = plan_of(chain)
    B, T, C = emissions.shape
    best = emissions.new_full((B, C, k), -torch.inf)
    best[:, :, 0] = emissions[:, 0] + start + torch.where(lengths[:, None] == 1, end, 0.0)
    back = lengths.new_zeros((T, B, k, C))
    for t in range(1, T):
        matrix = transitions[:, t - 1] if plan.kind == 2 else transitions.expand(B, C, C)
        paths = (best[:, :, :, None] + matrix[:, :, None, :]).reshape(B, C * k, C)
        scores, back[t] = paths.topk(k, dim=1)
        scores = scores + (emissions[:, t] + torch.where((lengths - 1 == t)[:, None], end, 0.0))[:, None]
        best = torch.where((t < lengths)[:, None, None], scores.transpose(1, 2), best)
    scores, place = best.reshape(B, C * k).topk(k, dim=1)
    labels = lengths.new_full((B, k, T), -1)
    for t in reversed(range(T)):
        labels[:, :, t] = torch.where((t < lengths)[:, None], place // k, -1)
        before = back[t].view(B, k * C).gather(1, place % k * C + place // k)
        place = torch.where((t < lengths)[:, None], before, place)
    labels.masked_fill_((scores == -torch.inf)[:, :, None], -1)
    return scores, labels
