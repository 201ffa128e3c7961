"""What is measured of a model on a batch, of a run or of a model as it starts: why it trains or does not."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from thalweg.diagnostics.decay import DecayMeter, DecayReport
from thalweg.diagnostics.gradient_flow import GradientFlow, gradient_flow
from thalweg.diagnostics.jacobians import SpanReport
from thalweg.diagnostics.layer_names import naming_of
from thalweg.diagnostics.normalisation import NormalisationReport
from thalweg.diagnostics.saturation import SaturationReport, saturation
from thalweg.errors import ConfigError
from thalweg.tasks.diagnosis.remedies import Remedies
from thalweg.tasks.diagnosis.subject import Subject

if TYPE_CHECKING:
    from thalweg.tasks.diagnosis.findings import Finding
    from thalweg.tasks.report.tables import Line


@dataclass(frozen=True)
class LayerSpans:
    """How a recurrent layer carries its state over spans of time.

    Attributes:
        name, stack, depth, cell: of the layer; report: singular values by span.
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

    A task's own kind adds what only its models have, and says it.
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
        return cast("dict[str, Any]", _finite(whole | self.more()))

    def more(self) -> dict[str, Any]:
        """Further measurements, as plain values."""
        return {}

    def findings(self) -> Iterable[Finding]:
        """What is found of such models alone."""
        return ()

    @property
    def remedies(self) -> Remedies:
        """Which settings mend what is found."""
        return Remedies(self.subject.config)

    def columns(self, stack: str) -> dict[str, str]:
        """Further columns of the table of stacks."""
        return {}

    def tiles(self) -> list[tuple[str, str, str]]:
        """Further key figures of the page: name, value, what it is."""
        return []

    def charts(self) -> list[tuple[str, list[Line]]]:
        """Further charts over depth."""
        return []

    def sections(self) -> list[tuple[str, str, str]]:
        """Further sections of the page, after depth: key, title, HTML."""
        return []

    def own_norms(self) -> str:
        """What the model's own norms measure, as HTML."""
        return ""


def diagnose(subject: Subject, *, rows: int = 32, steps: int = 8) -> Diagnosis:
    """Measure all that applies to a model on one batch, and what some steps of training do to a copy of it.

    The batch is of ``rows`` pairs of like length, longer than three quarters of all. Evaluation mode: no dropout. Of
    images see :func:`thalweg.tasks.classify.measures.diagnose_images`. The subject is not changed.

    Args:
        rows: of the batch.
        steps: of training on the copy, at the config's learning rate, for updates and decay.

    >>> from thalweg.tasks.registry import task_named
    >>> task = task_named("transduce")
    >>> data = {"train": "cmudict:dev", "dev": "cmudict:dev"}
    >>> config = task.configure({"data": data, "model": {"hidden": 4, "embedding": 4}})
    >>> diagnose(task.subject(config), rows=4, steps=1).batch[0]
    4
    """
    if rows < 2 or steps < 1:
        raise ConfigError(f"`rows` must be at least 2 and `steps` at least 1, got {rows} and {steps}")
    return subject.measure(rows, steps)


def measure_plain(
    subject: Subject, batch: Any, other: Any, batches: Any, loss: Callable[[Any, Any], Tensor], *, steps: int
) -> Diagnosis:
    """What applies to any model: gradients by layer, saturation, decay, and whether the input matters.

    Args:
        batch: what to look at it on; other: the same with inputs and answers that do not belong together.
        batches: those of its training, as :func:`train_a_little` takes them.
        loss: of a model and a batch, one number.
    """
    model = subject.model
    mode = model.training
    model.eval()
    try:
        flow = gradient_flow(model, lambda m: loss(m, batch))
        gates = saturation(model, lambda m: loss(m, batch))
        with torch.no_grad():
            own, shuffled = float(loss(model, batch)), float(loss(model, other))
    finally:
        model.train(mode)
    decay, flow = train_a_little(subject, flow, batches, loss, steps)
    reading = Reading(own, shuffled, math.nan)
    return Diagnosis(subject, (len(batch), 0, 0), flow, (), (), gates, decay, {}, reading, flow.norm)


def train_a_little(
    subject: Subject, flow: GradientFlow, batches: Any, loss: Callable[[Any, Any], Tensor], steps: int
) -> tuple[DecayReport, GradientFlow]:
    """What decay did in some steps on a copy, and the flow with the relative length of the last step by layer.

    Args:
        batches: :class:`~thalweg.data.Batches` or :class:`~thalweg.data.images.batches.ImageBatches`.
        loss: of a model and a batch, one number.
    """
    training = subject.config.training
    device = next(subject.model.parameters()).device
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(training.seed)
        model = copy.deepcopy(subject.model).train()
        optimiser = training.optimiser_of(model, fused=False)
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
