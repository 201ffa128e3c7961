r"""Losses of whole sequences over lists of a model's own best answers.

A list holds the right answer first, then the finished hypotheses of a beam search that are not it. The search runs on
the current weights without dropout and without gradient; the log-probabilities of the list are then computed anew, with
gradient, by feeding each answer to the model, which reads each source once for all its answers, with one draw of
dropout. So a step costs one search and one pass over up to K + 1 targets in place of one: with K = 5 three to seven
times the time of a step of plain likelihood (a small LSTM on one CPU core).

Training begins with plain likelihood, so that the list has something to say, and keeps a share of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.data import Batch
from thalweg.errors import ConfigError, ShapeError, nearest
from thalweg.inference.search.beam.search import beam_search
from thalweg.inference.search.protocol import Autoregressive, Hypotheses
from thalweg.layers.padded import Padded
from thalweg.learning import losses
from thalweg.learning.losses.contrasts import from_hypotheses
from thalweg.learning.settings import Moment, TrainingConfig


class AnswerList(NamedTuple):
    """Answers to each of B sources, the right one first.

    >>> from thalweg.data import pad
    >>> answer_list(Hypotheses.none(1, 2, torch.device("cpu")), pad([[5]], end=3)).present
    tensor([[ True, False, False]])
    """

    tokens: Tensor
    """``(B, K + 1, T)`` int64, -1 past each end."""
    lengths: Tensor
    """``(B, K + 1)`` int64, the end counted."""
    present: Tensor
    """``(B, K + 1)`` bool: false where a hypothesis is missing, unfinished or the right answer itself."""


def answer_list(found: Hypotheses, gold: Padded) -> AnswerList:
    """The right answers and the hypotheses that contradict them.

    Args:
        found: the k best of a search, (B, K).
        gold: the right targets with their end, (B, T).

    >>> from thalweg.data import pad
    >>> from thalweg.inference import TableModel
    >>> model = TableModel({(): {1: -0.5, 2: -1.0}, (1,): {2: -0.7}}, vocab_size=3, bos=0, eos=2)
    >>> found = beam_search(model, torch.zeros(1, dtype=torch.long), width=2, max_length=4)
    >>> answer_list(found, pad([[1]], end=2)).tokens.tolist()
    [[[1, 2], [2, -1], [-1, -1]]]
    """
    own = gold.tokens.masked_fill(~gold.mask, -1).unsqueeze(1)
    others = from_hypotheses(found, gold)
    width = max(own.size(2), others.answers.size(2))
    own, tokens = (torch.nn.functional.pad(x, (0, width - x.size(2)), value=-1) for x in (own, others.answers))
    tokens = torch.cat((own, tokens), dim=1)
    return AnswerList(tokens, (tokens >= 0).sum(dim=2), tokens[:, :, 0] >= 0)


def edit_distances(tokens: Tensor, gold: Tensor) -> Tensor:
    """Levenshtein distances of sequences to their item's right one.

    Args:
        tokens: ``(B, K, T)`` int64, -1 past each end.
        gold: ``(B, T')`` int64, -1 past each end.
    Returns:
        ``(B, K)`` int64. Ends that both have change nothing.

    Time O(B K T T' / 64) on the CPU (bit-parallel, rapidfuzz).

    >>> edit_distances(torch.tensor([[[1, 2, 3], [2, 3, -1], [-1, -1, -1]]]), torch.tensor([[1, 3, 3]]))
    tensor([[1, 2, 3]])
    """
    from rapidfuzz.distance import Levenshtein

    if tokens.dim() != 3 or gold.dim() != 2 or tokens.size(0) != gold.size(0):
        raise ShapeError(
            f"`tokens` must be (B, K, T) and `gold` (B, T'), got {tuple(tokens.shape)} and {tuple(gold.shape)}"
        )
    lengths, ends = (tokens >= 0).sum(dim=2).tolist(), (gold >= 0).sum(dim=1).tolist()
    right = [row[:end] for row, end in zip(gold.tolist(), ends, strict=True)]
    found = [
        Levenshtein.distance(row[:length], own)
        for rows, cuts, own in zip(tokens.tolist(), lengths, right, strict=True)
        for row, length in zip(rows, cuts, strict=True)
    ]
    return torch.tensor(found, dtype=torch.int64, device=tokens.device).view(tokens.shape[:2])


def list_logits(
    model: Callable[..., Tensor], source: Padded, answers: AnswerList, *, shared: bool = False, pad: int = 0
) -> tuple[Tensor, Padded, Tensor]:
    """The model's logits on every answer that is there, fed to it symbol by symbol.

    Args:
        model: from sources and targets to logits.
        source: B sources.
        answers: to each of them.
        shared: each source is encoded once for all its answers, by a model that takes ``items (N,)``, the source of
            each target; else it is encoded again for every answer, with the same result but for dropout and the
            statistics of batch norm.
        pad: the symbol that stands past the end of an answer.

    Returns:
        logits ``(N, T, V)`` of the N answers in order of items, the answers as targets, and the item of each ``(N,)``.

    >>> from thalweg.data import pad
    >>> answers = answer_list(Hypotheses.none(2, 1, torch.device("cpu")), pad([[5], [6, 7]], end=3))
    >>> logits, _, items = list_logits(lambda x, y: torch.zeros(*y.tokens.shape, 9), pad([[4], [4]]), answers)
    >>> logits.shape, items
    (torch.Size([2, 3, 9]), tensor([0, 1]))
    """
    items = answers.present.nonzero()[:, 0]
    tokens = answers.tokens[answers.present]
    mask = tokens >= 0
    target = Padded(tokens.masked_fill(~mask, pad), answers.lengths[answers.present].cpu(), mask)
    if shared:
        return model(source, target, items=items), target, items
    repeated = Padded(source.tokens[items], source.lengths[items.cpu()], source.mask[items])
    return model(repeated, target), target, items


def _margin(energies: Tensor, costs: Tensor, margin: float, beta: float) -> Tensor:
    return losses.hinge(energies[:, 0], energies[:, 1:], margin)


def _risk(energies: Tensor, costs: Tensor, margin: float, beta: float) -> Tensor:
    return losses.risk(energies, costs, beta)


def _softmax_margin(energies: Tensor, costs: Tensor, margin: float, beta: float) -> Tensor:
    first = torch.zeros(len(energies), dtype=torch.long, device=energies.device)
    return losses.softmax_margin(energies, first, margin * costs.to(energies.dtype), beta)


def _mce(energies: Tensor, costs: Tensor, margin: float, beta: float) -> Tensor:
    return losses.mce(energies[:, 0], energies[:, 1:], beta)


LIST_LOSSES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "margin": _margin,
    "risk": _risk,
    "softmax_margin": _softmax_margin,
    "mce": _mce,
}
"""Losses over a list by the name of ``training.loss``; see :func:`list_loss`."""


def list_loss(
    log_probs: Tensor, costs: Tensor, name: str = "risk", *, margin: float = 1.0, beta: float = 1.0
) -> Tensor:
    r"""A loss over lists of answers y_0 (right), y_1 ... y_K with energies F_k = -log p(y_k).

    - ``margin``: :math:`[\max_k \log p(y_k) - \log p(y_0) + m]_+`, the most offending against the right one;
    - ``risk``: :math:`\sum_k q_k \Delta_k` with :math:`q_k \propto p(y_k)^\beta` over the list (Shen et al., 2016);
    - ``softmax_margin``: :math:`\frac1\beta \log \sum_k \exp(\beta (\log p(y_k) + m \Delta_k)) - \log p(y_0)`;
    - ``mce``: :math:`1 / (1 + \exp(\beta (\log p(y_0) - \max_k \log p(y_k))))`.

    Args:
        log_probs: ``(B, K + 1)``; -inf where the list has no answer.
        costs: ``(B, K + 1)`` what each answer costs, 0 for the right one; anything where there is none.
    Returns:
        ``(B,)``.

    >>> list_loss(torch.tensor([[-1.0, -1.0]]), torch.tensor([[0, 3]]), "risk")
    tensor([1.5000])
    """
    if name not in LIST_LOSSES:
        raise ConfigError(f"loss `{name}` is not one of lists; {nearest(name, LIST_LOSSES)}")
    if log_probs.dim() != 2 or costs.shape != log_probs.shape or not log_probs.size(1):
        raise ShapeError(
            f"`log_probs` and `costs` must be (B, K + 1) both, got {tuple(log_probs.shape)} and {tuple(costs.shape)}"
        )
    absent = torch.isneginf(log_probs)
    return LIST_LOSSES[name](-log_probs, costs.masked_fill(absent, 0), margin, beta)


class SequenceLoss:
    r"""The loss of a transducer's training step, as :class:`~thalweg.learning.TrainingConfig` says.

    Plain likelihood for ``loss_after`` epochs, then the loss over lists plus ``nll_weight`` times plain likelihood:

    .. math:: \ell = \ell_{list} + w \, \ell_{nll}

    both summed over items; the trainer divides by the number of symbols. Nothing is drawn at random but by dropout and
    teacher forcing, and nothing is kept between steps, so that a resumed run goes on to the same bits.

    Args:
        config: planned, so that ``loss_after`` is settled.
        searched: the model that is searched, without any wrapper; it is put into evaluation mode for that and back.
        max_length: most symbols of a hypothesis, end included.

    >>> SequenceLoss(TrainingConfig(epochs=4, loss="risk").planned(1), None, max_length=9).begins
    2
    """

    def __init__(self, config: TrainingConfig, searched: Any, *, max_length: int):
        self.config, self.searched, self.max_length = config, searched, max_length
        # Asked of the model itself: a wrapper round it takes anything and hands it on.
        forward = getattr(searched, "forward", None)
        self.shared = forward is not None and "items" in inspect.signature(forward).parameters
        """Whether the model reads a source once for all its answers."""
        self.pad = getattr(searched, "pad", 0)  # a table has none, and reads nothing past an end
        self.begins = math.inf if config.loss == "nll" else config.loss_after
        """The epoch, from 0, that is the first with lists."""

    def logged(self, moment: Moment) -> dict[str, float]:
        """Teacher forcing at a moment, for the log."""
        return {"teacher_forcing": self.config.forcing_at(moment.share)}

    def __call__(self, model: Any, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        """The sum of losses and the number of symbols of a batch."""
        forcing = self.config.forcing_at(moment.share)
        terms = int(batch.target.lengths.sum())
        if moment.epoch < self.begins:
            return self._likelihood(model, batch, forcing).sum(), terms
        weight = self.config.nll_weight
        answers = answer_list(self._search(batch.source), batch.target)
        logits, target, items = list_logits(model, batch.source, answers, shared=self.shared, pad=self.pad)
        values = -losses.sequence_nll(logits, target.tokens, target.mask)
        log_probs = values.new_full(answers.present.shape, -torch.inf).masked_scatter(answers.present, values)
        costs = edit_distances(answers.tokens, answers.tokens[:, 0])
        how = self.config
        total = list_loss(log_probs, costs, how.loss, margin=how.loss_margin, beta=how.loss_beta).sum()
        if weight and forcing >= 1:  # the right answer's logits are at hand: it comes first of each item's
            first = torch.nn.functional.pad(items[1:] != items[:-1], (1, 0), value=True)
            right = (logits[first], target.tokens[first], target.mask[first])
            total = total + weight * losses.sequence_nll(*right, smoothing=how.label_smoothing).sum()
        elif weight:
            total = total + weight * self._likelihood(model, batch, forcing).sum()
        return total, terms

    def _likelihood(self, model: Any, batch: Batch, forcing: float) -> Tensor:
        logits = model(batch.source, batch.target, teacher_forcing=forcing)
        smoothing = self.config.label_smoothing
        return losses.sequence_nll(logits, batch.target.tokens, batch.target.mask, smoothing=smoothing)

    def _search(self, source: Padded) -> Hypotheses:
        searched: Autoregressive = self.searched
        training = self.searched.training
        self.searched.eval()
        try:
            with torch.no_grad():
                return beam_search(searched, source, width=self.config.loss_width, max_length=self.max_length)
        finally:
            self.searched.train(training)
