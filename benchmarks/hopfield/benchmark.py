"""Retrieval from Hopfield memories beside hflayers and torch attention: same patterns, same machine, one run.

    python -m benchmarks hopfield --peer FOLDER --write                  on this CPU
    python -m benchmarks hopfield --peer FOLDER --device cuda --write    on a GPU

FOLDER contains the package ``hflayers`` (github.com/ml-jku/hopfield-layers, never on a package index); without it the
retrieval is measured alone. Results are compared with float64 before anything is timed; a wrong one ends the run.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from torch import Tensor

from benchmarks.harness.declaration import Benchmark, Facts, Run, demand
from benchmarks.harness.rates import multiply_adds
from benchmarks.harness.timing import Job
from benchmarks.hopfield.million import million
from benchmarks.hopfield.report import report
from benchmarks.hopfield.sides import (
    ATTENTION,
    KERNEL,
    PEER,
    TOLERANCE,
    Problem,
    Size,
    difference,
    find_peer,
    one_step_sides,
    retrieval_sides,
)
from thalweg.kernels.reference import memory as reference

SIZES: list[Size] = [(64, 100, 64), (256, 1000, 64), (1024, 4096, 128), (16, 10_000, 64)]
TINY: list[Size] = [(5, 20, 8)]
STEPS = (3, 10, None)
"""How many steps; none goes on until nothing moves."""
UNTIL_REST = 100
"""The most steps of a retrieval that goes on until nothing moves."""
SHARPNESS = {"mixtures": 1.0, "single patterns": 4.0}
ALLOWED = 1e-5
"""Difference from float64, in units of the largest entry, or twice what the peer has where rounding grows."""


def begin(run: Run) -> Any:
    """The peer, or None; and the machine's rate, which the report divides by."""
    run.facts["multiply_adds"] = multiply_adds(run.args.device)
    peer, missing = find_peer(run.args.peer)
    run.found({}, missing)
    return peer


def exact(problem: Problem, steps: int, tol: float) -> Tensor:
    queries, patterns = problem.queries.cpu().double(), problem.patterns.cpu().double()
    return reference.settle(queries, patterns, problem.beta, steps, tol, None, None).state


def checked(answers: dict[str, Tensor], wanted: Tensor, peer: str, allowed: float) -> dict[str, float]:
    """The differences from float64; those of our sides must be small, or at most twice the peer's."""
    away = {name: difference(found, wanted) for name, found in answers.items()}
    for name, found in away.items():
        if name != peer:
            demand(f"{name} beside float64", found, max(allowed, 2 * away.get(peer, 0.0)))
    return away


def retrieve(run: Run, size: Size, kind: str, steps: int | None) -> Facts:
    """One problem: all by so many steps, or each until it is at rest by its own measure."""
    print(f" {size} {kind} steps {steps or 'until rest'}", flush=True)
    problem = Problem.random(size, SHARPNESS[kind], device=run.args.device)
    most, tol = (UNTIL_REST, TOLERANCE) if steps is None else (steps, 0.0)
    sides = retrieval_sides(problem, most, tol, run.shared)
    made = sides[KERNEL]().steps.double()
    wanted, allowed = exact(problem, most, tol), 1e-3 if steps is None else ALLOWED
    compared = run.compare(
        [Job(name, side, lambda raw: getattr(raw, "state", raw), compiles=True) for name, side in sides.items()],
        check=lambda answers: checked(answers, wanted, PEER, allowed),
        over=lambda name: (PEER, name) if name != PEER else None,
    )
    return {
        "size": list(size),
        "kind": kind,
        "beta": problem.beta,
        "asked": steps,
        "differences_from_float64": compared.checked,
        "steps": {"mean": float(made.mean()), "most": int(made.max())},
        "ms": compared.ms,
        "ratios": compared.ratios,
    }


def one_step(run: Run, size: Size) -> Facts:
    """One association beside torch's attention."""
    print(f" {size}", flush=True)
    problem = Problem.random(size, 1.0, device=run.args.device)
    wanted = exact(problem, 1, -1.0)
    compared = run.compare(
        [Job(name, side, compiles=True) for name, side in one_step_sides(problem).items()],
        check=lambda answers: checked(answers, wanted, ATTENTION, ALLOWED),
        over=lambda name: (name, ATTENTION) if name != ATTENTION else None,
    )
    away = {"differences_from_float64": compared.checked}
    return {"size": list(size), **away, "ms": compared.ms, "ratios": compared.ratios}


def sizes_of(run: Run) -> list[Size]:
    return TINY if run.args.quick else SIZES


def retrievals(run: Run) -> Facts:
    cases = ((size, kind, steps) for size in sizes_of(run) for kind in SHARPNESS for steps in STEPS)
    return {"retrieval": [retrieve(run, *case) for case in cases]}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--peer", metavar="FOLDER", help="a folder that contains the package hflayers")


BENCHMARK = Benchmark(
    parts={
        "retrieval": retrievals,
        "one_step": lambda run: {"one_step": [one_step(run, size) for size in sizes_of(run)]},
        "million": million,
    },
    begin=begin,
    report=report,
    options=options,
)
