"""Why a model trains or does not: all that can be measured on a batch, of a run or of a model as it starts."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from thalweg.data import Batch, Batches
from thalweg.diagnostics.decay import DecayMeter, DecayReport
from thalweg.diagnostics.gradient_flow import GradientFlow, gradient_flow, run_watched
from thalweg.diagnostics.jacobians import SpanReport, graph_jacobians, span_spectra
from thalweg.diagnostics.map_use import ChannelUse, LayerStretch, NormUse
from thalweg.diagnostics.normalisation import NormalisationReport, compare_normalisations
from thalweg.diagnostics.places import naming_of, place_of
from thalweg.diagnostics.recurrences import vanishing_bound
from thalweg.diagnostics.saturation import SaturationReport, saturation
from thalweg.diagnostics.unrolling import LayerTrace, layer_name
from thalweg.errors import ConfigError, DataError
from thalweg.layers.padded import Padded
from thalweg.layers.recurrent_blocks import RecurrentBlock
from thalweg.learning.losses import sequence_nll
from thalweg.learning.optimisers import build_optimiser
from thalweg.tasks.subjects import PairSubject, Subject

__all__ = ["DepthSpectrum", "Diagnosis", "ImageLook", "LayerSpans", "Reading", "diagnose", "train_a_little"]

# States wider than this are not taken apart: a Jacobian costs a backward pass a feature.
WIDEST = 512
# Rows of the batch whose Jacobians are taken.
ROWS = 8


@dataclass(frozen=True)
class LayerSpans:
    """How a recurrent layer carries its state over spans of time.

    >>> LayerSpans.__name__
    'LayerSpans'
    """

    name: str
    stack: str
    depth: int
    cell: str
    report: SpanReport


@dataclass(frozen=True)
class DepthSpectrum:
    """Singular values of the Jacobian from a layer's state to the last layer's at the same position.

    Attributes:
        name, stack, depth: of the layer.
        largest, smallest: in the middle of the rows; mean: root mean square of all, the gain of a random direction.

    >>> DepthSpectrum("encoder 1", "encoder", 1, 0.1, 0.0, 0.03).mean
    0.03
    """

    name: str
    stack: str
    depth: int
    largest: float
    smallest: float
    mean: float


@dataclass(frozen=True)
class Reading:
    """Whether the model reads its source or looks at its image, in nats a symbol or an image on the batch.

    Attributes:
        loss: as it is; shuffled: with every target beside another's source; frequencies: of a model that knows how
            often each symbol or class comes and nothing else.

    >>> Reading(2.5, 2.5, 2.6).heeds
    False
    """

    loss: float
    shuffled: float
    frequencies: float

    @property
    def heeds(self) -> bool:
        """Whether another source makes the target less probable, by 1 % at least."""
        return self.shuffled > 1.01 * self.loss


@dataclass(frozen=True)
class ImageLook:
    """What is measured of image networks alone.

    Attributes:
        channels: which channels of each layer vary.
        stretches: singular values of the Jacobian of each layer by itself; empty where maps are too wide.
        norms: what the network's own norms measure.
        accuracy: on the images.

    >>> ImageLook((), (), (), 0.9).accuracy
    0.9
    """

    channels: tuple[ChannelUse, ...]
    stretches: tuple[LayerStretch, ...]
    norms: tuple[NormUse, ...]
    accuracy: float


@dataclass(frozen=True)
class Diagnosis:
    """All that was measured.

    Attributes:
        subject: what was looked at; batch: rows and longest source and target of the batch, or height and width.
        flow: gradients through depth and time; ``update`` of its layers from some steps of training on a copy.
        depth, spans: singular values of Jacobians; empty where they are too wide or do not apply.
        saturation: of gates and activations.
        decay: what weight decay did in those steps.
        norms: by stack, what normalisations would measure on its last layer's states.
        reading: whether the source matters.
        gradient: norm of the whole gradient, before clipping.
        images: what only image networks have.

    >>> Diagnosis.__name__
    'Diagnosis'
    """

    subject: Subject
    batch: tuple[int, int, int]
    flow: GradientFlow
    depth: tuple[DepthSpectrum, ...]
    spans: tuple[LayerSpans, ...]
    saturation: SaturationReport
    decay: DecayReport
    norms: dict[str, NormalisationReport]
    reading: Reading
    gradient: float
    images: ImageLook | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values for a file; tensors that are too many are left out."""
        spans = [
            {
                **{key: getattr(layer, key) for key in ("name", "stack", "depth", "cell")},
                "spans": list(layer.report.spans),
                "largest": layer.report.largest.median(1).values.tolist(),
                "smallest": layer.report.smallest.median(1).values.tolist(),
                "bound": None if layer.report.bound is None else layer.report.bound.tolist(),
            }
            for layer in self.spans
        ]
        whole = {
            "name": self.subject.name,
            "trained": self.subject.trained,
            "data": self.subject.data,
            "batch": dict(zip(self.subject.words.sizes, self.batch, strict=True)),
            "reading": dataclasses.asdict(self.reading),
            "gradient": self.gradient,
            "states": [dataclasses.asdict(site) for site in self.flow.sites],
            "parameters": [dataclasses.asdict(layer) for layer in self.flow.layers],
            "through_depth": {stack: self.flow.through_depth(stack) for stack in self.flow.stacks()},
            "depth": [dataclasses.asdict(row) for row in self.depth],
            "spans": spans,
            "saturation": [dataclasses.asdict(row) for row in self.saturation.rows],
            "decay": {
                "optimiser": self.decay.optimiser,
                "steps": self.decay.steps,
                "groups": [dataclasses.asdict(row) for row in self.decay.groups],
                "advice": self.decay.advice,
            },
            "norms": {stack: [dataclasses.asdict(row) for row in report.rows] for stack, report in self.norms.items()},
        }
        if self.images is not None:
            whole["images"] = dataclasses.asdict(self.images)
        return cast("dict[str, Any]", _finite(whole))


def diagnose(subject: Subject, *, rows: int = 32, steps: int = 8) -> Diagnosis:
    """Measure all that applies to a model on one batch, and what some steps of training do to a copy of it.

    The batch is of ``rows`` pairs of like length, longer than three quarters of all. Evaluation mode: no dropout. Of
    images see :func:`thalweg.tasks.image_diagnosing.diagnose_images`. The subject is not changed.

    Args:
        rows: of the batch.
        steps: of training on the copy, at the config's learning rate, for updates and decay.

    >>> diagnose.__name__
    'diagnose'
    """
    if rows < 2 or steps < 1:
        raise ConfigError(f"`rows` must be at least 2 and `steps` at least 1, got {rows} and {steps}")
    if not isinstance(subject, PairSubject):
        from thalweg.tasks.image_diagnosing import diagnose_images
        from thalweg.tasks.image_subjects import ImageSubject

        return diagnose_images(cast(ImageSubject, subject), rows=rows, steps=steps)
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
    batches = Batches(
        list(subject.examples), size=subject.config.training.batch_size, seed=subject.config.training.seed
    )
    decay, flow = train_a_little(subject, flow, batches, _loss, steps)
    sizes = (batch.size, batch.source.tokens.shape[1], batch.target.tokens.shape[1])
    return Diagnosis(subject, sizes, flow, depth, spans, gates, decay, norms, reading, flow.norm)


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
    return next(Batches(chosen, size=rows, shuffle=False).iterate(0)).to(device)


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


def train_a_little(
    subject: Subject, flow: GradientFlow, batches: Any, loss: Callable[[Any, Any], Tensor], steps: int
) -> tuple[DecayReport, GradientFlow]:
    """What decay did in some steps on a copy, and the flow with the relative length of the last step by layer.

    Args:
        batches: :class:`~thalweg.data.Batches` or :class:`~thalweg.data.image_batches.ImageBatches`.
        loss: of a model and a batch, one number.

    >>> train_a_little.__name__
    'train_a_little'
    """
    training = subject.config.training
    device = next(subject.model.parameters()).device
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(training.seed)
        model = copy.deepcopy(subject.model).train()
        optimiser = build_optimiser(
            training.optimiser,
            model,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            decay=training.decay,
            momentum=training.momentum,
            beta2=training.beta2,
            fused=False,
        )
        meter = DecayMeter(model, optimiser)
        before: dict[str, Tensor] = {}
        for n in range(steps):
            batch = next(batches.iterate(n // len(batches), n % len(batches))).to(device)
            optimiser.zero_grad(set_to_none=True)
            loss(model, batch).backward()
            if training.clip:
                nn.utils.clip_grad_norm_(model.parameters(), training.clip)
            if n + 1 == steps:
                before = {name: p.detach().clone() for name, p in model.named_parameters()}
            meter.step()
    naming, sums = naming_of(model), dict[str, list[float]]()
    for name, p in model.named_parameters():
        pair = sums.setdefault(naming(name), [0.0, 0.0])
        pair[0] += float((p.detach() - before[name]).double().square().sum())
        pair[1] += float(before[name].double().square().sum())
    updates = {name: math.sqrt(step / weight) if weight else 0.0 for name, (step, weight) in sums.items()}
    layers = tuple(dataclasses.replace(row, update=updates.get(row.name, math.nan)) for row in flow.layers)
    return meter.report(), dataclasses.replace(flow, layers=layers)


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
