"""The errors a person can cause, each one clear line: what was expected, what was found, what to do.

Everything here derives from :class:`ThalwegError`; the command line prints such an error as one line and exits
with status 2. Anything else that escapes is a defect of the library and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class ThalwegError(Exception):
    """Base of all errors that a caller can cause and mend."""


class ShapeError(ThalwegError, ValueError):
    """A tensor has the wrong shape, type or range."""


class InfeasibleError(ThalwegError, ValueError):
    """No structure has a finite score: the constraints of the named items contradict one another."""


class DataError(ThalwegError, ValueError):
    """A data file cannot be read as what it should be; the message starts with ``file:line`` where it can."""


class ConfigError(ThalwegError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class CheckpointError(ThalwegError, RuntimeError):
    """A checkpoint is absent, truncated, foreign or from a newer version."""


class WriteError(ThalwegError, OSError):
    """A file cannot be written: the disk is full, the place is wrong or not allowed; ``path`` is that file."""

    def __init__(self, message: str, path: Path | None = None):
        super().__init__(message)
        self.path = path


class NotFittedError(ThalwegError, ValueError, AttributeError):
    """A model is asked before it has parameters: it was neither fitted nor given any."""


class MissingDependencyError(ThalwegError, ImportError):
    """An optional package is not installed; the message carries the pip line that installs it."""


class OutOfMemoryError(ThalwegError, MemoryError):
    """More memory is needed than there is; the message says how much, and which setting to lower."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """A remedy for a mistyped name: the closest choice, or all of them.

    >>> nearest("atention", ["attention", "hidden"])
    'did you mean `attention`?'
    >>> nearest("x", ["attention", "hidden"])
    'choose one of: attention, hidden'
    """
    choices = sorted(choices)
    close = difflib.get_close_matches(str(name)[:100], choices, n=1)
    return f"did you mean `{close[0]}`?" if close else f"choose one of: {', '.join(choices)}"
