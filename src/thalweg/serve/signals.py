"""What a running service does on SIGHUP (load the models anew) and on SIGTERM or SIGINT (end its streams)."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from thalweg.serve.library import Library


class Ending:
    """Tells streams that would go on for ever that the service ends.

    >>> ending = Ending()
    >>> ending.come()
    >>> ending.has_come
    True
    """

    def __init__(self) -> None:
        self.has_come = False

    def come(self) -> None:
        """It ends now."""
        self.has_come = True


@contextmanager
def listening(ending: Ending, library: Library) -> Iterator[None]:
    """Inside, signals are heard; where this is not the main thread, there are none to hear."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, begun = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def hang_up() -> None:
        task = loop.create_task(asyncio.to_thread(library.reload))
        begun.add(task)
        task.add_done_callback(begun.discard)

    before = {}
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, hang_up)
    for number in (signal.SIGTERM, signal.SIGINT):
        # The server's own handler waits until all has been answered, which streams that never end would not let it.
        then = before[number] = signal.getsignal(number)

        def end(sent: int, frame: object, then: object = then) -> None:
            ending.come()
            if callable(then):
                then(sent, frame)

        signal.signal(number, end)
    try:
        yield
    finally:
        if hasattr(signal, "SIGHUP"):
            loop.remove_signal_handler(signal.SIGHUP)
        for number, handler in before.items():
            signal.signal(number, handler)
