"""A structure that gives its recursion and its parts alone has the whole contract."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import Tensor

from contracts import segmentations
from contracts.segmentations import Segmentations
from contracts.structure import Case, StructureContract
from oracles import chains as oracle
from thalweg.errors import ShapeError
from thalweg.inference import LinearChain
from thalweg.inference.structures.base import Structure

LENGTHS = (4, 1, 5)
MOST = 3


def cuts(length: int) -> list[tuple[int, ...]]:
    """All ways to write a length as a sum of segments."""
    if length == 0:
        return [()]
    return [(*rest, last) for last in range(1, min(length, MOST) + 1) for rest in cuts(length - last)]


def ends(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where each segment ends, and its size less 1."""
    return [(sum(sizes[: i + 1]) - 1, size - 1) for i, size in enumerate(sizes)]


class TestSegmentations(StructureContract):
    oracle = oracle
    part_scores = "scores"

    def case(self, seed: int = 0, *, dtype: torch.dtype = torch.float64, constrained: bool = False) -> Case:
        scores = torch.randn(len(LENGTHS), max(LENGTHS), MOST, generator=torch.Generator().manual_seed(seed)).double()
        if constrained:
            scores[0, 2, 2] = scores[2, 1, 1] = scores[2, 4, 0] = -math.inf
        return Case({"scores": scores.to(dtype)}, torch.tensor(LENGTHS))

    def make(self, case: Case) -> Segmentations:
        return Segmentations(case.scores["scores"], case.lengths)

    def enumerate(self, case: Case):
        rows = case.scores["scores"].detach().tolist()
        weighted = [
            [(y, math.fsum(row[t][k] for t, k in ends(y))) for y in cuts(length)]
            for row, length in zip(rows, case.lengths.tolist(), strict=True)
        ]
        return [[(y, s) for y, s in each if s > -math.inf] for each in weighted]

    def parts(self, y):
        return ends(y)

    def structure(self, row: Tensor):
        return tuple(size for size in row.tolist() if size > 0) or None

    def tensor(self, case: Case, structures):
        rows = torch.full((len(structures), max(LENGTHS)), -1)
        for row, y in zip(rows, structures, strict=True):
            row[: sum(y)] = 0
            for t, k in ends(y):
                row[t] = k + 1
        return rows

    def per_item(self, name: str) -> bool:
        return True

    def padding(self, case: Case):
        outside = torch.arange(max(LENGTHS)) >= case.lengths.unsqueeze(1)
        return {"scores": outside.unsqueeze(-1).expand_as(case.scores["scores"])}

    def shifted(self, case: Case, constant: float):
        # Whatever the segments, their sizes add up to the length.
        share = torch.arange(1, MOST + 1).double() * constant / case.lengths[:, None, None]
        return case.map(lambda _, tensor: tensor + share)

    def infeasible(self, case: Case, item: int):
        scores = case.scores["scores"].clone()
        scores[item, LENGTHS[item] - 1] = -math.inf
        return Case({"scores": scores}, case.lengths)


def test_the_small_structure_is_small() -> None:
    assert len(inspect.getsource(segmentations).splitlines()) < 60


def test_what_follows_equals_the_kernels_of_chains() -> None:
    """Everything that the base derives from the recursion, beside the chain's own ways."""
    torch.manual_seed(0)
    lengths = torch.tensor([4, 1, 3])
    chain = LinearChain(
        torch.randn(3, 4, 3, dtype=torch.float64),
        torch.randn(3, 3, dtype=torch.float64),
        start=torch.randn(3, dtype=torch.float64),
        lengths=lengths,
    )
    base = Structure
    for name in ("log_partition", "marginals", "mode", "max_score"):
        torch.testing.assert_close(getattr(base, name).fget(chain), getattr(chain, name))
    for one, two in zip(base.top_k(chain, 4), chain.top_k(4), strict=True):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(base.entropy(chain), chain.entropy())
    other = chain.tempered(2.0)
    torch.testing.assert_close(base.cross_entropy(chain, other), chain.cross_entropy(other))
    torch.testing.assert_close(base.kl_divergence(chain, other), chain.kl_divergence(other))
    noise = torch.randn(5, 3, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(base._modes_under(chain, noise), chain._modes_under(noise))
    torch.testing.assert_close(base._marginals_under(chain, noise, 0.5), chain._marginals_under(noise, 0.5))
    drawn = base.sample(chain, (4000,), generator=torch.Generator().manual_seed(0))
    seen = chain.parts_of(drawn).mean(0)
    assert (seen - chain.marginals).abs().max() < 0.05


def test_wrong_scores_are_told_of() -> None:
    scores = torch.zeros(2, 3, 2)
    scores[1, 1, 0] = math.inf
    structure = Segmentations(scores, torch.tensor([3, 2]))
    for ask in (lambda: structure.log_partition, lambda: structure.mode, lambda: structure.sample(), structure.entropy):
        with pytest.raises(ShapeError, match=r"below \+inf, got \+inf at \(1, 1, 0\)"):
            ask()
    assert Segmentations(scores, torch.tensor([3, 1])).log_partition.isfinite().all()
    scores[1, 1, 0] = math.nan
    assert structure.log_partition.isnan().tolist() == [False, True]
