"""Several models as one: the mean of their distributions, or a vote over their answers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from thalweg.errors import ConfigError, ShapeError
from thalweg.inference.search.protocol import Autoregressive, Hypotheses, batch_size, check_log_probs


class Ensemble:
    r"""M models over the same symbols as one :class:`Autoregressive`, for every search.

    .. math:: p(v \mid y_{<t}) = \sum_m w_m p_m(v \mid y_{<t}) \quad \text{(mean)}, \qquad
              p(v \mid y_{<t}) \propto \prod_m p_m(v \mid y_{<t})^{w_m} \quad \text{(product)}

    with weights that sum to one. The product is normalised anew at each step, so that scores stay
    log-probabilities; a symbol that one model forbids is then forbidden. Time and memory are those of the M models.

    Args:
        models: at least one; all must have the same ``bos``, ``eos`` and ``vocab_size``.
        weights: M numbers, at least 0 and not all 0; scaled to sum to one. Equal without them.
        mode: ``mean`` or ``product``.
        inputs: ``shared`` gives the same inputs to every model; with ``each``, inputs are a tuple of M.

    >>> from thalweg.inference import TableModel, greedy
    >>> one = TableModel.markov([[0.4, 0.6], [0.5, 0.5]], bos=0, eos=1, logarithms=False)
    >>> other = TableModel.markov([[0.9, 0.1], [0.5, 0.5]], bos=0, eos=1, logarithms=False)
    >>> both = Ensemble([one, other])
    >>> both.step(torch.tensor([0]), both.begin(torch.tensor([0])))[0].exp()
    tensor([[0.6500, 0.3500]])
    >>> greedy(both, torch.tensor([0]), max_length=2).sequences()
    [[[0, 0]]]
    """

    def __init__(
        self,
        models: Sequence[Autoregressive],
        *,
        weights: Sequence[float] | None = None,
        mode: Literal["mean", "product"] = "mean",
        inputs: Literal["shared", "each"] = "shared",
    ) -> None:
        self.models = tuple(models)
        if not self.models:
            raise ConfigError("`models` must hold at least one model, got none")
        for name in ("vocab_size", "bos", "eos"):
            values = [getattr(model, name) for model in self.models]
            if any(value != values[0] for value in values):
                raise ConfigError(f"`models` must have the same `{name}`, got {values}; train them with one alphabet")
        if mode not in ("mean", "product"):
            raise ConfigError(f"`mode` must be 'mean' or 'product', got {mode!r}")
        if inputs not in ("shared", "each"):
            raise ConfigError(f"`inputs` must be 'shared' or 'each', got {inputs!r}")
        self.mode, self.inputs = mode, inputs
        self.weights = _shares(weights, len(self.models))
        self.bos, self.eos, self.vocab_size = self.models[0].bos, self.models[0].eos, self.models[0].vocab_size
        # Without a model's own word, a search looks where the inputs are.
        self.device = getattr(self.models[0], "device", None)

    def begin(self, inputs: Any) -> tuple[Any, ...]:
        """The state of every model."""
        if self.inputs == "shared":
            return tuple(model.begin(inputs) for model in self.models)
        # Searches take the first part of a tuple for the batch, and a list for a batch of things.
        if not isinstance(inputs, tuple) or len(inputs) != len(self.models):
            got = f"{len(inputs)}" if isinstance(inputs, tuple) else type(inputs).__name__
            raise ShapeError(f"`inputs` must be a tuple of {len(self.models)}, one for each model, got {got}")
        sizes = [batch_size(part) for part in inputs]
        if any(size != sizes[0] for size in sizes):
            raise ShapeError(f"`inputs` must hold the same number of items for every model, got {sizes}")
        return tuple(model.begin(part) for model, part in zip(self.models, inputs, strict=True))

    def step(self, tokens: Tensor, state: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        """Feed every model the same symbols ``(R,)``; their joint log-probabilities ``(R, V)``."""
        answers, states = [], []
        for model, own in zip(self.models, state, strict=True):
            log_probs, own = model.step(tokens, own)
            answers.append(check_log_probs(log_probs, tokens.size(0), self.vocab_size))
            states.append(own)
        return self._joint(answers), tuple(states)

    def _joint(self, answers: list[Tensor]) -> Tensor:
        if len(answers) == 1:
            return answers[0]
        wide = torch.float32 if answers[0].dtype in (torch.float16, torch.bfloat16) else answers[0].dtype
        stacked = torch.stack([answer.to(wide) for answer in answers])  # (M, R, V)
        weights = stacked.new_tensor(self.weights).view(-1, 1, 1)
        if self.mode == "mean":
            # Rounding can lift a mean of certainties above 0, which log-probabilities never are.
            return (stacked + weights.log()).logsumexp(dim=0).clamp(max=0)
        # A model without weight has no say, not even by -inf.
        product = (stacked * weights).masked_fill(weights == 0, 0).sum(dim=0)
        # Where nothing can follow, normalising would make NaN of -inf.
        nothing = product.amax(dim=1, keepdim=True) == -math.inf
        return product.masked_fill(nothing, 0).log_softmax(dim=1).masked_fill(nothing, -math.inf)

    def select(self, state: tuple[Any, ...], rows: Tensor) -> tuple[Any, ...]:
        """Every model's state of the chosen rows."""
        return tuple(model.select(own, rows) for model, own in zip(self.models, state, strict=True))


def _shares(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1 / count] * count
    shares = [float(weight) for weight in weights]
    if len(shares) != count:
        raise ConfigError(f"`weights` must be {count} numbers, one for each model, got {len(shares)}")
    if not all(0 <= share < math.inf for share in shares) or not sum(shares) > 0:
        raise ConfigError(f"`weights` must be at least 0, finite and not all 0, got {shares}")
    return [share / sum(shares) for share in shares]


class Vote(NamedTuple):
    """One item's answer by vote.

    >>> Vote("yes", 2, 1.0).votes
    2
    """

    answer: Any
    """A tuple of symbols, or whatever the models' answers were; None where no model has one."""
    votes: int
    """Models whose first answer it is."""
    probability: float
    """Sum over those models of the probability they give it; 0 where they say none."""


def majority_vote(answers: Sequence[Hypotheses] | Sequence[Sequence[Hashable | None]]) -> list[Vote]:
    """For each item the answer that most models give first.

    Ties go to the greater sum of probabilities over the models that vote for it, then to the model that stands first.

    Args:
        answers: of each of M models, its :class:`Hypotheses` (the first of each item is its vote; a missing one
            is none) or a list of B answers, texts for example, None where there is none.
    Returns:
        B votes. Time O(M B).

    >>> [vote.answer for vote in majority_vote([["a", "x"], ["b", "x"], ["b", "y"]])]
    ['b', 'x']
    """
    if not answers:
        raise ConfigError("`answers` must be those of at least one model, got none")
    ballots = [_ballots(of_model) for of_model in answers]
    sizes = [len(ballot) for ballot in ballots]
    if any(size != sizes[0] for size in sizes):
        raise ShapeError(f"`answers` must be for the same items, got {sizes} of them")
    return [next(iter(count_votes(item)), Vote(None, 0, 0.0)) for item in zip(*ballots, strict=True)]


def _ballots(answers: Hypotheses | Sequence[Hashable | None]) -> list[tuple[Hashable | None, float]]:
    if not isinstance(answers, Hypotheses):
        return [(answer, 0.0) for answer in answers]
    first, lengths = answers.tokens[:, 0].tolist(), answers.lengths[:, 0].tolist()
    chances = answers.scores[:, 0].double().exp().tolist()
    rows = zip(first, lengths, chances, strict=True)
    return [(tuple(row[:length]) if length else None, chance) for row, length, chance in rows]


def count_votes(ballots: Iterable[tuple[Hashable | None, float]]) -> list[Vote]:
    """All answers to one item, those with most votes first; ties as in :func:`majority_vote`.

    Args:
        ballots: of each model its first answer, None where it has none, and the probability it gives it.

    >>> [(vote.answer, vote.votes) for vote in count_votes([("a", 0.9), ("b", 0.2), ("b", 0.1), (None, 0.0)])]
    [('b', 2), ('a', 1)]
    """
    votes: dict[Hashable, Vote] = {}  # in the order of the models, which sorting keeps among equals
    for answer, chance in ballots:
        if answer is not None:
            before = votes.get(answer, Vote(answer, 0, 0.0))
            votes[answer] = Vote(answer, before.votes + 1, before.probability + chance)
    return sorted(votes.values(), key=lambda vote: (-vote.votes, -vote.probability))
