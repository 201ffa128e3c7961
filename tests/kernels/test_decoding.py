"""Decoding steps: every backend against sums written out in Python, in every size, layout and number of threads."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.kernels import decoding
from thalweg.kernels.reference import decoding as reference

cpu: Any = import_module("thalweg.kernels.cpu.decoding") if find_spec("numba") else None
compiled = pytest.mark.skipif(cpu is None, reason="the CPU kernels need numba")
# rows, steps or places, rows of the cache or sources, heads, size of a head
SIZES = [
    (1, 1, 1, 1, 1),
    (1, 1, 3, 2, 8),
    (1, 20, 1, 4, 64),
    (3, 7, 4, 3, 5),
    (5, 8, 5, 8, 32),
    (6, 9, 2, 1, 128),
    (40, 17, 33, 4, 16),
    (9, 3, 12, 2, 100),
    (64, 12, 16, 4, 64),
]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call is shared out, however small."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu, "_LEAST_WORK", 1)
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def integers(high: int, *shape: int, seed: int = 0, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def past_case(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, int]:
    rows, steps, stored, heads, part = size
    width = heads * part
    queries, cache = numbers(rows, width, dtype=dtype), numbers(steps + 2, stored, 2, width, seed=1, dtype=dtype)
    cache[steps:] = math.nan  # steps not yet written may hold anything
    return queries, cache, integers(stored, rows, steps), heads


def source_case(size: tuple[int, ...], dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    rows, places, batch, heads, part = size
    width = heads * part
    queries, memory = numbers(rows, width, dtype=dtype), numbers(batch, places, 2, width, seed=1, dtype=dtype)
    lengths = integers(places + 1, batch, low=1)
    for item, length in enumerate(lengths.tolist()):
        memory[item, length:] = math.nan
    return queries, memory, lengths, integers(batch, rows, seed=2), heads


def written_out(query: list[float], keys: list[list[float]], values: list[list[float]], heads: int) -> list[float]:
    """Softmax attention of one row, head by head, with nothing but Python's numbers."""
    size, out = len(query) // heads, []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        scores = [math.fsum(q * k for q, k in zip(query[part], key[part], strict=True)) for key in keys]
        powers = [math.exp(score - max(scores)) for score in scores]
        for j in range(h * size, (h + 1) * size):
            out.append(math.fsum(p * v[j] for p, v in zip(powers, values, strict=True)) / math.fsum(powers))
    return out


def past_oracle(queries: Tensor, cache: Tensor, lineage: Tensor, heads: int) -> Tensor:
    stored, out = cache.tolist(), []
    for query, own in zip(queries.tolist(), lineage.tolist(), strict=True):
        pairs = [stored[s][n] for s, n in enumerate(own)]
        out.append(written_out(query, [pair[0] for pair in pairs], [pair[1] for pair in pairs], heads))
    return torch.tensor(out, dtype=torch.float64)


def source_oracle(queries: Tensor, memory: Tensor, lengths: Tensor, items: Tensor, heads: int) -> Tensor:
    stored, out = memory.tolist(), []
    for query, item in zip(queries.tolist(), items.tolist(), strict=True):
        pairs = stored[item][: int(lengths[item])]
        out.append(written_out(query, [pair[0] for pair in pairs], [pair[1] for pair in pairs], heads))
    return torch.tensor(out, dtype=torch.float64)


def off(value: Tensor, truth: Tensor) -> float:
    """The largest deviation, relative to the largest number."""
    return float((value.double() - truth.double()).abs().max() / truth.abs().max())


BACKENDS = [reference, pytest.param(cpu, marks=compiled), decoding]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS, ids=["reference", "cpu", "public"])
def test_equal_to_sums_written_out(backend: ModuleType, size: tuple[int, ...]) -> None:
    past = past_case(size)
    assert off(backend.attend_past(*past), past_oracle(*past)) < 1e-5
    source = source_case(size)
    assert off(backend.attend_source(*source), source_oracle(*source)) < 1e-5


@pytest.mark.parametrize("size", SIZES[3:5])
def test_double_precision(size: tuple[int, ...]) -> None:
    past, source = past_case(size, torch.float64), source_case(size, torch.float64)
    assert off(decoding.attend_past(*past), past_oracle(*past)) < 1e-13
    assert off(decoding.attend_source(*source), source_oracle(*source)) < 1e-13


def test_a_broken_twin_is_found() -> None:
    queries, cache, lineage, heads = past_case((6, 9, 4, 2, 8))
    truth = past_oracle(queries, cache, lineage, heads)
    for broken in (
        (queries, cache, lineage.roll(1, 1), heads),  # the ancestors of another step
        (queries, cache[:, :, [1, 0]], lineage, heads),  # keys for values
        (queries, cache, lineage[:, 1:], heads),  # a step too few
        (queries, cache, lineage, 1),  # one head for two
        (queries * 1.001, cache, lineage, heads),
    ):
        assert off(decoding.attend_past(*broken), truth) > 1e-5


@compiled
def test_whole_batch_equals_row_by_row() -> None:
    queries, cache, lineage, heads = past_case((40, 17, 33, 4, 16))
    rows = [cpu.attend_past(queries[r : r + 1], cache, lineage[r : r + 1], heads) for r in range(40)]
    assert torch.equal(cpu.attend_past(queries, cache, lineage, heads), torch.cat(rows))
    queries, memory, lengths, items, heads = source_case((40, 17, 33, 4, 16))
    rows = [cpu.attend_source(queries[r : r + 1], memory, lengths, items[r : r + 1], heads) for r in range(40)]
    assert torch.equal(cpu.attend_source(queries, memory, lengths, items, heads), torch.cat(rows))


def test_any_layout() -> None:
    queries, cache, lineage, heads = past_case((5, 8, 5, 4, 8))
    truth = decoding.attend_past(queries, cache, lineage, heads)
    beside = torch.cat([queries, numbers(5, 64)], 1)[:, :32]  # a part of a joint projection
    columns = lineage.t().contiguous().t()
    assert torch.equal(decoding.attend_past(beside, cache, columns, heads), truth)
    wide = torch.cat([cache, cache], 1)[:, ::2]  # every other row
    expected = past_oracle(queries, wide, lineage, heads)
    assert off(decoding.attend_past(queries, wide, lineage, heads), expected) < 1e-5
    spread = torch.stack([queries, queries], -1)[..., 0]  # numbers that do not touch: the reference takes them
    assert off(decoding.attend_past(spread, cache, lineage, heads), truth) < 1e-5
    queries, memory, lengths, items, heads = source_case((5, 8, 5, 4, 8))
    truth = decoding.attend_source(queries, memory, lengths, items, heads)
    pairs = torch.stack([lengths, items[:5]], 1)
    joint = memory.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(decoding.attend_source(queries, joint, pairs[:, 0], pairs[:, 1], heads), truth)


def test_inputs_are_left_alone() -> None:
    past, source = past_case(SIZES[4]), source_case(SIZES[4])
    kept = [x.clone() for x in (*past[:3], *source[:4])]
    decoding.attend_past(*past)
    decoding.attend_source(*source)
    for before, after in zip(kept, (*past[:3], *source[:4]), strict=True):
        assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


def test_extreme_scores() -> None:
    queries, cache, lineage, heads = past_case((6, 9, 4, 2, 8))
    large = queries * 1e4  # weights of 0 and 1
    assert off(decoding.attend_past(large, cache, lineage, heads), past_oracle(large, cache, lineage, heads)) < 1e-5
    for bad in (math.nan, math.inf):  # what is not a number stays visible, in the rows and heads that have it
        broken = cache.clone()
        broken[2, 1, 0, 3] = bad
        hit = (lineage[:, 2] == 1).nonzero()[:, 0]
        assert len(hit)
        expected = reference.attend_past(queries, broken, lineage, heads)
        torch.testing.assert_close(
            decoding.attend_past(queries, broken, lineage, heads), expected, equal_nan=True, rtol=1e-4, atol=1e-5
        )
        assert bad is math.inf or expected[hit, :8].isnan().all()


def test_a_source_of_length_zero_gives_zeros() -> None:
    queries, memory, lengths, items, heads = source_case((6, 9, 4, 2, 8))
    lengths[int(items[0])] = 0
    memory[int(items[0])] = math.nan
    for backend in (reference, decoding):
        out = backend.attend_source(queries, memory, lengths, items, heads)
        assert torch.equal(out[0], torch.zeros(16))
        assert not out.isnan().any()


def test_gradients() -> None:
    queries, cache, lineage, heads = past_case((3, 4, 3, 2, 2), torch.float64)
    cache = cache[:4]
    assert torch.autograd.gradcheck(
        lambda q, c: decoding.attend_past(q, c, lineage, heads), (queries.requires_grad_(), cache.requires_grad_())
    )
    q, c = (x.detach().float().requires_grad_() for x in (queries, cache))
    decoding.attend_past(q, c, lineage, heads).sum().backward()  # kernels leave these to the reference
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in (q, c))
    with torch.no_grad():
        assert not decoding.attend_past(q, c, lineage, heads).requires_grad
    with torch.inference_mode():
        assert off(decoding.attend_past(q, c, lineage, heads), past_oracle(queries, cache, lineage, heads)) < 1e-5


def test_no_rows() -> None:
    _, cache, lineage, heads = past_case((6, 9, 4, 2, 8))
    assert decoding.attend_past(torch.empty(0, 16), cache, lineage[:0], heads).shape == (0, 16)


def test_errors_say_what_was_expected() -> None:
    queries, cache, lineage, heads = past_case((6, 9, 4, 2, 8))
    for arguments, message in (
        ((queries[:, :8], cache, lineage, heads), "`queries` must be"),
        ((queries, cache[:, :, :1], lineage, heads), "2, D"),
        ((queries, cache, lineage, 3), "`heads` must divide the width 16, got 3"),
        ((queries, cache, lineage[:5], heads), "`lineage` must be"),
        ((queries, cache[:8], lineage, heads), "t <= 8"),
        ((queries, cache, lineage.int(), heads), "int64"),
    ):
        with pytest.raises(ShapeError, match=message):
            decoding.attend_past(*arguments)
    queries, memory, lengths, items, heads = source_case((6, 9, 4, 2, 8))
    for arguments, message in (
        ((queries, memory, lengths[:3], items, heads), "`lengths` must be"),
        ((queries, memory, lengths, items[:3], heads), "`items` "),
        ((queries, memory, lengths, items.int(), heads), "int64"),
    ):
        with pytest.raises(ShapeError, match=message):
            decoding.attend_source(*arguments)


@compiled
@pytest.mark.parametrize("value", [-1, 4])
def test_kernels_read_nothing_outside(value: int) -> None:
    queries, cache, lineage, heads = past_case((6, 9, 4, 2, 8))
    lineage[5, 8] = value
    with pytest.raises(ShapeError, match=r"0\.\.3 .* for row 5"):
        decoding.attend_past(queries, cache, lineage, heads)
    queries, memory, lengths, items, heads = source_case((6, 9, 4, 2, 8))
    items[3] = value
    with pytest.raises(ShapeError, match=rf"got item {value} for row 3"):
        decoding.attend_source(queries, memory, lengths, items, heads)
    items[3] = 0
    lengths[0] = 10 if value > 0 else -1
    with pytest.raises(ShapeError, match=r"`lengths` in 0\.\.9"):
        decoding.attend_source(queries, memory, lengths, items, heads)


@pytest.mark.parametrize("width", [1, 5, 8, 40, 256, 300])
@pytest.mark.parametrize("biased", [True, False])
def test_add_norm(width: int, biased: bool) -> None:
    x, residual = 3 * numbers(7, width) + 5, numbers(7, width, seed=1)
    weight, bias = numbers(width, seed=2), numbers(width, seed=3) if biased else None
    total = x.double().numpy() + residual.double().numpy()
    centred = total - total.mean(1, keepdims=True)
    truth = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight.numpy()
    truth += 0.0 if bias is None else bias.numpy()
    for backend in (reference, decoding):
        normed, added = backend.add_norm(x, residual, weight, bias, 1e-5)
        torch.testing.assert_close(normed, torch.tensor(truth).float(), rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(added, torch.tensor(total).float())
    beside = torch.cat([x, x], 1)[:, :width]
    assert torch.equal(decoding.add_norm(beside, residual, weight, bias, 1e-5)[0], normed)
    with pytest.raises(ShapeError, match="alike"):
        decoding.add_norm(x, residual[1:], weight, bias, 1e-5)
    with pytest.raises(ShapeError, match="`weight` and `bias` must be"):
        decoding.add_norm(x, residual, weight[1:], bias, 1e-5)


@compiled
def test_threads_change_nothing(two_threads: None) -> None:
    for size in SIZES:
        past, source = past_case(size), source_case(size)
        assert off(cpu.attend_past(*past), past_oracle(*past)) < 1e-5
        assert off(cpu.attend_source(*source), source_oracle(*source)) < 1e-5
    queries, cache, lineage, heads = past_case((40, 17, 33, 4, 16))
    lineage[[7, 33], 2] = 99
    with pytest.raises(ShapeError, match="for row 7"):
        cpu.attend_past(queries, cache, lineage, heads)


@compiled
def test_many_callers_at_once(two_threads: None) -> None:
    past = past_case((40, 17, 33, 4, 16))
    truth, results = past_oracle(*past), []
    callers = [
        threading.Thread(target=lambda: results.extend(off(cpu.attend_past(*past), truth) for _ in range(20)))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 80
    assert max(results) < 1e-5


@compiled
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork(two_threads: None) -> None:
    past = past_case((40, 17, 33, 4, 16))
    expected = cpu.attend_past(*past)  # the parent's threads are running when it forks
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(cpu.attend_past(*past), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [(1, 1, 1), (1, 16, 4), (2, 5, 3), (4, 256, 100), (5, 33, 7), (7, 20, 9), (70, 24, 6)])
def test_linear(size: tuple[int, int, int], kind: torch.dtype) -> None:
    rows, inner, outer = size
    x, weight, bias, scale = numbers(rows, inner), numbers(outer, inner, seed=1), numbers(outer), numbers(outer, seed=3)
    weight = (weight * 40).clamp(-127, 127).to(kind) if kind == torch.int8 else weight.to(kind)
    plain = x.double().numpy() @ weight.double().numpy().T
    for shift in (None, bias):
        for factor in (None, scale):
            for relu in (False, True):
                truth = plain * (1.0 if factor is None else factor.numpy()) + (0.0 if shift is None else shift.numpy())
                truth = torch.tensor(np.maximum(truth, 0) if relu else truth)
                for backend in (reference, decoding):
                    out = backend.linear(x, weight, shift, factor, relu=relu)
                    assert out.dtype == torch.float32
                    assert float((out - truth).abs().max()) < 1e-5 * max(1.0, float(np.abs(plain).max()))
                made = decoding.linear_map(weight, shift, factor, relu=relu)
                assert torch.equal(made(x), decoding.linear(x, weight, shift, factor, relu=relu))
    beside = torch.cat([x, x], 1)[:, :inner]
    torch.testing.assert_close(decoding.linear(beside, weight, bias), decoding.linear(x, weight, bias))
    torch.testing.assert_close(decoding.linear_map(weight, bias)(beside), decoding.linear(x, weight, bias))


def test_linear_map_reads_weights_where_they_lay() -> None:
    layer = torch.nn.Linear(8, 4)
    with torch.no_grad():
        made = decoding.linear_map(layer.weight, layer.bias)
        x = numbers(3, 8)
        torch.testing.assert_close(made(x), layer(x))
        layer.weight.mul_(2)  # a change in place is seen
        torch.testing.assert_close(made(x), layer(x))
    tracked = x.clone().requires_grad_()
    made(tracked).sum().backward()
    torch.testing.assert_close(tracked.grad, layer.weight.detach().sum(0).expand(3, 8))
    made = decoding.linear_map(layer.weight, layer.bias)  # weights that are learned
    made(x).sum().backward()
    assert layer.weight.grad is not None
    for kind in (torch.float64, torch.bfloat16):
        made = decoding.linear_map(layer.weight.detach().to(kind))
        assert made(x.to(torch.float64)).dtype == torch.float64
    with pytest.raises(ShapeError, match="`bias` must be"):
        decoding.linear_map(layer.weight, torch.zeros(3))
    with pytest.raises(ShapeError, match="`x` must be"):
        made(x[:, 1:])


def test_linear_elsewhere() -> None:
    x, weight = numbers(3, 8, dtype=torch.float64), numbers(4, 8, seed=1, dtype=torch.float64)
    assert torch.autograd.gradcheck(decoding.linear, (x.requires_grad_(), weight.requires_grad_()))
    single = weight.detach().float().requires_grad_()
    decoding.linear(x.detach().float(), single).sum().backward()
    assert single.grad is not None
    columns = weight.detach().float().t().contiguous().t()
    torch.testing.assert_close(decoding.linear(x.detach().float(), columns), (x @ weight.t()).float())
    assert decoding.linear(torch.empty(0, 8), columns).shape == (0, 4)
    bad = x.detach().float().clone()
    bad[1, 3] = math.nan  # stays visible, also through relu
    assert decoding.linear(bad, columns.contiguous(), relu=True).isnan().any(1).tolist() == [False, True, False]
    with pytest.raises(ShapeError, match="`weight`"):
        decoding.linear(x, weight[:, 1:])
    with pytest.raises(ShapeError, match="`bias` must be"):
        decoding.linear(x, weight, torch.zeros(3))
    with pytest.raises(ShapeError, match="`scale` must be"):
        decoding.linear(x, weight, None, torch.zeros(5))
