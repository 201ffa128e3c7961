"""A decoder layer in one launch: for real on a GPU, else through Triton's interpreter in a process of its own.

The interpreter must be chosen before Triton is imported, which other tests may have done already. It runs programs one
after another, so there programs that would meet are launched stage by stage.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from contracts.triton_kernels import (
    DEVICE,
    INTERPRETED,
    RUNS,
    compile_instead,
    for_hopper,
    here_only,
    needs_triton,
    outside,
    run_in_the_interpreter,
)

NAN = math.nan
TOLERANCE = 1e-5 if INTERPRETED else 5e-5  # matrix units round in between

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import decode_layer, decoding
    from thalweg.kernels.gpu.decode_layer import Cut, Tiles


# Steps of whole models in one launch a layer are among the fast tests; this is every way to share a layer out.
@pytest.mark.slow
@outside
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


class Sizes(NamedTuple):
    items: int = 3
    width: int = 2  # rows an item
    D: int = 12
    heads: int = 2
    F: int = 20
    steps: int = 5
    places: int = 6


class Case:
    """A layer with random weights, a past and sources; ``rooms()`` gives fresh buffers."""

    def __init__(self, sizes: Sizes, *, activation: str = "relu", dtype: torch.dtype = torch.float32, seed: int = 0):
        self.draw, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.sizes, D, F, R = sizes, sizes.D, sizes.F, sizes.items * sizes.width
        gate = self.linear(F, D) if activation == "swiglu" else None
        self.weights = decoding.Weights(
            *(self.linear(3 * D, D), self.linear(D, D), self.linear(D, D), self.linear(D, D), self.linear(F, D)),
            *(gate, self.linear(D, F), activation, sizes.heads),
        )
        self.norms = tuple(decoding.Norm(self.normal(D) + 1, self.normal(D), 1e-3) for _ in range(3))
        self.x, self.memory = self.normal(R, D), self.normal(sizes.items, sizes.places, 2, D)
        lengths = [sizes.places, 0, 1, 4, 3]
        self.lengths = torch.tensor([lengths[a % 5] for a in range(sizes.items)], device=DEVICE)
        self.memory[torch.arange(sizes.places, device=DEVICE) >= self.lengths[:, None]] = NAN
        self.cache = self.normal(sizes.steps, R, 2, D)
        self.position = torch.tensor([sizes.steps - 2], device=DEVICE)
        self.cache[int(self.position) :] = NAN  # the present is for the layer to write
        own = torch.arange(R, device=DEVICE)
        earlier = torch.randint(0, R, (R, sizes.steps), generator=self.draw).to(DEVICE)
        self.lineage = torch.where(torch.arange(sizes.steps, device=DEVICE) == self.position, own[:, None], earlier)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw).to(DEVICE, self.dtype)

    def linear(self, outer: int, inner: int) -> tuple[Tensor, Tensor]:
        return self.normal(outer, inner) * inner**-0.5, self.normal(outer)

    def rooms(self) -> Any:
        def room(*shape: int) -> Tensor:
            return torch.full(shape, NAN, dtype=self.dtype, device=DEVICE)

        R, D = self.x.shape
        return decoding.Rooms(
            *(self.x.clone(), room(R, D), room(R, D), room(R, D), room(R, self.sizes.F), self.cache.clone()),
            *(self.lineage.int(), self.position, self.memory, self.lengths),
            torch.zeros(R, dtype=torch.int32, device=DEVICE),
        )


def by_definition(case: Case, norms: tuple[Any, ...], *, post: bool, lineage: Tensor | None = None) -> Tensor:
    """The stream after a layer in float64, row by row and head by head."""
    lineage = case.lineage if lineage is None else lineage
    weights, heads, t = case.weights, case.weights.heads, int(case.position)

    def apply(pair: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        return pair[0].double() @ x + pair[1].double()

    def normed(x: Tensor, norm: Any) -> Tensor:
        if norm is None:
            return x
        away = x - x.mean()
        return away / (away.square().mean() + norm.eps).sqrt() * norm.weight.double() + norm.bias.double()

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if not len(keys):
            return torch.zeros_like(query)
        parts = zip(query.chunk(heads), keys.chunk(heads, 1), values.chunk(heads, 1), strict=True)
        return torch.cat([(k @ q / math.sqrt(len(q))).softmax(0) @ v for q, k, v in parts])

    rows = []
    for r, stream in enumerate(case.x.double()):
        x = normed(stream, norms[0])
        query, key, value = apply(weights.project, x).chunk(3)
        past = case.cache[torch.arange(t, device=DEVICE), lineage[r, :t]].double()
        keys, values = (torch.cat((past[:, n], own[None])) for n, own in enumerate((key, value)))
        y = (x if post else stream) + apply(weights.out, attend(query, keys, values))
        x = normed(y, norms[1])
        seen = case.memory[r // case.sizes.width, : int(case.lengths[r // case.sizes.width])].double()
        y = (x if post else y) + apply(weights.cross_out, attend(apply(weights.query, x), seen[:, 0], seen[:, 1]))
        x = normed(y, norms[2])
        inner, name = apply(weights.up, x), weights.activation
        gate = apply(weights.gate, x) if weights.gate else inner
        erf = (1 + torch.erf(inner / math.sqrt(2))) / 2
        inner = {"relu": inner.clamp(min=0), "gelu": inner * erf}.get(name, inner * gate * gate.sigmoid())
        inner = inner if name != "silu" else apply(weights.up, x) * gate.sigmoid()
        rows.append((x if post else y) + apply(weights.down, inner))
    return torch.stack(rows)


def separately(case: Case, rooms: Any, norms: tuple[Any, ...], *, post: bool) -> Tensor:
    """The same by a launch for every stage."""
    ops, weights = decoding, case.weights
    first, second, third = (norm if post else None for norm in norms)
    ops.project(rooms.x, *weights.project, rooms.queries, rooms.cache, rooms.position, norms[0])
    ops.attend_past(rooms.queries, rooms.cache, rooms.lineage, rooms.position, weights.heads, rooms.reading)
    ops.linear(rooms.reading, *weights.out, rooms.other, residual=rooms.x, residual_norm=first)
    ops.linear(rooms.other, *weights.query, rooms.queries, norm=norms[1])
    ops.attend_source(rooms.queries, rooms.memory, rooms.lengths, weights.heads, rooms.reading)
    ops.linear(rooms.reading, *weights.cross_out, rooms.x, residual=rooms.other, residual_norm=second)
    options = {"norm": norms[2], "activation": weights.activation, "gate": weights.gate}
    ops.linear(rooms.x, *weights.up, rooms.inner, **options)
    return ops.linear(rooms.inner, *weights.down, rooms.other, residual=rooms.x, residual_norm=third)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    most = float(wanted.abs().nan_to_num().max())
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance * most, equal_nan=True)


def check(
    case: Case, cut: Cut, *, post: bool = False, normed: bool = True, beside: bool = False, tolerance: float = TOLERANCE
) -> None:
    norms = case.norms if normed else (None, *case.norms[1:])
    rooms, others = case.rooms(), case.rooms()
    found = decoding.layer(cut, rooms, case.weights, norms, post=post)
    assert found is rooms.other
    assert_close(found, by_definition(case, norms, post=post), tolerance)
    if beside:
        assert_close(found, separately(case, others, norms, post=post), tolerance)
        assert_close(rooms.cache, others.cache, tolerance)  # its own slab, and nothing else


MATRIX, SINGLE = (16, False), (1, True)
# Rows of a block, whether it does without matrix units, programs of a block (with two heads), and where the norms are.
CUTS = [
    (*MATRIX, 1, False),
    (*MATRIX, 1, True),
    (*MATRIX, 2, False),
    (*MATRIX, 8, True),
    (4, False, 4, False),
    (2, False, 8, True),
    (32, False, 2, True),
    (*SINGLE, 1, True),
    (*SINGLE, 2, False),
    (*SINGLE, 4, True),
    (4, True, 1, False),
    (4, True, 4, True),
]


def cut_of(rows: int, few: bool, parts: int, **options: Any) -> Cut:
    return Cut(Tiles(rows, 16, few=few, **options), parts)


@here_only
@pytest.mark.parametrize(("rows", "few", "parts", "post"), CUTS)
def test_every_way_to_share_a_layer_out(rows: int, few: bool, parts: int, post: bool) -> None:
    sizes = Sizes() if rows >= 16 else Sizes(items=min(rows + 1, 3), width=1, steps=3)
    check(Case(sizes), cut_of(rows, few, parts), post=post, beside=parts <= 2 and not post)


@here_only
@pytest.mark.parametrize("shape", [MATRIX, SINGLE])
def test_rows_in_several_blocks(shape: tuple[int, bool]) -> None:
    sizes = Sizes(items=4, width=5, steps=3) if shape == MATRIX else Sizes(items=2, width=1)
    check(Case(sizes), cut_of(*shape, 2), post=True, beside=True)


@here_only
@pytest.mark.parametrize("activation", ["gelu", "silu", "swiglu"])
@pytest.mark.parametrize("shape", [(*MATRIX, 2), (*SINGLE, 2)])
def test_activations_and_a_stream_that_nothing_normalises(shape: tuple[int, bool, int], activation: str) -> None:
    check(Case(Sizes(items=2, width=1), activation=activation), cut_of(*shape), post=True, normed=False)


@here_only
@pytest.mark.parametrize(("D", "heads", "parts"), [(9, 3, 1), (9, 3, 6), (12, 6, 2), (1, 1, 1)])
@pytest.mark.parametrize("few", [False, True])
def test_heads_and_widths_that_are_no_powers_of_two(D: int, heads: int, parts: int, few: bool) -> None:
    sizes = Sizes(items=1 if few else 2, width=1, D=D, heads=heads, F=7, steps=3)
    check(Case(sizes), cut_of(1 if few else 2, few, parts), post=True)


@here_only
@pytest.mark.parametrize("few", [False, True])
def test_tiles_and_spans_smaller_than_what_there_is(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_layer, "SPAN", 1)  # a place at a time
    sizes = Sizes(items=1, width=2, D=40, heads=2, F=50, steps=4)
    entries = 1024 if few else 512
    check(Case(sizes), cut_of(2, few, 1, entries=entries), post=True)
    check(Case(sizes), cut_of(2, few, 2, entries=entries))


@here_only
def test_one_step_and_one_row() -> None:
    for cut in (cut_of(*MATRIX, 1), cut_of(*SINGLE, 2)):
        case = Case(Sizes(items=1, width=1, steps=2, places=1))
        case.position.zero_()
        check(case, cut)


@here_only
def test_projected_before() -> None:
    case = Case(Sizes())
    for cut in (cut_of(*MATRIX, 1), cut_of(*MATRIX, 2)):
        rooms, others = case.rooms(), case.rooms()
        decoding.project(rooms.x, *case.weights.project, rooms.queries, rooms.cache, rooms.position, case.norms[0])
        found = decoding.layer(cut, rooms, case.weights, case.norms, post=False, projected=True)
        assert_close(found, separately(case, others, case.norms, post=False))


@here_only
def test_layers_one_after_another_meet_by_the_same_count() -> None:
    case = Case(Sizes(items=2, steps=3))
    cut, rooms, others = cut_of(*MATRIX, 4), case.rooms(), case.rooms()
    for _ in range(2):
        found = decoding.layer(cut, rooms, case.weights, case.norms, post=True)
        wanted = separately(case, others, case.norms, post=True)
        rooms, others = (r._replace(x=r.other, other=r.x) for r in (rooms, others))
    assert_close(found, wanted)


@here_only
def test_bfloat16() -> None:
    case = Case(Sizes(items=2, width=1), dtype=torch.bfloat16)
    for shape in [SINGLE] if INTERPRETED else [SINGLE, MATRIX]:  # the interpreter has no matrix product of this type
        check(case, cut_of(*shape, 2), post=True, tolerance=0.05)


@here_only
@pytest.mark.parametrize("shape", [(*MATRIX, 1), (*SINGLE, 2)])
def test_what_is_not_a_number_stays_in_its_row(shape: tuple[int, bool, int]) -> None:
    case = Case(Sizes(width=1))
    case.lineage[:, : int(case.position)] = torch.arange(3, device=DEVICE)[:, None]
    clean = decoding.layer(cut_of(*shape), case.rooms(), case.weights, case.norms, post=False)
    case.x[2, 3] = NAN
    spoilt = decoding.layer(cut_of(*shape), case.rooms(), case.weights, case.norms, post=False)
    assert spoilt[2].isnan().all()
    assert torch.equal(spoilt[:2], clean[:2])


@here_only
def test_the_oracle_can_fail() -> None:
    case = Case(Sizes())
    own = torch.arange(6, device=DEVICE)[:, None].expand(6, case.sizes.steps)
    right = by_definition(case, case.norms, post=True)
    for wrong in (
        by_definition(case, case.norms, post=False),
        by_definition(case, case.norms, post=True, lineage=own),
        by_definition(case, (None, *case.norms[1:]), post=True),
    ):
        assert float((right - wrong).abs().max()) > 1e-2


@here_only
def test_how_layers_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_layer, "_device", lambda device: (132, 227 * 1024))
    assert decoding.cut(torch.zeros(1, 256), 4) is None  # the separate launches are the rule
    monkeypatch.setattr(decode_layer, "FUSED_ROWS", 1024)

    def parts(rows: int, width: int = 256, heads: int = 4) -> int:
        found = decoding.cut(torch.zeros(rows, width), heads)
        assert found is not None
        assert found.parts * -(-rows // found.tiles.rows) <= max(132, -(-rows // found.tiles.rows))
        return found.parts

    monkeypatch.setattr(decode_layer, "TILES", ((math.inf, Tiles(16, 16)),))
    assert [parts(rows) for rows in (1, 64, 320, 512, 1024)] == [16, 16, 4, 4, 2]
    assert [parts(1, heads=heads) for heads in (1, 3, 6, 5)] == [16, 12, 12, 10]
    assert parts(1, width=20, heads=4) == 1
    monkeypatch.setattr(decode_layer, "_device", lambda device: (20, 99 * 1024))
    small = decoding.cut(torch.zeros(320, 256), 4)
    assert small is not None
    assert (small.parts, small.tiles.stages) == (1, 3)
    assert decoding.cut(torch.zeros(decode_layer.FUSED_ROWS + 1, 256), 4) is None
    assert decoding.cut(torch.zeros(1, decode_layer.WIDEST + 1), 4) is None
    monkeypatch.setattr(decode_layer, "FUSED_ROWS", 0)
    assert decoding.cut(torch.zeros(1, 256), 4) is None


# Every launch compiled for Hopper, without a GPU.


@pytest.mark.slow
@for_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "post"), [(1, False), (5, True), (60, True), (320, False), (1000, True)])
def test_layers_compile_for_hopper(rows: int, post: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from thalweg.kernels.gpu import decode_layer, decoding

    monkeypatch.setattr(decode_layer, "FUSED_ROWS", 1024)
    compiled = compile_instead(monkeypatch)

    def room(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind)

    def linear(outer: int, inner: int) -> tuple[Tensor, Tensor]:
        return room(outer, inner), room(outer)

    D, F, heads = (256, 1024, 4) if rows != 60 else (72, 100, 3)
    stream = [room(rows, D) for _ in range(4)]
    rooms = decoding.Rooms(
        *(*stream, room(rows, F), room(20, rows, 2, D), room(rows, 20, kind=torch.int32), room(1, kind=torch.long)),
        *(room(rows, 12, 2, D), room(rows, kind=torch.long), room(rows, kind=torch.int32)),
    )
    gate = linear(F, D) if rows == 60 else None
    weights = decoding.Weights(
        *(linear(3 * D, D), linear(D, D), linear(D, D), linear(D, D), linear(F, D), gate, linear(D, F)),
        *("gelu" if gate is None else "swiglu", heads),
    )
    norm = decoding.Norm(room(D), room(D), 1e-5)
    cut = decoding.cut(stream[0], heads)
    assert cut is not None
    decoding.layer(cut, rooms, weights, (norm, norm, norm), post=post, projected=rows == 5)
    assert compiled == {"_layer"}
