"""Trainings as they go: what a run's log says, from its start and as it grows."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thalweg.serve.library import Shelf
    from thalweg.serve.signals import Ending

_PAUSE = 0.5  # seconds between looks at the log
_QUIET = 15.0  # seconds after which a silent stream says that it is alive
_AT_ONCE = 1 << 20  # bytes of a log that are read at a time


class LogReader:
    """Entries of a ``log.jsonl`` as they are written; half a line waits until it is whole.

    >>> path = Path("log.jsonl")
    >>> _ = path.write_text('{"event": "start"}\\n{"event": "ep')
    >>> reader = LogReader(path)
    >>> reader.read(), reader.read()
    ([{'event': 'start'}], [])
    """

    def __init__(self, path: Path):
        self.path, self._place, self._file, self._half = path, 0, None, b""

    def read(self) -> list[dict[str, Any]]:
        """The entries since the last time; ``{"event": "restart"}`` first where the log was begun anew."""
        found: list[dict[str, Any]] = []
        try:
            with open(self.path, "rb") as file:
                facts = os.fstat(file.fileno())
                if (self._file is not None and facts.st_ino != self._file) or facts.st_size < self._place:
                    self._place, self._half = 0, b""
                    found.append({"event": "restart"})
                self._file = facts.st_ino
                file.seek(self._place)
                data = file.read(_AT_ONCE)
        except OSError:
            return found
        self._place += len(data)
        *lines, self._half = (self._half + data).split(b"\n")
        for line in lines:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a kill can leave half a line
            if isinstance(entry, dict) and isinstance(entry.get("event"), str):
                found.append(_placeless(entry))
        return found


def _placeless(value: Any) -> Any:
    """The same without folders: of the paths in it, and where they are quoted beside, the last part alone."""
    if isinstance(value, list):
        return [_placeless(each) for each in value]
    if not isinstance(value, dict):
        return value
    path = value.get("path")
    if not isinstance(path, str) or "/" not in path:
        return {key: _placeless(each) for key, each in value.items()}
    name = path.rpartition("/")[2]
    return {key: each.replace(path, name) if isinstance(each, str) else _placeless(each) for key, each in value.items()}


def state_of(shelf: Shelf) -> dict[str, Any]:
    """How far a run has come.

    >>> from types import SimpleNamespace
    >>> state_of(SimpleNamespace(name="x", shown="x", folder=Path("absent"), servant=None))["state"]
    'waiting'
    """
    assert shelf.folder is not None
    reader, entries = LogReader(shelf.folder / "log.jsonl"), []
    while more := reader.read():
        entries += more
    last = entries[-1]["event"] if entries else ""
    epochs = [entry for entry in entries if entry["event"] == "epoch"]
    start = next((entry for entry in reversed(entries) if entry["event"] == "start"), {})
    return {
        "name": shelf.name,
        "run": shelf.shown,
        "state": {"": "waiting", "end": "finished", "interrupted": "interrupted"}.get(last, "training"),
        "model": shelf.servant is not None,
        "epoch": epochs[-1].get("epoch", 0) if epochs else 0,
        "epochs": start.get("epochs", 0),
    }


async def followed(shelf: Shelf, ending: Ending, event: Callable[[str, Any], bytes]) -> AsyncIterator[bytes]:
    """The log as events, each named by its entry; ``done`` once the training has ended."""
    assert shelf.folder is not None
    reader, silent = LogReader(shelf.folder / "log.jsonl"), 0.0
    yield event("run", {"name": shelf.name})
    while not ending.has_come:
        entries = await asyncio.to_thread(reader.read)
        for entry in entries:
            yield event(entry["event"] if entry["event"].isidentifier() else "entry", entry)
        if entries:
            silent = 0.0
            if entries[-1]["event"] == "end":
                yield event("done", {"name": shelf.name})
                return
            continue
        await asyncio.sleep(_PAUSE)
        silent += _PAUSE
        if silent >= _QUIET:
            yield b": still here\n\n"
            silent = 0.0
