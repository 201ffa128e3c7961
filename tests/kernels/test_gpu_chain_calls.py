"""What users call, on the kernels of chains: which launches it takes, and what of it fails for some items only.

On a GPU, else in a process with Triton's interpreter.
"""

from __future__ import annotations

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

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import chain as gpu
    from thalweg.kernels.gpu import launching

SIX = ["prepare", "walk", "log_walk", "posterior", "log_posterior", "finish"]
LOGS = ["prepare", "log_walk", "log_posterior", "finish"]


class Forgetful(dict[Any, Any]):
    """Keeps nothing, so that every launch is seen."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels by name as they are launched; chains go to them wherever they lie."""
    names: list[str] = []
    start = launching.launch

    def spied(kernel, grid, *arguments, **options):
        names.append(kernel.fn.__name__)
        return start(kernel, grid, *arguments, **options)

    monkeypatch.setattr(launching, "_tapes", Forgetful())
    monkeypatch.setattr(launching, "launch", spied)
    monkeypatch.setattr(ops, "trusted_kernels", lambda backend, chain: gpu)
    return names


def leaves_of(chain: Chain) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in chain[:4]]  # type: ignore[union-attr]


def built(leaves: list[Tensor], chain: Chain, **options: Any) -> LinearChain:
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


# Sizes of which each is the smallest of its kind: several blocks of items, of labels, of positions.
Case = tuple[Callable[[], tuple[Chain, Tensor]], list[str], float]
CASES: dict[str, Case] = {
    "double": (lambda: problem(3, 5, 3, 0, torch.float64), SIX, 4),
    "per step": (lambda: problem(2, 4, 3, 2), LOGS, 4),
    "many items": (lambda: problem(33, 1, 2, 0), SIX, 8),
    "two blocks of labels": (lambda: problem(1, 2, 70, 0), SIX, 4),
    "two blocks of positions": (lambda: problem(1, 34, 3, 0), SIX, 8),
    "risky": (lambda: problem(2, 6, 4, 0, torch.float64, scale=1e4), SIX, 120),
    "lost": (lost, SIX, 120),
    "one of several matrices": (one_wide, SIX, 120),
}


@here_only
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_at_once(name: str, launched: list[str]) -> None:
    make, kernels, factor = CASES[name]
    chain, gold = make()
    leaves = leaves_of(chain)
    values = built(leaves, chain).log_prob(gold)
    assert launched == kernels
    expected, slopes = oracle(chain, torch.ones(len(gold)), gold)
    assert_close(values.detach(), -expected, factor)
    found = torch.autograd.grad(-3.0 * values.sum(), leaves, retain_graph=True)
    assert launched == kernels, "the gradient was there"
    for one, wanted in zip(found, slopes, strict=True):
        assert_close(one, 3.0 * wanted, 3 * factor)
    if name in ("double", "lost"):  # what was kept serves other weights
        weights = torch.linspace(0.5, -1.5, len(gold)).to(values)
        for one, wanted in zip(
            torch.autograd.grad(values, leaves, weights), oracle(chain, -weights, gold)[1], strict=True
        ):
            assert_close(one, wanted, factor)
        assert launched == kernels + kernels[3:]


@here_only
def test_launches_of_the_rest(launched: list[str]) -> None:
    """No more than there must be, and the sum of a batch in one of them."""
    chain, gold = problem(3, 7, 5, 0)
    leaves = leaves_of(chain)
    total = built(leaves, chain, validate_args=False).total_log_prob(gold)
    assert_close(total.detach(), -oracle(chain, torch.ones(3), gold)[0].sum(), 4)
    assert launched == SIX
    for call, kernels in (
        (lambda: gpu.forward(chain, gold, keep=False), SIX[:3]),
        (lambda: gpu.viterbi(chain), ["walk", "way_back"]),
        (lambda: gpu.sample(chain, torch.rand(2, 3, 7, device=DEVICE)), [*SIX[:3], "way_back"]),
        (lambda: gpu.viterbi(chain, "chunked"), ["walk", "join", "walk", "way_back"]),
    ):
        launched.clear()
        call()
        assert launched == kernels


@here_only
def test_the_loss_of_a_layer(launched: list[str]) -> None:
    chain, gold = problem(3, 6, 4, 0, scale=300.0)
    mask = torch.arange(6, device=DEVICE) < chain.lengths[:, None]
    layer = CRF(4, batch_first=True).to(DEVICE)
    with torch.no_grad():
        layer.transitions.copy_(chain.transitions)  # type: ignore[arg-type]
        layer.start_transitions.copy_(chain.start)
        layer.end_transitions.copy_(chain.end)
    emissions = chain.emissions.nan_to_num().requires_grad_()
    loss = -layer(emissions, gold.clamp(min=0), mask)
    loss.backward()
    expected, slopes = oracle(chain, torch.ones(3, device=DEVICE), gold)
    assert_close(loss.detach(), expected.sum(), 60)
    found = (emissions, layer.transitions, layer.start_transitions, layer.end_transitions)
    for one, wanted in zip(found, slopes, strict=True):
        assert one.grad is not None
        assert_close(one.grad, wanted, 120)


@here_only
def test_what_is_wrong_is_named(launched: list[str]) -> None:
    chain, gold = problem(2, 4, 5, 0)
    for label in (5, -(10**12)):
        gold[1, 0] = label
        with pytest.raises(ShapeError, match=rf"got {label} at position 0 of batch item 1"):
            built(leaves_of(chain), chain).total_log_prob(gold)
    gold[1, 0] = 0
    chain.emissions[1, 0] = -INF
    with pytest.raises(InfeasibleError, match=r"\b1\b"):
        built(leaves_of(chain), chain).log_prob(gold)


@here_only
@pytest.mark.parametrize("where", ["emissions", "transitions"])
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_what_is_not_a_number_spoils_its_item_alone(where: str) -> None:
    chain, gold = problem(3, 6, 5, 1)
    good = oracle(chain, torch.ones(3), gold)[0]
    chain.lengths[1] = 4
    assert isinstance(chain.transitions, Tensor)
    (chain.transitions if where == "transitions" else chain.emissions)[1, 3, 2] = float("nan")
    values = gpu.forward(chain, gold.clamp(min=0))[0]
    assert values.isfinite().tolist() == [True, False, True]
    assert_close(values[::2], good[::2], 2)


@here_only
def test_derivatives_of_derivatives(launched: list[str]) -> None:
    chain, gold = problem(2, 4, 3, 0, torch.float64)
    chain = chain._replace(emissions=chain.emissions.nan_to_num())
    found = []
    for backend in ("auto", "reference"):
        leaves = leaves_of(chain)
        values = built(leaves, chain, backend=backend).log_prob(gold.clamp(min=0))
        slope = torch.autograd.grad(values.sum(), leaves[0], create_graph=True)[0]
        found.append([slope.detach(), *torch.autograd.grad((slope**2).sum(), (leaves[0], leaves[2]))])
    assert "posterior" in launched
    for one, wanted in zip(*found, strict=True):
        assert_close(one, wanted, 30)


@here_only
def test_repeated_calls_give_what_the_first_gave() -> None:
    """The same shapes again, with other scores, one tensor in two places, and tensors that begin anywhere."""
    for seed in range(3):
        chain, gold = problem(2, 3, 3, 0, seed=seed)
        if seed == 0:
            chain = chain._replace(start=chain.end)
        if seed == 2:
            odd = torch.cat([chain.start.new_zeros(1), chain.emissions.flatten()])[1:].view_as(chain.emissions)
            chain = chain._replace(emissions=odd)
        weights = torch.rand(2).to(DEVICE)
        values, saved = gpu.forward(chain, gold, sign=-1)
        expected, slopes = oracle(chain, weights, gold)
        assert_close(-values, expected, 2)
        for one, wanted in zip(gpu.backward(chain, saved, weights, gold), slopes, strict=True):
            assert_close(one, wanted, 4)


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
