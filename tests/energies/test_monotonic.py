"""Hard monotonic attention: equal to the sum over all alignments, whole, by steps, in batches, under every search."""

import itertools
import math

import pytest
import torch

from oracles.monotonic import alignments, posterior
from thalweg.data import pad
from thalweg.energies import Monotonic, MonotonicConfig
from thalweg.energies.monotonic.alignments import filtered, move_log_probs, walk_log_probs
from thalweg.errors import ConfigError
from thalweg.inference import Ensemble, beam_search, exact_search, greedy, sample_sequences
from thalweg.layers.spelling import spellings

ORDERS = ["zeroth", "first", "edits"]
SOURCES = [[4, 5, 6], [8], [5, 4]]
TARGETS = [[4, 5], [6, 6, 5], []]


SPELT = spellings(["", "", "", "", "a", "á", "b", "ab", "c"]), spellings(["", "", "", "", "a", "aː", "b"])


def build(seed=0, spelt=None, **settings):
    torch.manual_seed(seed)
    config = MonotonicConfig(**({"embedding": 5, "hidden": 6, "dropout": 0.0, "jumps": 2} | settings))
    model = Monotonic(config, source_size=9, target_size=7, spelt=spelt).double().eval()
    with torch.no_grad():  # sharp enough for alignments to differ
        for weight in model.parameters():
            weight.mul_(3)
    return model


def scores_of(model, source, target):
    """What the model's last layers say of one pair, as lists: pull or walk, jumps, outputs."""
    seen = {}
    layers = {"pull": model.pull, "jumps": model.jumps, "outputs": model.output}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: seen.__setitem__(name, out[0].tolist()))
        for name, layer in layers.items()
        if layer is not None
    ]
    model(pad([source]), pad([target], end=3))
    for hook in hooks:
        hook.remove()
    walks = model.config.order == "edits"
    pull = None if walks else [[value for (value,) in row] for row in seen["pull"]]
    outputs = [[[None if v in (1, 2) else x for v, x in enumerate(at)] for at in row] for row in seen["outputs"]]
    return {"pull": pull, "jumps": seen.get("jumps"), "outputs": outputs, "walk": seen["pull"] if walks else None}


def with_unknown(model, source, target):
    """log p(y | x) before the unknown symbol's share is given to the others."""
    padded = pad([target], end=3)
    with torch.no_grad():
        return float(model(pad([source]), padded).log_softmax(2).gather(2, padded.tokens[:, :, None]).sum())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("cell", "spelt"), [("lstm", None), ("gru", None), ("lstm", SPELT)])
def test_the_likelihood_is_the_sum_over_all_alignments(order, cell, spelt):
    model = build(order=order, cell=cell, spelt=spelt)
    for source, target in itertools.product(SOURCES, TARGETS):
        found = alignments(**scores_of(model, source, target), target=[*target, 3])
        assert len(found) == math.comb(len(source) + len(target) + 1, len(target) + 1)
        assert with_unknown(model, source, target) == pytest.approx(math.log(sum(found.values())), abs=1e-10)


def test_the_enumeration_can_disagree():
    model = build()
    scores = scores_of(model, SOURCES[0], TARGETS[0])
    broken = alignments(**scores, target=[*TARGETS[0], 3], backwards=True)
    assert abs(math.log(sum(broken.values())) - with_unknown(model, SOURCES[0], TARGETS[0])) > 1e-4


@pytest.mark.parametrize("order", ORDERS)
def test_attention_is_the_posterior_of_alignments(order):
    model = build(order=order)
    weights = model.attention_weights(pad(SOURCES), pad(TARGETS, end=3))
    assert weights.shape == (3, 4, 3)
    for n, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        T, S = len(target) + 1, len(source)
        expected = posterior(alignments(**scores_of(model, source, target), target=[*target, 3]), T, S + 1)
        found = weights[n, :T, :S]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64)[:, :S], rtol=1e-9, atol=1e-9)
        assert not weights[n, :, S:].any()
        assert not weights[n, T:].any()


@pytest.mark.parametrize(("order", "spelt"), [("zeroth", None), ("first", SPELT), ("edits", None)])
def test_one_call_equals_step_by_step(order, spelt):
    model = build(order=order, spelt=spelt, encoder_layers=2, decoder_layers=2)
    source, target = pad(SOURCES), pad(TARGETS, end=3)
    # Rows in another order, one of them twice, and put back in the middle.
    state = model.select(model.begin(source), torch.tensor([2, 0, 0, 1]))
    rows = torch.tensor([2, 0, 0, 1])
    tokens, total = torch.full((4,), model.bos), torch.zeros(4, dtype=torch.float64)
    for t in range(target.tokens.size(1)):
        log_probs, state = model.step(tokens, state)
        tokens = target.tokens[rows, t]
        total += log_probs.gather(1, tokens[:, None])[:, 0].masked_fill(~target.mask[rows, t], 0.0)
        turned = torch.tensor([3, 1, 2, 0])
        rows, tokens, total, state = rows[turned], tokens[turned], total[turned], model.select(state, turned)
    torch.testing.assert_close(model.log_prob(source, target)[rows], total, rtol=1e-10, atol=1e-10)
    assert model.energy(source, target).equal(-model.log_prob(source, target))


@pytest.mark.parametrize("order", ORDERS)
def test_batch_equals_one_by_one_and_padding_is_inert(order):
    model = build(order=order)
    together = model.log_prob(pad(SOURCES), pad(TARGETS, end=3))
    alone = [model.log_prob(pad([s]), pad([t], end=3)) for s, t in zip(SOURCES, TARGETS, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-10, atol=1e-10)
    source, target = pad(SOURCES), pad(TARGETS, end=3)
    others = target._replace(tokens=target.tokens.masked_fill(~target.mask, 5))
    model.zero_grad()
    model.log_prob(source, target).sum().backward()
    before = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    model.log_prob(source, others).sum().backward()
    for weight, grad in zip(model.parameters(), before, strict=True):
        assert torch.isfinite(grad).all()
        torch.testing.assert_close(weight.grad, grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients(order):
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    pull, emissions = drawn(2, 3, 4), drawn(2, 3, 4)
    jumps = [drawn(2, 3, 4, 2)] if order == "first" else [drawn(2, 3, 4)] if order == "edits" else []
    seats = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    real = torch.tensor([[True] * 3, [True, False, False]])

    def evidence(pull, emissions, *jumps):
        if order == "edits":
            moves = walk_log_probs(pull, *jumps, seats)
        else:
            moves = move_log_probs(pull, jumps[0] if jumps else None, seats)
        emissions = emissions.log_softmax(2)
        found = torch.logsumexp(filtered(moves, emissions, real) + emissions, dim=2)
        return found.masked_fill(~real, 0.0).sum(dim=1)

    assert torch.autograd.gradcheck(evidence, (pull, emissions, *jumps))


@pytest.mark.parametrize("order", ORDERS)
def test_every_search_agrees(order):
    model, source = build(order=order), pad(SOURCES)
    exact = exact_search(model, source, max_length=4, max_expansions=5000)
    assert exact.optimal.all()
    wide = beam_search(model, source, width=700, k=5, max_length=4)
    torch.testing.assert_close(exact.scores[:, 0], wide.scores[:, 0], rtol=1e-9, atol=1e-9)
    assert torch.equal(exact.tokens[:, 0, : wide.tokens.size(2)], wide.tokens[:, 0, : exact.tokens.size(2)])
    for n, rows in enumerate(wide.sequences()):
        for row, score, ended in zip(rows, wide.scores[n], wide.finished[n], strict=True):
            if ended:
                alone = model.log_prob(pad([SOURCES[n]]), pad([row[:-1]], end=3))
                assert alone.item() == pytest.approx(float(score), abs=1e-9)
    short = greedy(model, source, max_length=4)
    assert ((short.scores <= wide.scores[:, :1] + 1e-9) | ~short.finished).all()
    both = beam_search(Ensemble([model, build(1, order=order)]), source, width=3, max_length=4)
    drawn = sample_sequences(model, source, n=2, max_length=4, generator=torch.Generator().manual_seed(0))
    assert both.scores.isfinite().all()
    assert drawn.scores.isfinite().all()


def test_what_is_fed_is_what_the_alignment_goes_by():
    model, source, target = build(), pad(SOURCES), pad(TARGETS, end=3)
    real = target.mask.unsqueeze(2)
    at_once = model(source, target).masked_fill(~real, 0.0)
    torch.testing.assert_close(model(source, target, teacher_forcing=1 - 1e-12).masked_fill(~real, 0.0), at_once)
    with torch.no_grad():
        model.output.bias[model.unk] = -100.0  # the unknown symbol may be guessed, but is never an answer
    own = greedy(model, source, max_length=4)
    guessed = model(source, pad([[0] * 3] * 3, end=3), teacher_forcing=0.0).argmax(dim=2)
    for n, (row,) in enumerate(own.sequences()):
        assert row[:4] == guessed[n, : len(row)].tolist()
    items = torch.tensor([0, 0, 2])
    shared = model(source, pad([[4], [5, 6], [4]], end=3), items=items)
    repeated = model(pad([SOURCES[n] for n in items]), pad([[4], [5, 6], [4]], end=3))
    torch.testing.assert_close(shared, repeated)


def test_half_precision_and_no_rows():
    model, source, target = build().float().train(), pad(SOURCES), pad(TARGETS, end=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(source, target)
        assert rough.dtype is torch.float32
    torch.testing.assert_close(rough[0, 0, 3:], model(source, target)[0, 0, 3:], atol=0.3, rtol=0.1)
    rough[:, :, 3:].sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())
    state = model.select(model.begin(source), torch.zeros(0, dtype=torch.long))
    assert model.step(torch.zeros(0, dtype=torch.long), state)[0].shape == (0, 7)


def test_wrong_settings():
    for settings in ({"order": "second"}, {"jumps": 0}, {"hidden": 0}, {"dropout": 1.0}, {"cell": "rnn-tanh"}):
        with pytest.raises(ConfigError, match=rf"model.{next(iter(settings))}"):
            MonotonicConfig(**settings)
