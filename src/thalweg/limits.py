"""How large things may be: bounds of settings, and the memory that is left.

The bounds are far above what anybody needs and far below what ends in an overflow, a hang or a killed process: a slip
of the keyboard meets one of them and becomes a line. What fits into memory is another question, asked where sizes are
known.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from thalweg.errors import ConfigError, OutOfMemoryError, ThalwegError, nearest

if TYPE_CHECKING:
    from torch import nn


WIDTH = 2**20
"""Units of a layer, channels, classes."""

DEPTH = 1000
"""Layers on top of one another."""

COUNT = 10**9
"""Epochs, steps, items of a batch: whatever is counted and costs nothing by being large."""

SEED = 2**63 - 1
"""Seeds of random numbers."""

LENGTH = 2**15
"""Characters of a line of text, symbols of an answer."""

ANSWERS = 10_000
"""Answers to one source, and hypotheses of a beam."""

COMPARED = 1000
"""Answers that are compared with one another, each with each."""

SIDE = 2**13
"""Pixels of an image's side."""

PROCESSES = 256
"""Processes at a time."""

# Threads that any machine can start; one with many cores may have two for each.
_THREADS = 64


def check_numbers(
    config: object, section: str, least: float, most: float, *names: str, whole: bool = True, strict: bool = False
) -> None:
    """Refuse settings that are no numbers, no whole ones, or out of their bounds.

    Args:
        config: what has them; section: how messages call it.
        least, most: the bounds, both allowed.
        names: of the settings.
        whole: whether they must be whole.
        strict: ``least`` itself is not allowed.

    >>> from types import SimpleNamespace
    >>> check_numbers(SimpleNamespace(hidden=10**12), "model", 1, WIDTH, "hidden")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: model.hidden must be at most 1,048,576, got 1000000000000; lower it
    """
    kind: Any = Integral if whole else Real
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, kind):
            wanted = "a whole number" if whole else "a number"
            raise ConfigError(f"{section}.{name} must be {wanted}, got {_shown(value)}")
        if not value >= least or (strict and value == least):  # NaN too
            bound = f"above {least:g}" if strict else f"at least {least:g}" if least else "0 or more"
            raise ConfigError(f"{section}.{name} must be {bound}, got {_shown(value)}")
        if value > most:
            bound = "finite" if most == math.inf else f"at most {most:,}"
            raise ConfigError(f"{section}.{name} must be {bound}, got {_shown(value)}; lower it")


def check_shares(config: object, section: str, ends: str, *names: str) -> None:
    """Refuse settings that do not lie between 0 and 1; ``ends`` says which of the two they may be, as ``[0, 1)`` does.

    >>> from types import SimpleNamespace
    >>> check_shares(SimpleNamespace(dropout=1.0), "model", "[0, 1)", "dropout")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: model.dropout must be in [0, 1), got 1.0
    """
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1 or (value == 0 and ends[0] == "(") or (value == 1 and ends[-1] == ")"):
            raise ConfigError(f"{section}.{name} must be in {ends}, got {value}")


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Refuse what is none of several words.

    >>> check_choice("norm", "bach", ("batch", "layer"))
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: norm `bach` is not known; did you mean `batch`?
    """
    if value not in (choices := tuple(choices)):  # not a mapping's own test, which some values cannot be asked
        raise ConfigError(f"{what} `{value}` is not known; {nearest(str(value), choices)}")


def check_choices(config: object, section: str) -> None:
    """Refuse settings, declared as one of several words, that are none of them.

    >>> from thalweg.sweeps.settings import SweepConfig
    >>> check_choices(SweepConfig(method="grid", space={"hidden": [8]}), "sweep")
    """
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal:
            check_choice(f"{section}.{name}", getattr(config, name), get_args(hint))


def _shown(value: Any) -> str:
    try:
        text = str(value) if isinstance(value, Real) else repr(value)
    except ValueError:  # Python writes no number of more than some thousand digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text):,} characters)"


def check_threads(count: int) -> None:
    """Refuse more threads than this machine has any use for; the library that starts them ends the process.

    >>> check_threads(100_000)
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: training.threads must be at most ... on this machine, got 100000; ...
    """
    most = max(_THREADS, 2 * (os.cpu_count() or 1))
    if count > most:
        raise ConfigError(
            f"training.threads must be at most {most} on this machine, got {count}; lower it, or 0 suits the machine"
        )


def free_memory() -> int | None:
    """Bytes that this process may still take, as far as the machine tells: free memory, its container's, its own limit.

    >>> found = free_memory()
    >>> found is None or found > 0
    True
    """
    found = [left for left in (_free_of_machine(), _most_of_container(), _left_of_process()) if left is not None]
    return max(1, min(found)) if found else None


def _free_of_machine() -> int | None:
    facts = _numbers_in("/proc/meminfo")
    if "MemAvailable" in facts:
        return 1024 * (facts["MemAvailable"] + facts.get("SwapFree", 0))
    return _whole_machine()


def _whole_machine() -> int | None:
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _most_of_container() -> int | None:
    # What it holds already counts its file cache, which it gives back: the whole is the sure bound.
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            return int(file.read())  # "max" is no number
    return None


def _left_of_process() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _numbers_in("/proc/self/status").get("VmSize")
    return None if limit == resource.RLIM_INFINITY or taken is None else limit - 1024 * taken


def _numbers_in(path: str) -> dict[str, int]:
    """The lines ``name: number kB`` of a file of the system; none where it is absent."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+)", file.read(), re.MULTILINE)}
    except OSError:
        return {}


def check_memory(needed: int, what: str, remedy: str) -> None:
    """Refuse what certainly needs more memory than there is.

    >>> check_memory(2**60, "the model", "lower `hidden`")
    Traceback (most recent call last):
    ...
    thalweg.errors.OutOfMemoryError: the model needs 1,073,741,824.0 GiB of memory, got ... free; lower `hidden`
    """
    free = free_memory()
    if free is not None and needed > free:
        raise OutOfMemoryError(f"{what} needs {_size(needed)} of memory, got {_size(free)} free; {remedy}")


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside, modules are built with shapes alone: nothing is allocated, and no random number is drawn.

    >>> from torch import nn
    >>> with without_memory():
    ...     nn.Linear(10**6, 10**6).weight.numel()
    1000000000000
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Undrawn(TorchFunctionMode):
        """Leaves out `normal_`: for a tensor without memory it would first import a second's worth of torch."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in (torch.Tensor.normal_, torch.nn.init.normal_):
                return args[0] if args else kwargs["tensor"]
            return func(*args, **kwargs)

    with Undrawn(), torch.random.fork_rng([]), torch.device("meta"):
        yield


def check_fits(build: Callable[[], nn.Module], *, trained: bool, remedy: str) -> None:
    """Refuse a model whose parameters alone need more memory than the host has; nothing is allocated or drawn.

    A parameter is 4 bytes; training holds its gradient and two moments as well.

    Args:
        build: makes the model; called on torch's device without memory.
        trained: whether it is to be trained on the host.
        remedy: which settings to lower.

    >>> from torch import nn
    >>> check_fits(lambda: nn.Linear(10**6, 10**6), trained=True, remedy="lower `hidden`")
    Traceback (most recent call last):
    ...
    thalweg.errors.OutOfMemoryError: a model of 1,000,001,000,000 parameters needs 14,901.2 GiB of memory, got ...
    """
    with without_memory(), within_memory(remedy):
        count = sum(parameter.numel() for parameter in build().parameters())
    check_memory((16 if trained else 4) * count, f"a model of {count:,} parameters", remedy)


@contextmanager
def within_memory(remedy: str) -> Iterator[None]:
    """Say that memory ran out, and what to lower, instead of whatever Python, NumPy or torch say; also a decorator.

    >>> with within_memory("lower `hidden`"):
    ...     bytearray(2**62)
    Traceback (most recent call last):
    ...
    thalweg.errors.OutOfMemoryError: expected enough memory, got less (... free); lower `hidden`
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, ThalwegError) or not _lacking(error):
            raise
        text = str(error)
        asked = re.search(r"allocate (\d[\d.,]*) ?(bytes|[KMGTPE]iB)", text)
        free = None if "CUDA" in text else free_memory()
        found = f"less ({_size(free)} free)" if free is not None else "less"
        needed = f" for {_asked(asked[1], asked[2])} more" if asked else ""
        raise OutOfMemoryError(f"expected enough memory{needed}, got {found}; {remedy}") from error


# How torch's allocators, C++ and torch's arithmetic of shapes say that it cannot be had.
_SIGNS = (
    *("can't allocate memory", "Cannot allocate memory", "out of memory", "not enough memory", "bad_alloc"),
    *("Storage size calculation overflowed", "integer multiplication overflow", "Invalid buffer size"),
)


def _lacking(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _SIGNS)


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
    most = min((size for size in _memory() if size is not None), default=math.inf)
    if 8 * numbers > most / 2:
        raise ConfigError(_too_much(settings, f"a need of {8 * numbers / 1e9:.1f} GB"))
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, ThalwegError) or not _lacking(error):
            raise
        words = str(error)
        raise ConfigError(_too_much(settings, repr(words.splitlines()[0]) if words else "none")) from error


@cache
def _memory() -> tuple[int | None, int | None]:
    """Bytes of the machine's memory and of its container's, as far as they are told."""
    return _whole_machine(), _most_of_container()


def _too_much(settings: dict[str, int], got: str) -> str:
    names = " and ".join(f"`{name}` = {value}" for name, value in settings.items())
    return f"{names} must fit into memory, got {got}; lower {'it' if len(settings) == 1 else 'one of them'}"


def _asked(number: str, unit: str) -> str:
    return _size(int(number)) if unit == "bytes" else f"{number.rstrip('.')} {unit}"


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**29 else f"{count / 2**20:,.0f} MiB"
