"""How much a block or a span of time stretches what goes through: Jacobians, singular values, bounds, eigenvalues."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.diagnostics.recurrences import VanishingBound
from thalweg.errors import ConfigError, ShapeError, nearest

Function = Callable[[Tensor], Tensor]
METHODS = ("auto", "dense", "lanczos")
# "auto" builds the Jacobian up to this many outputs, and up to this many entries for the whole batch.
_DENSE, _ENTRIES = 1024, 1 << 26
# Backward passes taken at once: more would only need more memory.
_TOGETHER = 64


@dataclass(frozen=True)
class SingularValues:
    """Singular values of the Jacobian at each point, float64. A leading B is there if the points had it.

    Attributes:
        largest: ``(B, k)``, falling: the first is the spectral norm.
        smallest: ``(B, k)``, rising; what is left of the direction that is lost most.
        largest_error, smallest_error: ``(B, k)``: a singular value lies within this of each.
        values: ``(B, min(M, D))``, falling, where the whole Jacobian was built; else None.
        method: "dense" or "lanczos".
        products: how many products of the Jacobian, or of its transpose, with a vector (of each point) it took.

    >>> print(jacobian_spectrum(lambda x: x * torch.tensor([3.0, 0.5]), torch.zeros(2)))
    dense, 2 products: largest 3, smallest 0.5 (error at most 3e-06)
    """

    largest: Tensor
    smallest: Tensor
    largest_error: Tensor
    smallest_error: Tensor
    values: Tensor | None
    method: str
    products: int

    def __str__(self) -> str:
        """One line, the extremes over all points."""
        if not self.largest.numel():
            return "no points"
        high, low = float(self.largest.amax()), float(self.smallest.amin())
        error = max(float(self.largest_error.amax()), float(self.smallest_error.amax()))
        where = f" over {len(self.largest)} points" if self.largest.dim() > 1 else ""
        ends = f"largest {high:.4g}, smallest {low:.4g}{where}"
        return f"{self.method}, {self.products} products: {ends} (error at most {error:.0e})"


def jacobian(function: Function | nn.Module, point: Tensor) -> Tensor:
    r"""The Jacobian :math:`J_{mn} = \partial f_m / \partial x_n` of a block at each point.

    Args:
        function: maps ``(D,)`` to ``(M,)``, or ``(B, D)`` to ``(B, M)`` each row by itself: a function, or a module in
            evaluation mode (dropout and batch statistics would tie rows together).
        point: ``(D,)`` or ``(B, D)``, of a floating type.
    Returns:
        ``(M, D)`` or ``(B, M, D)`` in the type of the point. M backward passes.

    >>> jacobian(lambda x: x.square(), torch.tensor([1.0, 3.0]))
    tensor([[2., 0.],
            [0., 6.]])
    """
    products = _Products(function, point)
    M, start = products.outputs, products.point
    output = products.value if point.dim() == 2 else products.value.unsqueeze(0)
    if not output.requires_grad:
        return point.new_zeros(*point.shape[:-1], M, point.shape[-1])
    chunks = [_pulled(output, [start], range(n, min(M, n + _TOGETHER)))[0] for n in range(0, M, _TOGETHER)]
    if chunks[0] is None:
        return point.new_zeros(*point.shape[:-1], M, point.shape[-1])
    found = torch.cat([chunk for chunk in chunks if chunk is not None]).to(point.dtype)  # (M, ..., D)
    return found if point.dim() == 1 else found.transpose(0, 1)


def jacobian_spectrum(
    function: Function | nn.Module,
    point: Tensor,
    *,
    k: int | None = None,
    method: str = "auto",
    max_steps: int | None = None,
    tol: float = 1e-6,
) -> SingularValues:
    r"""The singular values of a block's Jacobian: all of them, or the k at each end.

    ``"dense"`` builds the Jacobian by M backward passes and takes it apart, O(M D min(M, D)). ``"lanczos"`` needs
    products alone: the bidiagonalisation of Golub and Kahan (1965) from a random start on the smaller side, with full
    reorthogonalisation, two products a step, O(m^2 (M + D)). For each of its values a singular value lies within the
    residual, which is what the errors say. The largest come first; the smallest of an ill-conditioned Jacobian need
    nearly min(M, D) steps, and their errors then say so. Of a repeated value it sees one.

    Args:
        function, point: as in :func:`jacobian`.
        k: how many at each end, 1 when not given.
        method: ``"auto"`` is dense up to M = 1,024 outputs.
        max_steps: of Lanczos; min(M, D, 100) when not given. It stops earlier where the largest k are settled.
        tol: residual that is small enough, relative to the largest value found.

    Products with J itself are the derivative of J'u in u, so that the function must be differentiable twice in
    autograd (torch's fused recurrent kernels of a GPU are not; build the Jacobian).

    >>> scales = torch.linspace(0, 1, 3000)
    >>> found = jacobian_spectrum(lambda x: torch.cat((5 * x[:1], scales * x)), torch.ones(3000), k=1)
    >>> found.method, round(float(found.largest), 3)
    ('lanczos', 5.0)
    """
    check_request(point, method)
    products = _Products(function, point)
    B, D = products.rows
    count, size = 1 if k is None else k, min(D, products.outputs)
    if not 1 <= count <= size:
        raise ConfigError(f"`k` must lie in 1..min(M, D) = {size}, got {k}")
    small = products.outputs <= _DENSE and B * D * products.outputs <= _ENTRIES
    if method == "dense" or (method == "auto" and small):
        return _dense(function, point, count)
    steps = min(size, 100 if max_steps is None else max_steps)
    if steps < count:
        raise ConfigError(f"`max_steps` must be at least k = {count}, got {max_steps}")
    return _bidiagonal(products, count, steps, tol)


def check_request(point: Tensor, method: str = "auto") -> None:
    """Refuse a way to find a spectrum that is not known, and what is no point or batch of points."""
    if method not in METHODS:
        raise ConfigError(f"unknown method `{method}`; {nearest(method, METHODS)}")
    if point.dim() not in (1, 2) or not point.is_floating_point() or not point.shape[-1]:
        raise ShapeError(
            "`point` must be (D,) or (B, D) with D at least 1 and a floating type, "
            f"got {tuple(point.shape)} {point.dtype}"
        )


class _Products:
    """Products of the Jacobian at each point (B, D), and of its transpose, with vectors."""

    def __init__(self, function: Function | nn.Module, point: Tensor):
        check_request(point)
        self.flat = point.dim() == 1
        self.rows = point.view(-1, point.shape[-1]).shape
        self.point = point.detach().clone().requires_grad_()
        with torch.enable_grad():
            self.value = function(self.point)
            if self.value.dim() != point.dim() or self.value.shape[:-1] != point.shape[:-1] or not self.value.numel():
                wanted = "(M,)" if self.flat else f"({len(point)}, M)"
                if point.numel() or self.value.dim() != point.dim():
                    raise ShapeError(
                        f"the function must map {tuple(point.shape)} to {wanted}, got {tuple(self.value.shape)}"
                    )
        self.outputs = self.value.shape[-1]
        self.count = 0
        self._back: tuple[Tensor, Tensor] | None = None

    def back(self, vectors: Tensor) -> Tensor:
        """J'u: (B, M) to (B, D)."""
        self.count += 1
        if not self.value.requires_grad:
            return vectors.new_zeros(self.rows)
        u = vectors.to(self.value).view(self.value.shape)
        (found,) = torch.autograd.grad(self.value, self.point, u, retain_graph=True, allow_unused=True)
        return vectors.new_zeros(self.rows) if found is None else found.detach().view(self.rows).to(vectors)

    def forth(self, vectors: Tensor) -> Tensor:
        """J v: (B, D) to (B, M), as the derivative of J'u in u along v."""
        self.count += 1
        nothing = vectors.new_zeros(self.rows[0], self.outputs)
        if self._back is None:
            u = torch.zeros_like(self.value, requires_grad=True)
            if not self.value.requires_grad:
                return nothing
            (found,) = torch.autograd.grad(self.value, self.point, u, create_graph=True, allow_unused=True)
            if found is None or not found.requires_grad:
                return nothing
            self._back = (u, found)
        u, found = self._back
        v = vectors.to(found).view(found.shape)
        (image,) = torch.autograd.grad(found, u, v, retain_graph=True, allow_unused=True)
        return nothing if image is None else image.detach().view(nothing.shape).to(vectors)


def _dense(function: Function | nn.Module, point: Tensor, k: int) -> SingularValues:
    matrix = jacobian(function, point).double()
    values = torch.linalg.svdvals(matrix) if matrix.numel() else matrix.new_zeros(*matrix.shape[:-2], k)
    largest, smallest = values[..., :k], values.flip(-1)[..., :k]
    # Each entry is off by some roundings of its type; by Weyl's inequality no value moves by more than their norm.
    rounding = 8 * torch.finfo(point.dtype).eps
    error = (rounding * values[..., :1]).expand(largest.shape)
    return SingularValues(largest, smallest, error, error, values, "dense", matrix.shape[-2])


def _bidiagonal(products: _Products, k: int, steps: int, tol: float) -> SingularValues:
    """Golub and Kahan's bidiagonalisation, batched; started in the smaller space, so that no zero is made up."""
    B, D = products.rows
    turned = products.outputs < D
    forth, back = (products.back, products.forth) if turned else (products.forth, products.back)
    start, end = (products.outputs, D) if turned else (D, products.outputs)
    device, rounding = products.point.device, 8 * torch.finfo(products.point.dtype).eps
    draw = torch.Generator().manual_seed(0)  # on the host, so that every device starts alike
    v = torch.randn(B, start, generator=draw, dtype=torch.float64).to(device)
    v = v / v.norm(dim=1, keepdim=True)
    right = torch.zeros(B, steps, start, dtype=torch.float64, device=device)
    left = torch.zeros(B, steps, end, dtype=torch.float64, device=device)
    table = torch.zeros(B, steps, steps, dtype=torch.float64, device=device)
    ends: Any = None
    for step in range(steps):
        right[:, step] = v
        u, alpha = _fresh(forth(v), left[:, :step])
        left[:, step] = u
        table[:, step, step] = alpha
        v, beta = _fresh(back(u), right[:, : step + 1])
        scale = table[:, : step + 1, : step + 1].flatten(1).abs().amax(1)
        # Nothing new is left: what follows would be rounding.
        over = bool((beta <= rounding * scale).all()) or step + 1 == steps
        if over or (step + 1 >= k and step % 5 == 4):
            ends = _ends(table[:, : step + 1, : step + 1], beta, k, rounding)
            settled = bool((ends[2] <= tol * ends[0][:, :1]).all())
            if over or settled:
                break
        table[:, step, step + 1] = beta
    high, low, error, least = ends if not products.flat else (part[0] for part in ends)
    return SingularValues(high, low, error, least, None, "lanczos", products.count)


def _fresh(image: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The part of (B, N) that is orthogonal to the rows of (B, S, N), as a direction, and its length (B,)."""
    whole = image.norm(dim=1)
    image = orthogonal(image, kept)
    length = image.norm(dim=1)
    # What cancels to rounding is no direction.
    there = length > 1e-14 * whole
    length = torch.where(there, length, 0.0)
    return torch.where(there.unsqueeze(1), image / torch.where(there, length, 1.0).unsqueeze(1), 0.0), length


def orthogonal(image: Tensor, kept: Tensor) -> Tensor:
    """The part of (B, N) that is orthogonal to the rows of (B, S, N)."""
    for _ in range(2):  # twice is enough (Kahan and Parlett)
        image = image - (kept.transpose(1, 2) @ (kept @ image.unsqueeze(-1))).squeeze(-1)
    return image


def _ends(table: Tensor, beta: Tensor, k: int, rounding: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The k values at each end of bidiagonal matrices (B, m, m) with their residuals; NaN where fewer exist."""
    left, values, _ = torch.linalg.svd(table)
    residuals = left[:, -1].abs() * beta.unsqueeze(1) + rounding * values[:, :1]
    short = max(0, k - values.shape[1])
    blank = values.new_full((len(values), short), torch.nan)
    largest, errors = (torch.cat((part[:, :k], blank), 1) for part in (values, residuals))
    smallest, least = (torch.cat((part.flip(1)[:, :k], blank), 1) for part in (values, residuals))
    return largest, smallest, errors, least


@dataclass(frozen=True)
class SpanReport:
    """How a recurrence stretches what it carries: singular values of dh_T/dh_t for spans T - t = 1, 2, ...

    Attributes:
        spans: S lengths, rising.
        largest, smallest: ``(S, B)`` singular values, float64; the largest is the norm.
        bound: ``(S,)`` delta to the power of the span, where a :class:`VanishingBound` was given; else None.

    >>> from thalweg.diagnostics import vanishing_bound
    >>> half = vanishing_bound(0.5 * torch.eye(3))
    >>> report = span_spectra(lambda x, h: 0.5 * h, torch.ones(1, 3), [None] * 4, bound=half)
    >>> print(report)
    span        largest    smallest    delta^span
    1             0.5         0.5           0.5
    2            0.25        0.25          0.25
    3           0.125       0.125         0.125
    4          0.0625      0.0625        0.0625
    """

    spans: tuple[int, ...]
    largest: Tensor
    smallest: Tensor
    bound: Tensor | None

    @property
    def rate(self) -> float:
        """The factor a step by which the norm changes over the longest span, in the middle of the batch."""
        return float(self.largest[-1].median()) ** (1 / self.spans[-1]) if self.largest.numel() else float("nan")

    def __str__(self) -> str:
        """A row a span, in the middle of the batch (median)."""
        lines = [
            f"{'span':<8}{'largest':>11}{'smallest':>12}" + (f"{'delta^span':>14}" if self.bound is not None else "")
        ]
        for n, span in enumerate(self.spans):
            high, low = (float(part[n].median()) if part.numel() else 0.0 for part in (self.largest, self.smallest))
            limit = "" if self.bound is None else f"{float(self.bound[n]):>14.4g}"
            lines.append(f"{span:<8}{high:>9.4g}{low:>12.4g}{limit}")
        return "\n".join(lines)


def span_spectra(
    step: Callable[[Any, Tensor], Tensor],
    state: Tensor,
    inputs: Sequence[Any],
    *,
    spans: Sequence[int] | None = None,
    bound: VanishingBound | None = None,
) -> SpanReport:
    r"""Singular values of :math:`\partial h_T / \partial h_{T-s}` of a recurrence, for spans s up to T.

    Args:
        step: ``(x_t, h_{t-1} (B, D)) -> h_t (B, D)``, each row by itself: a cell. An LSTM's state is h and c side by
            side.
        state: ``(B, D)`` h_0.
        inputs: T of what the step reads.
        spans: lengths; 1, 2, ..., T when not given.
        bound: of the recurrence, for comparison.

    One pass forward and D passes back serve all spans: O(D T) steps, O(S B D^2) memory; D is limited to 1,024.

    >>> cell = torch.nn.RNNCell(2, 3)
    >>> report = span_spectra(lambda x, h: cell(x, h), torch.zeros(4, 3), torch.randn(5, 4, 2))
    >>> report.largest.shape, bool((report.largest[0] > report.largest[-1]).all())
    (torch.Size([5, 4]), True)
    """
    T, D = len(inputs), state.shape[-1]
    if state.dim() != 2 or not T or not D or D > _DENSE:
        got = f"{tuple(state.shape)} and {T}"
        raise ShapeError(f"`state` must be (B, D) with D in 1..{_DENSE} and `inputs` at least one, got {got}")
    chosen = tuple(range(1, T + 1)) if spans is None else tuple(sorted(set(spans)))
    if not chosen or chosen[0] < 1 or chosen[-1] > T:
        raise ConfigError(f"`spans` must lie in 1..T = {T}, got {list(chosen)}")
    with torch.enable_grad():
        states = [state.detach().clone().requires_grad_()]
        for x in inputs:
            states.append(step(x, states[-1]))
            if states[-1].shape != state.shape:
                got = tuple(states[-1].shape)
                raise ShapeError(f"a step must keep the state's shape {tuple(state.shape)}, got {got}")
    found = graph_jacobians(states[-1], [states[T - span] for span in chosen]).double()
    values = torch.linalg.svdvals(found) if found.numel() else found.new_zeros(len(chosen), 0, 1)
    limit = None if bound is None else torch.tensor([bound.at(span) for span in chosen], dtype=torch.float64)
    return SpanReport(chosen, values[..., 0], values[..., -1], limit)


def graph_jacobians(output: Tensor, points: Sequence[Tensor], *, position: int | None = None) -> Tensor:
    r"""Jacobians of a tensor that was computed from others, with respect to each of them: one pass back a feature.

    Args:
        output: ``(B, M)`` in a graph, each row from the same row of the points.
        points: S tensors ``(B, D)`` of that graph; ``(B, T, D)`` where ``position`` says which of T is looked at.
    Returns:
        ``(S, B, M, D)``; 0 for a point that the output does not depend on. The graph stays.

    >>> x = torch.ones(1, 2, requires_grad=True)
    >>> y = 3 * x
    >>> graph_jacobians(y.square(), [x, y])[:, 0].diagonal(dim1=1, dim2=2)
    tensor([[18., 18.],
            [ 6.,  6.]])
    """
    B, M = output.shape
    D = points[0].shape[-1]
    found = torch.zeros(len(points), B, M, D, dtype=output.dtype, device=output.device)
    if not output.requires_grad:
        return found
    for start in range(0, M, _TOGETHER):
        chunk = range(start, min(M, start + _TOGETHER))
        for n, rows in enumerate(_pulled(output, points, chunk)):
            if rows is not None:
                found[n, :, start : start + len(chunk)] = (
                    rows if position is None else rows[:, :, position]
                ).transpose(0, 1)
    return found


def _pulled(output: Tensor, points: Sequence[Tensor], features: range) -> list[Tensor | None]:
    """Gradients of some features, ``(features, *point)`` each: at once where every operation allows it."""
    units = torch.zeros(len(features), *output.shape, dtype=output.dtype, device=output.device)
    units[range(len(features)), :, list(features)] = 1
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an operation that is done one by one warns of it
            return list(torch.autograd.grad(output, list(points), units, is_grads_batched=True, **options))
    except (RuntimeError, UserWarning):
        singly = [torch.autograd.grad(output, list(points), unit, **options) for unit in units]
        return [None if rows[0] is None else torch.stack(rows) for rows in zip(*singly, strict=True)]
