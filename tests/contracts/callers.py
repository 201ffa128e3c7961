"""Several threads that ask for the same things."""

from __future__ import annotations

import threading
from collections.abc import Callable


def found_by_threads(ask: Callable[[int], float], callers: int = 4, times: int = 10) -> dict[int, list[float]]:
    """What each of so many threads is given, asking so many times for its own number."""
    found: dict[int, list[float]] = {}

    def work(number: int) -> None:
        found[number] = [ask(number) for _ in range(times)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
