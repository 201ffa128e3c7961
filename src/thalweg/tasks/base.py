"""What a task is: how its settings become a config, how it trains, loads, measures, answers, and is looked at.

A task is a folder with one subclass of :class:`Task` and an entry in ``registry.json``. The command line, the
recipes, the sweeps and the report ask a task for what they need and know none by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from thalweg.errors import ConfigError
from thalweg.learning.trainer import Watch
from thalweg.limits import check_threads
from thalweg.metrics import Score, Tally
from thalweg.tasks.config import as_settings, config_from, lay_over
from thalweg.tasks.runs import Listener, RunLog, TrainResult

if TYPE_CHECKING:
    from torch import nn

    from thalweg.tasks.diagnosis.subject import Subject
    from thalweg.tasks.report.part import ReportPart
    from thalweg.tasks.serving import Servant


class Table(NamedTuple):
    """Rows with the same keys, which become the heading, and the columns that are right-aligned.

    >>> Table([{"metric": "CER", "value": "0.2"}], right=("value",)).rows[0]["metric"]
    'CER'
    """

    rows: Sequence[Mapping[str, str]]
    right: tuple[str, ...] = ()


class Record(Protocol):
    """What is predicted of one input: what a service sends, and what the command line prints."""

    @property
    def source(self) -> str:
        """The input, or its name."""
        ...

    @property
    def answers(self) -> Sequence[Any]:
        """Best first, each with ``text`` and ``probability``."""
        ...

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        ...

    def tsv(self) -> Iterator[str]:
        """Lines of tab-separated columns, one an answer."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Measured:
    """Every item of an evaluation, so that it can be compared with another run's on the same items.

    Attributes:
        sources: the inputs, or their names; references: what is right of each, nothing where nothing is.
        answers: the first answer to each, as a person reads it.
        tally: what was counted of each, of which all scores are made.

    >>> from thalweg.metrics import Means, Measure
    >>> tally = Means({"mae": [0.5]}, {"mae": Measure("MAE", False)})
    >>> Measured(sources=("2.0",), references=(("5.0",),), answers=("5.5",), tally=tally).answers
    ('5.5',)
    """

    sources: Sequence[str]
    references: Sequence[Sequence[str]]
    answers: Sequence[str]
    tally: Tally


@dataclass(frozen=True)
class Evaluation:
    """Scores of one run on some data, and the directory that holds the details.

    Attributes:
        data: what was measured on; items: how many were; speed: of them a second.
        measured: item by item, where the task can compare runs.

    >>> Evaluation(Path("runs/x/evaluation/test"), "test.tsv", {}, 100, 2000.0).said()
    'test.tsv: 100 items, 2,000 a second'
    """

    # What is written beside the scores, and what each file holds.
    FILES: ClassVar[Mapping[str, str]] = {"metrics.json": "all figures", "predictions.jsonl": "answers to every item"}

    directory: Path
    data: str
    scores: dict[str, Score] = field(default_factory=dict)
    items: int = 0
    speed: float = 0.0
    measured: Measured | None = field(default=None, kw_only=True, repr=False, compare=False)

    def said(self) -> str:
        """What was done, in a line."""
        return f"{self.data}: {self.items:,} items, {self.speed:,.0f} a second"

    def tables(self) -> list[Table]:
        """The scores, and whatever else is worth a table."""
        return [Table([_row(score) for score in self.scores.values()], ("value", "low", "high", "items"))]

    def remarks(self) -> list[str]:
        """Further lines: the signatures of scores that have one."""
        return signatures(self.scores)

    def files(self) -> dict[Path, str]:
        """What was written, and what each file holds."""
        found = {self.directory / name: about for name, about in self.FILES.items()}
        return {path: about for path, about in found.items() if path.exists()}

    def to_json(self) -> dict[str, Any]:
        """All figures as ``json`` can write them."""
        scores = {key: score.to_json() for key, score in self.scores.items()}
        return {"file": self.data, "items": self.items, "scores": scores, "items_per_second": self.speed}


def signatures(scores: Mapping[str, Score]) -> list[str]:
    """A line for each score that others can get the same way, with what they need to.

    >>> signatures({"chrf": Score("chrF", 50.0, 50.0, 50.0, 9, True, "nrefs:1|case:mixed")})
    ['chrF                          nrefs:1|case:mixed']
    """
    return [f"{score.name:<29} {score.signature}" for score in scores.values() if score.signature]


def _row(score: Score) -> dict[str, str]:
    ends = {name: f"{getattr(score, name):.{score.digits}f}" for name in ("value", "low", "high")}
    better = "higher" if score.higher_is_better else "lower"
    return {"metric": score.name, **ends, "items": f"{score.n:,}", "better": better}


class Exported(NamedTuple):
    """What an export wrote: the folder, its files with what each holds, and what was verified, in a line.

    >>> Exported(Path("onnx"), {}, "verified on 3 words").said
    'verified on 3 words'
    """

    folder: Path
    files: Mapping[Path, str]
    said: str


class Shown(NamedTuple):
    """A model, what one call of it takes, that in words, and what there is to say of its costs.

    >>> Shown(None, (), "one image of 3 x 48 x 48").about
    'one image of 3 x 48 x 48'
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    about: str
    reasons: Callable[[Any], Sequence[str]] = lambda table: ()


class Task(ABC):
    """One kind of job: from plain settings to a trained run and its answers.

    A subclass says what its class attributes are and defines :meth:`fit`, :meth:`load`, :meth:`evaluate` and
    :meth:`predict`; :meth:`subject` and :meth:`example` where ``diagnose`` and ``show`` are to work.

    Attributes:
        name: the value of the top-level key ``task``.
        about: what it does, in a line; noun: what a run of it is; items: what its data are counted in.
        kind: the frozen dataclass of its config.
        data: the setting that holds the training data, ``section.key``.
        missing: what to say where that is empty.
        presets: settings by the name given to ``--model``, or to ``model`` in YAML and Python.
        default_model: the preset of a training that says nothing about its model.
        takes: options of evaluating and predicting, beside ``k``, ``name`` and ``device``, that it has a use for.
        refusal: what to say of the others.

    >>> from thalweg.tasks.registry import task_named
    >>> task = task_named("transduce")
    >>> task.configure({"model": "gru", "training": {"epochs": 3}}).model.cell
    'gru'
    """

    name: ClassVar[str]
    about: ClassVar[str]
    noun: ClassVar[str] = "training"
    items: ClassVar[str] = "items"
    kind: ClassVar[type]
    data: ClassVar[str] = "data.path"
    missing: ClassVar[str] = "no training data; give `--data`, or a config file that names them"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    default_model: ClassVar[str] = ""
    takes: ClassVar[frozenset[str]] = frozenset()
    refusal: ClassVar[str] = "does not go with such a run; leave it out"

    def with_default(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Settings that say nothing about the model, with the default one's name; others as they are."""
        unsaid = isinstance(settings, Mapping) and settings.get("model") is None
        return {**settings, "model": self.default_model} if unsaid and self.default_model else settings

    def configure(self, settings: Mapping[str, Any], where: str = "config") -> Any:
        """A checked config; the settings may name the task or not, and a preset as their ``model``."""
        named = settings.get("task", self.name) if isinstance(settings, Mapping) else self.name
        if named != self.name:
            raise ConfigError(f"{where}: expected settings of the task {self.name}, got those of `{named}`")
        if isinstance(settings, Mapping) and "task" not in getattr(self.kind, "__dataclass_fields__", {}):
            settings = {key: value for key, value in settings.items() if key != "task"}
        return config_from(self.with_default(settings), self.kind, where=where)

    def overrides(self, raw: Mapping[str, Any], words: Iterable[str]) -> dict[str, Any]:
        """Settings with ``key=value`` words laid over them."""
        words = list(words)
        return lay_over(self.with_default(raw) if words else raw, words, self.kind)

    def settings(self, config: Any) -> dict[str, Any]:
        """Plain settings of a config, with the task's name first; :meth:`configure` takes them back."""
        return {"task": self.name, **as_settings(config)}

    def data_of(self, config: Any) -> str:
        """Where the training data of a config are."""
        section, _, key = self.data.partition(".")
        return str(getattr(getattr(config, section), key))

    def data_settings(self, data: str | None, dev: str | None) -> dict[str, str]:
        """The settings, ``section.key``, that ``--data`` and ``--dev`` stand for."""
        if dev is not None:
            raise ConfigError(f"--dev does not go with the task {self.name}; leave it out")
        return {} if data is None else {self.data: data}

    def recognises(self, word: str) -> bool:
        """Whether a word of ``thalweg train`` that is neither config nor setting is of its kind of data."""
        return False

    def check_options(self, given: Iterable[str]) -> None:
        """Refuse options that this task has no use for."""
        for option in given:
            if option not in self.takes:
                raise ConfigError(f"--{option.replace('_', '-')} {self.refusal}")

    def train(
        self,
        config: Any,
        out: str | Path,
        *,
        resume: bool = False,
        listener: Listener | None = None,
        root: Path | None = None,
        watch: Watch | None = None,
    ) -> TrainResult:
        """Train; the run directory ``out`` gets the model, the log and what resuming needs.

        Args:
            config: of the task's ``kind``.
            out: the run directory; one that holds a run already is an error unless ``resume``.
            resume: go on from ``last.safetensors``, where it is there; the result equals an uninterrupted run's.
            listener: called with every event; ``step`` events are not logged, all others are.
            root: folder of known data sets.
            watch: looks at some steps; what it finds is logged. The weights are the same with it and without.
        """
        check_threads(config.training.threads)
        log = RunLog(out, listener, resume=resume, watch=watch, unit=self.items, noun=self.noun)
        return self.fit(config, log, root)

    @abstractmethod
    def fit(self, config: Any, log: RunLog, root: Path | None) -> TrainResult:
        """What :meth:`train` does, with the log of its run: data, model, loss and dev scores for ``log.train``."""

    @abstractmethod
    def load(self, run: str | Path, *, device: str = "auto", **options: Any) -> Any:
        """The best model of a run, with a method ``predict`` that gives records."""

    @abstractmethod
    def evaluate(
        self,
        run: str | Path,
        data: str | None = None,
        *,
        k: int = 5,
        name: str | None = None,
        device: str = "auto",
        root: Path | None = None,
        listener: Listener | None = None,
        **options: Any,
    ) -> Evaluation:
        """Measure a run on data and write ``RUN/evaluation/NAME/``.

        Args:
            k: answers to each item at most.
            name: of the evaluation; that of the data by default.
            root: folder of known data sets.
            listener: called with ``{"event": "predicted", "done": n, "of": m}`` and the like.
            options: among those that the task takes.
        """

    @abstractmethod
    def predict(
        self,
        run: str | Path,
        inputs: Sequence[str] = (),
        *,
        k: int = 1,
        device: str = "auto",
        listener: Listener | None = None,
        **options: Any,
    ) -> Iterator[Record]:
        """Records of what ``inputs`` name, as they come; what a person should know is told as ``message`` events."""

    def export(self, run: str | Path, out: str | Path, *, layout: str, **options: Any) -> Exported:
        """Write a run's model to a folder for use elsewhere, verified; ``layout`` is ``onnx``.

        Args:
            options: ``data`` or ``text`` to verify it on, ``root`` of known data sets, ``listener``.
        """
        raise ConfigError(f"runs of the task {self.name} have no export as {layout}; it is of strings")

    def serving(self, run: str | Path, *, device: str = "auto") -> Servant:
        """The best model of a run as a service asks it; ``thalweg serve`` puts it to work."""
        raise ConfigError(f"the task {self.name} has nothing that `thalweg serve` could ask; use `thalweg predict`")

    def after_training(self, result: TrainResult, root: Path | None = None) -> None:
        """What a run gets once it is trained, before its report is written; nothing by default."""
        return

    def next_steps(self, run: str) -> list[str]:
        """Commands that use a run, with its name as a shell takes it; the last two predict one thing, and anything."""
        return [f"thalweg evaluate {run} DATA", f"thalweg predict {run} DATA", f"thalweg serve {run}"]

    def report(self) -> ReportPart:
        """The task's part of a run's report."""
        from thalweg.tasks.report.part import ReportPart

        return ReportPart()

    def subject(
        self,
        config: Any,
        run: Path | None = None,
        *,
        data: str | None = None,
        root: Path | None = None,
        device: str = "cpu",
        name: str = "config",
    ) -> Subject:
        """What a diagnosis looks at: a run's best model, or where there is none a config's as it starts.

        Args:
            data: other data than its own; root: folder of known data sets; name: what to call it.
        """
        raise ConfigError(f"the task {self.name} has nothing for `thalweg diagnose` to look at")

    def example(self, config: Any, run: Path | None = None, **sizes: Any) -> Shown:
        """What ``thalweg show`` counts: a run's model or a config's, and an example of what it takes.

        Args:
            sizes: what the command line says of the data of a config: ``image``, ``classes``, ``symbols``, ``length``.
        """
        raise ConfigError(f"the task {self.name} has nothing for `thalweg show` to count")
