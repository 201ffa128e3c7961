"""Associations, retrievals and nearest patterns, compiled and plain, against all weights in float64."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from oracles import memory as oracle
from thalweg.errors import ConfigError, ShapeError
from thalweg.kernels import memory
from thalweg.kernels.dispatch import memory_kernels
from thalweg.kernels.memory import associate, attend, nearest, settle
from thalweg.kernels.reference import memory as reference

SINGLE, DOUBLE = torch.float32, torch.float64
CLOSE = {SINGLE: 3e-5, DOUBLE: 1e-10}
# Queries, patterns, features: one of each, and around what tiles, panels and blocks hold.
SIZES = [
    *((1, 1, 1), (2, 1, 3), (1, 2, 1), (3, 5, 2), (7, 11, 4), (8, 12, 6), (9, 13, 7), (15, 47, 5), (16, 48, 8)),
    *((17, 49, 9), (33, 97, 10), (5, 95, 15), (4, 96, 16), (31, 193, 17), (20, 60, 64), (18, 50, 65), (3, 30, 128)),
    *((2, 25, 200), (17, 13, 512)),
]


def random_memory(
    size: tuple[int, int, int], dtype: torch.dtype = DOUBLE, *, seed: int = 0, spread: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Queries near patterns, and the patterns."""
    Q, N, D = size
    generator = torch.Generator().manual_seed(1000 * seed + Q + N + D)
    patterns = torch.randn(N, D, generator=generator, dtype=DOUBLE)
    chosen = torch.randint(N, (Q,), generator=generator)
    queries = patterns[chosen] + spread * torch.randn(Q, D, generator=generator, dtype=DOUBLE)
    return queries.to(dtype), patterns.to(dtype)


def close(found: Tensor, wanted: np.ndarray, bound: float) -> None:
    assert found.shape == wanted.shape
    scale = max(1.0, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)))
    torch.testing.assert_close(found.double(), torch.from_numpy(wanted), atol=bound * scale, rtol=0.0)


def some(mask: Tensor | None) -> np.ndarray | None:
    return None if mask is None else mask.numpy()


def check_associate(
    queries: Tensor, keys: Tensor, values: Tensor, beta: float, mask: Tensor | None = None, block: int | None = None
) -> None:
    mixed, lse = associate(queries, keys, values, beta=beta, mask=mask, block=block)
    wanted = oracle.associate(*(x.double().numpy() for x in (queries, keys, values)), beta, some(mask))
    close(mixed, wanted[0], CLOSE[queries.dtype])
    close(lse, wanted[1], CLOSE[queries.dtype])


def check_settle(
    queries: Tensor, patterns: Tensor, beta: float, max_steps: int, tol: float, mask: Tensor | None = None
) -> None:
    found = settle(queries, patterns, beta=beta, max_steps=max_steps, tol=tol, mask=mask)
    state, energies, steps, still = oracle.settle(
        queries.double().numpy(), patterns.double().numpy(), beta, max_steps, tol, some(mask)
    )
    assert found.steps.dtype == torch.int64
    assert found.converged.dtype == torch.bool
    assert found.steps.tolist() == steps
    assert found.converged.tolist() == still
    close(found.state, state, 3 * CLOSE[queries.dtype])
    close(found.energies, energies, 3 * CLOSE[queries.dtype])


def test_there_are_compiled_kernels_for_what_is_tested_here() -> None:
    kernels = memory_kernels(torch.ones(1, 1))
    assert isinstance(kernels, ModuleType)
    assert kernels.__name__.endswith("cpu.memory")


# One association.


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize("size", SIZES)
def test_an_association_is_all_weights_times_all_values(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    queries, keys = random_memory(size, dtype)
    for outer in {1, 2, size[2], 2 * size[2] + 1}:
        values = random_memory((1, size[1], outer), dtype, seed=outer)[1]
        check_associate(queries, keys, values, 1 / math.sqrt(size[2]), block=7 if dtype == DOUBLE else None)


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize("beta", [1e-6, 1e-2, 1.0, 30.0, 1e4])
def test_any_temperature(beta: float, dtype: torch.dtype) -> None:
    queries, keys = random_memory((19, 101, 12), dtype)
    values = random_memory((1, 101, 3), dtype)[1]
    mixed, lse = associate(queries, keys, values, beta=beta, block=10)
    assert bool(mixed.isfinite().all())
    wanted = oracle.associate(*(x.double().numpy() for x in (queries, keys, values)), beta)
    # At 1e4 what float32 keeps of a score is worth several units: all but ties are one pattern to the last digit.
    sharp = beta > 100 and dtype == SINGLE
    close(mixed, wanted[0], CLOSE[dtype] if not sharp else 1e-3)
    close(lse, wanted[1], CLOSE[dtype])


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_random_sizes_masks_and_temperatures(dtype: torch.dtype) -> None:
    chance = random.Random(5)
    for seed in range(60):
        size = chance.choice((1, 2, 8, 16, 17, 40)), chance.randint(1, 130), chance.randint(1, 40)
        queries, keys = random_memory(size, dtype, seed=seed)
        values = random_memory((1, size[1], chance.randint(1, 20)), dtype, seed=seed)[1]
        mask = torch.rand(size[1], generator=torch.Generator().manual_seed(seed)) < chance.random()
        beta, block = 10 ** chance.uniform(-2, 0.5), chance.choice((None, 1, 3, 50))
        keys[~mask], values[~mask] = math.nan, math.inf  # what is absent may be anything
        check_associate(queries, keys, values, beta, mask, block)


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_nothing_asked_and_nothing_present(dtype: torch.dtype) -> None:
    queries, keys = random_memory((3, 4, 2), dtype)
    absent = torch.zeros(4, dtype=torch.bool)
    for stored, mask in ((keys, absent), (keys[:0], None)):
        mixed, lse = associate(queries, stored, stored, beta=1.0, mask=mask)
        assert mixed.tolist() == [[0.0, 0.0]] * 3
        assert lse.tolist() == [-math.inf] * 3
        found = settle(queries, stored, beta=1.0, max_steps=3, tol=1e-6, mask=mask)
        assert found.state.tolist() == [[0.0, 0.0]] * 3
        assert found.energies.isposinf().all()
        assert (nearest(queries, stored, 2, mask=mask)[1] == -1).all()
    mixed, lse = associate(queries[:0], keys, keys, beta=1.0)
    assert mixed.shape == (0, 2)
    assert lse.shape == (0,)
    assert settle(queries[:0], keys, beta=1.0, max_steps=3, tol=0.1).energies.shape == (0, 4)
    assert nearest(queries[:0], keys, 3)[0].shape == (0, 3)


def test_rows_that_lie_apart_and_half_precision() -> None:
    queries, keys = random_memory((10, 30, 8), SINGLE)
    whole = associate(queries, keys, keys, beta=0.5)
    apart = associate(queries.repeat(1, 2)[:, :8], keys.mT.contiguous().mT, keys.repeat_interleave(2, 0)[::2], beta=0.5)
    torch.testing.assert_close(whole, apart)
    half = [x.bfloat16() for x in (queries, keys)]
    mixed, lse = associate(*half, half[1], beta=0.5)
    assert mixed.dtype == torch.bfloat16
    assert lse.dtype == SINGLE
    wide = associate(*(x.float() for x in half), half[1].float(), beta=0.5)
    torch.testing.assert_close(mixed, wide[0].bfloat16(), atol=0.02, rtol=0.01)
    torch.testing.assert_close(lse, wide[1])


@pytest.mark.parametrize("masked", [False, True])
def test_gradients(masked: bool) -> None:
    queries, keys = random_memory((3, 7, 4))
    values = random_memory((1, 7, 2), seed=3)[1]
    beta = torch.tensor(0.7, dtype=DOUBLE)
    mask = torch.tensor([True, False, True, True, True, False, True]) if masked else None
    inputs = [x.requires_grad_() for x in (queries, keys, values, beta)]

    def call(*given: Tensor) -> tuple[Tensor, Tensor]:
        return associate(*given[:3], beta=given[3], mask=mask, block=3)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_gradients_of_compiled_values_are_those_of_all_weights() -> None:
    queries, keys = (x.requires_grad_() for x in random_memory((20, 70, 9), SINGLE))
    beta = torch.tensor(0.4, requires_grad=True)
    found = associate(queries, keys, keys, beta=beta)
    scores = queries @ keys.mT
    plain = (beta * scores).softmax(1) @ keys, (beta * scores).logsumexp(1) / beta
    pull = torch.randn(20, 9), torch.randn(20)
    gradients = [torch.autograd.grad(out, (queries, keys, beta), pull, retain_graph=True) for out in (found, plain)]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)


# Retrieval.


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize("size", SIZES)
def test_every_query_comes_to_rest_by_itself(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    queries, patterns = random_memory(size, dtype)
    check_settle(queries, patterns, 2.0 / math.sqrt(size[2]), 6, -1.0)
    check_settle(queries, patterns, 4.0, 9, 0.02)


@pytest.mark.parametrize("max_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_few_steps(max_steps: int, dtype: torch.dtype) -> None:
    for tol in (-1.0, 1e-3, 100.0):
        check_settle(*random_memory((21, 40, 6), dtype), 0.8, max_steps, tol)


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_random_retrievals(dtype: torch.dtype) -> None:
    chance = random.Random(11)
    for seed in range(40):
        size = chance.choice((1, 3, 8, 9, 16, 40)), chance.randint(1, 120), chance.randint(1, 30)
        queries, patterns = random_memory(size, dtype, seed=seed, spread=chance.uniform(0, 1))
        mask = torch.rand(size[1], generator=torch.Generator().manual_seed(seed)) < 0.8
        patterns[~mask] = math.nan
        queries = queries.nan_to_num()
        if mask.any():
            check_settle(queries, patterns, 10 ** chance.uniform(-1, 0.3), chance.randint(0, 6), -1.0, mask)


def test_a_sharp_memory_gives_the_pattern_itself() -> None:
    queries, patterns = random_memory((50, 300, 32), SINGLE)
    found = settle(queries, patterns, beta=1e4, max_steps=20, tol=1e-6)
    best = (queries @ patterns.mT).argmax(1)
    # The pattern with the largest dot product is a fixed point of its own here.
    torch.testing.assert_close(found.state, patterns[best], atol=1e-6, rtol=0.0)
    assert found.converged.all()
    assert found.steps.tolist() == [2] * 50
    assert found.energies.isfinite().all()


def test_no_energy_rises_and_what_is_done_gives_up_its_place() -> None:
    queries, patterns = random_memory((200, 60, 10), SINGLE, spread=1.0)
    for beta in (0.3, 1.0, 3.0):
        found = settle(queries, patterns, beta=beta, max_steps=60, tol=1e-5)
        rise = found.energies.diff(dim=1).amax()
        assert rise < 1e-4
        alone = [settle(q[None], patterns, beta=beta, max_steps=60, tol=1e-5) for q in queries[:40]]
        # The last steps are of the size of rounding, so that a query among others may stop one step off.
        assert all(abs(int(x.steps) - int(n)) <= 2 for x, n in zip(alone, found.steps, strict=False))
        torch.testing.assert_close(torch.cat([x.state for x in alone]), found.state[:40], atol=1e-3, rtol=0.0)


@pytest.mark.parametrize("queries", [1, 5, 33, 80])
def test_threads_share_panels_or_patterns(queries: int) -> None:
    asked, patterns = random_memory((queries, 8001, 128), SINGLE)

    def answers(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        found = settle(asked, patterns, beta=0.4, max_steps=5, tol=0.02)
        return [*associate(asked, patterns, patterns[:, :5], beta=0.1), *found]

    before = torch.get_num_threads()
    try:
        alone, *shared = (answers(threads) for threads in (1, 2, 5))
    finally:
        torch.set_num_threads(before)
    for found in shared:
        torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-5)


def test_an_answer_does_not_depend_on_who_asks_beside() -> None:
    """Neither on the lane, nor on how many lanes there are, nor on who takes which query."""
    queries, patterns = random_memory((100, 700, 20), SINGLE)
    whole = settle(queries, patterns, beta=0.7, max_steps=20, tol=1e-4)
    for low, high in ((0, 1), (3, 10), (40, 60), (50, 100)):
        part = settle(queries[low:high], patterns, beta=0.7, max_steps=20, tol=1e-4)
        for few, all_ in zip(part, whole, strict=True):
            assert torch.equal(few, all_[low:high])


# Without any check: what small memories are asked.


@pytest.mark.parametrize("size", SIZES)
def test_attention_is_an_association(size: tuple[int, int, int]) -> None:
    queries, patterns = random_memory(size, SINGLE)
    wanted = oracle.associate(*(x.double().numpy() for x in (queries, patterns, patterns)), 0.3)[0]
    found = attend(queries, patterns, 0.3)
    assert found.is_contiguous()
    close(found, wanted, CLOSE[SINGLE])
    assert torch.equal(found, associate(queries, patterns, patterns, beta=0.3)[0])
    assert torch.equal(attend(queries[None], patterns[None], 0.3), found[None])
    close(attend(queries.double(), patterns.double(), 0.3), wanted, CLOSE[DOUBLE])


def test_attention_of_rows_wherever_they_lie() -> None:
    queries, patterns = random_memory((21, 40, 6), SINGLE)
    wanted = attend(queries, patterns, 1.0)
    apart = torch.zeros(21, 2, 12)
    apart[:, 1, :6] = queries
    for rows in (apart[:, 1, :6], queries.mT.contiguous().mT):
        found = attend(rows, patterns, 1.0)
        assert found.is_contiguous()
        assert torch.equal(found, wanted)
        assert torch.equal(attend(rows[None], patterns[None], 1.0)[0], wanted)
    held = torch.cat((patterns, patterns), 1)[:, 6:]
    assert torch.equal(attend(queries, held, 1.0), wanted)
    assert torch.equal(attend(queries, patterns.mT.contiguous().mT, 1.0), wanted)
    same = queries[:1].expand(21, 6)
    torch.testing.assert_close(attend(same, patterns, 1.0), wanted[:1].expand(21, 6))
    assert attend(queries[:0], patterns, 1.0).shape == (0, 6)
    torch.set_default_dtype(DOUBLE)
    try:
        torch.testing.assert_close(attend(queries, patterns, 1.0), wanted)
        assert associate(queries, patterns, patterns, beta=1.0)[0].dtype == SINGLE
    finally:
        torch.set_default_dtype(SINGLE)


def test_attention_in_a_batch_is_that_of_its_items() -> None:
    problems = [random_memory((5, 9, 4), SINGLE, seed=seed) for seed in range(3)]
    queries, patterns = (torch.stack(x) for x in zip(*problems, strict=True))
    wanted = torch.stack([attend(*each, 0.7) for each in problems])
    torch.testing.assert_close(attend(queries, patterns, 0.7), wanted)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # says PyTorch of its own maps
def test_attention_that_is_followed_is_left_to_pytorch() -> None:
    """Gradients, maps, traces and other types see operations that they know."""
    queries, patterns = random_memory((5, 9, 4), SINGLE)
    wanted = attend(queries, patterns, 0.7)
    learned = queries.clone().requires_grad_()
    attend(learned, patterns, 0.7).sum().backward()
    plain = queries.double().requires_grad_()
    (torch.softmax(0.7 * plain @ patterns.double().mT, 1) @ patterns.double()).sum().backward()
    assert learned.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(learned.grad.double(), plain.grad, atol=1e-6, rtol=0.0)
    with torch.no_grad():
        assert torch.equal(attend(learned, patterns, 0.7), wanted)
    mapped = torch.func.vmap(lambda x: attend(x, patterns, 0.7))(torch.stack((queries, queries)))
    torch.testing.assert_close(mapped[1], wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(queries, patterns, 0.7).dtype == torch.bfloat16
    compiled = torch.compile(lambda x: attend(x, patterns, 0.7), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(queries), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch itself, at its first forward derivative
def test_a_direction_is_never_lost() -> None:
    """PyTorch's attention may not know forward derivatives, but a kernel would leave them out without a word."""
    queries, patterns = random_memory((5, 9, 4), SINGLE)
    with forward_ad.dual_level():
        moving = forward_ad.make_dual(queries, torch.ones_like(queries))
        try:
            found = attend(moving, patterns, 0.7)
        except (NotImplementedError, RuntimeError):
            return
        assert forward_ad.unpack_dual(found).tangent is not None


@pytest.mark.parametrize("count", [50, 200, 1000])
def test_many_patterns_far_below_the_top_count_together(count: int) -> None:
    """Each has 2^-9 of the top's weight over their number: too little alone, much in all."""
    patterns = torch.ones(count, 2)
    patterns[:, 0] = 1 - (9 + math.log2(count)) * math.log(2) / 4
    patterns[7] = torch.tensor([1.0, 0.0])
    found = attend(torch.tensor([[1.0, 0.0]]), patterns, 4.0)
    far = (count - 1) / count * 2.0**-9
    torch.testing.assert_close(found[0, 1], torch.tensor(far / (1 + far)), rtol=1e-4, atol=0.0)


def test_numbers_beyond_float32_are_as_large_as_can_be() -> None:
    queries, patterns = random_memory((5, 9, 4), SINGLE)
    found = settle(queries, patterns, beta=1.0, max_steps=5, tol=1e300)
    assert found.steps.tolist() == [1] * 5
    assert found.converged.all()
    found = settle(queries, patterns, beta=1.0, max_steps=3, tol=-1e300)
    assert found.steps.tolist() == [3] * 5
    torch.testing.assert_close(attend(queries, patterns, 1e-42), patterns.mean(0).expand(5, 4))
    best = patterns[(queries @ patterns.mT).argmax(1)]
    for beta in (1e5, 1e6, 1e7, 1e8):  # scores whose last digits are worth much
        torch.testing.assert_close(attend(queries, patterns, beta), best)
    settle(queries, patterns, beta=1e-42, max_steps=1, tol=0.0)  # the offset of its energies is beyond float32


def test_memory_that_is_kept_serves_every_size_and_thread() -> None:
    """Small after large after small, and from several threads at once."""
    problems = [random_memory(size, SINGLE) for size in ((3, 5, 2), (200, 30, 400), (3, 5, 2), (40, 90, 70))]
    wanted = [attend(*each, 0.2) for each in problems]
    for (queries, patterns), found in zip(problems, wanted, strict=True):
        close(found, oracle.associate(*(x.double().numpy() for x in (queries, patterns, patterns)), 0.2)[0], 3e-5)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for found, expected in zip(pool.map(lambda x: attend(*x, 0.2), 8 * problems), 8 * wanted, strict=True):
                assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nan_ends(wrong: float, dtype: torch.dtype) -> None:
    """A query that is no number gives none, and spoils no other."""
    queries, patterns = random_memory((20, 130, 5), dtype)
    queries[3, 2] = wrong
    others = torch.arange(20) != 3
    found = settle(queries, patterns, beta=1.0, max_steps=7, tol=1e-3)
    check = settle(queries[others], patterns, beta=1.0, max_steps=7, tol=1e-3)
    torch.testing.assert_close(found.state[others], check.state)
    torch.testing.assert_close(found.energies[others], check.energies)
    assert found.steps[others].tolist() == check.steps.tolist()
    assert found.steps[3] == 7
    assert not found.converged[3]
    assert found.state[3].isnan().all()
    assert not found.energies[3].isfinite().any()
    mixed, lse = associate(queries, patterns, patterns, beta=1.0)
    assert mixed.isnan().all(1).tolist() == (~others).tolist()
    assert lse.isfinite().tolist() == others.tolist()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_pattern_that_is_no_number_is_not_overlooked(wrong: float) -> None:
    queries, patterns = random_memory((20, 30, 5), SINGLE)
    patterns[7, 1] = wrong
    assert not attend(queries, patterns, 1.0)[:, 1].isfinite().any()
    found = settle(queries, patterns, beta=1.0, max_steps=4, tol=1e-3)
    assert not found.state[:, 1].isfinite().any()
    assert not found.converged.any()


# The nearest.


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize(("N", "k", "block"), [(1, 1, None), (5, 9, 2), (40, 3, 7), (40, 40, 1), (100, 10, None)])
def test_the_nearest_are_the_best_of_all(N: int, k: int, block: int | None, dtype: torch.dtype) -> None:
    queries, keys = random_memory((6, N, 5), dtype)
    for mask in (None, torch.arange(N) % 3 != 1):
        scores, indices = nearest(queries, keys, k, mask=mask, block=block)
        assert scores.shape == indices.shape == (6, k)
        wanted = oracle.nearest(queries.double().numpy(), keys.double().numpy(), k, some(mask))
        for row, best in enumerate(wanted):
            missing = k - len(best)
            assert indices[row].tolist() == [i for _, i in best] + [-1] * missing
            expected = torch.tensor([s for s, _ in best] + [-math.inf] * missing, dtype=DOUBLE)
            torch.testing.assert_close(scores[row].double(), expected, atol=1e-5, rtol=1e-5)


# What is wrong is said, and an oracle can fail.


def test_errors_are_one_line() -> None:
    queries, keys = random_memory((2, 3, 4))
    wrong = [
        lambda: associate(queries[0], keys, keys, beta=1.0),
        lambda: associate(queries[:, :3], keys, keys, beta=1.0),
        lambda: associate(queries.float(), keys, keys, beta=1.0),
        lambda: associate(queries, keys, keys[:2], beta=1.0),
        lambda: associate(queries, keys, keys, beta=torch.ones(2)),
        lambda: settle(queries, keys, beta=1.0, max_steps=1, tol=0.1, mask=torch.ones(2, dtype=torch.bool)),
        lambda: nearest(queries, keys, 1, mask=torch.ones(3)),
    ]
    for call in wrong:
        with pytest.raises(ShapeError, match="must be") as error:
            call()
        assert "\n" not in str(error.value)
    bad = [
        lambda: associate(queries, keys, keys, beta=0.0),
        lambda: associate(queries, keys, keys, beta=math.inf),
        lambda: associate(queries, keys, keys, beta=1.0, block=0),
        lambda: settle(queries, keys, beta=1.0, max_steps=-1, tol=0.1),
        lambda: settle(queries, keys, beta=1.0, max_steps=1, tol=math.nan),
        lambda: nearest(queries, keys, 0),
    ]
    for call in bad:
        with pytest.raises(ConfigError, match="must be") as error:
            call()
        assert "\n" not in str(error.value)


def test_a_broken_twin_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference.associate

    def forgetful(queries: Tensor, keys: Tensor, values: Tensor, *others: object) -> tuple[Tensor, Tensor]:
        return whole(queries, keys[:-1], values[:-1], *others)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "associate", forgetful)
    monkeypatch.setattr(memory, "memory_kernels", lambda _: None)
    queries, keys = random_memory((3, 9, 4))
    with pytest.raises(AssertionError):
        check_associate(queries, keys, keys, 0.5)


# The compiled functions themselves.


def test_every_level_of_instructions(level: str) -> None:
    for size in ((1, 1, 1), (9, 70, 5), (40, 33, 17)):
        queries, patterns = random_memory(size, SINGLE)
        check_associate(queries, patterns, patterns[:, :2].contiguous(), 0.5)
        check_settle(queries, patterns, 2.0, 4, -1.0)


@pytest.mark.usefixtures("two_threads")
def test_patterns_are_shared_out_however_few() -> None:
    for size in ((1, 1, 1), (1, 7, 3), (20, 5, 4), (33, 70, 6)):
        queries, patterns = random_memory(size, SINGLE)
        check_associate(queries, patterns, patterns[:, :2].contiguous(), 0.5)
        check_settle(queries, patterns, 2.0, 4, -1.0)


def given(**wrong: Any) -> dict[str, Any]:
    """Arguments of both functions that fit, but for what is wrong."""
    sizes = {"queries": (2, 3), "keys": (4, 3), "values": (4, 5), "mixed": (2, 5), "lse": (2,)}
    sizes |= {"state": (2, 3), "energies": (2, 6)}
    arrays = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    return {**arrays, "beta": 1.0, "steps": np.zeros(2, np.int64), "converged": np.zeros(2, np.bool_), **wrong}


FUNCTIONS = {
    "associate": ["queries", "keys", "values", "beta", "mixed", "lse"],
    "settle": ["queries", "keys", "beta", "beta", "state", "energies", "steps", "converged"],
}
WRONG = {"queries": (2, 4), "keys": (5, 4), "values": (3, 5), "mixed": (2, 4), "lse": (3,), "state": (2, 4)}
WRONG |= {"energies": (3, 6), "steps": (3,), "converged": (1,)}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_does_not_fit_is_refused(function: str) -> None:
    extension, names = pytest.importorskip("thalweg._kernels"), FUNCTIONS[function]

    def call(threads: Any = 1, **wrong: Any) -> None:
        arguments = given(**wrong)
        getattr(extension, function)(*(arguments[name] for name in names), threads)

    for threads in (-1, 0, 1, 10_000):
        call(threads)
    for name in WRONG.keys() & set(names):
        right = given()[name]
        with pytest.raises(ShapeError, match="must be"):
            call(**{name: np.zeros(WRONG[name], right.dtype)})
        for other in (right.astype(np.float64), right[..., None], np.asfortranarray(np.zeros((4, 3), np.float32))):
            with pytest.raises(TypeError):
                call(**{name: other})
    nothing = {"keys": np.zeros((0, 3), np.float32), "values": np.zeros((0, 5), np.float32)}
    with pytest.raises(ShapeError, match="at least one pattern"):
        call(**nothing)
    for beta in (0.0, -1.0, math.nan):
        with pytest.raises(ShapeError, match="`beta` must be positive"):
            call(beta=beta)
    if function == "settle":
        with pytest.raises(ShapeError, match="a column for every step"):
            call(energies=np.zeros((2, 0), np.float32))
