"""Seq2Seq: one recurrent call, step by step, and a plain-Python network agree; padding is inert."""

import itertools

import pytest
import torch

from oracles.recurrent import plain_log_probs
from thalweg.data import pad
from thalweg.energies import Seq2Seq, Seq2SeqConfig
from thalweg.errors import ConfigError
from thalweg.inference import beam_search, greedy, sample_sequences

CELLS = ["lstm", "gru", "gru-reset-before"]
ATTENTIONS = ["none", "dot", "general", "additive"]
VOCABULARY = 7


def build(seed=0, **settings):
    torch.manual_seed(seed)
    defaults = {"embedding": 5, "hidden": 6, "dropout": 0.0}
    config = Seq2SeqConfig(**(defaults | settings))
    return Seq2Seq(config, source_size=9, target_size=VOCABULARY).double().eval()


SOURCES = [[4, 5, 6, 7], [8], [5, 4, 4]]
TARGETS = [[4, 5], [6, 6, 5], []]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_one_call_equals_step_by_step(cell, attention, bidirectional):
    model = build(cell=cell, attention=attention, bidirectional=bidirectional, encoder_layers=2, decoder_layers=2)
    source, target = pad(SOURCES), pad(TARGETS, end=3)
    at_once = model.log_prob(source, target)
    state = model.begin(source)
    tokens = torch.full((3,), model.bos)
    total = torch.zeros(3, dtype=torch.float64)
    for t in range(target.tokens.size(1)):
        log_probs, state = model.step(tokens, state)
        tokens = target.tokens[:, t]
        total += log_probs.gather(1, tokens[:, None])[:, 0].masked_fill(~target.mask[:, t], 0.0)
    torch.testing.assert_close(at_once, total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_equals_plain_python_network(cell, attention, bidirectional):
    model = build(cell=cell, attention=attention, bidirectional=bidirectional)
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    for source, target in zip(SOURCES, TARGETS, strict=True):
        expected = plain_log_probs(
            weights, source, [*target, 3], cell=cell, attention=attention, bidirectional=bidirectional
        )
        found = model.log_prob(pad([source]), pad([target], end=3))
        assert found.item() == pytest.approx(sum(expected), abs=1e-10)


def test_the_plain_network_can_disagree():
    model = build(attention="additive")
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    weights["output.bias"][4] += 0.1
    broken = plain_log_probs(weights, [4, 5], [4, 3], cell="lstm", attention="additive", bidirectional=True)
    assert model.log_prob(pad([[4, 5]]), pad([[4]], end=3)).item() != pytest.approx(sum(broken), abs=1e-4)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("reverse", [False, True])
def test_batch_equals_one_by_one(cell, attention, reverse):
    model = build(cell=cell, attention=attention, reverse_source=reverse)
    together = model.log_prob(pad(SOURCES), pad(TARGETS, end=3))
    alone = [model.log_prob(pad([s]), pad([t], end=3)) for s, t in zip(SOURCES, TARGETS, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_reversal_equals_reversed_input(attention):
    plain, turned = build(attention=attention), build(attention=attention, reverse_source=True)
    turned.load_state_dict(plain.state_dict())
    target = pad(TARGETS, end=3)
    torch.testing.assert_close(
        turned.log_prob(pad(SOURCES), target), plain.log_prob(pad([s[::-1] for s in SOURCES]), target)
    )
    if attention != "none":
        ours = turned.attention_weights(pad(SOURCES), target)
        theirs = plain.attention_weights(pad([s[::-1] for s in SOURCES]), target)
        for row, source in enumerate(SOURCES):
            n = len(source)
            torch.testing.assert_close(ours[row, :, :n], theirs[row, :, :n].flip(1))


def test_probabilities_of_all_targets_sum_to_one():
    model = build(seed=3)
    source = [4, 8, 5]
    answers = [list(y) for n in range(3) for y in itertools.product(range(4, VOCABULARY), repeat=n)]
    finished = model.log_prob(pad([source] * len(answers)), pad(answers, end=3)).exp().sum()
    # What is left are the continuations of the length-3 prefixes.
    state, left = model.begin(pad([source])), 0.0
    prefixes = [list(y) for y in itertools.product(range(4, VOCABULARY), repeat=3)]
    state = model.select(state, torch.zeros(len(prefixes), dtype=torch.int64))
    tokens, total = torch.full((len(prefixes),), model.bos), torch.zeros(len(prefixes), dtype=torch.float64)
    for t in range(3):
        log_probs, state = model.step(tokens, state)
        tokens = torch.tensor([p[t] for p in prefixes])
        total += log_probs.gather(1, tokens[:, None])[:, 0]
    left = total.exp().sum()
    assert (finished + left).item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_search_scores_are_the_models_log_probabilities(attention):
    model = build(attention=attention, seed=1)
    source = pad(SOURCES)
    for found in (
        greedy(model, source, max_length=6),
        beam_search(model, source, width=4, max_length=6),
        sample_sequences(model, source, n=3, max_length=6, generator=torch.Generator().manual_seed(0)),
    ):
        for b, j in itertools.product(range(3), range(found.scores.size(1))):
            n = int(found.lengths[b, j])
            if n and bool(found.finished[b, j]):
                target = pad([found.tokens[b, j, :n].tolist()])
                score = model.log_prob(pad([SOURCES[b]]), target).item()
                assert found.scores[b, j].item() == pytest.approx(score, abs=1e-9)


def test_attention_ignores_padding_and_sums_to_one():
    model = build()
    weights = model.attention_weights(pad(SOURCES), pad(TARGETS, end=3))
    torch.testing.assert_close(weights.sum(2), torch.ones_like(weights[:, :, 0]))
    assert (weights[1, :, 1:] == 0).all()
    assert build(attention="none").attention_weights(pad(SOURCES), pad(TARGETS, end=3)) is None


@pytest.mark.parametrize("cell", CELLS)
def test_teacher_forcing_below_one(cell):
    model = build(cell=cell)
    source, target = pad(SOURCES), pad(TARGETS, end=3)
    # A probability just below one takes the step-by-step path yet draws no other coin here.
    torch.manual_seed(0)
    stepped = model(source, target, teacher_forcing=1 - 1e-12)
    torch.testing.assert_close(stepped, model(source, target), rtol=1e-12, atol=1e-12)
    # At zero the model is fed its own best guesses: the logits follow its greedy answer.
    free = model(source, target, teacher_forcing=0.0)
    guesses = free.argmax(2)
    again = model(source, target._replace(tokens=guesses))
    torch.testing.assert_close(free, again, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS)
def test_gradients(cell):
    model = build(cell=cell, embedding=3, hidden=3, attention="general")
    source, target = pad([[4, 5], [6]]), pad([[4], [5, 6]], end=3)
    names, values = zip(*model.named_parameters(), strict=True)

    def energy(*parameters):
        return torch.func.functional_call(
            _Energy(model),
            {f"model.{n}": p for n, p in zip(names, parameters, strict=True)},
            (source, target),
        )

    assert torch.autograd.gradcheck(energy, tuple(v.detach().clone().requires_grad_() for v in values))


class _Energy(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, source, target):
        return self.model.energy(source, target)


def test_ties_and_shapes():
    model = build(tied=True, embedding=4)
    assert model.output.weight is model.target_embedding.weight
    assert model.log_prob(pad(SOURCES), pad(TARGETS, end=3)).isfinite().all()
    plain = build(tied=True, embedding=4, attention="none")
    assert plain.log_prob(pad(SOURCES), pad(TARGETS, end=3)).isfinite().all()


def test_nothing_but_symbols_and_end_is_produced():
    model = build()
    log_probs, _ = model.step(torch.full((3,), model.bos), model.begin(pad(SOURCES)))
    assert torch.isinf(log_probs[:, [model.unk, model.pad, model.bos]]).all()
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden": 0}, "hidden"),
        ({"dropout": 1.0}, "dropout"),
        ({"attention": "aditive"}, "did you mean `additive`"),
        ({"cell": "rnn"}, "choose one of"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ConfigError, match=words):
        Seq2SeqConfig(**settings)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_rows_may_be_repeated_dropped_and_mixed(cell, attention):
    """Even runs share a memory, uneven ones do not; both equal rows stepped alone."""
    model = build(cell=cell, attention=attention)
    with torch.no_grad():
        _, state = model.step(torch.full((3,), model.bos), model.begin(pad(SOURCES)))
        for rows in ([0, 0, 1, 1, 2, 2], [2, 2, 0], [1], [0, 1, 0, 1], [2, 1, 0]):
            index = torch.tensor(rows)
            tokens = torch.tensor([4, 5, 6, 4, 5, 6][: len(rows)])
            together, _ = model.step(tokens, model.select(state, index))
            for n, row in enumerate(rows):
                _, alone = model.step(torch.tensor([model.bos]), model.begin(pad([SOURCES[row]])))
                expected, _ = model.step(tokens[n : n + 1], alone)
                torch.testing.assert_close(together[n : n + 1], expected, rtol=1e-9, atol=1e-9)


def test_training_mode_decodes_with_dropout():
    model = build(dropout=0.5).train()
    torch.manual_seed(0)
    first, _ = model.step(torch.full((3,), model.bos), model.begin(pad(SOURCES)))
    second, _ = model.step(torch.full((3,), model.bos), model.begin(pad(SOURCES)))
    assert not torch.equal(first, second)
