"""Which settings mend what a diagnosis finds, of those that are not set yet."""

from __future__ import annotations

from typing import Any


class Remedies:
    """For any model: slower steps. A task's own kind knows more.

    Args:
        config: of the task.

    Attributes:
        steady: whether the optimiser's steps are as long whatever the gradient, so that a large one is no news.

    >>> from thalweg.tasks.registry import build_config
    >>> Remedies(build_config({"training": {"learning_rate": 0.3}})).paths()
    ('training.learning_rate=0.1',)
    """

    steady = False

    def __init__(self, config: Any):
        self.model, self.training = getattr(config, "model", None), config.training

    def paths(self, stack: str = "") -> tuple[str, ...]:
        """Open a way through many layers of a stack."""
        return self.slower()

    def slower(self) -> tuple[str, ...]:
        """Shorter steps."""
        return (f"training.learning_rate={self.training.learning_rate / 3:.1g}",)

    def dead(self, layer: str, *, trained: bool) -> tuple[str, ...]:
        """Units of rectifiers that are never above 0, in the layer of that name."""
        return self.slower()

    def full(self) -> tuple[str, ...]:
        """Gates and activations at the ends of their range."""
        return self.slower()

    def clipped(self) -> tuple[str, ...]:
        """Gradients far larger than what clipping leaves of them."""
        return ("training.warmup=400",)
