"""What a diagnosis says of image networks alone: channels, layers by themselves, their own norms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from thalweg.diagnostics.saturation import TWO_SIDED
from thalweg.energies.convnet.config import ConvNetConfig
from thalweg.tasks.diagnosis.findings import Finding
from thalweg.tasks.diagnosis.remedies import Remedies

if TYPE_CHECKING:
    from thalweg.tasks.classify.measures import ImageDiagnosis, ImageLook


# Share of a layer's channels that hardly vary, or of a norm's groups without variance, worth a word.
CONSTANT, FLAT = 0.2, 0.05
# Running statistics this far from those of images (in standard deviations, and as a ratio) are others.
APART, RATIO = 0.5, 2.0


class ImageRemedies(Remedies):
    """For image networks.

    >>> from thalweg.tasks.classify.config import ClassifyConfig
    >>> ImageRemedies(ClassifyConfig()).paths()
    ('model.norm=batch', 'model.skip=residual')
    """

    steady = True
    model: ConvNetConfig

    def norm(self) -> tuple[str, ...]:
        """A norm of activations, where there is none."""
        return ("model.norm=batch",) if self.model.norm in ("none", "weight") else ()

    def paths(self, stack: str = "") -> tuple[str, ...]:
        """Open a way through many layers of a stack; hidden layers have no path round them.

        >>> from thalweg.tasks.classify.config import ClassifyConfig
        >>> ImageRemedies(ClassifyConfig(model=ConvNetConfig(norm="batch"))).paths("classifier")
        ('model.hidden_norm=true',)
        """
        if stack == "classifier":
            return (*self.norm(), *self._hidden()) or self.slower()
        change = [*self.norm(), *(["model.skip=residual"] if self.model.skip == "none" else [])]
        if not change and self.model.initialisation == "default":
            change.append("model.initialisation=he")
        return tuple(change) or ("model.units=1",)

    def dead(self, layer: str, *, trained: bool) -> tuple[str, ...]:
        """Units of rectifiers that are never above 0, in the layer of that name: training too fast kills them.

        >>> from thalweg.tasks.classify.config import ClassifyConfig
        >>> ImageRemedies(ClassifyConfig()).dead("classifier 1", trained=False)
        ('model.norm=batch', 'model.hidden_norm=true', 'model.activation=leaky_relu')
        """
        leaks = () if self.model.activation == "leaky_relu" else ("model.activation=leaky_relu",)
        hidden = self._hidden() if layer.startswith("classifier") else ()
        return (*(self.slower() if trained else ()), *self.norm(), *hidden, *leaks)

    def _hidden(self) -> tuple[str, ...]:
        """A norm in hidden layers too; instance norm has nothing to average over in a vector."""
        there = self.model.hidden_norm or self.model.norm == "instance"
        return () if there else ("model.hidden_norm=true",)

    def full(self) -> tuple[str, ...]:
        """Gates and activations at the ends of their range."""
        other = ("model.activation=relu",) if self.model.activation == "tanh" else ()
        return (*self.norm(), *other, *self.slower())

    def clipped(self) -> tuple[str, ...]:
        """Gradients far larger than what clipping leaves of them."""
        return (*self.norm(), "training.warmup=400")


def image_findings(diagnosis: ImageDiagnosis) -> Iterator[Finding]:
    """What is found of image networks alone."""
    look, remedies = diagnosis.images, diagnosis.remedies
    if not math.isfinite(diagnosis.reading.loss):
        text = "the energies are no numbers: the training ran away"
        clip = () if diagnosis.subject.config.training.clip else ("training.clip=1",)
        yield Finding("problem", "reading", text, (*remedies.slower(), *clip, *remedies.norm()))
        return
    yield from _channels(diagnosis, look, remedies)
    yield from _stretches(look)
    yield from _norms(diagnosis, look, remedies)


def _channels(diagnosis: ImageDiagnosis, look: ImageLook, remedies: ImageRemedies) -> Iterator[Finding]:
    # A relu's dead units are constant too, and are told of as such.
    dead: dict[str, float] = {}
    for row in diagnosis.saturation.rows:
        if row.kind not in TWO_SIDED:
            dead[row.name] = max(row.stuck, dead.get(row.name, 0.0))
    found = [row for row in look.channels if row.constant - dead.get(row.name, 0.0) > CONSTANT]
    if found:
        worst = max(found, key=lambda row: row.constant)
        others = f", and {len(found) - 1} other layers are like it" if len(found) > 1 else ""
        text = f"{worst.constant:.0%} of the channels of {worst.name} hardly vary from image to image{others}"
        yield Finding("warning", "channels", text, remedies.norm() or remedies.slower())


def _stretches(look: ImageLook) -> Iterator[Finding]:
    if not look.stretches:
        return
    least, most = (end(look.stretches, key=lambda row: row.largest) for end in (min, max))
    middle = sorted(row.mean for row in look.stretches)[len(look.stretches) // 2]
    text = (
        f"a layer by itself stretches a change at most by {least.largest:.2g} ({least.name}) to {most.largest:.2g} "
        f"({most.name}); of one in a random direction it leaves {middle:.2g} in the middle of the layers"
    )
    yield Finding("note", "layers", text)


def _norms(diagnosis: ImageDiagnosis, look: ImageLook, remedies: ImageRemedies) -> Iterator[Finding]:
    if not look.norms:
        return
    worst = max(look.norms, key=lambda row: row.dead)
    if worst.dead > FLAT:
        what = "channels" if worst.kind == "batch" else "groups"
        text = (
            f"{worst.dead:.0%} of the {what} that the norm of {worst.name} sees do not vary: it multiplies what noise "
            f"there is by up to {worst.gain[1]:.2g}"
        )
        yield Finding("warning", "normalisation", text, remedies.slower())
    apart = [row for row in look.norms if row.shift > APART or not 1 / RATIO < row.scale < RATIO]
    apart = [row for row in apart if row.kind == "batch"]
    if apart and diagnosis.subject.trained:
        off = max(apart, key=lambda row: abs(math.log(max(row.scale, 1e-12))) + row.shift)
        text = (
            f"the running statistics of the norm of {off.name} are not those of the images: means lie {off.shift:.2g} "
            f"standard deviations away, variances are {off.scale:.2g} times as large; train longer, or use a norm "
            "without them"
        )
        yield Finding("warning", "normalisation", text, ("model.norm=group",))
    elif not worst.dead > FLAT:
        low = min(row.deviation[0] for row in look.norms)
        high = max(row.deviation[1] for row in look.norms)
        text = f"norms have something to measure: standard deviations of {low:.2g} to {high:.2g} come in"
        yield Finding("good", "normalisation", text)
