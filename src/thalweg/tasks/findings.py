"""A diagnosis in words: what is wrong where, and which settings to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from thalweg.diagnostics.saturation import TWO_SIDED
from thalweg.energies.seq2seq import Seq2SeqConfig
from thalweg.tasks.diagnosing import Diagnosis
from thalweg.tasks.remedies import remedies_of

__all__ = ["Finding", "Severity", "findings"]

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

    >>> findings.__name__
    'findings'
    """
    from thalweg.tasks.image_findings import image_findings  # it says what it finds in the words of this module

    found = [
        *_reading(diagnosis),
        *_depth(diagnosis),
        *_signal(diagnosis),
        *_time(diagnosis),
        *_saturation(diagnosis),
        *_steps(diagnosis),
        *_decay(diagnosis),
        *_norms(diagnosis),
        *image_findings(diagnosis),
    ]
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity)))


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
        remedies = remedies_of(diagnosis.subject.config)
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
            yield Finding("problem", "depth", text, remedies_of(diagnosis.subject.config).paths(stack))
        elif ratio > 1 / LOST:
            clip = () if diagnosis.subject.config.training.clip else ("training.clip=1",)
            text = f"gradients explode on their way down the {stack or 'stack'}: {how}, a factor of {each:.2g} a layer"
            yield Finding("problem", "depth", text, (*clip, *remedies_of(diagnosis.subject.config).paths(stack)))
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
            yield Finding("problem", "signal", text, remedies_of(diagnosis.subject.config).paths(stack))


def _time(diagnosis: Diagnosis) -> Iterator[Finding]:
    model = diagnosis.subject.config.model
    if not isinstance(model, Seq2SeqConfig) or not diagnosis.spans:
        return
    for stack in dict.fromkeys(layer.stack for layer in diagnosis.spans):
        layers = [layer for layer in diagnosis.spans if layer.stack == stack]
        ends = {layer.name: float(layer.report.largest[-1].median()) for layer in layers}
        span = layers[0].report.spans[-1]
        most, least = max(ends, key=lambda name: ends[name]), min(ends, key=lambda name: ends[name])
        bound = next((layer.report.bound for layer in layers if layer.name == most), None)
        limit = "" if bound is None else f" (delta^{span} = {float(bound[-1]):.2g})"
        if ends[most] > 1 / LOST:
            change = [] if diagnosis.subject.config.training.clip else ["training.clip=1"]
            change += ["model.initialisation=orthogonal"] if model.initialisation == "default" else []
            change += ["model.cell=gru"] if model.cell.startswith("rnn") else []
            text = (
                f"gradients explode through time in {most}: {span} steps stretch them by up to {ends[most]:.2g}{limit}"
            )
            yield Finding("problem", "time", text, tuple(change))
        elif ends[most] < LOST:
            needed = model.attention == "none"
            change = ("model.attention=additive",) if needed else ()
            change += ("model.initialisation=orthogonal",) if model.initialisation == "default" and needed else ()
            why = "" if needed else "; attention goes round time, so that this need not hurt"
            text = (
                f"the {stack} forgets: {span} steps leave at most {ends[most]:.2g} of a change of its state{limit}{why}"
            )
            yield Finding("warning" if needed else "note", "time", text, change)
        else:
            text = f"over {span} steps the {stack} carries {ends[least]:.2g} ({least}) to {ends[most]:.2g} ({most})"
            yield Finding("note", "time", f"{text} of a change of its state{limit}")


def _saturation(diagnosis: Diagnosis) -> Iterator[Finding]:
    rows = diagnosis.saturation.rows
    if not rows:
        return
    dead = [row for row in rows if row.kind not in TWO_SIDED and row.stuck > DEAD]
    full = [row for row in rows if row.kind in TWO_SIDED and row.share > STUCK]
    remedies = remedies_of(diagnosis.subject.config)
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
    training, remedies = diagnosis.subject.config.training, remedies_of(diagnosis.subject.config)
    long = [row for row in diagnosis.flow.layers if row.update > LONG]
    if long:
        worst = max(long, key=lambda row: row.update)
        text = f"steps are long: one changes the weights of {worst.name} by {worst.update:.0%} of their size"
        yield Finding("warning", "steps", text, remedies.slower())
    if training.clip and diagnosis.gradient > 10 * training.clip:
        text = f"clipping takes most of the gradient away: its norm is {diagnosis.gradient:.3g}, clip {training.clip:g}"
        yield Finding("warning", "steps", text, remedies.clipped())
    # Adam's steps are as long whatever the gradient; of the small batches of transducers a large one is worth a word.
    scaled = diagnosis.images is not None and training.optimiser != "sgd"
    if not training.clip and diagnosis.gradient > 10 and not scaled:
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


def _norms(diagnosis: Diagnosis) -> Iterator[Finding]:
    for stack, report in diagnosis.norms.items() if diagnosis.images is None else ():
        rows = {row.scheme: row for row in report.rows}
        batch = rows.get("batch")
        if batch is not None and batch.dead > 0.05:
            text = (
                f"{batch.dead:.0%} of the features of the last {stack} layer hardly vary: their standard deviation is "
                f"{batch.deviation[0]:.2g} at the least, so that batch norm would blow up noise; layer norm would not"
            )
            yield Finding("note", "normalisation", text)
