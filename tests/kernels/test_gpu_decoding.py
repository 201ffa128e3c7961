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
    RUNS,
    compile_instead,
    for_hopper,
    here_only,
    needs_triton,
)

INF, NAN = math.inf, math.nan
BITS = 2.0**-21  # of the product of lengths: three of the four products of halves, added up in float32

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import decode_attention, decode_products
    from thalweg.kernels.gpu import decoding as gpu
    from thalweg.kernels.gpu.decode_products import Halves


# Every launch compiled for Hopper, without a GPU.


@pytest.mark.slow
@for_hopper
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rows", [1, 20, 300, 3000])
def test_layers_compile_for_hopper(rows: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as launches that begin while those before them end."""
    from thalweg.kernels.gpu import decode_attention, decode_products, decoding

    compiled, D, F = compile_instead(monkeypatch), 64, 128
    for module in (decode_attention, decode_products):
        monkeypatch.setattr(module, "overlapped", lambda x: {"launch_pdl": True} if early else {})

    def room(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=kind)

    def halves(rows: int, columns: int) -> decoding.Halves:
        return decoding.Halves.empty(rows, columns, 16, torch.device("cpu"))

    x, norm = halves(rows, D), (room(D), room(D), 1e-5)
    for kept in (False, True):
        decoding.normalise(room(rows, D), norm if kept else None, x, keep=kept)
    decoding.multiply(x, halves(3 * D, D), room(3 * D))
    decoding.multiply(x, halves(D, D), room(D), residual=room(rows, D))
    for activation in decode_products.ACTIVATIONS:
        gate = (halves(F, D), room(F)) if activation == "swiglu" else None
        inner = decoding.multiply(x, halves(F, D), room(F), activation=activation, gate=gate, halved=True)
    decoding.multiply(inner, halves(D, F), room(D), residual=room(rows, D))
    position, lengths = room(1, kind=torch.long), room(rows, kind=torch.long)
    for kind, block in ((torch.float32, 16), (torch.float32, 0), (torch.bfloat16, 0)):
        projected, lineage = room(rows, 3 * D, kind=kind), room(rows, 3, kind=torch.int32)
        decoding.attend_past(projected, room(3, rows, 2, D, kind=kind), lineage, position, 4, block)
        decoding.attend_source(room(rows, D, kind=kind), room(rows, 5, 2, D, kind=kind), lengths, 4, block)
        decoding.attend_places(projected, lengths, 1, 4, block)
    assert compiled == {"_normalise", "_multiply", "_attend"}


# Products, against float64.


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def halved(x: Tensor, block: int = 16) -> Halves:
    return gpu.normalise(x, None, Halves.empty(*x.shape, block, x.device))


def whole(x: Halves) -> Tensor:
    """What halves stand for, float64."""
    scales = x.scales.double().repeat_interleave(x.block, dim=1)
    return (x.high.double() + x.low.double()) * scales


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return gpu.multiply(halved(x), halved(weight), normal(len(weight)) * 0 if bias is None else bias)


def assert_close(found: Tensor, expected: Tensor, x: Tensor, weight: Tensor) -> None:
    """Off by no more than a few units in the last place of the product of the lengths of row and column."""
    bound = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None, :] + expected.abs()
    off = ((found.double() - expected).abs() / bound).max()
    assert off <= BITS, f"off by {off / BITS:.1f} times what is allowed"


def assert_near(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    most = float(wanted.abs().nan_to_num().max())
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * most, equal_nan=True)


@here_only
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 16, 16), (17, 48, 40), (70, 32, 100), (3, 256, 7)])
def test_product(rows: int, inner: int, outer: int) -> None:
    x, weight, bias = normal(rows, inner), normal(outer, inner, seed=1), normal(outer, seed=2)
    assert_close(product(x, weight, bias), x.double() @ weight.double().T + bias.double(), x, weight)


@here_only
def test_tiles_hold_whole_blocks_where_they_are_halved() -> None:
    for rows, outer in ((1, 16), (20, 4096), (512, 256), (512, 1024), (2560, 768), (1, 7)):
        tall, wide = decode_products._tile(rows, outer, 0)
        assert tall >= 16
        assert wide >= 16
        assert decode_products._tile(rows, outer, 64)[1] % 64 == 0


@here_only
@pytest.mark.skipif(DEVICE != "cuda", reason="tiles for matrix units of whole warps need a GPU")
@pytest.mark.parametrize("rows", [200, 1000, 3000])
@pytest.mark.parametrize(("inner", "outer", "block"), [(256, 768, 64), (1024, 256, 64), (96, 100, 32)])
def test_product_of_real_size(rows: int, inner: int, outer: int, block: int) -> None:
    x, weight, bias = normal(rows, inner), normal(outer, inner, seed=1), normal(outer, seed=2)
    out = gpu.multiply(halved(x, block), halved(weight, block), bias)
    assert_close(out, x.double() @ weight.double().T + bias.double(), x, weight)


@here_only
@pytest.mark.parametrize("factor", [1e-30, 1e6, 1e30])
def test_products_of_any_size(factor: float) -> None:
    x, weight, bias = factor * normal(5, 32), normal(16, 32, seed=1) / factor, normal(16, seed=2)
    assert_close(product(x, weight, bias), x.double() @ weight.double().T + bias.double(), x, weight)


@here_only
def test_rows_of_very_different_size() -> None:
    x, weight = normal(20, 48), normal(16, 48, seed=1)
    x *= 10.0 ** torch.arange(-10, 10, device=DEVICE)[:, None]
    weight *= 10.0 ** torch.arange(-8, 8, device=DEVICE)[:, None]
    x[3], weight[5] = 0, 0
    expected = x.double() @ weight.double().T
    bound = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None, :]
    assert ((product(x, weight).double() - expected).abs() <= BITS * bound).all()


@here_only
def test_a_small_block_beside_a_large_one_keeps_its_digits() -> None:
    """Who writes a block scales it by itself; what multiplies it must not mistake its scale for another's."""
    x = normal(18, 32)
    x[:, 16:] *= 1e-5
    room = Halves.empty(18, 32, 16, x.device)
    for n in range(2):
        part = halved(x[:, 16 * n : 16 * (n + 1)].contiguous())
        room.high[:, 16 * n : 16 * (n + 1)], room.low[:, 16 * n : 16 * (n + 1)] = part.high, part.low
        room.scales[:, n] = part.scales[:, 0]
    weight = normal(16, 32, seed=1)
    weight[:, :16] = 0
    out = gpu.multiply(room, halved(weight), torch.zeros(16, device=DEVICE))
    assert_close(out, x.double() @ weight.double().T, x[:, 16:], weight[:, 16:])


@here_only
def test_halves_keep_22_bits() -> None:
    x = normal(7, 64) * 3.7
    off = (whole(halved(x)) - x.double()).abs() / x.abs().amax(dim=1, keepdim=True)
    assert off.max() <= 2.0**-23
    lost = (halved(x).high.double() * halved(x).scales[:, :1].double() - x.double()).abs().max()
    assert lost > 2.0**-14, "the lower halves are there for something"


@here_only
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, at inf - inf
@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_not_a_number_stays_so(bad: float) -> None:
    x, weight = normal(18, 32), normal(16, 32, seed=1)
    x[4, 7] = bad
    for activation in ("none", "relu", "gelu", "silu", "swiglu"):
        matrix, bias = halved(weight), torch.zeros(16, device=DEVICE)
        out = gpu.multiply(halved(x), matrix, bias, activation=activation, gate=(matrix, bias))
        assert out[4].isnan().any() if activation == "relu" else not out[4].isfinite().any()
        assert out[torch.arange(18) != 4].isfinite().all()


ACTIVATED = {
    "none": lambda x, g: x,
    "relu": lambda x, g: x.relu(),
    "gelu": lambda x, g: torch.nn.functional.gelu(x),
    "silu": lambda x, g: torch.nn.functional.silu(x),
    "swiglu": lambda x, g: x * torch.nn.functional.silu(g),
}


@here_only
@pytest.mark.parametrize("activation", list(ACTIVATED))
def test_activations_and_sums(activation: str) -> None:
    x, stream = normal(21, 32), normal(21, 48, seed=5)
    weight, bias, other, shift = normal(48, 32, seed=1), normal(48, seed=2), normal(48, 32, seed=3), normal(48, seed=4)
    gate = (halved(other), shift) if activation == "swiglu" else None
    up, down = (x.double() @ w.double().T + b.double() for w, b in ((weight, bias), (other, shift)))
    expected = ACTIVATED[activation](up, down)
    how = {"activation": activation, "gate": gate}
    found = whole(gpu.multiply(halved(x), halved(weight), bias, **how, halved=True))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    out = torch.full((21, 48), NAN, device=DEVICE)
    assert gpu.multiply(halved(x), halved(weight), bias, **how, residual=stream, out=out) is out
    torch.testing.assert_close(out.double(), expected + stream.double(), rtol=2e-5, atol=2e-5)


@here_only
def test_gelu_has_the_digits_of_float32() -> None:
    """Of what a bias gives it, exactly; also where Phi is tiny, and where there is none."""

    def gelu(x: Tensor) -> Tensor:
        nothing = halved(torch.zeros(2, 16, device=DEVICE)), halved(torch.zeros(len(x), 16, device=DEVICE))
        out = gpu.multiply(*nothing, x, activation="gelu")
        assert torch.equal(out[0].nan_to_num(7), out[1].nan_to_num(7))
        return out[0]

    x = torch.linspace(-9, 9, 160, device=DEVICE)
    exact = x.double() * 0.5 * torch.special.erfc(-x.double() / math.sqrt(2))
    off = (gelu(x) - exact).abs()
    assert (off / x.abs()).max() <= 2e-7
    far = (x < -1) & (x > -5)
    usual = (torch.nn.functional.gelu(x.cpu()).to(DEVICE) - exact).abs()
    assert (off / exact.abs())[far].max() < (usual / exact.abs())[far].max()
    odd = gelu(torch.tensor([INF, NAN, -INF, 0.0, 1e30, -1e-30], device=DEVICE).repeat(3)[:16])
    assert odd[0] == INF
    assert odd[1].isnan()
    assert not odd[2].isfinite()
    torch.testing.assert_close(odd[3:6].cpu(), torch.tensor([0.0, 1e30, -5e-31]), rtol=1e-6, atol=0)


@here_only
@pytest.mark.parametrize(("rows", "width", "keep"), [(1, 16, True), (7, 48, False), (7, 304, True), (3, 272, False)])
def test_normalised_rows(rows: int, width: int, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_products, "_MANY", 5)
    x, gain, shift = 3 + normal(rows, width), normal(width, seed=1), normal(width, seed=2)
    before = x.clone()
    found = gpu.normalise(x, (gain, shift, 1e-3), Halves.empty(rows, width, 16, x.device), keep=keep)
    expected = torch.nn.functional.layer_norm(before.double(), (width,), gain.double(), shift.double(), 1e-3)
    torch.testing.assert_close(whole(found), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.double(), expected if keep else before.double(), rtol=1e-5, atol=1e-5)


# Attention, by its definition.


def attention(query: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """By the definition: query (D,), keys and values (n, D)."""
    parts = []
    for q, k, v in zip(*(part.double().chunk(heads, dim=-1) for part in (query, keys, values)), strict=True):
        parts.append((k @ q / math.sqrt(len(q))).softmax(0) @ v)
    return torch.cat(parts)


@here_only
@pytest.mark.parametrize(
    ("position", "R", "many"), [(0, 4, 8), (3, 5, 8), (15, 4, 8), (20, 5, 8), (20, 9, 4), (3, 9, 4)]
)
def test_attention_to_the_past(position: int, R: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads this step's keys and values where they were projected, and keeps them in their slab alone."""
    monkeypatch.setattr(decode_attention, "_MANY", many)
    T, D, heads = 24, 6, 2
    projected, cache = normal(R, 3 * D), normal(T, R, 2, D, seed=1)
    lineage = torch.randint(0, R, (R, T), generator=torch.Generator().manual_seed(position)).int().to(DEVICE)
    lineage[1] = lineage[0]  # two rows with one past
    cache[position:] = NAN
    for s in range(position):
        cache[s, [r for r in range(R) if r not in lineage[:, s].tolist()]] = NAN
    before = cache.clone()
    out = gpu.attend_past(projected, cache, lineage, torch.tensor([position], device=DEVICE), heads)
    for r in range(R):
        past = before[torch.arange(position), lineage[r, :position].long()]
        past = torch.cat((past, projected[r, D:].view(1, 2, D)))
        assert_near(out[r], attention(projected[r, :D], past[:, 0], past[:, 1], heads))
    before[position] = projected[:, D:].view(R, 2, D)
    assert torch.equal(cache.nan_to_num(7), before.nan_to_num(7))


@here_only
@pytest.mark.parametrize(("W", "S", "many"), [(2, 20, 128), (5, 66, 128), (5, 20, 8), (40, 7, 128)])
def test_attention_to_sources(W: int, S: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "_SEVERAL", many)
    A, D, heads = 4, 6, 2
    lengths = torch.tensor([1, 5, S, 0], device=DEVICE)
    queries, memory = 3 * normal(A * W, D), normal(A, S, 2, D, seed=1)
    memory[torch.arange(S, device=DEVICE) >= lengths[:, None]] = NAN
    out = gpu.attend_source(queries, memory, lengths, heads)
    for r in range(A * W):
        length = int(lengths[r // W])
        seen = memory[r // W, :length]
        wanted = attention(queries[r], seen[:, 0], seen[:, 1], heads) if length else torch.zeros(D).double().to(DEVICE)
        assert_near(out[r], wanted)


@here_only
@pytest.mark.parametrize(("heads", "places", "block"), [(1, 1, 32), (2, 5, 16), (1, 20, 16), (2, 20, 0)])
def test_attention_of_an_encoder(heads: int, places: int, block: int) -> None:
    A, D = 3, 32
    projected, lengths = normal(A * places, 3 * D), torch.tensor([places, 1, 0], device=DEVICE)
    found = gpu.attend_places(projected, lengths, places, heads, block)
    found = whole(found) if block else found.double()
    q, k, v = projected.double().view(A, places, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
    for a in range(2):
        n = int(lengths[a])
        weights = (q[a] @ k[a, :, :n].mT / (D // heads) ** 0.5).softmax(dim=2)
        expected = (weights @ v[a, :, :n]).permute(1, 0, 2).reshape(places, D)
        torch.testing.assert_close(found[a * places : (a + 1) * places], expected, rtol=1e-5, atol=1e-5)
    assert (found[2 * places :] == 0).all()


@here_only
@pytest.mark.parametrize("block", [16, 32])
def test_readings_in_halves_are_those_in_float32(block: int) -> None:
    A, W, D, S, T, heads = 2, 3, 64, 9, 7, 2
    queries, memory, cache = normal(A * W, 3 * D), normal(A, S, 2, D, seed=1), normal(T, A * W, 2, D, seed=2)
    lineage = torch.randint(A * W, (A * W, T), generator=torch.Generator().manual_seed(0)).int().to(DEVICE)
    position, lengths = torch.tensor([T - 1], device=DEVICE), torch.tensor([S, 3], device=DEVICE)
    alone = queries[:, :D].contiguous()
    for attend in (
        lambda block: gpu.attend_source(alone, memory, lengths, heads, block),
        lambda block: gpu.attend_past(queries, cache, lineage, position, heads, block),
    ):
        torch.testing.assert_close(whole(attend(block)), attend(0).double(), rtol=1e-6, atol=1e-6)


@here_only
def test_attention_in_bfloat16() -> None:
    D, memory, lengths = 6, normal(2, 5, 2, 6, seed=1).bfloat16(), torch.tensor([5, 2], device=DEVICE)
    queries = normal(4, D).bfloat16()
    found = gpu.attend_source(queries, memory, lengths, 2)
    assert found.dtype == torch.bfloat16
    assert_near(found, gpu.attend_source(queries.float(), memory.float(), lengths, 2).double(), 0.01)
