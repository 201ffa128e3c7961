"""Memories to measure on, and the sides: Thalweg, hflayers and torch's attention."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.hopfield.memory import HopfieldMemory
from thalweg.kernels.memory import associate, settle
from thalweg.layers.hopfield.layer import Hopfield

Size = tuple[int, int, int]
"""Queries Q, patterns N, features D."""

KERNEL, MEMORY, LAYER, PEER, ATTENTION = (
    "kernels.settle",
    "HopfieldMemory",
    "layers.Hopfield",
    "hflayers",
    "torch attention",
)
TOLERANCE = 1e-4
"""Ours: how far a query moves; hflayers: how much all weights of all queries change together."""


@dataclass(frozen=True)
class Problem:
    """Patterns of independent normal entries, and queries that are patterns with noise of half that size."""

    queries: Tensor  # (Q, D)
    patterns: Tensor  # (N, D)
    beta: float

    @classmethod
    def random(cls, size: Size, sharpness: float, *, device: str = "cpu") -> Problem:
        """beta is ``sharpness`` / sqrt(D): 1 mixes many patterns, 4 finds one."""
        Q, N, D = size
        draw = torch.Generator().manual_seed(Q + N + D)
        patterns = torch.randn(N, D, generator=draw)
        noise = torch.randn(Q, D, generator=draw) / 2
        queries = patterns[torch.randint(N, (Q,), generator=draw)] + noise
        return cls(queries.to(device), patterns.to(device), sharpness / math.sqrt(D))


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest, in units of the largest entry."""
    return float((found.cpu().double() - wanted).abs().max() / wanted.abs().max())


def find_peer(folder: str | None) -> tuple[ModuleType | None, list[str]]:
    """hflayers from a folder that contains it, or from this Python's environment; else why it is left out."""
    if folder is not None:
        if not (Path(folder) / "hflayers").is_dir():
            sys.exit(f"--peer: expected a folder that contains hflayers, got `{folder}`")
        sys.path.insert(0, folder)
    try:
        import hflayers
    except ImportError as error:
        return None, [f"hflayers: left out, {error}"]
    return hflayers, []


def peer_side(module: ModuleType, problem: Problem, steps: int, eps: float) -> Callable[[], Tensor]:
    """hflayers' module without projections or norms: so many associations with the patterns themselves; (Q, D).

    The last one, which reads the values, is not in its count of updates.
    """
    width = problem.patterns.shape[1]
    inputs = ("stored_pattern", "state_pattern", "pattern_projection")
    off = dict.fromkeys((f"normalize_{what}{affine}" for what in inputs for affine in ("", "_affine")), False)
    static = dict.fromkeys((f"{what}_as_static" for what in inputs), True)
    layer = module.Hopfield(
        input_size=width, hidden_size=width, num_heads=1, scaling=problem.beta, update_steps_max=steps - 1,
        update_steps_eps=eps, batch_first=True, disable_out_projection=True, **off, **static,
    )  # fmt: skip
    layer = layer.eval().to(problem.patterns.device)
    stored, state = problem.patterns[None], problem.queries[None]

    return torch.no_grad()(lambda: layer((stored, state, stored))[0])


def retrieval_sides(problem: Problem, steps: int, tol: float, peer: ModuleType | None) -> dict[str, Callable[[], Any]]:
    """So many steps, or fewer where queries move by ``tol`` or less; at 0 hflayers makes them all but for no change."""
    memory = HopfieldMemory(problem.patterns, problem.beta)
    sides: dict[str, Callable[[], Any]] = {
        KERNEL: lambda: settle(problem.queries, problem.patterns, beta=problem.beta, max_steps=steps, tol=tol),
        MEMORY: torch.no_grad()(lambda: memory.retrieve(problem.queries, steps, tol)),
    }
    return sides if peer is None else {**sides, PEER: peer_side(peer, problem, steps, tol or 1e-30)}


def one_step_sides(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """One association of the queries with the patterns, (Q, D) each."""
    queries, patterns, beta = problem.queries, problem.patterns, problem.beta
    memory = HopfieldMemory(patterns, beta)
    width = patterns.shape[1]
    layer = Hopfield(width, beta=beta, steps=1, static=("stored", "state", "values", "output"), normalise=())
    layer = layer.eval().to(patterns.device)

    def attention() -> Tensor:
        q, k = queries[None, None], patterns[None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, scale=beta)[0, 0]

    sides: dict[str, Callable[[], Tensor]] = {
        "kernels.associate": lambda: associate(queries, patterns, patterns, beta=beta)[0],
        f"{MEMORY}.update": lambda: memory.update(queries),
        LAYER: lambda: layer(patterns[None], queries[None])[0],
        ATTENTION: attention,
    }

    return {name: torch.no_grad()(side) for name, side in sides.items()}
