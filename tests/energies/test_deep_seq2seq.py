"""Encoder-decoders of blocks: one call, steps and searches agree; what came before is left as it was."""

import itertools

import pytest
import torch

from thalweg.data import pad
from thalweg.energies import Seq2Seq, Seq2SeqConfig
from thalweg.errors import ConfigError
from thalweg.inference import beam_search, greedy
from thalweg.tasks.registry import apply_overrides, build_config

CELLS = ["lstm", "gru", "gru-reset-before", "rnn-tanh", "rnn-relu", "rnn-tanh-pre", "rnn-relu-pre"]
SOURCES = [[4, 5, 6, 7], [8], [5, 4, 4]]
TARGETS = [[4, 5], [6, 6, 5], []]
WRAPPINGS = [
    {"residual": "residual", "norm": "layer", "initialisation": "orthogonal"},
    {"residual": "highway", "norm": "batch", "decoder_norm": "layer"},
    {"residual": "residual", "norm": "instance", "decoder_norm": "none"},
    {"residual": "highway", "norm": "weight"},
    {"norm": "rms", "initialisation": "orthogonal"},
    {"norm": "weight"},
    {},
]
# Each cell with two wrappings, each wrapping with two cells.
MIXES = [(cell, WRAPPINGS[(i + j) % len(WRAPPINGS)]) for i, cell in enumerate(CELLS) for j in (0, 3)]
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def build(seed=0, **settings):
    torch.manual_seed(seed)
    defaults = {"embedding": 5, "hidden": 6, "dropout": 0.0, "encoder_layers": 3, "decoder_layers": 2}
    return Seq2Seq(Seq2SeqConfig(**(defaults | settings)), source_size=9, target_size=7).double().eval()


@pytest.mark.parametrize(("cell", "wrapping"), MIXES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_one_call_equals_step_by_step(cell, wrapping, bidirectional):
    model = build(cell=cell, bidirectional=bidirectional, **wrapping)
    source, target = pad(SOURCES), pad(TARGETS, end=3)
    at_once = model.log_prob(source, target)
    state, tokens = model.begin(source), torch.full((3,), model.bos)
    total = torch.zeros(3, dtype=torch.float64)
    for t in range(target.tokens.size(1)):
        log_probs, state = model.step(tokens, state)
        tokens = target.tokens[:, t]
        total += log_probs.gather(1, tokens[:, None])[:, 0].masked_fill(~target.mask[:, t], 0.0)
    torch.testing.assert_close(at_once, total, **EXACT)
    alone = [model.log_prob(pad([s]), pad([t], end=3)) for s, t in zip(SOURCES, TARGETS, strict=True)]
    torch.testing.assert_close(at_once, torch.cat(alone), **EXACT)


@pytest.mark.parametrize(("cell", "wrapping"), MIXES[::2])
def test_searches_score_as_the_model_does(cell, wrapping):
    model = build(cell=cell, seed=1, **wrapping)
    for found in (greedy(model, pad(SOURCES), max_length=6), beam_search(model, pad(SOURCES), width=4, max_length=6)):
        for b, j in itertools.product(range(3), range(found.scores.size(1))):
            n = int(found.lengths[b, j])
            if n and bool(found.finished[b, j]):
                score = model.log_prob(pad([SOURCES[b]]), pad([found.tokens[b, j, :n].tolist()])).item()
                assert found.scores[b, j].item() == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize(
    "wrapping", [{"residual": "residual"}, {"norm": "layer"}, {"norm": "weight"}, {"cell": "rnn-tanh"}]
)
def test_compiled_searches_decline_what_they_do_not_know(wrapping):
    model = build(**wrapping).float()
    assert not model.config.has_bare_gates
    assert model.compiled(pad(SOURCES)) is None
    found = beam_search(model, pad(SOURCES), width=3, max_length=6)
    expected = beam_search(model.double(), pad(SOURCES), width=3, max_length=6)
    assert torch.equal(found.tokens, expected.tokens)
    assert build().config.has_bare_gates
    assert build(initialisation="orthogonal", cell="gru").config.has_bare_gates


@pytest.mark.parametrize(("cell", "wrapping"), MIXES[1::3])
def test_training_mode_and_scheduled_sampling(cell, wrapping):
    model = build(cell=cell, dropout=0.2, **wrapping).train()
    for forcing in (1.0, 0.5):
        logits = model(pad(SOURCES), pad(TARGETS, end=3), teacher_forcing=forcing)
        logits[..., 4:].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_r4_two_stacked_layers_with_softmax_output():
    """R4: two stacked layers; softmax output: both GRUs give distributions over the next symbol."""
    for cell in ("gru", "gru-reset-before"):
        model = build(cell=cell, encoder_layers=2, decoder_layers=2, attention="none", bidirectional=False)
        log_probs, _ = model.step(torch.full((3,), model.bos), model.begin(pad(SOURCES)))
        torch.testing.assert_close(log_probs.exp().sum(dim=1), torch.ones(3, dtype=torch.float64), **EXACT)
        assert model.bridge is None, "states go from layer to layer"


def test_models_of_before_have_the_names_and_numbers_they_had():
    model = build(encoder_layers=1, decoder_layers=1)
    ends = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    names = ["source_embedding.weight", "target_embedding.weight"]
    names += [f"encoder.core.{end}" for end in ends] + [f"encoder.core.{end}_reverse" for end in ends]
    names += [f"decoder.core.{end}" for end in ends]
    names += [f"bridge.{n}.{part}" for n in range(2) for part in ("weight", "bias")]
    names += ["attention.key.weight", "attention.key.bias", "attention.query.weight", "attention.combine.weight"]
    names += ["combine.weight", "combine.bias", "output.weight", "output.bias"]
    assert list(model.state_dict()) == names
    # Parameters are drawn in the order they always were.
    torch.manual_seed(0)
    torch.nn.Embedding(9, 5, padding_idx=1), torch.nn.Embedding(7, 5, padding_idx=1)
    first = torch.nn.LSTM(5, 6, batch_first=True, bidirectional=True).double()
    torch.testing.assert_close(model.encoder.core.weight_ih_l0, first.weight_ih_l0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"norm": "batch"}, "model.norm = batch looks at several positions.*set model.decoder_norm to none, layer"),
        ({"norm": "instance"}, "model.norm = instance looks at several positions"),
        ({"decoder_norm": "batch"}, "model.decoder_norm `batch` is not known; choose one of: layer, none, rms, same"),
        ({"residual": "highwy"}, "model.residual `highwy` is not known; did you mean `highway`"),
        ({"norm": "leyer"}, "model.norm `leyer` is not known; did you mean `layer`"),
        ({"initialisation": "orthogonl"}, "model.initialisation `orthogonl` is not known; did you mean `orthogonal`"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Seq2SeqConfig(**settings)
    assert "\n" not in str(caught.value)


def test_deep_settings_from_words():
    words = ["cell=rnn-tanh", "encoder_layers=8", "decoder_layers=8", "residual=residual", "norm=layer"]
    config = build_config(apply_overrides({}, [*words, "initialisation=orthogonal"])).model
    assert config == Seq2SeqConfig(
        cell="rnn-tanh",
        encoder_layers=8,
        decoder_layers=8,
        residual="residual",
        norm="layer",
        initialisation="orthogonal",
    )


def test_blocks_let_gradients_reach_the_source_of_a_deep_model():
    """8 + 8 plain layers: what the source's vectors get of the gradient, with and without the fixes.

    Some reaches them without: the first state of the decoder is made of the last states of all encoder layers.
    """

    def reached(**settings):
        model = build(cell="rnn-tanh", encoder_layers=8, decoder_layers=8, **settings)
        model.energy(pad(SOURCES), pad(TARGETS, end=3)).sum().backward()
        return model.source_embedding.weight.grad.norm().item()

    bare = reached()
    assert reached(**WRAPPINGS[0]) > 5 * bare
    assert reached(residual="highway") > 2 * bare
