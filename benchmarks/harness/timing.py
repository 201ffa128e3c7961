"""Calls of several jobs in turn: wall-clock time, device time besides, and what did not fit.

The wall-clock of a call on a GPU runs until the device has finished, which is what a person waits for.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.harness.device import available_bytes, out_of_memory, release, synchronise

ENOUGH_SECONDS = 0.1
"""A round of a fast job repeats it until about this much time has passed."""
WARM_SECONDS = 1.0
"""A job whose first call took longer needs no further call to warm up."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def over(self, other: Spread) -> dict[str, float]:
        """Ratio of the medians, with what the quartiles allow at worst and at best."""
        return {
            "median": self.median / other.median,
            "low": self.low / other.high,
            "high": self.high / other.low,
        }

    def to_json(self) -> dict[str, float]:
        """As plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.median:,.0f} [{self.low:,.0f}, {self.high:,.0f}]"


@dataclass(frozen=True)
class Job:
    """What is timed, and how its result is read afterwards, untimed, for the check."""

    name: str
    run: Callable[[], Any]
    read: Callable[[Any], Any] = lambda raw: raw
    single: bool = False
    """Computes in float32 whatever it is given."""
    needs: int = 0
    """Bytes below which it cannot run, where that is known."""
    compiles: bool = False
    """The first call may compile, and says nothing about the others."""


@dataclass
class Cell:
    """One job at one size: seconds of the first call and of the rounds, or why there are none."""

    first: float = 0.0
    walls: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)
    spent: float = 0.0
    note: str = ""

    @property
    def wall(self) -> Spread | None:
        """Milliseconds a call."""
        return Spread.of([1e3 * seconds for seconds in self.walls]) if self.walls else None

    def to_json(self) -> dict[str, Any]:
        """Milliseconds as plain JSON values."""
        facts: dict[str, Any] = {"first_ms": 1e3 * self.first, "note": self.note}
        if self.wall:
            facts["ms"] = self.wall.to_json()
        if self.events:
            facts["device_ms"] = Spread.of([1e3 * seconds for seconds in self.events]).to_json()
        return facts


def first_call(job: Job, device: str) -> tuple[Cell, Any]:
    """The result of the first call, None where it does not fit."""
    cell = Cell()
    if device == "cpu" and job.needs > available_bytes(device):
        # The system would end this process, or others, in place of an error.
        cell.note = f"out of memory (needs {job.needs / 2**30:,.0f} GiB at least)"
        return cell, None
    try:
        synchronise(device)
        began = time.perf_counter()
        raw = job.run()
        synchronise(device)
        cell.first = time.perf_counter() - began
        return cell, job.read(raw)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        cell.note = "out of memory"
    release(device)
    return cell, None


def one_round(job: Job, cell: Cell, device: str, repeats: int) -> None:
    """So many calls, timed together."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
    synchronise(device)
    began = time.perf_counter()
    if marks:
        marks[0].record()
    for _ in range(repeats):
        job.run()
    if marks:
        marks[1].record()
    synchronise(device)
    wall = time.perf_counter() - began
    cell.walls.append(wall / repeats)
    cell.spent += wall
    if marks:
        cell.events.append(marks[0].elapsed_time(marks[1]) / 1e3 / repeats)


def alternate(jobs: Sequence[Job], cells: dict[str, Cell], *, device: str, rounds: int, budget: float) -> None:
    """Every job once a round, in turn; after one round, one whose calls have taken ``budget`` seconds sits out.

    A first call that alone takes more than the budget is its only measurement.
    """
    running = [job for job in jobs if not cells[job.name].note]
    repeats: dict[str, int] = {}
    for job in list(running):
        cell = cells[job.name]
        if cell.first > budget and not job.compiles:
            cell.walls, cell.note = [cell.first], "one call"
            running.remove(job)
            continue
        warm = Cell(walls=[cell.first])
        if cell.first < WARM_SECONDS or job.compiles:
            one_round(job, warm, device, 1)
            one_round(job, warm, device, 1)
        repeats[job.name] = max(1, min(200, round(ENOUGH_SECONDS / warm.walls[-1])))
    for _ in range(rounds):
        for job in running:
            cell = cells[job.name]
            if not cell.walls or cell.spent < budget:
                for _ in range(3 if repeats[job.name] > 3 else 0):
                    job.run()  # the job before has left its own data in the caches, and its threads spinning
                one_round(job, cell, device, repeats[job.name])


def quick_spread(run: Callable[[], Any], device: str, *, rounds: int) -> Spread:
    """Milliseconds of one job by itself, after a call to warm up."""
    job = Job("", run, compiles=True)
    cell, _ = first_call(job, device)
    alternate([job], {"": cell}, device=device, rounds=rounds, budget=60.0)
    if cell.wall is None:
        raise RuntimeError(cell.note)
    return cell.wall


def rates_in_turn(
    jobs: dict[str, Callable[[], float]], rounds: int, *, budget: float = math.inf, least: float = 0.0
) -> dict[str, list[float]]:
    """For jobs that return how much they do a second: every one in each round, again until ``least`` seconds passed.

    One that has had its budget sits out the rounds after the second.
    """
    values: dict[str, list[float]] = {name: [] for name in jobs}
    spent = dict.fromkeys(jobs, 0.0)
    for number in range(1, rounds + 1):
        for name, job in jobs.items():
            if spent[name] > budget and number > 2:
                continue
            began = time.perf_counter()
            rates = [job()]
            while time.perf_counter() - began < least:
                rates.append(job())
            values[name].append(statistics.harmonic_mean(rates))
            spent[name] += time.perf_counter() - began
            print(f"  round {number}: {name} {values[name][-1]:,.0f} a second", flush=True)
    return values


def profiled(run: Callable[[], Any], *, calls: int = 1) -> list[Any]:
    """A GPU profiler's records of so many calls after one to warm up; none without a profiler."""
    from torch.profiler import ProfilerActivity, profile

    try:
        run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as records:
            for _ in range(calls):
                run()
            torch.cuda.synchronize()
        return list(records.key_averages())
    except (RuntimeError, AttributeError, AssertionError):
        return []


def kernel_ms(run: Callable[[], Any], *, calls: int = 10) -> float | None:
    """Milliseconds a call in which the GPU's kernels run, launches and gaps left out; None without a profiler."""
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    events = [event for event in profiled(run, calls=calls) if event.device_type == cuda]
    return sum(event.self_device_time_total for event in events) / 1e3 / calls or None
