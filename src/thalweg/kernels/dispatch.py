"""Which way to compute a thing on the device where it lies: the only place that looks at device or backend."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from thalweg.errors import ConfigError, MissingDependencyError, nearest
from thalweg.kernels.potentials import Chain, SparseTransitions

__all__ = [
    "BACKENDS",
    "chain_kernels",
    "decoding_kernels",
    "fixed_kernels",
    "mask_kernels",
    "memory_kernels",
    "on_cpu",
    "search_kernels",
    "sparse_map_kernels",
    "usual_defaults",
]

# What `backend=` may say.
BACKENDS = ("auto", "reference", "scan", "cpu", "gpu")
_PACKAGE = {"cpu": "numba", "gpu": "triton"}
_DEVICE = {"cpu": "cpu", "gpu": "cuda"}


def on_cpu(x: Tensor) -> bool:
    """Whether arithmetic is dear and looking at a value is free: true on the CPU, false where kernels are launched.

    >>> import torch
    >>> on_cpu(torch.zeros(1))
    True
    """
    return x.device.type == "cpu"


_CPU = torch.device("cpu")


def usual_defaults() -> bool:
    """Whether new tensors are float32 on the CPU: compiled code makes its own, and follows their addresses.

    >>> usual_defaults()
    True
    """
    return torch.get_default_dtype() is torch.float32 and torch.get_default_device() == _CPU


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


@cache
def _module(name: str) -> ModuleType:
    return import_module(f"thalweg.kernels.{name}")


@cache
def _fastest(device: str, sparse: bool) -> str:
    """The best backend that is installed for a kind of device."""
    for name, own in _DEVICE.items():
        if device == own and _installed(_PACKAGE[name]) and not (sparse and name == "gpu"):
            return name
    return "reference"


def _chosen(backend: str, chain: Chain) -> str:
    """The backend's name: what was asked for where it can be had, else the fastest for this device."""
    device = chain.emissions.device.type
    if backend == "auto":
        return _fastest(device, isinstance(chain.transitions, SparseTransitions))
    if backend not in BACKENDS:
        raise ConfigError(f"unknown backend `{backend}`; {nearest(backend, BACKENDS)}")
    if backend in _DEVICE:
        if not _installed(_PACKAGE[backend]):
            package = _PACKAGE[backend]
            raise MissingDependencyError(f'backend "{backend}" needs {package}: pip install {package}')
        if device != _DEVICE[backend]:
            raise ConfigError(
                f'backend "{backend}" computes on {_DEVICE[backend]}, but the scores lie on {device}; '
                'use backend="auto"'
            )
        if backend == "gpu" and isinstance(chain.transitions, SparseTransitions):
            raise ConfigError('sparse transitions have no "gpu" kernels; use backend="auto"')
    return backend


def chain_kernels(backend: str, chain: Chain) -> ModuleType | None:
    """The compiled kernels for a chain, or None where plain PyTorch (``"reference"``, ``"scan"``) computes it.

    >>> import torch
    >>> tiny = Chain(torch.zeros(1, 2, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.tensor([2]))
    >>> chain_kernels("reference", tiny) is None
    True
    """
    chosen = _chosen(backend, chain)
    if chosen in ("reference", "scan") or not len(chain.emissions):  # an empty batch is no work for a kernel
        return None
    return _module(f"{chosen}.sparse_chain" if isinstance(chain.transitions, SparseTransitions) else f"{chosen}.chain")


def decoding_kernels(x: Tensor) -> ModuleType | None:
    """The compiled kernels for decoding steps on numbers like ``x``, or None where plain PyTorch computes them.

    >>> import torch
    >>> decoding_kernels(torch.zeros(1, 1, dtype=torch.float64)) is None
    True
    """
    if x.dtype != torch.float32 or not x.is_cpu or not x.numel() or not _installed("numba") or not usual_defaults():
        return None
    return _module("cpu.decoding")


def fixed_kernels(device: torch.device) -> ModuleType | None:
    """The kernels of decoding steps in buffers of fixed shape, which a GPU can record and repeat; None elsewhere.

    >>> import torch
    >>> fixed_kernels(torch.device("cpu")) is None
    True
    """
    usual = device.type == "cuda" and torch.get_default_dtype() is torch.float32
    return _module("gpu.decoding") if usual and _installed("triton") else None


def mask_kernels(mask: Tensor) -> ModuleType | None:
    """The kernels that look at masks on a GPU; None elsewhere.

    >>> mask_kernels(torch.ones(1, 1, dtype=torch.bool)) is None
    True
    """
    return _module("gpu.masks") if mask.device.type == "cuda" and _installed("triton") else None


def memory_kernels(x: Tensor) -> ModuleType | None:
    """The compiled kernels of associative memories of numbers like ``x``, or None where plain PyTorch computes them.

    >>> import torch
    >>> memory_kernels(torch.zeros(1, 1, dtype=torch.float64)) is None
    True
    """
    if x.dtype is not torch.float32 or not x.numel() or (x.is_cpu and not usual_defaults()):
        return None
    return _memories(x.device)


@cache
def _memories(device: torch.device) -> ModuleType | None:
    name = _fastest(device.type, False)
    return None if name == "reference" else _module(f"{name}.memory")


def search_kernels(device: torch.device) -> ModuleType | None:
    """The kernels of whole searches with few rows in one compiled call; None where there are none.

    >>> search_kernels(torch.device("meta")) is None
    True
    """
    usual = device.type == "cpu" and usual_defaults()
    return _module("cpu.search_program") if usual and _installed("numba") else None


def sparse_map_kernels(x: Tensor) -> ModuleType | None:
    """The compiled kernels of sparse maps for rows like ``x``, or None where plain PyTorch computes them.

    >>> import torch
    >>> sparse_map_kernels(torch.zeros(0, 3)) is None
    True
    """
    name = "gpu" if x.is_cuda else "cpu"
    if x.dtype not in (torch.float32, torch.float64) or not x.numel() or x.device.type != _DEVICE[name]:
        return None
    if x.is_cpu and not usual_defaults():
        return None
    return _sparse_maps(name)


@cache
def _sparse_maps(name: str) -> ModuleType | None:
    return _module(f"{name}.sparse_maps") if _installed(_PACKAGE[name]) else None
