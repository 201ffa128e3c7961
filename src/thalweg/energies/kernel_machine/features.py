"""Kernels by features: those of any encoder, and the score space of a generative model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thalweg.energies.kernel_machine.functions import Kernel, Prepared
from thalweg.energies.kernel_machine.vectors import Linear
from thalweg.energies.score_space import ScoreSpace
from thalweg.errors import ConfigError, ShapeError
from thalweg.limits import COUNT, check_numbers


@dataclass(frozen=True)
class Features(Kernel):
    """k(x, z) = a(f(x), f(z)) for the features f of any encoder or function, and a kernel a of vectors.

    Args:
        function: takes N items and gives ``(N, F)`` numbers, tensor or array. A module is asked in evaluation mode and
            without gradients.
        kernel: of the features.
        batch: how many items the function gets at a time.

    >>> def lengths(words):
    ...     return [[float(len(word))] for word in words]
    >>> Features(lengths)(["one", "three"])
    array([[ 9., 15.],
           [15., 25.]])
    """

    function: Callable[[Any], Any]
    kernel: Kernel = Linear()  # noqa: RUF009  immutable
    batch: int = 1024

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"Features.function must be a function or a module, got {type(self.function).__name__}")
        if not isinstance(self.kernel, Kernel) or not self.kernel.vectors:
            raise ConfigError(
                f"Features.kernel must be a kernel of vectors such as RBF(gamma=0.5), got {self.kernel!r}"
            )
        check_numbers(self, "Features", 1, COUNT, "batch")

    @property
    def positive(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the parts are."""
        return self.kernel.positive

    def settled(self, X: Any) -> Kernel:
        """With the kernel of the features settled by those of X."""
        return Features(self.function, self.kernel.settled(self._features(X)), self.batch) if self.waits else self

    def prepare(self, X: Any, *, device: torch.device | str | None = None) -> Prepared:
        """Read and check items; see :class:`Kernel`."""
        items = self.kernel.prepare(self._features(X), device=device)
        return Prepared(items.tensors, items.inner, items.kind, not isinstance(X, Tensor))

    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """Each row with each column, ``(n, m)``."""
        return self.kernel.block(rows, columns)

    def diagonal_of(self, items: Prepared) -> Tensor:
        """Each item with itself, ``(N,)``."""
        return self.kernel.diagonal_of(items)

    def _features(self, X: Any) -> Any:
        parts = []
        for start in range(0, len(X), self.batch):
            some = X[start : start + self.batch]
            found = self._ask(some)
            found = found if isinstance(found, Tensor) else torch.as_tensor(np.asarray(found))
            if found.dim() != 2 or len(found) != len(some):
                raise ShapeError(
                    f"Features.function must give (N, F) numbers for N = {len(some)} items, got {tuple(found.shape)}"
                )
            parts.append(found)
        return torch.cat(parts) if parts else torch.empty(0, 1)

    def _ask(self, X: Any) -> Any:
        module = self.function
        if not isinstance(module, nn.Module):
            return module(X)
        training = module.training
        try:
            with torch.no_grad():
                return module.eval()(X)
        finally:
            module.train(training)


@dataclass(frozen=True)
class Fisher(Kernel):
    r"""k(x, z) = U(x)' I^{-1} U(z): the inner product in a :class:`~thalweg.energies.ScoreSpace`.

    Items are the sequences that the score space takes. One that is not fitted is fitted on the training set by
    :meth:`Kernel.settled`, which machines call in ``fit``.

    >>> from thalweg.energies.mixture.model import GaussianMixture
    >>> model = GaussianMixture(means=[[-1.0], [1.0]], covariances=[[[1.0]], [[1.0]]])
    >>> Fisher(ScoreSpace(model))([[[0.0]], [[-2.0], [0.5], [3.0]]])
    array([[ 0.5..., -1.072...],
           [-1.072...,  2.805...]], dtype=float32)
    """

    score_space: ScoreSpace
    positive = True

    def __post_init__(self) -> None:
        if not isinstance(self.score_space, ScoreSpace):
            raise ConfigError(f"Fisher needs a ScoreSpace, got {type(self.score_space).__name__}")

    @property
    def waits(self) -> bool:
        """Whether the score space is still to be fitted."""
        return not self.score_space.__sklearn_is_fitted__()

    def settled(self, X: Any) -> Kernel:
        """With a fitted score space."""
        return Fisher(self.score_space.__sklearn_clone__().fit(X)) if self.waits else self

    def prepare(self, X: Any, *, device: torch.device | str | None = None) -> Prepared:
        """Read and check items; see :class:`Kernel`."""
        scores = self.score_space.transform(X)
        table = torch.as_tensor(scores)
        kind = f"sequences of {table.size(1)} scores"
        return Prepared((table.to(device) if device is not None else table,), (), kind, not isinstance(scores, Tensor))

    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """Each row with each column, ``(n, m)``."""
        return rows.tensors[0] @ columns.tensors[0].mT

    def diagonal_of(self, items: Prepared) -> Tensor:
        """Each item with itself, ``(N,)``."""
        return items.tensors[0].square().sum(dim=1)
