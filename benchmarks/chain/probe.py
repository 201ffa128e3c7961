"""Run in a process of its own: memory of one call, or the time of the first calls.

Memory is the growth of the resident set at its highest during one call of likelihood and gradient, over what it was
with the inputs in place; small calls beforehand have loaded and compiled everything. Imports stand in the functions,
since :func:`first` times them.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

SIDES = ("Thalweg", "Thalweg low_memory", "pytorch-crf", "torch-struct")


def jobs_of(side: str, problem: Any) -> list[Any]:
    from benchmarks.chain.peers import PytorchCRF, TorchStruct
    from benchmarks.chain.sides import Ours

    if side.startswith("Thalweg"):
        return Ours().nll(problem, low_memory=side.endswith("low_memory"))
    return {"pytorch-crf": PytorchCRF, "torch-struct": TorchStruct}[side]().nll(problem)


def memory(side: str, size: tuple[int, int, int], *, device: str, budget: float) -> dict[str, Any]:
    """Bytes and seconds of one call, or a note where it does not fit memory or time."""
    from benchmarks.chain.problem import Problem
    from benchmarks.harness.device import available_bytes, out_of_memory, peak_extra, release

    warnings.filterwarnings("ignore")
    B, T, C = size
    short = min(T, 1000)
    # Loads and compiles; where that takes much work, also what several threads need, on little memory.
    sizes = [(min(B, 4), min(T, 64), C), *([(4, 32, 256)] if side == "Thalweg low_memory" else [])]
    for shape in sizes:
        warm = jobs_of(side, Problem.random(shape, device=device))[0]
        warm.run()
        warm.run()
        del warm
    if side == "pytorch-crf" and short < T:
        small = jobs_of(side, Problem.random((B, short, C), device=device))[0]
        began = time.perf_counter()
        small.run()
        expected = (time.perf_counter() - began) * T / short
        if expected > budget:
            return {"note": f"left out, would take about {expected:,.0f} s"}
        del small
    job = jobs_of(side, Problem.random(size, device=device))[0]
    release(device)
    if device == "cpu" and job.needs > available_bytes(device):
        return {"note": f"out of memory (needs {job.needs / 2**30:,.0f} GiB at least)"}
    try:
        began = time.perf_counter()
        extra = peak_extra(job.run, device)
        return {"bytes": extra, "seconds": time.perf_counter() - began, "gradients": 4 * (B * T * C + C * C + 2 * C)}
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    release(device)
    return {"note": "out of memory"}


def first(size: tuple[int, int, int], *, kind: str, device: str) -> dict[str, float]:
    """Seconds of the import, and of the first and second call of a kind."""
    began = time.perf_counter()
    from benchmarks.chain.problem import Problem
    from benchmarks.chain.sides import Ours
    from benchmarks.harness.device import synchronise

    times = {"import": time.perf_counter() - began}
    problem, ours = Problem.random(size, device=device), Ours()
    synchronise(device)
    job = {"nll": ours.nll, "viterbi": ours.decode}[kind](problem)[0]
    for name in ("first", "second"):
        began = time.perf_counter()
        job.run()
        synchronise(device)
        times[name] = time.perf_counter() - began
    return times
