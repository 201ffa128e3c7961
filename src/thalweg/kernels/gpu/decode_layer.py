"""A decoder layer of a decoding step in one launch: blocks of rows, each worked on by programs that meet.

What a small layer waits for is its launches. Rows never look at one another's present, so a block of them goes through
all eight stages by itself: several programs share its columns and heads, write what the others need to buffers that
the separate launches use too, and wait for one another where they need it. A block with a program of its own waits for
nobody.

==  =====================  ========================================
0   queries, keys, values  columns, the same of each third
1   reading of the past    heads; also rows where programs outnumber heads
2   sum with the stream    columns, as in 3, 5, 6 and 7
3   queries to the source
4   reading of the source  as 1
5   sum with the stream
6   inner units
7   sum with the stream
==  =====================  ========================================
"""

from __future__ import annotations

from functools import cache as remembered
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.gpu.decode_linear import ACTIVATIONS, Norm
from thalweg.kernels.gpu.decode_stages import dense, meet, read

__all__ = ["FUSED_ROWS", "STAGES", "TILES", "Cut", "Rooms", "Tiles", "Weights", "cut", "layer"]

# Rows up to which a layer is one launch; 0, none, as long as no GPU has shown what it saves.
FUSED_ROWS = 0
# Stages of a layer, as the table above counts them.
STAGES = 8
WIDEST = 512  # of the stream: wider layers have work enough for launches of their own
COOPERATIVE = True  # a launch fails, instead of waiting for ever, where not all programs can run at once
PER_PROCESSOR = 1  # programs that meet, on each processor
_TERMS = 64  # of a sum by matrix units at a time: more do not fit into registers
SPAN = 8192  # entries of keys that a program holds at a time


class Tiles(NamedTuple):
    """How programs work: rows of a block, the most programs for it, and the tiles of their products.

    ``few`` multiplies without matrix units, which want 16 rows. ``entries`` are those of a matrix that a program holds
    at a time, times the rows where ``few``.

    >>> Tiles(16, 8).stages
    4
    """

    rows: int
    parts: int
    few: bool = False
    entries: int = 8192
    warps: int = 8
    stages: int = 4


# For so many rows at most, in order.
TILES: tuple[tuple[float, Tiles], ...] = (
    (2, Tiles(1, 16, few=True, entries=16384)),
    (16, Tiles(16, 16)),
    (64, Tiles(8, 16)),
    (1024, Tiles(16, 16)),
    (float("inf"), Tiles(32, 16)),
)


class Cut(NamedTuple):
    """:class:`Tiles` for a layer of which each block of rows has ``parts`` programs.

    >>> Cut(Tiles(16, 8), 4).tiles.rows
    16
    """

    tiles: Tiles
    parts: int


class Rooms(NamedTuple):
    """The buffers of a step, for R rows.

    >>> len(Rooms._fields)
    11
    """

    x: Tensor  # (R, D) the stream
    other: Tensor  # (R, D) where it goes
    queries: Tensor  # (R, D)
    reading: Tensor  # (R, D)
    inner: Tensor  # (R, F)
    cache: Tensor  # (T, R, 2, D)
    lineage: Tensor  # (R, T) int32
    position: Tensor  # (1,)
    memory: Tensor  # (A, S, 2, D)
    lengths: Tensor  # (A,)
    meetings: Tensor  # (R,) int32: arrivals of programs, counted from 0


class Weights(NamedTuple):
    """Matrices with their biases, and what is done to the inner units.

    >>> Weights._fields[0], Weights._field_defaults
    ('project', {})
    """

    project: tuple[Tensor, Tensor]  # (3 D, D)
    out: tuple[Tensor, Tensor]
    query: tuple[Tensor, Tensor]
    cross_out: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]  # (F, D)
    gate: tuple[Tensor, Tensor] | None
    down: tuple[Tensor, Tensor]  # (D, F)
    activation: str
    heads: int


@triton.jit
def _layer(
    x,
    other,
    queries,
    reading,
    inner,
    cache,
    lineage,
    position,
    memory,
    lengths,
    meetings,
    project,
    project_bias,
    out,
    out_bias,
    query,
    query_bias,
    cross_out,
    cross_bias,
    up,
    up_bias,
    gate,
    gate_bias,
    down,
    down_bias,
    gain_0,
    shift_0,
    gain_1,
    shift_1,
    gain_2,
    shift_2,
    eps_0,
    eps_1,
    eps_2,
    rows,
    capacity,
    places,
    scale,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    NORMED: tl.constexpr,  # whether the stream is normalised before the first matrix
    POST: tl.constexpr,  # whether what is normalised is the stream itself
    ACTIVATION: tl.constexpr,
    EXACT: tl.constexpr,
    FEW: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    MP: tl.constexpr,
    RP: tl.constexpr,
    HP: tl.constexpr,
    DP: tl.constexpr,
    PAST: tl.constexpr,
    PLACES: tl.constexpr,
    PN: tl.constexpr,
    PK: tl.constexpr,
    DN: tl.constexpr,
    DK: tl.constexpr,
    UN: tl.constexpr,
    UK: tl.constexpr,
    VN: tl.constexpr,
    VK: tl.constexpr,
    SP: tl.constexpr,
):
    program = tl.program_id(0)
    first, part, meeting = program // PARTS * MP, program % PARTS, meetings + program // PARTS
    # A head's query is read by the program that made it, unless several programs have one head.
    NEAR: tl.constexpr = PARTS if PARTS > HEADS else 1  # pyright: ignore[reportAssignmentType]
    ADD: tl.constexpr = 2 if POST else 1  # pyright: ignore[reportAssignmentType]
    if FIRST <= 0 and LAST > 0:
        dense(
            *(x, project, project_bias, project, project_bias, gain_0, shift_0, eps_0, x, queries, cache, position),
            *(
                meeting,
                first,
                part,
                rows,
                WIDTH,
                3 * WIDTH,
                3,
                0,
                NORMED,
                0,
                0,
                True,
                EXACT,
                FEW,
                PARTS,
                MP,
                PN,
                PK,
                SP,
            ),
        )
    if FIRST <= 1 and LAST > 1:
        if FIRST < 1:
            meet(meeting, NEAR)
        read(
            *(queries, cache, lineage, position, reading, first, part, rows, capacity, scale),
            *(WIDTH, HEADS, 0, PARTS, MP, RP, HP, DP, PAST),
        )
    if FIRST <= 2 and LAST > 2:
        dense(
            *(reading, out, out_bias, out, out_bias, gain_0, shift_0, eps_0, x, other, cache, position),
            *(meeting, first, part, rows, WIDTH, WIDTH, 1, PARTS if FIRST < 2 else 0, False),
            *(2 if POST and NORMED else 1, 0, False, EXACT, FEW, PARTS, MP, DN, DK, SP),
        )
    if FIRST <= 3 and LAST > 3:
        dense(
            *(other, query, query_bias, query, query_bias, gain_1, shift_1, eps_1, x, queries, cache, position),
            *(meeting, first, part, rows, WIDTH, WIDTH, 1, PARTS if FIRST < 3 else 0, True),
            *(0, 0, False, EXACT, FEW, PARTS, MP, DN, DK, SP),
        )
    if FIRST <= 4 and LAST > 4:
        if FIRST < 4:
            meet(meeting, NEAR)
        read(
            *(queries, memory, lineage, lengths, reading, first, part, rows, places, scale),
            *(WIDTH, HEADS, GROUP, PARTS, MP, RP, HP, DP, PLACES),
        )
    if FIRST <= 5 and LAST > 5:
        dense(
            *(reading, cross_out, cross_bias, out, out_bias, gain_1, shift_1, eps_1, other, x, cache, position),
            *(meeting, first, part, rows, WIDTH, WIDTH, 1, PARTS if FIRST < 5 else 0, False),
            *(ADD, 0, False, EXACT, FEW, PARTS, MP, DN, DK, SP),
        )
    if FIRST <= 6 and LAST > 6:
        dense(
            *(x, up, up_bias, gate, gate_bias, gain_2, shift_2, eps_2, x, inner, cache, position),
            *(meeting, first, part, rows, WIDTH, INNER, 1, PARTS if FIRST < 6 else 0, True),
            *(0, ACTIVATION, False, EXACT, FEW, PARTS, MP, UN, UK, SP),
        )
    if FIRST <= 7 and LAST > 7:
        dense(
            *(inner, down, down_bias, down, down_bias, gain_2, shift_2, eps_2, x, other, cache, position),
            *(meeting, first, part, rows, INNER, WIDTH, 1, PARTS if FIRST < 7 else 0, False),
            *(ADD, 0, False, EXACT, FEW, PARTS, MP, VN, VK, SP),
        )


def _power(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()


@remembered
def _device(device: torch.device) -> tuple[int, int]:
    """Processors, and bytes of memory that the threads of one share; the interpreter's are those of a large GPU."""
    if device.type != "cuda":
        return 132, 227 * 1024
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 48 * 1024)


def cut(x: Tensor, heads: int) -> Cut | None:
    """How a layer over a stream like ``x`` (R, D) is shared out, or None where launches of their own serve it better.

    A block gets as many programs as can run at once, so that heads can be shared out evenly.

    >>> cut(torch.zeros(FUSED_ROWS + 1, 256), 4) is None
    True
    """
    rows, width = x.shape
    if not 0 < rows <= FUSED_ROWS or width > WIDEST:
        return None
    tiles = next(tiles for most, tiles in TILES if rows <= most)
    processors, shared = _device(x.device)
    room = PER_PROCESSOR * processors // -(-rows // tiles.rows)
    least = 2 if tiles.few else 16  # columns that are worth a program
    fitting = (n for n in range(2, min(tiles.parts, room, width // least) + 1) if _shares(n, heads))
    if not tiles.few:  # all stages but one lie in shared memory at once
        stage = x.itemsize * (tiles.entries + _TERMS * max(16, tiles.rows))
        tiles = tiles._replace(stages=max(1, min(tiles.stages, 1 + (shared // PER_PROCESSOR - 8192) // stage)))
    return Cut(tiles, max(fitting, default=1))


def _shares(parts: int, heads: int) -> bool:
    """Whether programs can have as many heads each, or a power of two of them one head."""
    more = parts // heads
    return heads % parts == 0 or (parts % heads == 0 and more & (more - 1) == 0)


def _tile(tiles: Tiles, outer: int, inner: int) -> tuple[int, int]:
    """Columns and terms of the sum at a time."""
    if tiles.few:
        terms = min(_power(inner), 1024)
        return max(1, min(_power(outer), tiles.entries // (terms * tiles.rows))), terms
    columns = max(16, min(_power(outer), tiles.entries // 32))
    return columns, max(16, min(_power(inner), _TERMS, tiles.entries // columns))


@remembered
def _constants(cut: Cut, width: int, inner: int, heads: int, past: int, places: int, span: int) -> dict[str, int]:
    """Sizes that a launch fixes."""
    (tiles, parts), size = cut, _power(width // heads)
    each = _power(max(1, heads // parts))
    block = max(1, tiles.rows // max(1, parts // heads))
    most = max(1, span // (block * each * size))
    found = {"FEW": tiles.few, "WIDTH": width, "INNER": inner, "HEADS": heads, "PARTS": parts, "MP": tiles.rows}
    found |= {"RP": block, "HP": each, "DP": size, "PAST": min(most, _power(past)), "PLACES": min(most, _power(places))}
    of_width, of_inner = -(-width // parts), -(-inner // parts)
    found["PN"], found["PK"] = _tile(tiles, 3 * of_width, width)
    found["DN"], found["DK"] = _tile(tiles, of_width, width)
    found["UN"], found["UK"] = _tile(tiles, of_inner, width)
    found["VN"], found["VK"] = _tile(tiles, of_width, inner)
    whole = _power(width)
    found["SP"] = whole if whole * max(tiles.rows, 1 if tiles.few else 16) <= 16384 else 0
    return found


def layer(
    cut: Cut,
    rooms: Rooms,
    weights: Weights,
    norms: tuple[Norm | None, Norm, Norm],
    *,
    post: bool,
    projected: bool = False,
) -> Tensor:
    """A decoder layer: the stream in ``rooms.x`` goes to ``rooms.other``, which is given back; ``x`` is used up.

    Args:
        cut: from :func:`cut`; as long as ``rooms.meetings`` is not zeroed it must stay the same.
        norms: of the stream before the past, the source and the inner units are asked.
        post: what is added to is the normalised stream, else the stream as it is.
        projected: queries, keys and values of this step are there already.

    >>> layer.__name__
    'layer'
    """
    (rows, width), inner, heads = rooms.x.shape, rooms.inner.shape[1], weights.heads
    capacity, places = rooms.lineage.shape[1], rooms.memory.shape[1]
    first_norm = norms[0] or norms[1]
    gains = [part for norm in (first_norm, *norms[1:]) for part in norm[:2]]
    gate = weights.gate or weights.up
    kernel: Any = _layer
    tiles, parts = cut
    together = {"launch_cooperative_grid": True} if parts > 1 and COOPERATIVE and rooms.x.is_cuda else {}

    def launch(first: int, last: int) -> None:
        kernel[(-(-rows // tiles.rows) * parts,)](
            *(*rooms, *weights.project, *weights.out, *weights.query, *weights.cross_out, *weights.up, *gate),
            *(*weights.down, *gains, first_norm.eps, norms[1].eps, norms[2].eps, rows, capacity, places),
            (width // heads) ** -0.5,
            FIRST=first,
            LAST=last,
            NORMED=norms[0] is not None,
            POST=post,
            ACTIVATION=ACTIVATIONS[weights.activation],
            # As torch's own products: float32 is kept unless the user asked for less.
            EXACT=rooms.x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest",
            GROUP=rows // len(rooms.memory),
            **_constants(cut, width, inner, heads, capacity, places, SPAN),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **together,
        )

    begin = 1 if projected else 0
    if parts > 1 and not hasattr(kernel, "device_caches"):  # the interpreter runs programs in turn: none may wait
        for stage in range(begin, STAGES):
            launch(stage, stage + 1)
    else:
        launch(begin, STAGES)
    return rooms.other
