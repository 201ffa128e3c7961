"""Compiled CPU kernels: equal to the reference in every domain, layout and number of threads."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from contracts.callers import found_by_threads
from oracles import chain_passes as oracle
from thalweg.errors import ShapeError
from thalweg.kernels import chain as ops
from thalweg.kernels.potentials import Chain, SparseTransitions

kernels: Any = pytest.importorskip("thalweg._kernels", reason="the extension is not compiled")

from thalweg.kernels.cpu import chain as cpu  # noqa: E402

SIZES = [
    (1, 1, 1),
    (1, 2, 1),
    (3, 5, 2),
    (2, 7, 8),
    (4, 6, 9),
    (5, 33, 20),
    (2, 4, 33),
    (19, 6, 9),
    (40, 5, 16),
    (70, 4, 3),
]
KINDS = ("shared", "item", "step")
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}


def make(size: tuple[int, int, int], kind: str, dtype=torch.float64, *, forbidden=0.0, scale=1.0, seed=0) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    B, T, C = size
    shape = {"shared": (C, C), "item": (B, C, C), "step": (B, T - 1, C, C), "sparse": (C, C)}[kind]

    def scores(*dims: int) -> Tensor:
        return (torch.randn(dims, generator=generator, dtype=torch.float64) * scale).to(dtype)

    moves = scores(*shape).masked_fill(torch.rand(shape, generator=generator) < forbidden, -math.inf)
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[0] = T
    transitions = SparseTransitions.of_dense(moves) if kind == "sparse" else moves
    chain = Chain(scores(B, T, C), transitions, scores(C), scores(C), lengths)
    chain.emissions[torch.arange(T) >= lengths.unsqueeze(1)] = math.nan
    if kind == "step":
        moves[torch.arange(T - 1) >= lengths.unsqueeze(1) - 1] = math.nan
    return chain


def as_leaves(chain: Chain, dtype: torch.dtype) -> Chain:
    return ops.with_inputs(chain, [x.detach().to(dtype).requires_grad_() for x in ops.inputs_of(chain)])


def labels_of(chain: Chain, seed: int = 1) -> Tensor:
    B, T, C = chain.emissions.shape
    return torch.randint(C, (B, T), generator=torch.Generator().manual_seed(seed))


def assert_like_reference(
    chain: Chain, *, gold: Tensor | None = None, low_memory: bool = False, tolerance: float | None = None
):
    """Values and weighted gradients in all four inputs, over the items that are feasible."""
    dtype = chain.emissions.dtype
    tolerance = tolerance or TOLERANCE[dtype]
    ours, exact = as_leaves(chain, dtype), as_leaves(chain, torch.float64)
    if gold is None:
        got = ops.log_partition(ours, backend="cpu", low_memory=low_memory)
        want = ops.log_partition(exact, backend="reference")
    else:
        got = -ops.log_likelihood(ours, gold, backend="cpu", low_memory=low_memory)
        want = -ops.log_likelihood(exact, gold, backend="reference")
    assert torch.equal(torch.isneginf(got), torch.isneginf(want))
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
    finite = torch.isfinite(want)
    if not finite.any():
        return
    weights = torch.linspace(0.5, 2.0, len(want), dtype=torch.float64)[finite]
    ours_gradients = torch.autograd.grad((got[finite] * weights.to(dtype)).sum(), ops.inputs_of(ours))
    exact_gradients = torch.autograd.grad((want[finite] * weights).sum(), ops.inputs_of(exact), materialize_grads=True)
    for one, two in zip(ours_gradients, exact_gradients, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one.double(), two, atol=4 * tolerance, rtol=4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [*KINDS, "sparse"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients(size: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    for forbidden in (0.0, 0.3):
        chain = make(size, kind, dtype, forbidden=forbidden)
        assert_like_reference(chain)
        if kind != "sparse" or not forbidden:
            assert_like_reference(chain, gold=labels_of(chain))


@pytest.mark.parametrize("kind", [*KINDS, "sparse"])
@pytest.mark.parametrize("size", [(4, 6, 9), (40, 5, 16)], ids=str)
def test_many_threads_change_nothing(size: tuple[int, int, int], kind: str, two_threads: None) -> None:
    chain = make(size, kind)
    assert_like_reference(chain, gold=labels_of(chain) if kind != "sparse" else None)
    assert_like_reference(make(size, kind, forbidden=0.4, scale=40.0, dtype=torch.float32), tolerance=1e-3)


@pytest.mark.parametrize("kind", [*KINDS, "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_scores_are_exact(kind: str, dtype: torch.dtype) -> None:
    # Ranges far beyond what the scaled domain can hold: the items must be found out and computed in the log domain.
    for scale in (30.0, 1e3, 1e4):
        chain = make((6, 9, 5), kind, dtype, forbidden=0.2, scale=scale)
        rounding = torch.finfo(dtype).eps * scale * 9
        assert_like_reference(chain, tolerance=max(TOLERANCE[dtype], 4 * rounding))


def test_a_state_lost_by_underflow_is_noticed() -> None:
    # Label 0 wins every step by e^60 until the end, where only label 1 may stop; float32 would have lost label 1.
    chain = Chain(
        torch.tensor([[60.0, 0.0]]).expand(1, 5, 2).contiguous(),
        torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]]),
        torch.zeros(2),
        torch.tensor([-math.inf, 0.0]),
        torch.tensor([5]),
    )
    assert float(ops.log_partition(chain, backend="cpu")) == 0.0
    assert ops.marginals(chain, backend="cpu")[0, :, 1].tolist() == [1.0] * 5
    assert ops.sample(chain, torch.full((3, 1, 5), 0.5), backend="cpu").tolist() == [[[1] * 5]] * 3


@pytest.mark.parametrize("size", [(3, 1, 4), (3, 50, 4), (20, 17, 9), (2, 64, 33)], ids=str)
def test_low_memory_gives_the_same(size: tuple[int, int, int]) -> None:
    for kind in ("shared", "item"):
        chain = make(size, kind)
        assert_like_reference(chain, gold=labels_of(chain), low_memory=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 7, 25), (6, 5, 16), (5, 17, 33), (9, 12, 64), (6, 5, 130)], ids=str)
def test_every_level_equals_the_oracle(size: tuple[int, int, int], dtype: torch.dtype, level: str) -> None:
    chain = ops._plain(make(size, "shared", dtype))
    for gold in (None, labels_of(chain)):
        values, _, gradients, finite = cpu.at_once(chain, gold, False)
        assert finite
        given = [x.double().nan_to_num().numpy() for x in ops.inputs_of(chain)]
        want = oracle.loss(*given[:4], lengths=chain.lengths.tolist(), gold=None if gold is None else gold.tolist())
        tolerance = TOLERANCE[dtype]
        for one, two in zip((values, *gradients), want, strict=True):
            np.testing.assert_allclose(one.double().numpy(), two, rtol=tolerance, atol=4 * tolerance)


def test_the_oracle_can_fail() -> None:
    chain = make((5, 6, 26), "shared")
    assert isinstance(chain.transitions, Tensor)
    values, _, gradients, _ = cpu.at_once(chain._replace(transitions=chain.transitions.T.contiguous()), None, False)
    want = oracle.loss(*(x.nan_to_num().numpy() for x in ops.inputs_of(chain)), lengths=chain.lengths.tolist())
    assert np.abs(values.numpy() - want[0]).max() > 1e-3
    assert np.abs(gradients[1].numpy() - want[2]).max() > 1e-3


@pytest.mark.parametrize("kind", [*KINDS, "sparse"])
def test_every_level_decodes_and_constrains_alike(kind: str, level: str) -> None:
    chain = make((6, 9, 21), kind, torch.float32, forbidden=0.3, scale=3.0)
    assert_like_reference(chain, tolerance=1e-4)
    exact = ops.with_inputs(chain, [x.double() for x in ops.inputs_of(chain)])
    assert torch.equal(ops.viterbi(chain, backend="cpu")[1], ops.viterbi(exact, backend="reference")[1])
    torch.testing.assert_close(
        ops.edge_marginals(chain, backend="cpu").double(),
        ops.edge_marginals(exact, backend="reference"),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("batch", range(1, 14))
def test_groups_that_do_not_fill_up(batch: int, two_threads: None) -> None:
    chain = make((batch, 11, 27), "shared", seed=batch)
    assert_like_reference(chain, gold=labels_of(chain))
    found = cpu.at_once(ops._plain(chain), None, True)
    assert float(found[0]) == pytest.approx(float(cpu.forward(ops._plain(chain))[0].sum()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", ["alike", "different"])
def test_numerical_gradients(weights: str, kind: str) -> None:
    leaves = as_leaves(make((3, 4, 6), kind), torch.float64)
    full = leaves._replace(lengths=torch.full((3,), 4))
    inputs = [x.detach().nan_to_num().requires_grad_() for x in ops.inputs_of(full)]
    gold, factor = labels_of(full), torch.tensor([0.3, 0.3 if weights == "alike" else -1.2, 0.3]).double()

    def total(*given: Tensor) -> Tensor:
        return (ops.log_likelihood(ops.with_inputs(full, list(given)), gold, backend="cpu") * factor).sum()

    assert torch.autograd.gradcheck(total, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(16, 1, 1), (17, 3, 2), (45, 9, 9), (64, 40, 24)], ids=str)
def test_both_passes_at_once_are_the_two_passes(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    chain = ops._plain(make(size, "shared", dtype))
    ones = torch.ones(size[0], dtype=dtype)
    for gold in (None, labels_of(chain)):
        found = cpu.at_once(chain, gold, False)
        values, saved = cpu.forward(chain, gold)
        assert torch.equal(found[0], values if gold is None else -values)
        for one, two in zip(found[2], cpu.backward(chain, saved, ones, gold), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("weights", ["alike", "different", "twice", "total"])
def test_the_gradient_that_was_made_at_once_is_given_away_only_once(weights: str) -> None:
    leaves = as_leaves(make((20, 7, 5), "shared"), torch.float64)
    gold, inputs = labels_of(leaves), ops.inputs_of(leaves)
    factor = (
        torch.linspace(-2, 3, 20, dtype=torch.float64) if weights == "different" else torch.full((20,), 0.3).double()
    )

    def gradients(backend: str) -> tuple[torch.Tensor, ...]:
        value = ops.log_likelihood(leaves, gold, backend=backend, total=weights == "total")
        scalar = 0.3 * value if weights == "total" else (value * factor).sum()
        first = torch.autograd.grad(scalar, inputs, retain_graph=True)
        kept = [x.clone() for x in first]
        second = torch.autograd.grad(2 * scalar, inputs)
        assert all(torch.equal(one, two) for one, two in zip(first, kept, strict=True))
        return *first, *second

    for one, two in zip(gradients("cpu"), gradients("reference"), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("kind", [*KINDS, "sparse"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_decoding(size: tuple[int, int, int], kind: str) -> None:
    for forbidden in (0.0, 0.3):
        chain = make(size, kind, forbidden=forbidden)
        scores, labels = ops.viterbi(chain, backend="cpu")
        expected_scores, expected = ops.viterbi(chain, backend="reference")
        feasible = torch.isfinite(expected_scores)
        torch.testing.assert_close(scores, expected_scores)
        assert torch.equal(labels[feasible], expected[feasible])
        for k in (1, 4):
            one, two = ops.top_k(chain, k, backend="cpu"), ops.top_k(chain, k, backend="reference")
            torch.testing.assert_close(one[0], two[0])
            assert torch.equal(one[1], two[1])
        uniforms = torch.rand(5, *chain.emissions.shape[:2], generator=torch.Generator().manual_seed(3)).double()
        drawn = ops.sample(chain, uniforms, backend="cpu")
        assert torch.equal(drawn[:, feasible], ops.sample(chain, uniforms, backend="reference")[:, feasible])
        edges = ops.edge_marginals(chain, backend="cpu")
        torch.testing.assert_close(edges[feasible], ops.edge_marginals(chain, backend="reference")[feasible])
        other = make(size, kind, seed=5)._replace(lengths=chain.lengths)
        torch.testing.assert_close(
            ops.expectation(chain, chain, backend="cpu")[feasible],
            ops.expectation(chain, chain, backend="reference")[feasible],
        )
        if kind != "sparse":
            other = other._replace(emissions=other.emissions.nan_to_num())
            torch.testing.assert_close(
                ops.expectation(chain, other, backend="cpu")[feasible],
                ops.expectation(chain, other, backend="reference")[feasible],
                equal_nan=True,
            )


def test_float32_keeps_its_digits_along_a_long_chain() -> None:
    chain = make((1, 4096, 12), "shared", torch.float32)
    exact = ops.with_inputs(chain, [x.double() for x in ops.inputs_of(chain)])
    got, want = ops.log_partition(chain, backend="cpu").double(), ops.log_partition(exact, backend="cpu")
    assert float((got - want).abs() / want.abs()) < 1e-6
    assert torch.equal(ops.viterbi(chain, backend="cpu")[1], ops.viterbi(exact, backend="cpu")[1])


def test_equal_calls_give_equal_bits(two_threads: None) -> None:
    chain = make((40, 30, 9), "shared", torch.float32)
    first, second = as_leaves(chain, torch.float32), as_leaves(chain, torch.float32)
    for one, two in zip(
        torch.autograd.grad(ops.log_partition(first, backend="cpu").sum(), ops.inputs_of(first)),
        torch.autograd.grad(ops.log_partition(second, backend="cpu").sum(), ops.inputs_of(second)),
        strict=True,
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize("label", [-1, 9])
def test_a_label_out_of_range_is_named(label: int) -> None:
    chain = make((3, 5, 9), "shared")
    gold = labels_of(chain)
    gold[0, 2] = label
    with pytest.raises(ShapeError, match=rf"0\.\.8, got {label} at position 2 of batch item 0"):
        ops.log_likelihood(chain, gold, backend="cpu")


def _loss(seed: int) -> float:
    chain = as_leaves(make((20, 12, 9), "shared", torch.float32, seed=seed), torch.float32)
    value = ops.log_partition(chain, backend="cpu").sum()
    value.backward()
    return float(value.detach()) + float(chain.emissions.grad.nan_to_num().square().sum())  # type: ignore[union-attr]


class _Sums(Dataset):
    """Both passes of the kernels, without autograd: torch forbids that after a fork once it has seen a GPU."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        chain = make((20, 12, 9), "shared", torch.float32, seed=index)
        marginals = ops.marginals(chain, backend="cpu")
        return float(ops.log_partition(chain, backend="cpu").sum() + marginals.square().sum())


def test_many_callers_at_once(two_threads: None) -> None:
    expected = [_loss(seed) for seed in range(4)]
    assert found_by_threads(_loss) == {seed: [expected[seed]] * 10 for seed in range(4)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader_and_forks(two_threads: None) -> None:
    expected = [_Sums()[index] for index in range(4)]  # the parent's threads are running when it forks
    loaded = [float(x) for x in DataLoader(_Sums(), batch_size=None, num_workers=2, multiprocessing_context="fork")]
    assert loaded == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["shared", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_path_lost_in_both_directions_is_noticed(kind: str, dtype: torch.dtype) -> None:
    # Two labels that never meet. The second begins and ends so badly that forward and backward weights both lose it,
    # but in between it gains, in steps too small to notice, more than it lost: it is the answer.
    loss, gain = (100.0, 20.0) if dtype == torch.float32 else (800.0, 150.0)
    second = torch.tensor([-loss] + [gain] * 12 + [-loss])
    emissions = torch.stack([torch.zeros(14), second], -1).unsqueeze(0).to(dtype)
    moves = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]], dtype=dtype)
    none = torch.zeros(2, dtype=dtype)
    transitions = SparseTransitions.of_dense(moves) if kind == "sparse" else moves
    chain = Chain(emissions, transitions, none, none, torch.tensor([14]))
    want = 12 * gain - 2 * loss
    assert float(ops.log_partition(chain, backend="cpu")) == pytest.approx(want, rel=1e-6)
    assert ops.marginals(chain, backend="cpu")[0, :, 1].tolist() == pytest.approx([1.0] * 14)
    assert bool((ops.sample(chain, torch.full((2, 1, 14), 0.5, dtype=dtype), backend="cpu") == 1).all())


@pytest.mark.parametrize("padding", [math.inf, -math.inf, 1e30, -1e30])
def test_what_lies_past_a_length_reaches_nothing(padding: float) -> None:
    chain = make((45, 9, 9), "shared", torch.float32)
    past = torch.arange(9) >= chain.lengths.unsqueeze(1)
    other = chain._replace(emissions=chain.emissions.masked_fill(past.unsqueeze(-1), padding))
    results = []
    for each in (chain, other):
        values, saved = cpu.forward(ops._plain(each))
        results.append((values, *cpu.backward(ops._plain(each), saved, torch.ones(45))))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("labels", [3, 9])
def test_items_that_are_infeasible_leave_the_others_alone(labels: int) -> None:
    chain = make((37, 6, labels), "shared", torch.float32)
    chain.emissions[[3, 36], 0] = -math.inf
    values, _ = cpu.forward(ops._plain(chain))
    assert torch.isneginf(values).nonzero().flatten().tolist() == [3, 36]
    assert_like_reference(chain)
    assert_like_reference(chain, gold=labels_of(chain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("labels", [1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 24])
def test_every_number_of_labels(labels: int, dtype: torch.dtype) -> None:
    for steps in (1, 3, 8, 9, 17):
        chain = make((18, steps, labels), "shared", dtype)
        assert_like_reference(chain, gold=labels_of(chain))


@pytest.mark.parametrize("label", [-1, 9, -(10**15), 10**15])
@pytest.mark.parametrize("place", [(0, 0), (20, 3), (39, 4)], ids=str)
def test_a_label_far_out_of_range_touches_nothing(label: int, place: tuple[int, int], two_threads: None) -> None:
    chain = make((40, 5, 9), "shared")
    whole = chain._replace(emissions=chain.emissions.nan_to_num(), lengths=torch.full((40,), 5))  # padding is NaN
    chain = as_leaves(whole, torch.float32)
    gold = labels_of(chain)
    gold[place] = label
    for total in (False, True):
        with pytest.raises(ShapeError, match=rf"got {label} at position {place[1]} of batch item {place[0]}"):
            ops.log_likelihood(chain, gold, backend="cpu", total=total)


def test_what_a_call_leaves_behind_changes_no_other(two_threads: None) -> None:
    sizes = [(16, 5, 3), (33, 9, 9), (16, 5, 3), (16, 6, 3), (33, 9, 9)]
    chains = [make(size, "shared", torch.float32, seed=seed) for seed, size in enumerate(sizes)]

    def gradients(chain: Chain) -> list[Tensor]:
        found = cpu.at_once(ops._plain(chain), labels_of(chain), total=True)
        return [found[0], *found[2]]

    alone = [gradients(chain) for chain in chains]
    for number in (1, 2, 1):
        torch.set_num_threads(number)
        kept = [gradients(chain) for chain in chains]
        again = [gradients(chain) for chain in chains]
        for first, second, third in zip(kept, again, alone, strict=True):
            for one, two, three in zip(first, second, third, strict=True):
                assert torch.equal(one, two)
                torch.testing.assert_close(one, three)


def test_the_total_is_the_sum_and_tells_whether_it_is_finite() -> None:
    chain = ops._plain(make((33, 9, 4), "shared", torch.float32))
    gold = labels_of(chain)
    values, total = cpu.at_once(chain, gold, total=False), cpu.at_once(chain, gold, total=True)
    assert values[3]
    assert total[3]
    torch.testing.assert_close(total[0], values[0].double().sum().float())
    chain.emissions[7, 0, gold[7, 0]] = -math.inf  # forbids the gold label alone
    assert not cpu.at_once(chain, gold, total=False)[3]
    assert not cpu.at_once(chain, gold, total=True)[3]


def test_what_a_kernel_would_follow_is_checked() -> None:
    """The entry points themselves, without the checks that stand before them."""
    chain = ops._plain(make((3, 5, 4), "shared", torch.float32))
    given, values = cpu._given(chain), np.empty(3, np.float32)
    edges = np.array([[0, 1], [1, 2]])

    def refused(place: int, what: Any, match: str, error: type[Exception] = ShapeError) -> None:
        arguments: list[Any] = [*given, None, None, values, None]  # gold, weights, values and gradients come last
        arguments[place] = what
        with pytest.raises(error, match=match):
            kernels.chain_likelihood(tuple(arguments[:6]), *arguments[6:], 1)

    refused(0, np.empty((3, 5, 3), np.float32), "`transitions` must be")
    refused(0, np.empty((0, 5, 4), np.float32), "must have items")
    refused(0, np.empty((3, 5, 4)), "incompatible", TypeError)
    for place in (0, 1, 3, 4, 5, 8):
        refused(place, None, "incompatible", TypeError)
    refused(9, (np.empty((3, 5, 4), np.float32), None, None, None), "incompatible", TypeError)
    refused(1, np.empty((2, 1, 4, 4), np.float32), "`transitions` must be")
    refused(1, np.empty((1, 1, 4, 8), np.float32)[..., ::2], "incompatible", TypeError)
    refused(2, edges, "`transitions` must be")
    refused(3, np.empty(3, np.float32), "`start` must be")
    refused(4, np.empty(5, np.float32), "`end` must be")
    refused(5, np.array([1, 5]), "`lengths` must be")
    for length in (0, -1, 6, 2**62):
        refused(5, np.array([1, length, 5]), rf"`lengths` must lie in 1..T with T = 5, got {length} at batch item 1")
    refused(5, np.array([1, 2, 5], np.int32), "incompatible", TypeError)
    refused(6, np.zeros((3, 4), np.int64), "`gold` must be")
    refused(7, np.zeros(2, np.float32), "`weights` must be")
    refused(8, np.zeros(4, np.float32), "`values` must be")
    shapes = {"emissions": (3, 5, 4), "transitions": (1, 1, 4, 4), "start": (4,), "end": (4,)}
    for name in shapes:
        wrong = [np.zeros((*s[:-1], 3) if n == name else s, np.float32) for n, s in shapes.items()]
        refused(9, tuple(wrong), f"`d_{name}` must be")
    refused(9, tuple(np.zeros(shape) for shape in shapes.values()), "incompatible", TypeError)
    for moves in ((1, 4, 4, 4), (3, 3, 4, 4), (2, 1, 4, 4)):  # neither for all, nor by item, nor by step
        found = [np.zeros(moves if n == "transitions" else s, np.float32) for n, s in shapes.items()]
        refused(9, tuple(found), "`d_transitions` must be")
    for wrong in ([[0, 9], [1, 2]], [[0, -1], [1, 2]], [[1, 0], [2, 1]], [[0, 0], [1, 1]]):
        sparse = (given[0], np.zeros((1, 1, 1, 2), np.float32), np.array(wrong), *given[3:])
        with pytest.raises(ShapeError, match="`edges` must"):
            kernels.chain_likelihood(sparse, None, None, values, None, 1)


def test_other_functions_refuse_too() -> None:
    given = cpu._given(ops._plain(make((3, 5, 4), "shared", torch.float32)))
    bad = (*given[:5], np.array([1, 6, 5]))
    scores, path, lists = np.empty(3, np.float32), np.empty((3, 5), np.int64), np.empty((3, 2), np.float32)
    paths, uniforms, drawn = (
        np.empty((3, 2, 5), np.int64),
        np.empty((2, 3, 5), np.float32),
        np.empty((2, 3, 5), np.int64),
    )
    calls: dict[Any, list[Any]] = {
        kernels.chain_viterbi: [(bad, scores, path), (given, lists[:, 0].copy()[:2], path), (given, scores, path[:2])],
        kernels.chain_top_k: [
            *((bad, lists, paths), (given, lists, paths[:, :1].copy()), (given, lists[:2], paths)),
            (given, np.empty((3, 0), np.float32), np.empty((3, 0, 5), np.int64)),
        ],
        kernels.chain_sample: [
            (bad, uniforms, drawn),
            (given, uniforms, drawn[:1]),
            (given, uniforms[:, :2].copy(), drawn),
        ],
    }
    for function, cases in calls.items():
        for case in cases:
            with pytest.raises(ShapeError, match="must"):
                function(*case, 1)


@pytest.mark.parametrize("others", [0.0, -math.inf])
def test_chains_that_are_cut_into_pieces(others: float) -> None:
    # With 500 labels a piece has 256 positions: here are chains of three, two and one. Only three of the labels can be
    # reached, so that all must be as it is for a chain of three labels, which is one piece.
    few = make((3, 520, 3), "shared")
    few = ops._plain(few._replace(lengths=torch.tensor([520, 257, 256]), emissions=few.emissions.nan_to_num()))
    moves = torch.full((500, 500), others, dtype=torch.float64)
    moves[:3, :3] = few.transitions  # type: ignore[call-overload]
    pad = torch.nn.functional.pad
    many = Chain(
        *(pad(few.emissions, (0, 497), value=-math.inf), moves),
        *(pad(few.start, (0, 497)), pad(few.end, (0, 497)), few.lengths),
    )
    gold, weights = labels_of(few), torch.tensor([0.5, -1.0, 2.0]).double()
    for labels in (None, gold):
        torch.testing.assert_close(cpu.forward(many, labels)[0], cpu.forward(few, labels)[0])
        found, want = cpu.backward(many, (), weights, labels), cpu.backward(few, (), weights, labels)
        torch.testing.assert_close(found[0][..., :3], want[0])
        torch.testing.assert_close(found[1][:3, :3], want[1])
        assert not found[0][..., 3:].any()
    uniforms = torch.rand(2, 3, 520, generator=torch.Generator().manual_seed(3)).double()
    assert torch.equal(cpu.sample(many, uniforms), cpu.sample(few, uniforms))
    assert torch.equal(cpu.viterbi(many)[1], cpu.viterbi(few)[1])
