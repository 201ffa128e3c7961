"""A batch shared out over threads.

:func:`run` shares out ranges among plain Python threads: kernels release the interpreter lock. :func:`enter` is for
kernels of some tens of microseconds, less than it takes to wake a thread: its helpers wait in compiled code, awake for
a while after each job and asleep after that, and the kernel takes parts of its work one by one.

In both the caller works too and waits at the end for parts that were begun, never for a helper that has not come: where
other programs hold the cores, a call takes hardly longer than without helpers.

Both are safe to call from several threads at once, inside data-loading workers and after a fork, where Numba's own
layers and OpenMP are not.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from threading import Lock, Thread
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch

__all__ = ["Entry", "enter", "parts", "run", "share"]

LEAST_WORK = 2_000_000  # inner operations a thread; with fewer, waking another costs more than it saves
LEAST_SHARE = 80_000  # the same for helpers that are mostly awake
_PARTS = 2  # a thread has so many parts to do: what a late helper leaves, the caller does
_SPINS = 20_000  # looks at the mailbox before a helper goes to sleep, half a millisecond or so
_MOST = 62  # helpers: their names are bits of a whole number

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


class Entry:
    """A compiled function ``void(int64)`` that several threads may enter; ``owner`` keeps its code alive.

    >>> Entry(ctypes.cast(ctypes.pythonapi.PyErr_Clear, ctypes.c_void_p).value, None).address > 0
    True
    """

    def __init__(self, address: int, owner: Any):
        self.address, self.owner = address, owner
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


# The mailbox holds int64: the number of the job, whether it is open, its function and argument, how many helpers are
# wanted, 1 when all is over, 1 while a caller has it, bits of the helpers that are to be woken; from 16 on how many
# helpers are at work, from 32 on which of them sleep.
#
# An exception (Ctrl-C) may pass through the caller between any two of its steps. So what must not be torn is one call:
# `take` gets the mailbox and tells the caller so in its own memory, `post` opens the job and notes who is to be woken,
# `close` returns when no helper is at work any more and the mailbox is free again.
#
# A helper says that it is at work before it looks whether the job is open; the caller closes the job before it looks
# whether a helper is at work. So either the helper keeps out or the caller waits, and nothing is touched that is gone.
# A helper that wants to sleep says so before it looks for a new job; the caller posts the job before it looks who
# sleeps. Whoever takes the flag down decides: if the caller did, the helper's lock is let go, once.
_MAILBOX = """
define i64 @serve(ptr %box, i64 %who, i64 %seen, i64 %spins) {
entry:
  %open = getelementptr i64, ptr %box, i64 1
  %function = getelementptr i64, ptr %box, i64 2
  %argument = getelementptr i64, ptr %box, i64 3
  %wanted = getelementptr i64, ptr %box, i64 4
  %over = getelementptr i64, ptr %box, i64 5
  %active = getelementptr i64, ptr %box, i64 16
  %flags = getelementptr i64, ptr %box, i64 32
  %flag = getelementptr i64, ptr %flags, i64 %who
  br label %look
look:
  %last = phi i64 [%seen, %entry], [%last, %wait], [%job, %skip], [%job, %leave], [%last, %stay]
  %left = phi i64 [%spins, %entry], [%less, %wait], [%spins, %skip], [%spins, %leave], [%spins, %stay]
  %job = load atomic i64, ptr %box seq_cst, align 8
  %new = icmp ne i64 %job, %last
  br i1 %new, label %found, label %idle
found:
  %many = load atomic i64, ptr %wanted seq_cst, align 8
  %mine = icmp slt i64 %who, %many
  br i1 %mine, label %join, label %skip
skip:
  br label %look
join:
  %before = atomicrmw add ptr %active, i64 1 seq_cst
  %state = load atomic i64, ptr %open seq_cst, align 8
  %still = icmp ne i64 %state, 0
  br i1 %still, label %work, label %leave
work:
  %address = load i64, ptr %function, align 8
  %call = inttoptr i64 %address to ptr
  %given = load i64, ptr %argument, align 8
  call void %call(i64 %given)
  br label %leave
leave:
  %after = atomicrmw sub ptr %active, i64 1 seq_cst
  br label %look
idle:
  %end = load atomic i64, ptr %over seq_cst, align 8
  %ended = icmp ne i64 %end, 0
  br i1 %ended, label %stop, label %tired
stop:
  ret i64 -1
tired:
  %less = sub i64 %left, 1
  %sleepy = icmp sle i64 %less, 0
  br i1 %sleepy, label %doze, label %wait
wait:
  PAUSE
  br label %look
doze:
  %up = atomicrmw xchg ptr %flag, i64 1 seq_cst
  %again = load atomic i64, ptr %box seq_cst, align 8
  %quiet = icmp eq i64 %again, %last
  br i1 %quiet, label %sleep, label %wake
wake:
  %down = atomicrmw xchg ptr %flag, i64 0 seq_cst
  %own = icmp ne i64 %down, 0
  br i1 %own, label %stay, label %sleep
stay:
  br label %look
sleep:
  ret i64 %last
}
define void @take(ptr %box, ptr %mine) {
entry:
  %owner = getelementptr i64, ptr %box, i64 6
  %pair = cmpxchg ptr %owner, i64 0, i64 1 seq_cst seq_cst
  %won = extractvalue {i64, i1} %pair, 1
  %word = zext i1 %won to i64
  store i64 %word, ptr %mine, align 8
  ret void
}
define void @post(ptr %box, i64 %count) {
entry:
  %open = getelementptr i64, ptr %box, i64 1
  %wake = getelementptr i64, ptr %box, i64 7
  %flags = getelementptr i64, ptr %box, i64 32
  %left = load i64, ptr %wake, align 8
  store atomic i64 1, ptr %open seq_cst, align 8
  %job = atomicrmw add ptr %box, i64 1 seq_cst
  br label %look
look:
  %who = phi i64 [0, %entry], [%next, %look]
  %mask = phi i64 [%left, %entry], [%more, %look]
  %flag = getelementptr i64, ptr %flags, i64 %who
  %down = atomicrmw xchg ptr %flag, i64 0 seq_cst
  %bit = shl i64 %down, %who
  %more = or i64 %mask, %bit
  %next = add i64 %who, 1
  %done = icmp sge i64 %next, %count
  br i1 %done, label %end, label %look
end:
  store i64 %more, ptr %wake, align 8
  ret void
}
define void @close(ptr %box, i64 %spins) {
entry:
  %open = getelementptr i64, ptr %box, i64 1
  %owner = getelementptr i64, ptr %box, i64 6
  %active = getelementptr i64, ptr %box, i64 16
  store atomic i64 0, ptr %open seq_cst, align 8
  br label %look
look:
  %left = phi i64 [%spins, %entry], [%less, %wait], [1, %yield]
  %busy = load atomic i64, ptr %active seq_cst, align 8
  %none = icmp eq i64 %busy, 0
  br i1 %none, label %end, label %wait
wait:
  PAUSE
  %less = sub i64 %left, 1
  %tired = icmp sle i64 %less, 0
  br i1 %tired, label %yield, label %look
yield:
  YIELD
  br label %look
end:
  store atomic i64 0, ptr %owner seq_cst, align 8
  ret void
}
"""


@cache
def _compiled() -> tuple[Any, ...]:
    """``serve(box, who, seen, spins)``, ``take(box, mine)``, ``post(box, count)`` and ``close(box, spins)``."""
    hint = platform.machine().lower() in ("x86_64", "amd64")  # to the processor: this is a loop that waits
    pause = "void @llvm.x86.sse2.pause()"
    yielded = "i32 @sched_yield()" if os.name == "posix" else ""  # a helper may have lost its core to this very thread
    code = _MAILBOX.replace("PAUSE", f"call {pause}" if hint else "") + (f"declare {pause}\n" if hint else "")
    code = code.replace("YIELD", f"%gone = call {yielded}" if yielded else "") + (
        f"declare {yielded}" if yielded else ""
    )
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(code), machine)
    engine.finalize_object()
    word, box = ctypes.c_int64, ctypes.c_void_p
    kinds = {
        "serve": (word, box, word, word, word),
        "take": (None, box, box),
        "post": (None, box, word),
        "close": (None, box, word),
    }
    _keep.append(engine)
    return tuple(ctypes.CFUNCTYPE(*k)(engine.get_function_address(n)) for n, k in kinds.items())


_keep: list[Any] = []  # code that threads may be in


class _Helpers:
    """Threads that wait for jobs in one mailbox; one caller at a time has them."""

    def __init__(self) -> None:
        self.box = (ctypes.c_int64 * (32 + _MOST))()
        self.threads: list[tuple[Thread, Any]] = []  # each with the lock that it sleeps at

    def _serve(self, who: int, lock: Any) -> None:
        serve, seen = _compiled()[0], 0
        while (seen := serve(self.box, who, seen, _SPINS)) >= 0:
            lock.acquire()

    def _grow(self, count: int) -> int:
        """How many helpers there are of those that are wanted, new ones included."""
        while len(self.threads) < count:
            lock = Lock()
            lock.acquire()
            thread = Thread(target=self._serve, args=(len(self.threads), lock), daemon=True, name="thalweg")
            self.threads.append((thread, lock))
            try:
                thread.start()
            except RuntimeError:  # the system gives no more, or the interpreter is ending
                self.threads.pop()
                return len(self.threads)
        return count

    def _wake(self) -> None:
        """Let go of the locks of helpers that were asleep, those included that an interrupted call has left."""
        while mask := self.box[7]:
            who = (mask & -mask).bit_length() - 1
            lock = self.threads[who][1]
            if lock.locked():
                lock.release()
            self.box[7] = mask & (mask - 1)

    def call(self, entry: Entry, argument: Any, count: int) -> None:
        """``entry`` by this thread and up to ``count`` helpers, or by this one alone where another caller has them."""
        _, take, post, close = _compiled()
        box, mine = self.box, (ctypes.c_int64 * 1)()
        try:
            take(box, mine)
            if mine[0]:
                count = self._grow(count)
                box[2], box[3], box[4] = entry.address, ctypes.addressof(argument), count
                post(box, count)
                self._wake()
            entry.call(argument)
        finally:
            # Whatever was raised, helpers are done with the caller's memory when this returns.
            if mine[0]:
                close(box, _SPINS)

    def end(self) -> None:
        """Let every helper return before the code that it runs is taken away."""
        if not self.threads:
            return
        _, take, post, close = _compiled()
        mine, last = (ctypes.c_int64 * 1)(), time.monotonic() + 1.0
        while not mine[0] and time.monotonic() < last:
            take(self.box, mine)
        if mine[0]:
            self.box[4], self.box[5] = 0, 1  # no one is to join what is posted now
            post(self.box, len(self.threads))
            self._wake()
            for thread, _ in self.threads:
                thread.join(1.0)
            self.threads = []
            close(self.box, _SPINS)


_helpers = _Helpers()


def _forget() -> None:
    """Threads do not survive a fork; the child makes its own when it needs them."""
    global _pool, _pool_size, _lock, _helpers
    _pool, _pool_size, _lock, _helpers = None, 0, Lock(), _Helpers()


@atexit.register
def _end() -> None:
    _helpers.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _workers(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < count:
            _pool, _pool_size = ThreadPoolExecutor(count, thread_name_prefix="thalweg"), count
        return _pool


def share(work: int, most: int) -> tuple[int, int]:
    """How many threads pay for so many inner operations, and how many parts to make of the work, at most ``most``.

    >>> share(10, 5)
    (1, 1)
    """
    count = work // LEAST_SHARE
    if count < 2:
        return 1, 1
    count = min(torch.get_num_threads(), most, count, _MOST + 1)
    return count, min(most, _PARTS * count) if count > 1 else 1


def enter(entry: Entry, argument: ctypes.Array, threads: int) -> None:
    """``entry(argument)`` by this thread and, where they are free, helpers: ``threads`` in all share out the work."""
    if threads > 1:
        _helpers.call(entry, argument, threads - 1)
    else:
        entry.call(argument)


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
    """``kernel(*arguments, part, low, high)`` for every range, by this thread and those that come to help.

    >>> seen = []
    >>> run(lambda *call: seen.append(call), [(0, 2)], "x")
    >>> seen
    [('x', 0, 0, 2)]
    """
    if len(ranges) == 1:
        kernel(*arguments, 0, *ranges[0])
        return
    left = deque(enumerate(ranges))

    def work() -> None:
        while True:
            try:
                part, (low, high) = left.popleft()
            except IndexError:
                return
            kernel(*arguments, part, low, high)

    pool = _workers(len(ranges) - 1)
    helping = [pool.submit(work) for _ in ranges[1:]]
    try:
        work()
    finally:
        for task in helping:
            if not task.cancel():  # it has begun
                task.result()
