"""Linear chains beside pytorch-crf, torch-struct, torbi, hmmlearn and CRFsuite: same scores, same machine, one run.

    python benchmarks/chain.py --write                  results/chain-cpu.json, .md, docs/images/chain-growth-cpu.png
    python benchmarks/chain.py --device cuda --write    the same for a GPU
    python benchmarks/chain.py --quick                  tiny sizes, to see that it runs
    python benchmarks/chain.py --parts memory --write   measures one part again and keeps the others of the file

Peers are taken from this Python's environment (pip install -c constraints.txt pytorch-crf==0.7.2 torch-struct==0.5
hmmlearn==0.3.3 python-crfsuite==0.9.12); one that cannot be imported is left out. Results are checked for equality
before anything is timed (``chain_checks.py``); a wrong one ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chain_crfsuite
import numpy as np
import torch
from chain_checks import check_exact, check_full, jobs_for
from chain_floor import Rates, floor
from chain_growth import IMAGES, draw, growth, quantities, sparse
from chain_peers import Peer, find_peers
from chain_probe import SIDES, memory
from chain_report import markdown
from chain_sides import CHAIN, MODULE, Problem, Size, version_of
from chain_timing import Cell, alternate, kernel_ms, release
from common import RESULTS, WrongAnswerError, machine, write_results

import thalweg
from thalweg.errors import ThalwegError

SIZES: dict[str, list[Size]] = {
    "cpu": [(32, 128, 16), (32, 128, 64), (16, 512, 32), (1, 4096, 64), (256, 32, 9)],
    "cuda": [(32, 128, 16), (64, 512, 64), (64, 1024, 128), (256, 512, 32), (1, 16384, 64)],
}
MEMORY_SIZES: dict[str, list[Size]] = {
    "cpu": [(32, 128, 64), (1, 4096, 64), (4, 100_000, 32)],
    "cuda": [(64, 512, 64), (64, 1024, 128), (4, 100_000, 32)],
}
# Few labels and many, for which the kernels on the CPU differ.
FIRST_USE: dict[str, dict[str, list[Size]]] = {
    "cpu": {
        "nll": [(32, 128, 16), (32, 128, 32), (32, 128, 64), (32, 128, 128)],
        "viterbi": [(256, 32, 9), (32, 128, 16), (32, 128, 64)],
    },
    "cuda": {"nll": [(32, 128, 16), (64, 512, 64)], "viterbi": [(32, 128, 16), (64, 512, 64)]},
}
SPARSE_SIZE: Size = (8, 128, 1024)
TINY: list[Size] = [(4, 12, 5), (1, 20, 8)]
PARTS = ("nll", "viterbi", "crfsuite", "floor", "memory", "first_use", "growth", "quantities", "sparse")


def ratios(cells: dict[str, Cell]) -> dict[str, dict[str, float]]:
    """How many times faster: the module for pytorch-crf, whose interface it has, the distribution for the others."""
    found = {}
    for name, cell in cells.items():
        ours = cells[MODULE if name == "pytorch-crf" else CHAIN].wall
        if name not in (CHAIN, MODULE) and cell.wall and ours:
            found[name] = cell.wall.over(ours)
    return found


def compare(kind: str, size: Size, peers: Sequence[Peer], args: argparse.Namespace) -> dict[str, Any]:
    """Check, then time in turn, one size."""
    print(f"{kind} {size}", flush=True)
    check_exact(kind, size, peers, args.device)
    problem = Problem.random(size, device=args.device)
    jobs = jobs_for(kind, problem, peers)
    cells, differences = check_full(kind, problem, jobs, args.device)
    alternate(jobs, cells, device=args.device, rounds=args.rounds, budget=args.budget)
    facts: dict[str, Any] = {
        "size": list(size),
        "jobs": {name: cell.to_json() for name, cell in cells.items()},
        "differences_from_float64": differences,
        "ratios": ratios(cells),
    }
    if args.device == "cuda":
        facts["kernel_ms"] = kernel_ms(jobs[0].run)
    for name, cell in cells.items():
        times = f"{cell.wall.median:10.3f} ms" if cell.wall else " " * 13
        faster = f"{facts['ratios'][name]['median']:9.1f}x" if name in facts["ratios"] else " " * 10
        print(f"  {name:<20} {times} {faster} {cell.note}", flush=True)
    del jobs, problem
    release(args.device)
    return facts


def add_floors(facts: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The floor beside every size that was timed, and the machine's rates."""
    print("rates of this machine", flush=True)
    rates = Rates.measured(args.device)
    for kind in ("nll", "viterbi"):
        for cell in facts.get(kind, []):
            B, T, C = cell["size"]
            cell["floor"] = floor((B, T, C), kind, rates)
    return {"multiply_adds": rates.multiply_adds, "copies": rates.copies, "steps": rates.steps}


def probe(asked: dict[str, Any], *, timeout: float, **environment: str) -> dict[str, Any]:
    """An answer of ``chain_probe.py``."""
    script = Path(__file__).resolve().parent / "chain_probe.py"
    # A fixed threshold makes large blocks leave the process when they are freed, so that the peak is what was needed.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", **environment}
    try:
        ran = subprocess.run(
            [sys.executable, str(script), json.dumps(asked)],
            capture_output=True, text=True, env=env, timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"note": f"left out, more than {timeout:,.0f} s"}
    if ran.returncode < 0:
        return {"note": "out of memory (ended by the system)"}
    if ran.returncode:
        raise RuntimeError(f"chain_probe.py failed on {asked}:\n{ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


def measure_memory(args: argparse.Namespace, names: Sequence[str]) -> list[dict[str, Any]]:
    """Highest memory of one call by every side; in a process of its own on the CPU."""
    cells = []
    for size in TINY if args.quick else MEMORY_SIZES[args.device]:
        sides: dict[str, Any] = {}
        for side in SIDES:
            if not side.startswith("Thalweg") and side not in names:
                continue
            if args.device == "cuda":
                sides[side] = memory(side, size, device="cuda", budget=args.memory_budget)
            else:
                asked = {"what": "memory", "side": side, "size": size, "device": "cpu", "budget": args.memory_budget}
                sides[side] = probe({**asked, "threads": args.threads}, timeout=3 * args.memory_budget + 60)
            row = sides[side]
            print(
                f"  {size} {side}: {row['bytes'] / 2**20:,.1f} MiB"
                if "bytes" in row
                else f"  {size} {side}: {row['note']}"
            )
        B, T, C = size
        cells.append({"size": list(size), "unit": 4 * B * T * C, "sides": sides})
    return cells


def measure_first_use(args: argparse.Namespace) -> list[dict[str, Any]]:
    """First calls, each in a process of its own that finds no compiled kernels, and in one that finds those of it.

    The imports of torch and of Thalweg are not counted, those of what a call needs beside are.
    """
    cells = []
    for kind, sizes in FIRST_USE[args.device].items():
        for size in TINY[:1] if args.quick else sizes:
            asked = {"what": "first", "kind": kind, "size": size, "device": args.device, "threads": args.threads}
            with tempfile.TemporaryDirectory() as folder:
                places = {"NUMBA_CACHE_DIR": f"{folder}/numba", "TRITON_CACHE_DIR": f"{folder}/triton"}
                times = {how: probe(asked, timeout=600, **places) for how in ("compiling", "from the cache")}
            cells.append({"kind": kind, "size": list(size), **times})
            told = ", ".join(f"{how} {row['first']:.2f} s" for how, row in times.items())
            print(f"  {kind} {size}: {told}", flush=True)
    return cells


def facts_of_run(args: argparse.Namespace, peers: Sequence[Peer], missing: list[str]) -> dict[str, Any]:
    """Machine, versions, settings, and who is not there."""
    here = machine()
    here["title"] = torch.cuda.get_device_name() if args.device == "cuda" else f"{here['cpu']} ({here['cores']} cores)"
    versions = {"thalweg": thalweg.__version__, "torch": torch.__version__, "python": platform.python_version()}
    versions |= {"numpy": np.__version__}
    versions |= {
        name: version_of(name, sys.modules.get(name)) for name in (["triton"] if args.device == "cuda" else ["numba"])
    }
    suite = chain_crfsuite.version() if args.device == "cpu" else None
    if suite is None:
        why = "it is not installed" if args.device == "cpu" else "it has no cuda code"
        missing.append(f"{chain_crfsuite.NAME}: left out, {why}")
    else:
        versions["python-crfsuite"] = suite
    for line in missing:
        print(line)
    return {
        "place": "gpu" if args.device == "cuda" else "cpu",
        "machine": here,
        "versions": versions | {peer.name: peer.version for peer in peers},
        "peers": {peer.name: {"version": peer.version, "note": peer.note} for peer in peers},
        "left_out": missing,
        "threads": args.threads,
        "rounds": args.rounds,
        "one_run": True,
        "budget_s": args.budget,
    }


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the parts that were asked for."""
    peers, missing = find_peers(args.device)
    facts = facts_of_run(args, peers, missing)
    sizes = TINY if args.quick else SIZES[args.device]
    for kind in ("nll", "viterbi"):
        if kind in args.parts:
            facts[kind] = [compare(kind, size, peers, args) for size in sizes]
    if "floor" in args.parts:
        facts["rates"] = add_floors(facts, args)
    if "crfsuite" in args.parts and "python-crfsuite" in facts["versions"]:
        print("crfsuite", flush=True)
        measured = ((size, chain_crfsuite.measure(size, rounds=min(args.rounds, 5))) for size in sizes)
        facts["crfsuite"] = [{"size": list(size), **cell} for size, cell in measured]
    if "memory" in args.parts:
        print("memory of likelihood and gradient", flush=True)
        facts["memory"] = measure_memory(args, [peer.name for peer in peers])
    if "first_use" in args.parts:
        print("first calls", flush=True)
        facts["first_use"] = measure_first_use(args)
    if "growth" in args.parts:
        print("growth", flush=True)
        facts["growth"] = growth(args.device, rounds=min(args.rounds, 5), quick=args.quick)
    if "quantities" in args.parts:
        print("other quantities", flush=True)
        facts["quantities"] = quantities(sizes[1], device=args.device, rounds=args.rounds)
    if "sparse" in args.parts:
        print("sparse transitions", flush=True)
        size = (2, 6, 16) if args.quick else SPARSE_SIZE
        facts["sparse"] = sparse(size, device=args.device, rounds=args.rounds)
    return facts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of torch and of Thalweg's kernels")
    add("--rounds", type=int, default=9, help="alternating rounds of each comparison")
    add("--budget", type=float, default=40.0, help="seconds of calls after which a job sits out the remaining rounds")
    add("--memory-budget", type=float, default=200.0, help="seconds that one call may take in the memory part")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; everything by default")
    add("--quick", action="store_true", help="tiny sizes, to see that it runs")
    add("--write", action="store_true", help="write benchmarks/results/chain-cpu|gpu.json, .md and the figure")
    args = parser.parse_args()
    if args.rounds < 1 or args.threads < 1 or args.budget <= 0:
        parser.error("--rounds and --threads must be at least 1, --budget above 0")
    if args.quick and args.write:
        parser.error("--quick is no measurement and is not written")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    return args


def merged(facts: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """The parts that this run left out, from the file of an earlier one."""
    path = RESULTS / f"chain-{facts['place']}.json"
    if set(parts) == set(PARTS) or not path.exists():
        return facts
    return {**json.loads(path.read_text(encoding="utf-8")), **facts, "one_run": False}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    # torch-struct's distributions warn that they have no constraints.
    warnings.filterwarnings("ignore", message=".*arg_constraints.*")
    try:
        facts = gather(args)
    except WrongAnswerError as error:
        sys.exit(f"wrong answer, nothing is reported: {error}")
    except ThalwegError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted, nothing is reported")
    if args.write:
        facts = merged(facts, args.parts)
    text = markdown(facts)
    print("\n" + text)
    if args.write:
        name = f"chain-{facts['place']}"
        write_results(name, facts, text)
        if "growth" in facts:
            figure = IMAGES / f"chain-growth-{facts['place']}.png"
            if not draw(facts["growth"], figure, title=facts["machine"]["title"]):
                print(
                    f"no matplotlib here; draw the figure by: python benchmarks/chain_growth.py {RESULTS / name}.json"
                )


if __name__ == "__main__":
    main()
