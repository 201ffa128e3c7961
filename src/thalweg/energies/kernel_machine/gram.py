"""Gram matrices in blocks, and whether a matrix is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.energies.kernel_machine.functions import Kernel, Prepared, check_alike
from thalweg.energies.rows import as_table
from thalweg.errors import ConfigError, ShapeError
from thalweg.limits import check_memory


def gram(kernel: Kernel, X: Any, Z: Any = None, *, block: int = 1024, device: torch.device | str | None = None) -> Any:
    """The Gram matrix of X ``(N, N)``, or of X with Z ``(N, M)``, ``block`` rows and columns at a time.

    Besides the answer and the prepared items, no more than a few blocks are held, on ``device``. That of X alone is
    exactly symmetric, half of it is computed.

    Args:
        kernel: settled by X where Z is not given; otherwise it must be.
        block: rows and columns of a block.
        device: where blocks are computed; by default where X lies.

    Returns:
        A tensor where X is one, on its device; otherwise an array.

    >>> from thalweg.energies.kernel_machine.vectors import RBF
    >>> gram(RBF(gamma=0.5), np.arange(5.0)[:, None], block=2)[0].round(3)
    array([1.   , 0.607, 0.135, 0.011, 0.   ])
    """
    if not isinstance(block, int) or block < 1:
        raise ConfigError(f"`block` must be a whole number above 0, got {block!r}")
    kernel = kernel.settled(X) if Z is None else kernel
    rows = kernel.prepare(X, device=device)
    columns = rows if Z is None else kernel.prepare(Z, device=rows.device)
    check_alike(rows, columns)
    place = X.device if isinstance(X, Tensor) else torch.device("cpu")
    out = gram_of(kernel, rows, None if Z is None else columns, block=block, place=place)
    return out.numpy() if rows.array else out


def gram_of(
    kernel: Kernel, rows: Prepared, columns: Prepared | None, *, block: int = 1024, place: torch.device
) -> Tensor:
    """The same of prepared items, in ``place``; without columns that of the rows.

    >>> from thalweg.energies.kernel_machine.vectors import Linear
    >>> gram_of(Linear(), Linear().prepare([[1.0], [2.0]]), None, place=torch.device("cpu"))
    tensor([[1., 2.],
            [2., 4.]], dtype=torch.float64)
    """
    others = rows if columns is None else columns
    N, M = len(rows), len(others)
    dtype = kernel.block(rows[:1], others[:1]).dtype
    if place.type == "cpu":
        check_memory(N * M * dtype.itemsize, f"a Gram matrix of {N:,} x {M:,}", "take fewer items")
    out = torch.empty(N, M, dtype=dtype, device=place)
    with torch.no_grad():
        for top in range(0, N, block):
            for left in range(top if columns is None else 0, M, block):
                values = kernel.block(rows[top : top + block], others[left : left + block])
                # A transposed block that lies in one piece is far faster to make, and then to write.
                turned = values.mT.contiguous() if columns is None else None
                if turned is not None and top == left:
                    values = turned.add_(values).mul_(0.5)
                elif turned is not None:
                    out[left : left + block, top : top + block] = turned
                out[top : top + block, left : left + block] = values
    return out


def check_gram(G: Any, *, tolerance: float | None = None) -> float:
    """Refuse what is no Gram matrix: not square, not finite, not symmetric, or with a negative eigenvalue.

    Args:
        G: ``(N, N)``, array or tensor.
        tolerance: how much of the largest entry the rounding may take: 100 times the precision of the type, and N
            times that below 0 for an eigenvalue, by default.

    Returns:
        The smallest eigenvalue. O(N^3).

    >>> check_gram([[2.0, 1.0], [1.0, 2.0]])
    1.0
    >>> check_gram([[1.0, 2.0], [2.0, 1.0]])
    Traceback (most recent call last):
    ...
    thalweg.errors.ShapeError: the Gram matrix must be positive semi-definite, got a smallest eigenvalue of -1 ...
    """
    matrix = square(G)
    eps = torch.finfo(matrix.dtype if matrix.dtype is torch.float32 else torch.float64).eps
    slack = (100 * eps if tolerance is None else tolerance) * float(matrix.abs().max())
    matrix = matrix.double()
    apart = (matrix - matrix.mT).abs()
    if float(apart.max()) > slack:
        row, column = divmod(int(apart.argmax()), len(matrix))
        raise ShapeError(
            f"the Gram matrix must be symmetric, got {float(matrix[row, column]):.6g} at ({row}, {column}) and "
            f"{float(matrix[column, row]):.6g} at ({column}, {row}); is the kernel?"
        )
    smallest = float(torch.linalg.eigvalsh((matrix + matrix.mT) / 2)[0])
    if smallest < -slack * len(matrix):
        raise ShapeError(
            f"the Gram matrix must be positive semi-definite, got a smallest eigenvalue of {smallest:.3g} where the "
            f"largest entry is {float(matrix.abs().max()):.3g}; use a kernel that is an inner product of features"
        )
    return smallest


def square(G: Any) -> Tensor:
    """A finite square matrix as a tensor of floating-point numbers.

    >>> square([[1, 0], [0, 1]]).dtype
    torch.float64
    """
    table = as_table(G, "the Gram matrix")
    matrix = table.detach() if isinstance(table, Tensor) else torch.from_numpy(np.require(table, None, ["C", "W"]))
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ShapeError(f"a Gram matrix must be (N, N), got {tuple(matrix.shape)}")
    if not matrix.is_floating_point():
        matrix = matrix.double()
    wrong = ~matrix.isfinite()
    if bool(wrong.any()):
        row, column = divmod(int(wrong.flatten().int().argmax()), len(matrix))
        raise ShapeError(f"the Gram matrix must be finite, got {float(matrix[row, column])} at ({row}, {column})")
    return matrix
