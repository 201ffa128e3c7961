"""Work that a sweep can hand out in tests: no training, only its events."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thalweg.errors import ConfigError


def curve(x: float, epochs: int) -> list[float]:
    """Rises towards `x`."""
    return [x * epoch / epochs for epoch in range(1, epochs + 1)]


def work(job: dict[str, Any], tell: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    from thalweg.sweeps.work import StopRun

    match job.get("fate"):
        case "mistake":
            raise ConfigError("no such\n setting")
        case "defect":
            return {}["absent"]
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "killed once" if not Path(job["mark"]).exists():
            Path(job["mark"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case "slow":
            stopped: list[int] = []
            signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
            while not stopped:
                time.sleep(0.01)
            Path(job["mark"]).touch()
            return {"event": "interrupted"}
        case _:
            pass
    values = curve(job["x"], job.get("epochs", 1))
    for epoch, value in enumerate(values, 1):
        if not tell({"event": "epoch", "epoch": epoch, "epochs": len(values), "value": value}):
            raise StopRun
    return {"event": "end", "value": values[-1] + job.get("seed", 0), "pid": os.getpid()}
