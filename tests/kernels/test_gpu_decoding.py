"""The Triton kernels of a decoding step's model: for real on a GPU, else by Triton's interpreter in its own process.

The interpreter must be chosen before Triton is imported, which other tests may have done already.
"""

from __future__ import annotations

import math

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
)

INF, NAN = math.inf, math.nan

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import decode_attention, decode_linear
    from thalweg.kernels.gpu import decoding as gpu


# Every launch compiled for Hopper, without a GPU.


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that launches have compiled."""
    from thalweg.kernels.gpu import decode_linear

    return compile_instead(monkeypatch, decode_linear)


@pytest.mark.slow
@for_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 17, 500, 5000])
def test_layers_compile_for_hopper(rows: int, dtype: torch.dtype, compiled: set[str]) -> None:
    from thalweg.kernels.gpu import decode_linear, decoding

    def room(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind)

    position, D, F = torch.zeros(1, dtype=torch.long), 12, 600
    norm = decoding.Norm(room(D), room(D), 1e-5)
    x, queries, cache = room(rows, D), room(rows, D), room(3, rows, 2, D)
    decoding.embed(decoding.Fed(room(rows, kind=torch.long), room(7, D), 2.0, room(3, D), position), x)
    decoding.embed(decoding.Fed(room(rows, kind=torch.long), room(7, D), 1.0, None, position), x)
    decoding.project(x, room(3 * D, D), room(3 * D), queries, cache, position, norm)
    decoding.rotate(queries, cache, room(3, 2, D // 4, kind=torch.float32), position, 2)
    decoding.attend_past(queries, cache, room(rows, 3, kind=torch.int32), position, 2, x)
    decoding.attend_source(queries, room(rows, 5, 2, D), room(rows, kind=torch.long), 2, x)
    decoding.attend_source(queries, room(1, 70, 2, D), room(1, kind=torch.long), 2, x)  # long, with many rows
    decoding.place(
        room(2, 3, kind=torch.long),
        room(2, 3, kind=torch.bool),
        position.view(1, 1),
        position.view(1, 1) > 0,
        0,
        room(1, kind=torch.int32),
    )
    decoding.linear(x, room(D, D), room(D), queries, residual=x, residual_norm=norm)
    for activation in decode_linear.ACTIVATIONS:
        gate = (room(F, D), room(F)) if activation == "swiglu" else None
        decoding.linear(x, room(F, D), room(F), room(rows, F), norm=norm, activation=activation, gate=gate)
    decoding.linear(room(rows, F), room(D, F), room(D), queries, residual=x)
    decoding.linear(x, room(7, D), room(7), room(rows, 7, kind=torch.float32), norm=norm)
    product = "_few" if rows <= 8 else "_linear"
    assert compiled >= {"_embed", "_past", "_place", "_places" if rows >= 4 else "_rows", "_rotate", "_rows", product}


# Layers, against float64.


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    wanted = wanted.cpu()
    most = float(wanted.abs().nan_to_num().max())
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=tolerance * most, equal_nan=True)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def some_norm(size: int, seed: int) -> decode_linear.Norm:
    return gpu.Norm(normal(size, seed=seed), normal(size, seed=seed + 1), 1e-3)


def normed(x: Tensor, norm: decode_linear.Norm | None) -> Tensor:
    if norm is None:
        return x.double()
    away = x.double() - x.double().mean(dim=1, keepdim=True)
    return (
        away / (away.square().mean(dim=1, keepdim=True) + norm.eps).sqrt() * norm.weight.double() + norm.bias.double()
    )


def activated(name: str, x: Tensor, gate: Tensor) -> Tensor:
    if name == "relu":
        return x.clamp(min=0)
    if name == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return {"none": x, "silu": x * x.sigmoid(), "swiglu": x * gate * gate.sigmoid()}[name]


def check_linear(rows: int, inner: int, outer: int, **names: bool | str) -> None:
    x, weight, bias = normal(rows, inner, seed=1) + 2, normal(outer, inner, seed=2), normal(outer, seed=3)
    gate = (normal(outer, inner, seed=4), normal(outer, seed=5)) if names.get("activation") == "swiglu" else None
    norm = some_norm(inner, 6) if names.get("norm") else None
    residual = normal(rows, outer, seed=8) - 3 if names.get("residual") else None
    residual_norm = some_norm(outer, 9) if names.get("residual_norm") else None
    activation = str(names.get("activation", "none"))
    out = torch.full((rows, outer), NAN, device=DEVICE)
    found = gpu.linear(
        *(x, weight, bias, out),
        norm=norm,
        activation=activation,
        gate=gate,
        residual=residual,
        residual_norm=residual_norm,
    )
    assert found is out
    read = normed(x, norm)
    gated = torch.zeros(()) if gate is None else read @ gate[0].double().T + gate[1].double()
    wanted = activated(activation, read @ weight.double().T + bias.double(), gated)
    assert_close(out, wanted if residual is None else wanted + normed(residual, residual_norm))


ROWS_AND_SIZES = [(1, 7, 5), (5, 300, 7), (5, 600, 3), (12, 9, 6), (17, 150, 37), (17, 5, 7)]


@here_only
@pytest.mark.parametrize(("rows", "inner", "outer"), ROWS_AND_SIZES)
def test_linear(rows: int, inner: int, outer: int) -> None:
    few = decode_linear._tiles(rows, inner, outer)[0] is decode_linear._few
    assert few == (rows <= 16)
    check_linear(rows, inner, outer)
    check_linear(rows, inner, outer, norm=True)
    check_linear(rows, inner, outer, residual=True)
    check_linear(rows, inner, outer, residual=True, residual_norm=True)
    check_linear(rows, inner, outer, norm=True, residual=True, residual_norm=True, activation="gelu")


@here_only
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_linear_with_activations(rows: int, activation: str) -> None:
    check_linear(rows, 12, 9, activation=activation)
    check_linear(rows, 12, 9, activation=activation, norm=True, residual=True)


@here_only
def test_statistics_of_rows_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_linear, "_WHOLE", 0)
    check_linear(5, 300, 7, norm=True)
    check_linear(5, 9, 20, norm=True, residual=True, residual_norm=True)


@here_only
@pytest.mark.parametrize("rows", [3, 17])
def test_what_is_not_a_number_stays_so(rows: int) -> None:
    x, weight, bias = normal(rows, 6), normal(5, 6, seed=1), normal(5, seed=2)
    for activation in ("none", "relu", "gelu", "silu", "swiglu"):
        gate = (weight, bias) if activation == "swiglu" else None
        clean, spoilt = (torch.zeros(rows, 5, device=DEVICE) for _ in range(2))
        gpu.linear(x, weight, bias, clean, activation=activation, gate=gate)
        broken = x.clone()
        broken[1, 2] = NAN
        gpu.linear(broken, weight, bias, spoilt, activation=activation, gate=gate)
        assert spoilt[1].isnan().all()
        assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])
    low = torch.full((5,), -INF, device=DEVICE)
    assert (gpu.linear(x, weight, low, clean, activation="relu") == 0).all()


@here_only
def test_linear_in_bfloat16() -> None:
    half = torch.bfloat16
    for rows in (3,) if INTERPRETED else (3, 17):  # the interpreter has no matrix product of this type
        x, weight, bias = normal(rows, 20, dtype=half), normal(7, 20, seed=1, dtype=half), normal(7, seed=2, dtype=half)
        out = torch.zeros(rows, 7, device=DEVICE)
        gpu.linear(x, weight, bias, out)
        assert_close(out, x.double() @ weight.double().T + bias.double())
        assert gpu.linear(x, weight, bias, out.to(half)).dtype == half


@here_only
@pytest.mark.parametrize("rows", [1, 5, 17])
@pytest.mark.parametrize("with_norm", [False, True])
def test_project_writes_its_slab_alone(rows: int, with_norm: bool) -> None:
    D = 6
    norm = some_norm(D, 3) if with_norm else None
    x, weight, bias = normal(rows, D), normal(3 * D, D, seed=1), normal(3 * D, seed=2)
    queries, cache = torch.zeros(rows, D, device=DEVICE), torch.full((4, rows, 2, D), 7.0, device=DEVICE)
    gpu.project(x, weight, bias, queries, cache, torch.tensor([2], device=DEVICE), norm)
    wanted = normed(x, norm) @ weight.double().T + bias.double()
    assert_close(queries, wanted[:, :D])
    assert_close(cache[2].flatten(1), wanted[:, D:])
    assert (cache[[0, 1, 3]] == 7).all()


@here_only
def test_embed() -> None:
    tokens = torch.tensor([4, 0, 4], device=DEVICE)
    table, positions, out = normal(5, 6), normal(9, 6, seed=1), torch.zeros(3, 6, device=DEVICE)
    place = torch.tensor([8], device=DEVICE)
    assert_close(
        gpu.embed(gpu.Fed(tokens, table, 2.5, positions, place), out),
        2.5 * table[tokens].double() + positions[8].double(),
    )
    assert_close(gpu.embed(gpu.Fed(tokens, table, 1.0, None, place), out), table[tokens].double())


@here_only
@pytest.mark.parametrize(("B", "S"), [(2, 3), (1, 1), (3, 5)])
def test_sources_are_put_into_larger_buffers(B: int, S: int) -> None:
    to = torch.full((3, 5), 7, device=DEVICE)
    real = torch.ones(3, 5, dtype=torch.bool, device=DEVICE)
    tokens = torch.randint(1, 9, (S, B), generator=torch.Generator().manual_seed(B)).to(DEVICE).T  # columns apart
    mask = torch.arange(S, device=DEVICE) <= torch.arange(B, device=DEVICE).unsqueeze(1)
    count = torch.full((1,), -7, dtype=torch.int32, device=DEVICE)
    gpu.place(tokens, mask, to, real, 0, count)
    assert count.tolist() == [len(tokens)]
    wanted, wanted_real = torch.zeros_like(to), torch.zeros_like(real)
    wanted[:B, :S], wanted_real[:B, :S] = tokens, mask
    wanted_real[B:, 0] = True
    assert torch.equal(to, wanted)
    assert torch.equal(real, wanted_real)


def attention(query: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """By the definition: query (D,), keys and values (n, D)."""
    parts = []
    for q, k, v in zip(*(part.double().chunk(heads, dim=-1) for part in (query, keys, values)), strict=True):
        parts.append((k @ q / math.sqrt(len(q))).softmax(0) @ v)
    return torch.cat(parts)


@here_only
@pytest.mark.parametrize(
    ("position", "R", "many"), [(0, 4, 8), (3, 5, 8), (15, 4, 8), (20, 5, 8), (20, 10, 8), (20, 9, 4), (3, 9, 4)]
)
def test_attention_to_the_past(position: int, R: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "_MANY", many)
    T, D, heads = 24, 6, 2
    queries, cache = normal(R, D), normal(T, R, 2, D, seed=1)
    lineage = torch.randint(0, R, (R, T), generator=torch.Generator().manual_seed(position)).int().to(DEVICE)
    lineage[1] = lineage[0]  # two rows with one past
    lineage[:, position] = torch.arange(R)
    cache[position + 1 :] = NAN
    for s in range(position + 1):
        cache[s, [r for r in range(R) if r not in lineage[:, s].tolist()]] = NAN
    out = torch.zeros(R, D, device=DEVICE)
    gpu.attend_past(queries, cache, lineage, torch.tensor([position], device=DEVICE), heads, out)
    steps = torch.arange(position + 1)
    for r in range(R):
        past = cache[steps, lineage[r, : position + 1].long()]
        assert_close(out[r], attention(queries[r], past[:, 0], past[:, 1], heads))


@here_only
@pytest.mark.parametrize(("W", "S"), [(2, 20), (5, 20), (4, 66), (40, 7)])
def test_attention_to_sources(W: int, S: int) -> None:
    A, D, heads = 4, 6, 2
    lengths = torch.tensor([1, 5, S, 0], device=DEVICE)
    queries, memory = 3 * normal(A * W, D), normal(A, S, 2, D, seed=1)
    memory[torch.arange(S, device=DEVICE) >= lengths[:, None]] = NAN
    out = gpu.attend_source(queries, memory, lengths, heads, torch.ones(A * W, D, device=DEVICE))
    for r in range(A * W):
        length = int(lengths[r // W])
        seen = memory[r // W, :length]
        wanted = attention(queries[r], seen[:, 0], seen[:, 1], heads) if length else torch.zeros(D).double()
        assert_close(out[r], wanted)


@here_only
def test_rotation_is_a_product_of_complex_numbers() -> None:
    R, T, heads, size = 3, 4, 2, 6
    angles = normal(T, size // 2, seed=2)
    table = torch.stack((angles.cos(), angles.sin()), dim=1).contiguous()
    queries, cache = normal(R, heads * size), normal(T, R, 2, heads * size, seed=1)
    before, kept = queries.clone(), cache.clone()
    gpu.rotate(queries, cache, table, torch.tensor([2], device=DEVICE), heads)
    turn = torch.polar(torch.ones(size // 2, dtype=torch.float64), angles[2].cpu().double())

    def turned(x: Tensor) -> Tensor:
        low, high = x.cpu().double().unflatten(1, (heads, 2, size // 2)).unbind(2)
        y = torch.complex(low, high) * turn
        return torch.stack((y.real, y.imag), dim=2).flatten(1)

    assert_close(queries, turned(before))
    assert_close(cache[2, :, 0], turned(kept[2, :, 0]))
    cache[2, :, 0] = kept[2, :, 0]
    assert torch.equal(cache, kept)
