"""How far a training is: what a resumed run needs besides tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """How far a training run is; everything a resumed run needs besides tensors.

    >>> Progress(epoch=2).better(0.2, higher=True)
    True
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    loss_count: float = 0.0
    norm_sum: float = 0.0
    norm_count: int = 0
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    data_seconds: float = 0.0
    waited: int = 0
    best_epoch: int = 0
    best_value: float | None = None
    best_loss: float | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    plateau: list[float] = field(default_factory=lambda: [1.0, 0])
    finished: str = ""

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Progress:
        """What a checkpoint holds, of the right types and ranges; else a ``ValueError``.

        >>> Progress.from_json({"epoch": 2}).epoch
        2
        """
        progress = cls(**stored)
        for name, usual in vars(cls()).items():
            value = getattr(progress, name)
            known = usual is None if value is None else _like(value, 0.0 if usual is None else usual)
            if not known:
                raise ValueError(f"progress.{name} cannot be {str(value)[:40]}")
        if len(progress.plateau) != 2 or not all(_like(each, 0.0) and 0 <= each < 2**63 for each in progress.plateau):
            raise ValueError("progress.plateau must be two numbers")
        return progress

    def better(self, value: float, *, higher: bool, loss: float | None = None) -> bool:
        """Whether ``value`` beats the best so far; a tie goes to the lower ``loss``, NaN never wins."""
        if math.isnan(value):
            return False
        if self.best_value is None or value == self.best_value:
            before = math.inf if self.best_loss is None else self.best_loss
            return self.best_value is None or (loss is not None and loss < before)
        return value > self.best_value if higher else value < self.best_value


def _like(value: object, usual: object) -> bool:
    """Whether a stored value is of the kind of a usual one; whole numbers are no larger than tensors can hold."""
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) >= 2**63):
        return False
    if isinstance(usual, float):
        return isinstance(value, int | float)
    return isinstance(value, type(usual)) and (not isinstance(value, int) or value >= 0)
