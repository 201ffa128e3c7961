"""Segmentations obey every law of structures and equal their enumeration, whoever computes them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from contracts.structure import Case, StructureContract, same
from contracts.triton_kernels import DEVICE, here_only
from oracles import segments as oracle
from thalweg.inference.structures.semi_markov import SemiMarkov
from thalweg.kernels.reference import segments as reference

LENGTHS = (4, 1, 5)
STEPS, SIZE, MOST = 6, 2, 3


def items_of(case: Case) -> list[oracle.Item]:
    """What the enumeration takes, from `tolist()` of the tensors."""
    found, zeros = [], [0.0] * SIZE
    for b, length in enumerate(case.lengths.tolist()):
        parts = case.scores["parts"][b, :length].detach()
        durations, moves = case.scores["durations"].detach(), case.scores["moves"].detach()
        durations = durations if durations.dim() == 2 else durations[b]
        durations = durations[:length] if durations.dim() == 3 else durations
        moves = moves if moves.dim() == 2 else moves[b]
        start, end = (case.scores[name].tolist() if name in case.scores else zeros for name in ("start", "end"))
        content, begins = parts[:, 0].tolist(), parts[:, 1].tolist()
        found.append(oracle.Item(content, begins, durations.tolist(), moves.tolist(), start, end))
    return found


class SegmentContract(StructureContract):
    oracle = oracle
    part_scores = "parts"
    durations: tuple[int, ...] = (MOST, SIZE)
    moves: tuple[int, ...] = (SIZE, SIZE)
    edges = True
    seed = 0
    backend = "auto"

    def case(self, seed: int = 0, *, dtype: torch.dtype = torch.float64, constrained: bool = False) -> Case:
        generator = torch.Generator().manual_seed(seed + self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        scores = {"parts": draw(3, STEPS, 2, SIZE), "durations": draw(*self.durations), "moves": draw(*self.moves)}
        if self.edges:
            scores |= {"start": draw(SIZE), "end": draw(SIZE)}
        if constrained:
            scores["parts"][0, 1, 0, 1] = scores["parts"][2, 2, 1, 0] = scores["parts"][2, 4, 0, 1] = -math.inf
            scores["moves"][..., 1, 1] = -math.inf
            scores["durations"][..., 1, 0] = -math.inf
        return Case({name: x.to(self.device, dtype) for name, x in scores.items()}, torch.tensor(LENGTHS))

    def make(self, case: Case) -> SemiMarkov:
        content, begins = case.scores["parts"].unbind(2)
        edges = {name: case.scores[name] for name in ("start", "end") if name in case.scores}
        durations, moves = case.scores["durations"], case.scores["moves"]
        return SemiMarkov(content, durations, moves, begins=begins, lengths=case.lengths, backend=self.backend, **edges)

    def enumerate(self, case: Case):
        return [oracle.segmentations(item) for item in items_of(case)]

    def parts(self, y):
        return oracle.parts(y)

    def structure(self, row: Tensor):
        inside = [value for value in row.tolist() if value >= 0]
        firsts = [t for t, value in enumerate(inside) if value < SIZE]
        return tuple((f, p, inside[f]) for f, p in zip(firsts, [*firsts[1:], len(inside)], strict=False)) or None

    def tensor(self, case: Case, structures) -> Tensor:
        rows = torch.full((len(structures), STEPS), -1, device=self.device)
        for row, y in zip(rows, structures, strict=True):
            for first, past, label in y:
                row[first:past] = SIZE + label
                row[first] = label
        return rows

    def per_item(self, name: str) -> bool:
        return (
            name == "parts"
            or (name == "durations" and len(self.durations) > 2)
            or (name, len(self.moves)) == ("moves", 3)
        )

    def padding(self, case: Case):
        outside = (torch.arange(STEPS) >= case.lengths.unsqueeze(1)).to(self.device)
        masks = {"parts": outside[:, :, None, None].expand_as(case.scores["parts"])}
        if len(self.durations) == 4:
            masks["durations"] = outside[:, :, None, None].expand_as(case.scores["durations"])
        return masks

    def shifted(self, case: Case, constant: float):
        parts = case.scores["parts"].clone()
        parts[:, 0, 1] += constant
        return Case({**case.scores, "parts": parts}, case.lengths)

    def infeasible(self, case: Case, item: int):
        parts = case.scores["parts"].clone()
        parts[item, LENGTHS[item] - 1, 0] = -math.inf
        return Case({**case.scores, "parts": parts}, case.lengths)


class TestCompiled(SegmentContract):
    backend = "cpu"


class TestCompiledWithScoresOfEachItem(SegmentContract):
    durations, moves, edges, backend = (3, MOST, SIZE), (3, SIZE, SIZE), False, "cpu"


@here_only
class TestGPU(SegmentContract):
    backend, device = "gpu", DEVICE


@here_only
class TestGPUWithScoresOfEachItem(SegmentContract):
    durations, moves, edges, backend, device = (3, MOST, SIZE), (3, SIZE, SIZE), False, "gpu", DEVICE


class TestReference(SegmentContract):
    backend = "reference"


class TestScoresOfEachSegment(SegmentContract):
    durations, edges, seed = (3, STEPS, MOST, SIZE), False, 20


LAWS = (
    "test_second_derivatives_are_covariances_of_parts",
    "test_top_k_is_sorted_distinct_and_equals_enumeration",
    "test_samples_follow_the_distribution",
    "test_divergence_and_cross_entropy",
)


@pytest.mark.parametrize("law", LAWS)
def test_blocks_that_are_gone_through_twice(law, monkeypatch):
    """Blocks of two positions, of which nothing but their edges is kept for a backward pass."""
    monkeypatch.setattr(reference, "BLOCK", 1)
    getattr(TestReference(), law)()


def test_the_oracle_can_fail():
    """A twin of the recursion that lets segments grow one position too long is not what the enumeration says."""
    contract = TestCompiled()
    case = contract.case()
    longer = torch.cat((case.scores["durations"], case.scores["durations"][-1:]))
    broken = contract.make(Case({**case.scores, "durations": longer}, case.lengths))
    with pytest.raises(AssertionError):
        same(broken.log_partition, [oracle.log_partition(w) for w in contract.enumerate(case)])
