"""The Triton kernels of linear chains: for real on a GPU, else through Triton's interpreter in a process of its own.

The interpreter must be chosen before Triton is imported, which other tests may have done already.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts import gpu_chains
from contracts.gpu_chains import assert_close, best_labels, matrix, oracle, problem, score
from contracts.triton_kernels import DEVICE, RUNS, compile_instead, for_hopper, here_only, needs_triton
from thalweg.kernels import chain as ops
from thalweg.kernels.potentials import Chain

INF = math.inf

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import chain as gpu
    from thalweg.kernels.gpu import chain_launch, chain_walks, launching


@pytest.fixture(autouse=True)
def full_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels are given to write into was not clear: NaN, and -1."""
    if RUNS:
        room = launching.Room.like

        def filled(*given: Any) -> Any:
            made = room(*given)
            made.memory.fill_(255)
            return made

        monkeypatch.setattr(launching.Room, "like", filled)


# Transitions of each item, where shared ones and those of each step go the same ways.
PER_ITEM = pytest.param(1, marks=pytest.mark.slow)


@pytest.mark.slow
@for_hopper
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("C", [5, 60, 128, 300])
def test_kernels_compile_for_hopper(kind: int, dtype: torch.dtype, C: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch is compiled to machine code instead; no GPU is needed, and nothing is computed."""
    from thalweg.kernels.gpu import chain, launching

    compiled = compile_instead(monkeypatch)
    monkeypatch.setattr(launching, "launch", lambda kernel, grid, *given, **options: kernel[grid](*given, **options))
    monkeypatch.setattr(launching, "_tapes", {})
    monkeypatch.setattr(gpu_chains, "DEVICE", "cpu")
    made, gold = problem(2, 40, C, kind, dtype)
    weights = torch.ones(2, dtype=dtype)
    for method, keep, labels in (("chunked", True, gold), ("sequential", False, None), ("sequential", True, None)):
        _, saved = chain.forward(made, labels, method=method, keep=keep)
        if saved is not None:
            chain.backward(made, saved, weights, labels)
    chain.forward(made, gold, low_memory=True)
    chain.at_once(made, gold, False)
    chain.viterbi(made, "sequential")
    chain.viterbi(made, "chunked")
    chain.sample(made, torch.rand(1, 2, 40))
    assert {"prepare", "log_walk", "log_posterior", "finish", "way_back"} <= compiled
    assert ({"walk", "join", "posterior"} <= compiled) == (kind < 2 and C <= 128)


def labellings(chain: Chain, item: int) -> tuple[Tensor, Tensor]:
    """Every labelling of an item (N, length), and its score."""
    length = int(chain.lengths[item])
    every = torch.tensor(list(itertools.product(range(chain.size), repeat=length)))
    plain = Chain(*(part.cpu().double() for part in chain[:4]), chain.lengths.cpu())
    A = plain.transitions
    one = Chain(
        plain.emissions[[item]], A if A.dim() == 2 else A[[item]], plain.start, plain.end, plain.lengths[[item]]
    )
    return every, torch.cat([score(one, y[None]) for y in every])


def assert_right(chain: Chain, gold: Tensor | None, *, factor: float = 1.0, **options: object) -> object:
    """Values and gradients of a chain against the oracle; returns what was kept."""
    weights = torch.linspace(0.5, -1.5, len(chain.lengths)).to(chain.emissions)
    values, saved = gpu.forward(chain, gold, **options)  # type: ignore[arg-type]
    slopes = gpu.backward(chain, saved, weights, gold)
    expected, gradients = oracle(chain, weights, gold)
    assert values.dtype == chain.emissions.dtype
    assert_close(values, expected)
    for found, wanted, part in zip(slopes, gradients, chain, strict=False):
        assert found.shape == part.shape
        assert_close(found, wanted, factor * 4)
    past = torch.arange(chain.steps, device=DEVICE) >= chain.lengths[:, None]
    assert (slopes[0][past] == 0).all()
    return saved


@here_only
@pytest.mark.parametrize(("kind", "dtype"), [(0, torch.float32), (1, torch.float64), (2, torch.float64)])
def test_values_and_gradients(kind: int, dtype: torch.dtype) -> None:
    chain, gold = problem(2, 7, 5, kind, dtype)
    assert_right(chain, gold)


@here_only
def test_without_gold_and_with_padding_of_the_width() -> None:
    chain, _ = problem(2, 6, 17, 0)
    assert_right(chain, None)
    kept, _ = gpu.forward(chain)
    bare, saved = gpu.forward(chain, keep=False)
    assert saved is None
    assert_close(bare, kept)


@here_only
@pytest.mark.parametrize("kind", [0, PER_ITEM, 2])
@pytest.mark.parametrize(("T", "C"), [(1, 3), (2, 1)])
def test_smallest_sizes(kind: int, T: int, C: int) -> None:
    chain, gold = problem(2, T, C, kind)
    assert_right(chain, gold)
    scores, labels = gpu.viterbi(chain)
    assert_close(scores, score(Chain(*(part.cpu() for part in chain)), labels.cpu()))


@here_only
def test_no_items() -> None:
    chain = Chain(
        *(torch.zeros(size, device=DEVICE) for size in [(0, 4, 3), (3, 3), (3,), (3,)]), torch.zeros(0).long()
    )
    values, saved = gpu.forward(chain)
    assert values.shape == (0,)
    slopes = gpu.backward(chain, saved, values)
    assert [slope.shape for slope in slopes] == [part.shape for part in chain[:4]]
    assert (slopes[1] == 0).all()
    assert gpu.viterbi(chain)[1].shape == (0, 4)
    assert gpu.sample(chain, torch.zeros(2, 0, 4)).shape == (2, 0, 4)


@here_only
@pytest.mark.parametrize("kind", [0, PER_ITEM])
def test_forbidden_moves_stay_in_the_scaled_domain(kind: int) -> None:
    chain, gold = problem(2, 7, 6, kind, forbid=0.4)
    saved = assert_right(chain, gold)
    assert saved.room.part(1).tolist() == [0, 0]


@here_only
@pytest.mark.parametrize(("kind", "scale"), [(0, 1e4), (1, 300.0), (2, 1e4)])
def test_wide_scores_go_to_the_log_domain(kind: int, scale: float) -> None:
    chain, gold = problem(2, 6, 4, kind, scale=scale)
    saved = assert_right(chain, gold, factor=30)
    if kind < 2:
        assert saved.room.part(1).tolist() == [1, 1]


@here_only
def test_a_path_that_both_walks_would_lose() -> None:
    # Label 1 is far behind at both ends and as far ahead in between, and no move joins it to label 0. Walking either
    # way it underflows before it catches up, so that alpha and beta agree with each other and are both wrong.
    T = 12
    emissions = torch.zeros(1, T, 2, dtype=torch.float64)
    emissions[0, :2, 1] = emissions[0, -2:, 1] = -60.0
    emissions[0, 2:-2, 1] = 30.0
    transitions = torch.tensor([[0.0, -INF], [-INF, 0.0]], dtype=torch.float64)
    nothing = torch.zeros(2, dtype=torch.float64)
    parts = (part.to(DEVICE, torch.float32) for part in (emissions, transitions, nothing, nothing))
    chain = Chain(*parts, torch.tensor([T], device=DEVICE))
    saved = assert_right(chain, None, factor=10)
    assert saved.room.part(1).tolist() == [1]


@here_only
def test_what_only_the_way_backwards_may_lose() -> None:
    # Walking backwards label 1 falls e^-70 behind label 0; forwards neither is ever behind by more than e^-50.
    emissions = torch.zeros(1, 8, 2, device=DEVICE)
    emissions[:, 1:, 0] = 10.0
    moves, start = torch.tensor([[0.0, -INF], [-INF, 0.0]]).to(DEVICE), torch.tensor([-50.0, 0.0]).to(DEVICE)
    chain = Chain(emissions, moves, start, torch.zeros_like(start), torch.tensor([8], device=DEVICE))
    assert assert_right(chain, None).room.part(1).tolist() == [1]


@here_only
@pytest.mark.parametrize("kind", [0, PER_ITEM, 2])
def test_infeasible_items_spoil_nothing(kind: int) -> None:
    chain, gold = problem(2, 5, 4, kind)
    emissions = chain.emissions.clone()
    emissions[0, 3] = -INF
    broken = chain._replace(emissions=emissions)
    weights = torch.ones(2, device=DEVICE)
    for labels in (None, gold):
        values, saved = gpu.forward(broken, labels)
        slopes = gpu.backward(broken, saved, weights, labels)
        assert values[0] == -INF
        assert_close(values[1:], oracle(chain, weights, labels)[0][1:])
        assert all(torch.isfinite(slope).all() for slope in slopes)
    assert gpu.viterbi(broken)[0][0] == -INF
    assert (gpu.sample(broken, torch.rand(1, 2, 5, device=DEVICE)) < 4).all()


@here_only
@pytest.mark.parametrize("kind", [0, 2])
def test_equal_calls_are_equal_and_padding_is_inert(kind: int) -> None:
    chain, gold = problem(2, 5, 4, kind, scale=3.0, seed=1)
    weights = torch.tensor([0.3, -1.7], device=DEVICE)

    def everything(chain: Chain, gold: Tensor) -> list[Tensor]:
        values, saved = gpu.forward(chain, gold)
        return [values, *gpu.backward(chain, saved, weights, gold), *gpu.viterbi(chain)]

    past = torch.arange(5, device=DEVICE) >= chain.lengths[:, None]
    other = chain._replace(emissions=chain.emissions.masked_fill(past[:, :, None], INF))
    if kind == 2:
        other = other._replace(transitions=chain.transitions.masked_fill(past[:, 1:, None, None], 1e30))
    before = [part.clone() for part in chain]
    first, again = everything(chain, gold), everything(other, gold.masked_fill(past, 3))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, chain, strict=True))


@here_only
@pytest.mark.parametrize("kind", [0, PER_ITEM, 2])
def test_more_labels_than_registers_hold(kind: int) -> None:
    chain, gold = problem(1, 3, 130, kind)
    assert_right(chain, gold)
    uniforms = torch.rand(1, 1, 3, device=DEVICE, dtype=torch.float64)
    assert torch.equal(gpu.sample(chain, uniforms).cpu(), inverse_cdf(chain, uniforms))
    assert torch.equal(gpu.viterbi(chain)[1].cpu(), best_labels(chain))


@here_only
@pytest.mark.parametrize(("kind", "dtype"), [(0, torch.float32), (1, torch.float64), (2, torch.float32)])
def test_viterbi(kind: int, dtype: torch.dtype) -> None:
    for C, whole, forbid in ((5, True, 0.3), (17, False, 0.0)):  # whole numbers tie often
        chain, _ = problem(2, 8, C, kind, dtype, whole=whole, forbid=forbid)
        scores, labels = gpu.viterbi(chain)
        assert torch.equal(labels.cpu(), best_labels(chain))
        assert_close(scores, score(Chain(*(part.cpu().double() for part in chain[:4]), chain.lengths), labels.cpu()))


def inverse_cdf(chain: Chain, uniforms: Tensor) -> Tensor:
    """Samples by the definition, in float64."""
    plain = Chain(*(part.cpu().double() for part in chain[:4]), chain.lengths.cpu())
    uniforms = uniforms.cpu().double()
    labels = torch.full(uniforms.shape, -1)
    for b, length in enumerate(plain.lengths.tolist()):
        alphas = [plain.emissions[b, 0] + plain.start]
        for t in range(1, length):
            alphas.append(torch.logsumexp(alphas[-1][:, None] + matrix(plain, b, t - 1), 0) + plain.emissions[b, t])
        for s in range(len(uniforms)):
            logits = alphas[-1] + plain.end
            for t in reversed(range(length)):
                weights = logits.softmax(0)
                y = min(int((weights.cumsum(0) <= uniforms[s, b, t]).sum()), int(weights.nonzero().max()))
                labels[s, b, t] = y
                if t:
                    logits = alphas[t - 1] + matrix(plain, b, t - 1)[:, y]
    return labels


@here_only
@pytest.mark.parametrize("kind", [0, PER_ITEM, 2])
def test_samples_invert_the_distribution(kind: int) -> None:
    draw = torch.Generator().manual_seed(5)
    for scale, forbid in ((1.0, 0.4), (300.0, 0.0)):
        chain, _ = problem(2, 6, 5, kind, scale=scale, forbid=forbid)
        uniforms = torch.rand(3, 2, 6, dtype=torch.float64, generator=draw).to(DEVICE)
        if scale == 1.0:  # else labels of probability 1e-100 come first or last, which float32 does not know of
            uniforms[0] = 0.0
            uniforms[1] = 1.0 - 2**-53  # rounds to 1 in float32
        labels = gpu.sample(chain, uniforms).cpu()
        assert torch.equal(labels, inverse_cdf(chain, uniforms))


@here_only
@pytest.mark.parametrize("kind", [0, PER_ITEM, 2])
def test_edges_and_expectations_against_enumeration(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, _ = problem(2, 4, 3, kind, forbid=0.3, scale=2.0)
    monkeypatch.setattr(ops, "trusted_kernels", lambda *_: gpu)
    edges = ops.edge_marginals(chain).cpu()
    for other_kind in (0, 1, 2):
        other, _ = problem(2, 4, 3, other_kind, seed=1)
        other = other._replace(lengths=chain.lengths, emissions=other.emissions.nan_to_num())
        if other_kind == 2:
            other = other._replace(transitions=other.transitions.nan_to_num())
        found = ops.expectation(chain, other)
        for b in range(2):
            every, totals = labellings(chain, b)
            chances = totals.softmax(0)
            assert_close(found[b], (chances * labellings(other, b)[1]).sum(), 3)
            expected = torch.zeros(3, 3, 3, dtype=torch.float64)
            for y, chance in zip(every.tolist(), chances, strict=True):
                for t in range(len(y) - 1):
                    expected[t, y[t], y[t + 1]] += chance
            assert_close(edges[b], expected)


@here_only
@pytest.mark.parametrize("kind", [0, PER_ITEM, 2])
def test_low_memory(kind: int) -> None:
    chain, gold = problem(2, 7, 4, kind, scale=2.0)
    saved = assert_right(chain, gold, low_memory=True)
    assert saved.room.part(0).shape == (2, 2, 4, 4)


@here_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_first_emission_far_above_its_start_score(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # exp(e_1 - m_1) without the start score overflows: it must not meet the sums over moves.
    y = torch.tensor([[2, 0, 1, 1]], device=DEVICE)
    low = torch.full((3,), -1e4, dtype=dtype, device=DEVICE)
    emissions = low.expand(1, 4, 3).scatter(2, y.unsqueeze(-1), 1e4)
    chain = Chain(emissions, low.expand(3, 3).contiguous(), low, low, torch.tensor([4], device=DEVICE))
    values, saved = gpu.forward(chain)
    assert values.tolist() == [-1e4]
    _, moves, start, end = gpu.backward(chain, saved, torch.ones(1, dtype=dtype, device=DEVICE))
    assert moves.tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 0]]
    assert (start.tolist(), end.tolist()) == ([0, 0, 1], [0, 1, 0])
    monkeypatch.setattr(ops, "trusted_kernels", lambda *_: gpu)
    assert ops.expectation(chain, chain).tolist() == [-1e4]


@here_only
@pytest.mark.parametrize("label", [-1, 10**12])
def test_a_label_out_of_range_is_not_looked_up(label: int) -> None:
    chain, gold = problem(3, 6, 5, 0, torch.float64)
    expected = gpu.forward(chain, gold)[0]
    wrong = gold.clone()
    wrong[1, 0] = label
    values = gpu.forward(chain, wrong)[0]
    assert values.isnan().tolist() == [False, True, False]
    assert torch.equal(values[::2], expected[::2])


@here_only
@pytest.mark.parametrize(
    ("kind", "T", "dtype"), [(0, 29, torch.float32), pytest.param(1, 49, torch.float64, marks=pytest.mark.slow)]
)
def test_chunks_make_one_walk(kind: int, T: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_launch, "WARM_UP", 12)
    chain, gold = problem(2, T, 4, kind, dtype, seed=1)
    chain = chain._replace(emissions=3 * chain.emissions)  # what is seen counts for more than where one comes from
    chain.lengths[1] = 1
    assert assert_right(chain, gold, method="chunked").room.part(1).tolist() == [0] * 2
    with whole_walks_left_out(monkeypatch):
        values, _ = gpu.forward(chain, gold, method="chunked", keep=False)
        scores, labels = gpu.viterbi(chain, "chunked")
    assert_close(values, gpu.forward(chain, gold, method="sequential")[0])
    assert torch.equal(labels.cpu(), best_labels(chain))
    assert_close(scores, gpu.viterbi(chain, "sequential")[0])


@contextmanager
def whole_walks_left_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Walks from end to end are not launched; which items they would have been for."""
    asked: list[list[int]] = []
    start = launching.launch

    def spied(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> Any:
        if kernel is chain_walks.walk and not options["WARM_UP"]:
            asked.append(given[8].tolist())
            return None
        return start(kernel, grid, *given, **options)

    with monkeypatch.context() as context:
        context.setattr(launching, "launch", spied)
        context.setattr(launching, "_tapes", {})  # what is recorded without them must not be repeated by others
        yield asked


@here_only
@pytest.mark.parametrize("hindrance", ["early", "impossible", "risk"])
def test_chunks_that_do_not_fit_are_walked_again(hindrance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_launch, "WARM_UP", 8)
    chain, gold = problem(2, 20, 3, 0, scale=0.3, seed=5)
    parts = {"lengths": torch.tensor([20, 8], device=DEVICE), "emissions": chain.emissions.nan_to_num()}
    chain = chain._replace(**parts)
    gold = gold.clamp(min=0)
    if hindrance == "early":  # how far behind label 2 is only the very beginning tells
        moves = torch.zeros(3, 3)
        moves[2, :2] = moves[:2, 2] = -11.0
        chain = chain._replace(start=torch.tensor([0.0, 0.0, -50.0], device=DEVICE), transitions=moves.to(DEVICE))
    if hindrance == "impossible":
        chain.emissions[0, 4] = -INF
    if hindrance == "risk":
        chain.transitions[1, 2] = -INF
        gold.zero_()
    with whole_walks_left_out(monkeypatch) as asked:
        gpu.viterbi(chain, "chunked")
        gpu.forward(chain, method="chunked", keep=False)
    assert asked == ([[0, 0], [1, 1]] if hindrance == "risk" else [[1, 0], [1, 0]])
    scores, labels = gpu.viterbi(chain, "chunked")
    assert torch.equal(labels.cpu(), best_labels(chain))
    assert (scores[0] == -INF) == (hindrance == "impossible")
    if hindrance != "impossible":
        assert_right(chain, gold, method="chunked")
