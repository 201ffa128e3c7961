"""What every task's training gives and logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.errors import ConfigError
from thalweg.learning.checkpoint import Checkpoint, load_checkpoint, write_atomically
from thalweg.tasks.resuming import check_continues

__all__ = ["Listener", "RunLog", "TrainResult", "goes_on"]

# Called with every event of a training.
Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainResult:
    """What training gave: where the run is, why it ended ("" when interrupted), the best epoch and its metrics.

    >>> TrainResult(Path("runs/names"), "epochs", 12, {"wer": 0.2}, 90.0).best_epoch
    12
    """

    run: Path
    reason: str
    best_epoch: int
    best: dict[str, float]
    seconds: float


def goes_on(out: Path, resume: bool) -> bool:
    """Whether there is something to resume in ``out``; a run that is there and not to be resumed is an error.

    A kill before the first checkpoint leaves nothing to go on from: the same start is the same run.

    >>> goes_on(Path("absent"), resume=True)
    False
    """
    there = (out / "last.safetensors").exists()
    if there and not resume:
        raise ConfigError(f"{out} holds a run already; resume it with --resume or choose another --out")
    return there


class RunLog:
    """Appends events to ``log.jsonl`` and passes them on; ``step`` events are only passed on.

    Args:
        path: the log.
        listener: gets every event.
        unit: what the training data are counted in; ``items``: how many there are, once that is known.

    >>> RunLog(Path("runs/x/log.jsonl"), None).items
    0
    """

    def __init__(self, path: Path, listener: Listener | None, unit: str = "pairs"):
        self.path, self.listener, self.unit, self.items = path, listener, unit, 0

    def __call__(self, event: dict[str, Any]) -> None:
        """Log one event."""
        if event["event"] == "epoch" and self.items:
            event[f"{self.unit}_per_second"] = self.items / max(event["train_seconds"], 1e-9)
        if event["event"] != "step":
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event, ensure_ascii=False) + "\n")
        if self.listener:
            self.listener(event)

    def open(self, config: str, meta: dict[str, Any], *, resume: bool) -> None:
        """Begin anew, or go on from the last checkpoint, which must be of such a training; the config is written."""
        out = self.path.parent
        if resume:
            last = load_checkpoint(out / "last.safetensors")
            check_continues(out / "last.safetensors", last.meta, meta)
            self._cut(last)
        else:
            self.path.unlink(missing_ok=True)
        for stray in out.glob(".*.tmp"):
            stray.unlink()  # a kill in the middle of a write leaves one
        write_atomically(out / "config.yaml", config.encode())

    def _cut(self, last: Checkpoint) -> None:
        """Drop what was logged after the checkpoint: those epochs are run again."""
        epoch, step = (int(last.meta["progress"][key]) for key in ("epoch", "step"))
        kept = []
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a kill can leave half a line
            later = event.get("event") == "epoch" and event["epoch"] > epoch
            later = later or (event.get("event") == "gradients" and event["step"] >= step)
            if event.get("event") not in ("end", "interrupted") and not later:
                kept.append(line)
        write_atomically(self.path, "".join(f"{line}\n" for line in kept).encode())
