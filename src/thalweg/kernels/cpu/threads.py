"""A batch shared out over threads. Kernels release the interpreter lock, so plain Python threads suffice: they are safe
to call from several threads at once, inside data-loading workers and after a fork, where Numba's own layers are not."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
import torch

__all__ = ["parts", "run"]

LEAST_WORK = 2_000_000  # inner operations a thread; with fewer, waking another costs more than it saves

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget() -> None:
    """Threads do not survive a fork; the child makes its own when it needs them."""
    global _pool, _pool_size, _lock
    _pool, _pool_size, _lock = None, 0, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _workers(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < count:
            _pool, _pool_size = ThreadPoolExecutor(count, thread_name_prefix="thalweg"), count
        return _pool


def parts(lengths: np.ndarray, work_per_step: int) -> list[tuple[int, int]]:
    """Ranges of batch items of about equal length in all, one for each thread that pays.

    >>> parts(np.array([1, 1, 1, 1]), 10)
    [(0, 4)]
    """
    count = min(torch.get_num_threads(), len(lengths))
    if count < 2:
        return [(0, len(lengths))]
    total = int(lengths.sum())
    count = min(count, max(1, total * work_per_step // LEAST_WORK))
    if count < 2:
        return [(0, len(lengths))]
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(ends, total * np.arange(1, count) / count).tolist()
    bounds = [0, *(cut + 1 for cut in cuts), len(lengths)]
    return [(low, high) for low, high in pairwise(bounds) if low < high]


def run(kernel: Callable[..., Any], ranges: list[tuple[int, int]], *arguments: Any) -> None:
    """``kernel(*arguments, part, low, high)`` for every range, the first in this thread.

    >>> seen = []
    >>> run(lambda *call: seen.append(call), [(0, 2)], "x")
    >>> seen
    [('x', 0, 0, 2)]
    """
    if len(ranges) == 1:
        kernel(*arguments, 0, *ranges[0])
        return
    pool = _workers(len(ranges) - 1)
    waiting = [pool.submit(kernel, *arguments, part, *ranges[part]) for part in range(1, len(ranges))]
    kernel(*arguments, 0, *ranges[0])
    for task in waiting:
        task.result()
