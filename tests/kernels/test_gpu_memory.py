"""The Triton kernels of memories: for real on a GPU, else through Triton's interpreter in a process of its own.

The interpreter must be chosen before Triton is imported, which other tests may have done already.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from contracts.gpu_memories import check_settle, close, random_memory
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

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import memory as gpu

# Queries, patterns, features: one of each, and around what blocks hold.
SIZES = [
    *((1, 1, 1), (2, 1, 3), (1, 2, 1), (2, 63, 15), (4, 64, 16), (17, 65, 17), (5, 127, 4), (3, 129, 33)),
    *((2, 200, 64), (3, 40, 65), (3, 70, 128), (2, 40, 256), (1, 20, 512), (2, 5, 513)),
]


# Every launch compiled for Hopper, without a GPU.


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that launches have compiled."""

    return compile_instead(monkeypatch)


@pytest.mark.slow
@for_hopper
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [(16, 100, 64), (1024, 4096, 128), (16, 10000, 64), (1, 3000, 1), (40, 2000, 512)])
def test_retrievals_compile_for_hopper(
    size: tuple[int, int, int], masked: bool, compiled: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from thalweg.kernels.gpu import memory, memory_products

    monkeypatch.setattr(memory, "_processors", lambda _: 132)
    Q, N, D = size
    mask = torch.ones(N, dtype=torch.bool) if masked else None
    for many in (1, Q):  # queries that have many weights after the first step: every kind of round
        counts = iter((0, many, many, many))
        monkeypatch.setattr(memory_products._Counters, "read", lambda _, counts=counts: (next(counts), 0))
        memory.settle(torch.zeros(Q, D), torch.zeros(N, D), 1.0, 2, 1e-4, mask, None)
    memory.associate(torch.zeros(Q, D), torch.zeros(N, D), torch.zeros(N, 33), 1.0, mask, None)
    memory.attend(torch.zeros(Q, D), torch.zeros(N, D), 1.0)
    # Shapes are those of the CPU here, where nothing can wait for one another.
    way = (
        {"weigh", "join_step", "pick_step"}
        if Q >= memory._MANY and Q * N * D >= memory._LARGE and not masked
        else {"whole"}
        if D <= 128
        else {"joint"}
    )
    assert compiled == {"begin", "part", "join"} | way | ({"once"} if size == (16, 100, 64) else set())


@pytest.mark.slow
@for_hopper
def test_reports_compile_for_hopper(compiled: set[str]) -> None:
    from thalweg.kernels.gpu import memory_products as products

    queries, patterns, scores = torch.zeros(4, 8), torch.zeros(70, 8), torch.zeros(4, 70)
    course = products.Course(queries, patterns, 3)
    rounds = products._Rounds(course, patterns, patterns.mT, products.Limits.of(70, 1.0, 3, 0.0), scores)
    for name in rounds._kinds:
        rounds._report(name, products._Counters(course))
    assert compiled == {"begin", "weigh", "join_step", "pick_step", "tell"}


# Against all weights in float64.


def check_associate(
    queries: Tensor, keys: Tensor, values: Tensor, beta: float, mask: Tensor | None = None, bound: float = 5e-5
) -> None:
    given = [x.to(DEVICE) for x in (queries, keys, values)]
    mixed, lse = gpu.associate(*given, beta, None if mask is None else mask.to(DEVICE), None)
    some = None if mask is None else mask.numpy()
    wanted = oracle.associate(*(x.double().numpy() for x in (queries, keys, values)), beta, some)
    close(mixed, wanted[0], bound)
    close(lse, wanted[1])


@pytest.fixture(params=["alone", "jointly", "by products"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way to retrieve, whatever the size would choose."""
    if request.param == "by products":
        monkeypatch.setattr(gpu, "_LARGE", 0)
        monkeypatch.setattr(gpu, "_MANY", 0)
        return request.param
    plan = gpu._joint_plan
    # The interpreter runs programs in turn: there they cannot wait for one another, so one must do. Elsewhere there are
    # at least two, of which the last may have nothing to look at.
    least = 2 if request.param == "jointly" and not INTERPRETED else 1
    most = 1 if request.param == "alone" else 1 << 20

    def changed(*given: object) -> object:
        made = plan(*given)  # type: ignore[arg-type]
        parts = min(most, max(least, made.parts))
        return made._replace(parts=parts, length=made.length if most > 1 else 1 << 20)

    monkeypatch.setattr(gpu, "_joint_plan", changed)
    if request.param == "jointly":
        monkeypatch.setattr(gpu, "_alone", lambda *given: gpu._jointly(*given, changed(given[0].state, len(given[1]))))
    return request.param


@here_only
@pytest.mark.parametrize("size", SIZES)
def test_an_association_is_all_weights_times_all_values(size: tuple[int, int, int]) -> None:
    queries, keys = random_memory(size)
    for outer in (1, size[2] + 3):
        values = random_memory((1, size[1], outer), seed=outer)[1]
        check_associate(queries, keys, values, 1 / math.sqrt(size[2]))
    check_associate(queries, keys, keys, 1 / math.sqrt(size[2]))


@here_only
@pytest.mark.parametrize("size", [*SIZES, (33, 500, 7), (2, 600, 5), (9, 2050, 3)])
def test_attention_is_an_association(size: tuple[int, int, int]) -> None:
    """In one launch if small, in two if large, and not at all where PyTorch is faster."""
    queries, patterns = random_memory(size)
    asked, held = queries.to(DEVICE), patterns.to(DEVICE)
    found = gpu.attend(asked, held, 0.4)
    small, short = size[0] * size[1] <= 1 << 14, size[1] <= 512 and size[2] <= 128
    if small and not short:
        assert found is None
        return
    assert found is not None
    close(found, oracle.associate(*(x.double().numpy() for x in (queries, patterns, patterns)), 0.4)[0], 1e-5)
    for rows, kept in ((asked[None], held[None]), (asked.mT.contiguous().mT[None], held.mT.contiguous().mT[None])):
        again = gpu.attend(rows, kept, 0.4)
        if not small and size[1] < 2048:  # a set of its own is a layer's, whose host takes longer
            assert again is None
            continue
        assert again is not None
        assert again.shape == (1, *found.shape)
        assert torch.equal(again[0], found)


@here_only
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
def test_small_attention_with_no_number_and_any_temperature() -> None:
    queries, patterns = random_memory((5, 101, 12))
    queries[1, 3] = math.nan
    for beta in (1e-6, 1.0, 1e4):
        found = gpu.attend(queries.to(DEVICE), patterns.to(DEVICE), beta)
        assert found is not None
        assert found.isnan().all(1).tolist() == [False, True, False, False, False]
        wanted = oracle.associate(*(x.double().numpy() for x in (queries[[0, 2, 3, 4]], patterns, patterns)), beta)[0]
        close(found[[0, 2, 3, 4]], wanted, 5e-5 if beta < 100 else 1e-3)


@here_only
@pytest.mark.parametrize("size", SIZES)
def test_every_query_comes_to_rest_by_itself(size: tuple[int, int, int], way: str) -> None:
    queries, patterns = random_memory(size)
    check_settle(queries, patterns, 2.0 / math.sqrt(size[2]), 2, -1.0)
    check_settle(queries, patterns, 4.0, 4, 0.02)


@here_only
def test_random_sizes_masks_and_temperatures(way: str) -> None:
    chance = random.Random(3)
    for seed in range(3 if INTERPRETED else 40):
        size = chance.choice((1, 3, 17)), chance.randint(1, 150), chance.randint(1, 40)
        queries, patterns = random_memory(size, seed=seed, spread=chance.uniform(0, 1))
        mask = torch.rand(size[1], generator=torch.Generator().manual_seed(seed)) < 0.7
        patterns[~mask], queries = math.nan, queries.nan_to_num()
        beta = 10 ** chance.uniform(-1.5, 0.3)
        check_associate(queries, patterns, patterns, beta, mask)
        if mask.any():
            check_settle(queries, patterns, beta, chance.randint(0, 4), chance.choice((-1.0, 0.05)), mask)


@here_only
@pytest.mark.parametrize("beta", [1e-6, 1.0, 1e4])
def test_any_temperature(beta: float, way: str) -> None:
    queries, patterns = random_memory((5, 101, 12))
    check_associate(queries, patterns, patterns, beta, bound=5e-5 if beta < 100 else 1e-3)
    given = queries.to(DEVICE), patterns.to(DEVICE)
    found = gpu.settle(*given, beta, 6, 1e-6, None, None)
    assert found.energies.isfinite().all()
    if beta > 100:
        close(found.state, patterns[(queries @ patterns.mT).argmax(1)].double())
        assert found.converged.all()


@here_only
def test_patterns_that_are_all_zero_move_queries_to_zero(way: str) -> None:
    queries = random_memory((3, 5, 4))[0]
    check_settle(queries, torch.zeros(5, 4), 1.0, 3, 1e-4)
    if way != "jointly":  # which looks at mixtures that nobody wrote, and leaves them
        check_settle(queries, torch.zeros(5, 4), 1.0, 0, 1e-4)


@here_only
def test_nothing_present_and_many_steps(way: str) -> None:
    queries, patterns = random_memory((3, 70, 2))
    absent = torch.zeros(70, dtype=torch.bool, device=DEVICE)
    given = queries.to(DEVICE), patterns.to(DEVICE)
    mixed, lse = gpu.associate(*given, given[1], 1.0, absent, None)
    assert not mixed.any()
    assert lse.tolist() == [-math.inf] * 3
    found = gpu.settle(*given, 1.0, 2, 1e-3, absent, None)
    assert not found.state.any()
    assert found.energies.isposinf().all()
    long = gpu.settle(*given, 2.0, 70, 1e-3, None, None)
    assert long.converged.all()
    assert long.energies.shape == (3, 71)
    close(long.energies, oracle.settle(*(x.double().numpy() for x in (queries, patterns)), 2.0, 70, 1e-3)[1], 1e-4)


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
