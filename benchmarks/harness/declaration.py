"""What a benchmark declares, what its parts are given, and the comparison that most parts are made of."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness.device import release
from benchmarks.harness.timing import Cell, Job, alternate, first_call

Facts = dict[str, Any]
"""Plain JSON values."""


class WrongAnswerError(Exception):
    """A result that must not be timed: what was expected, what was found."""


class NothingToCompareError(Exception):
    """Measured, but no result to keep, such as where the only peer is not there."""


def demand(what: str, worst: float, limit: float) -> None:
    """A difference of at most ``limit``; NaN is wrong too."""
    if not worst <= limit:
        raise WrongAnswerError(f"{what}: expected a difference of at most {limit:.2g}, got {worst:.2g}")


@dataclass
class Run:
    """One call of ``python -m benchmarks``: its options, the facts so far, an empty folder, and what ``begin`` gave."""

    args: Namespace
    facts: Facts
    folder: Path
    shared: Any = None

    def found(self, versions: Mapping[str, str], missing: Sequence[str]) -> None:
        """Note the versions of the peers that are here, and say of each other one why it is left out."""
        self.facts["versions"] |= versions
        self.facts["left_out"] = [*self.facts.get("left_out", []), *missing]
        for line in missing:
            print(line)

    def only_peer(self, module: str, install: str) -> Any:
        """A module with as many threads as ours; without it there is nothing to compare."""
        try:
            found, threads = import_module(module), import_module("threadpoolctl")
        except ImportError:
            name = install.partition("==")[0]
            raise NothingToCompareError(
                f"{name} is not installed, nothing is measured; run: pip install {install}"
            ) from None
        threads.threadpool_limits(self.args.threads)
        return found

    def compare(
        self,
        jobs: Sequence[Job],
        *,
        check: Callable[[dict[str, Any]], Any] = lambda answers: None,
        over: Callable[[str], tuple[str, str] | None] = lambda name: None,
    ) -> Comparison:
        """First calls, then ``check`` of their answers, which raises where one is wrong, then rounds in turn.

        Args:
            jobs: What is timed.
            check: Of the answers by name, without those that did not fit; what it returns is kept.
            over: The two jobs whose ratio of times stands beside a job, if any does.
        """
        device = self.args.device
        cells, answers = {}, {}
        for job in jobs:
            cells[job.name], answer = first_call(job, device)
            if not cells[job.name].note:
                answers[job.name] = answer
        compared = Comparison(cells, check(answers))
        del answers
        alternate(jobs, cells, device=device, rounds=self.args.rounds, budget=self.args.budget)
        for name in cells:
            a, b = (cells[other].wall if other in cells else None for other in over(name) or ("", ""))
            if a and b:
                compared.ratios[name] = a.over(b)
        compared.tell()
        release(device)
        return compared


@dataclass
class Comparison:
    """The jobs of one case: their times, what their check gave, and ratios of times."""

    cells: dict[str, Cell]
    checked: Any
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def ms(self) -> dict[str, dict[str, float]]:
        """Median and quartiles of the jobs that ran."""
        return {name: cell.wall.to_json() for name, cell in self.cells.items() if cell.wall}

    def to_json(self) -> Facts:
        """``jobs`` and ``ratios``, which :func:`benchmarks.harness.report.comparison` lays out."""
        return {"jobs": {name: cell.to_json() for name, cell in self.cells.items()}, "ratios": self.ratios}

    def tell(self) -> None:
        """A line for each job."""
        for name, cell in self.cells.items():
            times = f"{cell.wall.median:10.3f} ms" if cell.wall else " " * 13
            ratio = f"{self.ratios[name]['median']:9.2f}x" if name in self.ratios else " " * 10
            print(f"  {name:<26} {times} {ratio} {cell.note}", flush=True)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A capability beside its peers. Its module's docstring is the text of ``--help``."""

    parts: Mapping[str, Callable[[Run], Facts]]
    """What can be measured by name; what comes back is added to the facts."""
    report: Callable[[Facts], Sequence[str]]
    """The lines of the Markdown file, also of a file that an earlier run wrote."""
    default: Sequence[str] = ()
    """Parts that are measured when none is named; empty for all of them."""
    begin: Callable[[Run], Any] = lambda run: None
    """What the parts share, such as the peers that are here; becomes ``run.shared``."""
    options: Callable[[ArgumentParser], None] = lambda parser: None
    """Adds options of its own."""
    invalid: Callable[[Namespace], str | None] = lambda args: None
    """What is wrong with the options, if anything is."""
    finish: Callable[[Facts], None] = lambda facts: None
    """After the results were written, such as drawing a figure of them."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    rounds: int = 9
    budget: float | None = 20.0
    """Seconds of calls after which a job sits out the remaining rounds; None where nothing heeds it."""
    packages: tuple[str, ...] = ()
    """Whose versions are noted where they are installed."""
