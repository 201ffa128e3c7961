"""Progress of long work: a bar with rate and time left on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from thalweg.cli.output import console, duration

# A step can take a millisecond; a bar that is moved more often than this only costs time.
SHORTEST = 0.1

NAMES = {"cer": "CER", "wer": "WER", "bleu": "BLEU", "f1": "F1", "nll": "NLL", "ece": "ECE"}


def metrics_line(metrics: Mapping[str, float], names: Mapping[str, str] | None = None) -> str:
    """Metrics as a person writes them; ``names`` are those that a training calls otherwise.

    >>> metrics_line({"accuracy": 0.5, "cer": 0.25, "bleu": 40.123}, {"cer": "PER"})
    'accuracy 0.5000  PER 0.2500  BLEU 40.12'
    """
    names = {**NAMES, **(names or {})}
    return "  ".join(
        f"{names.get(key, key)} {value:.2f}" if key == "bleu" else f"{names.get(key, key)} {value:.4f}"
        for key, value in metrics.items()
    )


class _Rate(ProgressColumn):
    """Pairs or words a second, and the time that the bar still needs."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("")
        left = task.time_remaining
        rate = task.speed * task.fields["each"]
        ending = f", {duration(left)} left" if left is not None else ""
        return Text(f"{rate:,.0f} {task.fields['unit']}/s{ending}")


class Display:
    """Shows the events of training and evaluation on standard error; use it as a context and as the listener.

    Attributes:
        interrupted: whether Ctrl-C ended a run.
        names: of metrics that the training calls otherwise.

    >>> with Display() as display:
    ...     display({"event": "interrupted", "epoch": 1, "step": 7})
    >>> display.interrupted
    True
    """

    def __init__(self) -> None:
        self.interrupted, self.names = False, dict[str, str]()
        self._console = console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._shown = ("", 0)
        self._moved = 0.0
        self._epochs = self._items = 0
        self._unit = "items"
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                _Rate(),
                console=self._console,
                transient=True,
                refresh_per_second=5,
            )

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event; kinds that are not known are passed over unless they carry a ``message``."""
        match event["event"]:
            case "start":
                self._start(event)
            case "step":
                each = self._items / event["batches"] if self._items else 1.0
                label = f"epoch {event['epoch']}/{self._epochs or '?'}"
                self._move(label, event["batch"], event["batches"], each=each, unit=self._unit)
            case "epoch":
                self._epoch(event)
            case "predicted":
                self._move("predicting", event["done"], event["of"], each=1.0, unit=event.get("unit", "words"))
            case "decoded":
                self._move("decoding", event["done"], event["of"], each=1.0, unit="images")
            case "passed":
                self._move("learning", event["done"], event["of"], each=1.0, unit="passes")
            case "interrupted":
                self.interrupted = True
            case _:
                if "message" in event:
                    self._line(str(event["message"]))

    def _start(self, event: dict[str, Any]) -> None:
        self._epochs, self._items = event.get("epochs", 0), event.get("items", 0)
        self._unit, self.names = event.get("unit", "items"), event.get("names", {})
        for line in event.get("lines", ()):
            self._line(line)
        resumed = ", resumed" if event.get("resumed") else ""
        frozen = f" + {event['frozen']:,} frozen" if "frozen" in event else ""
        self._line(f"model   {event['parameters']:,}{frozen} parameters on {event['device']}{resumed}")

    def _epoch(self, event: dict[str, Any]) -> None:
        epoch = event["epoch"]
        parts = [
            f"epoch {epoch:>{len(str(self._epochs))}}/{self._epochs or '?'}",
            f"loss {event['loss']:.4f}",
        ]
        if event["dev"]:
            parts.append("dev " + metrics_line(event["dev"], self.names))
        if f"{self._unit}_per_second" in event:
            parts.append(f"{event[f'{self._unit}_per_second']:,.0f} {self._unit}/s")
        if event.get("memory"):
            parts.append(f"{event['memory'] / 2**30:.1f} GiB")
        parts.append(f"{duration(event['seconds'])} so far")
        if self._epochs > epoch:
            parts.append(f"{duration(event['seconds'] / epoch * (self._epochs - epoch))} left")
        if event["best"]:
            parts.append("best")
        self._line("  ".join(parts), style="bold" if event["best"] else "")

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _move(self, label: str, done: int, total: int, *, each: float, unit: str) -> None:
        if self._bar is None:
            return
        now = time.monotonic()
        self._bar.start()  # not before there is something to show, nor twice
        if self._shown != (label, total) or self._task is None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            # A resumed epoch starts in its middle: what was done before says nothing about the rate.
            self._task = self._bar.add_task(label, total=total, completed=done - 1, each=each, unit=unit)
            self._shown = (label, total)
        elif now - self._moved < SHORTEST and done < total:
            return
        self._moved = now
        self._bar.update(self._task, completed=done)
