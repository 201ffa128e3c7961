"""Kernels as objects: what a kernel offers, and how kernels are put together."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.limits import check_numbers


@dataclass(frozen=True)
class Prepared:
    """N items as a kernel wants them: tensors whose first axis counts the items. A part is taken by slices and indices.

    Attributes:
        tensors: each ``(N, ...)``, on one device.
        inner: what the parts of a kernel that has parts have prepared.
        kind: what the items are, in words; items of two kinds have no kernel.
        array: whether answers are arrays of numpy, as the items were not given in a tensor.

    >>> from thalweg.energies import Linear
    >>> Linear().prepare([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])[1:].tensors
    (tensor([[3., 4.],
            [5., 6.]], dtype=torch.float64),)
    """

    tensors: tuple[Tensor, ...] = ()
    inner: tuple[Prepared, ...] = ()
    kind: str = ""
    array: bool = False

    def __len__(self) -> int:
        return len(self.tensors[0]) if self.tensors else len(self.inner[0])

    def __getitem__(self, which: slice | Tensor) -> Prepared:
        return self._each(lambda tensor: tensor[which])

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.tensors[0].device if self.tensors else self.inner[0].device

    @property
    def table(self) -> Tensor:
        """The rows of numbers, ``(N, D)``, of a kernel of vectors or of features."""
        return self.inner[0].table if self.inner else self.tensors[0]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Prepared:
        """The same elsewhere, or in another floating-point type; symbols stay whole numbers."""
        return self._each(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None))

    def _each(self, change: Any) -> Prepared:
        tensors = tuple(change(tensor) for tensor in self.tensors)
        return Prepared(tensors, tuple(each._each(change) for each in self.inner), self.kind, self.array)


class Kernel(ABC):
    r"""A symmetric function of two items with :math:`k(x, z) = \langle \phi(x), \phi(z) \rangle` for some features phi.

    Called with N items it gives their Gram matrix ``(N, N)``, with further M items ``(N, M)``; see
    :func:`~thalweg.energies.gram` for one in blocks. ``a + b``, ``a * b`` and ``2.0 * a`` are kernels again. Kernels
    are immutable, compared by their settings, and shared by clones.

    What a solver wants is two steps. :meth:`prepare` reads and checks items once; :meth:`block` then gives any
    rectangle of the Gram matrix from slices of what was prepared, for vectors by one matrix product and elementwise
    work, without looking at the host:

    >>> from thalweg.energies import RBF
    >>> kernel = RBF(gamma=0.5)
    >>> items = kernel.prepare(torch.tensor([[0.0], [1.0], [2.0]]))
    >>> kernel.block(items[:1], items[torch.tensor([2, 0])])
    tensor([[0.1353, 1.0000]])

    A kernel of your own is a frozen dataclass with these two. ``positive`` says that no Gram matrix has a negative
    eigenvalue, by construction; where it is False, those of training sets are checked. ``vectors`` says that items are
    rows of numbers.
    """

    positive: bool = False
    vectors: bool = False

    @abstractmethod
    def prepare(self, X: Any, *, device: torch.device | str | None = None) -> Prepared:
        """Items read and checked, on ``device`` where it is given."""

    @abstractmethod
    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """The kernel of each of n items with each of m, ``(n, m)``; differentiable for vectors."""

    def diagonal_of(self, items: Prepared) -> Tensor:
        """k(x, x) of prepared items, ``(N,)``."""
        if not len(items):
            return self.block(items, items).diagonal()
        # Squares of 16 along the diagonal, so that nothing of size N^2 is made.
        squares = (items[start : start + 16] for start in range(0, len(items), 16))
        return torch.cat([self.block(each, each).diagonal() for each in squares])

    @property
    def waits(self) -> bool:
        """Whether something is still to be taken from a training set."""
        return any(part.waits for _, part in self._parts())

    def settled(self, X: Any) -> Kernel:
        """This kernel with what it takes from a training set fixed; itself where there is no such thing."""
        if not self.waits:
            return self
        return dataclasses.replace(self, **{name: part.settled(X) for name, part in self._parts()})  # pyright: ignore[reportArgumentType, reportCallIssue]

    def _parts(self) -> list[tuple[str, Kernel]]:
        fields = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        named = ((each.name, getattr(self, each.name)) for each in fields)
        return [(name, part) for name, part in named if isinstance(part, Kernel)]

    def __call__(self, X: Any, Z: Any = None) -> Any:
        """Gram matrix ``(N, N)`` of X, or ``(N, M)`` of X with Z: a tensor where X is one, otherwise an array."""
        kernel = self.settled(X) if Z is None else self
        rows = kernel.prepare(X)
        columns = rows if Z is None else kernel.prepare(Z, device=rows.device)
        check_alike(rows, columns)
        return answer(kernel.block(rows, columns), rows)

    def diagonal(self, X: Any) -> Any:
        """k(x, x) of each item, ``(N,)``."""
        kernel = self.settled(X)
        items = kernel.prepare(X)
        return answer(kernel.diagonal_of(items), items)

    def __add__(self, other: Kernel) -> Kernel:
        return Sum(self, other) if isinstance(other, Kernel) else NotImplemented

    def __mul__(self, other: Kernel | float) -> Kernel:
        if isinstance(other, Kernel):
            return Product(self, other)
        return Scaled(self, float(other)) if isinstance(other, Real) else NotImplemented

    __rmul__ = __mul__

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # nothing in it changes: clones of a machine share it, and what it holds


def answer(values: Tensor, items: Prepared) -> Any:
    """Values as the items were given: an array, or a tensor."""
    return values.detach().cpu().numpy() if items.array else values


def check_alike(rows: Prepared, columns: Prepared) -> None:
    """Refuse two lists of items that have no kernel."""
    if rows.kind != columns.kind:
        raise ShapeError(f"items must be alike, got {rows.kind} and {columns.kind}; pass the same kind on both sides")


@dataclass(frozen=True, repr=False)
class _Pair(Kernel):
    """A kernel of two kernels of the same items."""

    one: Kernel
    other: Kernel

    @property
    def positive(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the parts are."""
        return self.one.positive and self.other.positive

    @property
    def vectors(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a part is one of vectors."""
        return self.one.vectors or self.other.vectors

    def prepare(self, X: Any, *, device: torch.device | str | None = None) -> Prepared:
        """Read and check items; see :class:`Kernel`."""
        inner = tuple(part.prepare(X, device=device) for part in (self.one, self.other))
        return Prepared((), inner, " and ".join(dict.fromkeys(each.kind for each in inner)), inner[0].array)


@dataclass(frozen=True, repr=False)
class Sum(_Pair):
    """k(x, z) = a(x, z) + b(x, z): the features of both, beside one another.

    >>> from thalweg.energies import Linear, Polynomial
    >>> (Linear() + Polynomial())([[1.0], [2.0]]), Linear() + Polynomial(degree=3)
    (array([[ 5., 11.],
           [11., 29.]]), Linear() + Polynomial(degree=3, offset=1.0, scale=1.0))
    """

    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """Each row with each column, ``(n, m)``."""
        one, other = zip(rows.inner, columns.inner, strict=True)
        return self.one.block(*one) + self.other.block(*other)

    def diagonal_of(self, items: Prepared) -> Tensor:
        """Each item with itself, ``(N,)``."""
        return self.one.diagonal_of(items.inner[0]) + self.other.diagonal_of(items.inner[1])

    def __repr__(self) -> str:
        return f"{self.one!r} + {self.other!r}"


@dataclass(frozen=True, repr=False)
class Product(_Pair):
    """k(x, z) = a(x, z) b(x, z): every product of two features.

    >>> from thalweg.energies import RBF, Linear
    >>> (Linear() * Linear())([[1.0], [2.0]]), Linear() * (Linear() + RBF(2.0))
    (array([[ 1.,  4.],
           [ 4., 16.]]), Linear() * (Linear() + RBF(gamma=2.0)))
    """

    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """Each row with each column, ``(n, m)``."""
        one, other = zip(rows.inner, columns.inner, strict=True)
        return self.one.block(*one) * self.other.block(*other)

    def diagonal_of(self, items: Prepared) -> Tensor:
        """Each item with itself, ``(N,)``."""
        return self.one.diagonal_of(items.inner[0]) * self.other.diagonal_of(items.inner[1])

    def __repr__(self) -> str:
        return f"{_in_product(self.one)} * {_in_product(self.other)}"


@dataclass(frozen=True, repr=False)
class _Changed(Kernel):
    """A kernel made of one other."""

    kernel: Kernel

    @property
    def positive(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the parts are."""
        return self.kernel.positive

    @property
    def vectors(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a part is one of vectors."""
        return self.kernel.vectors

    def prepare(self, X: Any, *, device: torch.device | str | None = None) -> Prepared:
        """Read and check items; see :class:`Kernel`."""
        items = self.kernel.prepare(X, device=device)
        return Prepared(self._of(items), (items,), items.kind, items.array)

    def _of(self, items: Prepared) -> tuple[Tensor, ...]:
        return ()


@dataclass(frozen=True, repr=False)
class Scaled(_Changed):
    """k(x, z) = factor a(x, z), with a factor above 0; written ``2.0 * a``.

    >>> from thalweg.energies import Linear
    >>> 2.0 * Linear(), (2.0 * Linear())([[3.0]])
    (2.0 * Linear(), array([[18.]]))
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "Scaled", 0, float("inf"), "factor", whole=False, strict=True)

    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """Each row with each column, ``(n, m)``."""
        return self.factor * self.kernel.block(rows.inner[0], columns.inner[0])

    def diagonal_of(self, items: Prepared) -> Tensor:
        """Each item with itself, ``(N,)``."""
        return self.factor * self.kernel.diagonal_of(items.inner[0])

    def __repr__(self) -> str:
        return f"{self.factor!r} * {_in_product(self.kernel)}"


@dataclass(frozen=True)
class Normalised(_Changed):
    r""":math:`k(x, z) = a(x, z) / \sqrt{a(x, x)\, a(z, z)}`: features of length 1; 0 for an item without any.

    >>> from thalweg.energies import Linear
    >>> Normalised(Linear())([[3.0, 4.0], [0.0, 2.0]])
    array([[1. , 0.8],
           [0.8, 1. ]])
    """

    def block(self, rows: Prepared, columns: Prepared) -> Tensor:
        """Each row with each column, ``(n, m)``."""
        inner = self.kernel.block(rows.inner[0], columns.inner[0])
        return inner * rows.tensors[0].unsqueeze(1) * columns.tensors[0]

    def diagonal_of(self, items: Prepared) -> Tensor:
        """Each item with itself, ``(N,)``."""
        return (items.tensors[0] > 0).to(items.tensors[0].dtype)

    def _of(self, items: Prepared) -> tuple[Tensor, ...]:
        sizes = self.kernel.diagonal_of(items)
        return (torch.where(sizes > 0, sizes.rsqrt(), 0.0),)


def _in_product(kernel: Kernel) -> str:
    return f"({kernel!r})" if isinstance(kernel, Sum) else repr(kernel)
