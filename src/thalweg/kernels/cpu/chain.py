"""Linear chains on the CPU: the face of ``csrc/chain.cpp``, dense and sparse, behind the names that every backend has.

Nothing is kept between the passes: what lies between them is made again, item by item, in a thread's own memory. What
is given to kernels is contiguous and not recorded; :mod:`thalweg.kernels.chain` sees to both.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg import _kernels
from thalweg.kernels.potentials import Chain, SparseTransitions

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # in emissions, transitions, start and end


def _given(chain: Chain) -> tuple[Any, ...]:
    """The chain as kernels take it; transitions are (1 or B, 1 or T-1, C, C), or (1, 1, 1, E) with edges (2, E)."""
    emissions, moves, start, end, lengths = chain
    if isinstance(moves, SparseTransitions):
        edges, scores = np.stack((moves.sources.numpy(), moves.targets.numpy())), moves.scores.numpy()[None, None, None]
    else:
        edges, scores = None, moves.numpy()
        scores = scores if scores.ndim == 4 else scores.reshape(-1, 1, *scores.shape[-2:])
    return emissions.numpy(), scores, edges, start.numpy(), end.numpy(), lengths.contiguous().numpy()


def _likelihood(
    chain: Chain, gold: Tensor | None, weights: Tensor | None, added: str = ""
) -> tuple[Tensor, float, tuple[Tensor, ...]]:
    """Values, their sum, and the gradient of log Z - score(gold): that of moves over "all", by "item", by "step"."""
    given, found = _given(chain), None
    batch, steps, size = given[0].shape
    values = np.empty(batch, given[0].dtype)
    if added:
        moves = (1 if added == "all" else batch, steps - 1 if added == "step" else 1, *given[1].shape[2:])
        found = tuple(np.empty(shape, values.dtype) for shape in ((batch, steps, size), moves, (size,), (size,)))
    labels, own = None if gold is None else gold.numpy(), None if weights is None else weights.numpy()
    total = _kernels.chain_likelihood(given, labels, own, values, found, torch.get_num_threads())
    return torch.from_numpy(values), total, tuple(map(torch.from_numpy, found or ()))


def _gradients(chain: Chain, gold: Tensor | None, weights: Tensor | None) -> tuple[Tensor, float, Gradients]:
    added = {1: "all", 2: "all", 3: "item", 4: "step"}[chain.moves.dim()]
    values, total, (d_emissions, d_moves, d_start, d_end) = _likelihood(chain, gold, weights, added)
    return values, total, (d_emissions, d_moves.view(chain.moves.shape), d_start, d_end)


def forward(
    chain: Chain, gold: Tensor | None = None, *, keep: bool = True, low_memory: bool = False, sign: int = 1
) -> tuple[Tensor, tuple[()]]:
    """log Z, less score(gold) where gold (B, T) is given, times ``sign``; (B,)."""
    values = _likelihood(chain, gold, None)[0]
    return values if (gold is None) == (sign > 0) else values.neg_(), ()


def at_once(chain: Chain, gold: Tensor | None, total: bool) -> tuple[Tensor, tuple[()], Gradients, bool]:
    """log Z, or score(gold) - log Z; what :func:`backward` needs; the gradient; whether all is finite.

    The values are (B,), or their sum; the gradient is that of the sum of log Z - score(gold).
    """
    values, sum_of, gradients = _gradients(chain, gold, None)
    if total:
        values = torch.from_numpy(np.array(sum_of, gradients[0].numpy().dtype))
    return values, (), gradients, math.isfinite(sum_of)


def times(gradients: Gradients, weights: Tensor, gold: Tensor | None) -> Gradients | None:
    """The gradient of :func:`at_once` for weights (B,) of its values or one for all, in place; None if they differ."""
    factor = _alike(weights)
    if factor is None:
        return None
    factor = factor if gold is None else -factor
    if factor != 1.0:  # the usual loss has 1
        for gradient in gradients:
            gradient.mul_(factor)
    return gradients


def _alike(weights: Tensor) -> float | None:
    """What all weights are; None where they differ."""
    first = weights.item() if not weights.dim() else weights[0].item()
    differ = weights.dim() and weights.stride(0) and not bool((weights == first).all())
    return None if differ else first


def backward(chain: Chain, saved: tuple[()], weights: Tensor, gold: Tensor | None = None) -> Gradients:
    """The gradient of sum_b weights[b] (log Z - score(gold)) in emissions, transitions, start and end."""
    if _alike(weights) is None:
        return _gradients(chain, gold, weights)[2]
    # By the same steps as the gradient that was made at once: equal to the last bit.
    return times(_gradients(chain, gold, None)[2], weights, None)  # type: ignore[return-value]


def posteriors(chain: Chain, *, by_step: bool) -> tuple[Tensor, Tensor]:
    """Probabilities of labels (B, T, C) and of moves, (B, T-1, C, C) or (B, T-1, E); added up over steps (B, 1, ..)."""
    labels, moves, _, _ = _likelihood(chain, None, None, "step" if by_step else "item")[2]
    return labels, moves.squeeze(2) if isinstance(chain.transitions, SparseTransitions) else moves


def viterbi(chain: Chain) -> tuple[Tensor, Tensor]:
    """The highest score (B,) and its labelling (B, T), -1 past the length."""
    given = _given(chain)
    batch, steps, _ = given[0].shape
    scores, labels = np.empty(batch, given[0].dtype), np.empty((batch, steps), np.int64)
    _kernels.chain_viterbi(given, scores, labels, torch.get_num_threads())
    return torch.from_numpy(scores), torch.from_numpy(labels)


def top_k(chain: Chain, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores (B, k) and labellings (B, k, T); missing ones -inf and -1."""
    given = _given(chain)
    batch, steps, size = given[0].shape
    # No more than C^T labellings exist; lists longer than that would only be filled with nothing.
    most = k if steps * math.log(max(size, 1)) > math.log(k) else min(k, size**steps)
    scores, labels = np.empty((batch, most), given[0].dtype), np.empty((batch, most, steps), np.int64)
    _kernels.chain_top_k(given, scores, labels, torch.get_num_threads())
    if most < k:
        scores = np.pad(scores, ((0, 0), (0, k - most)), constant_values=-np.inf)
        labels = np.pad(labels, ((0, 0), (0, k - most), (0, 0)), constant_values=-1)
    return torch.from_numpy(scores), torch.from_numpy(labels)


def sample(chain: Chain, uniforms: Tensor) -> Tensor:
    """Exact samples (S, B, T) from uniform numbers of that shape."""
    numbers = uniforms.to(chain.emissions.dtype).contiguous().numpy()
    labels = np.empty(numbers.shape, np.int64)
    _kernels.chain_sample(_given(chain), numbers, labels, torch.get_num_threads())
    return torch.from_numpy(labels)
