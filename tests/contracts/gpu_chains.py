"""Chains for the tests of GPU kernels; their values, gradients and best labels by plain Python."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contracts.triton_kernels import DEVICE
from thalweg.kernels.potentials import Chain

INF = math.inf


def matrix(chain: Chain, item: int, step: int) -> Tensor:
    A = chain.transitions
    assert isinstance(A, Tensor)
    return (A, A[item] if A.dim() == 3 else A, A[item, step] if A.dim() == 4 else A)[A.dim() - 2]


def problem(
    B: int,
    T: int,
    C: int,
    kind: int,
    dtype: torch.dtype = torch.float32,
    *,
    scale: float = 1.0,
    forbid: float = 0.0,
    whole: bool = False,
    seed: int = 0,
) -> tuple[Chain, Tensor]:
    """A chain with lengths of every kind, NaN wherever nothing may be read, and gold labels."""
    draw = torch.Generator().manual_seed(seed)
    shape = [(C, C), (B, C, C), (B, T - 1, C, C)][kind]
    emissions = torch.randn(B, T, C, generator=draw) * scale
    transitions = torch.randn(shape, generator=draw) * scale
    start, end = torch.randn(2, C, generator=draw)
    if whole:
        emissions, transitions, start, end = emissions.round(), transitions.round(), start.round(), end.round()
    lengths = torch.randint(1, T + 1, (B,), generator=draw)
    lengths[0] = T
    gold = torch.randint(0, C, (B, T), generator=draw)
    if forbid:  # label 0 may follow and precede everything, so that everything is feasible
        transitions[torch.rand(shape, generator=draw) < forbid] = -INF
        transitions[..., 0, :] = transitions[..., :, 0] = 0.0
        gold.zero_()
    past = torch.arange(T) >= lengths[:, None]
    emissions[past] = math.nan
    gold[past] = -9
    if kind == 2:
        transitions[past[:, 1:]] = math.nan
    parts = (part.to(DEVICE, dtype) for part in (emissions, transitions, start, end))
    return Chain(*parts, lengths.to(DEVICE)), gold.to(DEVICE)


def best_labels(chain: Chain) -> Tensor:
    """Viterbi with back-pointers; the lowest label among equals."""
    plain = Chain(*(part.cpu() for part in chain))
    labels = torch.full(plain.emissions.shape[:2], -1)
    for b, length in enumerate(plain.lengths.tolist()):
        delta = plain.emissions[b, 0] + plain.start + (plain.end if length == 1 else 0)
        back = []
        for t in range(1, length):
            paths = delta[:, None] + matrix(plain, b, t - 1)
            best = paths.amax(0)
            back.append((paths == best).int().argmax(0))
            delta = best + plain.emissions[b, t] + (plain.end if t == length - 1 else 0)
        y = int((delta == delta.max()).int().argmax())
        labels[b, length - 1] = y
        for t in reversed(range(length - 1)):
            y = int(back[t][y])
            labels[b, t] = y
    return labels


# A plain log-space recursion in float64, one item at a time; its gradient is autograd's.


def log_z(chain: Chain) -> Tensor:
    totals = []
    for b, length in enumerate(chain.lengths.tolist()):
        alpha = chain.emissions[b, 0] + chain.start
        for t in range(1, length):
            alpha = torch.logsumexp(alpha[:, None] + matrix(chain, b, t - 1), 0) + chain.emissions[b, t]
        totals.append(torch.logsumexp(alpha + chain.end, 0))
    return torch.stack(totals)


def score(chain: Chain, labels: Tensor) -> Tensor:
    totals = []
    for b, length in enumerate(chain.lengths.tolist()):
        y = labels[b, :length].tolist()
        total = chain.start[y[0]] + chain.end[y[-1]]
        for t in range(length):
            total = total + chain.emissions[b, t, y[t]]
            if t:
                total = total + matrix(chain, b, t - 1)[y[t - 1], y[t]]
        totals.append(total)
    return torch.stack(totals)


def oracle(chain: Chain, weights: Tensor, gold: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    leaves = [part.cpu().double().requires_grad_() for part in chain[:4]]
    plain = Chain(*leaves, chain.lengths.cpu())
    values = log_z(plain)
    if gold is not None:
        values = values - score(plain, gold.cpu())
    slopes = torch.autograd.grad((values * weights.cpu().double()).sum(), leaves, allow_unused=True)
    return values.detach(), [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, slopes, strict=True)]


def assert_close(found: Tensor, wanted: Tensor, factor: float = 1.0) -> None:
    tolerance = factor * (2e-6 if found.dtype == torch.float32 else 1e-13)
    torch.testing.assert_close(found.cpu().double(), wanted.cpu().double(), rtol=tolerance, atol=tolerance)
