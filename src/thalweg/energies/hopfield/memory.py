"""The modern Hopfield network: an associative memory with an energy that falls while it remembers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from thalweg.energies.hopfield.files import read_arguments, save_memory
from thalweg.energies.hopfield.landscape import Landscape
from thalweg.energies.hopfield.post import Identity, PostTransform, post_transform
from thalweg.energies.hopfield.storage import PatternStore
from thalweg.errors import CheckpointError, ConfigError, ShapeError
from thalweg.inference.cccp import Descent
from thalweg.inference.search.protocol import real
from thalweg.kernels import memory as kernels
from thalweg.kernels.tracing import traced
from thalweg.layers.hopfield.separation_maps import Separation, Softmax
from thalweg.layers.hopfield.separation_maps import separation as named_separation


@dataclass(frozen=True)
class Retrieval:
    """Where queries came to rest in a memory, and how. S is the largest number of steps that a query made.

    Attributes:
        state: the shape of the queries, ``(B, D)``.
        steps: ``(B,)`` int64, the updates of each query.
        converged: ``(B,)`` bool, whether its last update moved it by no more than the tolerance.

    :attr:`weights` are made when they are first asked for: for many patterns they are by far the largest part. So is
    the cut of :attr:`energies`, for which the host must wait for a GPU.

    >>> found = HopfieldMemory(torch.eye(2), beta=50.0).retrieve(torch.tensor([[0.9, 0.2]]))
    >>> found.state.round(), found.steps, found.weights.round()
    (tensor([[1., 0.]]), tensor([2]), tensor([[1., 0.]]))
    """

    state: Tensor
    steps: Tensor
    converged: Tensor
    _energies: Tensor = field(repr=False, compare=False)
    _weigh: Callable[[], Tensor] = field(repr=False, compare=False)

    @cached_property
    def energies(self) -> Tensor:
        """``(B, S + 1)`` from the query on; past a query's own steps its last energy is repeated.

        >>> HopfieldMemory(torch.eye(2), beta=50.0).retrieve(torch.tensor([[0.9, 0.2]])).energies.shape
        torch.Size([1, 3])
        """
        return self._energies[..., : (int(self.steps.max()) if self.steps.numel() else 0) + 1]

    @cached_property
    def weights(self) -> Tensor:
        """How much of each pattern there is in the state, ``(B, N)``: p(b X q) at the final q, of the memory as it was.

        >>> HopfieldMemory(torch.ones(4, 2)).retrieve(torch.zeros(1, 2)).weights
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
        """
        return self._weigh()


class HopfieldMemory(PatternStore):
    r"""N patterns X (N, D) and the energy whose minima they are (Ramsauer et al., 2021; Santos et al., 2024).

    .. math:: E(q) = -\tfrac1b \Omega^*(b X q) + \Psi(q) + \tfrac1b \Omega^*(0) + \max_i \Psi^*(x_i)

    Omega* belongs to the separation, the map p(s) = grad Omega*(s) from scores to weights; Psi to the post-transform
    grad Psi*. With the softmax and the identity this is

    .. math:: E(q) = -\mathrm{lse}_b(Xq) + \tfrac1b \log N + \tfrac12 q'q + \tfrac12 M^2,
              \quad M = \max_i \|x_i\|.

    E2(q) = -(1/b) Omega*(b X q) is concave, the rest E1 convex, and a step of CCCP is the :meth:`update`
    q <- grad Psi*(X' p(b X q)): the energy never rises. It is at least 0 for separations onto the simplex. One step
    with b = 1/sqrt(D) is attention of the queries to the patterns.

    Queries are ``(B, D)``, or any ``(..., D)``; those of batched patterns ``(B, ..., D)``. Half precision is computed
    in float32. Everything is differentiable in the queries, patterns, values, beta and what the separation learns;
    :meth:`retrieve` through its steps.

    Args:
        patterns: ``(N, D)``, or ``(B, N, D)`` for a memory of its own for each batch item; see
            :class:`~thalweg.energies.hopfield.storage.PatternStore` for this and the next three.
        beta: b > 0, a number or a tensor of shape (); None means 1/sqrt(D).
        separation: ``"softmax"``, ``"sparsemax"``, ``"entmax15"``, a number alpha, ``"normmax"``, or any
            :class:`~thalweg.layers.hopfield.separation_maps.Separation` (k-subsets, chains).
        values: ``(N, E)`` what :meth:`recall` answers; None means the patterns.
        post: ``"identity"``, ``"l2"``, ``"layernorm"`` or a ``PostTransform``.
        mask: ``(N,)`` or ``(B, N)`` bool, true where a pattern is present.
        names: N strings.
        learn_beta: make log b a parameter, starting from ``beta``.

    >>> memory = HopfieldMemory(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), beta=4.0, separation="sparsemax")
    >>> found = memory.retrieve(torch.tensor([[0.8, 0.3]]))
    >>> found.state, found.converged, bool((found.energies.diff() <= 0).all())
    (tensor([[1., 0.]]), tensor([True]), True)
    """

    def __init__(
        self,
        patterns: Tensor,
        beta: float | Tensor | None = None,
        separation: str | float | Separation = "softmax",
        *,
        values: Tensor | None = None,
        post: str | PostTransform = "identity",
        mask: Tensor | None = None,
        names: Sequence[str] | None = None,
        learn_beta: bool = False,
    ) -> None:
        super().__init__(patterns, values=values, mask=mask, names=names)
        beta = 1.0 / math.sqrt(patterns.size(-1)) if beta is None else beta
        if isinstance(beta, Tensor) and beta.dim():
            raise ConfigError(f"`beta` must be one number, got a tensor {tuple(beta.shape)}")
        number = real(beta.detach() if isinstance(beta, Tensor) else beta)
        if not 0.0 < number < math.inf:
            raise ConfigError(f"`beta` must be positive and finite, got {beta}")
        self.separation = named_separation(separation)
        self.post = post_transform(post)
        start = torch.tensor(math.log(number), dtype=torch.float64).to(_wide(patterns.dtype))
        self.log_beta = nn.Parameter(start.to(patterns.device)) if learn_beta else None
        self._beta = number if learn_beta or not isinstance(beta, Tensor) else beta

    @property
    def beta(self) -> float | Tensor:
        """The inverse temperature b; a tensor of shape () where it is learned or was given as one.

        >>> HopfieldMemory(torch.ones(2, 4)).beta
        0.5
        """
        return self._beta if self.log_beta is None else self.log_beta.exp()

    @property
    def beta_value(self) -> float:
        """b as a plain number, whatever it is kept as.

        >>> HopfieldMemory(torch.ones(2, 4), beta=torch.tensor(2.0)).beta_value
        2.0
        """
        beta = self.beta
        return float(beta.detach() if isinstance(beta, Tensor) else beta)

    def energy(self, q: Tensor) -> Tensor:
        """E(q), ``(..., D) -> (...)``; infinite where the post-transform can never lead.

        >>> HopfieldMemory(torch.eye(2), beta=1.0).energy(torch.zeros(1, 2))
        tensor([0.5000])
        """
        return self.convex(q) + self.concave(q)

    def convex(self, q: Tensor) -> Tensor:
        """E1(q) = Psi(q) + (1/b) Omega*(0) + max_i Psi*(x_i), ``(...)``.

        >>> HopfieldMemory(torch.eye(2), beta=1.0).convex(torch.zeros(1, 2))
        tensor([1.1931])
        """
        memory, rows = self._seen(q)
        return (memory.post.value(rows) + memory.constant()).view(q.shape[:-1])

    def concave(self, q: Tensor) -> Tensor:
        """E2(q) = -(1/b) Omega*(b X q), ``(...)``; its gradient is -X'p.

        >>> HopfieldMemory(torch.eye(2), beta=1.0).concave(torch.zeros(1, 2))
        tensor([-0.6931])
        """
        memory, rows = self._seen(q)
        # One column stands for the values, which are not wanted.
        return -memory.mix(rows, memory.patterns[..., :1])[1].view(q.shape[:-1])

    def weights(self, q: Tensor) -> Tensor:
        """p(b X q), how much each pattern answers to a query: ``(..., N)``, held whole.

        >>> HopfieldMemory(torch.eye(2), beta=1.0, separation="sparsemax").weights(torch.tensor([[2.0, 0.0]]))
        tensor([[1., 0.]])
        """
        memory, rows = self._seen(q)
        return memory.weights(rows).view(*q.shape[:-1], len(self)).to(self._dtype(q))

    def update(self, q: Tensor) -> Tensor:
        """One step of CCCP, grad Psi*(X' p(b X q)): ``(..., D)``. Time O(Q N D).

        >>> HopfieldMemory(torch.eye(2), beta=1.0).update(torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]])
        """
        if self._is_attention(q):
            return kernels.attend(q, self._buffers["patterns"], self._beta)  # type: ignore[arg-type]
        memory, rows = self._seen(q)
        return memory.post(memory.mix(rows, memory.patterns)[0]).view(q.shape).to(self._dtype(q))

    def forward(self, q: Tensor) -> Tensor:
        """:meth:`recall` with its defaults."""
        return self.recall(q)

    def retrieve(self, q: Tensor, max_steps: int = 100, tol: float = 1e-5, *, check: bool = True) -> Retrieval:
        """Update each query until it moves by no more than ``tol`` (Euclidean norm), at most ``max_steps`` times.

        The softmax over (N, D) patterns with the identity and without gradients is one call of a compiled kernel that
        holds no weights; everything else goes through :func:`~thalweg.inference.cccp`.

        Args:
            q: ``(B, D)``, or ``(..., D)``.
            max_steps: 0 or more.
            tol: 0 or more.
            check: raise a ``ThalwegError`` should an energy rise beyond rounding, as only a separation or a
                post-transform of one's own can make it.
        Returns:
            :class:`Retrieval`.

        Time O(S Q N D).

        >>> HopfieldMemory(torch.eye(3), beta=20.0).retrieve(torch.tensor([[0.1, 0.9, 0.3]])).state.round()
        tensor([[0., 1., 0.]])
        """
        if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 0 or not real(tol) >= 0:
            raise ConfigError(
                f"`max_steps` must be an integer and `tol` a number, 0 or more, got {max_steps!r}, {tol!r}"
            )
        if self._is_attention(q):  # nothing to convert, nothing to differentiate
            own = self.__dict__
            beta, patterns, separation = own["_beta"], own["_buffers"]["patterns"], own["_modules"]["separation"]
            found = kernels.settle(q, patterns, beta=beta, max_steps=max_steps, tol=tol)
            state, energies, steps, converged = found
            # Of a copy: the state is the caller's, who may change it before the weights are asked for.
            rest = state.clone()
            return Retrieval(state, steps, converged, energies, lambda: separation.weights(beta * (rest @ patterns.mT)))
        memory, rows = self._seen(q)
        with torch.set_grad_enabled(memory.has_gradient):
            fast = memory.is_plain_softmax and type(memory.post) is Identity and not memory.has_gradient
            found = self._settle(q, max_steps, tol) if fast else memory.descend(rows, max_steps, tol, check)
        shape, dtype = q.shape[:-1], self._dtype(q)
        state, energies, steps, converged = found
        assert energies is not None
        settled = state.view_as(rows)
        return Retrieval(
            state.clone().view(q.shape).to(dtype),
            steps.view(shape),
            converged.view(shape),
            energies.view(*shape, energies.size(-1)),
            lambda: memory.weights(settled.to(rows.dtype)).view(*shape, memory.patterns.size(-2)).to(dtype),
        )

    def recall(self, q: Tensor, max_steps: int = 100, tol: float = 1e-5) -> Tensor:
        """The values that belong to where the queries come to rest: V' p(b X q*), ``(..., E)``.

        With ``max_steps=0`` the queries are read as they are: attention with the patterns as keys.

        >>> capitals = HopfieldMemory(torch.eye(2), beta=20.0, values=torch.tensor([[10.0], [20.0]]))
        >>> capitals.recall(torch.tensor([[0.2, 0.9]])).round()
        tensor([[20.]])
        """
        state = self.retrieve(q, max_steps, tol).state if max_steps else q
        values = self.patterns if self.values is None else self.values
        memory, rows = self._seen(state, values)
        dtype = torch.promote_types(self._dtype(q), values.dtype)
        values = _without(values, self.mask).to(rows.dtype)
        return memory.mix(rows, values)[0].view(*q.shape[:-1], values.size(-1)).to(dtype)

    def save(self, path: str | Path) -> None:
        """Write the memory as one safetensors file: patterns, values, mask, names and settings, replaced in one go.

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "memory.safetensors"
        >>> HopfieldMemory(torch.eye(2), separation="sparsemax", names=["a", "b"]).save(path)
        >>> HopfieldMemory.load(path).names
        ['a', 'b']
        """
        save_memory(Path(path), self)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Self:
        """The memory that :meth:`save` wrote; a file that is none is a one-line ``CheckpointError``.

        >>> HopfieldMemory.load("absent.safetensors")
        Traceback (most recent call last):
        ...
        thalweg.errors.CheckpointError: absent.safetensors: expected a saved memory, got no such file; ...
        """
        found = read_arguments(Path(path), device)
        log_beta = found.pop("log_beta")
        try:
            memory = cls(**found, learn_beta=log_beta is not None)
        except (ConfigError, ShapeError) as error:
            raise CheckpointError(f"{path}: the memory is damaged: {error}") from None
        if log_beta is not None:
            memory.log_beta = log_beta
        return memory

    def extra_repr(self) -> str:
        """Sizes and settings."""
        batch = f"batch={len(self.patterns)}, " if self.is_batched else ""
        beta = "learned" if self.log_beta is not None else f"{self.beta_value:.4g}"
        return f"{batch}patterns={len(self)}, features={self.patterns.size(-1)}, beta={beta}"

    def _dtype(self, q: Tensor) -> torch.dtype:
        return torch.promote_types(q.dtype, self.patterns.dtype)

    def _is_attention(self, q: Tensor) -> bool:
        """Whether an update is plain attention of rows (Q, D) to (N, D) patterns of one type, without gradients.

        What belongs to a module is looked up where it is kept: asking for it by name takes as long as a small memory.
        """
        own = self.__dict__
        buffers, modules = own["_buffers"], own["_modules"]
        patterns = buffers.get("patterns")  # a learned memory has a parameter of that name
        return (
            patterns is not None
            and isinstance(q, Tensor)
            and q.dtype is patterns.dtype is torch.float32
            and len(shape := q.shape) == len(kept := patterns.shape) == 2
            and shape[1] == kept[1]
            and type(modules.get("separation")) is Softmax
            and type(modules.get("post")) is Identity
            and type(own["_beta"]) is float
            and buffers.get("mask") is None
            and own["_parameters"].get("log_beta") is None
            and not ((q.requires_grad or patterns.requires_grad) and torch.is_grad_enabled())
            and not traced()
        )

    def _seen(self, q: Tensor, values: Tensor | None = None) -> tuple[Landscape, Tensor]:
        """The memory in the type of the computation, and the queries as rows of it."""
        rows = self._rows(q)
        dtype = _wide(self._dtype(q))
        rows = rows.to(dtype)
        beta = self.beta
        beta = beta.to(device=q.device, dtype=dtype) if isinstance(beta, Tensor) else beta
        patterns = _without(self.patterns, self.mask).to(dtype)
        learned = [q, patterns, beta, values, *_tensors(self.separation), *_tensors(self.post)]
        wanted = any(isinstance(t, Tensor) and t.requires_grad for t in learned)
        has_gradient = traced() or (torch.is_grad_enabled() and wanted)
        return Landscape(patterns, self.mask, beta, self.separation, self.post, has_gradient), rows

    def _settle(self, q: Tensor, max_steps: int, tol: float) -> Descent:
        """The compiled retrieval, its trace cut to the steps that were made."""
        dtype = self._dtype(q)
        queries, patterns = self._rows(q).to(dtype), self.patterns.to(dtype)
        settled = kernels.settle(queries, patterns, beta=self.beta_value, max_steps=max_steps, tol=tol, mask=self.mask)
        longest = int(settled.steps.amax()) if len(queries) else 0
        return Descent(settled.state, settled.energies[:, : longest + 1], settled.steps, settled.converged)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _without(patterns: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros for absent rows, which may hold anything: 0 times NaN is not 0."""
    return patterns if mask is None else patterns.masked_fill(~mask.unsqueeze(-1), 0.0)


def _tensors(thing: nn.Module) -> list[Any]:
    """What a separation or post-transform may learn."""
    return [*thing.parameters(), *vars(thing).values()]
