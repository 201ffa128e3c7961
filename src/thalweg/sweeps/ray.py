"""Runs of a sweep as tasks of a Ray cluster, of any size; the sweep itself stays in this process."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from thalweg.errors import ConfigError, MissingDependencyError
from thalweg.sweeps.work import Handle, find_work, perform

# Seconds that runs have to write a checkpoint after they are asked to stop.
PATIENCE = 60.0


class _Mailbox:
    """An actor: runs leave events here and wait for the answer; the sweep takes the events and answers."""

    def __init__(self) -> None:
        import asyncio

        self._events: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._answers: dict[str, asyncio.Future[bool]] = {}

    async def tell(self, key: str, event: dict[str, Any]) -> bool:
        """Of a run: leave an event and wait for the answer."""
        import asyncio

        self._answers[key] = asyncio.get_running_loop().create_future()
        await self._events.put((key, event))
        return await self._answers[key]

    async def take(self, timeout: float) -> list[tuple[str, dict[str, Any]]]:
        """Of the sweep: what has come, waiting for the first a while."""
        import asyncio

        try:
            found = [await asyncio.wait_for(self._events.get(), timeout)]
        except TimeoutError:
            return []
        while not self._events.empty():
            found.append(self._events.get_nowait())
        return found

    async def answer(self, key: str, go_on: bool) -> None:
        """Of the sweep: whether the run goes on."""
        waiting = self._answers.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(go_on)


def _task(name: str, key: str, job: dict[str, Any], mailbox: Any) -> dict[str, Any]:
    """What a task of the cluster does."""
    import ray

    return perform(find_work(name), job, lambda event: ray.get(mailbox.tell.remote(key, event)))


class RayEngine:
    """Runs as Ray tasks: on the cluster that ``RAY_ADDRESS`` names or this machine is part of, else on a local one.

    The run directories must be on a disk that all machines share, and the package installed on each.

    Args:
        work: ``module:function``, see :func:`~thalweg.sweeps.work.find_work`.
        workers: runs at a time; 0 means as many as the cluster has room for.
        share: of a GPU that one run gets; 0 trains on CPUs where a task sees no GPU.
        cpus: cores of one run.
    """

    def __init__(self, work: str, *, workers: int = 0, share: float = 0.0, cpus: float = 1.0):
        if not 0 <= share <= 1:
            raise ConfigError(f"--gpus-per-trial must be in [0, 1], got {share:g}: a run uses one GPU at most")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A task without a GPU share sees no GPU, today and in versions to come.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        try:
            import ray
        except ImportError:
            raise MissingDependencyError("--engine ray needs the package ray; run: pip install ray") from None
        self._own = not ray.is_initialized()
        if self._own:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        room = ray.cluster_resources()
        places = int(room.get("CPU", 0) / cpus + 1e-9)
        if share:
            places = min(places, int(room.get("GPU", 0)) * int(1 / share + 1e-9))
        if not places:
            self.close()
            raise ConfigError(
                f"the Ray cluster has {room.get('CPU', 0):g} CPUs and {room.get('GPU', 0):g} GPUs, a run needs "
                f"{cpus:g} and {share:g}; use a smaller --gpus-per-trial or another cluster"
            )
        self.name, self.workers = work, min(workers or places, places)
        self._begin = ray.remote(num_cpus=cpus, num_gpus=share, max_retries=0)(_task)
        self._mailbox: Any = ray.remote(num_cpus=0)(_Mailbox).remote()
        self._tasks: dict[Any, str] = {}

    @property
    def free(self) -> int:
        """Runs that may be begun."""
        return self.workers - len(self._tasks)

    def submit(self, key: str, job: dict[str, Any]) -> None:
        """Hand a run to the cluster."""
        self._tasks[self._begin.remote(self.name, key, job, self._mailbox)] = key

    def step(self, handle: Handle, timeout: float) -> None:
        """Pass on events, then the ends of runs."""
        import ray
        from ray.exceptions import RayError, TaskCancelledError

        for key, event in ray.get(self._mailbox.take.remote(timeout)):
            self._mailbox.answer.remote(key, handle(key, event))
        done, _ = ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0) if self._tasks else ([], [])
        for task in done:
            key = self._tasks.pop(task)
            try:
                event = ray.get(task)
            except TaskCancelledError:
                event = {"event": "interrupted"}
            except RayError as error:
                event = {"event": "lost", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            handle(key, event)

    def stop(self, handle: Handle) -> None:
        """Ray interrupts the tasks as Ctrl-C would: a run that trains ends after its step with a checkpoint."""
        import ray

        for task in self._tasks:
            ray.cancel(task, force=False)
        until = time.monotonic() + PATIENCE
        while self._tasks and time.monotonic() < until:
            self.step(handle, 0.1)

    def close(self) -> None:
        """Leave the cluster; one that was begun here ends."""
        import ray

        if self._own:
            ray.shutdown()
        elif hasattr(self, "_mailbox"):
            ray.kill(self._mailbox)
