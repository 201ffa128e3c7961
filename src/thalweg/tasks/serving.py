"""What a task offers to a service: a loaded model that answers questions of many callers together."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from thalweg.errors import ConfigError
from thalweg.metrics import Score
from thalweg.tasks.base import Record


class Plan(NamedTuple):
    """How questions are answered. Those with equal plans may be answered together, unless each is to be alone.

    Attributes:
        k: answers to each question at most.
        how: what else the servant needs to know, a search for instance.
        alone: whether one caller's questions are kept apart from others', as draws of random numbers must be.
        weight: what one answer costs at worst, in plain ones.

    >>> Plan(5) == Plan(5, None), Plan(5).weight
    (True, 1)
    """

    k: int
    how: Hashable = None
    alone: bool = False
    weight: int = 1


class Exam(ABC):
    """Questions with their right answers: what comes back is marked, and scored as far as it has come.

    >>> class Sums(Exam):
    ...     questions = [(1, 2)]
    ...
    ...     def marked(self, place, record):
    ...         return {"answer": record, "right": record == 3}
    ...
    ...     def scores(self, records, *, resamples=1000):
    ...         return {}
    >>> Sums().marked(0, 3)
    {'answer': 3, 'right': True}
    """

    questions: Sequence[Any]

    @abstractmethod
    def marked(self, place: int, record: Any) -> dict[str, Any]:
        """The record of question number ``place`` as a JSON object, with what is right and how far off it is."""

    @abstractmethod
    def scores(self, records: Sequence[Any], *, resamples: int = 1000) -> dict[str, Score]:
        """Scores, with bootstrap intervals, of the first so many questions."""


class Servant(ABC):
    """A loaded model as a service asks it. It is called from one thread at a time.

    Attributes:
        view: what a page shows for it: ``strings``, ``images``, ``numbers`` or ``none``.
        takes: the options that it has a use for.
        longest: characters of a text among the inputs at most.

    >>> class Echo(Servant):
    ...     def describe(self):
    ...         return {"about": "says it again"}
    ...
    ...     def plan_of(self, options):
    ...         return Plan(1)
    ...
    ...     def questions(self, inputs, features=()):
    ...         return list(inputs)
    ...
    ...     def answer(self, questions, plan):
    ...         return questions
    >>> echo = Echo()
    >>> echo.answer(echo.questions(["a"]), echo.plan_of({}))
    ['a']
    """

    view: ClassVar[str] = "none"
    takes: frozenset[str] = frozenset({"k"})
    longest: ClassVar[int] = 1024

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What there is to know before asking, as JSON values: ``default`` options, ``examples``, ``scores``, ..."""

    @abstractmethod
    def plan_of(self, options: Mapping[str, Any]) -> Plan:
        """Options of a request, those that were given, as a plan; a wrong one is a ``ConfigError``."""

    @abstractmethod
    def questions(self, inputs: Sequence[Any], features: Sequence[str] = ()) -> list[Any]:
        """The inputs of a request, checked one by one: texts with their tags, rows of numbers, or whatever it reads."""

    @property
    def examined(self) -> Servant:
        """Who answers the questions of an exam: itself, unless something beside the model knows the answers."""
        return self

    @abstractmethod
    def answer(self, questions: Sequence[Any], plan: Plan) -> Sequence[Record]:
        """A record for each question: those of :meth:`Task.predict <thalweg.tasks.base.Task.predict>`."""

    def symbols(self, record: Any) -> dict[str, Any]:
        """What the rows and columns of a record's attention stand for: ``source``, and ``answers`` of each answer."""
        raise ConfigError("this model has no attention to tell of; leave `attention` out")

    def tree(self, question: Any, plan: Plan, *, exact: bool = False) -> dict[str, Any]:
        """What a beam looked at for one question; with the proved optimum where ``exact``."""
        raise ConfigError("this model has no beam to look at; ask another one")

    def look(self, image: bytes, plan: Plan) -> dict[str, Any]:
        """The record of an image file, and what of it spoke for the answer."""
        raise ConfigError("this model reads no images; ask another one")

    def exam(self, text: str, plan: Plan) -> Exam:
        """What is in a file of questions with right answers."""
        raise ConfigError("this model cannot be measured here; use `thalweg evaluate`")


def measured_scores(run: str | Path) -> dict[str, Any]:
    """The scores of a run's evaluations, by their names; nothing where there are none, or none that can be read.

    >>> measured_scores("absent")
    {}
    """
    found = {}
    for path in sorted(Path(run).glob("evaluation/*/metrics.json")):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            found[path.parent.name] = {"items": facts["items"], **facts["scores"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return found
