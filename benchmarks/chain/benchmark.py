"""Linear chains beside pytorch-crf, torch-struct, torbi, hmmlearn and CRFsuite: same scores, same machine, one run.

    python -m benchmarks chain --write                  also draws docs/images/chain-growth-cpu.png
    python -m benchmarks chain --device cuda --write    the same for a GPU
    python -m benchmarks chain --parts memory --write   measures one part again and keeps the others of the file

Peers are taken from this Python's environment (pip install -c constraints.txt pytorch-crf==0.7.2 torch-struct==0.5
hmmlearn==0.3.3 python-crfsuite==0.9.12); one that cannot be imported is left out. Results are checked for equality
before anything is timed (``checks.py``); a wrong one ends the run.
"""

from __future__ import annotations

import tempfile
import warnings
from functools import partial
from itertools import product
from typing import Any

from benchmarks.chain import crfsuite
from benchmarks.chain.checks import check_exact, check_full, jobs_for
from benchmarks.chain.floor import floor
from benchmarks.chain.growth import draw, growth
from benchmarks.chain.peers import Peer, find_peers
from benchmarks.chain.probe import SIDES, first, memory
from benchmarks.chain.problem import Problem, Size
from benchmarks.chain.quantities import quantities, sparse
from benchmarks.chain.report import report
from benchmarks.chain.sides import CHAIN, MODULE
from benchmarks.harness.declaration import Benchmark, Facts, Run
from benchmarks.harness.process import alone
from benchmarks.harness.rates import Rates
from benchmarks.harness.timing import kernel_ms

SIZES: dict[str, list[Size]] = {
    "cpu": [(32, 128, 16), (32, 128, 64), (16, 512, 32), (1, 4096, 64), (256, 32, 9)],
    "cuda": [(32, 128, 16), (64, 512, 64), (64, 1024, 128), (256, 512, 32), (1, 16384, 64)],
}
MEMORY_SIZES: dict[str, list[Size]] = {
    "cpu": [(32, 128, 64), (1, 4096, 64), (4, 100_000, 32)],
    "cuda": [(64, 512, 64), (64, 1024, 128), (4, 100_000, 32)],
}
MEMORY_SECONDS = 200.0
"""That one call may take in the memory part."""
FIRST_USE: list[Size] = [(32, 128, 16), (64, 512, 64)]
SPARSE_SIZE: Size = (8, 128, 1024)
TINY: list[Size] = [(4, 12, 5), (1, 20, 8)]


def begin(run: Run) -> list[Peer]:
    """The peers that are here."""
    # torch-struct's distributions warn that they have no constraints.
    warnings.filterwarnings("ignore", message=".*arg_constraints.*")
    peers, missing = find_peers(run.args.device)
    suite = crfsuite.version() if run.args.device == "cpu" else None
    if suite is None:
        why = "it is not installed" if run.args.device == "cpu" else "it has no cuda code"
        missing.append(f"{crfsuite.NAME}: left out, {why}")
    run.found({"python-crfsuite": suite} if suite else {}, missing)
    run.found({peer.name: peer.version for peer in peers}, [])
    run.facts["peers"] = {peer.name: {"version": peer.version, "note": peer.note} for peer in peers}
    return peers


def over(name: str) -> tuple[str, str] | None:
    """A peer over ours: the module for pytorch-crf, whose interface it has, the distribution for the others."""
    return None if name in (CHAIN, MODULE) else (name, MODULE if name == "pytorch-crf" else CHAIN)


def sizes_of(run: Run) -> list[Size]:
    return TINY if run.args.quick else SIZES[run.args.device]


def compare(kind: str, run: Run) -> Facts:
    """Check, then time in turn, every size."""
    device, cells = run.args.device, []
    for size in sizes_of(run):
        print(f" {size}", flush=True)
        check_exact(kind, size, run.shared, device)
        problem = Problem.random(size, device=device)
        jobs = jobs_for(kind, problem, run.shared)
        compared = run.compare(jobs, check=lambda found, p=problem: check_full(kind, p, found, device), over=over)
        cell = {"size": list(size), "differences_from_float64": compared.checked, **compared.to_json()}
        cells.append(cell | ({"kernel_ms": kernel_ms(jobs[0].run)} if device == "cuda" else {}))
        del jobs, problem, compared
    return {kind: cells}


def floors(run: Run) -> Facts:
    """The floor beside every size that was timed, and the machine's rates."""
    rates = Rates.measured(run.args.device)
    for kind in ("nll", "viterbi"):
        for cell in run.facts.get(kind, []):
            B, T, C = cell["size"]
            cell["floor"] = floor((B, T, C), kind, rates)
    return {"rates": rates.to_json()}


def suite(run: Run) -> Facts:
    """CRFsuite, where it is here."""
    if "python-crfsuite" not in run.facts["versions"]:
        return {}
    rounds = min(run.args.rounds, 5)
    return {"crfsuite": [{"size": list(size), **crfsuite.measure(size, rounds=rounds)} for size in sizes_of(run)]}


def measure_memory(run: Run) -> Facts:
    """Highest memory of one call by every side; in a process of its own on the CPU."""
    device, cells = run.args.device, []
    here = [peer.name for peer in run.shared]
    for size in TINY if run.args.quick else MEMORY_SIZES[device]:
        sides: dict[str, Any] = {}
        for side in (side for side in SIDES if side.startswith("Thalweg") or side in here):
            asked = {"side": side, "size": size, "device": device, "budget": MEMORY_SECONDS}
            if device == "cuda":
                row = memory(**asked)
            else:
                row = alone(memory, threads=run.args.threads, timeout=3 * MEMORY_SECONDS + 60, **asked)
            sides[side] = row
            print(f"  {size} {side}: {row.get('note') or format(row['bytes'] / 2**20, ',.1f') + ' MiB'}", flush=True)
        B, T, C = size
        cells.append({"size": list(size), "unit": 4 * B * T * C, "sides": sides})
    return {"memory": cells}


def measure_first_use(run: Run) -> Facts:
    """First calls, each in a process of its own that finds no compiled kernels, and in one that finds those of it.

    On a GPU alone: kernels for the CPU are compiled when Thalweg is installed. The imports of torch and of Thalweg are
    not counted, those of what a call needs beside are.
    """
    cells = []
    for kind, size in product(("nll", "viterbi"), FIRST_USE if run.args.device == "cuda" else []):
        asked = {"kind": kind, "size": size, "device": run.args.device, "threads": run.args.threads}
        with tempfile.TemporaryDirectory() as folder:
            place = {"TRITON_CACHE_DIR": folder}
            rows = {how: alone(first, environment=place, **asked) for how in ("compiling", "from the cache")}
        cells.append({"kind": kind, "size": list(size), **rows})
        told = ", ".join(f"{how} {row['first']:.2f} s" for how, row in rows.items())
        print(f"  {kind} {size}: {told}", flush=True)
    return {"first_use": cells} if cells else {}


BENCHMARK = Benchmark(
    parts={
        "nll": partial(compare, "nll"),
        "viterbi": partial(compare, "viterbi"),
        "floor": floors,
        "crfsuite": suite,
        "memory": measure_memory,
        "first_use": measure_first_use,
        "growth": growth,
        "quantities": lambda run: quantities(run, sizes_of(run)[1]),
        "sparse": lambda run: sparse(run, (2, 6, 16) if run.args.quick else SPARSE_SIZE),
    },
    begin=begin,
    report=report,
    finish=draw,
    budget=40.0,
)
