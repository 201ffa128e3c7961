"""A model over HTTP beside the same model called directly: a lone word, 64 callers at once, memory over many requests.

    python -m benchmarks serving --run runs/demo --write      on this CPU, with the model that `make demo` trains
    python -m benchmarks serving --quick                      a tiny model, to see that it works

The service is `thalweg serve` in a process of its own, the callers are in another; everything is on this machine. Words
are searched with a beam of 5 for 5 answers. The answers of both sides must agree before anything is timed.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.declaration import Benchmark, Facts, Run, demand
from benchmarks.harness.timing import Job
from thalweg.serve.client import Client

CLIENTS, AT_A_TIME, WORKERS = 64, 50, 2
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"

# Callers in a process of their own, so that they do not share the interpreter lock with anything that is measured.
CALLERS = """
import asyncio, json, sys, time, uvloop
port, clients, words = int(sys.argv[1]), int(sys.argv[2]), json.load(sys.stdin)
async def call(waiting):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while waiting:
        body = json.dumps({"inputs": [waiting.pop()], "k": 5}).encode()
        head = "POST /v1/predict HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
        head += "Content-Length: %d\\r\\n\\r\\n"
        writer.write((head % len(body)).encode() + body)
        answer = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
        assert b" 200 " in answer, answer
        await reader.readexactly(int(answer.split(b"content-length: ")[1].split(b"\\r")[0]))
    writer.close()
async def main():
    began = time.perf_counter()
    await asyncio.gather(*(call(words) for _ in range(clients)))
    return time.perf_counter() - began
print(uvloop.run(main()))
"""


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, help="the run that is served; a tiny one is trained where none is given")


def words(count: int, seed: int) -> list[str]:
    """Made-up words, so that hardly any is asked for twice."""
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, weights=range(26, 0, -1), k=draw.randint(4, 10))) for _ in range(count)]


def trained(run: Run) -> Path:
    """The run that was named, or a tiny one."""
    if run.args.run is not None:
        return run.args.run
    import thalweg

    pairs = run.folder / "pairs.tsv"
    pairs.write_text("".join(f"{word}\t{word[::-1]}\n" for word in words(200, 9)))
    settings = {"data": {"train": str(pairs)}, "model": {"hidden": 16}, "training": {"epochs": 1, "device": "cpu"}}
    thalweg.train(settings, run.folder / "tiny")
    return run.folder / "tiny"


@contextmanager
def service(run: Run, *more: str, workers: int = 1) -> Iterator[tuple[str, int]]:
    """The address of a service, and the number of its process; workers share out the threads."""
    command = [sys.executable, "-m", "thalweg", "serve", str(run.shared), "--port", "0", "--device", "cpu", *more]
    command += ["--workers", str(workers), "--threads", str(max(1, run.facts["threads"] // workers))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        found = re.search(r"http://[\d.:]+", process.stdout.readline())
        if not found:
            raise RuntimeError("the service did not start")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                Client(found[0]).predict("warm", k=5)
                break
            except OSError:
                time.sleep(0.05)
        yield found[0], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def resident(pid: int) -> float:
    """MiB that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def load(address: str, clients: int, asked: list[str]) -> float:
    """Words answered a second."""
    port = address.rpartition(":")[2]
    command = [sys.executable, "-c", CALLERS, port, str(clients)]
    ran = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
    return len(asked) / float(ran.stdout)


def lone(run: Run) -> Facts:
    """Words one by one, over HTTP and called directly, in turn."""
    import thalweg

    model = thalweg.load(run.shared, device="cpu")
    asked = words(5 if run.args.quick else AT_A_TIME, 0)
    with service(run) as (address, _), Client(address) as client:

        def over_http() -> list[Any]:
            return [client.predict(word, k=5)[0] for word in asked]

        def directly() -> list[Any]:
            return [next(model.predict([word], k=5)).to_json() for word in asked]

        def check(answers: dict[str, Any]) -> float:
            worst = 0.0
            for ours, theirs in zip(*(answers[name] for name in ("HTTP", "direct")), strict=True):
                for a, b in zip(ours["answers"], theirs["answers"], strict=True):
                    worst = max(worst, abs(a["log_prob"] - b["log_prob"]))
            demand("log-probabilities over HTTP", worst, 1e-3)
            return worst

        jobs = [Job("direct", directly), Job("HTTP", over_http)]
        compared = run.compare(jobs, check=check, over=lambda name: ("HTTP", "direct") if name == "HTTP" else None)
    ms = {name: {key: value / len(asked) for key, value in times.items()} for name, times in compared.ms.items()}
    return {"lone": {"ms": ms, "ratio": compared.ratios["HTTP"], "difference": compared.checked}}


def throughput(run: Run) -> Facts:
    """One caller; 64, each answered alone; 64, answered together; and those by a process for each of two threads."""
    rounds, count = (1, 200) if run.args.quick else (5, 5000)
    rates: dict[str, list[float]] = {"one": [], "alone": [], "many": [], "several": []}
    with (
        service(run) as (address, _),
        service(run, "--batch", "1") as (alone, _),
        service(run, workers=WORKERS) as (several, _),
    ):
        callers = {"one": (address, 1, count // 5), "alone": (alone, CLIENTS, count // 5)}
        callers |= {"many": (address, CLIENTS, count), "several": (several, CLIENTS, count)}
        for n in range(1 + rounds):  # the first is for practice
            for place, (name, (at, clients, asked)) in enumerate(callers.items()):
                rates[name].append(load(at, clients, words(asked, len(callers) * n + place)))
    rates = {name: found[1:] for name, found in rates.items()}
    middle = {name: sorted(found)[len(found) // 2] for name, found in rates.items()}
    print(f"  words a second: {', '.join(f'{name} {rate:,.0f}' for name, rate in middle.items())}")
    return {"throughput": {"clients": CLIENTS, "rates": rates, **middle}}


def memory(run: Run) -> Facts:
    """What the service holds before and after many requests."""
    warm, count = (200, 500) if run.args.quick else (10_000, 100_000)
    with service(run) as (address, pid):
        load(address, CLIENTS, words(warm, 7))
        before = resident(pid)
        load(address, CLIENTS, words(count, 8))
        after = resident(pid)
    print(f"  resident: {before:,.0f} MiB, after {count:,} requests {after:,.0f} MiB")
    return {"memory": {"requests": count, "before": before, "after": after}}


def report(facts: Facts) -> list[str]:
    """The table for people."""
    lines = [
        f"# Serving on {facts['machine']['title']}",
        "",
        f"Thalweg {facts['versions']['thalweg']}, torch {facts['versions']['torch']}, {facts['threads']} threads; "
        "words of 4 to 10 letters, a beam of 5, 5 answers. Service, callers and direct calls share the machine.",
        "",
        "| measured | | |",
        "|---|--:|---|",
    ]
    if "lone" in facts:
        ms, ratio = facts["lone"]["ms"], facts["lone"]["ratio"]["median"]
        lines.append(
            f"| a lone word, called directly | {ms['direct']['median']:.2f} ms | median of {facts['rounds']} rounds |"
        )
        lines.append(f"| a lone word over HTTP | {ms['HTTP']['median']:.2f} ms | {ratio:.1f} times the direct call |")
    if "throughput" in facts:
        found = facts["throughput"]
        clients = found["clients"]
        kinds = {
            "one": "one caller, a word at a time",
            "alone": f"{clients} callers, each answered alone (`--batch 1`)",
            "many": f"{clients} callers, answered together",
            "several": f"{clients} callers, answered together by {WORKERS} processes",
        }
        bases = {base: of for base, of in (("one", "one caller's"), ("alone", "those answered alone")) if base in found}
        for name in [name for name in ("many", "several") if name in found]:
            kinds[name] += ": " + ", ".join(f"{found[name] / found[base]:.1f} times {of}" for base, of in bases.items())
        lines += [f"| {kind} | {found[name]:,.0f} words/s | |" for name, kind in kinds.items() if name in found]
    if "memory" in facts:
        found = facts["memory"]
        change = found["after"] - found["before"]
        lines.append(
            f"| memory after {found['requests']:,} requests | {found['after']:,.0f} MiB "
            f"| {change:+.1f} MiB since they began |"
        )
    return lines


BENCHMARK = Benchmark(
    parts={"lone": lone, "throughput": throughput, "memory": memory},
    begin=trained,
    report=report,
    options=options,
    devices=("cpu",),
    packages=("fastapi", "uvicorn", "httptools", "uvloop"),
)
