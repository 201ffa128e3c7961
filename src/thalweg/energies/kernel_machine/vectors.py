"""Kernels of vectors, by name too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.energies.kernel_machine.functions import Kernel, Prepared
from thalweg.energies.rows import read_rows
from thalweg.errors import ConfigError
from thalweg.limits import COUNT, check_numbers


class _VectorKernel(Kernel):
    """A kernel of rows of numbers, which come as arrays, tensors, frames or lists."""

    positive = True
    vectors = True

    def prepare(self, X: Any, *, device: torch.device | str | None = None) -> Prepared:
        """Read and check items; see :class:`Kernel`."""
        grows = X if isinstance(X, Tensor) and X.requires_grad else None
        rows = read_rows(X)
        table = rows.block(0, len(rows)) if grows is None else grows
        table = table.to(device) if device is not None else table
        numbers = "number" if rows.width == 1 else "numbers"
        return Prepared(self._of(table), (), f"vectors of {rows.width} {numbers}", rows.device is None)

    def _of(self, table: Tensor) -> tuple[Tensor, ...]:
        return (table,)


@dataclass(frozen=True)
class Linear(_VectorKernel):
    """k(x, z) = x'z.

    >>> Linear()([[1.0, 2.0], [3.0, 4.0]])
    array([[ 5., 11.],
           [11., 25.]])
    """

    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """Each row with each column, ``(n, m)``."""
        return rows.tensors[0] @ columns.tensors[0].mT

    def diagonal_of(self, items: Prepared) -> Tensor:
        """Each item with itself, ``(N,)``."""
        return items.tensors[0].square().sum(dim=1)


@dataclass(frozen=True)
class Polynomial(_VectorKernel):
    """k(x, z) = (offset + scale x'z)^degree: products of up to ``degree`` numbers, those of fewer by the offset.

    Args:
        degree: 1 or more; offset: 0 or more; scale: above 0.

    >>> Polynomial(degree=2, offset=1.0)([[1, 1], [-1, 1]])
    array([[9., 1.],
           [1., 9.]])
    """

    degree: int = 2
    offset: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "Polynomial", 1, COUNT, "degree")
        check_numbers(self, "Polynomial", 0, float("inf"), "offset", whole=False)
        check_numbers(self, "Polynomial", 0, float("inf"), "scale", whole=False, strict=True)

    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """Each row with each column, ``(n, m)``."""
        return (self.scale * (rows.tensors[0] @ columns.tensors[0].mT) + self.offset).pow(self.degree)

    def diagonal_of(self, items: Prepared) -> Tensor:
        """Each item with itself, ``(N,)``."""
        return (self.scale * items.tensors[0].square().sum(dim=1) + self.offset).pow(self.degree)


@dataclass(frozen=True)
class RBF(_VectorKernel):
    r"""k(x, z) = exp(-gamma |x - z|^2), the radial basis function.

    Distances come from |x|^2 + |z|^2 - 2 x'z: in float32, centre points that lie far from the origin.

    Args:
        gamma: above 0; ``"scale"`` is 1 / (D var X) of the training set, as scikit-learn has it. It is settled by
            :meth:`Kernel.settled`, which machines call in ``fit``.

    >>> RBF(gamma=1.0)([[0.0], [1.0]]).round(4)
    array([[1.    , 0.3679],
           [0.3679, 1.    ]])
    >>> RBF().settled([[0.0, 2.0], [2.0, 0.0]])
    RBF(gamma=0.5)
    """

    gamma: float | str = "scale"

    def __post_init__(self) -> None:
        if isinstance(self.gamma, str):
            if self.gamma != "scale":
                raise ConfigError(f"RBF.gamma must be a number above 0 or `scale`, got `{self.gamma}`")
        else:
            check_numbers(self, "RBF", 0, float("inf"), "gamma", whole=False, strict=True)

    @property
    def waits(self) -> bool:
        """Whether gamma is still to be taken from a training set."""
        return isinstance(self.gamma, str)

    def settled(self, X: Any) -> Kernel:
        """With gamma as a number."""
        if not self.waits:
            return self
        rows = read_rows(X)
        variance = float(rows.block(0, len(rows)).double().var(correction=0))
        return RBF(1.0 / (rows.width * variance) if variance else 1.0)

    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """Each row with each column, ``(n, m)``."""
        if isinstance(self.gamma, str):
            raise ConfigError(
                "RBF.gamma `scale` depends on the training set X: use `kernel.settled(X)`, or give gamma as a number"
            )
        (one, ones), (other, others) = rows.tensors, columns.tensors
        squares = torch.addmm(others, one, other.mT, alpha=-2.0).add_(ones.unsqueeze(1)).clamp_(min=0.0)
        return squares.mul_(-self.gamma).exp_()

    def diagonal_of(self, items: Prepared) -> Tensor:
        """Each item with itself, ``(N,)``."""
        return torch.ones_like(items.tensors[1])

    def _of(self, table: Tensor) -> tuple[Tensor, ...]:
        return table, table.square().sum(dim=1)


_NAMED = {"linear": Linear, "poly": Polynomial, "rbf": RBF}


def kernel_named(kernel: Kernel | str) -> Kernel:
    """A kernel by its name: ``linear``, ``poly`` or ``rbf``, with their defaults; a kernel as it is.

    >>> kernel_named("poly")
    Polynomial(degree=2, offset=1.0, scale=1.0)
    """
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str) or kernel not in _NAMED:
        raise ConfigError(f"`kernel` must be linear, poly, rbf or a Kernel such as RBF(gamma=0.5), got {kernel!r}")
    return _NAMED[kernel]()
