"""Thalweg: deep structured learning in PyTorch.

Write down an energy E(x, y); get the best answer, the k best, samples and gradients; train, measure and use it.
Importing this needs torch and numpy alone and loads neither: the names below arrive when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thalweg import data, diagnostics, energies, inference, layers, learning, metrics, tasks
    from thalweg.tasks import compare, evaluate, load, train

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "compare",
    "data",
    "diagnostics",
    "energies",
    "evaluate",
    "inference",
    "layers",
    "learning",
    "load",
    "metrics",
    "tasks",
    "train",
]

_FUNCTIONS = dict.fromkeys(("train", "evaluate", "compare", "load"), "thalweg.tasks")


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(import_module(_FUNCTIONS[name]), name)
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
