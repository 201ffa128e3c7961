"""The likelihood of few chains on the guess that none needs logarithms, and what comes after a wrong one.

On a GPU, else in a process with Triton's interpreter.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.gpu_chains import INF, assert_close, oracle, problem
from contracts.triton_kernels import DEVICE, INTERPRETED, RUNS, here_only, needs_triton
from thalweg.errors import InfeasibleError, ShapeError
from thalweg.inference import LinearChain
from thalweg.kernels import chain as ops
from thalweg.kernels.potentials import Chain
from thalweg.layers import CRF

pytestmark = [
    needs_triton,
    # The interpreter computes with NumPy, which says so where an item that turns out bad is divided by nothing.
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]
if RUNS:
    from thalweg.kernels.gpu import chain as gpu
    from thalweg.kernels.gpu import chain_launch, launching, mailbox

FOUR = ["prepare", "recurse", "posterior", "finish"]
REST = ["log_recurse", "posterior", "log_posterior", "finish"]
SIX = ["prepare", "recurse", *REST]


class Forgetful(dict[Any, Any]):
    """Keeps nothing, so that every launch is seen."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels by name as they are launched, in memory that was not clear; chains go to them wherever they lie."""
    names: list[str] = []
    start = launching.launch

    def spied(kernel, grid, *arguments, **options):
        names.append(kernel.fn.__name__)
        return start(kernel, grid, *arguments, **options)

    room = launching.Room.like

    def filled(*given: Any) -> Any:
        made = room(*given)
        made.memory.fill_(171)
        return made

    monkeypatch.setattr(launching.Room, "like", filled)
    monkeypatch.setattr(launching, "_tapes", Forgetful())
    monkeypatch.setattr(launching, "launch", spied)
    monkeypatch.setattr(chain_launch, "SEEN", 16)
    monkeypatch.setattr(ops, "trusted_kernels", lambda backend, chain: gpu)
    return names


def leaves_of(chain: Chain) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in chain[:4]]  # type: ignore[union-attr]


def built(leaves: list[Tensor], chain: Chain, **options: bool) -> LinearChain:
    emissions, moves, start, end = leaves
    return LinearChain(emissions, moves, start=start, end=end, lengths=chain.lengths, **options)


def lost() -> tuple[Chain, Tensor]:
    """A shared matrix of which much is forbidden; item 1 loses half of its mass walking either way, the others none."""
    T = 16
    emissions = torch.randn(2, T, 2, generator=torch.Generator().manual_seed(1))
    emissions[1, :, 0] = 0.0
    emissions[1, :2, 1] = emissions[1, -2:, 1] = -60.0
    emissions[1, 2:-2, 1] = 20.0
    moves, none = torch.tensor([[0.0, -INF], [-INF, 0.0]]), torch.zeros(2)
    parts = (x.to(DEVICE) for x in (emissions, moves, none, none.clone()))
    return Chain(*parts, torch.tensor([5, T], device=DEVICE)), torch.zeros(2, T, device=DEVICE).long()


def one_wide() -> tuple[Chain, Tensor]:
    """Matrices of their own, that of item 2 so wide that it takes logarithms."""
    chain, gold = problem(4, 6, 4, 1, seed=2)
    assert isinstance(chain.transitions, Tensor)
    chain.transitions[2] *= 300.0
    return chain, gold


Case = Callable[[], tuple[Chain, Tensor]]
RIGHT: dict[str, Case] = {
    "shared": lambda: problem(3, 7, 5, 0),
    "double": lambda: problem(3, 7, 5, 0, torch.float64),
    "per item": lambda: problem(3, 7, 5, 1),
    "per item, double": lambda: problem(1, 3, 17, 1, torch.float64),
    "forbidden moves": lambda: problem(3, 8, 6, 0, forbid=0.4),
    "one of each": lambda: problem(1, 1, 1, 0),
    "one label": lambda: problem(2, 4, 1, 0),
    "one step": lambda: problem(3, 1, 4, 0),
    "more items than one look": lambda: problem(18, 2, 2, 0),
    "two blocks of labels": lambda: problem(1, 3, 70, 0),
}
WRONG: dict[str, Case] = {
    "risky": lambda: problem(2, 6, 4, 0, scale=300.0),
    "risky, double": lambda: problem(2, 6, 4, 0, torch.float64, scale=1e4),
    "lost": lost,
    "one of several matrices": one_wide,
}


@here_only
@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_values_and_gradients(name: str, launched: list[str]) -> None:
    chain, gold = (RIGHT | WRONG)[name]()
    unit = torch.full((len(chain.lengths),), -1.0).to(chain.emissions)
    factor = 4 if name in RIGHT else 120
    for _ in range(1 + (name in ("shared", "one of several matrices"))):  # and again at once
        leaves = leaves_of(chain)
        launched.clear()
        values = built(leaves, chain).log_prob(gold)
        assert launched == (FOUR if name in RIGHT else FOUR + REST)
        expected, slopes = oracle(chain, unit, gold)
        assert_close(values.detach(), -expected, factor / 2)
        found = torch.autograd.grad(-values.sum(), leaves)
        scaled = ["scale"] * (DEVICE == "cuda")
        assert launched[len(FOUR) :] == ([] if name in RIGHT else REST) + scaled, "the gradient was there"
        for one, wanted in zip(found, slopes, strict=True):
            assert_close(one, -wanted, factor)


@here_only
@pytest.mark.parametrize("name", ["shared", "lost", "one of several matrices"])
def test_what_was_kept_serves_other_weights(name: str, launched: list[str]) -> None:
    chain, gold = (RIGHT | WRONG)[name]()
    leaves, weights = leaves_of(chain), torch.linspace(0.5, -1.5, len(chain.lengths)).to(chain.emissions)
    values = built(leaves, chain).log_prob(gold)
    launched.clear()
    found = torch.autograd.grad(values, leaves, weights)
    assert launched == ["posterior", "log_posterior", "finish"]
    for one, wanted in zip(found, oracle(chain, -weights, gold)[1], strict=True):
        assert_close(one, wanted, 4 if name in RIGHT else 120)


@here_only
@pytest.mark.parametrize("name", ["double", "per item", "lost"])
def test_totals(name: str, launched: list[str]) -> None:
    chain, gold = (RIGHT | WRONG)[name]()
    leaves = leaves_of(chain)
    total = built(leaves, chain).total_log_prob(gold)
    assert launched == (FOUR if name in RIGHT else FOUR + REST)
    assert total.shape == ()
    expected, slopes = oracle(chain, torch.ones(len(gold)).to(chain.emissions), gold)
    factor = 4 if name in RIGHT else 120
    assert_close(total.detach(), -expected.sum(), factor)
    for one, wanted in zip(torch.autograd.grad(total * 3, leaves), slopes, strict=True):
        assert_close(one, -3 * wanted, 3 * factor)


@here_only
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_the_loss_of_a_layer(scale: float, launched: list[str]) -> None:
    chain, gold = problem(3, 6, 4, 0, scale=scale)
    mask = torch.arange(6, device=DEVICE) < chain.lengths[:, None]
    layer = CRF(4, batch_first=True).to(DEVICE)
    with torch.no_grad():
        layer.transitions.copy_(chain.transitions)  # type: ignore[arg-type]
        layer.start_transitions.copy_(chain.start)
        layer.end_transitions.copy_(chain.end)
    emissions = chain.emissions.nan_to_num().requires_grad_()
    loss = -layer(emissions, gold.clamp(min=0), mask)
    assert launched[-4:] == (FOUR if scale == 1.0 else REST)
    loss.backward()
    expected, slopes = oracle(chain, torch.ones(3, device=DEVICE), gold)
    assert_close(loss.detach(), expected.sum(), 60)
    found = (emissions, layer.transitions, layer.start_transitions, layer.end_transitions)
    for one, wanted in zip(found, slopes, strict=True):
        assert one.grad is not None
        assert_close(one.grad, wanted, 120)


@here_only
def test_an_infeasible_item_is_named(launched: list[str]) -> None:
    (chain, gold), item = problem(18, 2, 2, 0), 17
    chain.emissions[item, 0] = -INF
    with pytest.raises(InfeasibleError, match=rf"\b{item}\b"):
        built(leaves_of(chain), chain).log_prob(gold)
    assert launched == FOUR + REST


@here_only
@pytest.mark.parametrize("label", [5, -(10**12)])
def test_a_label_out_of_range_is_named(label: int, launched: list[str]) -> None:
    chain, gold = problem(2, 4, 5, 0)
    gold[1, 0] = label
    with pytest.raises(ShapeError, match=rf"got {label} at position 0 of batch item 1"):
        built(leaves_of(chain), chain).log_prob(gold)
    assert launched == FOUR + REST
    with pytest.raises(ShapeError, match=rf"got {label} at position 0 of batch item 1"):
        built(leaves_of(chain), chain).total_log_prob(gold)


@here_only
@pytest.mark.parametrize("where", ["emissions", "later emissions", "transitions"])
def test_what_is_not_a_number_is_as_without_a_guess(where: str, launched: list[str]) -> None:
    chain, gold = problem(3, 6, 5, 1)
    good = oracle(chain, torch.ones(3).to(chain.emissions), gold)[0]
    chain.lengths[1] = 4
    if where == "transitions":
        assert isinstance(chain.transitions, Tensor)
        chain.transitions[1, 3, 2] = float("nan")
    else:
        chain.emissions[1, 3 if where == "later emissions" else 0, 2] = float("nan")
    found, wanted = gpu.at_once(chain, gold, False, True), gpu.at_once(chain, gold, False)
    assert found is not None
    assert wanted is not None
    assert found[3] is not None
    assert not found[3].settled()
    assert launched == FOUR + SIX + REST
    for one, other in zip((found[0], *found[2]), (wanted[0], *wanted[2]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert not found[0][1].isfinite()
    assert_close(found[0][::2], -good[::2])


@here_only
def test_who_does_not_look_is_not_waited_for(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox.Letter, "read", lambda letter: pytest.fail("no one waits"))
    chain, gold = problem(3, 7, 5, 0)
    leaves = leaves_of(chain)
    values = built(leaves, chain, validate_args=False).log_prob(gold)
    assert launched == SIX
    torch.autograd.grad(-values.sum(), leaves)
    assert launched == SIX + ["scale"] * (DEVICE == "cuda")
    launched.clear()
    gpu.at_once(chain, None, True)
    assert launched == SIX


@here_only
def test_graphs_and_large_batches_are_not_guessed(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chain, gold = problem(3, 7, 5, 0)
    with monkeypatch.context() as context:
        context.setattr(gpu, "_captured", lambda x: True)
        found = gpu.at_once(chain, gold, False, True)
    assert found is not None
    assert found[3] is None
    monkeypatch.setattr(gpu, "MOST_SEEN", 2)
    found = gpu.at_once(chain, gold, False, True)
    assert found is not None
    assert found[3] is None
    assert launched == SIX + SIX
    launched.clear()
    stepwise, gold = problem(2, 4, 3, 2)
    found = gpu.at_once(stepwise, gold, False, True)
    assert found is not None
    assert found[3] is None
    assert launched == ["prepare", "log_recurse", "log_posterior", "finish"]


@here_only
@pytest.mark.parametrize("forbid", [0.0, 0.3])
def test_chunks(forbid: float, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chains keep the launches they have for themselves; only those of logarithms are left out."""
    monkeypatch.setattr(chain_launch, "WARM_UP", 8)
    plan_of = chain_launch.plan_of
    monkeypatch.setattr(gpu, "plan_of", lambda chain: plan_of(chain, "chunked"))
    chain, gold = problem(1, 19, 4, 0, forbid=forbid)
    found = gpu.at_once(chain, gold, False, True)
    assert found is not None
    values, saved, slopes, guess = found
    assert guess is not None
    assert guess.settled()
    assert launched == ["prepare", "recurse", "join", "recurse", "posterior", "finish"]
    assert saved.flags.tolist() == [0]
    expected, wanted = oracle(chain, torch.full((1,), -1.0).to(chain.emissions), gold)
    assert_close(values, -expected)
    for one, other in zip(slopes, wanted, strict=True):
        assert_close(one, other, 4)


@here_only
@pytest.mark.parametrize("name", ["shared", "lost"])
def test_derivatives_of_derivatives(name: str, launched: list[str]) -> None:
    chain, gold = (RIGHT | WRONG)[name]()
    chain = chain._replace(emissions=chain.emissions.nan_to_num())
    found = []
    for backend in ("auto", "reference"):
        leaves = leaves_of(chain)
        made = LinearChain(leaves[0], leaves[1], start=leaves[2], end=leaves[3], lengths=chain.lengths, backend=backend)
        values = made.log_prob(gold.clamp(min=0))
        slope = torch.autograd.grad(values.sum(), leaves[0], create_graph=True)[0]
        found.append([slope.detach(), *torch.autograd.grad((slope**2).sum(), (leaves[0], leaves[2]))])
    assert "posterior" in launched
    for one, wanted in zip(*found, strict=True):
        assert_close(one, wanted, 30)


@here_only
@pytest.mark.parametrize(("size", "kind"), [((3, 130, 3), 0), ((2, 3, 40), 1), ((2, 4, 5), 2), ((1, 1, 1), 2)])
def test_gradients_are_multiplied_in_one_launch(size: tuple[int, int, int], kind: int, launched: list[str]) -> None:
    draw = torch.Generator().manual_seed(0)
    chain, _ = problem(*size, kind, torch.float64)
    slopes = tuple(torch.randn(x.shape, dtype=x.dtype, generator=draw).to(DEVICE) for x in chain[:4])  # type: ignore
    wanted = [-1.5 * x for x in slopes]
    weights = torch.tensor([9.0, -1.5], dtype=torch.float64, device=DEVICE)[1]
    gpu._scale(slopes, weights.expand(size[0]))
    assert launched == ["scale"]
    assert all(torch.equal(one, other) for one, other in zip(slopes, wanted, strict=True))
    gpu._scale(slopes, weights)
    assert all(torch.equal(one, -1.5 * other) for one, other in zip(slopes, wanted, strict=True))


@here_only
def test_a_guess_that_no_one_settles_gives_its_place_back(launched: list[str]) -> None:
    chain, gold = problem(2, 3, 2, 0)
    box = mailbox.mailbox_of(chain.emissions.device)
    found = gpu.at_once(chain, gold, False, True)
    if not INTERPRETED:
        torch.cuda.synchronize()
    free, late = len(box.free), len(box.late)
    del found
    gc.collect()
    assert (len(box.free), len(box.late)) == (free + 1, late)


@here_only
def test_the_place_is_free_though_the_graph_lives(launched: list[str]) -> None:
    chain, gold = problem(2, 3, 2, 0)
    leaves = leaves_of(chain)
    built(leaves, chain).log_prob(gold)
    box = mailbox.mailbox_of(chain.emissions.device)
    free = len(box.free)
    kept = [built(leaves, chain).log_prob(gold) for _ in range(3)]
    assert len(box.free) == free
    assert len({float(x.sum().detach()) for x in kept}) == 1


@here_only
@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one kernel at a time")
def test_several_threads() -> None:
    problems = [problem(3, 9, 4, 0, scale=(1.0, 300.0)[seed % 2], seed=seed) for seed in range(8)]
    wanted = [-oracle(chain, chain.emissions.new_ones(3), gold)[0] for chain, gold in problems]

    def calls(number: int) -> float:
        worst = 0.0
        for _ in range(40):
            chain, gold = problems[number]
            values = built(leaves_of(chain), chain).log_prob(gold).detach()
            off = (values.cpu().double() - wanted[number]).abs() / wanted[number].abs().clamp(min=1)
            worst = max(worst, float(off.max()))
        return worst

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(calls, range(8))) < 1e-4
