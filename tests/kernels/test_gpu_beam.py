"""The Triton kernels of a decoding step's search: for real on a GPU, else by Triton's interpreter in a process."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from contracts.triton_kernels import (
    DEVICE,
    RUNS,
    compile_instead,
    for_hopper,
    here_only,
    needs_triton,
)
from oracles.beams import Book
from oracles.search import random_table
from thalweg.inference import TableModel, beam_search

INF, NAN = math.inf, math.nan

pytestmark = needs_triton
if RUNS:
    from thalweg.kernels.gpu import decoding as gpu


@pytest.mark.slow
@for_hopper
@pytest.mark.parametrize(
    ("items", "width", "k", "V", "max_length", "eos"),
    [(1, 1, 1, 7, 1, 3), (3, 5, 2, 100, 20, 1), (2, 4, 4, 4096, 6, None), (2, 2, 1, 1, 4, 0)],
)
def test_search_compiles_for_hopper(
    items: int, width: int, k: int, V: int, max_length: int, eos: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thalweg.kernels.gpu import decoding

    compiled = compile_instead(monkeypatch)
    assert decoding.fits(width, V)
    beam = decoding.Beam.empty(items, width, k, max_length, torch.device("cpu"))
    rows = items * width
    for lineage in (None, torch.zeros(rows, max_length, dtype=torch.int32)):
        options = {"eos": eos, "max_length": max_length, "min_length": 1, "penalty": 1.0}
        decoding.advance(beam, torch.zeros(rows, V), lineage, **options)  # type: ignore[arg-type]
        decoding.start(beam, torch.ones(1, dtype=torch.int32), 0, lineage)
    decoding.trace(beam, V, torch.ones(1, dtype=torch.int32), torch.zeros(2, dtype=torch.long))
    assert compiled == {"_advance", "_trace"}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Run:
    """A search over tables, one an item: kernels choose, Python looks up what follows each row."""

    def __init__(
        self, tables, *, vocab, eos, width, k, max_length, min_length=0, penalty=0.0, shift=1.0, broken=False
    ) -> None:
        self.tables, self.vocab, self.width, self.shift, self.broken = tables, vocab, width, shift, broken
        self.beam = gpu.Beam.empty(len(tables), width, k, max_length, torch.device(DEVICE))
        self.lineage = torch.zeros(len(tables) * width, max_length, dtype=torch.int32, device=DEVICE)
        self.options = {"eos": eos, "max_length": max_length, "min_length": min_length, "penalty": penalty}
        rows = range(len(tables) * width)
        self.prefixes, self.pasts = [() for _ in rows], [[row] for row in rows]
        count = torch.tensor([len(tables)], dtype=torch.int32, device=DEVICE)
        self.seen, self.summary = torch.ones_like(count), torch.zeros(2, dtype=torch.long, device=DEVICE)
        gpu.start(self.beam, count, 0, self.lineage)
        while int(self.seen):
            self.step()
        found = gpu.trace(self.beam, vocab, count, self.summary)
        self.tokens, self.lengths, self.scores, self.finished, self.optimal = (x.cpu() for x in found)
        assert self.summary.tolist() == [int(self.lengths.max()), 0]
        assert not torch.cat((self.beam.arrived, self.beam.notes)).any()  # ready for the next launch

    def logits(self) -> Tensor:
        rows = torch.full((len(self.prefixes), self.vocab), -INF)
        for row, prefix in enumerate(self.prefixes):
            for symbol, value in self.tables[row // self.width].get(prefix, {}).items():
                rows[row, symbol] = value + self.shift * row  # a constant must not matter
        return rows.to(DEVICE)

    def step(self) -> None:
        beam, going = self.beam, (self.beam.done == 0).tolist()
        step = int(beam.position) + 1
        gpu.advance(beam, self.logits(), self.lineage, **self.options, seen=self.seen)
        assert (int(beam.position), int(self.seen)) == (step, int(beam.remaining))
        parents = list(range(len(self.prefixes))) if self.broken else beam.parents.tolist()
        follow = [going[row // self.width] for row in range(len(parents))]
        fed = zip(parents, beam.tokens.tolist(), strict=True)
        moved = [(*self.prefixes[parent], symbol) for parent, symbol in fed]
        pasts = [[*self.pasts[parent], row] for row, parent in enumerate(parents)]
        self.prefixes = [new if go else old for new, old, go in zip(moved, self.prefixes, follow, strict=True)]
        self.pasts = [new if go else old for new, old, go in zip(pasts, self.pasts, follow, strict=True)]
        for row, past in enumerate(self.pasts):
            if follow[row] and step < self.lineage.size(1) and not self.broken:
                assert self.lineage[row, : step + 1].tolist() == past

    def answers(self, item: int) -> list[tuple[tuple[int, ...], float, bool]]:
        found = []
        for slot, length in enumerate(self.lengths[item].tolist()):
            column = self.tokens[item, slot].tolist()
            assert column[length:] == [-1] * (len(column) - length)
            if length:
                found.append((tuple(column[:length]), float(self.scores[item, slot]), bool(self.finished[item, slot])))
            else:
                assert self.scores[item, slot] == -INF
                assert not self.finished[item, slot]
        return found

    def proved(self, item: int) -> bool:
        beam = self.beam
        best = bool(self.finished[item, 0]) and bool(beam.rank[item, 0] >= beam.dropped[item])
        assert best == bool(self.optimal[item])
        return best and self.options["penalty"] == 0


def agrees(run: Run, item: int, book: Book) -> bool:
    found = run.answers(item)
    return len(found) == len(book.hypotheses) and all(
        a[0] == b[0] and a[2] == b[2] and math.isclose(a[1], b[1], rel_tol=1e-5, abs_tol=1e-5)
        for a, b in zip(found, book.hypotheses, strict=True)
    )


def check_search(tables, *, ties: bool = False, **options) -> Run:
    """Answers, proofs and what was let go of; of equal scores the ordinary search may let go of others."""
    run = Run(tables, **options, shift=0.0 if ties else 1.0)
    vocab = options.pop("vocab")
    # Symbol `vocab` stands for bos, so that all the others may be anything.
    model = TableModel(tables, vocab_size=vocab + 1, bos=vocab, eos=options["eos"])
    names = {"width": options["width"], "k": options["k"], "max_length": options["max_length"]}
    least, penalty = options.get("min_length", 0), options.get("penalty", 0.0)
    ordinary = beam_search(model, torch.arange(len(tables)), **names, min_length=least, length_penalty=penalty)
    for item, table in enumerate(tables):
        book = Book(table, **options)
        assert agrees(run, item, book), (run.answers(item), book.hypotheses)
        assert run.proved(item) == book.proved
        assert ties or book.proved == bool(ordinary.optimal[item])
        dropped = float(run.beam.dropped[item])
        if options["eos"] is None:  # all end together, the best first: nothing hangs on it
            continue
        if int(run.beam.done[item]) == options["max_length"]:
            assert dropped == book.dropped or math.isclose(dropped, book.dropped, rel_tol=1e-5, abs_tol=1e-5)
        else:  # the book goes on
            assert dropped <= book.dropped + 1e-5
    return run


def tables_of(seed: int, count: int, *, eos: int | None = 0, vocab: int = 5, depth: int = 3, scale: float = 1.0, **kw):
    """Random tables, with eos more (below 0: never) or less probable from item to item."""
    made = []
    for item in range(count):
        table = random_table(seed + item, vocab=vocab, eos=eos, depth=depth, **kw)
        rng = random.Random(seed + item)
        for prefix, row in table.items():
            weights = {
                v: math.exp(value) * (scale * rng.random() * (item + 1) if v == eos else 1.0)
                for v, value in row.items()
            }
            total = sum(weights.values())
            table[prefix] = {v: math.log(w / total) for v, w in weights.items() if w}
        made.append(table)
    return made


BASIC = {"vocab": 5, "eos": 0, "width": 3, "k": 3, "max_length": 3}


@here_only
@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0])
@pytest.mark.parametrize("least", [0, 3])
def test_search_with_penalties_and_least_lengths(penalty: float, least: int) -> None:
    check_search(tables_of(int(10 * penalty) + 20, 2), **BASIC, min_length=least, penalty=penalty)


@here_only
@pytest.mark.parametrize(
    "changes",
    [
        {"k": 1},
        {"width": 1, "k": 1},
        {"width": 4, "k": 2, "eos": 4},
        {"eos": None},
        {"eos": None, "max_length": 1, "k": 2},
        {"eos": None, "penalty": 1.0, "k": 2},
        {"max_length": 1},
        {"vocab": 3, "width": 5, "k": 5, "eos": 1},
        {"vocab": 3, "width": 5, "k": 4, "eos": 2, "penalty": -0.5},
        {"vocab": 7, "width": 2, "k": 2, "max_length": 2},
    ],
    ids=str,
)
def test_search_of_every_shape(changes: dict[str, object]) -> None:
    options = BASIC | changes
    check_search(tables_of(3, 2, eos=options["eos"], vocab=options["vocab"]), **options)  # type: ignore[arg-type]


@here_only
def test_ends_at_once_or_never() -> None:
    soon, never = tables_of(1, 1, scale=400.0), tables_of(2, 1, scale=0.0)
    run = check_search(soon + never, **BASIC | {"k": 1})
    assert run.beam.done.tolist() == [1, 3]
    assert run.finished.tolist() == [[True], [False]]


@here_only
def test_impossible_symbols_leave_dead_rows() -> None:
    tables = [
        {prefix: row or {1: 0.0} for prefix, row in table.items()} for table in tables_of(5, 2, impossible=0.5, vocab=4)
    ]
    tables[0][()] = {1: 0.0}  # one way out of the first step
    check_search(tables, **BASIC | {"vocab": 4})


@here_only
def test_of_equal_scores_the_earlier_row_and_the_lower_symbol_come_first() -> None:
    even = {v: -math.log(4) for v in range(4)}
    table = {(): even} | {(v,): even for v in range(1, 4)}
    run = check_search([table], ties=True, **BASIC | {"vocab": 4, "max_length": 2})
    assert [found[0] for found in run.answers(0)] == [(0,), (1, 0), (1, 1)]


@here_only
def test_a_better_end_that_the_last_step_lets_go_of_is_no_proof() -> None:
    log = math.log
    last = {0: log(0.165), **{v: log(0.167) for v in range(1, 6)}}  # (1, 0) is better than (0,), but ranks sixth
    table = {(): {0: log(0.1), 1: log(0.8), 2: log(0.1)}, (1,): last, (2,): last}
    run = Run([table], vocab=6, eos=0, width=2, k=1, max_length=2)
    assert run.answers(0)[0][0] == (0,)
    assert not run.proved(0)
    assert math.isclose(float(run.beam.dropped[0]), log(0.8 * 0.165), rel_tol=1e-5)
    # What can no longer end is no objection: after the last step it is no hypothesis.
    table[1,] = {0: log(1e-9), **{v: log((1 - 1e-9) / 5) for v in range(1, 6)}}
    table[2,] = table[1,]
    run = Run([table], vocab=6, eos=0, width=2, k=1, max_length=2)
    assert run.proved(0)


@here_only
def test_items_that_are_done_stay_as_they_are() -> None:
    beam = gpu.Beam.empty(3, 2, 1, 4, torch.device(DEVICE))
    gpu.start(beam, torch.tensor([2], dtype=torch.int32, device=DEVICE), 0)
    assert beam.done.tolist() == [0, 0, 1]
    logits = normal(6, 5)
    logits[:2, 3] = 20.0  # the first item ends at once
    logits[2:, 3] = -20.0
    options = {"eos": 3, "max_length": 4, "min_length": 0, "penalty": 0.0}
    lineage = torch.zeros(6, 4, dtype=torch.int32, device=DEVICE)

    def of_done() -> list[Tensor]:
        by_item = [x.unflatten(0, (3, 2)) for x in (beam.tokens, beam.parents, lineage)]
        columns = [*by_item, beam.live, beam.rank, beam.score, beam.code, beam.dropped, beam.done]
        return [x[[0, 2]].clone() for x in columns] + [beam.history[:, [0, 2]].clone()]

    gpu.advance(beam, logits, lineage, **options)  # type: ignore[arg-type]
    assert (beam.done.tolist(), beam.remaining.tolist()) == ([1, 0, 1], [1])
    before = of_done()
    logits[[0, 1, 4, 5]] = NAN
    gpu.advance(beam, logits, lineage, **options)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before, of_done(), strict=True))
    assert (beam.done.tolist(), beam.remaining.tolist()) == ([1, 0, 1], [1])
    assert (beam.live[1] > -INF).all()


@here_only
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("eos", [0, 2, None])
@pytest.mark.parametrize("wrong", [NAN, INF])
def test_what_is_not_a_number_stops_its_item_and_stays_to_be_found(eos: int | None, wrong: float) -> None:
    beam = gpu.Beam.empty(2, 2, 1, 1, torch.device(DEVICE))
    gpu.start(beam, torch.tensor([2], dtype=torch.int32, device=DEVICE), 0)
    logits = normal(4, 3)
    logits[0, 1] = wrong
    gpu.advance(beam, logits, None, eos=eos, max_length=1, min_length=0, penalty=0.0)
    assert beam.done.tolist() == [1, 1]
    assert beam.live[0, 0].isnan()
    assert not beam.live[1, 0].isnan()
    summary = torch.zeros(2, dtype=torch.long, device=DEVICE)
    gpu.trace(beam, 3, torch.tensor([2], dtype=torch.int32, device=DEVICE), summary)
    assert summary.tolist() == [1, 1]


@here_only
def test_the_oracle_can_fail() -> None:
    tables = tables_of(20, 3, eos=None)
    options = BASIC | {"eos": None, "k": 1}
    book = {name: value for name, value in options.items() if name != "vocab"}
    books = [Book(table, **book) for table in tables]
    # Rows keep their own past, whatever row was chosen.
    for broken in (False, True):
        run = Run(tables, **options, broken=broken)
        assert all(agrees(run, item, book) for item, book in enumerate(books)) != broken
