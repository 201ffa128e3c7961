"""A device's queue and memory: waiting for it, what is left on it, what a call takes of it."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


def available_bytes(device: str) -> int:
    """Memory that may still be asked for; a huge number where nothing tells."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    info = Path("/proc/meminfo")
    return _kibibytes(info, "MemAvailable") if info.is_file() else 2**62


def resident(key: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at its highest (all that systems without /proc tell)."""
    if STATUS.exists():
        return _kibibytes(STATUS, key)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _kibibytes(file: Path, key: str) -> int:
    lines = file.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def peak_extra(run: Callable[[], Any], device: str) -> int:
    """Bytes at the highest point of a call, its results included, over those before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        raw = run()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
    else:
        if CLEAR.exists():
            CLEAR.write_text("5")  # the highest point so far becomes that of now
        before = resident("VmRSS")
        raw = run()
        extra = resident("VmHWM") - before
    del raw
    return extra
