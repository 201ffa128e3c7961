"""LSTM and GRU encoder-decoders: Thalweg's beam beside yoyodyne's and beside an earlier version of itself.

Training is no part of what is measured: a few epochs, until words end, are enough. The earlier version and this one
share one training; yoyodyne has its own, on the same pairs for as many epochs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.declaration import Facts, Run, WrongAnswerError
from benchmarks.harness.process import Worker, version_in
from benchmarks.harness.timing import Spread, rates_in_turn
from benchmarks.training.checks import agreement, check_like_lengths, check_ours, check_parameters, check_peer
from benchmarks.training.sides import BEAM, GREEDY, PEER, Data, Ours, Peer, complete, prepare, settings
from thalweg.tasks import Transducer, build_config, load, train

CELLS = ("lstm", "gru")
WORDS = 400
"""Test words, unless told otherwise: the peer's beam takes its time over all of them."""
LEAST = 0.3
"""Seconds of a job in a round: one pass takes 20 ms, too little to go by on a machine that others share."""


class First:
    """An earlier version, from the ``src`` folder of its checkout, in its own process."""

    def __init__(self, source: Path, config: dict[str, Any], run: Path, threads: int):
        self.worker = Worker(sys.executable, "earlier", threads=threads, environment={"PYTHONPATH": str(source)})
        self.facts = self.worker.ask("setup", config=config, run=str(run), threads=threads)
        if not Path(self.facts["file"]).is_relative_to(source):
            raise WrongAnswerError(f"expected the version of {source}, got that of {self.facts['file']}")

    def predict(self, words: list[str], *, width: int, k: int) -> tuple[float, dict[str, str]]:
        """Words a second, and the best answer to each."""
        answer = self.worker.ask("predict", words=words, width=width, k=k)
        return len(words) / answer["seconds"], dict(zip(words, answer["answers"], strict=True))


def _jobs(
    ours: Ours, transducer: Transducer, peer: Peer | None, first: First | None, checks: dict[str, Any]
) -> dict[str, Callable[[], float]]:
    words = ours.data.words
    jobs: dict[str, Callable[[], float]] = {}
    for name, how, width, k in (("greedy", GREEDY, 1, 1), ("beam", BEAM, 5, 5)):
        if peer:
            batch = checks["peer"]["beam_batch"] if width > 1 else 256
            jobs[f"{name}/{PEER}"] = lambda batch=batch, width=width: peer.predict(batch=batch, width=width)[0]
        if first:
            jobs[f"{name}/first"] = lambda width=width, k=k: first.predict(words, width=width, k=k)[0]
        jobs[f"{name}/ours"] = lambda how=how, k=k: ours.predict(transducer, how, k=k)[0]
    return jobs


def _check_first(ours: Ours, transducer: Transducer, first: First) -> float:
    """The same weights give the same answers in both versions, but for near-ties."""
    shares = [
        agreement(first.predict(ours.data.words, width=width, k=k)[1], ours.predict(transducer, how, k=k)[1])
        for how, width, k in ((GREEDY, 1, 1), (BEAM, 5, 5))
    ]
    if min(shares) < 0.99:
        raise WrongAnswerError(f"expected the answers of the earlier version, got the same for {min(shares):.1%} only")
    return min(shares)


def measure_cell(args: Any, data: Data, folder: Path, cell: str, *, yoyodyne: bool) -> dict[str, Any]:
    """Train on both sides, check, then predict in turn."""
    config = settings(data, epochs=args.epochs, cell=cell)
    run = folder / f"run-{cell}"
    peer = first = None
    print(f"{cell}: training for {args.epochs} epochs, once for both versions of thalweg", flush=True)
    began = time.perf_counter()
    training: dict[str, float] = {}
    try:
        if args.first:
            first = First(args.first.resolve(), config, run, args.threads)
        else:
            complete(train(build_config(config), run))
        training["ours"] = time.perf_counter() - began
        ours, transducer = Ours(data, run, 0), load(run, device="cpu")
        checks: dict[str, Any] = {"ours": check_ours(ours, transducer)}
        parameters = {"ours": sum(p.numel() for p in transducer.model.parameters())}
        if first:
            checks["first"] = {"agreement": _check_first(ours, transducer, first)}
        if yoyodyne:
            peer = Peer(data, args.peer_python, folder, cell=cell, threads=args.threads)
            parameters["peer"] = peer.facts["parameters"]
            check_parameters(parameters["ours"], parameters["peer"])
            print(f"{cell}: training {PEER} for {args.epochs} epochs", flush=True)
            began = time.perf_counter()
            for _ in range(args.epochs):
                peer.train()
            training["peer"] = time.perf_counter() - began
            checks["peer"] = check_peer(peer)
            check_like_lengths(checks)
        jobs = _jobs(ours, transducer, peer, first, checks)
        values = rates_in_turn(jobs, args.rounds, budget=args.budget, least=LEAST)
    finally:
        for side in (peer, first):
            if side:
                side.worker.close()
    spreads = {name: Spread.of(each) for name, each in values.items()}
    ratios = {
        name: spreads[f"{name.partition('/')[0]}/ours"].over(spread)
        for name, spread in spreads.items()
        if not name.endswith("/ours")
    }
    return {
        "cell": cell,
        "training_s": training,
        "parameters": parameters,
        "checks": checks,
        "words_per_second": {name: spread.to_json() for name, spread in spreads.items()},
        "ratios": ratios,
    }


def recurrent(run: Run) -> Facts:
    """Both cells; what is not there is left out and named."""
    args = run.args
    found = version_in(args.peer_python, PEER)
    missing = [] if found else [f"{PEER}: left out, it is not importable there; give --peer-python"]
    if not args.first:
        missing.append("the first version: left out; give --first SRC, the src folder of its checkout")
    for line in missing:
        print(line)
    began = time.perf_counter()
    data = prepare(run, WORDS)
    cells = [measure_cell(args, data, run.folder, cell, yoyodyne=bool(found)) for cell in CELLS]
    facts = {
        "data": data.facts,
        "epochs": args.epochs,
        "training": "a few epochs, until words end; one training for both versions of thalweg",
        "yoyodyne": found,
        "left_out": missing,
        "seconds": time.perf_counter() - began,
        "cells": cells,
    }
    return {"recurrent": facts}
