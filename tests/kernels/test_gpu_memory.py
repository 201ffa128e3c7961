"""The Triton kernels of memories: for real on a GPU, else through Triton's interpreter in a process of its own.

The interpreter must be chosen before Triton is imported, which other tests may have done already.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.gpu_memories import check_associate, check_settle, close, random_memory
from contracts.triton_kernels import (
    DEVICE,
    INTERPRETED,
    RUNS,
    compile_instead,
    for_hopper,
    here_only,
    needs_triton,
)
from oracles import memory as oracle
from thalweg.kernels import memory as ops
from thalweg.kernels.reference import memory as reference

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import memory as gpu

# Queries, patterns, features: one of each, parts that are equal and that overlap, blocks of a part, the widest.
SIZES = [
    *((1, 1, 1), (2, 1, 3), (17, 65, 17), (3, 513, 33), (2, 1103, 4), (1, 16387, 2)),
    *((1, 5, 4096), (2, 5, 4097)),
]


# Every launch compiled for Hopper, without a GPU.


@pytest.mark.slow
@for_hopper
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [(64, 100, 64), (1024, 4096, 128), (16, 10000, 64), (1, 300, 1), (2, 600, 4096)])
def test_launches_compile_for_hopper(size: tuple[int, int, int], masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from thalweg.kernels.gpu import memory

    compiled = compile_instead(monkeypatch)
    monkeypatch.setattr(memory, "_processors", lambda _: 132)
    (Q, N, D), mask = size, torch.ones(size[1], dtype=torch.bool) if masked else None
    queries, patterns = torch.zeros(Q, D), torch.zeros(N, D)
    memory.settle(queries, patterns, 1.0, 2, 1e-4, mask, None)
    assert compiled == {"weigh", "move"}
    for values in (patterns, torch.zeros(N, 33)):
        memory.associate(queries, patterns, values, 1.0, mask, None)
    assert compiled == {"weigh", "move", "join"}


# Against all weights in float64.


@here_only
@pytest.mark.parametrize("size", SIZES)
def test_an_association_is_all_weights_times_all_values(size: tuple[int, int, int]) -> None:
    queries, keys = random_memory(size)
    beta = 1 / math.sqrt(size[2])
    check_associate(queries, keys, random_memory((1, size[1], size[2] + 3))[1], beta)
    check_associate(queries, keys, keys, beta)


@here_only
@pytest.mark.parametrize(("parts", "length", "width"), [(4, 9000, 2), (3, 256, 4096)])
def test_what_comes_later_weighs_more(parts: int, length: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of a part, and more parts than are put together at once."""
    monkeypatch.setattr(gpu, "_processors", lambda _: parts)
    keys = torch.linspace(1, 8, parts * length)[:, None] * torch.linspace(0.5, 1, width) / width
    check_associate(torch.full((1, width), 2.0), keys, keys, 1.0)


@here_only
def test_many_queries_share_out_fewer_parts() -> None:
    queries, keys = random_memory((66, 601, 3))
    check_associate(queries, keys, keys, 1.0)


@here_only
@pytest.mark.parametrize("size", SIZES)
def test_every_query_comes_to_rest_by_itself(size: tuple[int, int, int]) -> None:
    queries, patterns = random_memory(size)
    check_settle(queries, patterns, 2.0 / math.sqrt(size[2]), 2, -1.0)
    check_settle(queries, patterns, 4.0, 4, 0.02)


@here_only
def test_energies_after_long_steps_that_are_the_last() -> None:
    for tol in (1e-5, 0.3, 3.0):
        check_settle(*random_memory((6, 50, 8), spread=0.6), 0.5, 6, tol)


@here_only
def test_random_sizes_masks_and_temperatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is absent may be anything; weights have room at once or not."""
    chance = random.Random(3)
    for seed in range(4 if INTERPRETED else 40):
        monkeypatch.setattr(gpu, "_ROOM", (1, 700, 1 << 24)[seed % 3])
        size = chance.choice((1, 3, 17)), chance.choice((9, 100, 600)), chance.randint(1, 40)
        queries, patterns = random_memory(size, seed=seed, spread=chance.uniform(0, 1))
        mask = torch.rand(size[1], generator=torch.Generator().manual_seed(seed)) < 0.7
        patterns[~mask], queries = math.nan, queries.nan_to_num()
        beta = 10 ** chance.uniform(-1.5, 0.3)
        check_associate(queries, patterns, patterns, beta, mask)
        check_settle(queries, patterns, beta, chance.randint(0, 4), chance.choice((-1.0, 0.05)), mask)


@here_only
@pytest.mark.parametrize("beta", [1e-6, 1e4])
def test_any_temperature(beta: float) -> None:
    queries, patterns = random_memory((5, 101, 12))
    check_associate(queries, patterns, patterns, beta, bound=5e-5 if beta < 100 else 1e-3)
    given = queries.to(DEVICE), patterns.to(DEVICE)
    found = gpu.settle(*given, beta, 6, 0.0 if beta > 100 else 1e-6, None, None)
    assert found.energies.isfinite().all()
    if beta > 100:  # whoever has arrived is there to the last bit, and stays
        assert torch.equal(found.state.cpu(), patterns[(queries @ patterns.mT).argmax(1)])
        assert found.converged.all()


@here_only
def test_patterns_that_are_all_zero_move_queries_to_zero() -> None:
    queries = random_memory((3, 5, 4))[0]
    for max_steps in (0, 3):
        check_settle(queries, torch.zeros(5, 4), 1.0, max_steps, 1e-4)


@here_only
def test_nothing_present() -> None:
    queries, patterns = random_memory((3, 70, 2))
    absent = torch.zeros(70, dtype=torch.bool, device=DEVICE)
    given = queries.to(DEVICE), patterns.to(DEVICE)
    mixed, lse = gpu.associate(*given, given[1], 1.0, absent, None)
    assert not mixed.any()
    assert lse.tolist() == [-math.inf] * 3
    found = gpu.settle(*given, 1.0, 2, 1e-3, absent, None)
    assert not found.state.any()
    assert found.energies.isposinf().all()


@here_only
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value", "ignore:overflow")  # of the interpreter
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_that_of_plain_pytorch_and_spoils_no_other(wrong: float) -> None:
    queries, patterns = random_memory((5, 150, 2))
    patterns = patterns.abs() + 0.1  # every score of an infinite query is infinite
    queries[1, 0] = queries[3, 1] = wrong
    given = queries.to(DEVICE), patterns.to(DEVICE)
    for mask in (None, (torch.arange(150) % 3 > 0).to(DEVICE)):
        found = gpu.associate(*given, given[1], 1.0, mask, None)
        for x, plain in zip(found, reference.associate(*given, given[1], 1.0, mask, None), strict=True):
            torch.testing.assert_close(x, plain, atol=1e-4, rtol=1e-4, equal_nan=True)
        settled, plain = (f(*given, 1.0, 3, 1e-3, mask, None) for f in (gpu.settle, reference.settle))
        for x, y in zip(settled, plain, strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4, equal_nan=True)
        assert settled.state[1].isnan().all()
        assert settled.state[2].isfinite().all()


# Who is done is left out.


@here_only
def test_who_is_done_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some come to rest long before others, and the host asks every time, or seldom."""
    queries, patterns = random_memory((8, 30, 3), seed=7, spread=0.6)
    asked: list[list[int]] = []
    answer = gpu._Memory.answer

    def spied(*given: Any, **options: Any) -> None:
        asked.append(given[7].tolist())
        answer(*given, **options)

    monkeypatch.setattr(gpu._Memory, "answer", spied)
    wanted = oracle.settle(*(x.double().numpy() for x in (queries, patterns)), 2.0, 70, 1e-3)
    assert (min(wanted[2]), max(wanted[2])) == (4, 14)
    for looks in (range(71), (5, 11, 17)):
        asked.clear()
        monkeypatch.setattr(gpu, "_looks", lambda t, looks=looks: t in looks)
        found = gpu.settle(queries.to(DEVICE), patterns.to(DEVICE), 2.0, 70, 1e-3, None, None)
        assert found.steps.tolist() == wanted[2]
        assert found.converged.tolist() == wanted[3]
        close(found.state, wanted[0], 1e-4)
        close(found.energies, wanted[1], 1e-4)
        if len(looks) > 3:  # done is who has made all steps, but for a last pass if the energy is not known
            for t, rows in enumerate(asked):
                assert {row for row, made in enumerate(wanted[2]) if made > t} <= set(rows)
                assert all(wanted[2][row] >= t for row in rows)
        else:
            assert [len(rows) for rows in asked] == [8] * 5 + [len(asked[5])] * 6 + [len(asked[11])] * 6


@here_only
def test_how_often_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, patterns = (x.to(DEVICE) for x in random_memory((3, 20, 4)))
    queries[0] = math.nan  # never comes to rest
    waits: list[int] = []
    nonzero = Tensor.nonzero
    monkeypatch.setattr(Tensor, "nonzero", lambda x: waits.append(1) or nonzero(x))
    for tol, most, looks in ((-1.0, 20, 0), (0.1, 1, 0), (0.1, 24, 5)):
        waits.clear()
        gpu.settle(queries, patterns, 1.0, most, tol, None, None)
        assert len(waits) == looks


@here_only
@pytest.mark.parametrize("size", [(1, 2048, 1), (3, 2100, 5)])
def test_attention_is_an_association(size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many patterns; of few PyTorch's is as fast."""
    monkeypatch.setattr(ops, "memory_kernels", lambda _: gpu)
    calls, associate = [], gpu.associate
    monkeypatch.setattr(gpu, "associate", lambda *given: calls.append(given) or associate(*given))
    queries, patterns = random_memory(size)
    asked, held = queries.to(DEVICE), patterns.to(DEVICE)
    ops.attend(asked, held[:2047], 0.4)
    assert not calls
    found = ops.attend(asked, held, 0.4)
    close(found, oracle.associate(*(x.double().numpy() for x in (queries, patterns, patterns)), 0.4)[0], 1e-5)
    again = ops.attend(asked.mT.contiguous().mT[None], held.mT.contiguous().mT[None], 0.4)
    torch.testing.assert_close(again, found[None])
    assert len(calls) == 2


@here_only
@pytest.mark.skipif(DEVICE != "cuda", reason="there is no graph without a GPU")
def test_a_retrieval_that_is_captured_is_that_of_its_call() -> None:
    queries, patterns = (x.to(DEVICE) for x in random_memory((40, 500, 16)))
    call = lambda: gpu.settle(queries, patterns, 1.0, 5, 1e-3, None, None)  # noqa: E731
    wanted = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    graph.replay()
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


@here_only
@pytest.mark.skipif(DEVICE != "cuda", reason="a million patterns are for a GPU")
def test_a_million_patterns_in_bounded_memory() -> None:
    patterns = torch.randn(1_000_000, 64, device=DEVICE)
    queries = patterns[:32] + 0.3 * torch.randn(32, 64, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = gpu.settle(queries, patterns, 1.0, 5, 1e-3, None, None)
    _, indices = gpu.nearest(queries, patterns, 1, None, None)
    assert torch.cuda.max_memory_allocated() - before < 100 * 2**20
    assert indices[:, 0].tolist() == list(range(32))
    torch.testing.assert_close(found.state, patterns[:32], atol=1e-3, rtol=0.0)
