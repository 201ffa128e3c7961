"""The sweep itself: draws settings, hands out their runs, and takes in what comes back.

One process decides and records; engines (:mod:`~thalweg.sweeps.local`,
:mod:`~thalweg.sweeps.ray`) only train. So the record has one writer, and a kill of anything else loses nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thalweg.errors import ThalwegError, WriteError
from thalweg.learning.interrupts import interruptible
from thalweg.sweeps.store import Store, Trial
from thalweg.sweeps.work import Engine

# Seconds between two looks at the clock and at Ctrl-C while nothing happens.
PULSE = 0.2


def run_key(trial: Trial, seed: int) -> str:
    """The name of a run, which is also its folder's.

    >>> run_key(Trial(7, {}), 1)
    '007/seed-1'
    """
    return f"{trial.number:03}/seed-{seed}"


class Sweep:
    """Trains settings until all are done.

    With pruning, the first seed of a setting goes ahead: only where it comes through do the others follow. Without, all
    seeds of a setting are begun together. A setting fails as a whole when one of its seeds does; a file that cannot be
    written ends the sweep instead, which can be gone on with.

    Args:
        store: draws and records.
        engine: trains.
        make_job: the job of a setting and a seed; may refuse it by a :class:`ThalwegError`, which fails the setting.
        listener: called with events: ``trial`` (begun or changed, with ``trial``), ``run`` (``trial``, ``seed`` and the
            run's own event under ``of``).

    >>> import tempfile
    >>> from pathlib import Path
    >>> from thalweg.sweeps.settings import SweepConfig
    >>> from thalweg.sweeps.work import InlineEngine
    >>> store = Store(Path(tempfile.mkdtemp()), SweepConfig(space={"x": [1, 3, 2]}, method="grid"), higher=True)
    >>> engine = InlineEngine(lambda job, tell: {"event": "end", "value": job["x"]})
    >>> Sweep(store, engine, lambda trial, seed: trial.values).run()
    'finished'
    >>> store.best().values
    {'x': 3}
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        make_job: Callable[[Trial, int], dict[str, Any]],
        listener: Callable[[dict[str, Any]], None] | None = None,
    ):
        self.store, self.engine, self.make_job = store, engine, make_job
        self.listener = listener or (lambda event: None)
        self._queue: deque[tuple[Trial, int]] = deque()
        self._active: dict[str, tuple[Trial, int]] = {}
        self._lost: dict[str, int] = {}
        self._stop = threading.Event()

    def run(self) -> str:
        """Train to the end; ``finished``, ``interrupted`` (Ctrl-C or SIGTERM) or ``hours`` (the time was up)."""
        hours = self.store.config.hours
        until = time.monotonic() + 3600 * hours if hours else float("inf")
        for trial in self.store.trials:
            if trial.state == "running" and not self.store.complete(trial):
                self._schedule(trial)
        try:
            with interruptible(self._stop):
                while not self._stop.is_set():
                    self._fill(time.monotonic() < until)
                    if not self._active:
                        break
                    self.engine.step(self._handle, PULSE)
                if self._stop.is_set():
                    self.engine.stop(self._handle)
                    return "interrupted"
        finally:
            self.engine.close()
        return "finished" if len(self.store.trials) >= self.store.config.settings else "hours"

    def _schedule(self, trial: Trial) -> None:
        """Queue the seeds of a setting that are still to be trained."""
        queued = {seed for other, seed in (*self._queue, *self._active.values()) if other is trial}
        left = [seed for seed in self.store.config.seeds if seed not in trial.runs and seed not in queued]
        scout = self.store.config.seeds[0]
        alone = self.store.config.pruner != "none" and scout in left
        self._queue.extend((trial, seed) for seed in ([scout] if alone else left))

    def _fill(self, more: bool) -> None:
        while self.engine.free > 0:
            if not self._queue:
                trial = self.store.ask() if more else None
                if trial is None:
                    return
                self.listener({"event": "trial", "trial": trial})
                self._schedule(trial)
            trial, seed = self._queue.popleft()
            if trial.state != "running":
                continue
            try:
                job = self.make_job(trial, seed)
            except ThalwegError as error:
                self.store.fail(trial, " ".join(str(error).split()))
                self.listener({"event": "trial", "trial": trial})
                continue
            key = run_key(trial, seed)
            self._active[key] = (trial, seed)
            self.engine.submit(key, job)

    def _handle(self, key: str, event: dict[str, Any]) -> bool:
        """Take in an event of a run; whether the run goes on."""
        if key not in self._active:
            return False  # the last words of a run that was lost
        trial, seed = self._active[key]
        before = trial.state
        match event["event"]:
            case "epoch":
                if seed == self.store.config.seeds[0]:
                    last = 0 < event.get("epochs", 0) <= event["epoch"]
                    self.store.report(trial, event["epoch"], event["value"], last=last)
            case "end":
                del self._active[key]
                if trial.state == "running":
                    self.store.finish_run(trial, seed, {k: v for k, v in event.items() if k != "event"})
                    self._schedule(trial)
            case "failed" if "unwritten" in event:
                raise WriteError(event["error"], Path(event["unwritten"]))  # all others would fail of it too
            case "failed":
                del self._active[key]
                self.store.fail(trial, f"seed {seed}: {event['error']}")
            case "stopped":
                del self._active[key]
            case "lost" | "interrupted":
                del self._active[key]
                self._again(key, trial, seed, event)
        self.listener({"event": "run", "trial": trial, "seed": seed, "of": event})
        if trial.state != before:
            self.listener({"event": "trial", "trial": trial})
        return trial.state == "running"

    def _again(self, key: str, trial: Trial, seed: int, event: dict[str, Any]) -> None:
        """A run that did not end by itself is gone on with, but not for ever."""
        if not self.engine.workers and event["event"] == "interrupted":
            self._stop.set()  # the run was in this process: Ctrl-C was meant for the sweep
        if self._stop.is_set() or trial.state != "running":
            return
        self._lost[key] = self._lost.get(key, 0) + 1
        if self._lost[key] > self.store.config.retries:
            self.store.fail(trial, f"seed {seed}: {event.get('error', 'the run was interrupted')}")
        else:
            self._queue.appendleft((trial, seed))
