"""How the kernels of linear chains are launched: sizes, buffers and order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.errors import ConfigError
from thalweg.kernels.gpu import chain_log, chain_posterior, chain_scaled
from thalweg.kernels.potentials import Chain, SparseTransitions

__all__ = ["Plan", "Saved", "dense", "gradients", "launch", "messages", "on_device_of", "plan_of"]

MOST_HELD = 128  # labels up to which a matrix of transitions fits in the registers of one block
PROGRAMS = 264  # two for each multiprocessor of a large device: partial sums that are added up at the end
WARPS = 1056  # eight for each multiprocessor: more chunks than that would wait for each other
WARM_UP = 128  # steps after which a chain has forgotten where it came from, if it forgets


class Plan(NamedTuple):
    """Sizes of the launches for chains of one shape.

    >>> plan = plan_of(Chain(torch.zeros(2, 9, 20), torch.zeros(20, 20), *torch.zeros(2, 20), torch.tensor([9, 4])))
    >>> plan.width, plan.scaled, plan.walk_warps, plan.chunk
    (32, True, 1, 0)
    """

    B: int
    T: int
    C: int
    width: int  # CP: C rounded up to a power of two
    kind: int  # transitions: 0 shared, 1 per item, 2 per step
    double: bool
    scaled: bool  # held in registers and scaled, else in the log domain
    stride_item: int
    stride_step: int
    rows: int  # positions of a block in `prepare`
    blocks: int
    groups: int  # powers of two kept for each item
    matrices: int  # prepared: 1 or B, 0 outside the scaled domain
    tile: int  # rows of a tile in the log domain
    walk_warps: int
    chunk: int  # steps of a chunk where chunks pay, else 0


class Saved(NamedTuple):
    """What a walk keeps: messages (2, B, T, C), and with them how they are scaled and which items are logarithms."""

    messages: Tensor
    shift: Tensor
    scales: Tensor
    mats: Tensor
    flags: Tensor
    norms: Tensor


@lru_cache(maxsize=512)
def _plan(shape: torch.Size, transitions: torch.Size, double: bool) -> Plan:
    B, T, C = shape
    width = max(16, 1 << (C - 1).bit_length())
    kind = len(transitions) - 2
    scaled = kind < 2 and width <= MOST_HELD
    rows = max(1, min(128, 4096 // width))
    # One thread for each label, except where a column of float64 would not fit.
    warps = max(1, width // (16 if double and width == 128 else 32))
    chunk = max(WARM_UP, -(-T // max(1, WARPS // (2 * max(1, B) * warps))))
    chunk += -chunk % 4
    return Plan(
        *(B, T, C, width, kind, double, scaled),
        stride_item=(0, C * C, (T - 1) * C * C)[kind],
        stride_step=(0, 0, C * C)[kind],
        rows=rows,
        blocks=-(-T // rows),
        groups=max(1, -(-(T - 1) // 4)),
        matrices=(1, B)[kind] if scaled else 0,
        tile=width if width <= MOST_HELD else max(4, 8192 // width),
        walk_warps=warps,
        chunk=chunk if scaled and 4 * (chunk + WARM_UP) <= T else 0,
    )


def dense(chain: Chain) -> Tensor:
    """The transitions of a chain as a tensor, which is all that the kernels take.

    >>> dense(Chain(torch.zeros(1, 2, 3), torch.zeros(3, 3), *torch.zeros(2, 3), torch.tensor([2]))).shape
    torch.Size([3, 3])
    """
    if isinstance(chain.transitions, SparseTransitions):
        raise ConfigError('sparse transitions have no GPU kernel; use backend="reference"')
    return chain.transitions


_ready: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start a Triton kernel.

    Triton looks at every argument anew to find the compiled variant, which takes longer than a small kernel. What it
    looks at is summed up in a key here, and the variant it found is started directly the next time.
    """
    if not hasattr(kernel, "device_caches"):  # the interpreter
        kernel[grid](*arguments, **options)
        return
    device = torch.cuda.current_device()
    looks = tuple(
        (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else (x == 1, x % 16 == 0, x.bit_length() > 31)
        for x in arguments
    )
    key = (kernel, device, looks, *options.values())
    found = _ready.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **options)
        constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])
        _ready[key] = compiled, constants
        return
    compiled, constants = found
    sizes = (*grid, 1, 1)[:3]
    stream = torch.cuda.current_stream(device).cuda_stream
    compiled.run(*sizes, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *constants)


def plan_of(chain: Chain, method: str = "auto") -> Plan:
    """The plan for a chain; ``method`` "sequential" or "chunked" overrules the choice that "auto" makes by size.

    >>> long = Chain(torch.zeros(1, 4096, 4), torch.zeros(4, 4), *torch.zeros(2, 4), torch.tensor([4096]))
    >>> plan_of(long).chunk, plan_of(long, "sequential").chunk
    (128, 0)
    """
    emissions = chain.emissions
    plan = _plan(emissions.shape, dense(chain).shape, emissions.dtype == torch.float64)
    if method == "auto":
        return plan
    if method not in ("sequential", "chunked"):
        raise ConfigError(f'`method` must be "auto", "sequential" or "chunked", got "{method}"')
    chunked = method == "chunked" and plan.scaled
    return plan._replace(chunk=(plan.chunk or WARM_UP) if chunked else 0)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device, so it must be that of x.

    >>> with on_device_of(torch.zeros(1)):
    ...     pass
    """
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def messages(
    plan: Plan, chain: Chain, gold: Tensor | None, *, keep: bool, both: bool, values: Tensor | None = None
) -> tuple[Tensor, Saved]:
    """log Z less the gold score (B,) and, with ``keep``, the messages: both ways, or forwards alone.

    Launches: `prepare`; the scaled walk, in chunks first where the plan says so; the log-domain walk, which returns at
    once from items that need none.
    """
    emissions, _, start, end, lengths = chain
    transitions = dense(chain)
    B, T, C, width = plan.B, plan.T, plan.C, plan.width
    new = emissions.new_empty
    values = new(B) if values is None else values
    shift = new((B, T))
    # What a launch does not use is given any tensor: an allocation costs the host as much as a small kernel.
    scales = new((B, plan.groups)) if keep and both else shift
    mats = new((plan.matrices, 2, width, width)) if plan.scaled else shift
    kept = new((2 if both else 1, B, T, C)) if keep else shift
    sums = new(B * plan.blocks, dtype=torch.float64)
    stats = new((max(1, plan.matrices), 2), dtype=torch.float64)
    totals = new((B, 4), dtype=torch.float64)
    flags = new(B, dtype=torch.int32)
    norms = new((B, T)) if keep and both and plan.tile < width else shift
    work = new((B, 2, 2, width)) if plan.tile < width else shift
    launch(
        chain_scaled.prepare, (B * plan.blocks + plan.matrices,),
        emissions, transitions, start, end, lengths, lengths if gold is None else gold, shift, sums, stats, mats,
        B, T, C, plan.blocks, plan.stride_item, plan.stride_step,
        CP=width, BT=plan.rows, BR=min(width, plan.rows), GOLD=gold is not None,
    )  # fmt: skip
    if plan.scaled:
        _walk(plan, chain, (shift, sums, stats, mats, totals, values, kept, scales), flags, keep=keep, both=both)
    launch(
        chain_log.log_recurse, (B, 2 if both else 1),
        emissions, transitions, start, end, lengths, shift, sums, stats, totals, flags, values, kept, norms, work,
        B, T, C, plan.blocks, plan.kind, plan.stride_item, plan.stride_step,
        CP=width, BR=plan.tile, KEEP=keep, BOTH=both, ALWAYS=not plan.scaled, PER_STEP=plan.kind == 2,
        num_warps=max(1, width // 32) if width <= 64 else 8,
    )  # fmt: skip
    return values, Saved(kept, shift, scales, mats, flags, norms)


def _walk(plan: Plan, chain: Chain, buffers: tuple[Tensor, ...], flags: Tensor, *, keep: bool, both: bool) -> None:
    """The scaled walk: from end to end, or in chunks and from end to end only where those do not fit together."""
    emissions, _, start, end, lengths = chain
    shift, sums, stats, _, totals, values, _, scales = buffers
    B, T, C, width, chunk = plan.B, plan.T, plan.C, plan.width, plan.chunk
    sizes = (B, T, C, plan.blocks, plan.groups, width, plan.kind, chunk, WARM_UP)
    redo, entries, joints, chunks = flags, shift, sums, 1
    if chunk:
        chunks = max(1, -(-(T - 1) // chunk))
        redo = torch.empty_like(flags)
        entries = emissions.new_empty((B, 2, chunks, 2, width))
        joints = sums.new_empty((B, 2, chunks, 3))
        launch(
            chain_scaled.recurse, (B, 2 if both else 1, chunks),
            emissions, start, end, lengths, *buffers, redo, entries, joints, *sizes, chunks,
            CP=width, KEEP=keep, BOTH=both, MODE=2, num_warps=plan.walk_warps,
        )  # fmt: skip
        launch(
            chain_scaled.join, (B,),
            lengths, sums, stats, totals, values, scales, redo, entries, joints,
            plan.blocks, plan.groups, plan.kind, chunk, chunks, CP=width, BK=16, KEEP=keep, BOTH=both,
        )  # fmt: skip
    launch(
        chain_scaled.recurse, (B, 4 if both else 2),
        emissions, start, end, lengths, *buffers, redo, entries, joints, *sizes, chunks,
        CP=width, KEEP=keep, BOTH=both, MODE=1 if chunk else 0, num_warps=plan.walk_warps,
    )  # fmt: skip


def gradients(
    plan: Plan,
    chain: Chain,
    saved: Saved,
    weights: Tensor,
    gold: Tensor | None,
    d_transitions: Tensor,
) -> tuple[Tensor, Tensor]:
    """d_emissions (B, T, C) and d_start, d_end together (2, C); ``d_transitions`` is written in place.

    ``d_transitions`` has the shape of the transitions, or (B, C, C) for shared ones: then each item's own sum.
    """
    emissions, _, _, end, lengths = chain
    transitions = dense(chain)
    kept, shift, scales, mats, flags, norms = saved
    B, T, C, width = plan.B, plan.T, plan.C, plan.width
    kind = d_transitions.dim() - 2
    labels = lengths if gold is None else gold
    d_emissions = torch.empty_like(emissions)
    d_ends = emissions.new_empty((2, C))
    BT, BI = (16, min(width, 32)) if plan.double else (32, min(width, 64))
    log_BT, log_BI = 16, width if width <= MOST_HELD else max(4, 8192 // width)
    blocks, log_blocks = -(-T // BT), -(-T // log_BT)
    parts = log_parts = B
    if kind != 1:
        parts = min(B * blocks, max(8, PROGRAMS * BI // width)) if plan.scaled else 0
        log_parts = min(B * log_blocks, max(8, (4 if kind == 2 else 1) * PROGRAMS * log_BI // width))
    partial, used = d_transitions, flags
    if kind == 0:
        partial = emissions.new_empty((parts + log_parts, width, width))
        used = flags.new_empty(log_parts)
    if plan.scaled:
        launch(
            chain_posterior.posterior, (parts, width // BI),
            emissions, end, lengths, labels, weights, shift, scales, mats, kept, flags, d_emissions, partial,
            B, T, C, blocks, plan.groups, parts, 2 * width * width * plan.kind,
            CP=width, BI=BI, BT=BT, GOLD=gold is not None, PER_ITEM=kind == 1,
            PRECISION="ieee" if plan.double else "tf32x3",
            num_warps=max(2, min(8, width // 16)), num_stages=2,
        )  # fmt: skip
    launch(
        chain_log.log_posterior, (log_parts, width // log_BI),
        emissions, transitions, end, lengths, labels, weights, shift, kept, norms, flags, used, d_emissions, partial,
        B, T, C, log_blocks, log_parts, parts, plan.stride_item, plan.stride_step,
        CP=width, BI=log_BI, BT=log_BT, GOLD=gold is not None, ALWAYS=not plan.scaled, KIND=kind,
        num_warps=max(1, min(16, width * log_BI // 512)),
    )  # fmt: skip
    tiles = width * width // 64 if kind == 0 else 0
    launch(
        chain_posterior.finish, (tiles + 2,),
        lengths, d_emissions, partial, used, d_transitions, d_ends,
        B, T, C, parts, log_parts, tiles, CP=width, BK=64, BB=32,
    )  # fmt: skip
    return d_emissions, d_ends
