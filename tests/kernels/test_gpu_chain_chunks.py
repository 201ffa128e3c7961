"""Viterbi in chunks equals Viterbi from end to end: on a GPU, else in a process with Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contracts.gpu_chains import INF, best_labels, problem
from contracts.triton_kernels import DEVICE, RUNS, here_only, needs_triton
from thalweg.kernels.potentials import Chain

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import chain as gpu
    from thalweg.kernels.gpu import chain_launch, launching


class Spy:
    """In the place of a kernel: what it is told of the items that must be walked again."""

    def __init__(self) -> None:
        self.redo: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def start(*given: Tensor, **options: object) -> None:
            self.redo = given[7].tolist()

        return start


def walked_again(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Tensor]:
    """Which items the chunks leave to the ordinary walk, and their labels without it."""
    with monkeypatch.context() as context:
        walk, back = Spy(), Spy()
        context.setattr(gpu.chain_decode, "max_walk", walk)
        context.setattr(gpu.chain_decode, "trace", back)
        context.setattr(launching, "_tapes", {})  # what is recorded without them must not be repeated by others
        labels = gpu.viterbi(chain, "chunked")[1].cpu()
    assert walk.redo == back.redo
    return walk.redo, labels


@here_only
@pytest.mark.parametrize(
    ("kind", "T", "dtype"), [(0, 61, torch.float32), (1, 49, torch.float64), (0, 12, torch.float32)]
)
def test_chunks_find_the_best_labels(kind: int, T: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_launch, "WARM_UP", 12)
    chain, _ = problem(4, T, 5, kind, dtype, seed=T)
    chain = chain._replace(emissions=4 * chain.emissions)  # what is seen counts for more than where one comes from
    chain.lengths[1] = 1
    expected = best_labels(chain)
    again, labels = walked_again(chain, monkeypatch)
    assert again == [0] * 4
    assert torch.equal(labels, expected)
    scores, labels = gpu.viterbi(chain, "chunked")
    one_by_one, others = gpu.viterbi(chain, "sequential")
    assert torch.equal(labels.cpu(), expected)
    assert torch.equal(others, labels)
    torch.testing.assert_close(scores, one_by_one, rtol=1e-6, atol=1e-6)


@here_only
@pytest.mark.parametrize("forbid", [0.0, 0.4])
def test_of_equals_the_lowest(forbid: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of whole numbers are exact, and equal ones many."""
    monkeypatch.setattr(chain_launch, "WARM_UP", 8)
    chain, _ = problem(3, 45, 4, 0, whole=True, forbid=forbid, seed=3)
    assert torch.equal(gpu.viterbi(chain, "chunked")[1].cpu(), best_labels(chain))


@here_only
@pytest.mark.parametrize("hindrance", ["early", "late", "impossible"])
def test_what_does_not_fit_is_walked_again(hindrance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_launch, "WARM_UP", 8)
    chain, _ = problem(2, 40, 3, 0, scale=0.3, seed=5)
    chain = chain._replace(lengths=torch.tensor([40, 8], device=DEVICE))
    if hindrance == "early":  # the ways back agree, but how far behind label 2 is only the very beginning tells
        moves = torch.zeros(3, 3)
        moves[2, :2] = moves[:2, 2] = -INF
        seen = torch.tensor([0.0, 3.0, -1.0]).expand(2, 40, 3).contiguous()
        start = torch.tensor([0.0, 0.0, -50.0])
        chain = Chain(*(x.to(DEVICE) for x in (seen, moves, start, torch.zeros(3))), chain.lengths)
    if hindrance == "late":  # all labels are as good, and kept, until the very end, where the ways back part
        end = torch.tensor([0.0, 100.0, 0.0])
        parts = (torch.zeros(2, 40, 3), 5 * torch.eye(3), torch.zeros(3), end)
        chain = Chain(*(x.to(DEVICE) for x in parts), chain.lengths)
    if hindrance == "impossible":
        chain.emissions[0, 20] = -INF
    assert walked_again(chain, monkeypatch)[0] == [1, 0]
    scores, labels = gpu.viterbi(chain, "chunked")
    expected, wanted = gpu.viterbi(chain, "sequential")
    assert torch.equal(labels, wanted)
    torch.testing.assert_close(scores, expected)
    assert torch.isneginf(scores[0]) == (hindrance == "impossible")
    if hindrance != "impossible":
        assert set(labels[0].tolist()) == {1}
