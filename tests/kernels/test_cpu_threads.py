"""Work shared out over threads: all of it is done once, by whoever comes, and nothing is left behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from numba import cfunc, types
from numba.np.numpy_support import carray

from thalweg.kernels.cpu import threads

PARTS = 64


@cfunc(types.void(types.voidptr))
def _count(table: Any) -> None:
    """Some work and one visit; the table is private to a test, and its counter is not exact among threads."""
    numbers = carray(table, (2,), np.int64)
    total = 0
    for k in range(30_000):
        total = (total * 7 + k) % 1_000_003
    numbers[0] += 1
    numbers[1] = total


def _entry() -> threads.Entry:
    address: Any = _count.address
    return threads.Entry(address, _count)


def _table() -> ctypes.Array:
    return (ctypes.c_int64 * 2)()


def _visits(count: int, calls: int = 200) -> int:
    entry, most = _entry(), 0
    for _ in range(calls):
        table = _table()
        threads.enter(entry, table, count)
        most = max(most, table[0])
    return most


def test_helpers_come() -> None:
    assert _visits(1) == 1
    # One call in many is enough: on a busy machine most are over before a helper comes.
    assert any(_visits(2) == 2 for _ in range(50))


def test_a_helper_that_sleeps_is_woken() -> None:
    for _ in range(100):
        _visits(2, calls=1)
        time.sleep(0.005)
        if threads._helpers.box[32] == 1 and any(_visits(2, calls=1) == 2 for _ in range(20)):
            return
    pytest.fail("no helper woke up")


def test_idle_helpers_use_no_processor() -> None:
    _visits(2)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_many_callers_at_once() -> None:
    done: list[int] = []

    def call() -> None:
        done.append(_visits(2))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(done) == 4
    assert min(done) >= 1


def _in_child(queue: Any) -> None:
    queue.put(_visits(2, calls=50))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork() -> None:
    _visits(2)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) >= 1
    child.join(60)
    assert child.exitcode == 0


def test_a_process_with_helpers_ends() -> None:
    code = (
        "import ctypes, torch\n"
        "from thalweg.kernels.cpu import chain_groups, threads\n"
        "from thalweg.kernels.potentials import Chain\n"
        "torch.set_num_threads(2); threads.LEAST_SHARE = 1\n"
        "none = torch.zeros(9)\n"
        "chain = Chain(torch.zeros(64, 32, 9), torch.zeros(9, 9), none, none, torch.full((64,), 32))\n"
        "print(len([chain_groups.forward(chain, None) for _ in range(3)]), len(threads._helpers.threads))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == ["3", "1"]


def test_every_range_is_run_once() -> None:
    seen: list[tuple[int, int, int]] = []
    ranges = [(k, k + 1) for k in range(PARTS)]
    threads.run(lambda *call: seen.append(call), ranges)
    assert sorted(seen) == [(k, k, k + 1) for k in range(PARTS)]


@pytest.mark.parametrize("where", [0, 1, PARTS - 1])
def test_an_exception_reaches_the_caller(where: int) -> None:
    def kernel(part: int, low: int, high: int) -> None:
        if part == where:
            raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match=f"part {where}"):
        threads.run(kernel, [(k, k + 1) for k in range(PARTS)])
    threads.run(lambda part, low, high: None, [(0, 1), (1, 2)])  # and the threads go on
