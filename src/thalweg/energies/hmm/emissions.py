"""What a state emits: the contract, tables of symbols, and any distribution of torch."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from thalweg.energies.hmm.probabilities import floats, from_counts, row_logarithms
from thalweg.errors import ConfigError, ShapeError
from thalweg.limits import WIDTH

UNSEEN = 1e-8
"""Fewer observations than this were never a state's: its parameters stay as they were."""


class Limits(NamedTuple):
    """What keeps an M-step from extremes.

    Attributes:
        pseudo_count: added to every expected count of something that is allowed.
        floor: the least variance, as a share of the variance of the data.

    >>> Limits().floor
    1e-06
    """

    pseudo_count: float = 0.0
    floor: float = 1e-6


class Trouble(NamedTuple):
    """A state that fitting left degenerate.

    Attributes:
        state: its number (of the emission, where states share one).
        why: ``unvisited`` or ``collapsed``.

    >>> Trouble(3, "collapsed").why
    'collapsed'
    """

    state: int
    why: str


class Emission(nn.Module):
    """p(x | k) for each of K kinds of state, with what EM asks of it. A new kind of emission is one subclass.

    Observations come as M of them, ``(M,)`` or ``(M, D)``, without padding or missing ones. A subclass says

    - ``event_dim``: the number of axes of one observation, and ``size``: K, None before it has parameters;
    - ``prepare(values)``: what every pass over the same data reads, computed once (a tuple of tensors);
    - ``parts(prepared)``: log-densities ``(M, P)``, differentiable; where a state is a mixture of parts, weights
      included, and ``combine(parts)`` sums them to ``(M, K)``;
    - ``guess(prepared, size, generator)``: responsibilities ``(M, P)`` to start from, and ``spread(prepared, kinds)``
      the same from responsibilities of the K kinds;
    - ``statistics(prepared, weights)`` of data weighted by ``(M, P)``, and ``maximise(statistics, limits)``, which sets
      the parameters to the most probable ones under them and returns a list of :class:`Trouble`;
    - ``draw(kinds, generator)``: an observation for each of ``(N,)`` kinds; ``free_parameters``.

    >>> fair_or_loaded = CategoricalEmission([[1 / 6] * 6, [0.1] * 5 + [0.5]])
    >>> fair_or_loaded.log_prob(torch.tensor([5, 0])).exp().detach()
    tensor([[0.1667, 0.5000],
            [0.1667, 0.1000]])
    """

    event_dim = 0
    fitted_by_em = True

    @property
    def size(self) -> int | None:
        """K."""
        raise NotImplementedError

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise a ShapeError for observations of a shape that is not emitted."""

    def adopt(self, values: Tensor, present: Tensor | None) -> None:
        """Note what a fit needs to know of all the data, before anything is prepared."""

    def prepare(self, values: Tensor, present: Tensor | None = None) -> tuple[Tensor, ...]:
        """What every pass reads; ``present`` (M, D) is false where an entry of a vector is missing."""
        if present is not None:
            raise ShapeError(f"`observed` must be (B, T): {type(self).__name__} takes no observation in part")
        return (values,)

    def parts(self, prepared: tuple[Tensor, ...]) -> Tensor:
        """Log-densities, (M, P)."""
        raise NotImplementedError

    def combine(self, parts: Tensor) -> Tensor:
        """(M, P) to (M, K)."""
        return parts

    def log_prob(self, values: Tensor) -> Tensor:
        """log p(x | k) of M observations, ``(M, K)``; differentiable in the parameters."""
        return self.combine(self.parts(self.prepare(values)))

    def guess(self, prepared: tuple[Tensor, ...], size: int, generator: torch.Generator) -> Tensor:
        """Responsibilities (M, P) of K = ``size`` kinds, to start from."""
        raise NotImplementedError

    def spread(self, prepared: tuple[Tensor, ...], kinds: Tensor, generator: torch.Generator) -> Tensor:
        """Responsibilities (M, P) from those of the kinds, (M, K)."""
        return kinds

    def statistics(self, prepared: tuple[Tensor, ...], weights: Tensor) -> tuple[Tensor, ...]:
        """Sums over the data, weighted by (M, P), in float64."""
        raise NotImplementedError

    def maximise(self, statistics: tuple[Tensor, ...], limits: Limits) -> None:
        """Set the parameters to the most probable ones."""
        raise NotImplementedError

    def troubles(self, statistics: tuple[Tensor, ...], limits: Limits) -> list[Trouble]:
        """What the last M-step, with these statistics, left degenerate."""
        return []

    def log_prior(self, limits: Limits) -> Tensor:
        """What pseudo-counts add to the log-likelihood, float64."""
        return torch.zeros((), dtype=torch.float64)

    def draw(self, kinds: Tensor, generator: torch.Generator | None) -> Tensor:
        """An observation of each of (N,) kinds."""
        raise NotImplementedError

    @property
    def free_parameters(self) -> int:
        """How many numbers a fit chooses."""
        raise NotImplementedError


def hold(module: nn.Module, name: str, values: Tensor) -> None:
    """Make a tensor a parameter; one that is part of a graph already stays as it is, for derivatives to reach it.

    >>> module = nn.Module()
    >>> hold(module, "logits", torch.zeros(2))
    >>> isinstance(module.logits, nn.Parameter)
    True
    """
    module._parameters.pop(name, None)
    if values.requires_grad and not isinstance(values, nn.Parameter):
        module.__dict__[name] = values
    else:
        module.__dict__.pop(name, None)
        module.register_parameter(name, values if isinstance(values, nn.Parameter) else nn.Parameter(values.clone()))


def carries_graph(owner: object) -> bool:
    """Whether a module or a distribution holds a tensor, other than a module's parameters, that is part of a graph.

    >>> from torch.distributions import Normal
    >>> carries_graph(Normal(torch.zeros(2).requires_grad_(), 1.0)), carries_graph(CategoricalEmission([[1.0]]))
    (True, False)
    """
    for value in vars(owner).values():
        if isinstance(value, Tensor) and value.requires_grad:
            return True
        if isinstance(value, Distribution) and carries_graph(value):
            return True
    return False


class CategoricalEmission(Emission):
    """One of V symbols, by a table of probabilities; a probability of 0 stays 0.

    Args:
        table: ``(K, V)``, rows that sum to one; None before the first fit.
        symbols: V, where there is no table; None takes the largest symbol of the data.
        logarithms: the table holds log-probabilities.

    >>> CategoricalEmission([[0.5, 0.5]]).log_table.exp().detach()
    tensor([[0.5000, 0.5000]])
    """

    logits: Tensor | None

    def __init__(self, table: Any = None, *, symbols: int | None = None, logarithms: bool = False) -> None:
        super().__init__()
        if symbols is not None and (
            isinstance(symbols, bool) or not isinstance(symbols, int) or not 1 <= symbols <= WIDTH
        ):
            raise ConfigError(f"`symbols` must be an integer from 1 to {WIDTH:,} or None, got {symbols!r}")
        self.register_parameter("logits", None)
        self.symbols = symbols
        if table is not None:
            table = floats("emission", table)
            if table.dim() != 2 or 0 in table.shape:
                raise ShapeError(f"`emission` must be (C, V) with V at least 1, got {tuple(table.shape)}")
            self._set(row_logarithms("emission", table, logarithms))

    def _set(self, log_table: Tensor) -> None:
        hold(self, "logits", log_table)
        self.symbols = log_table.size(1)

    @property
    def log_table(self) -> Tensor:
        """``(K, V)``."""
        logits = cast(Tensor, self.logits)
        return logits.log_softmax(-1) if isinstance(logits, nn.Parameter) else logits

    @property
    def size(self) -> int | None:
        """K."""
        return None if self.logits is None else len(self.logits)

    def prepare(self, values: Tensor, present: Tensor | None = None) -> tuple[Tensor, ...]:
        """The symbols."""
        V = self.symbols
        named = f"symbols 0, 1, 2 ... below {WIDTH:,}" if V is None else f"symbols 0 ... {V - 1}"
        if values.is_floating_point() or values.dtype == torch.bool:
            raise ShapeError(f"`observations` must be integers, {named}, got {values.dtype}")
        wrong = (values < 0) | (values >= (WIDTH if V is None else V))
        if bool(wrong.any()):
            which = int(wrong.nonzero()[0])
            raise SymbolError(which, f"`observations` must be {named}, got {int(values[which])}")
        return super().prepare(values.long(), present)

    def parts(self, prepared: tuple[Tensor, ...]) -> Tensor:
        """Looked up."""
        return nn.functional.embedding(prepared[0], self.log_table.t())

    def guess(self, prepared: tuple[Tensor, ...], size: int, generator: torch.Generator) -> Tensor:
        """Each symbol to the kinds in shares drawn at random: tables that differ from the beginning."""
        symbols = prepared[0]
        if self.symbols is None:
            self.symbols = int(symbols.max()) + 1 if len(symbols) else 1
        noise = torch.rand(self.symbols, size, generator=generator, dtype=torch.float64)
        shares = -noise.clamp(min=1e-12).log()  # exponential: rows are uniform over the simplex
        return (shares / shares.sum(1, keepdim=True)).to(symbols.device)[symbols]

    def statistics(self, prepared: tuple[Tensor, ...], weights: Tensor) -> tuple[Tensor, ...]:
        """Expected counts of each symbol, (K, V)."""
        symbols = prepared[0]
        V = int(symbols.max()) + 1 if self.symbols is None else self.symbols
        counts = torch.zeros(V, weights.size(1), dtype=torch.float64, device=weights.device)
        return (counts.index_add_(0, symbols, weights.double()).t(),)

    def maximise(self, statistics: tuple[Tensor, ...], limits: Limits) -> None:
        """Relative frequencies."""
        counts = statistics[0]
        fresh = self.logits is None
        rows = torch.zeros_like(counts) if fresh else cast(Tensor, self.logits).detach()
        found = from_counts(counts, rows, limits.pseudo_count)
        with torch.no_grad():
            self._set(found.log_softmax(-1)) if fresh else cast(Tensor, self.logits).copy_(found)

    def troubles(self, statistics: tuple[Tensor, ...], limits: Limits) -> list[Trouble]:
        """Kinds without a symbol."""
        return [Trouble(k, "unvisited") for k in (statistics[0].sum(1) < UNSEEN).nonzero().flatten().tolist()]

    def log_prior(self, limits: Limits) -> Tensor:
        """The Dirichlet prior's part."""
        logs = self.log_table.detach().double()
        return limits.pseudo_count * torch.where(torch.isneginf(logs), 0.0, logs).sum()

    def draw(self, kinds: Tensor, generator: torch.Generator | None) -> Tensor:
        """Symbols."""
        return self.log_table.detach().exp()[kinds].multinomial(1, generator=generator).squeeze(1)

    @property
    def free_parameters(self) -> int:
        """Entries that are not 0, less one a row."""
        logs = self.log_table
        return int((~torch.isneginf(logs)).sum()) - len(logs)


class SymbolError(ShapeError):
    """A symbol out of range, at place ``which`` of those looked at."""

    def __init__(self, which: int, message: str):
        super().__init__(message)
        self.which = which


class DistributionEmission(Emission):
    """Any ``torch.distributions.Distribution`` with batch shape (K,); EM leaves it as it is, gradients reach it.

    >>> from torch.distributions import Poisson
    >>> DistributionEmission(Poisson(torch.tensor([1.0, 5.0]))).log_prob(torch.tensor([1.0])).exp()
    tensor([[0.3679, 0.0337]])
    """

    fitted_by_em = False

    def __init__(self, given: Distribution) -> None:
        super().__init__()
        if len(given.batch_shape) != 1 or not given.batch_shape[0]:
            raise ShapeError(
                f"`emission` must have batch shape (C,), one distribution for each state, got "
                f"{tuple(given.batch_shape)}; see torch.distributions.Independent"
            )
        self.given, self.event_dim = given, len(given.event_shape)

    @property
    def size(self) -> int | None:
        """K."""
        return self.given.batch_shape[0]

    def check(self, shape: tuple[int, ...]) -> None:
        """Observations must have the distribution's event shape."""
        event = tuple(self.given.event_shape)
        if shape != event:
            raise ShapeError(f"an observation must have shape {event}, as `emission` emits, got {shape}")

    def parts(self, prepared: tuple[Tensor, ...]) -> Tensor:
        """Log-densities."""
        return self.given.log_prob(prepared[0].unsqueeze(1))

    def statistics(self, prepared: tuple[Tensor, ...], weights: Tensor) -> tuple[Tensor, ...]:
        """None: it is not re-estimated."""
        return (weights.sum(0, dtype=torch.float64),)

    def maximise(self, statistics: tuple[Tensor, ...], limits: Limits) -> None:
        """Stays as it is."""

    def draw(self, kinds: Tensor, generator: torch.Generator | None) -> Tensor:
        """Drawn from torch's own generator: distributions take no other."""
        if generator is not None:
            raise ConfigError("`generator` must be None here: torch.distributions draw from torch's own; seed that one")
        every = self.given.sample(kinds.shape)  # (N, K, ...)
        return every[torch.arange(len(kinds), device=kinds.device), kinds]

    @property
    def free_parameters(self) -> int:
        """None that a fit chooses."""
        return 0
