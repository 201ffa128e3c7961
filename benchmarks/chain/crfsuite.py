"""CRFsuite beside Thalweg: tagging, and full-batch evaluations of likelihood and gradient inside its training.

CRFsuite takes no scores from outside, so both sides get its features and the weights that it learnt: every position
has one attribute of V, and emissions[b, t] = table[attribute[b, t]]. sklearn-crfsuite is a wrapper of the same
library (python-crfsuite), which is called directly here.
"""

from __future__ import annotations

import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.chain.problem import Problem, Size
from benchmarks.chain.sides import chain_of
from benchmarks.harness.declaration import demand
from benchmarks.harness.machine import version_of
from benchmarks.harness.timing import Spread, quick_spread
from thalweg.inference.structures.chain import LinearChain

NAME, ATTRIBUTES = "crfsuite", 50
TOLERANCE = 1e-4
"""Relative, for likelihoods and scores: CRFsuite shows its weights with six decimals."""


class CRFSuite:
    """python-crfsuite on random attributes and labels of one size."""

    def __init__(self, size: Size, folder: Path):
        self.library = import_module("pycrfsuite")
        self.model = str(folder / "model.crfsuite")
        B, T, C = size
        draw = np.random.default_rng(0)
        self.ids = torch.from_numpy(draw.integers(ATTRIBUTES, size=(B, T)))
        gold = draw.integers(C, size=(B, T))
        # Every label and attribute occurs, so that the model knows all of them.
        gold.flat[:C] = np.arange(C)
        self.gold = torch.from_numpy(gold)
        self.inputs = [self.library.ItemSequence([[str(a)] for a in row]) for row in self.ids.tolist()]
        self.labels = [[str(y) for y in row] for row in gold]

    def train(self, iterations: int) -> tuple[float, int, float]:
        """Seconds, evaluations of likelihood and gradient, and the last negative log-likelihood, by L-BFGS."""
        settings = {
            "c1": 0.0, "c2": 0.0, "max_iterations": iterations, "delta": 0.0, "epsilon": 1e-12,
            "feature.possible_states": True, "feature.possible_transitions": True,
        }  # fmt: skip
        trainer = self.library.Trainer(algorithm="lbfgs", verbose=False, params=settings)
        for xs, ys in zip(self.inputs, self.labels, strict=True):
            trainer.append(xs, ys)
        began = time.perf_counter()
        trainer.train(self.model)
        seconds = time.perf_counter() - began
        steps = trainer.logparser.iterations
        return seconds, sum(step["linesearch_trials"] for step in steps), steps[-1]["loss"]

    def per_evaluation(self, iterations: int) -> float:
        """Seconds: a long training minus a short one, so that reading features and writing the model cancel."""
        short, few, _ = self.train(1)
        long, many, _ = self.train(1 + iterations)
        return (long - short) / (many - few)

    def weights(self, size: int) -> tuple[Tensor, Tensor]:
        """(V, C) of attributes and (C, C) of transitions as last trained; opens the model for tagging."""
        self.tagger = self.library.Tagger()
        self.tagger.open(self.model)
        info = self.tagger.info()
        table, moves = torch.zeros(ATTRIBUTES, size), torch.zeros(size, size)
        for (attribute, label), weight in info.state_features.items():
            table[int(attribute), int(label)] = weight
        for (source, target), weight in info.transitions.items():
            moves[int(source), int(target)] = weight
        return table, moves

    def tag(self) -> list[list[str]]:
        """Labels as strings, its own form."""
        return [self.tagger.tag(xs) for xs in self.inputs]


def nll_of(side: CRFSuite, table: Tensor, moves: Tensor) -> Tensor:
    """Thalweg's negative log-likelihood on CRFsuite's features."""
    return -LinearChain(table[side.ids], moves).log_prob(side.gold).sum()


def check(side: CRFSuite, table: Tensor, moves: Tensor, loss: float) -> None:
    """CRFsuite's likelihood and the score of its labels are Thalweg's."""
    found = float(nll_of(side, table.double(), moves.double()))
    demand(f"{NAME}, negative log-likelihood", abs(found - loss) / abs(loss), TOLERANCE)
    zeros = torch.zeros(len(moves))
    problem = Problem(table[side.ids], moves, zeros, zeros, side.gold)
    theirs = problem.path_scores(torch.tensor([[int(y) for y in row] for row in side.tag()]))
    ours = problem.path_scores(chain_of(problem).mode)
    demand(f"{NAME}, score of the labels", float(((theirs - ours) / ours).abs().max()), TOLERANCE)


def measure(size: Size, *, rounds: int, iterations: int = 10) -> dict[str, Any]:
    """Both sides in alternating rounds, after the check; milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        side = CRFSuite(size, Path(folder))
        loss = side.train(iterations)[2]
        table, moves = side.weights(size[2])
        check(side, table, moves, loss)
        leaves = [table.clone().requires_grad_(), moves.clone().requires_grad_()]
        times: dict[str, list[float]] = {"tag/ours": [], "tag/peer": [], "nll/ours": [], "nll/peer": []}
        for _ in range(rounds):
            times["tag/peer"].append(quick_spread(side.tag, "cpu", rounds=1).median)
            mode = quick_spread(lambda: LinearChain(table[side.ids], moves).mode, "cpu", rounds=1)
            times["tag/ours"].append(mode.median)
            times["nll/peer"].append(1e3 * side.per_evaluation(iterations))
            ours = quick_spread(lambda: torch.autograd.grad(nll_of(side, *leaves), leaves), "cpu", rounds=1)
            times["nll/ours"].append(ours.median)
    spreads = {name: Spread.of(values) for name, values in times.items()}
    ratios = {kind: spreads[f"{kind}/peer"].over(spreads[f"{kind}/ours"]) for kind in ("tag", "nll")}
    return {"ms": {name: spread.to_json() for name, spread in spreads.items()}, "ratios": ratios}


def version() -> str | None:
    """Of python-crfsuite, None where it is not installed."""
    try:
        library = import_module("pycrfsuite")
    except ImportError:
        return None
    found = version_of("python-crfsuite")
    return found if found != "unknown" else library.CRFSUITE_VERSION
