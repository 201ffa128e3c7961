"""Ctrl-C as a request: what runs ends where it can be taken up again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(stop: threading.Event) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM set ``stop``; a second one raises ``KeyboardInterrupt`` at once.

    Signals reach the main thread alone: in another thread nothing changes.

    >>> stop = threading.Event()
    >>> with interruptible(stop):
    ...     signal.raise_signal(signal.SIGINT)
    >>> stop.is_set()
    True
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(signum: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
