"""The record of a sweep: every setting and what came of it, in a file that survives a kill at any moment."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from thalweg.errors import CheckpointError, ConfigError, MissingDependencyError
from thalweg.files import making_sense, writing
from thalweg.sweeps.settings import SweepConfig

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial


P = ParamSpec("P")
R = TypeVar("R")
JOURNAL = "journal.jsonl"
_ELSEWHERE = "restore it from a copy or choose another --out"
# Marks a setting that was drawn completely; its number counts those alone.
NUMBER = "number"


@dataclass
class Trial:
    """One setting and what came of it.

    Attributes:
        number: 0, 1, ... in the order of their drawing.
        values: of the keys of the space.
        state: ``running`` (also: to be gone on with), ``complete``, ``pruned`` or ``failed``.
        runs: of the seeds that are done: ``value``, ``best_epoch``, ``epochs``, ``seconds``, ``metrics``.
        error: of a failed one, in a line.
        curve: the metric by epoch of the first seed, which pruning goes by.
        pruned_at: the epoch after which it was stopped.

    >>> trial = Trial(3, {"hidden": 64}, runs={0: {"value": 0.5}, 1: {"value": 0.7}})
    >>> round(trial.value, 3), round(trial.error_of_mean, 3)
    (0.6, 0.1)
    """

    number: int
    values: dict[str, Any]
    state: Literal["running", "complete", "pruned", "failed"] = "running"
    runs: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    curve: dict[int, float] = field(default_factory=dict)
    pruned_at: int = 0

    @property
    def value(self) -> float:
        """Mean over the seeds that are done; NaN before the first is."""
        return mean_and_error([run["value"] for run in list(self.runs.values())])[0]

    @property
    def error_of_mean(self) -> float:
        """Standard error of the mean; NaN with fewer than two seeds."""
        return mean_and_error([run["value"] for run in list(self.runs.values())])[1]

    @property
    def score(self) -> str:
        """The mean for people, with its error where that is known; empty before a seed is done."""
        error = f" ± {self.error_of_mean:.4f}" if math.isfinite(self.error_of_mean) else ""
        return f"{self.value:.4f}{error}" if math.isfinite(self.value) else ""


def mean_and_error(values: list[float]) -> tuple[float, float]:
    r"""Mean and its standard error :math:`s / \sqrt n`, with n - 1 in the variance; NaN where undefined.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    if not values:
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


@contextmanager
def holding(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Holds a lock file that the system frees when its holder ends, however it ends.

    Args:
        path: the file; made where it is not there.
        wait: wait for another holder rather than refuse.

    >>> import tempfile
    >>> with holding(Path(tempfile.mkdtemp()) / ".lock"):
    ...     pass
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        try:
            import fcntl
        except ImportError:  # no such locks on Windows
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ConfigError(
                f"{path.parent}: another sweep is at work here; wait for it, stop it or choose another --out"
            ) from None
        except OSError:
            pass  # a disk without locks
        yield


def _recorded(method: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Store, P], R]:
    """What the record cannot take is an error that names its file."""

    @wraps(method)
    def wrapped(self: Store, *args: P.args, **kwargs: P.kwargs) -> R:
        with writing(self._file):
            return method(self, *args, **kwargs)

    return wrapped


def ranked(trials: Iterable[Trial], *, higher: bool) -> list[Trial]:
    """The complete trials, the best first; of equals the earlier first.

    >>> [trial.number for trial in ranked([Trial(0, {}), Trial(1, {}, "complete", {0: {"value": 0.5}})], higher=True)]
    [1]
    """
    done = [trial for trial in trials if trial.state == "complete"]
    return sorted(done, key=lambda trial: (-trial.value if higher else trial.value, trial.number))


class Store:
    """Draws settings and records what comes of them. One process writes; the caller holds the directory's lock.

    A setting is drawn from a sampler seeded by the sweep's seed and the setting's number, so that a sweep which was
    killed draws the same ones as one that was not. What is recorded is on the disk when a method returns.

    Args:
        directory: of the sweep.
        config: how it goes.
        higher: whether a higher value wins.

    >>> import tempfile
    >>> store = Store(Path(tempfile.mkdtemp()), SweepConfig(space={"x": [1, 2]}, method="grid"), higher=True)
    >>> store.ask().values, store.ask().values, store.ask()
    ({'x': 1}, {'x': 2}, None)
    """

    def __init__(self, directory: Path, config: SweepConfig, *, higher: bool):
        self.config, self.higher = config, higher
        self._keys = {parameter.key: parameter for parameter in config.parameters}
        self._grid = config.method == "grid"
        self.trials: list[Trial] = []
        self._optuna: dict[int, int] = {}
        self._file = directory / JOURNAL
        with writing(self._file), making_sense(self._file, "expected the record of a sweep, got another", _ELSEWHERE):
            self.study = _open_study(directory, config, higher)
            self._read()

    def _read(self) -> None:
        """Takes in what the file holds; a setting whose drawing a kill cut short is struck off."""
        from optuna.trial import TrialState

        for frozen in self.study.get_trials(deepcopy=False):
            if NUMBER not in frozen.user_attrs:
                if frozen.state == TrialState.RUNNING:
                    self.study.tell(frozen.number, state=TrialState.FAIL)
                elif frozen.state == TrialState.WAITING:  # enqueued, and the next to be asked for
                    self.study.tell(self.study.ask(), state=TrialState.FAIL)
                continue
            trial = self._trial(frozen)
            self._optuna[trial.number] = frozen.number
            self.trials.append(trial)
        if [trial.number for trial in self.trials] != list(range(len(self.trials))):
            raise CheckpointError(f"{self._file}: expected settings numbered without gaps, got others; {_ELSEWHERE}")

    def _trial(self, frozen: FrozenTrial) -> Trial:
        from optuna.trial import TrialState

        attributes = frozen.user_attrs
        names = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
        return Trial(
            number=attributes[NUMBER],
            values={key: parameter.value(frozen.params[key]) for key, parameter in self._keys.items()},
            state=names.get(frozen.state, "running"),  # type: ignore[arg-type]
            runs={seed: attributes[f"seed-{seed}"] for seed in self.config.seeds if f"seed-{seed}" in attributes},
            error=str(attributes.get("error", "")),
            curve=dict(frozen.intermediate_values),
            pruned_at=frozen.last_step or 0 if frozen.state == TrialState.PRUNED else 0,
        )

    @_recorded
    def ask(self) -> Trial | None:
        """The next setting; None where all have been drawn."""
        number = len(self.trials)
        if number >= self.config.settings:
            return None
        self.study.sampler = self._sampler(number)
        if self._grid:
            points = [parameter.points() for parameter in self._keys.values()]
            chosen = next(itertools.islice(itertools.product(*points), number, None))
            self.study.enqueue_trial({key: json.dumps(value) for key, value in zip(self._keys, chosen, strict=True)})
        drawn = self.study.ask({key: p.distribution(grid=self._grid) for key, p in self._keys.items()})
        drawn.set_user_attr(NUMBER, number)
        trial = Trial(number, {key: p.value(drawn.params[key]) for key, p in self._keys.items()})
        self.trials.append(trial)
        self._optuna[number] = drawn.number
        return trial

    def _sampler(self, number: int) -> BaseSampler:
        from optuna import samplers

        # Two numbers to one, so that neighbouring seeds and settings share nothing.
        seed = int(np.random.SeedSequence([self.config.seed, number]).generate_state(1)[0])
        if self.config.method == "tpe":
            return samplers.TPESampler(seed=seed, n_startup_trials=self.config.startup)
        return samplers.RandomSampler(seed=seed)

    @_recorded
    def report(self, trial: Trial, epoch: int, value: float, *, last: bool = False) -> bool:
        """Record the first seed's value after an epoch; True where the setting is hopeless and was pruned.

        After its last epoch there is nothing left to save: it only counts as one that others are compared with.
        """
        from optuna.trial import Trial as Handle
        from optuna.trial import TrialState

        if epoch in trial.curve or trial.state != "running":
            return trial.state == "pruned"
        handle = Handle(self.study, self._id(trial))
        handle.report(value, epoch)
        trial.curve[epoch] = value
        if epoch < self.config.min_epochs or not handle.should_prune() or last:
            return False
        # At once: a decision that is not recorded would not be taken again.
        self.study.tell(self._optuna[trial.number], state=TrialState.PRUNED)
        trial.state, trial.pruned_at = "pruned", epoch
        return True

    @_recorded
    def finish_run(self, trial: Trial, seed: int, result: Mapping[str, Any]) -> None:
        """Record one seed's result; with the last one the setting is complete."""
        from optuna.trial import Trial as Handle

        value = float(result["value"])
        if not math.isfinite(value):
            self.fail(trial, f"seed {seed}: the metric was {value}")
            return
        Handle(self.study, self._id(trial)).set_user_attr(f"seed-{seed}", dict(result))
        trial.runs[seed] = dict(result)
        self.complete(trial)

    @_recorded
    def complete(self, trial: Trial) -> bool:
        """Close a setting whose seeds are all done."""
        if trial.state == "running" and len(trial.runs) == len(self.config.seeds):
            self.study.tell(self._optuna[trial.number], trial.value)
            trial.state = "complete"
        return trial.state == "complete"

    @_recorded
    def fail(self, trial: Trial, error: str) -> None:
        """Record that a setting could not be trained, and why."""
        from optuna.trial import Trial as Handle
        from optuna.trial import TrialState

        if trial.state != "running":
            return
        Handle(self.study, self._id(trial)).set_user_attr("error", error)
        self.study.tell(self._optuna[trial.number], state=TrialState.FAIL)
        trial.state, trial.error = "failed", error

    def _id(self, trial: Trial) -> int:
        return self.study.get_trials(deepcopy=False)[self._optuna[trial.number]]._trial_id

    def best(self) -> Trial | None:
        """The complete setting with the best mean; of equals the first."""
        return next(iter(ranked(self.trials, higher=self.higher)), None)

    def importances(self) -> dict[str, float]:
        """Share of the metric's variance that each key explains (functional ANOVA on a forest of the complete
        settings, Hutter et al. 2014), the largest first; empty where there is nothing to explain it from."""
        done = [trial for trial in self.trials if trial.state == "complete"]
        if len(done) < 2 or len({trial.value for trial in done}) < 2:
            return {}
        if len(self._keys) == 1:
            return dict.fromkeys(self._keys, 1.0)
        from optuna.importance import FanovaImportanceEvaluator, get_param_importances

        found = get_param_importances(self.study, evaluator=FanovaImportanceEvaluator(seed=0))
        return {key: float(share) for key, share in found.items()}


def _open_study(directory: Path, config: SweepConfig, higher: bool) -> Study:
    try:
        import optuna
    except ImportError:
        raise MissingDependencyError("sweeps need the package optuna; run: pip install optuna") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    from optuna.storages.journal import JournalFileBackend

    _mend(directory / JOURNAL)
    return optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(directory / JOURNAL))),
        study_name="sweep",
        direction="maximize" if higher else "minimize",
        pruner=_pruner(config),
        load_if_exists=True,
    )


def _pruner(config: SweepConfig) -> BasePruner:
    from optuna import pruners

    if config.pruner == "halving":
        return pruners.SuccessiveHalvingPruner(min_resource=config.min_epochs, reduction_factor=config.reduction)
    if config.pruner == "median":
        return pruners.MedianPruner(n_startup_trials=config.startup, n_warmup_steps=config.min_epochs - 1)
    return pruners.NopPruner()


def _mend(journal: Path) -> None:
    """Takes away what a kill leaves: half a line, which would spoil the next one, and the lock of the dead.

    What a kill does not leave, a line before the last that is no record, is told and left alone.
    """
    with writing(journal):
        for lock in journal.parent.glob(f"{journal.name}.lock*"):
            lock.unlink(missing_ok=True)
    if not journal.exists():
        return
    whole, torn = 0, ""
    with journal.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if torn:
                raise CheckpointError(
                    f"{journal}:{torn}: expected a record of the sweep, got a damaged line; restore the file from a "
                    "copy, cut it off before that line to lose what came later, or choose another --out"
                )
            if _is_record(line):
                whole += len(line)
            else:
                torn = str(number)
    if torn:
        with writing(journal):
            os.truncate(journal, whole)


def _is_record(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
