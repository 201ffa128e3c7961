"""Memory that cannot be had, said in one line instead of by a process that ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from thalweg.errors import ConfigError

_BYTES = 8  # of a number
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container
# How the allocators of PyTorch and NumPy say it, where the type of the error does not.
_REFUSALS = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed", "Unable to allocate")


@cache
def _memory() -> float:
    """Bytes of the machine's memory, or of its container's; infinite where nobody says."""
    sizes = [float("inf")]
    if hasattr(os, "sysconf") and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in _LIMITS:
        try:
            sizes.append(int(Path(limit).read_text()))
        except (OSError, ValueError):  # no container, or one without a limit
            continue
    return min(sizes)


@contextmanager
def enough_memory(numbers: int, **settings: int) -> Iterator[None]:
    """Work that holds so many ``numbers`` at once because of ``settings``; :class:`ConfigError` if they are too many.

    What would take more than half of the memory is refused before it is begun: where pages are promised that are not
    there, a system ends the process that uses them. What the allocator refuses later is said in the same words.

    >>> with enough_memory(10**17, width=10**9):
    ...     pass
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: `width` = 1000000000 must fit into memory, got a need of 800000000.0 GB; lower it
    """
    if numbers * _BYTES > _memory() / 2:
        raise ConfigError(_said(settings, f"a need of {numbers * _BYTES / 1e9:.1f} GB"))
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        words = str(error)
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and not any(refusal in words for refusal in _REFUSALS):
            raise
        raise ConfigError(_said(settings, repr(words.splitlines()[0]) if words else "none")) from error


def _said(settings: dict[str, int], got: str) -> str:
    names = " and ".join(f"`{name}` = {value}" for name, value in settings.items())
    return f"{names} must fit into memory, got {got}; lower {'it' if len(settings) == 1 else 'one of them'}"
