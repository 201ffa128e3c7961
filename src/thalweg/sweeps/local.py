"""Workers of a sweep as processes on this machine; they end with it, however it ends."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from thalweg.errors import ConfigError
from thalweg.files import writing
from thalweg.processes import Worker
from thalweg.sweeps.work import Handle

FINAL = ("end", "stopped", "failed", "interrupted")
# Seconds that runs have to write a checkpoint after they are asked to stop.
PATIENCE = 60.0


def worker_places(workers: int, share: float, devices: list[str]) -> list[str]:
    """The GPU of each worker, "" without: as many workers on one as the share of each allows.

    Args:
        workers: how many; 0 means as many as fit, one where there is no GPU.
        share: of a GPU that one run gets; 0 spreads the workers over all of them, however many there are.
        devices: the GPUs.

    >>> worker_places(3, 0.5, ["0", "1"]), worker_places(0, 0.25, ["0"]), worker_places(2, 0.0, [])
    (['0', '0', '1'], ['0', '0', '0', '0'], ['', ''])
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"--gpus-per-trial must be in [0, 1], got {share:g}: a run uses one GPU at most")
    if share and not devices:
        raise ConfigError(f"--gpus-per-trial {share:g}: torch finds no GPU here; leave it out to train on the CPU")
    if not share:
        count = workers or max(1, len(devices))
        return [devices[place % len(devices)] if devices else "" for place in range(count)]
    each = int(1 / share + 1e-9)
    places = [device for device in devices for _ in range(each)]
    if workers > len(places):
        raise ConfigError(
            f"--workers {workers}: {len(devices)} GPUs hold {len(places)} runs of {share:g} each; "
            "use fewer workers or a smaller --gpus-per-trial"
        )
    return places[: workers or len(places)]


def _visible() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(place) for place in range(count)]


class _Runner(Worker):
    """One process, the job it does, and a thread that reads what it says."""

    def __init__(self, name: str, place: str, threads: int, log: Path, events: queue.SimpleQueue[Any]):
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        # All workers together use the machine's cores once; more threads only wait for one another.
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        if place:
            environment["CUDA_VISIBLE_DEVICES"] = place
        with writing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            errors = log.open("ab")
        with errors:
            # Ctrl-C on the terminal is for the sweep, which asks its runs to stop.
            arguments = ["-m", "thalweg.sweeps.worker", name]
            super().__init__(arguments, errors=errors, environment=environment, apart=True)
        self.key = ""
        self._reader = threading.Thread(target=self._read, args=(events,), daemon=True)
        self._reader.start()

    def _read(self, events: queue.SimpleQueue[Any]) -> None:
        while (event := self.hear()) is not None:
            events.put((self, event))
        events.put((self, None))

    def end(self) -> None:
        """Kill it with all that it has begun."""
        self.kill()
        self._reader.join()
        super().end()


class LocalEngine:
    """Runs in processes of their own on this machine, each kept for run after run.

    Args:
        work: ``module:function``, see :func:`~thalweg.sweeps.work.find_work`.
        directory: where the logs of the workers go.
        workers, share: see :func:`worker_places`.

    >>> import tempfile
    >>> engine = LocalEngine("json:dumps", Path(tempfile.mkdtemp()), workers=2)
    >>> engine.free
    2
    >>> engine.close()
    """

    def __init__(self, work: str, directory: Path, *, workers: int = 1, share: float = 0.0):
        self.name, self.directory = work, directory
        self.places = worker_places(workers, share, _visible())
        self.workers = len(self.places)
        self.threads = max(1, (os.cpu_count() or 1) // self.workers)
        self._events: queue.SimpleQueue[tuple[_Runner, dict[str, Any] | None]] = queue.SimpleQueue()
        self._staff: list[_Runner | None] = [None] * self.workers

    @property
    def free(self) -> int:
        """Workers without a run."""
        return sum(worker is None or not worker.key for worker in self._staff)

    def submit(self, key: str, job: dict[str, Any]) -> None:
        """Give a run to a free worker, one that is already there before a new one."""
        ready = [place for place, worker in enumerate(self._staff) if worker is not None and not worker.key]
        place = ready[0] if ready else self._staff.index(None)
        worker = self._staff[place]
        if worker is None:
            log = self.directory / f"worker-{place}.log"
            worker = self._staff[place] = _Runner(self.name, self.places[place], self.threads, log, self._events)
        worker.key = key
        worker.tell({"job": job})

    def step(self, handle: Handle, timeout: float) -> None:
        """Pass on the events that have come."""
        try:
            worker, event = self._events.get(timeout=timeout)
            while True:
                self._pass_on(worker, event, handle)
                worker, event = self._events.get_nowait()
        except queue.Empty:
            return

    def _pass_on(self, worker: _Runner, event: dict[str, Any] | None, handle: Handle) -> None:
        if worker not in self._staff:
            return  # it was let go
        key = worker.key
        if event is None:
            self._let_go(worker)
            if key:
                handle(key, {"event": "lost", "error": _end_of(worker.process.returncode)})
        elif event["event"] in FINAL:
            worker.key = ""
            if event["event"] == "failed" and not event.get("known"):
                self._let_go(worker)  # a GPU that has failed once may fail all that comes after
            handle(key, event)
        else:
            worker.tell({"go": handle(key, event)})

    def _let_go(self, worker: _Runner) -> None:
        worker.end()
        self._staff[self._staff.index(worker)] = None

    def stop(self, handle: Handle) -> None:
        """SIGTERM to all: a run that trains ends after its step with a checkpoint, one that does not ends at once."""
        for worker in self._staff:
            if worker is not None and worker.key:
                worker.process.terminate()
        until = time.monotonic() + PATIENCE
        while self.free < self.workers and time.monotonic() < until:
            self.step(handle, 0.1)

    def close(self) -> None:
        """End all workers."""
        for worker in self._staff:
            if worker is not None:
                worker.end()
        self._staff = [None] * self.workers


def _end_of(status: int | None) -> str:
    if status is not None and status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        more = ", perhaps for want of memory" if -status == signal.SIGKILL else ""
        return f"the process of the run was ended by {name}{more}"
    return f"the process of the run ended with status {status}; see the worker's log"
