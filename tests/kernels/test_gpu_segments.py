"""The Triton kernels of segmentations: for real on a GPU, else through Triton's interpreter in a process of its own."""

from __future__ import annotations

import math

import pytest
import torch

from contracts.triton_kernels import DEVICE, RUNS, compile_instead, for_hopper, here_only, needs_triton
from thalweg.kernels.reference import segments as reference
from thalweg.kernels.segments import tidy
from thalweg.kernels.semirings import Log, Max

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import segments as gpu


def problem(batch: int, steps: int, most: int, size: int, *, by_item: bool = False, forbidden: float = 0.0):
    draw = torch.Generator().manual_seed(0)
    shapes = [(batch, steps, 2, size), (most, size), (size, size)]
    shapes[1:] = [(batch, *each) for each in shapes[1:]] if by_item else shapes[1:]
    scores = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    scores = [x.masked_fill(torch.rand(x.shape, generator=draw) < forbidden, -math.inf).to(DEVICE) for x in scores]
    lengths = torch.randint(1, steps + 1, (batch,), generator=draw)
    lengths[0] = steps
    return tuple(scores), lengths.to(DEVICE)


@here_only
@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ((1, 1, 1, 1), {}),
        ((2, 7, 3, 2), {}),
        ((3, 6, 9, 3), {"by_item": True}),
        ((3, 8, 4, 3), {"forbidden": 0.2}),
    ],
)
def test_equal_to_the_reference(sizes, settings, monkeypatch):
    monkeypatch.setattr(gpu, "_TILE", 8)  # several tiles
    scores, lengths = problem(*sizes, **settings)
    values, gradients = gpu.likelihood(scores, lengths, gradient=True)
    torch.testing.assert_close(gpu.likelihood(scores, lengths, gradient=False)[0], values)
    leaves = tuple(x.clone().requires_grad_() for x in scores)
    wanted = reference.fold(Log(), lengths, tidy(leaves, lengths))
    torch.testing.assert_close(values, wanted.detach())
    feasible = wanted.detach() > -math.inf
    assert feasible.any()
    expected = torch.autograd.grad(wanted[feasible].sum(), leaves)
    for found, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found if found.dim() == right.dim() else found.sum(0), right)
    best = reference.fold(Max(), lengths, tidy(scores, lengths))
    y = gpu.viterbi(scores, lengths)
    assert ((y >= 0).any(1) == feasible).all()
    own = reference.score(tidy(scores, lengths), lengths, y.clamp(min=0) % sizes[3], (y < sizes[3]))
    torch.testing.assert_close(own[feasible], best[feasible])


@for_hopper
def test_they_compile_for_hopper(monkeypatch):
    from thalweg.kernels.gpu import segments as module

    done = compile_instead(monkeypatch)
    scores, lengths = problem(2, 4, 20, 9)
    module.likelihood(scores, lengths, gradient=True)
    module.viterbi(scores, lengths)
    assert done == {"_likelihood", "_viterbi"}
