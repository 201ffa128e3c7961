"""Python processes that work for this one, told and heard by lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class Worker:
    """One process: a line of JSON goes in, lines of JSON come back.

    Args:
        arguments: of the interpreter: ``-m MODULE``, or a file.
        errors: a file for what it says on standard error, nothing by default.
        environment: its own; this process's by default.
        apart: in a session of its own: Ctrl-C on the terminal does not reach it, and all that it begins ends with it.

    >>> worker = Worker(["-c", "print(2 * int(input()))"])
    >>> worker.tell(21)
    >>> worker.hear(), worker.hear()
    (42, None)
    >>> worker.end()
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        errors: Any = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
        apart: bool = False,
    ):
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            encoding="utf-8",
            start_new_session=apart,
        )
        self._apart = apart

    def tell(self, message: Any) -> None:
        """Send a line; one that is gone does not hear it, and :meth:`hear` says so."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def hear(self) -> Any:
        """The next line that comes back, waited for; None where it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        """End it at once, and wait until it is gone; what it has said can still be heard."""
        if self._apart and hasattr(os, "killpg"):
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Kill it and close the pipes."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
