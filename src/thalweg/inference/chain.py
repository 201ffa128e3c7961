"""Linear chains: conditional random fields, hidden Markov models, Markov language models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.chain_inputs import checked_lengths, potentials_of
from thalweg.inference.perturbation import PerturbedMode, gumbel
from thalweg.inference.structure import Structure
from thalweg.kernels import chain as ops
from thalweg.kernels.dispatch import chain_kernels, on_cpu
from thalweg.kernels.potentials import Chain, SparseTransitions

__all__ = ["LinearChain"]

_TYPES = (torch.float32, torch.float64)  # those that kernels compute in


class LinearChain(Structure):
    r"""All label sequences y_1..y_L of each item, weighted by the exponential of

    .. math:: s(y) = start(y_1) + \sum_t e_t(y_t) + \sum_{t<L} A(y_t, y_{t+1}) + end(y_L)

    Args:
        emissions: ``(B, T, C)``; float32 or float64; half precision is computed in float32.
        transitions: ``(C, C)`` shared, ``(B, C, C)`` per item or ``(B, T-1, C, C)`` per step, ``[.., i, j]`` scoring
            i -> j; or :class:`SparseTransitions`, whose cost follows the number of edges.
        start: ``(C,)`` and ``end``: ``(C,)``, zero when not given.
        lengths: ``(B,)`` with 1 <= length <= T; all T when not given. What lies past a length counts for nothing.
        backend: ``"auto"`` picks compiled kernels for the device; ``"reference"`` is plain PyTorch, ``"scan"`` the same
            by semiring matrix products in O(log T) depth; ``"cpu"`` and ``"gpu"`` insist on the kernels.
        low_memory: keep O(B sqrt(T) C) between forward and backward instead of O(B T C), at the price of walking
            forward twice; with dense transitions that do not differ by step and without -inf.
        validate_args: check labels and feasibility (on by default); off, nothing waits for the GPU.

    A score of -inf forbids; gradients stay finite. Time O(B T C^2). Lafferty et al. (2001).

    >>> chain = LinearChain(torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]), torch.tensor([[0.0, -1.0], [0.0, 0.0]]))
    >>> chain.mode
    tensor([[0, 0]])
    >>> chain.log_prob(chain.mode).exp()
    tensor([0.3995])
    """

    def __init__(
        self,
        emissions: Tensor,
        transitions: Tensor | SparseTransitions,
        *,
        start: Tensor | None = None,
        end: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        backend: str = "auto",
        low_memory: bool = False,
        validate_args: bool | None = None,
    ):
        if emissions.dim() != 3 or not emissions.is_floating_point() or 0 in emissions.shape[1:]:
            raise ShapeError(
                "`emissions` must be (B, T, C) with T and C at least 1 and a floating type, "
                f"got {tuple(emissions.shape)} {emissions.dtype}"
            )
        batch, steps, _ = emissions.shape
        super().__init__(torch.Size((batch,)), torch.Size((steps,)), validate_args=validate_args)
        self.potentials = potentials_of(emissions, transitions, start, end, checked_lengths(lengths, emissions))
        self.backend, self.low_memory = backend, low_memory
        self._kept: dict[str, Any] = {}
        if backend != "auto":
            chain_kernels(backend, self.potentials)  # an unknown or unusable backend is told of here

    @property
    def lengths(self) -> Tensor:
        """(B,) int64."""
        return self.potentials.lengths.clone()  # what no one gave is shared by many chains

    @property
    def num_labels(self) -> int:
        """C."""
        return self.potentials.size

    def _once(self, name: str, compute: Any) -> Any:
        """Keep a result for the next call, unless it carries a graph, which one backward pass uses up."""
        if ops.carries_graph(self.potentials):
            return compute()
        if name not in self._kept:
            self._kept[name] = compute()
        return self._kept[name]

    def _require_feasible(self) -> None:
        """Raise for an item without any labelling; free of charge where no score is -inf."""
        if self.checked and self._may_be_infeasible():
            with torch.no_grad():
                _ = self.log_partition

    @classmethod
    def _of_layer(cls, given: Chain, *, backend: str, low_memory: bool) -> LinearChain:
        """Scores and lengths of shapes that fit. Where types fit as well nothing is left to check or to wait for."""
        if backend == "auto" and _ready(given):
            return cls._bare(given, backend, low_memory, True)
        emissions, transitions, start, end, lengths = given
        chain = cls(emissions, transitions, start=start, end=end, backend=backend, low_memory=low_memory)
        return chain._like(chain.potentials._replace(lengths=lengths))

    @classmethod
    def _bare(cls, chain: Chain, backend: str, low_memory: bool, checked: bool) -> LinearChain:
        other = object.__new__(cls)
        shape = chain.emissions.shape
        Structure.__init__(other, shape[:1], shape[1:2], validate_args=checked)
        other.potentials, other.backend, other.low_memory, other._kept = chain, backend, low_memory, {}
        return other

    def _like(self, chain: Chain) -> LinearChain:
        return self._bare(chain, self.backend, self.low_memory, self.checked)

    @property
    def log_partition(self) -> Tensor:
        """log Z, (B,); its gradient in the emissions are the marginals."""

        def compute() -> Tensor:
            values = ops.log_partition(self.potentials, backend=self.backend, low_memory=self.low_memory)
            return self._feasible(values)

        return self._once("log_partition", compute)

    @property
    def marginals(self) -> Tensor:
        """p(y_t = c), (B, T, C), zero past each length; differentiable."""

        def compute() -> Tensor:
            self._require_feasible()
            return ops.marginals(self.potentials, backend=self.backend)

        return self._once("marginals", compute)

    @property
    def edge_marginals(self) -> Tensor:
        """p(y_t = i, y_t+1 = j), (B, T-1, C, C), or (B, T-1, E) for sparse transitions; zero past each length."""

        def compute() -> Tensor:
            self._require_feasible()
            return ops.edge_marginals(self.potentials, backend=self.backend)

        return self._once("edge_marginals", compute)

    def _may_be_infeasible(self) -> bool:
        """Whether any score is -inf: a chain without such a score always has a labelling."""
        moves = self.potentials.transitions
        if isinstance(moves, SparseTransitions):
            return True
        tensors = (self.potentials.emissions, moves, self.potentials.start, self.potentials.end)
        return any(bool(torch.isneginf(x.detach()).any()) for x in tensors)

    def _viterbi(self) -> tuple[Tensor, Tensor]:
        if "viterbi" not in self._kept:
            scores, labels = ops.viterbi(self.potentials, backend=self.backend)
            self._kept["viterbi"] = self._feasible(scores), labels
        return self._kept["viterbi"]

    @property
    def mode(self) -> Tensor:
        """The labelling with the highest score (Viterbi), (B, T), -1 past the length; ties go to the lowest label."""
        return self._viterbi()[1]

    @property
    def max_score(self) -> Tensor:
        """The score of the mode, (B,); differentiable, with the mode's own parts as gradient."""
        scores, labels = self._viterbi()
        return ops.score(self.potentials, labels) if ops.carries_graph(self.potentials) else scores

    def top_k(self, k: int) -> tuple[Tensor, Tensor]:
        """The k highest scores (B, k), falling and differentiable, and their labellings (B, k, T).

        Where fewer than k exist the rest has score -inf and labels -1. Time O(B T C^2 k) at worst.

        >>> LinearChain(torch.tensor([[[0.0, 1.0]]]), torch.zeros(2, 2)).top_k(3)
        (tensor([[1., 0., -inf]]), tensor([[[ 1],
                 [ 0],
                 [-1]]]))
        """
        if k < 1:
            raise ShapeError(f"`k` must be at least 1, got {k}")
        scores, labels = ops.top_k(self.potentials, k, backend=self.backend)
        self._feasible(scores[:, 0])
        if ops.carries_graph(self.potentials):
            again = ops.score(self.potentials, labels.clamp(min=0).transpose(0, 1)).transpose(0, 1)
            scores = torch.where(torch.isneginf(scores), scores, again)
        return scores, labels

    def sample(
        self, sample_shape: Sequence[int] | torch.Size = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Exact samples, (\\*sample_shape, B, T) with -1 past the length: forward filtering, backward sampling.

        >>> LinearChain(torch.zeros(2, 3, 4), torch.zeros(4, 4)).sample((5,)).shape
        torch.Size([5, 2, 3])
        """
        self._require_feasible()
        emissions = self.potentials.emissions
        shape = torch.Size(sample_shape)
        uniforms = torch.rand(
            shape.numel(), *emissions.shape[:2], generator=generator, dtype=emissions.dtype, device=emissions.device
        )
        return ops.sample(self.potentials, uniforms, backend=self.backend).view(*shape, *emissions.shape[:2])

    def _labels(self, value: Tensor, lowest: int = 0, *, look: bool = True) -> Tensor:
        """The labels, if they fit; what lies past a length is not looked at."""
        batch, steps, size = self.potentials.emissions.shape
        if value.shape[-2:] != (batch, steps) or value.is_floating_point():
            raise ShapeError(
                f"labels must be integers (..., B, T) with B = {batch} and T = {steps} as in `emissions`, "
                f"got {tuple(value.shape)} {value.dtype}"
            )
        if value.dtype != torch.long or value.device != self.potentials.lengths.device:
            value = value.to(device=self.potentials.lengths.device, dtype=torch.long)
        if look and self.checked and value.numel():
            inside = torch.arange(steps, device=value.device) < self.potentials.lengths.unsqueeze(1)
            wrong = ((value < lowest) | (value >= size)) & inside
            if bool(wrong.any()):
                at = wrong.nonzero()[0].tolist()
                raise ShapeError(
                    f"labels must lie in {lowest}..{size - 1}, got {int(value[tuple(at)])} "
                    f"at position {at[-1]} of batch item {at[-2]}"
                )
        return value

    def score(self, value: Tensor) -> Tensor:
        """The score of labellings (..., B, T), as (..., B); labels past a length are ignored."""
        return ops.score(self.potentials, self._labels(value))

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y) of labellings (..., B, T), as (..., B): one fused pass for a single labelling of each item."""
        emissions, moves = self.potentials[:2]
        quick = self.backend == "auto" and isinstance(moves, Tensor) and len(emissions) > 0
        kernels = _dense_kernels(emissions.device) if quick else chain_kernels(self.backend, self.potentials)
        value = self._labels(value, look=value.dim() > 2 or not getattr(kernels, "checks_labels", False))
        if value.dim() > 2 or ("log_partition" in self._kept and not ops.carries_graph(self.potentials)):
            return ops.score(self.potentials, value) - self.log_partition
        settings: dict[str, Any] = {"low_memory": self.low_memory}
        if kernels is None:
            values, finite = ops.log_likelihood(self.potentials, value, backend=self.backend, **settings), None
        else:
            settings["look"] = self.checked
            values, finite = ops.watched_log_likelihood(self.potentials, value.contiguous(), kernels, **settings)
        # The one time that anything waits for the device:
        if self.checked and not (_all_finite(values.detach()) if finite is None else finite):
            self._labels(value)  # a kernel may give NaN for a label out of range; here it gets its name
            self._feasible(-values)
        return values

    @classmethod
    def _total_of_layer(cls, chain: Chain, labels: Tensor, low_memory: bool) -> Tensor | None:
        """The sum of :meth:`log_prob` over the batch: what most losses are made of; None where it takes a closer look.

        Shapes fit, as in :meth:`_of_layer`, and the backend is "auto".
        """
        if not _ready(chain) or labels.dtype != torch.long or labels.device != chain.emissions.device:
            return None
        kernels = _dense_kernels(chain.emissions.device)
        if kernels is None or not getattr(kernels, "checks_labels", False):
            return None
        total, finite = ops.watched_log_likelihood(
            chain, labels if labels.is_contiguous() else labels.contiguous(), kernels, low_memory=low_memory, total=True
        )
        # A sum is finite only if every term is.
        return total if finite or (finite is None and math.isfinite(float(total.detach()))) else None

    def cross_entropy(self, other: Structure) -> Tensor:
        """-E_p[log q(y)], (B,), infinite where p allows what q forbids; computed in float64, differentiable in both.

        >>> p = LinearChain(torch.zeros(1, 3, 2), torch.zeros(2, 2))
        >>> p.cross_entropy(p) / torch.tensor(2.0).log()
        tensor([3.])
        """
        if not isinstance(other, LinearChain) or other.potentials.emissions.shape != self.potentials.emissions.shape:
            got = tuple(other.potentials.emissions.shape) if isinstance(other, LinearChain) else type(other).__name__
            raise ShapeError(
                f"the other must be a LinearChain of shape {tuple(self.potentials.emissions.shape)}, got {got}"
            )
        if self.checked and not torch.equal(self.potentials.lengths, other.potentials.lengths):
            raise ShapeError("both chains must have the same `lengths`")
        # log Z and the expected score are nearly equal and large: their difference needs the digits.
        p, q = _double(self.potentials), _double(other.potentials)
        if other is not self:
            self._require_feasible()
        log_z = other._feasible(ops.log_partition(q, backend=other.backend))
        return (log_z - ops.expectation(p, q, backend=self.backend)).to(self.potentials.emissions.dtype)

    def given(self, labels: Tensor | None = None, *, allowed: Tensor | None = None) -> LinearChain:
        """The chain conditioned on some labels: p(y | y agrees), with its own, smaller log Z.

        ``labels`` (B, T) fixes a position where it is 0 or more and leaves it free where it is -1; ``allowed``
        (B, T, C) bool names the labels that each position may take. ``p.given(y).log_partition - p.log_partition`` is
        the log-probability of the partial labelling y, the objective of partial supervision.

        >>> chain = LinearChain(torch.zeros(1, 3, 2), torch.zeros(2, 2)).given(torch.tensor([[-1, 1, -1]]))
        >>> chain.log_partition.exp(), chain.marginals[0, 1]
        (tensor([4.]), tensor([0., 1.]))
        """
        emissions = self.potentials.emissions
        if labels is not None:
            labels = self._labels(labels, lowest=-1)
            if labels.dim() != 2:
                raise ShapeError(f"`labels` must be (B, T), got {tuple(labels.shape)}")
            own = torch.arange(self.num_labels, device=labels.device) == labels.unsqueeze(-1)
            emissions = emissions.masked_fill(~(own | (labels < 0).unsqueeze(-1)), float("-inf"))
        if allowed is not None:
            if allowed.shape != emissions.shape or allowed.dtype != torch.bool:
                raise ShapeError(
                    f"`allowed` must be bool {tuple(emissions.shape)}, got {tuple(allowed.shape)} {allowed.dtype}"
                )
            emissions = emissions.masked_fill(~allowed, float("-inf"))
        return self._like(self.potentials._replace(emissions=emissions))

    def tempered(self, temperature: float | Tensor) -> LinearChain:
        """All scores divided by a temperature: above 1 flatter, below 1 sharper; differentiable in it.

        >>> hot = LinearChain(torch.tensor([[[0.0, 4.0]]]), torch.zeros(2, 2)).tempered(4.0)
        >>> hot.log_prob(torch.tensor([[1]]))
        tensor([-0.3133])
        """
        if not isinstance(temperature, Tensor) and not temperature > 0:
            raise ConfigError(f"`temperature` must be above 0, got {temperature}")
        return self._like(ops.with_inputs(self.potentials, [x / temperature for x in ops.inputs_of(self.potentials)]))

    def max_posterior(self) -> Tensor:
        """The most probable label of each position by itself, (B, T): minimum Bayes risk under Hamming loss.

        It makes the fewest wrong labels in expectation, but may be a sequence that the constraints forbid.

        >>> LinearChain(torch.tensor([[[0.0, 1.0]]]), torch.zeros(2, 2)).max_posterior()
        tensor([[1]])
        """
        return self.posterior_threshold(0.0)

    def posterior_threshold(self, threshold: float, otherwise: int = -1) -> Tensor:
        """The most probable label where its posterior reaches the threshold, elsewhere ``otherwise``; (B, T).

        >>> LinearChain(torch.tensor([[[0.0, 1.0], [0.0, 9.0]]]), torch.zeros(2, 2)).posterior_threshold(0.9, 0)
        tensor([[0, 1]])
        """
        best, labels = self.marginals.detach().max(-1)
        labels = labels.masked_fill(best < threshold, otherwise)
        inside = torch.arange(labels.shape[1], device=labels.device) < self.potentials.lengths.unsqueeze(1)
        return labels.masked_fill(~inside, -1)

    def perturbed_mode(self, n: int = 1, *, scale: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """Perturb-and-MAP: modes of n copies with Gumbel noise times ``scale`` on every emission, (n, B, T).

        For a single position (T = 1) these are exact samples; along a chain they approximate them, at the price of one
        Viterbi pass each (Papandreou and Yuille, 2011).

        >>> LinearChain(torch.zeros(2, 3, 4), torch.zeros(4, 4)).perturbed_mode(5).shape
        torch.Size([5, 2, 3])
        """
        with torch.no_grad():
            noise = gumbel((n, *self.potentials.emissions.shape), self.potentials.emissions, generator)
            return self._noisy(noise, scale).mode.view(n, *self.potentials.emissions.shape[:2])

    def _noisy(self, noise: Tensor, scale: float) -> LinearChain:
        """The chain n times over in one batch, with noise (n, B, T, C) on its emissions."""
        n = len(noise)
        emissions, moves, start, end, lengths = self.potentials
        if isinstance(moves, Tensor) and moves.dim() > 2:
            moves = moves.unsqueeze(0).expand(n, *moves.shape).flatten(0, 1)
        chain = Chain((emissions + scale * noise).flatten(0, 1), moves, start, end, lengths.repeat(n))
        self._require_feasible()  # here, where items have their own numbers
        other = self._like(chain)
        other.checked = False
        other._batch_shape = torch.Size((len(chain.emissions),))
        return other

    def expected_mode(self, n: int = 100, *, scale: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
        """The mean of n perturbed modes as one-hot vectors, (B, T, C): a sparse, differentiable stand-in for the mode.

        The gradient in the emissions is the Monte Carlo estimate of Berthet et al. (2020); the transitions, which carry
        no noise, get none.

        >>> LinearChain(torch.zeros(1, 2, 3), torch.zeros(3, 3)).expected_mode(8).sum(-1)
        tensor([[1., 1.]])
        """
        noise = gumbel((n, *self.potentials.emissions.shape), self.potentials.emissions, generator)
        return PerturbedMode.apply(self.potentials.emissions, self, noise, scale)  # type: ignore[return-value]

    def relaxed_sample(
        self,
        sample_shape: Sequence[int] | torch.Size = (),
        *,
        temperature: float = 1.0,
        hard: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Marginals of the chain with Gumbel noise on its emissions, tempered, (\\*sample_shape, B, T, C).

        Differentiable in all scores; towards temperature 0 they become perturbed modes. ``hard`` gives those modes as
        one-hot vectors and keeps the relaxed gradient (straight through). Corro and Titov (2019).

        >>> LinearChain(torch.zeros(1, 2, 3), torch.zeros(3, 3)).relaxed_sample((4,), temperature=0.5).shape
        torch.Size([4, 1, 2, 3])
        """
        shape = torch.Size(sample_shape)
        emissions = self.potentials.emissions
        noisy = self._noisy(gumbel((shape.numel(), *emissions.shape), emissions, generator), 1.0)
        relaxed = noisy.tempered(temperature).marginals
        if hard:
            modes = noisy.mode
            onehot = torch.zeros_like(relaxed).scatter_(2, modes.clamp(min=0).unsqueeze(-1), 1.0)
            onehot = onehot * (modes >= 0).unsqueeze(-1)
            relaxed = onehot + (relaxed - relaxed.detach())
        return relaxed.view(*shape, *emissions.shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> LinearChain:
        """Not offered: repeat the scores instead."""
        raise NotImplementedError("a LinearChain does not expand; repeat its scores")

    def __repr__(self) -> str:
        batch, steps, size = self.potentials.emissions.shape
        return f"LinearChain(B={batch}, T={steps}, C={size}, backend={self.backend!r})"


@lru_cache(maxsize=16)
def _dense_kernels(device: torch.device) -> ModuleType | None:
    """Those that "auto" means for dense transitions on a device."""
    one = torch.zeros(1, 1, 1, device=device)
    return chain_kernels("auto", Chain(one, one[0], one[0, 0], one[0, 0], one[0, 0].long()))


def _ready(chain: Chain) -> bool:
    """Whether the scores have a type that kernels compute in, all the same, and lie on one device."""
    first = chain.emissions
    dtype, device = first.dtype, first.device
    for scores in chain[1:4]:
        if scores.dtype != dtype or scores.device != device:  # type: ignore[union-attr]
            return False
    return dtype in _TYPES and first.numel() > 0


def _all_finite(values: Tensor) -> bool:
    """A sum is finite only if every term is; few terms are added up by the host, which a GPU would be longer at."""
    on_host = not on_cpu(values) and len(values) <= 512
    return math.isfinite(sum(values.tolist()) if on_host else float(values.sum()))


def _double(chain: Chain) -> Chain:
    return ops.with_inputs(chain, [x.double() for x in ops.inputs_of(chain)])
