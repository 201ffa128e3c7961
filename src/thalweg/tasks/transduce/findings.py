"""What a diagnosis says of transducers alone, and which of their settings mend what it finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from thalweg.energies.seq2seq.model import Seq2SeqConfig
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.tasks.diagnosis.findings import LOST, Finding
from thalweg.tasks.diagnosis.remedies import Remedies
from thalweg.tasks.transduce.presets import ModelConfig

if TYPE_CHECKING:
    from thalweg.tasks.diagnosis.measures import Diagnosis


class PairRemedies(Remedies):
    """For transducers.

    >>> from thalweg.tasks.registry import build_config
    >>> PairRemedies(build_config({"model": {"residual": "residual"}})).paths()
    ('model.norm=layer',)
    """

    model: ModelConfig

    def paths(self, stack: str = "") -> tuple[str, ...]:
        """Open a way through many layers of a stack."""
        model = self.model
        if isinstance(model, TransformerConfig):
            return ("model.norm=pre",) if model.norm == "post" else ("training.warmup=4000",)
        if not isinstance(model, Seq2SeqConfig):
            return ("training.warmup=400",)
        change = []
        if model.residual == "none":
            change.append("model.residual=residual")
        if model.norm == "none":
            change.append("model.norm=layer")
        if not change and model.initialisation == "default":
            change.append("model.initialisation=orthogonal")
        return tuple(change) or ("model.encoder_layers=2", "model.decoder_layers=2")

    def dead(self, layer: str, *, trained: bool) -> tuple[str, ...]:
        """Units of rectifiers that are never above 0, in the layer of that name."""
        return ("training.learning_rate=0.001", "model.activation=gelu")

    def full(self) -> tuple[str, ...]:
        """Gates and activations at the ends of their range."""
        norm = isinstance(self.model, Seq2SeqConfig) and self.model.norm == "none"
        return (*(("model.norm=layer",) if norm else ()), "training.learning_rate=0.001")

    def clipped(self) -> tuple[str, ...]:
        """Gradients far larger than what clipping leaves of them."""
        norm = isinstance(self.model, Seq2SeqConfig | TransformerConfig)
        return (*(("model.norm=layer",) if norm else ()), "training.warmup=400")


def pair_findings(diagnosis: Diagnosis) -> Iterator[Finding]:
    """What is found of transducers alone: of ways through time, and of what norms would measure."""
    yield from _time(diagnosis)
    yield from _norms(diagnosis)


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


def _norms(diagnosis: Diagnosis) -> Iterator[Finding]:
    for stack, report in diagnosis.norms.items():
        rows = {row.scheme: row for row in report.rows}
        batch = rows.get("batch")
        if batch is not None and batch.dead > 0.05:
            text = (
                f"{batch.dead:.0%} of the features of the last {stack} layer hardly vary: their standard deviation is "
                f"{batch.deviation[0]:.2g} at the least, so that batch norm would blow up noise; layer norm would not"
            )
            yield Finding("note", "normalisation", text)
