r"""Run by ``chain.py`` in a process of its own: memory of one call, or the time of the first calls.

    python benchmarks/chain_probe.py \
        '{"what": "memory", "side": "Thalweg", "size": [32, 128, 64], "device": "cpu", "budget": 60}'

One JSON object comes out. Memory is the growth of the resident set at its highest during one call of likelihood and
gradient, over what it was with the inputs in place; small calls beforehand have loaded and compiled everything.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

SIDES = ("Thalweg", "Thalweg low_memory", "pytorch-crf", "torch-struct")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(key: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at its highest (all that systems without /proc tell)."""
    if STATUS.exists():
        lines = STATUS.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def jobs_of(side: str, problem: Any) -> list[Any]:
    from chain_peers import PytorchCRF, TorchStruct
    from chain_sides import Ours

    if side.startswith("Thalweg"):
        return Ours().nll(problem, low_memory=side.endswith("low_memory"))
    return {"pytorch-crf": PytorchCRF, "torch-struct": TorchStruct}[side]().nll(problem)


def peak_extra(run: Any, device: str) -> int:
    """Bytes at the highest point of a call, its results included, over those before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        raw = run()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
    else:
        if CLEAR.exists():
            CLEAR.write_text("5")  # the highest point so far becomes that of now
        before = resident("VmRSS")
        raw = run()
        extra = resident("VmHWM") - before
    del raw
    return extra


def memory(side: str, size: tuple[int, int, int], *, device: str, budget: float) -> dict[str, Any]:
    """Bytes and seconds of one call, or a note where it does not fit memory or time."""
    from chain_sides import Problem
    from chain_timing import available_bytes, out_of_memory, release

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
    problem = Problem.random(size, device=device)
    job = jobs_of(side, problem)[0]
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
    from chain_sides import Ours, Problem
    from chain_timing import synchronise

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


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked.pop("threads", 1))
    warnings.filterwarnings("ignore")
    what = {"memory": memory, "first": first}[asked.pop("what")]
    print(json.dumps(what(**{**asked, "size": tuple(asked["size"])})))


if __name__ == "__main__":
    main()
