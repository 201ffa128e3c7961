"""Retrieval from Hopfield memories beside hflayers and torch attention: same patterns, same machine, one run.

    python benchmarks/hopfield.py --peer FOLDER --write            results/hopfield-cpu.json, .md
    python benchmarks/hopfield.py --peer FOLDER --device cuda --write    the same for a GPU
    python benchmarks/hopfield.py --quick                          tiny sizes, to see that it runs

FOLDER contains the package ``hflayers`` (github.com/ml-jku/hopfield-layers, never on a package index); without it the
retrieval is measured alone. Results are compared with float64 before anything is timed; a wrong one ends the run.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import hopfield_report
import torch
from chain_floor import multiply_adds
from chain_sides import Job, version_of
from chain_timing import Cell, alternate, first_call, release, synchronise
from common import RESULTS, Spread, WrongAnswerError, machine, write_results
from hopfield_sides import (
    ATTENTION,
    KERNEL,
    MEMORY,
    PEER,
    TOLERANCE,
    UNTIL_REST,
    Problem,
    Size,
    find_peer,
    kernel_side,
    memory_side,
    one_step_sides,
    peer_side,
)
from torch import Tensor

import thalweg
from thalweg.errors import ThalwegError
from thalweg.kernels.memory import associate, nearest, settle
from thalweg.kernels.reference import memory as reference

SIZES: list[Size] = [(64, 100, 64), (256, 1000, 64), (1024, 4096, 128), (16, 10_000, 64)]
TINY: list[Size] = [(5, 20, 8)]
STEPS = (3, 10, None)
"""How many steps; none goes on until nothing moves."""
SHARPNESS = {"mixtures": 1.0, "single patterns": 4.0}
ALLOWED = 1e-5
"""Difference from float64, in units of the largest entry, or twice what the peer has where rounding grows."""
MILLION = (1_000_000, 64)
ASKED = {"cpu": (1, 16, 256), "cuda": (1, 16, 1024)}
PARTS = ("retrieval", "one_step", "million")


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest, in units of the largest entry."""
    return float((found.cpu().double() - wanted).abs().max() / wanted.abs().max())


def exact(problem: Problem, steps: int, tol: float) -> Tensor:
    queries, patterns = problem.queries.cpu().double(), problem.patterns.cpu().double()
    return reference.settle(queries, patterns, problem.beta, steps, tol, None, None).state


def jobs_for(problem: Problem, steps: int | None, peer: ModuleType | None) -> tuple[list[Job], dict[str, Any]]:
    """Retrievals of one problem, checked: all by so many steps, or each until it is at rest by its own measure."""
    forced = steps is not None
    most, tol = (steps, 0.0) if forced else (UNTIL_REST, TOLERANCE)
    sides: dict[str, Callable[[], Any]] = {
        KERNEL: kernel_side(problem, most, tol),
        MEMORY: memory_side(problem, most, tol),
    }
    if peer is not None:
        sides[PEER] = peer_side(peer, problem, most, 1e-30 if forced else TOLERANCE)
    wanted = exact(problem, most, tol)
    states = {name: run() for name, run in sides.items()}
    states = {name: found if isinstance(found, Tensor) else found.state for name, found in states.items()}
    away = {name: difference(state, wanted) for name, state in states.items()}
    allowed = max(ALLOWED, 2 * away.get(PEER, 0.0)) if forced else 1e-3
    for name, found in away.items():
        if name != PEER and found > allowed:
            raise WrongAnswerError(f"{name} differs from float64 by {found:.1e}, allowed is {allowed:.1e}")
    facts: dict[str, Any] = {"differences_from_float64": away}
    made = kernel_side(problem, most, tol)().steps.double()
    facts["steps"] = {"mean": float(made.mean()), "most": int(made.max())}
    return [Job(name, run, lambda raw: raw, compiles=True) for name, run in sides.items()], facts


def timed(jobs: Sequence[Job], args: argparse.Namespace) -> dict[str, Cell]:
    cells = {job.name: first_call(job, args.device)[0] for job in jobs}
    alternate(jobs, cells, device=args.device, rounds=args.rounds, budget=args.budget)
    return cells


def compare(size: Size, kind: str, steps: int | None, peer: ModuleType | None, args: argparse.Namespace) -> Any:
    """Check, then time in turn, one retrieval."""
    print(f"{size} {kind} steps {steps or 'until rest'}", flush=True)
    problem = Problem.random(size, SHARPNESS[kind], device=args.device)
    jobs, facts = jobs_for(problem, steps, peer)
    cells = timed(jobs, args)
    walls = {name: cell.wall for name, cell in cells.items() if cell.wall}
    theirs = walls.get(PEER)
    ratios = {name: theirs.over(wall) for name, wall in walls.items() if theirs and name != PEER}
    for name, wall in walls.items():
        faster = f"{ratios[name]['median']:8.1f}x" if name in ratios else ""
        print(f"  {name:<18} {wall.median:10.3f} ms {faster}  off {facts['differences_from_float64'][name]:.0e}")
    release(args.device)
    return {
        "size": list(size),
        "kind": kind,
        "beta": problem.beta,
        "asked": steps,
        **facts,
        "ms": {name: wall.to_json() for name, wall in walls.items()},
        "ratios": ratios,
    }


def one_step(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """One association beside torch's attention."""
    print(f"one step {size}", flush=True)
    problem = Problem.random(size, 1.0, device=args.device)
    sides, wanted = one_step_sides(problem), exact(problem, 1, -1.0)
    away = {name: difference(run(), wanted) for name, run in sides.items()}
    for name, found in away.items():
        if name != ATTENTION and found > max(ALLOWED, 2 * away[ATTENTION]):
            raise WrongAnswerError(f"{name} differs from float64 by {found:.1e}")
    cells = timed([Job(name, run, lambda raw: raw, compiles=True) for name, run in sides.items()], args)
    walls = {name: cell.wall for name, cell in cells.items() if cell.wall}
    for name, wall in walls.items():
        share = wall.median / walls[ATTENTION].median
        print(f"  {name:<24} {wall.median:10.3f} ms, {share:.2f} of torch attention", flush=True)
    release(args.device)
    return {
        "size": list(size),
        "differences_from_float64": away,
        "ms": {name: wall.to_json() for name, wall in walls.items()},
        "ratios": {name: wall.over(walls[ATTENTION]) for name, wall in walls.items() if name != ATTENTION},
    }


def highest_memory(device: str, *, anew: bool = False) -> int:
    """Bytes that were held at most since the last time that counting began anew."""
    if device == "cuda":
        if anew:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.is_file():
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if anew:
        reset.write_text("5", encoding="ascii")
    line = next(x for x in status.read_text(encoding="ascii").splitlines() if x.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def million(count: int, asked: int, args: argparse.Namespace) -> dict[str, Any]:
    """One call of every kind among so many patterns: milliseconds, and memory above that of the patterns."""
    device, width = args.device, MILLION[1]
    torch.manual_seed(0)
    patterns = torch.randn(count, width, device=device)
    patterns *= (width**0.5 / torch.linalg.vector_norm(patterns, dim=1))[:, None]  # one length: none outshines others
    queries = patterns[:asked] + 0.5 * torch.randn(asked, width, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "associate": lambda: associate(queries, patterns, patterns, beta=1.0),
        "settle": lambda: settle(queries, patterns, beta=1.0, max_steps=20, tol=TOLERANCE),
        "nearest 10": lambda: nearest(queries, patterns, 10),
    }
    facts: dict[str, Any] = {"queries": asked, "patterns": count, "weights_bytes": 4 * asked * count}
    # Kernels are compiled among few patterns on the CPU, so that the highest memory is that of the calls below.
    few = patterns[:100] if device == "cpu" else patterns
    associate(queries, few, few, beta=1.0)
    settle(queries, few, beta=1.0, max_steps=2, tol=TOLERANCE)
    nearest(queries, few, 10)
    for name, call in calls.items():
        synchronise(device)
        before = highest_memory(device, anew=True)
        walls = []
        for _ in range(max(3, args.rounds // 2)):
            began = time.perf_counter()
            call()
            synchronise(device)
            walls.append(1e3 * (time.perf_counter() - began))
        facts[name] = {"ms": Spread.of(walls).to_json(), "bytes": highest_memory(device) - before}
    state = settle(queries, patterns, beta=1.0, max_steps=20, tol=TOLERANCE).state
    if difference(state, patterns[:asked].cpu().double()) > 0.1:
        raise WrongAnswerError("a query did not come back to the pattern that it was made from")
    if nearest(queries, patterns, 10)[1][:, 0].tolist() != list(range(asked)):
        raise WrongAnswerError("the nearest pattern is not the one that a query was made from")
    return facts


def million_parts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """On the CPU in a process for each, whose highest memory says what a call needed."""
    count = 5000 if args.quick else MILLION[0]
    rows = []
    for asked in ASKED[args.device]:
        print(f"{count:,} patterns, {asked} queries", flush=True)
        if args.device == "cuda":
            rows.append(million(count, asked, args))
        else:
            command = [sys.executable, __file__, "--alone", str(count), str(asked), "--rounds", str(args.rounds)]
            command += ["--threads", str(args.threads)]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise RuntimeError(f"a process of its own failed:\n{ran.stderr}")
            rows.append(json.loads(ran.stdout.splitlines()[-1]))
        for name in ("associate", "settle", "nearest 10"):
            found = rows[-1][name]
            print(f"  {name:<12} {found['ms']['median']:10.2f} ms, {found['bytes'] / 2**20:,.0f} MiB more", flush=True)
    return rows


def gather(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the parts that were asked for."""
    peer, missing = find_peer(args.peer)
    here = machine()
    here["title"] = torch.cuda.get_device_name() if args.device == "cuda" else f"{here['cpu']} ({here['cores']} cores)"
    compiler = "triton" if args.device == "cuda" else "numba"
    versions = {"thalweg": thalweg.__version__, "torch": torch.__version__, "python": platform.python_version()}
    versions |= {compiler: version_of(compiler)}
    if peer is None:
        print(missing)
    facts: dict[str, Any] = {
        "place": "gpu" if args.device == "cuda" else "cpu",
        "machine": here,
        "versions": versions,
        "left_out": [missing] if missing else [],
        "threads": args.threads,
        "rounds": args.rounds,
        "one_run": True,
        "multiply_adds": multiply_adds(args.device),
    }
    sizes = TINY if args.quick else SIZES
    if "retrieval" in args.parts:
        facts["retrieval"] = [
            compare(size, kind, steps, peer, args) for size in sizes for kind in SHARPNESS for steps in STEPS
        ]
    if "one_step" in args.parts:
        facts["one_step"] = [one_step(size, args) for size in sizes]
    if "million" in args.parts:
        facts["million"] = million_parts(args)
    return facts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--peer", metavar="FOLDER", help="a folder that contains the package hflayers")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of torch and of Thalweg's kernels")
    add("--rounds", type=int, default=9, help="alternating rounds of each comparison")
    add("--budget", type=float, default=20.0, help="seconds of calls after which a job sits out the remaining rounds")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; everything by default")
    add("--quick", action="store_true", help="tiny sizes, to see that it runs")
    add("--write", action="store_true", help="write benchmarks/results/hopfield-cpu|gpu.json and .md")
    add("--alone", nargs=2, type=int, help=argparse.SUPPRESS)
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
    path = RESULTS / f"hopfield-{facts['place']}.json"
    if set(parts) == set(PARTS) or not path.exists():
        return facts
    return {**json.loads(path.read_text(encoding="utf-8")), **facts, "one_run": False}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.alone:
        print(json.dumps(million(*args.alone, args)))
        return
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
    text = hopfield_report.markdown(facts)
    print("\n" + text)
    if args.write:
        write_results(f"hopfield-{facts['place']}", facts, text)


if __name__ == "__main__":
    main()
