"""The task behind a model of pronunciation that comes with the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.errors import ConfigError
from thalweg.tasks.base import Exported
from thalweg.tasks.boxed.models import copied, folder_of
from thalweg.tasks.pronounce.pronouncer import Pronouncer
from thalweg.tasks.runs import TrainResult
from thalweg.tasks.transduce.config import TransduceConfig
from thalweg.tasks.transduce.task import Transduction
from thalweg.tasks.transduce.transducer import load

if TYPE_CHECKING:
    from thalweg.tasks.transduce.evaluation import PairEvaluation
    from thalweg.tasks.transduce.serving import StringServant


class Pronouncing(Transduction):
    """Transduction by a run in the box, with a dictionary; what it writes goes to ``runs/NAME-boxed``.

    ``evaluate`` measures the model alone: the dictionary would look up what it has itself.

    >>> TASK.load("english", device="cpu").target.symbols.kind
    'spaced'
    """

    takes = Transduction.takes - {"features", "unknown", "vote", "ensemble"}
    refusal = "does not go with a model in the box; leave it out, or give a run of your own"

    def train(self, config: TransduceConfig, out: str | Path, **options: Any) -> TrainResult:
        """Its recipe trains, as any transduction."""
        raise ConfigError("a model in the box is trained already; `thalweg recipe run english` trains another")

    def load(self, run: str | Path, *, device: str = "auto", precision: str = "float32", **options: Any) -> Pronouncer:
        """The model with its dictionary."""
        self.check_options(options)
        own = load(folder_of(run), device=device, precision=precision)
        return Pronouncer(own.model, own.source, own.target, longest=own.longest, meta=own.meta)

    def evaluate(self, run: str | Path, data: str | None = None, **options: Any) -> PairEvaluation:
        """Measure the model of a copy, without the dictionary."""
        return super().evaluate(copied(run), data, **options)

    def export(self, run: str | Path, out: str | Path, **options: Any) -> Exported:
        """The model alone: its words in lower case, without the dictionary."""
        return super().export(folder_of(run), out, **options)

    def _servant(self) -> type[StringServant]:
        from thalweg.tasks.pronounce.serving import WordServant

        return WordServant


TASK = Pronouncing()
"""The task."""
