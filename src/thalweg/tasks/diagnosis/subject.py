"""What a diagnosis looks at: a run's best model, or a model as it starts, with data to run it on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from thalweg.tasks.report.run import read_log

if TYPE_CHECKING:
    from thalweg.tasks.diagnosis.measures import Diagnosis


@dataclass(frozen=True)
class Words:
    """How a diagnosis speaks of a task.

    Attributes:
        items: what the data are; given: what the model reads; other: what it is given in its place to see whether it
            reads; per: of what a loss is the mean.
        reads: what a model does with it; frequencies: all that is known without.
        sizes: names of the three sizes of a batch; shape: the last two in words.

    >>> from thalweg.tasks.transduce.subject import PairSubject
    >>> PairSubject.words.items
    'pairs'
    """

    items: str
    given: str
    other: str
    per: str
    reads: str
    frequencies: str
    sizes: tuple[str, str, str]
    shape: str


@dataclass(frozen=True)
class Subject:
    """What is looked at: a model, how it is trained, and what to run it on; each task has its own kind.

    Attributes:
        name: of the run or config; trained: whether the weights are a run's best ones.
        config: of the task.
        steps: that the whole training has; 0 where that is not known.
        data: where the data come from.

    >>> from thalweg.tasks.registry import task_named
    >>> task = task_named("classify")
    >>> task.subject(task.configure({"data": {"path": "digits"}})).trained
    False
    """

    words: ClassVar[Words]

    name: str
    trained: bool
    model: nn.Module
    config: Any
    steps: int
    data: str

    def measure(self, rows: int, steps: int) -> Diagnosis:
        """All that applies to the model on a batch of so many rows, and what some steps of training do to a copy."""
        raise NotImplementedError


def planned_steps(run: Path) -> int:
    """Steps of the whole training of a run, as far as its log tells; else 0.

    >>> planned_steps(Path("absent"))
    0
    """
    log = read_log(run / "log.jsonl")
    if log is None or not log.epochs:
        return 0
    last = log.epochs[-1]
    return round(int(last.get("step", 0)) / max(1, last["epoch"]) * int(log.start.get("epochs", last["epoch"])))
