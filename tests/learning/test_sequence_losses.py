"""Losses over lists of a model's answers: against enumeration on a table, and on both families of models."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import nn

from oracles import losses as oracle
from thalweg.data import EOS, PAD, Batch, pad
from thalweg.energies.seq2seq.model import Seq2Seq, Seq2SeqConfig
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.energies.transformer.model import Transformer
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference import Hypotheses, beam_search
from thalweg.learning import Moment, TrainingConfig
from thalweg.learning.losses import sequence_nll
from thalweg.learning.losses.sequences import (
    LIST_LOSSES,
    SequenceLoss,
    answer_list,
    edit_distances,
    list_logits,
    list_loss,
)

INF = math.inf
SYMBOLS = (EOS, 4, 5)
V, BOS, MOST = 6, 2, 4


class Table(nn.Module):
    """What follows a symbol depends on that symbol alone; as a trained model and as one that is searched."""

    bos, eos, vocab_size = BOS, EOS, V

    def __init__(self, seed=0):
        super().__init__()
        logits = torch.randn(V, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        logits[:, :EOS] = -INF
        self.logits = nn.Parameter(logits)

    def forward(self, source, target, *, teacher_forcing=1.0):
        first = torch.full_like(target.tokens[:, :1], BOS)
        return self.logits[torch.cat((first, target.tokens[:, :-1]), dim=1)]

    def begin(self, inputs):
        assert not self.training
        return torch.zeros(inputs.size, dtype=torch.long)

    def step(self, tokens, state):
        return self.logits[tokens].log_softmax(1), state

    def select(self, state, rows):
        return state[rows]


TARGETS = [(4, 5), (5,), (), (4, 4, 4)]
BATCH = Batch(pad([[4]] * 4), pad(TARGETS, end=EOS), (0, 1, 2, 3))
EVERY = list(oracle.sequences(SYMBOLS, EOS, MOST))  # 15: a beam of 32 finds them all


def config(loss, **more):
    settings = {"epochs": 2, "loss_after": 0, "loss_width": 32, "nll_weight": 0.0, "label_smoothing": 0.0}
    return TrainingConfig(loss=loss, **(settings | more)).planned(1)


def objective(model, loss, **more):
    return SequenceLoss(config(loss, **more), model, max_length=MOST)


def by_enumeration(logits, loss, *, margin=1.0, beta=1.0):
    """The sum over the batch of a loss over all sequences of the table."""
    total = 0.0
    for target in TARGETS:
        gold = (*target, EOS)
        energies = [-oracle.markov_log_prob(logits, y, BOS) for y in EVERY]
        costs = [oracle.edit_distance(y, gold) for y in EVERY]
        own = EVERY.index(gold)
        wrong = min(f for y, f in zip(EVERY, energies, strict=True) if y != gold)
        if loss == "risk":
            total += oracle.risk(energies, costs, beta)
        elif loss == "margin":
            total += oracle.hinge(energies[own], wrong, margin)[0]
        elif loss == "mce":
            total += oracle.mce(energies[own], wrong, beta)[0]
        else:
            total += oracle.softmax_margin(energies, own, [margin * c for c in costs], beta)
    return total


@pytest.mark.parametrize("loss", LIST_LOSSES)
@pytest.mark.parametrize("how", [{}, {"margin": 2.5, "beta": 0.6}])
def test_value_and_gradient_equal_enumeration(loss, how):
    model = Table().train()
    settings = {f"loss_{name}": value for name, value in how.items()}
    total, terms = objective(model, loss, **settings)(model, BATCH, Moment(0, 0, 0.0))
    assert terms == sum(len(target) + 1 for target in TARGETS)
    assert model.training
    logits = model.logits.detach().tolist()
    assert total.item() == pytest.approx(by_enumeration(logits, loss, **how), rel=1e-10)
    total.backward()
    step = 1e-5
    for i, j in itertools.product((BOS, 4, 5), SYMBOLS):
        both = []
        for sign in (1, -1):
            moved = [row[:] for row in logits]
            moved[i][j] += sign * step
            both.append(by_enumeration(moved, loss, **how))
        slope = (both[0] - both[1]) / (2 * step)
        assert model.logits.grad[i, j].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_expected_risk_gradient_equals_enumeration():
    """sum_y q(y) (cost(y) - risk) d log p(y), with q over all sequences and d log p written down."""
    model = Table(seed=3).train()
    objective(model, "risk")(model, BATCH, Moment(0, 0, 0.0))[0].backward()
    logits = model.logits.detach().tolist()
    expected = torch.zeros(V, V, dtype=torch.float64)
    shares = model.logits.detach().softmax(1)
    q = oracle.gibbs([-oracle.markov_log_prob(logits, y, BOS) for y in EVERY])
    for target in TARGETS:
        costs = [oracle.edit_distance(y, (*target, EOS)) for y in EVERY]
        mean = sum(p * c for p, c in zip(q, costs, strict=True))
        for p, c, y in zip(q, costs, EVERY, strict=True):
            for before, symbol in itertools.pairwise((BOS, *y)):
                expected[before] -= p * (c - mean) * shares[before]
                expected[before, symbol] += p * (c - mean)
    torch.testing.assert_close(model.logits.grad, expected, rtol=1e-9, atol=1e-10)
    with pytest.raises(AssertionError):  # a twin without the baseline
        torch.testing.assert_close(model.logits.grad, expected + 0.1, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("forcing", [1.0, 0.5])
def test_likelihood_is_mixed_in(forcing):
    model = Table().train()
    smoothing = {"label_smoothing": 0.2, "teacher_forcing": forcing}
    plain = sequence_nll(model(BATCH.source, BATCH.target), BATCH.target.tokens, BATCH.target.mask, smoothing=0.2).sum()
    alone = objective(model, "margin", **smoothing)(model, BATCH, Moment(0, 0, 0.0))[0]
    mixed = objective(model, "margin", nll_weight=0.7, **smoothing)(model, BATCH, Moment(0, 0, 0.0))[0]
    torch.testing.assert_close(mixed, alone + 0.7 * plain)
    for loss, epoch in (("nll", 5), ("margin", 0)):
        before = objective(model, loss, loss_after=1, **smoothing)(model, BATCH, Moment(epoch, 0, 0.0))[0]
        torch.testing.assert_close(before, plain)


def test_a_list_of_the_right_answer_alone_teaches_nothing():
    model = Table().train()
    answers = answer_list(Hypotheses.none(4, 3, torch.device("cpu")), BATCH.target)
    logits, target, items = list_logits(model, BATCH.source, answers)
    assert items.tolist() == [0, 1, 2, 3]
    values = -sequence_nll(logits, target.tokens, target.mask)
    log_probs = torch.full((4, 4), -INF, dtype=torch.float64).masked_scatter(answers.present, values)
    for name in LIST_LOSSES:
        model.zero_grad()
        found = list_loss(log_probs, edit_distances(answers.tokens, answers.tokens[:, 0]), name)
        assert found.tolist() == [0, 0, 0, 0]
        found.sum().backward(retain_graph=True)
        assert not model.logits.grad.nan_to_num().any()


def test_edit_distances_equal_the_recursion():
    rng = random.Random(0)
    lists = [[tuple(rng.choices((4, 5, 6), k=rng.randint(0, 5))) for _ in range(7)] for _ in range(5)]
    gold = [tuple(rng.choices((4, 5, 6), k=rng.randint(0, 6))) for _ in range(5)]

    def padded(sequence, width):
        return [*sequence, *([-1] * (width - len(sequence)))]

    tokens = torch.tensor([[padded(y, 5) for y in row] for row in lists])
    right = torch.tensor([padded(y, 6) for y in gold])
    found = edit_distances(tokens, right)
    expected = [[oracle.edit_distance(y, g) for y in row] for row, g in zip(lists, gold, strict=True)]
    assert found.tolist() == expected
    broken = [[oracle.edit_distance(y, g, broken=True) for y in row] for row, g in zip(lists, gold, strict=True)]
    assert found.tolist() != broken
    assert edit_distances(tokens[:0], right[:0]).shape == (0, 7)
    assert edit_distances(tokens[:, :, :0], right).tolist() == [[len(g)] * 7 for g in gold]
    assert edit_distances(tokens, right[:, :0]).tolist() == [[len(y) for y in row] for row in lists]


def family(name):
    torch.manual_seed(0)
    if name == "recurrent":
        return Seq2Seq(Seq2SeqConfig(hidden=12, embedding=8, dropout=0.0), source_size=9, target_size=9)
    shape = {"width": 8, "heads": 2, "feedforward": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    return Transformer(TransformerConfig(**shape), source_size=9, target_size=9)


@pytest.mark.parametrize("name", ["recurrent", "transformer"])
def test_lists_of_both_families(name):
    model = family(name).train()
    with torch.no_grad():  # the unknown symbol is never an answer: as if it had been learnt
        model.output.bias[0] = -40.0
        model.output.bias[EOS] = 1.0
    batch = Batch(pad([[4, 5, 6], [7], [8, 4]]), pad([[5, 6], [7, 7, 7], []], end=EOS), (0, 1, 2))
    how = config("risk", loss_width=6, nll_weight=0.5)
    loss = SequenceLoss(how, model, max_length=8)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    values = []
    for _ in range(6):
        # The search is of the weights as they are now: its scores are the log-probabilities of the list.
        found = loss._search(batch.source)
        assert model.training
        answers = answer_list(found, batch.target)
        logits, target, items = list_logits(model, batch.source, answers)
        log_probs = -sequence_nll(logits, target.tokens, target.mask).detach()
        others = answers.present[:, 1:]
        offset = torch.cumsum(answers.present.flatten(), 0).view(answers.present.shape) - 1
        torch.testing.assert_close(log_probs[offset[:, 1:][others]], found.scores[others], rtol=1e-4, atol=1e-4)
        assert items.tolist() == sorted(items.tolist())
        total, terms = loss(model, batch, Moment(0, 0, 0.0))
        assert terms == 3 + 4 + 1
        optimiser.zero_grad()
        total.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
        values.append(total.item())
    assert values[-1] < values[0]


def test_hypotheses_are_sorted_into_lists():
    model = Table().eval()
    found = beam_search(model, BATCH.source, width=3, max_length=2)  # too short for most: some are cut
    answers = answer_list(found, BATCH.target)
    assert answers.present[:, 0].all()
    assert (
        answers.tokens[:, 0].masked_fill(answers.tokens[:, 0] < 0, PAD)[:, :4].tolist() == BATCH.target.tokens.tolist()
    )
    for b in range(4):
        gold = [*TARGETS[b], EOS]
        for k, sequence in enumerate(found.sequences()[b]):
            wanted = bool(found.finished[b, k]) and sequence != gold
            assert bool(answers.present[b, k + 1]) == wanted


def test_one_line_errors():
    for call, error, words in (
        (lambda: list_loss(torch.zeros(1, 2), torch.zeros(1, 2), "rsk"), ConfigError, "is not one of lists; did you"),
        (lambda: list_loss(torch.zeros(1, 2), torch.zeros(1, 3)), ShapeError, r"must be \(B, K \+ 1\)"),
        (lambda: edit_distances(torch.zeros(1, 2), torch.zeros(1, 2)), ShapeError, r"`tokens` must be \(B, K, T\)"),
    ):
        with pytest.raises(error, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
