"""A diagnosis in words: what is wrong where, and which settings to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from thalweg.diagnostics.saturation import TWO_SIDED
from thalweg.tasks.diagnosis.measures import Diagnosis

Severity = Literal["problem", "warning", "note", "good"]
"""How bad a finding is; a ``note`` says what is so and needs nothing done."""

# A gradient or signal that a stack makes smaller or larger by more than this has vanished or exploded.
LOST = 0.02
# States that differ between inputs by less than this share of their size say nothing about the input.
SAME = 0.02
# Share of a gate's values at an end of its range that is worth a word.
STUCK = 0.6
# Share of a relu's units that are dead.
DEAD = 0.2
# A step this long relative to the weights is too long for training to settle.
LONG = 0.1

_ORDER = ("problem", "warning", "note", "good")
_ABOUT = (
    *("reading", "depth", "signal", "time", "saturation", "steps", "decay", "channels", "layers", "normalisation"),
)


@dataclass(frozen=True)
class Finding:
    """One thing that was found: how bad, about what, in words, and the settings to try.

    >>> print(Finding("problem", "depth", "gradients vanish in the encoder", ("model.residual=residual",)))
    problem  gradients vanish in the encoder; try model.residual=residual
    """

    severity: Severity
    about: str
    text: str
    change: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line."""
        return f"{self.severity:<9}{self.text}" + (f"; try {' '.join(self.change)}" if self.change else "")


def findings(diagnosis: Diagnosis) -> tuple[Finding, ...]:
    """What a diagnosis says, worst first; at least one finding.

    >>> from thalweg.tasks.diagnosis.measures import diagnose
    >>> from thalweg.tasks.registry import task_named
    >>> task = task_named("transduce")
    >>> data = {"train": "cmudict:dev", "dev": "cmudict:dev"}
    >>> config = task.configure({"data": data, "model": {"hidden": 4, "embedding": 4}})
    >>> {finding.about for finding in findings(diagnose(task.subject(config), rows=4, steps=1))} >= {"decay"}
    True
    """
    found = [
        *_reading(diagnosis),
        *_depth(diagnosis),
        *_signal(diagnosis),
        *_saturation(diagnosis),
        *_steps(diagnosis),
        *_decay(diagnosis),
        *diagnosis.findings(),
    ]
    return tuple(sorted(found, key=lambda finding: (_ORDER.index(finding.severity), _ABOUT.index(finding.about))))


def _reading(diagnosis: Diagnosis) -> Iterator[Finding]:
    reading, words = diagnosis.reading, diagnosis.subject.words
    losses = f"loss {reading.loss:.3f}, beside another's {words.given} {reading.shuffled:.3f}"
    if not diagnosis.subject.trained or not math.isfinite(reading.loss):
        return
    if not reading.heeds:
        text = (
            f"the model does not {words.reads}: {losses} nats {words.per}; {words.frequencies} alone give "
            f"{reading.frequencies:.3f}"
        )
        deep = any(len({site.depth for site in sites}) > 2 for sites in diagnosis.flow.stacks().values())
        remedies = diagnosis.remedies
        yield Finding("problem", "reading", text, remedies.paths() if deep else remedies.slower())
    else:
        verb, _, rest = words.reads.partition(" ")
        yield Finding("good", "reading", f"the model {verb}s {rest}: {losses} nats {words.per}")


def _depth(diagnosis: Diagnosis) -> Iterator[Finding]:
    for stack, sites in diagnosis.flow.stacks().items():
        ratio = diagnosis.flow.through_depth(stack)
        if math.isnan(ratio):
            continue
        layers = sites[-1].depth - sites[0].depth
        each = ratio ** (1 / layers) if ratio > 0 else 0.0
        how = f"at layer {sites[0].depth} they are {ratio:.2g} of those at layer {sites[-1].depth}"
        if ratio < LOST:
            text = f"gradients vanish on their way down the {stack or 'stack'}: {how}, a factor of {each:.2g} a layer"
            yield Finding("problem", "depth", text, diagnosis.remedies.paths(stack))
        elif ratio > 1 / LOST:
            clip = () if diagnosis.subject.config.training.clip else ("training.clip=1",)
            text = f"gradients explode on their way down the {stack or 'stack'}: {how}, a factor of {each:.2g} a layer"
            yield Finding("problem", "depth", text, (*clip, *diagnosis.remedies.paths(stack)))
        else:
            yield Finding("good", "depth", f"gradients reach every layer of the {stack or 'stack'}: {how}")


def _signal(diagnosis: Diagnosis) -> Iterator[Finding]:
    for stack, sites in diagnosis.flow.stacks().items():
        first, last = sites[0], sites[-1]
        if math.isnan(last.spread) or first.depth == last.depth:
            continue
        if last.spread < SAME and last.spread < 0.3 * first.spread:
            text = (
                f"the signal dies on its way up the {stack or 'stack'}: states of layer {last.depth} differ between "
                f"inputs by {last.spread:.2g} of their size, those of layer {first.depth} by {first.spread:.2g}"
            )
            yield Finding("problem", "signal", text, diagnosis.remedies.paths(stack))


def _saturation(diagnosis: Diagnosis) -> Iterator[Finding]:
    rows = diagnosis.saturation.rows
    if not rows:
        return
    dead = [row for row in rows if row.kind not in TWO_SIDED and row.stuck > DEAD]
    full = [row for row in rows if row.kind in TWO_SIDED and row.share > STUCK]
    remedies = diagnosis.remedies
    if dead:
        worst = max(dead, key=lambda row: row.stuck)
        how = "0" if worst.kind == "relu" else "flat"
        text = f"{worst.stuck:.0%} of the units of {worst.name} ({worst.gate}) are dead: {how} on the whole batch"
        yield Finding("warning", "saturation", text, remedies.dead(worst.name, trained=diagnosis.subject.trained))
    if full:
        worst = max(full, key=lambda row: row.share)
        others = f", and {len(full) - 1} other gates like it" if len(full) > 1 else ""
        text = (
            f"{worst.share:.0%} of the values of the {worst.gate} of {worst.name} are at an end of their range{others}"
        )
        yield Finding("warning", "saturation", text, remedies.full())
    if not dead and not full:
        worst = diagnosis.saturation.worst(1)[0]
        text = f"gates and activations have room: the fullest is the {worst.gate} of {worst.name}, {worst.share:.0%}"
        yield Finding("good", "saturation", f"{text} at an end")


def _steps(diagnosis: Diagnosis) -> Iterator[Finding]:
    training, remedies = diagnosis.subject.config.training, diagnosis.remedies
    long = [row for row in diagnosis.flow.layers if row.update > LONG]
    if long:
        worst = max(long, key=lambda row: row.update)
        text = f"steps are long: one changes the weights of {worst.name} by {worst.update:.0%} of their size"
        yield Finding("warning", "steps", text, remedies.slower())
    if training.clip and diagnosis.gradient > 10 * training.clip:
        text = f"clipping takes most of the gradient away: its norm is {diagnosis.gradient:.3g}, clip {training.clip:g}"
        yield Finding("warning", "steps", text, remedies.clipped())
    # Adam's steps are as long whatever the gradient.
    steady = remedies.steady and training.optimiser != "sgd"
    if not training.clip and diagnosis.gradient > 10 and not steady:
        text = f"the gradient is large, its norm {diagnosis.gradient:.3g}, and nothing clips it"
        yield Finding("warning", "steps", text, ("training.clip=1",))


def _decay(diagnosis: Diagnosis) -> Iterator[Finding]:
    decay, total = diagnosis.decay, diagnosis.subject.steps
    decaying = [row for row in decay.groups if row.measured > 0]
    uneven = [row for row in decaying if row.small > 2 * max(row.large, 1e-300)]
    if not decaying:
        yield Finding("note", "decay", "no weight decays")
        return
    fastest = min(decaying, key=lambda row: row.half_life)
    runs = f", of {total:,} that the training has" if total else ""
    text = f"decay alone would halve the {fastest.name} in {fastest.half_life:,.0f} steps{runs}"
    if uneven:
        yield Finding("warning", "decay", decay.advice.partition("; ")[0], ("training.optimiser=adamw",))
    elif total and fastest.half_life < total / 20:
        rate = diagnosis.subject.config.training.weight_decay / 10
        yield Finding("warning", "decay", f"{text}: it holds them near 0", (f"training.weight_decay={rate:g}",))
    else:
        yield Finding("note", "decay", text)
