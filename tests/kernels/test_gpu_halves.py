"""Matrices in two halves: for real on a GPU, else through Triton's interpreter in a process of its own."""

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

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import decoding as gpu
    from thalweg.kernels.gpu import halved_products, halves
    from thalweg.kernels.gpu.halves import Halves, Matrices

BITS = 2.0**-21  # of the product of lengths: three of the four products of halves, added up in float32


# Every launch compiled for Hopper, without a GPU.


@pytest.mark.slow
@for_hopper
@pytest.mark.parametrize("rows", [20, 300, 3000, 6000, 12_000])
def test_products_compile_for_hopper(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from thalweg.kernels.gpu import decoding, halved_products

    compiled = compile_instead(monkeypatch)
    monkeypatch.setattr(halved_products, "_copies_tiles", lambda x: True)
    room = decoding.Halves.empty(rows, 64, 16, torch.device("cpu"))
    inner = decoding.Halves.empty(rows, 128, 16, torch.device("cpu"))
    kept = decoding.Matrices([(torch.zeros(n, k), torch.zeros(n)) for n, k in ((192, 64), (64, 64), (128, 64))])
    kept.refresh()
    x, cache = torch.zeros(rows, 64), torch.zeros(3, rows, 2, 64)
    decoding.normalise(x, decoding.Norm(torch.ones(64), torch.zeros(64), 1e-5), room, keep=True)
    decoding.multiply(room, kept[0], x, cache=cache, position=torch.zeros(1, dtype=torch.long))
    decoding.multiply(room, kept[1], x, residual=x)
    decoding.multiply(room, kept[1], x)
    decoding.multiply(room, kept[2], inner, activation="swiglu", gate=kept[2])
    decoding.attend_places(torch.zeros(rows, 192), torch.zeros(rows // 5, dtype=torch.long), 5, 4, room)
    long = decoding.Halves.empty(80, 64, 16, torch.device("cpu"))
    decoding.attend_places(torch.zeros(80, 192), torch.zeros(1, dtype=torch.long), 80, 4, long)
    lineage, position = torch.zeros(rows, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.long)
    decoding.attend_past(x, cache, lineage, position, 4, room)
    fed = decoding.Fed(torch.zeros(rows, dtype=torch.long), x, 2.0, x, position)
    decoding.normalise(x, decoding.Norm(torch.ones(64), torch.zeros(64), 1e-5), room, keep=True, fed=fed)
    assert compiled == {"_split", "_normalise", "_multiply", "_places", "_rows", "_past"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def matrix_of(weight: Tensor, bias: Tensor) -> halves.Matrix:
    kept = Matrices([(weight, bias)])
    kept.refresh()
    return kept[0]


def halved(x: Tensor, block: int = 16) -> Halves:
    return gpu.normalise(x.clone(), None, Halves.empty(*x.shape, block, x.device))


def whole(x: Halves) -> Tensor:
    """What halves stand for, float64."""
    scales = x.scales.double().repeat_interleave(x.block, dim=1)
    return (x.high.double() + x.low.double()) * scales


def assert_close(found: Tensor, expected: Tensor, x: Tensor, weight: Tensor) -> None:
    """Off by no more than a few units in the last place of the product of the lengths of row and column."""
    bound = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None, :] + expected.abs()
    off = ((found.double() - expected).abs() / bound).max()
    assert off <= BITS, f"off by {off / BITS:.1f} times what is allowed"


SHAPES = [(1, 16, 16), (17, 48, 40), (33, 64, 100), (70, 32, 96), (3, 256, 7)]


@here_only
@pytest.mark.parametrize(("rows", "inner", "outer"), SHAPES)
def test_product(rows: int, inner: int, outer: int) -> None:
    x, weight, bias = normal(rows, inner), normal(outer, inner, seed=1), normal(outer, seed=2)
    out = torch.full((rows, outer), math.nan, device=DEVICE)
    gpu.multiply(halved(x), matrix_of(weight, bias), out)
    assert_close(out, x.double() @ weight.double().T + bias.double(), x, weight)


@here_only
@pytest.mark.skipif(DEVICE != "cuda", reason="tiles for matrix units of whole warps need a GPU")
@pytest.mark.parametrize("rows", [200, 1000, 3000])
@pytest.mark.parametrize(("inner", "outer", "block"), [(256, 768, 64), (1024, 256, 64), (96, 100, 32)])
def test_product_of_real_size(rows: int, inner: int, outer: int, block: int) -> None:
    x, weight, bias = normal(rows, inner), normal(outer, inner, seed=1), normal(outer, seed=2)
    out = torch.empty(rows, outer, device=DEVICE)
    gpu.multiply(halved(x, block), matrix_of(weight, bias), out)
    assert_close(out, x.double() @ weight.double().T + bias.double(), x, weight)


@here_only
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1e6, 1e30])
def test_of_any_size(rows: int, factor: float) -> None:
    x, weight, bias = factor * normal(rows, 32), normal(16, 32, seed=1) / factor, normal(16, seed=2)
    out = torch.empty(rows, 16, device=DEVICE)
    gpu.multiply(halved(x), matrix_of(weight, bias), out)
    assert_close(out, x.double() @ weight.double().T + bias.double(), x, weight)


@here_only
def test_rows_and_blocks_of_very_different_size() -> None:
    x, weight = normal(20, 48), normal(16, 48, seed=1)
    x *= 10.0 ** torch.arange(-10, 10, device=DEVICE)[:, None]
    weight *= 10.0 ** torch.arange(-8, 8, device=DEVICE)[:, None]
    x[3], weight[5] = 0, 0
    out = torch.empty(20, 16, device=DEVICE)
    gpu.multiply(halved(x), matrix_of(weight, torch.zeros(16, device=DEVICE)), out)
    expected = x.double() @ weight.double().T
    bound = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None, :]
    assert ((out.double() - expected).abs() <= BITS * bound).all()


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
    out = torch.empty(18, 16, device=DEVICE)
    gpu.multiply(room, matrix_of(weight, torch.zeros(16, device=DEVICE)), out)
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
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_stays_so(bad: float) -> None:
    x, weight = normal(18, 32), normal(16, 32, seed=1)
    x[4, 7] = bad
    out = torch.empty(18, 16, device=DEVICE)
    gpu.multiply(halved(x), matrix_of(weight, torch.zeros(16, device=DEVICE)), out)
    assert not out[4].isfinite().any()
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
def test_activations_in_halves(activation: str) -> None:
    x, weight, bias = normal(21, 32), normal(48, 32, seed=1), normal(48, seed=2)
    other, other_bias = normal(48, 32, seed=3), normal(48, seed=4)
    kept = Matrices([(weight, bias), (other, other_bias)])
    kept.refresh()
    out = Halves.empty(21, 48, 16, x.device)
    gate = kept[1] if activation == "swiglu" else None
    gpu.multiply(halved(x), kept[0], out, activation=activation, gate=gate)
    up, down = (x.double() @ w.double().T + b.double() for w, b in ((weight, bias), (other, other_bias)))
    expected = ACTIVATED[activation](up, down)
    torch.testing.assert_close(whole(out), expected, rtol=2e-5, atol=2e-5)


@here_only
def test_sums_and_slabs() -> None:
    x, stream = normal(19, 32), normal(19, 32, seed=5)
    kept = Matrices([(normal(96, 32, seed=1), normal(96, seed=2)), (normal(32, 32, seed=3), normal(32, seed=4))])
    kept.refresh()
    out = torch.empty(19, 32, device=DEVICE)
    gpu.multiply(halved(x), kept[1], out, residual=stream)
    expected = x.double() @ normal(32, 32, seed=3).double().T + normal(32, seed=4).double() + stream.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    cache = torch.full((3, 19, 2, 32), 7.0, device=DEVICE)
    gpu.multiply(halved(x), kept[0], out, cache=cache, position=torch.tensor([1], device=DEVICE))
    expected = x.double() @ normal(96, 32, seed=1).double().T + normal(96, seed=2).double()
    torch.testing.assert_close(out.double(), expected[:, :32], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache[1].flatten(1).double(), expected[:, 32:], rtol=1e-5, atol=1e-5)
    assert (cache[0] == 7).all()
    assert (cache[2] == 7).all()


@here_only
@pytest.mark.parametrize("activation", ["none", "swiglu"])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 32, 48), (70, 64, 96), (65, 32, 100)])
def test_tiles_copied_whole_are_those_fetched_by_addresses(
    rows: int, inner: int, outer: int, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many sums take: what lies past the last row and column must count for nothing."""
    x, stream = normal(rows, inner), normal(rows, outer, seed=5)
    kept = Matrices([(normal(outer, inner, seed=n), normal(outer, seed=n + 2)) for n in (1, 2)])
    kept.refresh()
    gate = kept[1] if activation == "swiglu" else None
    seen: list[bool] = []

    def described(*given: object) -> tuple[object, ...]:
        seen.append(True)
        return real(*given)

    found = []
    real = halved_products._described
    monkeypatch.setattr(halved_products, "_described", described)
    for boxed in (False, True):
        tiles = halved_products.Tiles(64, 64, 4, 2, boxed=boxed)
        monkeypatch.setattr(halved_products, "_tiles", lambda *given, tiles=tiles: tiles)
        monkeypatch.setattr(halved_products, "_copies_tiles", lambda x: True)
        out = torch.full((rows, outer), math.nan, device=DEVICE)
        gpu.multiply(halved(x), kept[0], out, residual=stream, activation=activation, gate=gate)
        found.append(out)
        assert len(seen) == 3 * boxed
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
    if activation == "none":
        assert torch.equal(*found)
        weight, bias = normal(outer, inner, seed=1).double(), normal(outer, seed=3).double()
        assert_close(found[0] - stream, x.double() @ weight.T + bias, x, weight)


@here_only
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_sums_in_parts(keep: bool, normed: bool) -> None:
    rows, inner, width = 20, 512, 32
    assert gpu.parts_of(rows, inner) == 8
    x, stream = normal(rows, inner), normal(rows, width, seed=5)
    weight, bias = normal(width, inner, seed=1), normal(width)
    parts = torch.full((8, rows, width), math.nan, device=DEVICE)
    gpu.multiply(halved(x), matrix_of(weight, bias), parts, residual=stream)
    expected = x.double() @ weight.double().T + bias.double() + stream.double()
    torch.testing.assert_close(parts.double().sum(dim=0), expected, rtol=1e-5, atol=3e-5)
    norm = gpu.Norm(normal(width, seed=6), normal(width, seed=7), 1e-5)
    found = gpu.normalise(parts, norm if normed else None, Halves.empty(rows, width, 16, x.device), keep=keep)
    after = torch.nn.functional.layer_norm(expected, (width,), norm.weight.double(), norm.bias.double())
    torch.testing.assert_close(whole(found), after if normed else expected, rtol=1e-5, atol=3e-5)
    kept = after if keep and normed else expected
    torch.testing.assert_close(parts[0].double(), kept, rtol=1e-5, atol=3e-5)


@here_only
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_what_is_fed_is_embedded_and_normalised(placed: bool, normed: bool, keep: bool) -> None:
    rows, width = 13, 48
    table, positions = normal(9, width), normal(5, width, seed=1)
    tokens = torch.randint(9, (rows,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    fed = gpu.Fed(tokens, table, 2.5, positions if placed else None, torch.tensor([3], device=DEVICE))
    norm = gpu.Norm(normal(width, seed=6), normal(width, seed=7), 1e-5)
    x = torch.full((rows, width), math.nan, device=DEVICE)
    found = gpu.normalise(x, norm if normed else None, Halves.empty(rows, width, 16, x.device), keep=keep, fed=fed)
    expected = 2.5 * table[tokens].double() + (positions[3].double() if placed else 0)
    after = torch.nn.functional.layer_norm(expected, (width,), norm.weight.double(), norm.bias.double())
    torch.testing.assert_close(whole(found), after if normed else expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.double(), after if normed and keep else expected, rtol=1e-5, atol=1e-5)


@here_only
@pytest.mark.parametrize(("rows", "width", "each"), [(1, 16, 1), (7, 48, 1), (14, 16, 4)])
@pytest.mark.parametrize("keep", [False, True])
def test_normalised_rows(rows: int, width: int, each: int, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "_rows_and_warps", lambda *sizes: (each, 1))  # several, as of many rows
    x = 3 + normal(rows, width)
    gain, shift = normal(width, seed=1), normal(width, seed=2)
    before = x.clone()
    found = gpu.normalise(x, gpu.Norm(gain, shift, 1e-5), Halves.empty(rows, width, 16, x.device), keep=keep)
    expected = torch.nn.functional.layer_norm(before.double(), (width,), gain.double(), shift.double())
    torch.testing.assert_close(whole(found), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.double(), expected if keep else before.double(), rtol=1e-5, atol=1e-5)


@here_only
def test_gelu_has_the_digits_of_float32() -> None:
    """Of what a bias gives it, exactly; also where Phi is tiny, and where there is none."""

    def gelu(x: Tensor) -> Tensor:
        out = torch.empty(2, len(x), device=DEVICE)
        gpu.linear(torch.zeros(2, 16, device=DEVICE), torch.zeros(len(x), 16, device=DEVICE), x, out, activation="gelu")
        assert torch.equal(out[0].nan_to_num(7), out[1].nan_to_num(7))
        return out[0]

    x = torch.linspace(-9, 9, 1024, device=DEVICE)
    exact = x.double() * 0.5 * torch.special.erfc(-x.double() / math.sqrt(2))
    off = (gelu(x) - exact).abs()
    assert (off / x.abs()).max() <= 2e-7
    far = (x < -1) & (x > -5)
    usual = (torch.nn.functional.gelu(x.cpu()).to(DEVICE) - exact).abs()
    assert (off / exact.abs())[far].max() < (usual / exact.abs())[far].max()
    odd = gelu(torch.tensor([math.inf, math.nan, -math.inf, 0.0, 1e30, -1e-30], device=DEVICE).repeat(3)[:16])
    assert odd[0] == math.inf
    assert odd[1].isnan()
    assert not odd[2].isfinite()
    torch.testing.assert_close(odd[3:6].cpu(), torch.tensor([0.0, 1e30, -5e-31]), rtol=1e-6, atol=0)


@here_only
def test_weights_are_read_anew() -> None:
    weight, bias = normal(16, 16), torch.zeros(16, device=DEVICE)
    kept = Matrices([(normal(5, 48, seed=1), torch.zeros(5, device=DEVICE)), (weight, bias)])
    kept.refresh()
    x, out = normal(4, 16, seed=2), torch.empty(4, 16, device=DEVICE)
    weight.mul_(-3)
    kept.refresh()
    gpu.multiply(halved(x), kept[1], out)
    assert_close(out, x.double() @ weight.double().T, x, weight)


@here_only
@pytest.mark.parametrize(("heads", "places"), [(1, 1), (2, 5), (1, 20), (2, 67)])
def test_attention_of_an_encoder(heads: int, places: int) -> None:
    A, D = 3, 32
    projected, lengths = normal(A * places, 3 * D), torch.tensor([places, 1, 0], device=DEVICE)
    found = whole(
        gpu.attend_places(projected, lengths, places, heads, Halves.empty(A * places, D, 16, projected.device))
    )
    q, k, v = projected.double().view(A, places, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
    for a in range(2):
        n = int(lengths[a])
        weights = (q[a] @ k[a, :, :n].mT / (D // heads) ** 0.5).softmax(dim=2)
        expected = (weights @ v[a, :, :n]).permute(1, 0, 2).reshape(places, D)
        torch.testing.assert_close(found[a * places : (a + 1) * places], expected, rtol=1e-5, atol=1e-5)
    assert (found[2 * places :] == 0).all()


@here_only
@pytest.mark.parametrize(("width", "T"), [(1, 18), (3, 7), (9, 7)])
def test_readings_in_halves_are_those_in_float32(width: int, T: int) -> None:
    A, D, S, heads = 2, 64, 19, 2
    rows = A * width
    queries, memory, cache = normal(rows, D), normal(A, S, 2, D, seed=1), normal(T, rows, 2, D, seed=2)
    lineage = torch.randint(rows, (rows, T), generator=torch.Generator().manual_seed(0)).int().to(DEVICE)
    position, lengths = torch.tensor([T - 1], device=DEVICE), torch.tensor([S, 3], device=DEVICE)
    for block in (16, 32):
        for attend in (
            lambda out: gpu.attend_source(queries, memory, lengths, heads, out),
            lambda out: gpu.attend_past(queries, cache, lineage, position, heads, out),
        ):
            expected = attend(torch.zeros(rows, D, device=DEVICE))
            found = whole(attend(Halves.empty(rows, D, block, queries.device)))
            torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-6)
