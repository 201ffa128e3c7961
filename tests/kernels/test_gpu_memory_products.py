"""Steps of many queries by products, on a GPU or through Triton's interpreter in a process of its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from contracts.gpu_memories import check_settle, close, random_memory
from contracts.triton_kernels import DEVICE, INTERPRETED, RUNS, here_only, needs_triton
from oracles import memory as oracle

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import memory as gpu
    from thalweg.kernels.gpu import memory_products as products


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
def test_rows_of_weights_wider_than_a_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_LARGE", 0)
    monkeypatch.setattr(gpu, "_MANY", 0)
    monkeypatch.setattr(products, "_ROW", 16)
    monkeypatch.setattr(products, "_LOOKS", {1, 2, 3, 4})
    queries, patterns = random_memory((5, 70, 6))
    check_settle(queries, patterns, 1.0, 2, -1.0)
    check_settle(queries, patterns, 2.0, 9, 0.02)


# What the host is told.


@here_only
def test_counters_arrive_as_they_are() -> None:
    course = begun(3, 4, 2, 5)[2]
    rounds = products._Rounds(
        course, torch.ones(4, 2, device=DEVICE), torch.ones(2, 4, device=DEVICE), products.Limits.of(4, 1.0, 5, 0.0),
        torch.ones(3, 4, device=DEVICE),
    )  # fmt: skip
    counters, seen = products._Counters(course), set()
    for many, done in ((0, 0), (5, 3), (0, 2), (2**31 - 1, 2**24), (1, 0)):
        course.part("counters").copy_(torch.tensor([many, done, 0, 0]))
        rounds.tell(counters)
        assert counters.read() == (many, done)
        assert course.part("counters").tolist() == [many, done, 0, 0], "who came must be forgotten"
        seen.add(counters._letter.tensor.data_ptr())
    assert len(seen) == 5


@here_only
@pytest.mark.parametrize("rare", [1, 16])
def test_every_report_is_what_the_device_has(rare: int, rounds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all kinds of kernels, whichever of their programs comes last."""
    monkeypatch.setattr(products, "_RARE", rare)
    monkeypatch.setattr(products, "_LOOKS", {1, 2, 3, 4, 5, 6})
    read, seen = products._Counters.read, []

    def checked(self: products._Counters) -> tuple[int, int]:
        found = read(self)
        if INTERPRETED:  # a device may have gone on
            assert found == tuple(self._course.part("counters").tolist()[:2])
        seen.append(found)
        return found

    monkeypatch.setattr(products._Counters, "read", checked)
    for problem in (far_out(5), level_patterns(33, rows=5), random_memory((5, 37, 20))):
        check_settle(*problem, 1.5, 6, 1e-3)
    assert len(seen) > 5
    assert {done for _, done in seen} > {0}
    assert any(many for many, _ in seen)


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

    def spied_few(self: products._Rounds, wait: bool, *given: object) -> None:
        made.append("wait" if wait else "all")
        few(self, wait, *given)  # type: ignore[arg-type]

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
