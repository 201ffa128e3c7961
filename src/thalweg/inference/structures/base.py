"""What every exact structure offers: a distribution over a combinatorial set, p(y) = exp(score(y)) / Z."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, register_kl

from thalweg.errors import ConfigError, InfeasibleError, ShapeError
from thalweg.inference.structures.perturbation import PerturbedMode, gumbel
from thalweg.kernels.semirings import Draw, Entropy, Expectation, KMax, Log, Max, Semiring
from thalweg.kernels.tracing import traced, uncompiled
from thalweg.limits import enough_memory

Inputs = tuple[Tensor, ...]
_AT_ONCE = 2**22  # numbers that samples are drawn from in one go
_KEPT = 8  # numbers for each score that a recursion keeps for its gradient


@uncompiled
class Structure(Distribution):
    r"""A distribution over structures y with energy E(y) = -score(y): p(y) = exp(score(y)) / Z.

    A structure is a set of parts, and its score a sum over them. A subclass says

    - ``inputs``: the tensors of scores, first those of the parts, (B, \*parts), which marginals have the shape of;
    - ``inside``: which parts belong to an item, bool, broadcast against them; all others count for nothing;
    - ``with_inputs(inputs)``: the same set of structures under other scores;
    - ``fold(semiring, *inputs)``: the recursion, the sum over all structures of the product over their parts in an
      algebra of :mod:`thalweg.kernels.semirings`. Axes are counted from the end, for further axes may stand before the
      batch; several tuples of inputs are further scores of the same parts, as :class:`Expectation` takes them;
    - ``parts_of(y)`` and ``structure_of(parts)``: a structure as ones and zeros, and back;
    - ``score(y)`` where there are scores other than those of the parts.

    All else follows, and a subclass may give any of it by a kernel. Items of a batch without any feasible structure
    raise :class:`~thalweg.errors.InfeasibleError` wherever log Z or the mode is needed.

    >>> from thalweg.inference import LinearChain
    >>> isinstance(LinearChain(torch.zeros(1, 2, 2), torch.zeros(2, 2)), Structure)
    True
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  # pyright: ignore[reportIncompatibleMethodOverride]
    has_enumerate_support = False

    def __init__(self, batch_shape: torch.Size, event_shape: torch.Size, *, validate_args: bool | None = None):
        super().__init__(batch_shape, event_shape, validate_args=False)
        # Not torch's own default: torch.compile turns that off for the whole process.
        self.checked = validate_args is None or validate_args

    # What a subclass gives.

    @property
    def inputs(self) -> Inputs:
        """The tensors that gradients flow to, the scores of the parts (B, \\*parts) first."""
        raise NotImplementedError

    @property
    def inside(self) -> Tensor:
        """Which parts belong to an item, bool, broadcast against (B, \\*parts)."""
        return torch.ones((), dtype=torch.bool, device=self.inputs[0].device)

    def with_inputs(self, inputs: Inputs) -> Structure:
        """The same set of structures under other scores."""
        raise NotImplementedError

    def fold(self, semiring: Semiring, *inputs: Inputs) -> Tensor:
        """The sum over all structures in an algebra, (.., B); what lies outside of an item is 0 in ``inputs``."""
        raise NotImplementedError

    def parts_of(self, value: Tensor) -> Tensor:
        """Structures (.., B, \\*event) as ones and zeros (.., B, \\*parts), in the type of the scores."""
        raise NotImplementedError

    def structure_of(self, parts: Tensor) -> Tensor:
        """The inverse of :meth:`parts_of`; -1 throughout where no part is marked."""
        raise NotImplementedError

    def score(self, value: Tensor) -> Tensor:
        """The score of structures with any leading sample dimensions, (.., B)."""
        if len(self.inputs) > 1:
            raise NotImplementedError(f"{type(self).__name__} has scores beside those of its parts: give it a `score`")
        marked = self.parts_of(value) > 0
        return torch.where(marked, self._tidy(self.inputs)[0], 0.0).flatten(marked.dim() - self._dims).sum(-1)

    # What follows.

    @property
    def _dims(self) -> int:
        """How many axes the parts of an item have."""
        return self.inputs[0].dim() - 1

    def _tidy(self, inputs: Inputs) -> Inputs:
        return torch.where(self.inside, inputs[0], 0.0), *inputs[1:]

    def _fold(self, semiring: Semiring, *inputs: Inputs) -> Tensor:
        return self.fold(semiring, *map(self._tidy, inputs))

    def _carries_graph(self) -> bool:
        return traced() or (torch.is_grad_enabled() and any(x.requires_grad for x in self.inputs))

    def _marked(self, semiring: Semiring, inputs: Inputs) -> Tensor:
        """The parts that a sum over structures came to, as its gradient in the scores of the parts."""
        with torch.enable_grad():
            parts, *others = (x.detach() for x in inputs)
            parts.requires_grad_()
            value = self._fold(semiring, (parts, *others))
            return torch.autograd.grad(value.sum(), parts)[0]

    @property
    def log_partition(self) -> Tensor:
        """log Z of each item, (B,)."""
        return self._feasible(self._fold(Log(), self.inputs))

    @property
    def marginals(self) -> Tensor:
        """The probability of each part, (B, \\*parts); the gradient of log Z in their scores; differentiable."""
        self._require_feasible()
        return self._expected_parts(self.inputs)

    def _expected_parts(self, inputs: Inputs) -> Tensor:
        graph = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        with torch.enable_grad():
            parts = inputs[0] if graph and inputs[0].requires_grad else inputs[0].detach().requires_grad_()
            return torch.autograd.grad(self._fold(Log(), (parts, *inputs[1:])).sum(), parts, create_graph=graph)[0]

    @property
    def mean(self) -> Tensor:
        """The expected parts: the marginals."""
        return self.marginals

    @property
    def mode(self) -> Tensor:
        """A structure with the highest score, (B, \\*event)."""
        self._require_feasible()
        return self.structure_of(self._marked(Max(), self.inputs))

    @property
    def max_score(self) -> Tensor:
        """The highest score, (B,), differentiable: its gradient are the parts of the mode."""
        return self._feasible(self._fold(Max(), self.inputs))

    def top_k(self, k: int) -> tuple[Tensor, Tensor]:
        """The k highest scores (B, k), falling and differentiable, and their structures (B, k, \\*event).

        Where fewer than k exist the rest has score -inf and is -1 throughout.
        """
        self._positive("k", k)
        with torch.enable_grad(), enough_memory(_KEPT * k * sum(x.numel() for x in self.inputs), k=k):
            parts, *others = (x.detach() for x in self.inputs)
            best = self._fold(KMax(k), (parts.requires_grad_(), *others))  # (k, B)
            self._feasible(best[0].detach())
            marks = [torch.autograd.grad(each.sum(), parts, retain_graph=True)[0] for each in best]
        found = torch.stack([self.structure_of(each) for each in marks], 1)
        scores = self._fold(KMax(k), self.inputs) if self._carries_graph() else best.detach()
        missing = torch.isneginf(best.detach()).t()
        return scores.t(), found.masked_fill(missing.view(*missing.shape, *[1] * (found.dim() - 2)), -1)

    def sample(
        self, sample_shape: Sequence[int] | torch.Size = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Exact samples, (\\*sample_shape, B, \\*event)."""
        self._require_feasible()
        shape = torch.Size(sample_shape)
        parts, *others = self.inputs
        at_once = max(1, _AT_ONCE // max(1, parts.numel()))
        drawn = []
        for first in range(0, shape.numel(), at_once):
            count = min(at_once, shape.numel() - first)
            drawn.append(self._marked(Draw(generator), (parts.expand(count, *parts.shape), *others)))
        marks = torch.cat(drawn) if drawn else parts.new_zeros(0, *parts.shape)
        found = self.structure_of(marks)
        return found.view(*shape, *found.shape[1:])

    def energy(self, value: Tensor) -> Tensor:
        """E(y) = -score(y): lower is better."""
        return -self.score(value)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y) = score(y) - log Z."""
        return self.score(value) - self.log_partition

    def entropy(self) -> Tensor:
        """-E_p[log p(y)] of each item in nats, (B,); computed in float64."""
        self._require_feasible()
        return self._fold(Entropy(), self._double(self))[1].to(self.inputs[0].dtype)

    def cross_entropy(self, other: Structure) -> Tensor:
        """-E_p[log q(y)] with p this and q the other, (B,), infinite where p allows what q forbids; in float64."""
        p, q = self._both(other)
        log_z = other._fold(Log(), q)
        return (log_z - self._fold(Expectation(), p, q)[1]).to(self.inputs[0].dtype)

    def kl_divergence(self, other: Structure) -> Tensor:
        r"""KL(p || q) with p this and q the other, (B,), infinite where p allows what q forbids; in float64.

        .. math:: KL = \log Z_q - \log Z_p - \mathbb{E}_p[s_q(y) - s_p(y)]

        from the differences of scores, which are small where p and q are close: their rounding is too.
        ``torch.distributions.kl_divergence`` gives the same.
        """
        p, q = self._both(other)
        apart = self._fold(Expectation(), p, tuple(map(self._less, q, p)))[1]
        log_z = other._fold(Log(), q) - self._fold(Log(), p)
        # Rounding may go below zero, where the gradient is zero too.
        return (log_z - apart).clamp(min=0).to(self.inputs[0].dtype)

    @staticmethod
    def _less(x: Tensor, y: Tensor) -> Tensor:
        """x - y, and 0 where y is -inf: what has no probability differs by nothing."""
        none = torch.isneginf(y)
        return torch.where(none, 0.0, x - torch.where(none, 0.0, y))

    @staticmethod
    def _double(structure: Structure) -> Inputs:
        return tuple(x.double() for x in structure.inputs)

    def _require_alike(self, other: Structure) -> None:
        if type(other) is not type(self) or other.inputs[0].shape != self.inputs[0].shape:
            got = tuple(other.inputs[0].shape) if type(other) is type(self) else type(other).__name__
            raise ShapeError(
                f"the other must be a {type(self).__name__} of shape {tuple(self.inputs[0].shape)}, got {got}"
            )
        if self.checked and not traced() and other is not self:
            for what, same in self._differences(other):
                if not same:
                    raise ShapeError(f"both must have the same {what}: they are distributions over one set")

    def _differences(self, other: Any) -> Iterator[tuple[str, bool]]:
        """What makes the set of structures, and whether the other has the same."""
        yield "`lengths`", torch.equal(self.inside, other.inside)

    def _both(self, other: Structure) -> tuple[Inputs, Inputs]:
        """Inputs of this and another over the same set in float64: sums over long items are large and nearly equal."""
        self._require_alike(other)
        self._require_feasible()
        if other is not self:
            other._require_feasible()
        return self._double(self), self._double(other)

    # The same set under other scores.

    def plus(self, extra: Tensor) -> Structure:
        """The structure with ``extra``, (B, \\*parts), added to the scores of its parts; differentiable in both.

        What ``extra`` holds outside of an item counts for nothing.

        >>> from thalweg.inference import LinearChain
        >>> LinearChain(torch.zeros(1, 1, 2), torch.zeros(2, 2)).plus(torch.tensor([[[0.0, 1.0]]])).mode
        tensor([[1]])
        """
        parts, *others = self.inputs
        if extra.shape != parts.shape:
            raise ShapeError(
                f"what is added must be {tuple(parts.shape)} as the scores of the parts, got {tuple(extra.shape)}"
            )
        return self.with_inputs((parts + extra.to(parts.dtype), *others))

    def tempered(self, temperature: float | Tensor) -> Structure:
        """All scores divided by a temperature: above 1 flatter, below 1 sharper; differentiable in it.

        >>> from thalweg.inference import LinearChain
        >>> hot = LinearChain(torch.tensor([[[0.0, 4.0]]]), torch.zeros(2, 2)).tempered(4.0)
        >>> hot.log_prob(torch.tensor([[1]]))
        tensor([-0.3133])
        """
        if not isinstance(temperature, Tensor) and not temperature > 0:
            raise ConfigError(f"`temperature` must be above 0, got {temperature}")
        return self.with_inputs(tuple(x / temperature for x in self.inputs))

    def given(self, *, allowed: Tensor) -> Structure:
        """The structure conditioned on using no part but those ``allowed``, (B, \\*parts) bool."""
        parts, *others = self.inputs
        if allowed.shape != parts.shape or allowed.dtype != torch.bool:
            raise ShapeError(f"`allowed` must be bool {tuple(parts.shape)}, got {tuple(allowed.shape)} {allowed.dtype}")
        return self.with_inputs((parts.masked_fill(~allowed, -math.inf), *others))

    # Other ways to an answer.

    def max_posterior(self) -> Tensor:
        """The structure whose parts have the greatest expected number of right ones, (B, \\*event)."""
        parts, *others = self.inputs
        bare = [torch.where(torch.isneginf(x), x, 0.0).detach() for x in others]
        kept = torch.where(torch.isneginf(parts), parts, self.marginals).detach()
        return self.with_inputs((kept, *bare)).mode

    def perturbed_mode(self, n: int = 1, *, scale: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Perturb-and-MAP: modes of n copies with Gumbel noise times ``scale`` on every part, (n, B, \\*event).

        Exact samples where each structure is one part; elsewhere they approximate them, at the price of one search for
        the mode each (Papandreou and Yuille, 2011).

        >>> from thalweg.inference import LinearChain
        >>> LinearChain(torch.zeros(2, 3, 4), torch.zeros(4, 4)).perturbed_mode(5).shape
        torch.Size([5, 2, 3])
        """
        self._positive("n", n)
        self._require_feasible()
        return self._modes_under(scale * gumbel((n, *self.inputs[0].shape), self.inputs[0], generator))

    def expected_mode(self, n: int = 100, *, scale: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """The mean parts of n perturbed modes, (B, \\*parts): a sparse, differentiable stand-in for the mode.

        The gradient in the scores of the parts is the Monte Carlo estimate of Berthet et al. (2020); other scores,
        which carry no noise, get none.

        >>> from thalweg.inference import LinearChain
        >>> LinearChain(torch.zeros(1, 2, 3), torch.zeros(3, 3)).expected_mode(8).sum(-1)
        tensor([[1., 1.]])
        """
        self._positive("n", n)
        noise = gumbel((n, *self.inputs[0].shape), self.inputs[0], generator)
        return PerturbedMode.apply(self.inputs[0], self, noise, scale)  # type: ignore[return-value]

    def relaxed_sample(
        self,
        sample_shape: Sequence[int] | torch.Size = (),
        *,
        temperature: float = 1.0,
        hard: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Marginals of the structure with Gumbel noise on its parts, tempered, (\\*sample_shape, B, \\*parts).

        Differentiable in all scores; towards temperature 0 they become perturbed modes. ``hard`` gives those modes as
        ones and zeros and keeps the relaxed gradient (straight through). Corro and Titov (2019).

        >>> from thalweg.inference import LinearChain
        >>> LinearChain(torch.zeros(1, 2, 3), torch.zeros(3, 3)).relaxed_sample((4,), temperature=0.5).shape
        torch.Size([4, 1, 2, 3])
        """
        if not temperature > 0:
            raise ConfigError(f"`temperature` must be above 0, got {temperature}")
        self._require_feasible()
        shape, parts = torch.Size(sample_shape), self.inputs[0]
        noise = gumbel((shape.numel(), *parts.shape), parts, generator)
        relaxed = self._marginals_under(noise, temperature)
        if hard:
            relaxed = self.parts_of(self._modes_under(noise)) + (relaxed - relaxed.detach())
        return relaxed.view(*shape, *parts.shape)

    def _modes_under(self, noise: Tensor) -> Tensor:
        """The modes (n, B, \\*event) with noise (n, B, \\*parts) on the parts."""
        parts, *others = self.inputs
        return self.structure_of(self._marked(Max(), (parts + noise, *others)))

    def _marginals_under(self, noise: Tensor, temperature: float) -> Tensor:
        """The marginals (n, B, \\*parts) with noise on the parts, all scores tempered."""
        parts, *others = self.inputs
        return self._expected_parts(tuple(x / temperature for x in (parts + noise, *others)))

    # What is asked of the scores.

    @staticmethod
    def _positive(name: str, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ShapeError(f"`{name}` must be an integer of at least 1, got {value!r}")

    def _require_feasible(self) -> Any:
        """Raise for a score of +inf and for an item without any structure."""
        if self.checked and not traced():
            with torch.no_grad():
                _ = self.log_partition

    def _refuse_infinite(self) -> None:
        """Raise a ShapeError for a score of +inf within an item."""
        for number, scores in enumerate(self._tidy(self.inputs)):
            found = (scores.detach() == math.inf).nonzero()
            if len(found):
                what = "of the parts " if number == 0 else ""
                raise ShapeError(f"scores {what}must be below +inf, got +inf at {tuple(found[0].tolist())}")

    def _feasible(self, values: Tensor) -> Tensor:
        """The values, if none is -inf; one copy to the host, whatever the device."""
        if not self.checked or traced():
            return values
        host = values.tolist()
        if any(value == math.inf or value != value for value in host):
            self._refuse_infinite()
        if -math.inf in host:
            items = [item for item, value in enumerate(host) if value == -math.inf]
            named = ", ".join(map(str, items[:8])) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
            raise InfeasibleError(
                f"every structure of batch item {named} has score -inf (items count from 0); relax its constraints"
            )
        return values

    def expand(self, batch_shape: Any, _instance: Any = None) -> Structure:
        """Not offered: repeat the scores instead."""
        raise NotImplementedError(f"a {type(self).__name__} does not expand; repeat its scores")


@register_kl(Structure, Structure)
def _kl_structures(p: Structure, q: Structure) -> Tensor:
    return p.kl_divergence(q)
