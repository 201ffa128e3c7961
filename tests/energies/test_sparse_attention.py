"""Models with other attention maps: steps equal the forced pass, searches equal recomputation, fast paths decline."""

import itertools

import pytest
import torch

from thalweg.data import pad
from thalweg.energies import Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from thalweg.energies.transformer.fixed import FixedTransformer
from thalweg.errors import ConfigError
from thalweg.inference import beam_search, greedy

MAPS = ["sparsemax", "entmax15", 1.3]
SOURCES = [[4, 5, 6, 7], [8], [5, 4, 4]]
VOCABULARY, EOS, LONGEST = 7, 3, 3
MODELS = {
    "additive": {"attention": "additive"},
    "dot": {"attention": "dot"},
    "general": {"attention": "general", "reverse_source": True, "cell": "gru"},
    "encoder-decoder": {"norm": "pre"},
    "rotary": {"norm": "post", "positions": "rotary"},
    "pointer": {"pointer": True},
    "causal": {"kind": "causal"},
    "causal pointer": {"kind": "causal", "pointer": True, "positions": "rotary"},
}


def build(name, map, dtype=torch.float64):
    torch.manual_seed(0)
    settings = MODELS[name] | {"attention_map": map, "dropout": 0.0}
    sizes = {"source_size": 10, "target_size": VOCABULARY}
    if "attention" in settings:
        model = Seq2Seq(Seq2SeqConfig(hidden=8, embedding=6, **settings), **sizes)
    else:
        small = {"width": 8, "heads": 2, "feedforward": 12, "encoder_layers": 1, "decoder_layers": 2}
        copies = torch.tensor([-1, -1, -1, -1, 4, 5, -1, 6, -1, 6]) if settings.get("pointer") else None
        model = Transformer(TransformerConfig(**small, **settings), copies=copies, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return model.to(dtype).eval()


def log_probs_after(model, source, prefix):
    """Log-probabilities ``(T + 1, V)`` after each symbol of one prefix, from the whole pass alone."""
    logits = model(pad([source]), pad([[*prefix, EOS]]))[0]
    return (logits + model.unread).log_softmax(dim=-1)


def all_sequences(model, source):
    """Every target of at most LONGEST symbols that ends, with its score by recomputation, best first."""
    letters, found = range(4, VOCABULARY), {}
    for length in range(LONGEST):
        for word in itertools.product(letters, repeat=length):
            log_probs = log_probs_after(model, source, word)
            found[(*word, EOS)] = sum(float(log_probs[t, s]) for t, s in enumerate((*word, EOS)))
    return sorted(found.items(), key=lambda pair: -pair[1])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_the_whole_pass(name, map, gradients):
    model = build(name, map)
    words = [[4, 5, 6], [6, 6, 5], [5, 4, 4]]
    with torch.set_grad_enabled(gradients):
        state, found = model.begin(pad(SOURCES)), []
        for column in ([2, 2, 2], *zip(*words, strict=True)):
            log_probs, state = model.step(torch.tensor(column), state)
            found.append(log_probs)
        for row, (source, word) in enumerate(zip(SOURCES, words, strict=True)):
            whole = torch.stack([step[row] for step in found])
            torch.testing.assert_close(whole, log_probs_after(model, source, word), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("name", MODELS)
def test_searches_equal_recomputation(name, map):
    model = build(name, map)
    with torch.no_grad():
        first, wide = (
            greedy(model, pad(SOURCES), max_length=LONGEST),
            beam_search(model, pad(SOURCES), width=40, k=5, max_length=LONGEST),
        )
        for row, source in enumerate(SOURCES):
            word, score = [], 0.0
            while len(word) < LONGEST and (not word or word[-1] != EOS):
                after = log_probs_after(model, source, word)[-1]
                word.append(int(after.argmax()))
                score += float(after.max())
            assert first.tokens[row, 0, : len(word)].tolist() == word
            assert float(first.scores[row, 0]) == pytest.approx(score, abs=1e-9)
            best = all_sequences(model, source)[:5]
            assert [tuple(t for t in tokens if t >= 0) for tokens in wide.tokens[row].tolist()] == [y for y, _ in best]
            assert wide.scores[row].tolist() == pytest.approx([score for _, score in best], abs=1e-9)


def test_recomputation_can_disagree():
    model, other = build("encoder-decoder", "sparsemax"), build("encoder-decoder", "softmax")
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        found = beam_search(model, pad(SOURCES[:1]), width=40, k=1, max_length=LONGEST).scores[0, 0]
        assert abs(float(found) - all_sequences(other, SOURCES[0])[0][1]) > 1e-3


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("name", MODELS)
def test_float32_search_takes_the_ordinary_path(name, map):
    model = build(name, map, torch.float32)
    source = pad(SOURCES)
    assert model.compiled(source) is None
    if isinstance(model, Transformer):
        assert not FixedTransformer.serves(model)
        assert model.fixed(source) is None
    exact = build(name, map)
    with torch.no_grad():
        found = beam_search(model, source, width=3, max_length=6)
        want = beam_search(exact, source, width=3, max_length=6)
    torch.testing.assert_close(found.scores.double(), want.scores.double(), atol=1e-3, rtol=1e-3)


def test_the_softmax_keeps_its_fast_paths():
    model = build("encoder-decoder", 1.0, torch.float32)
    assert model.config.has_softmax
    assert FixedTransformer.serves(model)
    assert model.compiled(pad(SOURCES)) is not None
    same = build("encoder-decoder", "softmax", torch.float32)
    source, target = pad(SOURCES), pad([[4, 3], [5, 3], [6, 3]])
    torch.testing.assert_close(model(source, target), same(source, target))


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("name", MODELS)
def test_shown_weights_are_sparse_and_exactly_zero_on_padding(name, map):
    model = build(name, map)
    with torch.no_grad():
        weights = model.attention_weights(pad(SOURCES), pad([[4, 5, 3], [5, 6, 3], [6, 3]]))
    torch.testing.assert_close(weights.sum(2), torch.ones(3, 3, dtype=torch.float64))
    padding = ~pad(SOURCES).mask
    assert bool((weights.transpose(1, 2)[padding] == 0).all())
    if map == "sparsemax" and name in ("additive", "encoder-decoder", "causal"):
        assert bool(((weights == 0) & ~padding[:, None]).any())


@pytest.mark.parametrize("name", ["additive", "encoder-decoder"])
def test_every_attention_uses_the_map(name):
    model = build(name, "entmax15")
    maps = [module.map for module in model.modules() if hasattr(module, "map")]
    assert len(maps) == (1 if name == "additive" else 1 + 2 * 2)  # encoder, decoder, and decoder to encoder
    assert {str(map) for map in maps} == {"entmax15"}


@pytest.mark.parametrize("config", [Seq2SeqConfig, TransformerConfig])
def test_unknown_maps_are_one_line(config):
    with pytest.raises(ConfigError) as error:
        config(attention_map="entmx15")
    expected = "model.attention_map `entmx15` is no known map and no alpha; did you mean `entmax15`?"
    assert str(error.value) == expected
    with pytest.raises(ConfigError, match="or an alpha from 1 on, got"):
        config(attention_map=0.9)
    if config is Seq2SeqConfig:
        with pytest.raises(ConfigError, match="needs attention, got"):
            config(attention="none", attention_map="sparsemax")
