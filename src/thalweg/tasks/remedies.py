"""Which settings mend what a diagnosis finds, for each kind of model, of those that are not set yet."""

from __future__ import annotations

from typing import Any

from thalweg.energies.convnet_config import ConvNetConfig
from thalweg.energies.seq2seq import Seq2SeqConfig

__all__ = ["ImageRemedies", "Remedies", "remedies_of"]


class Remedies:
    """For transducers.

    Args:
        config: of the task.

    >>> from thalweg.tasks.config import build_config
    >>> Remedies(build_config({"model": {"residual": "residual"}})).paths()
    ('model.norm=layer',)
    """

    def __init__(self, config: Any):
        self.model, self.training = config.model, config.training

    def paths(self, stack: str = "") -> tuple[str, ...]:
        """Open a way through many layers of a stack.

        >>> from thalweg.tasks.config import build_config
        >>> Remedies(build_config({})).paths()
        ('model.residual=residual', 'model.norm=layer')
        """
        model = self.model
        if not isinstance(model, Seq2SeqConfig):
            return ("model.norm=pre",) if model.norm == "post" else ("training.warmup=4000",)
        change = []
        if model.residual == "none":
            change.append("model.residual=residual")
        if model.norm == "none":
            change.append("model.norm=layer")
        if not change and model.initialisation == "default":
            change.append("model.initialisation=orthogonal")
        return tuple(change) or ("model.encoder_layers=2", "model.decoder_layers=2")

    def slower(self) -> tuple[str, ...]:
        """Shorter steps."""
        return (f"training.learning_rate={self.training.learning_rate / 3:.1g}",)

    def dead(self, layer: str, *, trained: bool) -> tuple[str, ...]:
        """Units of rectifiers that are never above 0, in the layer of that name."""
        return ("training.learning_rate=0.001", "model.activation=gelu")

    def full(self) -> tuple[str, ...]:
        """Gates and activations at the ends of their range."""
        norm = isinstance(self.model, Seq2SeqConfig) and self.model.norm == "none"
        return (*(("model.norm=layer",) if norm else ()), "training.learning_rate=0.001")

    def clipped(self) -> tuple[str, ...]:
        """Gradients far larger than what clipping leaves of them."""
        return ("model.norm=layer", "training.warmup=400")


class ImageRemedies(Remedies):
    """For image networks.

    >>> from thalweg.tasks.classify_settings import ClassifyConfig
    >>> ImageRemedies(ClassifyConfig()).paths()
    ('model.norm=batch', 'model.skip=residual')
    """

    model: ConvNetConfig

    def norm(self) -> tuple[str, ...]:
        """A norm of activations, where there is none.

        >>> from thalweg.tasks.classify_settings import ClassifyConfig
        >>> ImageRemedies(ClassifyConfig(model=ConvNetConfig(norm="group"))).norm()
        ()
        """
        return ("model.norm=batch",) if self.model.norm in ("none", "weight") else ()

    def paths(self, stack: str = "") -> tuple[str, ...]:
        """Open a way through many layers of a stack; hidden layers have no path round them.

        >>> from thalweg.tasks.classify_settings import ClassifyConfig
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

        >>> from thalweg.tasks.classify_settings import ClassifyConfig
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


def remedies_of(config: Any) -> Remedies:
    """Those for a config's kind of model.

    >>> from thalweg.tasks.classify_settings import ClassifyConfig
    >>> type(remedies_of(ClassifyConfig())).__name__
    'ImageRemedies'
    """
    return ImageRemedies(config) if isinstance(config.model, ConvNetConfig) else Remedies(config)
