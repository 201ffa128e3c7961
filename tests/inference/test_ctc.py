"""CTC under the laws of all structures, beside enumeration in plain Python and torch's own loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ctc_loss

from contracts.structure import Case, StructureContract, same
from contracts.triton_kernels import DEVICE, RUNS
from oracles import alignments, chains
from thalweg.errors import InfeasibleError, ShapeError
from thalweg.inference import CTC, CTCLabellings, beam_search, exact_search, sample_sequences

INF = math.inf
TARGETS = {"usual": ((1, 2), (2,), (1, 1)), "empty": ((1,), (), (2, 1, 2))}
LENGTHS = (4, 2, 4)
SIZE = 3
BACKENDS = ("reference", "cpu", *(["gpu"] if RUNS else []))
CASES = [("usual", "reference"), *(("usual", b) for b in BACKENDS[1:]), ("empty", "cpu")]


class TestCTC(StructureContract):
    oracle = chains
    part_scores = "log_probs"
    kind, backend = "usual", "reference"
    blank = 0
    draws = 2_000

    @pytest.fixture(autouse=True, params=CASES, ids="-".join)
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.kind, self.backend = request.param
        self.device = DEVICE if self.backend == "gpu" else "cpu"

    def case(self, seed: int = 0, *, dtype: torch.dtype = torch.float64, constrained: bool = False) -> Case:
        scores = torch.randn(3, max(LENGTHS), SIZE, generator=torch.Generator().manual_seed(seed)).double()
        if constrained:
            scores[0, 1, 0] = scores[2, 0, 0] = -INF
        # The number of an item goes with it, for its target does.
        return Case({"log_probs": scores.to(self.device, dtype)}, torch.tensor(list(enumerate(LENGTHS))))

    def targets(self, case: Case):
        return [TARGETS[self.kind][item] for item in case.lengths[:, 0].tolist()]

    def make(self, case: Case):
        found = self.targets(case)
        width = max(map(len, TARGETS[self.kind]))
        filled = torch.tensor([[*y, *[-7] * (width - len(y))] for y in found])
        return CTC(
            case.scores["log_probs"],
            filled,
            lengths=case.lengths[:, 1],
            target_lengths=[len(y) for y in found],
            blank=self.blank,
            backend=self.backend,
        )

    def enumerate(self, case: Case):
        rows, lengths = case.scores["log_probs"].detach().tolist(), case.lengths[:, 1].tolist()
        given = zip(rows, lengths, self.targets(case), strict=True)
        return [alignments.frames_of(row[:length], y, self.blank) for row, length, y in given]

    def parts(self, y):
        return list(enumerate(y))

    def structure(self, row: Tensor):
        assert row.dtype == torch.int64
        return tuple(label for label in row.tolist() if label >= 0) or None

    def tensor(self, case: Case, structures):
        return torch.tensor([[*y, *[-1] * (max(LENGTHS) - len(y))] for y in structures], device=self.device)

    def per_item(self, name: str) -> bool:
        return True

    def padding(self, case: Case):
        return {"log_probs": (~self.make(case).inside).expand_as(case.scores["log_probs"])}

    def shifted(self, case: Case, constant: float):
        return case.map(lambda _, tensor: tensor + constant / case.lengths[:, 1].view(-1, 1, 1).to(tensor))

    def infeasible(self, case: Case, item: int):
        scores = case.scores["log_probs"].clone()
        scores[item, 1] = -INF
        return Case({"log_probs": scores}, case.lengths)

    def test_an_item_without_structures_is_named(self):
        if self.kind == "usual":
            super().test_an_item_without_structures_is_named()

    def cases(self):  # an empty target has one way, which constraints could only take away
        return super().cases() if self.kind == "usual" else [self.case(), self.case(2)]

    def test_top_k_is_sorted_distinct_and_equals_enumeration(self):
        if self.kind == "usual":  # a list with one entry and a filling that is as long
            super().test_top_k_is_sorted_distinct_and_equals_enumeration()


def test_a_broken_enumeration_is_noticed(monkeypatch):
    TestCTC().test_log_partition_equals_enumeration()
    # Blanks go first: a repeated label then becomes one.
    monkeypatch.setattr(
        alignments,
        "joined",
        lambda labels, blank=0: tuple(
            x
            for n, x in enumerate(labels)
            if x != blank and (n == 0 or [y for y in labels[:n] if y != blank][-1:] != [x])
        ),
    )
    with pytest.raises((AssertionError, ValueError)):
        TestCTC().test_log_partition_equals_enumeration()


def ragged(dtype: torch.dtype, blank: int = 0, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 40, 7, generator=generator).to(dtype) * 2
    targets = torch.randint(1, 7, (5, 12), generator=generator)
    targets[0, 3:6] = 2  # repeated
    targets = torch.where(targets == blank, 0, targets)
    return logits, targets, torch.tensor([40, 33, 25, 14, 3]), torch.tensor([12, 1, 9, 5, 0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "blank"), [(torch.float64, 0), (torch.float32, 0), (torch.float64, 6)])
def test_torch_agrees_in_value_and_gradient(backend, dtype, blank):
    logits, targets, lengths, counts = ragged(dtype, blank)
    device = DEVICE if backend == "gpu" else "cpu"
    ours, theirs = (logits.to(device).clone().requires_grad_() for _ in range(2))
    losses = -CTC(
        ours.log_softmax(-1), targets, lengths=lengths, target_lengths=counts, blank=blank, backend=backend
    ).log_partition
    known = ctc_loss(
        theirs.log_softmax(-1).transpose(0, 1), targets.to(device), lengths, counts, blank=blank, reduction="none"
    )
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-4}
    same(losses, known, **tolerance)
    weights = torch.arange(1.0, 6.0).to(losses)
    (one,) = torch.autograd.grad((losses * weights).sum(), ours)
    (two,) = torch.autograd.grad((known * weights).sum(), theirs)
    same(one, two, **({} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}))


def test_targets_that_do_not_fit():
    log_probs = torch.zeros(2, 3, 4).log_softmax(-1)
    for backend in BACKENDS[:2]:
        short = CTC(log_probs, torch.tensor([[1, 2], [3, 3]]), lengths=[3, 2], backend=backend)
        assert short.frames_needed.tolist() == [2, 3]
        for ask in (lambda p: p.log_partition, lambda p: p.mode, lambda p: p.sample(), lambda p: p.top_k(2)):
            with pytest.raises(InfeasibleError, match="batch item 1 needs 3 frames or more, got 2"):
                ask(short)
        leaf = log_probs.clone().requires_grad_()
        loose = CTC(leaf, torch.tensor([[1, 2], [3, 3]]), lengths=[3, 2], backend=backend, validate_args=False)
        assert loose.log_partition.tolist()[1] == -INF
        (gradient,) = torch.autograd.grad(loose.log_partition[0], leaf)
        assert gradient[1].eq(0).all()
        assert gradient[0].sum() == pytest.approx(3)


def test_forced_alignment_and_what_frames_become():
    log_probs = torch.full((1, 6, 4), -5.0)
    for frame, label in enumerate([1, 1, 0, 1, 2, 2]):
        log_probs[0, frame, label] = 0.0
    spread = CTC(log_probs, torch.tensor([[1, 1, 2]]))
    assert spread.mode.tolist() == [[1, 1, 0, 1, 2, 2]]
    assert spread.positions(spread.mode).tolist() == [[0, 0, -1, 1, 2, 2]]
    wrong = torch.tensor([[[1, 1, 1, 1, 2, 2]], [[1, 0, 2, 1, 1, 1]], [[1, 0, 1, 2, 0, 2]], [[0, 0, 0, 0, 0, 0]]])
    assert spread.score(wrong).flatten().tolist() == [-INF] * 4
    assert CTC(log_probs, torch.zeros(1, 0).long()).score(torch.zeros(1, 6).long()).isfinite().all()
    assert "U=3" in repr(spread)


@pytest.mark.parametrize("blank", [0, 2])
def test_labellings_equal_enumeration(blank):
    generator = torch.Generator().manual_seed(1)
    log_probs = torch.randn(3, 4, 3, generator=generator).double().log_softmax(-1)
    lengths = [4, 1, 3]
    model = CTCLabellings(log_probs, lengths=lengths, blank=blank)
    best = exact_search(model, torch.arange(3), max_length=5)
    many = beam_search(model, torch.arange(3), width=64, k=5, max_length=5)
    assert best.optimal.all()
    for item, length in enumerate(lengths):
        known = alignments.labellings(log_probs[item, :length].tolist(), blank)
        known = sorted(known.items(), key=lambda pair: -pair[1])[:5]
        same(best.scores[item].exp(), [known[0][1]])
        assert model.labels(best)[item] == [list(known[0][0])]
        assert model.labels(many)[item] == [list(labels) for labels, _ in known]
        same(many.scores[item, : len(known)].exp(), [p for _, p in known])
    drawn = sample_sequences(model, torch.arange(3), n=2000, max_length=5, generator=generator)
    share = sum(not labels for labels in model.labels(drawn)[1]) / 2000
    assert abs(share - float(log_probs[1, 0, blank].exp())) < 0.06


def test_a_labelling_has_the_probability_of_its_target():
    logits, _, lengths, _ = ragged(torch.float64)
    log_probs = logits.log_softmax(-1)[:, :20]
    lengths = lengths.clamp(max=20)
    model = CTCLabellings(log_probs, lengths=lengths)
    assert model.joined(torch.tensor([[1, 1, 0, 1, 2, -1]])) == [[1, 1, 2]]
    found = beam_search(model, torch.arange(5), width=8, k=3, max_length=21)
    for rank in range(3):
        labels = [each[rank] for each in model.labels(found)]
        width = max(map(len, labels))
        filled = torch.tensor([[*y, *[0] * (width - len(y))] for y in labels])
        target = CTC(log_probs, filled, lengths=lengths, target_lengths=list(map(len, labels)))
        same(found.scores[:, rank], target.log_partition)
    greedy = model.joined(model.best_path())
    assert all(len(y) <= n for y, n in zip(greedy, lengths.tolist(), strict=True))


def test_what_does_not_fit_is_told_of():
    good, targets = torch.zeros(2, 3, 4), torch.tensor([[1, 2], [3, 1]])
    for message, make in {
        "`log_probs` must be": lambda: CTC(good[0], targets),
        "`blank` must be": lambda: CTC(good, targets, blank=4),
        r"`targets` must be integers \(B, U\)": lambda: CTC(good, targets.float()),
        "`targets` must be integers": lambda: CTC(good, targets[0]),
        "other than the blank 3, got 3 at place 0 of batch item 1": lambda: CTC(good, targets, blank=3),
        "got 9 at place": lambda: CTC(good, targets + 8),
        "`lengths` must lie in 1..3, got 0": lambda: CTC(good, targets, lengths=[0, 3]),
        "`target_lengths` must lie in 0..2, got 3": lambda: CTC(good, targets, target_lengths=[3, 1]),
        r"`targets` must be integers \(B, U\) with B = 2, got \(2, 2\) torch.complex64": lambda: CTC(
            good, targets.to(torch.complex64)
        ),
        "got list": lambda: CTC(good, targets).score([[0, 1, 2]]),  # type: ignore[arg-type]
        "B = 2 and T = 3, got NoneType": lambda: CTC(good, targets).positions(None),  # type: ignore[arg-type]
        "same `targets`": lambda: CTC(good, targets).kl_divergence(CTC(good, targets.flip(0))),
        "same `blank`": lambda: CTC(good[:1], targets[:1, :1]).kl_divergence(CTC(good[:1], targets[:1, :1], blank=2)),
        "numbers of items in 0..1, got": lambda: CTCLabellings(good).begin(torch.tensor([-1])),
        r"integers \(R,\)": lambda: CTCLabellings(good).begin(torch.tensor([0.0])),
        r"labels must be integers \(B, T\)": lambda: CTCLabellings(good).joined(torch.zeros(3)),
        "labels must be integers": lambda: CTC(good, targets).score(torch.zeros(2, 2).long()),
        "a finite label in every frame": lambda: CTCLabellings(torch.full((1, 2, 3), -INF)),
    }.items():
        with pytest.raises(ShapeError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)
