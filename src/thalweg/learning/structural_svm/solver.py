r"""Structural support vector machines over any structure, by block-coordinate Frank-Wolfe with its duality gap."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, DataError, NotFittedError
from thalweg.layers.sparse import sparsemax
from thalweg.learning.structural_svm.block import Block, Cost, Weights, blocks_of, offending, structure_of
from thalweg.limits import COUNT, SEED, check_numbers


class GapPoint(NamedTuple):
    """The certificate after some passes: the optimum lies between ``dual`` and ``primal``.

    Attributes:
        passes: over all examples.
        seconds: that the passes took, without certificates.
        primal: the objective of the weights that would be the answer now.
        last: that of the last iterate.
        dual: the objective of the dual, which never falls.

    >>> str(GapPoint(5, 1.5, 0.25, 0.26, 0.2))
    'pass 5: primal 0.25, dual 0.2, gap 0.05 (1.5 s)'
    """

    passes: int
    seconds: float
    primal: float
    last: float
    dual: float

    @property
    def gap(self) -> float:
        """Primal less dual: at most so far is ``primal`` from the optimum."""
        return self.primal - self.dual

    def __str__(self) -> str:
        facts = f"primal {self.primal:.6g}, dual {self.dual:.6g}, gap {self.gap:.3g}"
        return f"pass {self.passes}: {facts} ({self.seconds:.1f} s)"


@dataclass
class DualState:
    """Where learning stands: what :meth:`StructuralSVM.fit` can start from, also under another regularisation.

    Attributes:
        blocks: the mixtures of structures, a block for each batch.
        average: the weighted mean of all iterates so far; steps: how many those were.
        passes, seconds: so far.
        order: the state of the random numbers that order the blocks.

    >>> from thalweg.energies import LinearTagger
    >>> batches = [((torch.eye(2).view(1, 2, 2), torch.tensor([2])), torch.tensor([[0, 1]]))]
    >>> StructuralSVM(LinearTagger(2, 2), passes=3).fit(batches).dual_.passes
    3
    """

    blocks: list[Block]
    average: Weights
    order: Tensor
    steps: int = 0
    passes: int = 0
    seconds: float = 0.0


class StructuralSVM:
    r"""Maximum-margin learning of any structure that is linear in its weights w,

    .. math:: \min_w\ \frac{\lambda}{2} \|w\|^2
        + \frac1n \sum_i \max_y \big[\Delta_i(y) + s(x_i, y; w) - s(x_i, y_i; w)\big]

    by block-coordinate Frank-Wolfe on the dual, in which each example mixes structures, p_i(y) >= 0 with sum 1:

    .. math:: \max_p\ \frac1n \sum_{i,y} p_i(y) \Delta_i(y) - \frac{\lambda}{2} \|w(p)\|^2, \qquad
        w(p) = \frac{1}{\lambda n} \sum_{i,y} p_i(y)\, \nabla_w \big[s(x_i, y_i; w) - s(x_i, y; w)\big]

    A pass visits every block of examples once in random order. A visit finds the structure of greatest cost plus score
    of each example, by exact inference, moves the mixtures towards these as far as the dual grows, and then
    ``corrections`` times along the projected gradient in the mixtures, without further inference. Every step has its
    exact length, so the dual never falls. With blocks of one example and no corrections it is the method of
    Lacoste-Julien et al. (2013). Features are never built: products with them are scores and gradients of scores, so
    memory is O(d) for d weights and, for each example, the few structures that carry weight.

    Args:
        model: a module from the inputs of a batch to a :class:`~thalweg.inference.Structure` whose scores are linear in
            its parameters. ``fit`` sets these.
        regularisation: lambda, above 0; None is 1/n.
        cost: of a wrong answer. A number w: w for each part that gold has not (of chains: each wrong label). A tensor
            (C, C) for parts whose last axis are labels: ``cost[i, j]`` for j where gold has i. Or a function of a
            structure and its gold (B, ...) that gives what each part costs, as the marginals.
        passes: at most so many.
        tol: stop when the gap is at most ``tol`` times the primal objective.
        corrections: steps of a visit after the first.
        gap_every: passes between certificates, each of which asks for inference on all examples once (twice with
            ``averaged``); the last pass always has one.
        averaged: the answer is the mean of all iterates, weighted by their number, where that has the better objective.
        seed: of the order of blocks.

    Attributes:
        dual_: the :class:`DualState`, to go on from.
        gap_curve: a :class:`GapPoint` for every certificate.
        converged_: whether the gap came down to ``tol``.

    >>> from thalweg.energies import LinearTagger
    >>> x, lengths = torch.eye(3).view(1, 3, 3), torch.tensor([3])
    >>> batches = [((x, lengths), torch.tensor([[0, 1, 1]]))]
    >>> svm = StructuralSVM(LinearTagger(3, 2), regularisation=0.1, tol=1e-6).fit(batches)
    >>> svm.predict((x, lengths)), svm.converged_, round(svm.gap_curve[-1].primal, 4)
    (tensor([[0, 1, 1]]), True, 0.0339)
    """

    gap_curve: list[GapPoint]
    dual_: DualState
    converged_: bool

    def __init__(
        self,
        model: nn.Module,
        *,
        regularisation: float | None = None,
        cost: Cost = 1.0,
        passes: int = 100,
        tol: float = 1e-2,
        corrections: int = 3,
        gap_every: int = 5,
        averaged: bool = True,
        seed: int = 0,
    ):
        self.model, self.regularisation, self.cost = model, regularisation, cost
        self.passes, self.tol, self.corrections = passes, tol, corrections
        self.gap_every, self.averaged, self.seed = gap_every, averaged, seed
        self._check()

    def _check(self) -> None:
        check_numbers(self, "svm", 1, COUNT, "passes", "gap_every")
        check_numbers(self, "svm", 0, COUNT, "corrections")
        check_numbers(self, "svm", 0, SEED, "seed")
        check_numbers(self, "svm", 0, math.inf, "tol", whole=False)
        if self.regularisation is not None:
            check_numbers(self, "svm", 0, math.inf, "regularisation", whole=False, strict=True)
        if not isinstance(self.cost, Tensor) and not callable(self.cost):
            check_numbers(self, "svm", 0, math.inf, "cost", whole=False)

    def fit(
        self,
        batches: Iterable[tuple[Any, Tensor]] = (),
        *,
        start: DualState | None = None,
        watch: Callable[[GapPoint], object] | None = None,
    ) -> Self:
        """Learn from batches of inputs and gold structures ``(B, *event)``; the model gets the weights.

        Args:
            batches: kept as they are: a batch is a block. None are needed with ``start``, which has them.
            start: the ``dual_`` of an earlier fit, which stays as it is. Under the same settings learning goes on as if
                it had not ended; under another regularisation it begins near the optimum.
            watch: gets every certificate, the model having the weights that would be the answer; ``watch=print`` shows
                the progress.

        Time O(d) a visit beside what inference and scores cost.
        """
        self.model.requires_grad_(True)
        state = self._begin(batches) if start is None else _resumed(start)
        self._count = sum(block.size for block in state.blocks)
        self._scale = 1 / self._count if self.regularisation is None else float(self.regularisation)
        generator = torch.Generator().manual_seed(self.seed)
        if len(state.order):
            generator.set_state(state.order)
        self.gap_curve, self.converged_, self.dual_ = [], False, state
        if start is None:
            _require_linear(self.model, state.blocks)
        self._rebuild(state.blocks)
        if start is None:
            state.average = _copied(self._weights())
        end = state.passes + self.passes
        while state.passes < end and not self.converged_:
            self._pass(state, generator)
            if state.passes % self.gap_every == 0 or state.passes == end:
                self._certify(state, watch)
        state.order = generator.get_state()
        self._put(self._answer)
        return self

    def predict(self, inputs: Any) -> Tensor:
        """The structure of highest score for each item, ``(B, *event)``."""
        if not hasattr(self, "gap_curve"):
            raise NotFittedError("this StructuralSVM has no weights yet: call `fit` first")
        with torch.no_grad():
            return structure_of(self.model, inputs).mode

    def objective(self, batches: Iterable[tuple[Any, Tensor]]) -> float:
        """The primal objective of the model's weights on some batches, of which n is the number of examples."""
        blocks = blocks_of(self.model, batches, self.cost)
        count = sum(block.size for block in blocks)
        return self._primal(blocks, 1 / count if self.regularisation is None else float(self.regularisation))

    def _begin(self, batches: Iterable[tuple[Any, Tensor]]) -> DualState:
        weights = self._weights()
        if not weights:
            raise ConfigError("the model must have parameters, got none")
        return DualState(blocks_of(self.model, batches, self.cost), {}, torch.empty(0, dtype=torch.uint8))

    # Weights are the model's own parameters while learning.

    def _weights(self) -> Weights:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def _put(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def _pulled(self, scores: Tensor, along: Tensor) -> Weights:
        """The change of w when mixtures (K, B) change by ``along``: scores (K, B) pulled back to the weights."""
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        total = (along * scores).sum()
        found = torch.autograd.grad(total, parameters, retain_graph=True, materialize_grads=True)
        factor = -1 / (self._scale * self._count)
        return {name: each.mul_(factor) for name, each in zip(names, found, strict=True)}

    def _rebuild(self, blocks: list[Block]) -> None:
        """w of the mixtures, free of the rounding of many steps."""
        built = {name: torch.zeros_like(weight) for name, weight in self._weights().items()}
        for block in blocks:
            structure = structure_of(self.model, block.inputs)
            scores = torch.cat([structure.score(block.found), structure.score(block.gold).unsqueeze(0)])
            along = torch.cat([block.mixed, -torch.ones_like(block.mixed[:1])])
            _add(built, self._pulled(scores, along), 1.0)
        self._put(built)

    def _pass(self, state: DualState, generator: torch.Generator) -> None:
        began = time.perf_counter()
        for number in torch.randperm(len(state.blocks), generator=generator).tolist():
            self._visit(state.blocks[number])
            if self.averaged:
                state.steps += 1
                for name, weight in self._weights().items():
                    state.average[name].lerp_(weight, 2 / (state.steps + 2))
        state.passes += 1
        state.seconds += time.perf_counter() - began

    def _visit(self, block: Block) -> None:
        """One block: inference, the step towards what it found, and the corrections."""
        structure = structure_of(self.model, block.inputs)
        with torch.no_grad():
            best, _ = offending(structure, block)
            place, free = block.with_structures(structure, best)
        scores = structure.score(block.found)  # (K, B), with the graph that steps are pulled back through
        slopes = (scores.detach() + block.costs) / self._count  # of the dual in the mixtures, up to a number an item
        along = -block.mixed
        along[place, torch.arange(block.size, device=place.device)] += 1
        for left in range(self.corrections, -1, -1):
            slope = float((slopes * along).sum())
            if slope <= 0:
                break
            step = self._pulled(scores, along)
            curvature = self._scale * _squared(step)
            length = min(1.0, slope / curvature) if curvature > 0 else 1.0
            _add(self._weights(), step, length)
            block.mixed = block.mixed + length * along
            if left:
                with torch.no_grad():
                    slopes += length / self._count * structure_of(self.model, block.inputs, step).score(block.found)
                    rate = float(along.square().sum()) / curvature if curvature > 0 else 1.0
                    towards = sparsemax((block.mixed + rate * slopes).masked_fill(~free, -math.inf), dim=0)
                    along = towards - block.mixed
        block.drop()

    def _primal(self, blocks: list[Block], scale: float) -> float:
        with torch.no_grad():
            hinges = [offending(structure_of(self.model, block.inputs), block)[1].sum() for block in blocks]
        count = sum(block.size for block in blocks)
        return scale / 2 * _squared(self._weights()) + float(torch.stack(hinges).sum()) / count

    def _certify(self, state: DualState, watch: Callable[[GapPoint], object] | None) -> None:
        self._rebuild(state.blocks)
        own = _copied(self._weights())
        dual = float(sum(block.slack for block in state.blocks)) / self._count - self._scale / 2 * _squared(own)
        last = best = self._primal(state.blocks, self._scale)
        self._answer = own
        if self.averaged:
            self._put(state.average)
            averaged = self._primal(state.blocks, self._scale)
            if averaged < last:
                best, self._answer = averaged, _copied(state.average)
        point = GapPoint(state.passes, state.seconds, best, last, dual)
        self.gap_curve.append(point)
        # Where both are 0 up to rounding there is nothing left to learn.
        self.converged_ = point.gap <= max(self.tol * abs(best), 16 * torch.finfo(own[next(iter(own))].dtype).eps)
        if watch is not None:
            self._put(self._answer)
            watch(point)
        self._put(own)


def _resumed(state: DualState) -> DualState:
    """A state of its own; the batches themselves, which nobody changes, are shared."""
    return replace(state, blocks=[replace(block) for block in state.blocks], average=_copied(state.average))


def _copied(weights: Weights) -> Weights:
    return {name: weight.clone() for name, weight in weights.items()}


def _squared(weights: Weights) -> float:
    return sum(float(weight.square().sum()) for weight in weights.values())


def _add(weights: Weights, others: Weights, factor: float) -> None:
    with torch.no_grad():
        for name, weight in weights.items():
            weight.add_(others[name], alpha=factor)


def _require_linear(model: nn.Module, blocks: list[Block]) -> None:
    """Refuse scores that are not finite, or not linear in the weights: 0 at 0, and at twice w twice as much."""
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.randn(weight.shape, generator=generator, dtype=weight.dtype).to(weight.device)
        for name, weight in model.named_parameters()
    }
    for number, block in enumerate(blocks):
        with torch.no_grad():
            none, once, twice = (
                structure_of(model, block.inputs, {name: k * weight for name, weight in drawn.items()}).score(
                    block.gold
                )
                for k in (0.0, 1.0, 2.0)
            )
        wrong = ~(none + once + twice).isfinite()
        if bool(wrong.any()):
            raise DataError(
                f"item {int(wrong.nonzero()[0])} of batch {number} must have a finite score of its gold structure, "
                "got another; look for NaN or inf in its inputs, or for constraints that forbid it"
            )
        if not (torch.allclose(none, 0 * none, atol=1e-6) and torch.allclose(twice, 2 * once, rtol=1e-3, atol=1e-4)):
            raise ConfigError(
                "the scores must be linear in the parameters of the model, got ones that are not; drop constants and "
                "activations, or train it with `structured_losses.structured_hinge`"
            )
