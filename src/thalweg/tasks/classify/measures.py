"""Why an image network trains or does not: all that can be measured on a batch."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thalweg.data.images.batches import ImageBatch
from thalweg.diagnostics.gradient_flow import gradient_flow
from thalweg.diagnostics.layer_names import map_layers
from thalweg.diagnostics.map_use import (
    ChannelUse,
    LayerStretch,
    NormUse,
    channel_use,
    layer_stretches,
    norm_use,
    run_layers,
)
from thalweg.diagnostics.normalisation import NormalisationReport, compare_normalisations
from thalweg.diagnostics.saturation import saturation
from thalweg.energies.convnet.model import ConvNet
from thalweg.errors import DataError
from thalweg.learning.losses.classes import ClassLoss
from thalweg.tasks.classify.findings import ImageRemedies, image_findings
from thalweg.tasks.diagnosis.findings import Finding
from thalweg.tasks.diagnosis.measures import Diagnosis, Reading, train_a_little
from thalweg.tasks.report.tables import Line, row_of, table_of
from thalweg.tasks.report.text import note

if TYPE_CHECKING:
    from thalweg.tasks.classify.subject import ImageSubject


# Images on which dead units, channels and losses are counted, since a unit that rests on a few may work on others; and
# how many pixels they may have together.
LOOKED, PIXELS = 256, 1 << 18
# Images of a step of training on a copy: decay and the length of steps need no more.
STEP = 64
# Images whose Jacobians are taken.
ROWS = 2


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
class ImageDiagnosis(Diagnosis):
    """All that was measured of an image network; ``images`` is what only these have."""

    images: ImageLook

    def more(self) -> dict[str, Any]:
        """What only image networks have."""
        return {"images": dataclasses.asdict(self.images)}

    def findings(self) -> Iterator[Finding]:
        """What is found of channels, of layers by themselves and of the network's norms."""
        return image_findings(self)

    @property
    def remedies(self) -> ImageRemedies:
        """Settings of image networks."""
        return ImageRemedies(self.subject.config)

    def columns(self, stack: str) -> dict[str, str]:
        """Of the layers of a stack, the ends of stretches and the worst shares."""
        stretches = [row.largest for row in self.images.stretches if row.stack == stack]
        channels = [row for row in self.images.channels if row.stack == stack]
        names = {row.name for row in channels}
        dead = [row.stuck for row in self.saturation.rows if row.name in names]
        return {
            "stretch": f"{min(stretches):.2g} to {max(stretches):.2g}" if stretches else "",
            "stuck": f"{max(dead):.0%}" if dead else "",
            "constant": f"{max((row.constant for row in channels), default=0.0):.0%}",
        }

    def tiles(self) -> list[tuple[str, str, str]]:
        """How many images are right."""
        return [("accuracy", f"{self.images.accuracy:.1%}", "of the images looked at")]

    def charts(self) -> list[tuple[str, list[Line]]]:
        """How each layer stretches."""
        return [("Jacobian of each layer alone: singular values", stretch_lines(self.images))]

    def sections(self) -> list[tuple[str, str, str]]:
        """A row a layer."""
        return [("layers", "Layers", layers_table(self.images))]

    def own_norms(self) -> str:
        """A row a norm."""
        return norms_table(self.images)


def diagnose_images(subject: ImageSubject, *, rows: int = 32, steps: int = 8) -> ImageDiagnosis:
    """Measure all that applies to an image network.

    Gradients are those of training, with the statistics of the batch in batch norms, without dropout. All else is
    measured of the network as it predicts: a trained one has its running statistics, a fresh one, which has none yet,
    those of the batch. Dead units, channels and the loss are counted on up to 256 images.

    Args:
        rows: images of the batch, at least 2.
        steps: of training on a copy, at the config's learning rate, for updates and decay.
    """
    if len(subject.split) < 2:
        raise DataError(f"{subject.data}: expected at least 2 images to look at, got {len(subject.split)}; give more")
    few = PIXELS // subject.split.images[0, 0].numel()
    wide = next(subject.batches(max(rows, min(LOOKED, few))).iterate(0))
    batch = ImageBatch(wide.images[:rows], wide.labels[:rows], wide.rows[:rows])
    loss = ClassLoss(subject.config.training)

    def mean_loss(model: nn.Module, images: ImageBatch) -> Tensor:
        whole, count = loss(lambda x: -run_layers(cast(ConvNet, model), x)[-1], images)
        return whole / count

    flow = gradient_flow(_learning(subject.model), lambda m: mean_loss(m, batch))
    model = copy.deepcopy(subject.model).eval() if subject.trained else _settled(subject.model, wide.images)
    gates = saturation(model, lambda _: run_layers(model, wide.images))
    reading, accuracy = _reading(model, wide)
    look = ImageLook(
        channel_use(model, wide.images),
        layer_stretches(model, batch.images[:ROWS]),
        norm_use(model, lambda _: run_layers(model, wide.images)),
        accuracy,
    )
    norms = _norms(model, batch.images)
    training = subject.config.training
    batches = subject.batches(min(STEP, training.batch_size), training.seed)
    decay, flow = train_a_little(subject, flow, batches, mean_loss, steps)
    sizes = (batch.size, batch.images.shape[2], batch.images.shape[3])
    return ImageDiagnosis(subject, sizes, flow, (), (), gates, decay, norms, reading, flow.norm, look)


def _learning(model: ConvNet) -> ConvNet:
    """A copy whose batch norms take the statistics of the batch; nothing is dropped."""
    model = copy.deepcopy(model).eval()
    for part in model.modules():
        if isinstance(part, _BatchNorm):
            part.train()
    return model


def _settled(model: ConvNet, images: Tensor) -> ConvNet:
    """A copy whose running statistics are those of these images."""
    model = _learning(model)
    for part in model.modules():
        if isinstance(part, _BatchNorm):
            part.momentum = 1.0
    with torch.no_grad():
        run_layers(model, images)
    return model.eval()


def _reading(model: ConvNet, batch: ImageBatch) -> tuple[Reading, float]:
    """Losses with each image's own class and with another's, and the share of images that are right."""
    with torch.no_grad():
        logits = run_layers(model, batch.images)[-1].double()
        log_probs = torch.log_softmax(logits, 1)
        own, other = (
            -float(log_probs.gather(1, labels.unsqueeze(1)).mean()) for labels in (batch.labels, batch.labels.roll(1))
        )
    accuracy = float((log_probs.argmax(1) == batch.labels).double().mean())
    counts = torch.bincount(batch.labels).double()
    shares = counts[counts > 0] / counts.sum()
    return Reading(own, other, float(-(shares * shares.log()).sum())), accuracy


def _norms(model: ConvNet, images: Tensor) -> dict[str, NormalisationReport]:
    """What norms would measure on the last layer of each stack, the logits left out."""
    with torch.no_grad():
        outputs = run_layers(model, images)
    last = {layer.stack: x for layer, x in zip(map_layers(model)[:-1], outputs, strict=False)}
    reports = {}
    for stack, x in last.items():
        rows = compare_normalisations(
            x.flatten(2).transpose(1, 2) if x.dim() == 4 else x, schemes=("batch", "instance")
        )
        # Layer norm of maps is over all channels and positions of an image, not over those of a position.
        whole = compare_normalisations(x.flatten(1), schemes=("layer",))
        reports[stack] = NormalisationReport((rows.rows[0], whole.rows[0], *(rows.rows[1:] if x.dim() == 4 else ())))
    return reports


def stretch_lines(look: ImageLook) -> list[Line]:
    """Largest and mean singular values of each convolution's own Jacobian, by depth.

    >>> from thalweg.diagnostics.map_use import LayerStretch
    >>> from thalweg.tasks.classify.measures import ImageLook
    >>> one = LayerStretch("convolutions 1", "convolutions", 1, 64, 64, 1.2, 0.0, 0.4)
    >>> [line.label for line in stretch_lines(ImageLook((), (one,), (), 0.0))]
    ['convolutions, largest', 'convolutions, mean']
    """
    lines = []
    for stack in dict.fromkeys(row.stack for row in look.stretches):
        rows = [row for row in look.stretches if row.stack == stack]
        lines.append(Line(f"{stack}, largest", tuple((row.depth, row.largest) for row in rows)))
        lines.append(Line(f"{stack}, mean", tuple((row.depth, row.mean) for row in rows), dashed=True))
    return lines


def layers_table(look: ImageLook) -> str:
    """A row a layer: how many channels, how many of them vary, how it stretches what goes through.

    >>> from thalweg.tasks.classify.measures import ImageLook
    >>> "convolutions" in layers_table(ImageLook((), (), (), 0.0))
    False
    """
    found = {row.name: row for row in look.stretches}
    rows = []
    for row in look.channels:
        own = found.get(row.name)
        ends = ("", "") if own is None else (f"{own.largest:.3g} ± {own.error:.1g}", f"{own.mean:.3g}")
        low, high = row.deviation
        rows.append(row_of(row.name, f"{row.channels:,}", f"{row.constant:.1%}", f"{low:.2g} to {high:.2g}", *ends))
    heads = ("layer", "#channels", "#hardly vary", "#deviation of a channel", "#Jacobian, largest", "#mean")
    left = "" if look.stretches else note("Maps are too wide, or no numbers: their Jacobians were not taken.")
    return table_of(heads, rows) + left


def norms_table(look: ImageLook) -> str:
    """A row a norm of the network: what comes in, by how much it multiplies changes, its running statistics.

    >>> from thalweg.tasks.classify.measures import ImageLook
    >>> "has no norms" in norms_table(ImageLook((), (), (), 0.0))
    True
    """
    if not look.norms:
        return note("The network has no norms of its own.")
    rows = []
    for row in look.norms:
        spans = (f"{a:.2g} to {b:.2g}" for a, b in (row.mean, row.deviation, row.gain))
        running = ("", "") if math.isnan(row.shift) else (f"{row.shift:.2g}", f"{row.scale:.2g}")
        rows.append(row_of(f"{row.name}: {row.norm}", f"{row.groups:,}", *spans, f"{row.dead:.1%}", *running))
    heads = ("norm", "#groups", "#mean", "#deviation", "#gain", "#dead", "#running mean off", "#running variance")
    about = (
        "<p>Running means in standard deviations from those of the images, running variances relative to theirs.</p>"
        if any(not math.isnan(row.shift) for row in look.norms)
        else ""
    )
    return f"<h3>What its norms measure</h3>{about}{table_of(heads, rows)}"
