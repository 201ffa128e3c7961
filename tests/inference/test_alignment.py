"""Alignments under the laws of all structures, beside enumeration in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from contracts.structure import Case, StructureContract, same
from contracts.triton_kernels import DEVICE, RUNS
from oracles import alignments, chains
from thalweg.errors import ConfigError, InfeasibleError, ShapeError
from thalweg.inference import Alignment

INF = math.inf
CHUNKS = ((1, 1), (2, 1), (1, 2), (1, 0))
ROWS_ALONE = ((1, 0), (1, 1), (2, 1))  # every move goes on by a row: sweeps are rows
KINDS = {
    "edits": {},
    "chunks": {"moves": CHUNKS},
    "rows": {"moves": ROWS_ALONE},
    "local": {"local": True},
    "banded": {"band": 1},
}
SIZES = {"rows": ((3, 2), (2, 1), (2, 2)), "local": ((2, 1), (1, 1), (1, 2)), "chunks": ((3, 2), (2, 2), (3, 3))}
BACKENDS = ("reference", "cpu", *(["gpu"] if RUNS else []))
# The reference is the same code for every kind of grid, and slower.
CASES = [(k, b) for k in KINDS for b in BACKENDS if b != "reference" or k in ("edits", "local")]


class TestAlignment(StructureContract):
    oracle = chains
    part_scores = "scores"
    kind, backend = "edits", "reference"
    draws = 2_000

    @pytest.fixture(autouse=True, params=CASES, ids="-".join)
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.kind, self.backend = request.param
        self.device = DEVICE if self.backend == "gpu" else "cpu"

    @property
    def sizes(self):
        return SIZES.get(self.kind, ((2, 2), (1, 3), (3, 1)))

    def case(self, seed: int = 0, *, dtype: torch.dtype = torch.float64, constrained: bool = False) -> Case:
        lengths = torch.tensor(self.sizes)
        height, width = (lengths.amax(0) + 1).tolist()
        moves = len(KINDS[self.kind].get("moves", alignments.EDITS))
        scores = torch.randn(3, height, width, moves, generator=torch.Generator().manual_seed(seed)).double()
        if constrained:
            scores[0, 1, 1, 0] = scores[2, 1, 1, -1] = scores[1, 1, 0, 0] = -INF
        return Case({"scores": scores.to(self.device, dtype)}, lengths)

    def make(self, case: Case):
        rows, columns = case.lengths.unbind(-1)
        settings = KINDS[self.kind]
        scores = case.scores["scores"]
        return Alignment(scores, lengths=rows, target_lengths=columns, backend=self.backend, **settings)

    def enumerate(self, case: Case):
        rows = case.scores["scores"].detach().tolist()
        pairs = zip(rows, case.lengths.tolist(), strict=True)
        return [alignments.weighted(each, *lengths, **KINDS[self.kind]) for each, lengths in pairs]

    def parts(self, y):
        return list(y)

    def structure(self, row: Tensor):
        assert row.dtype == torch.int64
        return tuple(tuple(step) for step in row.tolist() if step[0] >= 0) or None

    def tensor(self, case: Case, structures):
        steps = self.make(case).event_shape[0]
        filled = [[*y, *[(-1, -1, -1)] * (steps - len(y))] for y in structures]
        return torch.tensor(filled, device=self.device)

    def per_item(self, name: str) -> bool:
        return True

    def padding(self, case: Case):
        return {"scores": ~self.make(case).inside}

    def shifted(self, case: Case, constant: float):
        # Whatever the moves, their symbols add up to the lengths.
        moves = torch.tensor(KINDS[self.kind].get("moves", alignments.EDITS))
        share = (moves.double() / case.lengths.unsqueeze(1)).mean(-1) * constant  # (B, M)
        return case.map(lambda _, tensor: tensor + share[:, None, None].to(tensor))

    def infeasible(self, case: Case, item: int):
        scores = case.scores["scores"].clone()
        scores[(item, *(() if self.kind == "local" else self.sizes[item]))] = -INF
        return Case({"scores": scores}, case.lengths)

    def test_a_constant_shifts_log_partition_alone(self):
        if self.kind != "local":  # whose paths have nothing in common that a constant could be shared by
            super().test_a_constant_shifts_log_partition_alone()


TWINS = {
    "lengths forgotten": lambda scores, rows, columns, moves=alignments.EDITS: alignments.weighted(scores, 3, 3, moves),
    "first one left out": lambda *given: alignments.weighted(*given)[1:],
    "deletions for insertions": lambda scores, rows, columns: alignments.weighted(
        scores, rows, columns, ((1, 1), (0, 1), (1, 0))
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_broken_enumeration_is_noticed(name):
    sound = TestAlignment()
    sound.test_log_partition_equals_enumeration()

    class Broken(TestAlignment):
        __test__ = False

        def enumerate(self, case: Case):
            pairs = zip(case.scores["scores"].tolist(), case.lengths.tolist(), strict=True)
            return [TWINS[name](each, *lengths) for each, lengths in pairs]

    with pytest.raises(AssertionError):
        Broken().test_log_partition_equals_enumeration()


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_known_counts(backend):
    """Central Delannoy numbers; the edit distance; an item of nothing."""
    for size, paths in ((1, 3), (2, 13), (3, 63), (4, 321)):
        found = Alignment.of_edits(torch.zeros(1, size, size).double(), 0.0, 0.0, backend=backend)
        same(found.log_partition.exp(), [paths])
    x, y = "kitten", "sitting"
    match = torch.tensor([[[0.0 if a == b else -1.0 for b in y] for a in x]])
    assert float(Alignment.of_edits(match, -1.0, -1.0, backend=backend).max_score) == -3
    empty = Alignment(torch.randn(2, 3, 3, 3), lengths=[0, 0], target_lengths=[0, 2], backend=backend)
    assert float(empty.log_partition[0]) == 0
    assert (empty.mode[0] == -1).all()
    assert empty.mode[1, :, 0].tolist() == [0, 0, -1, -1]
    assert empty.marginals[0].sum() == 0
    none = Alignment(torch.zeros(0, 3, 3, 3), backend=backend)
    assert none.log_partition.shape == (0,)
    assert none.mode.shape == (0, 4, 3)


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize(("moves", "size"), [(alignments.EDITS, (0, 0)), (((2, 1),), (1, 0))])
def test_where_no_move_is_possible_gradients_are_zero(moves, size, backend):
    scores = torch.zeros(2, size[0] + 1, size[1] + 1, len(moves), dtype=torch.float64, requires_grad=True)
    only = Alignment(scores, moves=moves, lengths=[0, 0], target_lengths=[0, 0], backend=backend)
    (once,) = torch.autograd.grad(only.log_partition.sum(), scores, create_graph=True)
    (twice,) = torch.autograd.grad(once.sum(), scores)
    (of_entropy,) = torch.autograd.grad(only.entropy().sum(), scores)
    assert not any(each.any() for each in (once, twice, of_entropy, only.marginals))
    assert all((each == -1).all() for each in (only.sample((3,)), only.mode, only.perturbed_mode(2)))
    assert only.top_k(2)[0].tolist() == [[0.0, -INF]] * 2


def test_what_is_no_path_has_no_score():
    pair = Alignment(torch.zeros(1, 3, 3, 3), band=1)
    local = Alignment(torch.zeros(1, 3, 3, 3), local=True, target_lengths=[1])
    blank = (-1, -1, -1)
    for rule, p, *steps in (
        ("begin where the move before ended", pair, (2, 2, 0)),
        ("begin where the move before ended", pair, (1, 1, 0), (2, 2, 2)),
        ("begin where the move before ended", pair, (1, 1, 0), blank, (2, 2, 0)),
        ("end in the last cell", pair, (1, 1, 0)),
        ("lie within the lengths and the band", pair, (1, 0, 1), (2, 0, 1), (2, 1, 2), (2, 2, 2)),
        ("lie within the lengths and the band", local, (2, 2, 0)),
        (r"lie below \(3, 3, 3\)", pair, (1, 1, -4)),
    ):
        path = torch.tensor([[*steps, *[blank] * (4 - len(steps))]])
        with pytest.raises(ShapeError, match=rule):
            p.log_prob(path)
    same(local.score(torch.tensor([[(2, 1, 0), blank, blank, blank]])), [0.0])
    assert pair.score(torch.tensor([[blank] * 4])) == 0  # what `top_k` fills up with


def test_edits_are_differentiable_and_broadcast():
    match = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    delete = torch.randn(2, 3, 1, dtype=torch.float64, requires_grad=True)
    insert = torch.tensor(-0.5, dtype=torch.float64, requires_grad=True)
    pair = Alignment.of_edits(match, delete, insert, lengths=[3, 1])
    gradients = torch.autograd.grad(pair.log_partition.sum(), (match, delete, insert))
    same(gradients[0], pair.marginals[:, 1:, 1:, 0])
    same(gradients[1], pair.marginals[:, 1:, :, 1].sum(-1, True))
    same(gradients[2], pair.marginals[..., 2].sum())


def test_a_wide_band_changes_nothing_and_a_narrow_one_keeps_to_the_line():
    scores = torch.randn(2, 6, 4, 3, dtype=torch.float64)
    lengths = {"lengths": [5, 2], "target_lengths": [3, 3]}
    same(Alignment(scores, band=50, **lengths).marginals, Alignment(scores, **lengths).marginals)
    steps = Alignment(scores, band=1, **lengths).sample((200,))
    i, j, _ = steps[:, 0].unbind(-1)
    assert ((j * 5 - i * 3).abs() <= 5)[i >= 0].all()


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_long_sequences_keep_their_digits(backend):
    """float32 beside float64 where the sums are large; far apart scores; both infinite for the same items."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 61, 45, 3, generator=generator) * 5 - 40
    scores[1, 30] = -INF
    scores[1, 30, 20, 0] = -300.0
    for settings in ({}, {"local": True}, {"band": 9}):
        single = Alignment(scores, backend=backend, validate_args=False, **settings)
        double = Alignment(scores.double(), backend="reference", validate_args=False, **settings)
        torch.testing.assert_close(single.log_partition.double(), double.log_partition, rtol=1e-6, atol=1e-3)
        torch.testing.assert_close(single.marginals.double(), double.marginals, rtol=1e-3, atol=2e-4)


def test_what_does_not_fit_is_told_of():
    good = torch.zeros(2, 3, 4, 3)
    for message, make in {
        r"`scores` must be \(B, I \+ 1, J \+ 1, M\) with M = 3": lambda: Alignment(good[..., :2]),
        "floating type": lambda: Alignment(good.long()),
        "dense tensor": lambda: Alignment([[0.0]]),  # type: ignore[arg-type]
        "`lengths` must lie in 0..2, got 3 at batch item 1": lambda: Alignment(good, lengths=[0, 3]),
        "`target_lengths` must be integers": lambda: Alignment(good, target_lengths=[1.5, 2.0]),  # type: ignore[list-item]
        "`target_lengths` must lie in 0..3, got -1": lambda: Alignment(good, target_lengths=[-1, 2]),
        "`band` must be": lambda: Alignment(good, band=0),
        "not both 0": lambda: Alignment(good, moves=((1, 1), (0, 0), (1, 0))),
        "different pairs": lambda: Alignment(good, moves=((1, 1), (1, 1), (1, 0))),
        "pairs of numbers": lambda: Alignment(good, moves=(1, 2, 3)),  # type: ignore[arg-type]
        r"pairs of numbers.*got \(\(1.5, 1\)": lambda: Alignment(good, moves=((1.5, 1), (1, 0), (0, 1))),  # type: ignore[arg-type]
        "same `moves`": lambda: Alignment(good).kl_divergence(Alignment(good, moves=((1, 0), (1, 1), (0, 1)))),
        "same `local`": lambda: Alignment(good).cross_entropy(Alignment(good, local=True)),
        "same lengths and `band`": lambda: Alignment(good).kl_divergence(Alignment(good, band=1)),
        "`k` = 100000000 must fit into memory": lambda: Alignment(good, backend="reference").top_k(10**8),
        "got list": lambda: Alignment(good).score([[[1, 1, 0]]]),  # type: ignore[arg-type]
        "`delete` must be a number or a tensor, got str": lambda: Alignment.of_edits(good[..., 0], "a", 0.0),  # type: ignore[arg-type]
        "`match` must be": lambda: Alignment.of_edits(good, 0.0, 0.0),
        "`insert` must broadcast": lambda: Alignment.of_edits(good[..., 0], 0.0, torch.zeros(7)),
        "unknown backend": lambda: Alignment(good, backend="cqu"),
        "is for chains": lambda: Alignment(good, backend="scan"),
        "`k` must be an integer": lambda: Alignment(good).top_k(0),
        "`k` = 1000000000000 must fit into memory": lambda: Alignment(good).top_k(10**12),
        "alignments must be integers": lambda: Alignment(good).score(torch.zeros(2, 3)),
        r"got \(9, 0, 0\) at step 1 of batch item 0": lambda: Alignment(good).score(
            torch.tensor([[[1, 1, 0], [9, 0, 0], *[[-1] * 3] * 3], [[-1] * 3] * 5])
        ),
    }.items():
        with pytest.raises((ShapeError, ConfigError), match=message) as caught:
            make()
        assert "\n" not in str(caught.value)
    with pytest.raises(InfeasibleError, match="batch item 0, 1"):
        _ = Alignment(torch.zeros(2, 3, 2, 1), moves=((1, 1),)).mode


@pytest.mark.parametrize("wrong", [math.nan, INF])
def test_what_is_no_number(wrong):
    scores = torch.zeros(2, 3, 3, 3)
    scores[1, 2, 2, 0] = wrong
    inside = Alignment(scores)
    if wrong == INF:
        with pytest.raises(ShapeError, match=r"below \+inf"):
            _ = inside.log_partition
    else:
        assert inside.log_partition.isnan().tolist() == [False, True]
    assert Alignment(scores, lengths=[2, 1]).log_partition.isfinite().all()
