"""Linear chains: conditional random fields, hidden Markov models, Markov language models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from thalweg.errors import ShapeError
from thalweg.inference.structures.base import Structure
from thalweg.inference.structures.chain_inputs import (
    checked_lengths,
    difference,
    lowest_and_highest,
    nan_items,
    potentials_of,
    refuse_infinite,
)
from thalweg.inference.structures.inputs import require_tensor
from thalweg.kernels import chain as ops
from thalweg.kernels.dispatch import chain_kernels
from thalweg.kernels.potentials import Chain, SparseTransitions
from thalweg.kernels.semirings import Semiring
from thalweg.kernels.tracing import traced, uncompiled


@uncompiled
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
        low_memory: keep O(B sqrt(T) C) on a GPU and nothing on the CPU between forward and backward instead of
            O(B T C), at the price of walking forward twice; on a GPU with dense transitions that do not differ by step
            and without -inf.
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
        require_tensor("emissions", emissions)
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
        """Keep a result for the next call, unless it carries a graph, which one backward pass uses up.

        What is handed out is a copy: a caller may change it.
        """
        if ops.carries_graph(self.potentials):
            return compute()
        if name not in self._kept:
            self._kept[name] = compute()
        return self._kept[name].clone()

    def _require_feasible(self) -> str:
        """Raise for a score of +inf and for an item without any labelling; one look where all scores are finite.

        Returns the backend to ask: kernels on a GPU may pass over NaN, the reference does not.
        """
        if not self.checked or traced() or not self.potentials.emissions.numel():
            return self.backend
        lowest, highest = lowest_and_highest(self.potentials)
        if not highest < math.inf:
            refuse_infinite(self.potentials)
        sparse = isinstance(self.potentials.transitions, SparseTransitions)  # what is not listed is -inf
        if sparse or not lowest > -math.inf:
            with torch.no_grad():
                _ = self.log_partition
        return "reference" if math.isnan(highest) and bool(nan_items(self.potentials).any()) else self.backend

    def _feasible(self, values: Tensor) -> Tensor:
        """The values, if none is -inf; NaN where a score is; a score of +inf is told of."""
        if not self.checked or traced() or _all_finite(values.detach()):
            return values
        refuse_infinite(self.potentials)
        return super()._feasible(values)

    def _like(self, chain: Chain) -> LinearChain:
        """Other potentials that fit, without a second look at them."""
        other = object.__new__(type(self))
        Structure.__init__(other, chain.emissions.shape[:1], chain.emissions.shape[1:2], validate_args=self.checked)
        other.potentials, other.backend, other.low_memory = chain, self.backend, self.low_memory
        other._kept = {}
        return other

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Emissions, transitions (the scores of edges where they are sparse), start and end."""
        return ops.inputs_of(self.potentials)

    @property
    def inside(self) -> Tensor:
        """Which positions belong to an item, (B, T, 1)."""
        return ops.inside(self.potentials.lengths, self.potentials.steps).unsqueeze(-1)

    def with_inputs(self, inputs: tuple[Tensor, ...]) -> LinearChain:
        """The chain under other scores of the same shapes and type."""
        return self._like(ops.with_inputs(self.potentials, inputs))

    def fold(self, semiring: Semiring, *inputs: tuple[Tensor, ...]) -> Tensor:
        """The recursion by plain PyTorch, whatever the backend."""
        return ops.fold(semiring, *(ops.with_inputs(self.potentials, each) for each in inputs))

    def parts_of(self, value: Tensor) -> Tensor:
        """Labellings (.., B, T) as one-hot vectors (.., B, T, C), zero past each length.

        >>> LinearChain(torch.zeros(1, 2, 2), torch.zeros(2, 2), lengths=[1]).parts_of(torch.tensor([[1, -1]]))
        tensor([[[0., 1.],
                 [0., 0.]]])
        """
        labels = self._labels(value).unsqueeze(-1)
        own = torch.arange(self.num_labels, device=labels.device) == labels
        return (own & self.inside).to(self.potentials.emissions.dtype)

    def structure_of(self, parts: Tensor) -> Tensor:
        """The labels that one-hot vectors mark, -1 where they mark none."""
        return torch.where(parts.sum(-1) > 0, parts.argmax(-1), -1)

    @property
    def log_partition(self) -> Tensor:
        """log Z, (B,); its gradient in the emissions are the marginals."""

        def compute() -> Tensor:
            backend = self._backend()
            values = ops.log_partition(self.potentials, backend=backend, low_memory=self.low_memory)
            if self._diverged(values, backend):
                values = ops.log_partition(self.potentials, backend="reference")
            return self._feasible(values)

        return self._once("log_partition", compute)

    def _backend(self) -> str:
        """The backend to ask for values: on a GPU, maxima pass over a NaN in transitions that differ by step."""
        moves = self.potentials.transitions
        if not isinstance(moves, Tensor) or moves.dim() < 4 or not moves.is_cuda or not moves.numel():
            return self.backend
        looked = self.checked and not traced() and bool(moves.detach().amax().isnan())
        return "reference" if looked and bool(nan_items(self.potentials).any()) else self.backend

    def _diverged(self, values: Tensor, backend: str) -> bool:
        """Whether kernels gave what is not finite because of a NaN, which the reference follows everywhere."""
        if not self.checked or traced() or backend == "reference" or _all_finite(values.detach()):
            return False
        return bool(nan_items(self.potentials).any())

    @property
    def marginals(self) -> Tensor:
        """p(y_t = c), (B, T, C), zero past each length; differentiable."""

        def compute() -> Tensor:
            return ops.marginals(self.potentials, backend=self._require_feasible())

        return self._once("marginals", compute)

    @property
    def edge_marginals(self) -> Tensor:
        """p(y_t = i, y_t+1 = j), (B, T-1, C, C), or (B, T-1, E) for sparse transitions; zero past each length."""

        def compute() -> Tensor:
            return ops.edge_marginals(self.potentials, backend=self._require_feasible())

        return self._once("edge_marginals", compute)

    def _viterbi(self) -> tuple[Tensor, Tensor]:
        if traced():
            return ops.viterbi(self.potentials, backend=self.backend)
        if "viterbi" not in self._kept:
            backend = self._backend()
            scores, labels = ops.viterbi(self.potentials, backend=backend)
            if self._diverged(scores, backend):
                scores, labels = ops.viterbi(self.potentials, backend="reference")
            self._kept["viterbi"] = self._feasible(scores), labels
        scores, labels = self._kept["viterbi"]
        return scores.clone(), labels.clone()

    @property
    def mode(self) -> Tensor:
        """The labelling with the highest score (Viterbi), (B, T), -1 past the length; ties go to the lowest label."""
        return self._viterbi()[1]

    @property
    def max_score(self) -> Tensor:
        """The score of the mode, (B,); differentiable, with the mode's own parts as gradient."""
        scores, labels = self._viterbi()
        return self._scored_again(scores, labels) if ops.carries_graph(self.potentials) else scores

    def _scored_again(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The scores (.., B) of labellings (.., B, T), differentiable; NaN, as its gradient, where they were NaN."""
        again = ops.score(self.potentials, labels.clamp(min=0))
        return again * torch.where(scores.isnan(), math.nan, 1.0).to(again.dtype)

    def top_k(self, k: int) -> tuple[Tensor, Tensor]:
        """The k highest scores (B, k), falling and differentiable, and their labellings (B, k, T).

        Where fewer than k exist the rest has score -inf and labels -1. Time O(B T C^2 k) at worst.

        >>> LinearChain(torch.tensor([[[0.0, 1.0]]]), torch.zeros(2, 2)).top_k(3)
        (tensor([[1., 0., -inf]]), tensor([[[ 1],
                 [ 0],
                 [-1]]]))
        """
        self._positive("k", k)
        backend = self._backend()
        scores, labels = ops.top_k(self.potentials, k, backend=backend)
        if self._diverged(scores[:, 0], backend):
            scores, labels = ops.top_k(self.potentials, k, backend="reference")
        self._feasible(scores[:, 0])
        if ops.carries_graph(self.potentials):
            again = self._scored_again(scores.t(), labels.transpose(0, 1)).t()
            scores = torch.where(torch.isneginf(scores), scores, again)
        return scores, labels

    def sample(
        self, sample_shape: Sequence[int] | torch.Size = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Exact samples, (\\*sample_shape, B, T) with -1 past the length: forward filtering, backward sampling.

        >>> LinearChain(torch.zeros(2, 3, 4), torch.zeros(4, 4)).sample((5,)).shape
        torch.Size([5, 2, 3])
        """
        backend = self._require_feasible()
        emissions = self.potentials.emissions
        shape = torch.Size(sample_shape)
        uniforms = torch.rand(
            shape.numel(), *emissions.shape[:2], generator=generator, dtype=emissions.dtype, device=emissions.device
        )
        return ops.sample(self.potentials, uniforms, backend=backend).view(*shape, *emissions.shape[:2])

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
        if look and self.checked and value.numel() and not traced():
            wrong = ((value < lowest) | (value >= size)) & self.inside.squeeze(-1)
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
        if value.dim() > 2 or ("log_partition" in self._kept and not ops.carries_graph(self.potentials)):
            return ops.score(self.potentials, self._labels(value)) - self.log_partition
        return self._log_prob(value, total=False)

    def total_log_prob(self, value: Tensor) -> Tensor:
        """The sum of :meth:`log_prob` over the batch, (): what most losses are made of, in fewer steps of autograd.

        >>> LinearChain(torch.zeros(2, 3, 4), torch.zeros(4, 4)).total_log_prob(torch.zeros(2, 3, dtype=torch.long))
        tensor(-8.3178)
        """
        return self.log_prob(value).sum() if value.dim() != 2 else self._log_prob(value, total=True)

    def _log_prob(self, value: Tensor, *, total: bool) -> Tensor:
        backend = self._backend()
        kernels = ops.trusted_kernels(backend, self.potentials)
        value = self._labels(value, look=kernels is None)  # kernels look themselves
        settings: dict[str, Any] = {"low_memory": self.low_memory, "total": total}
        if kernels is None:
            values, finite = ops.log_likelihood(self.potentials, value, backend=backend, **settings), None
        else:
            values, finite = ops.watched_log_likelihood(self.potentials, value, kernels, **settings)
        if not self.checked or traced():
            return values
        # The one time that anything waits for the device:
        if _all_finite(values.detach().view(-1)) if finite is None else finite:
            return values
        self._labels(value)  # a kernel may give NaN for a label out of range; here it gets its name
        if total:  # a sum is finite only if every term is: each is looked at by itself
            return self._log_prob(value, total=False).sum()
        if kernels is not None and bool(nan_items(self.potentials).any()):
            return ops.log_likelihood(self.potentials, value, backend="reference")
        return -self._feasible(-values)

    def entropy(self) -> Tensor:
        """-E_p[log p(y)], (B,), in nats; computed in float64, differentiable.

        >>> LinearChain(torch.zeros(1, 3, 2), torch.zeros(2, 2)).entropy() / torch.tensor(2.0).log()
        tensor([3.])
        """
        return self.cross_entropy(self)

    def cross_entropy(self, other: Structure) -> Tensor:
        """-E_p[log q(y)], (B,), infinite where p allows what q forbids; computed in float64, differentiable in both.

        >>> p = LinearChain(torch.zeros(1, 3, 2), torch.zeros(2, 2))
        >>> p.cross_entropy(p) / torch.tensor(2.0).log()
        tensor([3.])
        """
        p, q, backend = self._pair(other)
        log_z = ops.log_partition(q, backend=backend)
        return (log_z - ops.expectation(p, q, backend=backend)).to(self.potentials.emissions.dtype)

    def kl_divergence(self, other: Structure) -> Tensor:
        """See :meth:`Structure.kl_divergence`; the transitions may be of different kinds.

        >>> p = LinearChain(torch.zeros(1, 3, 2), torch.zeros(2, 2))
        >>> p.kl_divergence(p), p.kl_divergence(LinearChain(torch.tensor([[[1e-4, 0.0]] * 3]), torch.zeros(2, 2)))
        (tensor([0.]), tensor([3.7500e-09]))
        """
        p, q, backend = self._pair(other)
        apart = ops.expectation(p, difference(q, p), backend=backend)
        log_z = ops.log_partition(q, backend=backend) - ops.log_partition(p, backend=backend)
        return (log_z - apart).clamp(min=0).to(self.potentials.emissions.dtype)

    def _pair(self, other: Structure) -> tuple[Chain, Chain, str]:
        """This chain and another of the same shape in float64, and the backend for both: this one's, if it can be."""
        self._require_alike(other)
        assert isinstance(other, LinearChain)
        backend = self._require_feasible()
        theirs = backend if other is self else other._require_feasible()
        sparse = isinstance(other.potentials.transitions, SparseTransitions)  # which not every backend has
        alike = sparse == isinstance(self.potentials.transitions, SparseTransitions)
        p, q = (ops.with_inputs(each.potentials, self._double(each)) for each in (self, other))
        return p, q, "reference" if theirs == "reference" else backend if alike else "auto"

    def given(self, labels: Tensor | None = None, *, allowed: Tensor | None = None) -> LinearChain:
        """The chain conditioned on some labels: p(y | y agrees), with its own, smaller log Z.

        ``labels`` (B, T) fixes a position where it is 0 or more and leaves it free where it is -1; ``allowed``
        (B, T, C) bool names the labels that each position may take. ``p.given(y).log_partition - p.log_partition`` is
        the log-probability of the partial labelling y, the objective of partial supervision.

        >>> chain = LinearChain(torch.zeros(1, 3, 2), torch.zeros(2, 2)).given(torch.tensor([[-1, 1, -1]]))
        >>> chain.log_partition.exp(), chain.marginals[0, 1]
        (tensor([4.]), tensor([0., 1.]))
        """
        chain: Structure = self if allowed is None else super().given(allowed=allowed)
        if labels is not None:
            labels = self._labels(labels, lowest=-1)
            if labels.dim() != 2:
                raise ShapeError(f"`labels` must be (B, T), got {tuple(labels.shape)}")
            own = torch.arange(self.num_labels, device=labels.device) == labels.unsqueeze(-1)
            chain = Structure.given(chain, allowed=own | (labels < 0).unsqueeze(-1))
        return cast(LinearChain, chain)

    def max_posterior(self) -> Tensor:
        """The most probable label of each position by itself, (B, T): minimum Bayes risk under Hamming loss.

        It makes the fewest wrong labels in expectation, but may be a sequence that the constraints forbid.

        >>> LinearChain(torch.tensor([[[0.0, 1.0]]]), torch.zeros(2, 2)).max_posterior()
        tensor([[1]])
        """
        return self.posterior_threshold(0.0)

    def posterior_threshold(self, threshold: float, otherwise: int = -1) -> Tensor:
        """The most probable label where its posterior reaches the threshold, elsewhere (or NaN) ``otherwise``; (B, T).

        >>> LinearChain(torch.tensor([[[0.0, 1.0], [0.0, 9.0]]]), torch.zeros(2, 2)).posterior_threshold(0.9, 0)
        tensor([[0, 1]])
        """
        best, labels = self.marginals.detach().max(-1)
        return labels.masked_fill(~(best >= threshold), otherwise).masked_fill(~self.inside.squeeze(-1), -1)

    def _noisy(self, noise: Tensor) -> LinearChain:
        """The chain n times over in one batch, which kernels take, with noise (n, B, T, C) on its emissions."""
        n = len(noise)
        emissions, moves, start, end, lengths = self.potentials
        if isinstance(moves, Tensor) and moves.dim() > 2:
            moves = moves.unsqueeze(0).expand(n, *moves.shape).flatten(0, 1)
        other = self._like(Chain((emissions + noise).flatten(0, 1), moves, start, end, lengths.repeat(n)))
        other.checked = False  # items have other numbers there
        return other

    def _modes_under(self, noise: Tensor) -> Tensor:
        with torch.no_grad():
            return self._noisy(noise).mode.view(noise.shape[:-1])

    def _marginals_under(self, noise: Tensor, temperature: float) -> Tensor:
        return self._noisy(noise).tempered(temperature).marginals.view(noise.shape)

    def __repr__(self) -> str:
        batch, steps, size = self.potentials.emissions.shape
        return f"LinearChain(B={batch}, T={steps}, C={size}, backend={self.backend!r})"


def _all_finite(values: Tensor) -> bool:
    """A sum is finite only if every term is; few terms are added up by the host, sooner than torch would on any device.

    A sum of finite terms may overflow: those who ask look closer then.
    """
    return math.isfinite(sum(values.tolist()) if len(values) <= 512 else float(values.sum()))
