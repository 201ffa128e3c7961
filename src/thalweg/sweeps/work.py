"""One run of a sweep, wherever it is done: in this process, in one of its own, or on a cluster."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from thalweg.errors import ConfigError, ThalwegError, WriteError

# What a run tells while it goes on; the answer is whether it should.
Tell = Callable[[dict[str, Any]], bool]
# A job, as plain values, is done: tells what happens, returns the last event (`end`, or `interrupted`).
Work = Callable[[dict[str, Any], Tell], dict[str, Any]]
# What a sweep does with an event of the run that the key names; the answer is whether the run goes on.
Handle = Callable[[str, dict[str, Any]], bool]


class StopRun(Exception):  # noqa: N818 - it is no error
    """Raised inside a run that is told to stop.

    >>> issubclass(StopRun, Exception)
    True
    """


class Engine(Protocol):
    """Where runs are done. Events of a run reach ``handle`` one by one, the last being ``end``, ``stopped``,
    ``failed`` (with ``error`` and ``trace``, and with ``unwritten`` where a file could not be written),
    ``interrupted`` or ``lost`` (the process is gone, with ``error``)."""

    workers: int

    @property
    def free(self) -> int:
        """How many runs may be begun now."""
        ...

    def submit(self, key: str, job: dict[str, Any]) -> None:
        """Begin a run."""
        ...

    def step(self, handle: Handle, timeout: float) -> None:
        """Pass on events, waiting for the first no longer than ``timeout`` seconds."""
        ...

    def stop(self, handle: Handle) -> None:
        """Ask all runs to leave a checkpoint and end; returns when they have."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...


def find_work(name: str) -> Work:
    """The function that ``module:function`` names, so that a process can be told what to do in words.

    >>> find_work("json:dumps")([1])
    '[1]'
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"expected the work of a sweep as `module:function`, got `{name}` ({error})") from None


def perform(work: Work, job: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Do a job; whatever goes wrong becomes an event, so that one run never ends a sweep.

    >>> perform(lambda job, tell: {"event": "end", "value": job["x"]}, {"x": 1.0}, lambda event: True)
    {'event': 'end', 'value': 1.0}
    >>> failed = perform(lambda job, tell: {}[job["x"]], {"x": 1.0}, lambda event: True)
    >>> failed["event"], failed["error"]
    ('failed', 'KeyError: 1.0')
    """
    try:
        return work(job, tell)
    except StopRun:
        return {"event": "stopped"}
    except KeyboardInterrupt:
        return {"event": "interrupted"}
    except Exception as error:
        said = " ".join(str(error).split())
        known = isinstance(error, ThalwegError)
        line = said if known and said else f"{type(error).__name__}: {said}" if said else type(error).__name__
        failed = {"event": "failed", "error": line, "trace": traceback.format_exc(), "known": known}
        # Not the setting's fault: what cannot be written now can be when there is room again.
        return failed | ({"unwritten": str(error.path)} if isinstance(error, WriteError) else {})


class InlineEngine:
    """Runs one after the other in this very process: no parallel work, and a debugger sees everything.

    >>> engine = InlineEngine(lambda job, tell: {"event": "end", "go": tell({"event": "epoch"})})
    >>> engine.submit("a", {})
    >>> engine.step(lambda key, event: print(key, event) or True, 0.0)
    a {'event': 'epoch'}
    a {'event': 'end', 'go': True}
    """

    workers = 0

    def __init__(self, work: Work):
        self.work = work
        self._waiting: list[tuple[str, dict[str, Any]]] = []

    @property
    def free(self) -> int:
        """One run at a time."""
        return 1 - len(self._waiting)

    def submit(self, key: str, job: dict[str, Any]) -> None:
        """Keep a job for the next step."""
        self._waiting.append((key, job))

    def step(self, handle: Handle, timeout: float) -> None:
        """Do the job that waits, to its end."""
        if self._waiting:
            key, job = self._waiting.pop()
            handle(key, perform(self.work, job, lambda event: handle(key, event)))

    def stop(self, handle: Handle) -> None:
        """Nothing goes on between two steps."""
        self._waiting.clear()

    def close(self) -> None:
        """Nothing to end."""
