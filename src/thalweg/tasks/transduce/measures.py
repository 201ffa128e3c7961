"""Why a transducer trains or does not: all that can be measured on a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thalweg.data import Batch
from thalweg.diagnostics.gradient_flow import gradient_flow, run_watched
from thalweg.diagnostics.jacobians import graph_jacobians, span_spectra
from thalweg.diagnostics.layer_names import place_of
from thalweg.diagnostics.normalisation import NormalisationReport, compare_normalisations
from thalweg.diagnostics.recurrences import vanishing_bound
from thalweg.diagnostics.saturation import saturation
from thalweg.diagnostics.unrolling import LayerTrace, layer_name
from thalweg.errors import DataError
from thalweg.layers.padded import Padded
from thalweg.layers.recurrent_blocks import RecurrentBlock
from thalweg.learning.losses import sequence_nll
from thalweg.tasks.diagnosis.findings import Finding
from thalweg.tasks.diagnosis.measures import DepthSpectrum, Diagnosis, LayerSpans, Reading, train_a_little
from thalweg.tasks.report.diagnosis import time_section
from thalweg.tasks.transduce.findings import PairRemedies, pair_findings
from thalweg.tasks.transduce.training import batches_of

if TYPE_CHECKING:
    from thalweg.tasks.transduce.subject import PairSubject


# States wider than this are not taken apart: a Jacobian costs a backward pass a feature.
WIDEST = 512
# Rows of the batch whose Jacobians are taken.
ROWS = 8


@dataclass(frozen=True)
class PairDiagnosis(Diagnosis):
    """All that was measured of a transducer."""

    def findings(self) -> Iterator[Finding]:
        """What is found of its ways through time, and of its states."""
        return pair_findings(self)

    @property
    def remedies(self) -> PairRemedies:
        """Settings of transducers."""
        return PairRemedies(self.subject.config)

    def columns(self, stack: str) -> dict[str, str]:
        """How far a stack carries its state, and how much of it."""
        spans = [layer for layer in self.spans if layer.stack == stack]
        carried = [float(layer.report.largest[-1].median()) for layer in spans]
        return {
            "steps": str(spans[0].report.spans[-1]) if spans else "",
            "carried": f"{min(carried):.2g} to {max(carried):.2g}" if carried else "",
        }

    def sections(self) -> list[tuple[str, str, str]]:
        """Ways through time."""
        return [("time", "Time", time_section(self))]


def diagnose_pairs(subject: PairSubject, *, rows: int = 32, steps: int = 8) -> PairDiagnosis:
    """Measure all that applies to a transducer.

    The batch is of ``rows`` pairs of like length, longer than three quarters of all. Evaluation mode: no dropout.

    Args:
        rows: of the batch.
        steps: of training on the copy, at the config's learning rate, for updates and decay.
    """
    model = subject.model
    batch = _batch(subject, rows)
    mode = model.training
    model.eval()
    try:
        flow = gradient_flow(model, lambda m: _loss(m, batch))
        traces, kept = _run(model, batch)
        # What goes on from a layer with a path round it is the block's output, not the layer's own state.
        blocks = [name for name, part in model.named_modules() if isinstance(part, RecurrentBlock)]
        depth = _depth(*_run(model, _first(batch, ROWS), blocks or None))
        norms, spans = _norms(traces, kept), _spans(traces)
        gates = saturation(model, lambda m: m(batch.source, batch.target))
        reading = _reading(model, batch)
    finally:
        model.train(mode)
    training = subject.config.training
    batches = batches_of(subject.examples, subject.target, size=training.batch_size, seed=training.seed)
    decay, flow = train_a_little(subject, flow, batches, _loss, steps)
    sizes = (batch.size, batch.source.tokens.shape[1], batch.target.tokens.shape[1])
    return PairDiagnosis(subject, sizes, flow, depth, spans, gates, decay, norms, reading, flow.norm)


def _run(model: nn.Module, batch: Batch, sites: Sequence[str] | None = None) -> tuple[Any, Any]:
    """Traces of recurrent layers and outputs of modules, in the graph."""
    return run_watched(model, lambda m: m(batch.source, batch.target), sites=sites)[1:]


def _first(batch: Batch, rows: int) -> Batch:
    source, target = (Padded(*(part[:rows] for part in side)) for side in (batch.source, batch.target))
    return Batch(source, target, batch.rows[:rows])


def _batch(subject: PairSubject, rows: int) -> Batch:
    """Pairs of like length, longer than three quarters of all."""
    order = sorted(range(len(subject.examples)), key=lambda n: (len(subject.examples[n].source), n))
    last = min(len(order), max(rows, round(0.75 * len(order)) + rows))
    chosen = [subject.examples[n] for n in order[max(0, last - rows) : last]]
    if len(chosen) < 2:
        raise DataError(f"{subject.data}: expected at least 2 pairs to look at, got {len(chosen)}; give more")
    device = next(subject.model.parameters()).device
    return next(batches_of(chosen, subject.target, size=rows, shuffle=False).iterate(0)).to(device)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    """Negative log-likelihood a symbol."""
    losses = sequence_nll(model(batch.source, batch.target), batch.target.tokens, batch.target.mask)
    return losses.sum() / batch.target.lengths.sum().to(losses.device)


def _reading(model: nn.Module, batch: Batch) -> Reading:
    other = Padded(*(part.roll(1, 0) for part in batch.source))
    with torch.no_grad():
        loss = float(_loss(model, batch))
        shuffled = float(_loss(model, Batch(other, batch.target, batch.rows)))
    counts = torch.bincount(batch.target.tokens[batch.target.mask]).double()
    shares = counts[counts > 0] / counts.sum()
    return Reading(loss, shuffled, float(-(shares * shares.log()).sum()))


def _stacked(traces: Sequence[LayerTrace], kept: Sequence[tuple[str, Tensor]]) -> dict[str, list[tuple[int, Any]]]:
    """Layers of each stack, by depth: traces of the forward direction, or outputs (B, T, D) of modules."""
    stacks: dict[str, list[tuple[int, Any]]] = {}
    for trace in traces:
        if not trace.backward:
            stacks.setdefault(trace.stack, []).append((trace.depth, trace))
    for name, tensor in kept:
        stack, depth = place_of(name)
        if tensor.dim() == 3:
            stacks.setdefault(stack, []).append((depth, tensor))
    return stacks


def _depth(traces: Sequence[LayerTrace], kept: Sequence[tuple[str, Tensor]]) -> tuple[DepthSpectrum, ...]:
    rows: list[DepthSpectrum] = []
    for stack, layers in _stacked(traces, kept).items():
        if len(layers) < 2:
            continue
        last = layers[-1][1]
        traced = isinstance(last, LayerTrace)
        middle = (len(last.hidden) if traced else last.shape[1]) // 2
        points = [layer.hidden[middle] if traced else layer for _, layer in layers[:-1]]
        if points[0].shape[-1] > WIDEST:
            continue
        output = last.hidden[middle] if traced else last[:, middle]
        found = graph_jacobians(output, points, position=None if traced else middle).double()
        values = torch.linalg.svdvals(found)
        for (depth, _), own in zip(layers, values, strict=False):
            ends = (float(own[:, 0].median()), float(own[:, -1].median()), float(own.square().mean().sqrt()))
            rows.append(DepthSpectrum(layer_name(stack, depth), stack, depth, *ends))
    return tuple(rows)


def _spans(traces: Sequence[LayerTrace]) -> tuple[LayerSpans, ...]:
    rows = []
    for trace in traces:
        if trace.size > WIDEST:
            continue
        T = trace.projected.shape[1]
        shortest = T if trace.mask is None else int(trace.mask[:ROWS].sum(1).min())
        order = list(range(shortest))
        inputs = [trace.projected[:ROWS, t] for t in (order[::-1] if trace.backward else order)]
        spans = sorted({*(2**n for n in range(10) if 2**n < len(inputs)), len(inputs)})
        bound = vanishing_bound(trace.recurrent["state"]) if "state" in trace.recurrent else None
        report = span_spectra(trace.advance, trace.states(ROWS), inputs, spans=spans, bound=bound)
        rows.append(LayerSpans(trace.name, trace.stack, trace.depth, trace.cell, report))
    return tuple(rows)


def _norms(traces: Sequence[LayerTrace], kept: Sequence[tuple[str, Tensor]]) -> dict[str, NormalisationReport]:
    reports = {}
    for stack, layers in _stacked(traces, kept).items():
        last = layers[-1][1]
        if isinstance(last, LayerTrace):
            states = torch.stack([h.detach() for h in last.hidden], dim=1)
            reports[stack] = compare_normalisations(states, mask=last.mask)
        else:
            reports[stack] = compare_normalisations(last.detach())
    return reports
