"""The one main of all benchmarks: options, environment, parts, results."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness.declaration import Benchmark, Facts, NothingToCompareError, Run, WrongAnswerError
from benchmarks.harness.machine import machine, versions
from benchmarks.harness.process import ROOT
from thalweg.errors import ThalwegError

RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> tuple[Benchmark, str]:
    """The declaration of a benchmark and its docstring."""
    folder = (ROOT / "benchmarks" / name).is_dir()
    module = importlib.import_module(f"benchmarks.{name}.benchmark" if folder else f"benchmarks.{name}")
    return module.BENCHMARK, module.__doc__ or ""


def arguments(name: str, benchmark: Benchmark, description: str, argv: Sequence[str]) -> argparse.Namespace:
    """The options that all benchmarks have, and those of this one."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, parts = parser.add_argument, list(benchmark.parts)
    parser.set_defaults(device=benchmark.devices[0], parts=parts, budget=float("inf"))
    if len(benchmark.devices) > 1:
        add("--device", choices=benchmark.devices)
    if len(parts) > 1:
        default = list(benchmark.default) or parts
        told = "everything" if default == parts else ", ".join(default)
        add("--parts", nargs="+", choices=parts, default=default, help=f"what to measure; {told} by default")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of every side")
    add("--rounds", type=int, default=benchmark.rounds, help="alternating rounds (%(default)s)")
    if benchmark.budget:
        told = "seconds of calls after which a job sits out the remaining rounds (%(default)s)"
        add("--budget", type=float, default=benchmark.budget, help=told)
    benchmark.options(parser)
    add("--quick", action="store_true", help="tiny sizes, to see that it runs; no measurement")
    add("--write", action="store_true", help=f"write benchmarks/results/{stem(name, benchmark, '*')}.json and .md")
    add("--render", action="store_true", help="measure nothing; lay out the results that were written last")
    args = parser.parse_args(argv)
    wrong = benchmark.invalid(args)
    if args.rounds < 1 or args.threads < 1 or args.budget <= 0:
        wrong = "--rounds and --threads must be at least 1, --budget above 0"
    elif args.quick and args.write:
        wrong = "--quick is no measurement and is not written"
    elif args.device == "cuda" and not (args.render or torch.cuda.is_available()):
        wrong = "--device cuda: torch sees no GPU here"
    if wrong:
        parser.error(wrong)
    return args


def stem(name: str, benchmark: Benchmark, device: str) -> str:
    """Of the result files: ``sparse-maps-gpu``; the place is left out where there is one only."""
    place = {"cpu": "-cpu", "cuda": "-gpu"}.get(device, "-cpu|gpu")
    return name.replace("_", "-") + (place if len(benchmark.devices) > 1 else "")


def measure(benchmark: Benchmark, args: argparse.Namespace) -> Facts:
    """The environment, and the parts that were asked for."""
    torch.set_num_threads(args.threads)
    facts: Facts = {
        "place": "gpu" if args.device == "cuda" else "cpu",
        "machine": machine(args.device),
        "versions": versions(("numpy", *["triton"] * (args.device == "cuda"), *benchmark.packages)),
        "threads": args.threads,
        "rounds": args.rounds,
        "one_run": True,
    }
    if benchmark.budget:
        facts["budget_s"] = args.budget
    with tempfile.TemporaryDirectory() as folder:
        run = Run(args, facts, Path(folder))
        run.shared = benchmark.begin(run)
        for part, measured in benchmark.parts.items():
            if part in args.parts:
                print(part, flush=True)
                facts |= measured(run)
    return facts


def merged(facts: Facts, earlier: Path) -> Facts:
    """With the parts that this run left out, from the file of an earlier one."""
    if not earlier.exists():
        return facts
    before = json.loads(earlier.read_text(encoding="utf-8"))
    return {**before, **facts, "versions": {**before["versions"], **facts["versions"]}, "one_run": False}


def markdown(benchmark: Benchmark, facts: Facts) -> str:
    return "\n".join(benchmark.report(facts)).rstrip() + "\n"


def write(benchmark: Benchmark, facts: Facts, path: Path) -> None:
    """The JSON file with every figure, the Markdown file for people beside it, and what else the benchmark makes."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(benchmark, facts), encoding="utf-8")
    benchmark.finish(facts)


def run(name: str, argv: Sequence[str]) -> None:
    """``python -m benchmarks NAME ...``."""
    benchmark, description = load(name)
    args = arguments(name, benchmark, description, argv)
    path = RESULTS / f"{stem(name, benchmark, args.device)}.json"
    if args.render:
        if not path.exists():
            sys.exit(f"expected results of an earlier run at {path}, got none; measure with --write first")
        write(benchmark, json.loads(path.read_text(encoding="utf-8")), path)
        return
    try:
        facts = measure(benchmark, args)
    except WrongAnswerError as error:
        sys.exit(f"wrong answer, nothing is reported: {error}")
    except ThalwegError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted, nothing is reported")
    except NothingToCompareError as error:
        print(f"\n{error}")
        return
    if args.write and set(args.parts) != set(benchmark.parts):
        facts = merged(facts, path)
    print("\n" + markdown(benchmark, facts))
    if args.write:
        write(benchmark, facts, path)
