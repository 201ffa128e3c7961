"""Which way to compute a thing on the device where it lies: the only place that looks at device or backend."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from thalweg.errors import ConfigError, MissingDependencyError, nearest
from thalweg.kernels.potentials import Chain, SparseTransitions

# What `backend=` may say.
BACKENDS = ("auto", "reference", "scan", "cpu", "gpu")
_PACKAGE = {"cpu": "thalweg._kernels", "gpu": "triton"}
_DEVICE = {"cpu": "cpu", "gpu": "cuda"}
_REMEDY = "install Thalweg again where there is a C++ compiler"


def on_cpu(x: Tensor) -> bool:
    """Whether arithmetic is dear and looking at a value is free: true on the CPU, false where kernels are launched.

    >>> on_cpu(torch.zeros(1))
    True
    """
    return x.device.type == "cpu"


_CPU = torch.device("cpu")


def usual_defaults() -> bool:
    """Whether new tensors are float32 on the CPU: compiled code makes its own, and follows their addresses."""
    return torch.get_default_dtype() is torch.float32 and torch.get_default_device() == _CPU


@cache
def _installed(package: str) -> bool:
    if package != _PACKAGE["cpu"]:
        return find_spec(package) is not None
    try:
        import_module(package)
    except ImportError as error:
        said = "thalweg: the compiled kernels are missing (%s); plain PyTorch answers, slower: %s"
        logging.getLogger("thalweg").warning(said, error, _REMEDY)
        return False
    return True


@cache
def _fastest(device: str, sparse: bool) -> str:
    """The best backend that is installed for a kind of device."""
    for name, own in _DEVICE.items():
        if device == own and _installed(_PACKAGE[name]) and not (sparse and name == "gpu"):
            return name
    return "reference"


def _chosen(backend: str, device: str, sparse: bool = False) -> str:
    """The backend's name: what was asked for where it can be had, else the fastest for this kind of device."""
    if backend == "auto":
        return _fastest(device, sparse)
    if backend not in BACKENDS:
        raise ConfigError(f"unknown backend `{backend}`; {nearest(backend, BACKENDS)}")
    if backend in _DEVICE:
        if not _installed(_PACKAGE[backend]):
            package = _PACKAGE[backend]
            remedy = _REMEDY if backend == "cpu" else f"pip install {package}"
            raise MissingDependencyError(f'backend "{backend}" needs {package}: {remedy}')
        if device != _DEVICE[backend]:
            raise ConfigError(
                f'backend "{backend}" computes on {_DEVICE[backend]}, but the scores lie on {device}; '
                'use backend="auto"'
            )
        if backend == "gpu" and sparse:
            raise ConfigError('sparse transitions have no "gpu" kernels; use backend="auto"')
    return backend


def chain_kernels(backend: str, chain: Chain) -> ModuleType | None:
    """The compiled kernels for a chain, or None where plain PyTorch (``"reference"``, ``"scan"``) computes it."""
    sparse = isinstance(chain.transitions, SparseTransitions)
    return _of_structure("chain", _chosen(backend, chain.emissions.device.type, sparse), chain.emissions)


def segment_kernels(backend: str, parts: Tensor) -> ModuleType | None:
    """The compiled kernels for segmentations whose parts score so, or None where plain PyTorch computes them."""
    return _of_structure("segments", _chosen(backend, parts.device.type), parts)


def lattice_kernels(backend: str, scores: Tensor) -> ModuleType | None:
    """The compiled kernels for paths through grids, or None where plain PyTorch (``"reference"``) computes them."""
    if backend == "scan":
        raise ConfigError('backend "scan" is for chains; paths through grids have "auto", "reference", "cpu" and "gpu"')
    return _of_structure("lattice", _chosen(backend, scores.device.type), scores)


def _of_structure(family: str, chosen: str, scores: Tensor) -> ModuleType | None:
    # No numbers, as in an empty batch, are no work for a kernel.
    return None if chosen in ("reference", "scan") or not scores.numel() else _found(chosen, family)


def fixed_kernels(device: torch.device) -> ModuleType | None:
    """The kernels of decoding steps in buffers of fixed shape, which a GPU can record and repeat; None elsewhere."""
    usual = device.type == "cuda" and torch.get_default_dtype() is torch.float32
    return _found("gpu", "decoding") if usual else None


def memory_kernels(x: Tensor) -> ModuleType | None:
    """The compiled kernels of associative memories of numbers like ``x``, or None where plain PyTorch computes them."""
    return _of_numbers(x, "memory") if x.dtype is torch.float32 else None


def sparse_map_kernels(x: Tensor) -> ModuleType | None:
    """The compiled kernels of sparse maps for rows like ``x``, or None where plain PyTorch computes them."""
    return _of_numbers(x, "sparse_maps") if x.dtype in (torch.float32, torch.float64) else None


def search_kernels(device: torch.device) -> ModuleType | None:
    """The kernels of whole searches in one compiled call; None where there are none."""
    return _found("cpu", "search") if device.type == "cpu" and usual_defaults() else None


def _of_numbers(x: Tensor, family: str) -> ModuleType | None:
    """The family's kernels on the device of ``x``; none for no numbers."""
    if x.is_cpu:
        return _found("cpu", family) if x.numel() and usual_defaults() else None
    return _found("gpu", family) if x.is_cuda and x.numel() else None


@cache
def _found(backend: str, family: str) -> ModuleType | None:
    return import_module(f"thalweg.kernels.{backend}.{family}") if _installed(_PACKAGE[backend]) else None
