"""The Triton kernels of paths through grids: for real on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from contracts.triton_kernels import DEVICE, RUNS, compile_instead, for_hopper, here_only, needs_triton
from thalweg.inference import CTC, Alignment
from thalweg.kernels.reference.lattice import Lattice

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import lattice as gpu

CASES = {
    "edits": {},
    "local": {"local": True},
    "banded": {"band": 1},
    "chunks": {"moves": ((1, 1), (2, 1), (1, 2), (1, 0))},
    "rows": {"moves": ((1, 0), (1, 1), (2, 1))},
}


def alignment(name: str, dtype: torch.dtype = torch.float32) -> Alignment:
    kinds = len(CASES[name].get("moves", (1, 2, 3)))
    scores = torch.randn(2, 5, 4, kinds, generator=torch.Generator().manual_seed(0)) * 3
    scores[0, 2, 2, 0] = -math.inf
    scores[1, 3:] = math.nan  # padding
    lengths = {"lengths": [4, 2], "target_lengths": [3, 2]}
    return Alignment(scores.to(DEVICE, dtype), backend="reference", **lengths, **CASES[name])


def spread(dtype: torch.dtype = torch.float32) -> CTC:
    log_probs = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    targets = torch.tensor([[1, 1, 2], [3, 2, 0], [0, 0, 0], [1, 1, 1]])
    return CTC(
        log_probs.to(DEVICE, dtype),
        targets,
        lengths=[5, 4, 3, 2],
        target_lengths=[3, 2, 0, 3],
        backend="reference",
        validate_args=False,
    )


def agrees(lattice: Lattice, structure: Alignment | CTC) -> None:
    values, shares = gpu.log_partition(lattice, gradient=True)
    gradient = gpu.gradient_of(lattice, shares, torch.full_like(values, 2.0)) / 2
    torch.testing.assert_close(values, structure.log_partition)
    torch.testing.assert_close(gradient, structure.marginals, atol=1e-6, rtol=1e-5)
    assert gpu.log_partition(lattice, gradient=False)[0].equal(values)


@here_only
@pytest.mark.parametrize(("name", "lanes"), [*((name, 1024) for name in CASES), ("edits", 2), ("local", 2)])
def test_alignments(name: str, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_LANES", lanes)
    structure = alignment(name)
    agrees(structure.lattice, structure)


@here_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ctc(dtype: torch.dtype) -> None:
    structure = spread(dtype)
    agrees(structure.lattice, structure)
    assert structure.log_partition[3] == -math.inf


@for_hopper
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_they_compile_for_hopper(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from thalweg.kernels.gpu import lattice as module

    done = compile_instead(monkeypatch)
    for structure in (alignment("local", dtype), spread(dtype)):
        module.log_partition(structure.lattice, gradient=True)
    assert done == {"_forward", "_backward"}
