"""The Triton kernels of memories: for real on a GPU, else through Triton's interpreter in a process of its own.

The interpreter must be chosen before Triton is imported, which other tests may have done already.
"""

from __future__ import annotations

import math
import random

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
from oracles import memory as oracle

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import memory as gpu
    from thalweg.kernels.gpu import memory_products as products

# Queries, patterns, features: one of each, and around what blocks hold.
SIZES = [
    *((1, 1, 1), (2, 1, 3), (1, 2, 1), (2, 63, 15), (4, 64, 16), (17, 65, 17), (5, 127, 4), (3, 129, 33)),
    *((2, 200, 64), (3, 40, 65), (3, 70, 128), (2, 40, 256), (1, 20, 512), (2, 5, 513)),
]


@outside
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


# Every launch compiled for Hopper, without a GPU.


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that launches have compiled."""
    from thalweg.kernels.gpu import memory, memory_products

    return compile_instead(monkeypatch, memory, memory_products)


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
    # Shapes are those of the CPU here, where nothing can wait for one another.
    way = (
        {"weigh", "join_step", "pick_step"}
        if Q >= memory._MANY and Q * N * D >= memory._LARGE and not masked
        else {"whole"}
        if D <= 128
        else {"joint"}
    )
    assert compiled == {"begin", "part", "join"} | way


# Against all weights in float64.


def random_memory(size: tuple[int, int, int], *, seed: int = 0, spread: float = 0.3) -> tuple[Tensor, Tensor]:
    """Queries near patterns, and the patterns."""
    Q, N, D = size
    generator = torch.Generator().manual_seed(1000 * seed + Q + N + D)
    patterns = torch.randn(N, D, generator=generator)
    queries = patterns[torch.randint(N, (Q,), generator=generator)] + spread * torch.randn(Q, D, generator=generator)
    return queries, patterns


def close(found: Tensor, wanted: object, bound: float = 5e-5) -> None:
    expected = torch.as_tensor(wanted)
    assert found.shape == expected.shape
    finite = expected[expected.isfinite()].abs()
    scale = max(1.0, float(finite.max()) if len(finite) else 0.0)
    torch.testing.assert_close(found.cpu().double(), expected, atol=bound * scale, rtol=0.0)


def check_associate(
    queries: Tensor, keys: Tensor, values: Tensor, beta: float, mask: Tensor | None = None, bound: float = 5e-5
) -> None:
    given = [x.to(DEVICE) for x in (queries, keys, values)]
    mixed, lse = gpu.associate(*given, beta, None if mask is None else mask.to(DEVICE), None)
    some = None if mask is None else mask.numpy()
    wanted = oracle.associate(*(x.double().numpy() for x in (queries, keys, values)), beta, some)
    close(mixed, wanted[0], bound)
    close(lse, wanted[1])


def check_settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None = None
) -> None:
    present = None if mask is None else mask.to(DEVICE)
    found = gpu.settle(queries.to(DEVICE), patterns.to(DEVICE), beta, max_steps, tol, present, None)
    some = None if mask is None else mask.numpy()
    state, energies, steps, still = oracle.settle(
        queries.double().numpy(), patterns.double().numpy(), beta, max_steps, tol, some
    )
    assert found.steps.tolist() == steps
    assert found.converged.tolist() == still
    close(found.state, state, 1e-4)
    close(found.energies, energies, 1e-4)


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
def test_rows_of_weights_wider_than_a_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_LARGE", 0)
    monkeypatch.setattr(gpu, "_MANY", 0)
    monkeypatch.setattr(products, "_ROW", 16)
    monkeypatch.setattr(products, "_LOOKS", {1, 2, 3, 4})
    queries, patterns = random_memory((5, 70, 6))
    check_settle(queries, patterns, 1.0, 2, -1.0)
    check_settle(queries, patterns, 2.0, 9, 0.02)


# Before the first step.


def begun(rows: int, count: int, inner: int, most: int, before: Tensor | None = None) -> tuple[Tensor, Tensor, object]:
    """Queries, patterns and their course, in memory that was not clear."""
    queries, patterns = (x.to(DEVICE) for x in random_memory((rows, count, inner)))
    room = products.Room.like

    def filled(*given: object) -> object:
        made = room(*given)  # type: ignore[arg-type]
        made.memory.fill_(171)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products.Room, "like", filled)
        course = products.Course(queries, patterns, most, before)
    return queries, patterns, course


@here_only
@pytest.mark.parametrize(
    "size", [(1, 1, 1), (1, 5, 3), (3, 1, 2), (17, 33, 5), (131, 7, 16), (2, 300, 17), (301, 299, 3), (5, 2100, 1)]
)
@pytest.mark.parametrize("most", [0, 3])
def test_all_is_clear_at_the_beginning(size: tuple[int, int, int], most: int) -> None:
    rows = size[0]
    queries, patterns, course = begun(*size, most)
    kept = queries.clone(), patterns.clone()
    assert torch.equal(course.state, queries)
    assert course.state.data_ptr() != queries.data_ptr()
    assert course.energies.shape == (rows, most + 1)
    for found in (course.steps, course.converged, course.part("meetings"), course.part("counters")):
        assert not found.any()
    assert course.steps.dtype == torch.int64
    assert course.converged.dtype == torch.bool
    assert course.part("status").tolist() == [int(most == 0)] * rows
    largest = max(sum(x * x for x in pattern) for pattern in patterns.tolist())
    assert course.part("facts").max().item() == pytest.approx(largest, rel=1e-6)
    assert torch.equal(queries, kept[0])
    assert torch.equal(patterns, kept[1])


@here_only
@pytest.mark.parametrize(("count", "places"), [(35, (0, 8, 9, 34)), (2500, (2499,))])
def test_the_largest_pattern_is_found_wherever_it_is(count: int, places: tuple[int, ...]) -> None:
    queries, patterns = torch.ones(2, 3, device=DEVICE), torch.zeros(count, 3, device=DEVICE)
    for place in places:
        patterns[place, 1] = -3.0
        assert products.Course(queries, patterns, 1).part("facts").max().item() == 9.0
        assert not products.Course(queries, patterns[:place], 1).part("facts").any(), "it must be seen to be missed"
        patterns.zero_()
    assert not products.Course(queries, patterns, 1).part("facts").any()


@here_only
def test_queries_in_any_order_of_memory_and_a_status_of_their_own() -> None:
    stands = (torch.arange(37, device=DEVICE) % 2).int()
    course = begun(37, 2, 4, 5, stands)[2]
    assert course.part("status").tolist() == stands.tolist()
    apart = torch.randn(4, 74, generator=torch.Generator().manual_seed(0)).to(DEVICE)[:, ::2].mT
    course = products.Course(apart, torch.ones(1, 4, device=DEVICE), 5)
    assert torch.equal(course.state, apart)
    assert course.state.is_contiguous()


@here_only
def test_patterns_that_are_all_zero_move_queries_to_zero(way: str) -> None:
    queries = random_memory((3, 5, 4))[0]
    check_settle(queries, torch.zeros(5, 4), 1.0, 3, 1e-4)
    if way != "jointly":  # which looks at mixtures that nobody wrote, and leaves them
        check_settle(queries, torch.zeros(5, 4), 1.0, 0, 1e-4)


@here_only
def test_addresses_are_those_of_the_parts() -> None:
    """Kernels that are known are given numbers: at every place that of the tensor which others are given."""
    queries, patterns, course = begun(19, 40, 5, 3)
    course.raw = course._addresses()
    assert course.raw is not None
    products._Rounds(course, patterns, patterns.mT, products.Limits.of(40, 1.0, 3, 0), queries @ patterns.mT)
    kinds = [products._beginning(19, 5, 40, 0, False), *products._kinds(19, 5, 40, 3, 8192).values()]
    for kind in kinds:
        wanted = [x.data_ptr() if isinstance(x, Tensor) else x for x in kind.pick(course.named())]
        assert list(kind.pick(course.raw)) == wanted
    assert len({kind.key for kind in kinds[1:4]}) == 3
    odd = torch.ones(8, device=DEVICE)[1:6].view(1, 5)
    assert products.Course(odd, patterns, 3)._addresses() is None


@here_only
def test_a_known_kernel_is_started_from_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from thalweg.kernels.gpu import launching

    calls: list[tuple[object, ...]] = []
    compiled = SimpleNamespace(run=lambda *given: calls.append(given), function="function", packed_metadata="metadata")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(launching, "_stream", lambda device: 10 * device)
    monkeypatch.setattr(launching, "_known", {("kernel", 3, "key"): (compiled, (True, 64))})
    assert launching.resumed("kernel", (7,), (160, 2.5), "other") is None
    assert not calls
    again = launching.resumed("kernel", (7,), (160, 2.5), "key")
    assert again is not None
    again()
    assert calls == [(7, 1, 1, 30, "function", "metadata", None, None, None, 160, 2.5, True, 64)] * 2


# Steps in which few weights matter.


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Products at any size; the kinds of rounds that were made."""
    made: list[str] = []
    monkeypatch.setattr(gpu, "_LARGE", 0)
    monkeypatch.setattr(gpu, "_MANY", 0)
    dense, few = products._Rounds.dense, products._Rounds.few

    def spied_dense(self: products._Rounds, *given: object) -> None:
        made.append("dense")
        dense(self, *given)  # type: ignore[arg-type]

    def spied_few(self: products._Rounds, wait: bool) -> None:
        made.append("wait" if wait else "all")
        few(self, wait)

    monkeypatch.setattr(products._Rounds, "dense", spied_dense)
    monkeypatch.setattr(products._Rounds, "few", spied_few)
    return made


def level_patterns(few: int, count: int = 71, *, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Queries that are equally near to ``few`` patterns, to the last bit, and far from all others."""
    generator = torch.Generator().manual_seed(few)
    patterns = torch.randn(count, 12, generator=generator) / 8
    patterns[:, 0] = -3.0
    near = torch.randperm(count, generator=generator)[:few]
    patterns[near, 0] = 3.0
    queries = torch.zeros(rows, 12)
    queries[:, 0] = torch.linspace(2.0, 4.0, rows)
    return queries, patterns


@here_only
@pytest.mark.parametrize("few", [1, 2, 32, 33, 71])
def test_a_mixture_of_the_few_that_matter(few: int, rounds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rare, max_steps, tol in ((1, 3, 1e-4), (1, 2, -1.0), (1 << 30, 3, 1e-4)):
        monkeypatch.setattr(products, "_RARE", rare)
        rounds.clear()
        check_settle(*level_patterns(few), 4.0, max_steps, tol)
        if few <= 32:
            assert set(rounds[1:]) == {"wait"}
        else:
            assert set(rounds[1:]) == ({"wait", "all"} if rare == 1 else {"dense"})
    rounds.clear()
    check_settle(*level_patterns(few), 4.0, 1, 0.0)
    assert rounds == ["dense"]


@here_only
def test_two_equal_patterns_are_both_picked(rounds: list[str]) -> None:
    patterns = torch.eye(6) * 3
    patterns[4] = patterns[1]
    queries = torch.tensor([[0.0, 2.0, 0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 2.0, 0.0, 0.0, 0.3]])
    found = gpu.settle(queries.to(DEVICE), patterns.to(DEVICE), 5.0, 5, 0.0, None, None)
    assert rounds[1:3] == ["wait", "wait"]
    assert found.state.tolist() == patterns[[1, 2]].tolist()
    assert found.converged.all()
    check_settle(queries, patterns, 5.0, 5, 1e-4)


@here_only
@pytest.mark.parametrize(("max_steps", "tol"), [(1, 1e-4), (2, 1e-4), (3, 1e-4), (10, 1e-4), (3, -1.0), (10, 0.0)])
def test_queries_near_patterns_rest_when_they_do(max_steps: int, tol: float, rounds: list[str]) -> None:
    queries, patterns = random_memory((4, 37, 20))
    queries[1] = patterns[5]
    queries[2] = (patterns[6] + patterns[7]) * 0.55
    if tol:
        check_settle(queries, patterns, 1.5, max_steps, tol)
    else:  # how many steps it takes until nothing at all moves is up to rounding
        given = queries.to(DEVICE), patterns.to(DEVICE)
        found = gpu.settle(*given, 1.5, max_steps, tol, None, None)
        wanted = oracle.settle(*(x.double().numpy() for x in (queries, patterns)), 1.5, max_steps, 1e-9)
        close(found.state, wanted[0], 1e-6)
        close(found.energies, wanted[1], 1e-6)
    assert rounds[:1] == ["dense"]
    assert set(rounds[1:]) == ({"wait"} if max_steps > 1 else set())
    assert len(rounds) <= max_steps + 1


def far_out(rows: int) -> tuple[Tensor, Tensor]:
    """Queries near single patterns, but the first is so far out that it has one pattern at first, and then many."""
    generator = torch.Generator().manual_seed(5)
    patterns = torch.zeros(45, 10)
    patterns[:35, :5] = torch.nn.functional.normalize(torch.randn(35, 5, generator=generator), dim=1)
    patterns[35:, 5:] = 6 * torch.nn.functional.normalize(torch.randn(10, 5, generator=generator), dim=1)
    queries = patterns[[7] + [35 + n % 10 for n in range(rows - 1)]] * 1.1
    queries[0] *= 1000
    return queries, patterns


@here_only
@pytest.mark.parametrize("looks", [{2, 3, 4}, {4}, {9}])
@pytest.mark.parametrize("rare", [1, 1 << 30])
def test_few_weights_that_become_many(
    rare: int, looks: set[int], rounds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_LOOKS_AT_FEW", looks)
    # Not too many at first, whatever comes after.
    monkeypatch.setattr(products, "_few", lambda *given, few=products._few: change(rare) or few(*given))

    def change(rare: int) -> None:
        monkeypatch.setattr(products, "_RARE", rare)

    monkeypatch.setattr(products, "_RARE", 1)
    check_settle(*far_out(3), 1.0, 3, -1.0)
    assert rounds[:2] == ["dense", "wait"]
    assert rounds[-1] == ("all" if rare == 1 else "dense")
    rounds.clear()
    monkeypatch.setattr(products, "_RARE", 1)
    check_settle(*far_out(2), 1.0, 6, 1e-3)
    assert rounds[-1] == ("all" if rare == 1 else "dense")


@here_only
def test_a_tail_of_light_weights_is_not_lost(rounds: list[str]) -> None:
    """Weights of 1, 1/8, 1/64 ... of directions of their own: what is left out must not be seen in any of them."""
    patterns = torch.cat((torch.eye(21)[1:] * 2, -torch.ones(13, 21)))
    patterns[:20, 0] = 4 - torch.arange(20.0) * 3 * math.log(2) / 4
    queries = torch.eye(21)[:1] * 4
    found = gpu.settle(queries.to(DEVICE), patterns.to(DEVICE), 1.0, 2, -1.0, None, None)
    wanted = oracle.settle(*(x.double().numpy() for x in (queries, patterns)), 1.0, 2, -1.0)
    assert rounds[1:] == ["wait", "wait"]
    close(found.state, wanted[0], 2.0**-22)
    close(found.energies, wanted[1], 1e-6)


@here_only
@pytest.mark.parametrize(("tail", "kind", "bound"), [(1, "wait", 4e-6), (8, "wait", 2e-7), (300, "all", 2e-6)])
def test_many_weights_that_matter_only_together(
    tail: int, kind: str, bound: float, rounds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every weight of the tail is below what may be left out of all; together they lead far in a direction."""
    monkeypatch.setattr(products, "_RARE", 1)
    patterns = torch.zeros(tail + 40, 3)
    patterns[:, 0] = -4.0
    patterns[3, 0] = 4.0
    patterns[20 : 20 + tail, 0] = 4 - 25 * math.log(2) / 4
    patterns[20 : 20 + tail, 2] = 64.0
    queries = torch.tensor([[4.0, 0.0, 0.0]])
    found = gpu.settle(queries.to(DEVICE), patterns.to(DEVICE), 1.0, 2, -1.0, None, None)
    wanted = oracle.settle(*(x.double().numpy() for x in (queries, patterns)), 1.0, 2, -1.0)
    assert kind in rounds
    close(found.state, wanted[0], bound)
    close(found.energies, wanted[1], 1e-6)


@here_only
@pytest.mark.skipif(not INTERPRETED, reason="kernels that are compiled keep their constants")
def test_leaving_out_too_much_is_noticed(rounds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.language as tl

    from thalweg.kernels.gpu import memory_steps

    test_a_tail_of_light_weights_is_not_lost(rounds)
    rounds.clear()
    monkeypatch.setattr(memory_steps, "_LEFT_OUT", tl.constexpr(2.0**-18))
    with pytest.raises(AssertionError):
        test_a_tail_of_light_weights_is_not_lost(rounds)


@here_only
def test_a_query_that_is_no_number_spoils_no_other(rounds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    queries, patterns = level_patterns(2, 40, rows=3)
    queries[1, 3] = math.nan
    for rare in (1, 16):
        monkeypatch.setattr(products, "_RARE", rare)
        found = gpu.settle(queries.to(DEVICE), patterns.to(DEVICE), 4.0, 3, 1e-4, None, None)
        assert found.state.isnan().all(1).tolist() == [False, True, False]
        assert found.energies.isnan().all(1).tolist() == [False, True, False]
        assert not found.converged[1]
        wanted = oracle.settle(*(x.double().numpy() for x in (queries[[0, 2]], patterns)), 4.0, 3, 1e-4)
        close(found.state[[0, 2]], wanted[0])
        assert found.steps[[0, 2]].tolist() == wanted[2]
    assert "all" in rounds


@here_only
def test_more_patterns_than_a_program_holds_stay_dense(rounds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_ROW", 32)
    check_settle(*random_memory((2, 37, 20)), 1.5, 4, 1e-4)
    assert set(rounds) == {"dense"}


@here_only
@pytest.mark.parametrize("tol", [0.0, 1e-3, 0.1])
def test_half_of_the_queries_go_on_by_themselves(
    tol: float, rounds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those at rest without an energy and those on the way, in one launch."""
    monkeypatch.setattr(products, "_LOOKS", {1, 2, 3, 4, 5, 6})
    monkeypatch.setattr(products, "_RARE", 1 << 30)
    monkeypatch.setattr(gpu, "_MANY", 4)
    left: list[list[int]] = []
    in_one = gpu._in_one
    monkeypatch.setattr(gpu, "_in_one", lambda *given: left.append(given[0].part("status").tolist()) or in_one(*given))
    queries, patterns = far_out(7)
    queries[0] /= 1000
    queries[2:4] *= 0.9
    found = gpu.settle(queries.to(DEVICE), patterns.to(DEVICE), 1.0, 8, tol, None, None)
    wanted = oracle.settle(*(x.double().numpy() for x in (queries, patterns)), 1.0, 8, tol or 1e-7)
    close(found.state, wanted[0], 1e-5)
    close(found.energies, wanted[1], 1e-5)
    if tol:
        assert found.steps.tolist() == wanted[2]
        assert found.converged.tolist() == wanted[3]
    assert left
    assert {x for some in left for x in some} == ({0, 1} if tol == 0.1 else {0})


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
