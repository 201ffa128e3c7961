"""How a function bends at a point: the spectrum of its Hessian, whole or at its ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thalweg.diagnostics.jacobians import check_request, lanczos_steps, orthogonal
from thalweg.errors import ConfigError, ShapeError

__all__ = ["ConvexConcave", "Convexity", "Spectrum", "convex_concave_report", "convexity", "hessian_spectrum"]

Function = Callable[[Tensor], Tensor]
# "auto" builds the Hessian up to this many features, and up to this many entries for the whole batch.
_DENSE, _ENTRIES = 2000, 1 << 27


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the Hessian at each point, float64. A leading B is there if the points had it.

    Attributes:
        smallest: ``(B, k)``, rising.
        largest: ``(B, k)``, falling.
        smallest_error, largest_error: ``(B, k)``: an eigenvalue lies within this of each value; see
            :func:`hessian_spectrum`.
        eigenvalues: ``(B, D)``, rising, where the whole Hessian was built; else None.
        method: "dense" or "lanczos".
        derivative: "autograd", or "differences" where the gradient itself cannot be differentiated.
        products: how many products of the Hessian with a vector (of each point) it took.

    >>> print(hessian_spectrum(lambda x: (x[..., 0] ** 2 - x[..., 1] ** 2), torch.zeros(2)))
    dense, 2 products by autograd: smallest -2, largest 2 (error at most 2e-06)
    """

    smallest: Tensor
    largest: Tensor
    smallest_error: Tensor
    largest_error: Tensor
    eigenvalues: Tensor | None
    method: str
    derivative: str
    products: int

    def __str__(self) -> str:
        """One line, the extremes over all points."""
        if not len(self.smallest):
            return "no points"
        low, high = float(self.smallest.amin()), float(self.largest.amax())
        error = max(float(self.smallest_error.amax()), float(self.largest_error.amax()))
        where = f" over {len(self.smallest)} points" if self.smallest.dim() > 1 else ""
        return (
            f"{self.method}, {self.products} products by {self.derivative}: smallest {low:.4g}, largest {high:.4g}"
            f"{where} (error at most {error:.0e})"
        )


def hessian_spectrum(
    function: Function,
    point: Tensor,
    *,
    k: int | None = None,
    method: str = "auto",
    max_steps: int | None = None,
    tol: float = 1e-8,
) -> Spectrum:
    r"""The eigenvalues of :math:`\nabla^2 f` at a point: all of them, or the k at each end.

    ``"dense"`` builds the Hessian by D products of it with unit vectors and takes it apart, O(D) gradients and O(D^3).
    ``"lanczos"`` needs products alone: m steps from a random start with full reorthogonalisation (Lanczos 1950; Paige
    1971), O(m) gradients and O(m^2 D). For each of its values :math:`\theta` with vector u an eigenvalue lies within
    the residual :math:`\|Hu - \theta u\|`, which is what the errors say; the values at the ends never lie outside the
    spectrum, and they approach its ends with probability one over the start. Of a repeated eigenvalue it sees one.

    Args:
        function: maps ``(D,)`` to a number or ``(B, D)`` to ``(B,)``, each row by itself, as energies do.
        point: ``(D,)`` or ``(B, D)``; the products are computed in its type, the eigenvalues in float64.
        k: how many at each end, 1 when not given.
        method: ``"auto"`` is dense up to D = 2,000.
        max_steps: of Lanczos; min(D, 300) when not given. It stops earlier where all residuals are small enough.
        tol: residual that is small enough, relative to the largest eigenvalue found.

    A function whose gradient has no derivative in autograd is differentiated by central differences of its gradient.

    >>> scales = torch.tensor([-1.0, *torch.linspace(0, 1, 5000).tolist(), 3.0])
    >>> found = hessian_spectrum(lambda x: 0.5 * (scales * x * x).sum(-1), torch.zeros(5002), tol=1e-5)
    >>> found.method, found.largest, found.smallest
    ('lanczos', tensor([3.0000], dtype=torch.float64), tensor([-1.0000], dtype=torch.float64))
    """
    check_request(point, method)
    size, rows = point.shape[-1], point.shape[:-1].numel()
    count = 1 if k is None else k
    if not 1 <= count <= size:
        raise ConfigError(f"`k` must lie in 1..D with D = {size}, got {k}")
    hessian, small = _Hessian(function, point), size <= _DENSE and rows * size * size <= _ENTRIES
    if method == "dense" or (method == "auto" and small):
        return _dense(hessian, count)
    return _lanczos(hessian, count, lanczos_steps(size, count, max_steps, 300), tol)


class _Hessian:
    """Products of the Hessian at each point (B, D) with a vector (B, D), float64 out."""

    def __init__(self, function: Function, point: Tensor):
        self.function, self.shape = function, point.shape
        self.products, self.derivative = 0, "autograd"
        self.point = point.detach().clone().requires_grad_()
        self.gradient = self._gradient(self.point, graph=True)
        self.rows = point.view(-1, point.shape[-1]).shape
        self._choose()

    def _gradient(self, point: Tensor, *, graph: bool = False) -> Tensor:
        with torch.enable_grad():
            values = self.function(point)
            if values.shape != point.shape[:-1] and values.numel() != point.shape[:-1].numel():
                raise ShapeError(
                    f"the function must map {tuple(point.shape)} to one number for each point, "
                    f"got {tuple(values.shape)}"
                )
            if not values.requires_grad:  # a constant
                return torch.zeros_like(point)
            (found,) = torch.autograd.grad(values.sum(), point, create_graph=graph, allow_unused=True)
        return torch.zeros_like(point) if found is None else found

    def _choose(self) -> None:
        """Whether autograd knows the second derivative: a gradient without a graph may only be a constant."""
        vector = torch.randn(self.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        vector = (vector / vector.norm(dim=-1, keepdim=True)).to(self.point)
        try:
            by_graph = self._by_autograd(vector)
        except RuntimeError as error:
            if "differentia" not in str(error) and "derivative" not in str(error):
                raise
            self.derivative = "differences"
            return
        if not by_graph.any():
            floor = 100 * torch.finfo(self.point.dtype).eps ** (2 / 3) * self.gradient.detach().norm()
            if bool(self._by_differences(vector).norm() > floor):
                self.derivative = "differences"

    def _by_autograd(self, vector: Tensor) -> Tensor:
        if not self.gradient.requires_grad:
            return torch.zeros_like(vector)
        found = torch.autograd.grad(self.gradient, self.point, vector, retain_graph=True, allow_unused=True)[0]
        return torch.zeros_like(vector) if found is None else found

    def _by_differences(self, vector: Tensor) -> Tensor:
        here = self.point.detach()
        scale = vector.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(here.dtype).tiny)
        step = torch.finfo(here.dtype).eps ** (1 / 3) * (1 + here.norm(dim=-1, keepdim=True))
        ahead, behind = (
            self._gradient((here + sign * step * vector / scale).requires_grad_()).detach() for sign in (1, -1)
        )
        return (ahead - behind) * (scale / (2 * step))

    def __call__(self, vectors: Tensor) -> Tensor:
        """(B, D) to (B, D)."""
        self.products += 1
        vectors = vectors.to(self.point).view(self.shape)
        found = self._by_autograd(vectors) if self.derivative == "autograd" else self._by_differences(vectors)
        return found.detach().double().view(self.rows)

    @property
    def rounding(self) -> float:
        """The relative error of a product."""
        eps = torch.finfo(self.point.dtype).eps
        return 8 * (eps if self.derivative == "autograd" else eps ** (2 / 3))

    def report(self, low: Tensor, high: Tensor, errors: tuple[Tensor, Tensor], every: Tensor | None, method: str):
        """The spectrum, in the shape of the points."""
        if len(self.shape) == 1:
            low, high, errors, every = (
                low[0],
                high[0],
                (errors[0][0], errors[1][0]),
                None if every is None else every[0],
            )
        return Spectrum(low, high, *errors, every, method, self.derivative, self.products)


def _dense(hessian: _Hessian, k: int) -> Spectrum:
    batch, size = hessian.rows
    matrix = torch.empty(batch, size, size, dtype=torch.float64, device=hessian.point.device)
    unit = torch.zeros(hessian.rows, dtype=torch.float64, device=matrix.device)
    for column in range(size):
        unit[:, column] = 1.0
        matrix[:, :, column] = hessian(unit)
        unit[:, column] = 0.0
    skew = 0.5 * (matrix - matrix.transpose(1, 2))
    values = torch.linalg.eigvalsh(matrix - skew)
    # By Weyl's inequality no eigenvalue moves by more than the norm of what was taken off.
    error = hessian.rounding * values.abs().amax(1) + skew.flatten(1).norm(dim=1)
    error = error.unsqueeze(1).expand(batch, k)
    return hessian.report(values[:, :k], values.flip(1)[:, :k], (error, error), values, "dense")


def _lanczos(hessian: _Hessian, k: int, steps: int, tol: float) -> Spectrum:
    """Batched; an item that has found an invariant subspace goes on with vectors of zeros."""
    batch, size = hessian.rows
    device = hessian.point.device
    draw = torch.Generator().manual_seed(0)  # on the host, so that every device starts alike
    vector = torch.randn(batch, size, generator=draw, dtype=torch.float64).to(device)
    vector = vector / vector.norm(dim=1, keepdim=True)
    basis = torch.zeros(batch, steps, size, dtype=torch.float64, device=device)
    table = torch.zeros(batch, steps, steps, dtype=torch.float64, device=device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    lengths = torch.zeros(batch, dtype=torch.long, device=device)
    low = high = low_error = high_error = table.new_zeros(batch, k)
    for step in range(steps):
        basis[:, step] = vector
        lengths += alive
        image = hessian(vector)
        table[:, step, step] = (image * vector).sum(1)
        image = orthogonal(image, basis[:, : step + 1])
        length = image.norm(dim=1)
        scale = table[:, : step + 1, : step + 1].flatten(1).abs().amax(1)
        alive = alive & (length > hessian.rounding * scale) & (length > 0)
        vector = torch.where(alive.unsqueeze(1), image / torch.where(alive, length, 1.0).unsqueeze(1), 0.0)
        last = step + 1 == steps
        over = last or not bool(alive.any())
        if over or (step + 1 >= k and step % 5 == 4):
            low, high, low_error, high_error = _ends(table[:, : step + 1, : step + 1], lengths, length, k, hessian)
            limit = tol * torch.maximum(low.abs(), high.abs())[:, :1]
            if over or not bool((torch.maximum(low_error, high_error) > limit).any()):  # NaN: there are no more
                break
        table[:, step, step + 1] = table[:, step + 1, step] = torch.where(alive, length, 0.0)
    return hessian.report(low, high, (low_error, high_error), None, "lanczos")


def _ends(table: Tensor, lengths: Tensor, beyond: Tensor, k: int, hessian: _Hessian):
    """The k values at each end of the tridiagonal matrices and their residuals, (B, k) each; NaN where fewer exist."""
    steps = table.shape[1]
    inside = torch.arange(steps, device=table.device) < lengths.unsqueeze(1)
    # What lies past an item's own length becomes eigenvalues above all others, which are then left out.
    above = 1 + 4 * table.abs().flatten(1).amax(1, keepdim=True)
    own = torch.where(inside.unsqueeze(1) & inside.unsqueeze(2), table, 0.0)
    values, vectors = torch.linalg.eigh(own + torch.where(inside, 0.0, above).diag_embed())
    tail = vectors.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, steps)).squeeze(1).abs()
    norm = torch.where(inside, values, 0.0).abs().amax(1, keepdim=True)
    residuals = tail * beyond.unsqueeze(1) + hessian.rounding * norm
    up = torch.arange(k, device=table.device).expand(len(table), k)
    down = lengths.unsqueeze(1) - 1 - up
    ends = []
    for place in (up, down):
        there = (place >= 0) & (place < torch.minimum(lengths, lengths.new_tensor(steps)).unsqueeze(1))
        index = place.clamp(0, steps - 1)
        ends.append([torch.where(there, x.gather(1, index), torch.nan) for x in (values, residuals)])
    (low, low_error), (high, high_error) = ends
    return low, high, low_error, high_error


@dataclass(frozen=True)
class Convexity:
    """How a function bends at each point: ``kinds`` of "convex", "concave", "neither" and "flat", one for each point.

    ``lowest`` and ``highest`` curvature, ``(B,)`` or a number each, as float64 tensors; a curvature within
    ``tolerance`` (same shape) of zero counts as zero.

    >>> found = convexity(lambda x: x.square().sum(-1), torch.zeros(3))
    >>> found.kind, float(found.lowest), float(found.highest)
    ('convex', 2.0, 2.0)
    """

    kinds: tuple[str, ...]
    lowest: Tensor
    highest: Tensor
    tolerance: Tensor
    spectrum: Spectrum

    @property
    def kind(self) -> str:
        """What holds at all points: flat and convex ones together are convex, convex and concave ones neither."""
        found = set(self.kinds) - {"flat"}
        return found.pop() if len(found) == 1 else "neither" if found else "flat"

    def __str__(self) -> str:
        """One line."""
        if not self.lowest.numel():
            return "no points"
        low, high = float(self.lowest.amin()), float(self.highest.amax())
        return f"{self.kind}: curvature from {low:.4g} to {high:.4g}, tolerance {float(self.tolerance.amax()):.1g}"


def convexity(function: Function, point: Tensor, *, tolerance: float | None = None, **options: Any) -> Convexity:
    """Whether a function is convex at a point: its Hessian has no eigenvalue below zero there.

    "convex" where the smallest eigenvalue is at least -tolerance, "concave" where the largest is at most tolerance,
    "flat" where both hold, "neither" where none does. By default the tolerance is 100 times the rounding of the
    Hessian, and never less than the error of the eigenvalues; a given one is used as it is.

    Arguments and ``options`` as in :func:`hessian_spectrum`. A Hessian says how the function bends at the point alone;
    a convex function passes at every point.

    >>> print(convexity(lambda x: torch.logsumexp(x, -1), torch.tensor([[0.0, 1.0], [3.0, 3.0]])))
    convex: curvature from 0 to 0.5, tolerance 5e-05
    """
    found = hessian_spectrum(function, point, **options)
    low, high = found.smallest[..., 0], found.largest[..., 0]
    if tolerance is None:
        eps = torch.finfo(point.dtype).eps
        relative = 800 * (eps if found.derivative == "autograd" else eps ** (2 / 3))
        limit = relative * torch.maximum(low.abs(), high.abs())
        limit = torch.maximum(limit, torch.maximum(found.smallest_error[..., 0], found.largest_error[..., 0]))
    else:
        limit = torch.full_like(low, tolerance)
    return _judged(found, limit)


def _judged(found: Spectrum, limit: Tensor) -> Convexity:
    """What a spectrum says where values within the limit count as zero."""
    low, high = found.smallest[..., 0], found.largest[..., 0]
    up, down = (low >= -limit).view(-1).tolist(), (high <= limit).view(-1).tolist()
    names = {(True, True): "flat", (True, False): "convex", (False, True): "concave", (False, False): "neither"}
    return Convexity(tuple(names[pair] for pair in zip(up, down, strict=True)), low, high, limit, found)


class Split(Protocol):
    """An energy as a sum of a convex and a concave part, each mapping (B, D) to (B,); a Hopfield memory is one."""

    def convex(self, q: Tensor) -> Tensor:
        """The convex part."""
        ...

    def concave(self, q: Tensor) -> Tensor:
        """The concave part."""
        ...


@dataclass(frozen=True)
class ConvexConcave:
    """Whether both parts of a convex-concave energy bend as they should; printed, it is a table.

    >>> class Cap:
    ...     def convex(self, q): return q.square().sum(-1)
    ...     def concave(self, q): return -torch.logsumexp(q, -1)
    >>> print(convex_concave_report(Cap(), torch.zeros(2)))
    part         should be  is        lowest     highest    tolerance
    E1 convex    convex     convex    2          2          0.0002
    -E2 convex   convex     convex    0          0.5        0.0002
    E1 + E2                 convex    1.5        2          0.0002
    """

    convex: Convexity
    negated_concave: Convexity
    energy: Convexity

    @property
    def holds(self) -> bool:
        """Whether E1 and -E2 are convex at every point."""
        return all(part.kind in ("convex", "flat") for part in (self.convex, self.negated_concave))

    def __str__(self) -> str:
        """A table of four lines."""
        lines = [f"{'part':<13}{'should be':<11}{'is':<10}{'lowest':<11}{'highest':<11}tolerance"]
        parts = (("E1 convex", "convex", self.convex), ("-E2 convex", "convex", self.negated_concave))
        for name, wanted, part in (*parts, ("E1 + E2", "", self.energy)):
            if not part.lowest.numel():
                return "no points"
            low, high = float(part.lowest.amin()), float(part.highest.amax())
            limit = float(part.tolerance.amax())
            lines.append(f"{name:<13}{wanted:<11}{part.kind:<10}{low:<11.4g}{high:<11.4g}{limit:.1g}")
        return "\n".join(lines)


def convex_concave_report(energy: Split, point: Tensor, **options: Any) -> ConvexConcave:
    """The convexity of E1 and of -E2 at a point, for an energy E = E1 + E2 that says which is which; and of E.

    That E1 is convex and E2 concave is what makes the convex-concave procedure descend (Yuille and Rangarajan 2003).
    ``energy`` is any object with ``convex(q)`` and ``concave(q)``; ``options`` as in :func:`convexity`. The tolerance
    is the largest of the three: where one part has gone flat its curvature is rounding on the scale of the other.

    >>> class Tilted:
    ...     def convex(self, q): return -q.square().sum(-1)
    ...     def concave(self, q): return q.sum(-1)
    >>> report = convex_concave_report(Tilted(), torch.zeros(1, 2))
    >>> report.holds, report.convex.kind, report.negated_concave.kind
    (False, 'concave', 'flat')
    """
    parts = [
        convexity(energy.convex, point, **options),
        convexity(lambda q: -energy.concave(q), point, **options),
        convexity(lambda q: energy.convex(q) + energy.concave(q), point, **options),
    ]
    limit = torch.stack([part.tolerance for part in parts]).amax(0)
    return ConvexConcave(*(_judged(part.spectrum, limit) for part in parts))
