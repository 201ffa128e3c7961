"""Fitting of hidden Markov models by EM beside hmmlearn: same data, same start, same machine, one run.

    python -m benchmarks hmm --write                  on this CPU
    python -m benchmarks hmm --device cuda --write    ours on a GPU, hmmlearn on the CPU beside it

Needs hmmlearn in this Python's environment. Before anything is timed the log-likelihoods of every iteration must agree
to 1e-9 in float64 and to 1e-5 in float32; a difference ends the run. hmmlearn calculates in float64, by default in
logarithms (``log``); its other implementation (``scaling``) is timed as well.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.harness.declaration import Benchmark, Facts, Run, demand
from benchmarks.harness.report import comparison, heading
from benchmarks.harness.timing import Job
from thalweg.energies import HMM, CategoricalEmission, GaussianEmission

# Of each part: what is emitted, then states, sequences, length, dimensions or symbols.
CASES = {
    "diagonal": ("diag", (16, 200, 500, 8)),
    "full": ("full", (16, 200, 500, 8)),
    "categorical": ("categorical", (16, 200, 500, 50)),
    "long": ("diag", (4, 1, 20_000, 2)),
}
TINY = {"diagonal": (3, 4, 20, 2), "full": (3, 4, 20, 2), "categorical": (3, 4, 20, 5), "long": (2, 1, 200, 2)}
STEPS = 5
OURS = {"Thalweg float64": (torch.float64, 1e-9), "Thalweg float32": (torch.float32, 1e-5)}
PEERS = {"hmmlearn log": "log", "hmmlearn scaling": "scaling"}

Arrays = list[np.ndarray]


def emission(kind: str, values: Arrays, dtype: torch.dtype) -> CategoricalEmission | GaussianEmission:
    """Of a table, or of means and covariances."""
    first, *others = (torch.tensor(value, dtype=dtype) for value in values)
    if kind == "categorical":
        return CategoricalEmission(first)
    return GaussianEmission(first, others[0], "full" if kind == "full" else "diagonal")


def draw(kind: str, C: int, B: int, T: int, D: int) -> tuple[np.ndarray, Arrays, Arrays]:
    """Data of a model, its initial and transition probabilities, and emissions that differ, to start from."""
    rng = np.random.default_rng(0)
    chain = [rng.dirichlet(np.ones(C)), rng.dirichlet(np.ones(C), size=C)]
    if kind == "categorical":
        truth, start = ([rng.dirichlet(np.ones(D), size=C)] for _ in range(2))
    else:
        means = 2 * rng.normal(size=(C, D))
        spread = np.ones((C, D)) if kind == "diag" else np.tile(np.eye(D), (C, 1, 1))
        truth, start = [means, spread], [means + rng.normal(size=(C, D)), spread]
    initial, transition = (torch.tensor(value) for value in chain)
    model = HMM(initial, transition, emission(kind, truth, torch.float64))
    return model.sample(T, B, generator=torch.Generator().manual_seed(0))[1].numpy(), chain, start


def ours(kind: str, x: torch.Tensor, chain: Arrays, start: Arrays, dtype: torch.dtype) -> list[float]:
    """The log-likelihood of each iteration; numbers, so a GPU has done its work."""
    initial, transition = (torch.tensor(value, dtype=dtype) for value in chain)
    model = HMM(initial, transition, emission(kind, start, dtype), max_iter=STEPS, tol=-float("inf"))
    return model.fit(x).history_


def theirs(peer: Any, kind: str, x: np.ndarray, chain: Arrays, start: Arrays, implementation: str) -> list[float]:
    """The same by hmmlearn, without its priors."""
    C, (B, T) = len(chain[0]), x.shape[:2]
    settings = {"n_iter": STEPS, "tol": -np.inf, "init_params": "", "implementation": implementation}
    if kind == "categorical":
        model = peer.CategoricalHMM(C, n_features=start[0].shape[1], **settings)
        (model.emissionprob_,) = start
    else:
        model = peer.GaussianHMM(C, kind, covars_prior=0.0, **settings)
        model.means_, model.covars_ = start
    model.startprob_, model.transmat_ = chain
    return list(model.fit(x.reshape(B * T, -1), [T] * B).monitor_.history)


def measure(part: str, run: Run) -> Facts:
    """One kind of emissions at one size: both sides in turn."""
    kind, size = CASES[part]
    size = TINY[part] if run.args.quick else size
    x, chain, start = draw(kind, *size)

    def check(answers: dict[str, list[float]]) -> dict[str, float]:
        wanted = np.array(answers["hmmlearn scaling"])
        apart = {name: float(np.abs(np.array(answers[name]) / wanted - 1).max()) for name in OURS}
        for name, (_, bound) in OURS.items():
            demand(f"{part}, log-likelihoods of {name} beside hmmlearn", apart[name], bound)
        return apart

    jobs = []
    for name, (dtype, _) in OURS.items():
        moved = torch.from_numpy(x).to(run.args.device, None if kind == "categorical" else dtype)
        jobs.append(Job(name, partial(ours, kind, moved, chain, start, dtype)))
    jobs += [Job(name, partial(theirs, run.shared, kind, x, chain, start, how)) for name, how in PEERS.items()]
    compared = run.compare(jobs, check=check, over=lambda name: ("hmmlearn scaling", name) if name in OURS else None)
    return {part: {"kind": kind, "size": list(size), "difference": compared.checked, **compared.to_json()}}


def report(facts: Facts) -> list[str]:
    """The table for people."""
    cells = [facts[part] for part in CASES if part in facts]
    apart = (f"{max(cell['difference'][name] for cell in cells):.0e}" for name in OURS)
    where = f", hmmlearn on {facts['machine']['cpu']}" if facts["place"] == "gpu" else ""
    return [
        *heading(facts, f"{where}; every result is compared with hmmlearn's first"),
        f"## {STEPS} iterations of EM for hidden Markov models, ms",
        "",
        "Median and quartiles; in bold how many times faster than hmmlearn's `scaling`; `log` is its default. The "
        f"log-likelihoods of every iteration agree to {' in float64, to '.join(apart)} in float32.",
        "",
        *comparison(
            cells,
            ["emissions", "states", "sequences", "length", "dimensions or symbols"],
            lambda cell: [cell["kind"], *(f"{count:,}" for count in cell["size"])],
        ),
    ]


PARTS = {part: partial(measure, part) for part in CASES}
BENCHMARK = Benchmark(
    parts=PARTS,
    begin=lambda run: run.only_peer("hmmlearn.hmm", "hmmlearn==0.3.3"),
    report=report,
    budget=40.0,
    packages=("hmmlearn",),
)
