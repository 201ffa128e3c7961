"""The peers on the same scores: pytorch-crf, torch-struct, torbi and hmmlearn.

Whatever a peer needs in another form (scores of the end folded into the last emission, probabilities in place of
scores, float64) is made ready before the clock starts, which can only make it faster. CRFsuite takes no scores
from outside and has a file of its own, ``crfsuite.py``.
"""

from __future__ import annotations

import math
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.chain.problem import Gradients, Problem
from benchmarks.chain.sides import module_decode, module_nll
from benchmarks.harness.machine import version_of
from benchmarks.harness.timing import Job


class Peer(Protocol):
    """A side that is not Thalweg."""

    name: str
    version: str
    devices: tuple[str, ...]
    note: str

    def nll(self, problem: Problem) -> list[Job]:
        """As :meth:`benchmarks.chain.sides.Ours.nll`; empty where the peer has no such thing."""
        ...

    def decode(self, problem: Problem) -> list[Job]:
        """As :meth:`benchmarks.chain.sides.Ours.decode`."""
        ...


class PytorchCRF:
    """``torchcrf.CRF``; a bool mask is passed, since the mask it makes by itself is of a type that torch gave up."""

    name, devices = "pytorch-crf", ("cpu", "cuda")
    note = "`CRF.forward` and backward; `CRF.decode`, which returns lists"

    def __init__(self) -> None:
        self.package = import_module("torchcrf")
        self.version = version_of("pytorch-crf", self.package)

    def nll(self, problem: Problem) -> list[Job]:
        """Its forward is the log-likelihood summed over the batch."""
        return [module_nll(self.name, self.package.CRF(problem.size[2], batch_first=True), problem)]

    def decode(self, problem: Problem) -> list[Job]:
        """Lists of labels."""
        return [module_decode(self.name, self.package.CRF(problem.size[2], batch_first=True), problem)]


class TorchStruct:
    """``torch_struct.LinearChainCRF`` over (B, T-1, C, C) potentials, [.., j, i] for i -> j.

    Building the potentials is timed (gradients flow through it); the gold score is a lookup in the potentials
    rather than its own product with a one-hot tensor of that size, and its edges are turned to labels untimed.
    """

    name, devices = "torch-struct", ("cpu", "cuda")
    note = "`LinearChainCRF` on potentials built from the scores: partition, gold score by lookup, backward; `argmax`"

    def __init__(self) -> None:
        self.package = import_module("torch_struct")
        self.version = version_of("torch-struct", self.package)

    def nll(self, problem: Problem) -> list[Job]:
        """log Z minus the gold score, with gradients."""
        leaves = problem.leaves()

        def run() -> tuple[Tensor, ...]:
            potentials = self._potentials(problem, *leaves)
            chains = self.package.LinearChainCRF(potentials, lengths=problem.lengths)
            loss = (chains.partition - self._gold_score(problem, potentials)).sum()
            return loss, *torch.autograd.grad(loss, leaves)

        return [Job(self.name, run, lambda raw: Gradients.of(*raw), needs=self._needs(problem))]

    def decode(self, problem: Problem) -> list[Job]:
        """Indicators of the best edges."""

        def run() -> Tensor:
            scores = (problem.emissions, problem.transitions, problem.start, problem.end)
            return self.package.LinearChainCRF(self._potentials(problem, *scores), lengths=problem.lengths).argmax

        def read(edges: Tensor) -> Tensor:
            first = edges[:, :1].amax(2).argmax(-1)
            labels = torch.cat([first, edges.amax(3).argmax(-1)], dim=1)
            return labels.where(problem.mask, -1).cpu()

        return [Job(self.name, run, read, needs=self._needs(problem))]

    @staticmethod
    def _needs(problem: Problem) -> int:
        # One (B, N/2, C, C, C) tensor of the first level of its tree, with its exponential.
        B, T, C = problem.size
        edges = 2 ** math.ceil(math.log2(max(T - 1, 1)))
        return 2 * B * max(edges // 2, 1) * C**3 * problem.emissions.element_size()

    @staticmethod
    def _potentials(problem: Problem, emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Tensor:
        potentials = emissions[:, 1:].unsqueeze(3) + transitions.t()  # (B, T-1, C to, C from)
        first = (start + emissions[:, 0]).unsqueeze(1)  # (B, 1, C from)
        chains = torch.arange(len(emissions), device=emissions.device)
        zero = chains.new_zeros(len(chains))
        potentials = potentials.index_put((chains, zero), first.expand_as(potentials[:, 0]), accumulate=True)
        last = end.unsqueeze(1).expand_as(potentials[:, 0])
        return potentials.index_put((chains, problem.all_lengths - 2), last, accumulate=True)

    @staticmethod
    def _gold_score(problem: Problem, potentials: Tensor) -> Tensor:
        B, T, _ = problem.size
        chains = torch.arange(B, device=potentials.device).unsqueeze(1)
        steps = torch.arange(T - 1, device=potentials.device)
        picked = potentials[chains, steps, problem.gold[:, 1:], problem.gold[:, :-1]]
        return (picked * problem.mask[:, 1:]).sum(1)


class Torbi:
    """torbi's compiled decoder by itself; float32, start scores but no end scores.

    Its package imports much that decoding does not need, so the compiled library is loaded without it.
    """

    name, devices = "torbi", ("cpu", "cuda")
    note = "its compiled `viterbi_decode` alone; end scores folded into the emissions beforehand"

    def __init__(self) -> None:
        spec = find_spec("torbi")
        if spec is None or spec.origin is None:
            raise ImportError("No module named 'torbi'")
        torch_version = "".join(torch.__version__.split("+")[0].split(".")[:2])
        cuda = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
        found = sorted(Path(spec.origin).parent.glob(f"_C.pt{torch_version}{cuda}*.so"))
        if not found:
            raise ImportError(f"it has no binary for torch {torch.__version__}")
        torch.ops.load_library(str(found[0]))
        self.operator = torch.ops.torbi.viterbi_decode
        self.version = version_of("torbi")
        self.transposed = self._is_transposed()

    def _is_transposed(self) -> bool:
        """Whether it reads transitions as [to, from]: only 0 -> 1 scores, and the path starts at 0."""
        transitions = torch.tensor([[0.0, 9.0], [0.0, 0.0]])
        start, steps = torch.tensor([20.0, 0.0]), torch.tensor([2], dtype=torch.int32)
        labels = self.operator(torch.zeros(1, 2, 2), steps, transitions, start)[0].tolist()
        return labels != [0, 1]

    def nll(self, problem: Problem) -> list[Job]:
        """It only decodes."""
        return []

    def decode(self, problem: Problem) -> list[Job]:
        """Labels as a tensor."""
        emissions = fold_end(problem).float().contiguous()
        transitions = (problem.transitions.t() if self.transposed else problem.transitions).float().contiguous()
        start, lengths = problem.start.float(), problem.all_lengths.int()

        def run() -> Tensor:
            return self.operator(emissions, lengths, transitions, start)

        def read(raw: Tensor) -> Tensor:
            return raw.long().where(problem.mask, -1).cpu()

        return [Job(self.name, run, read, single=True)]


class HMMLearn:
    """The C code of hmmlearn in float64 on exponentiated scores, one chain after the other as hmmlearn itself does."""

    name, devices = "hmmlearn", ("cpu",)
    note = (
        "its C code in float64, one chain after the other: `forward_scaling`, `backward_scaling`, "
        "`compute_scaling_xi_sum`; `viterbi`"
    )

    def __init__(self) -> None:
        self.code = import_module("hmmlearn._hmmc")
        self.version = version_of("hmmlearn", import_module("hmmlearn"))

    def nll(self, problem: Problem) -> list[Job]:
        """Expected counts by forward and backward in scaled probabilities, minus the gold counts."""
        start, moves, chains = self._inputs(problem)
        weights = [np.exp(chain) for chain in chains]
        gold_scores = problem.path_scores(problem.gold).numpy()
        gold = [row[:length] for row, length in zip(problem.gold.numpy(), problem.all_lengths.tolist(), strict=True)]
        code, shape = self.code, problem.size

        def run() -> tuple[Any, ...]:
            emissions, transitions = np.zeros(shape), np.zeros_like(moves)
            first, last = np.zeros_like(start), np.zeros_like(start)
            value = 0.0
            for b, (chain, y) in enumerate(zip(weights, gold, strict=True)):
                log_z, forward, scale = code.forward_scaling(start, moves, chain)
                backward = code.backward_scaling(start, moves, chain, scale)
                marginals = forward * backward
                marginals /= marginals.sum(axis=1, keepdims=True)
                transitions += code.compute_scaling_xi_sum(forward, moves, backward, chain)
                marginals[np.arange(len(y)), y] -= 1.0
                np.subtract.at(transitions, (y[:-1], y[1:]), 1.0)
                first += marginals[0]
                last += marginals[-1]
                emissions[b, : len(y)] = marginals
                value += log_z - gold_scores[b]
            return value, emissions, transitions, first, last

        return [Job(self.name, run, lambda raw: Gradients.of(*raw))]

    def decode(self, problem: Problem) -> list[Job]:
        """A list of arrays of labels."""
        start, moves, chains = self._inputs(problem)
        viterbi = self.code.viterbi

        def run() -> list[np.ndarray]:
            return [viterbi(start, moves, chain)[1] for chain in chains]

        def read(raw: list[np.ndarray]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(
                [torch.as_tensor(row) for row in raw], batch_first=True, padding_value=-1
            )

        return [Job(self.name, run, read)]

    @staticmethod
    def _inputs(problem: Problem) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        double = problem.double()
        rows = zip(fold_end(double).numpy(), problem.all_lengths.tolist(), strict=True)
        chains = [np.ascontiguousarray(row[:length]) for row, length in rows]
        return double.start.exp().numpy(), double.transitions.exp().numpy(), chains


def fold_end(problem: Problem) -> Tensor:
    """Emissions (B, T, C) with the scores of the end in the last position of every chain."""
    chains = torch.arange(problem.size[0], device=problem.gold.device)
    emissions = problem.emissions.clone()
    emissions[chains, problem.all_lengths - 1] += problem.end
    return emissions


def find_peers(device: str) -> tuple[list[Peer], list[str]]:
    """The peers that can be had here, and a line for each that cannot."""
    peers: list[Peer] = []
    missing: list[str] = []
    for kind in (PytorchCRF, TorchStruct, Torbi, HMMLearn):
        if device not in kind.devices:
            missing.append(f"{kind.name}: left out, it has no {device} code")
            continue
        try:
            peers.append(kind())
        except (ImportError, OSError, RuntimeError) as error:
            missing.append(f"{kind.name}: left out, {str(error).splitlines()[0]}")
    return peers, missing
