"""ONNX graphs give the log-probabilities of the model, step by step, for every shape that is not refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thalweg.data import pad
from thalweg.energies import Monotonic, MonotonicConfig, Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from thalweg.energies.monotonic.alignments import NEVER
from thalweg.energies.onnx.building import build_graphs
from thalweg.energies.onnx.graph import FLOAT, Graph, package
from thalweg.errors import ConfigError, MissingDependencyError
from thalweg.layers.spelling import spellings

onnxruntime = pytest.importorskip("onnxruntime")

SIZES = {"source_size": 10, "target_size": 12}
WORDS = [[5, 6, 4], [7], [6, 6, 5, 7, 4]]
TAGGED = [[9, 5, 6, 4], [8, 7], [8, 9, 6, 6, 5, 7, 4]]


def session(graph):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])


def named(graph, given):
    return dict(zip([output.name for output in graph.get_outputs()], graph.run(None, given), strict=True))


def read(encoder, source):
    return named(encoder, {"tokens": source.tokens.numpy(), "lengths": source.lengths.numpy()})


def farthest(model, words, steps=7):
    """The largest difference of log-probabilities over some steps, fed symbols that the model chose."""
    model.eval()
    graphs = build_graphs(model)
    encoder, step = session(graphs.encoder), session(graphs.step)
    given = read(encoder, source := pad(words))
    memory = {name: given[name] for name in graphs.memory}
    state, apart = {name: given[name] for name in graphs.state}, 0.0
    with torch.no_grad():
        ours, tokens = model.begin(source), torch.full((len(words),), model.bos)
        for t in range(steps):
            expected, ours = model.step(tokens, ours)
            found = named(step, {"tokens": tokens.numpy(), **memory, **state})
            state = {name: found[f"new.{name}"] for name in graphs.state}
            real = torch.isfinite(expected).numpy()
            assert np.array_equal(real, np.isfinite(found["log_probs"]))
            apart = max(apart, np.abs(expected.numpy()[real] - found["log_probs"][real]).max())
            tokens = expected.argmax(dim=1)
            tokens = torch.where(tokens == model.eos, torch.full_like(tokens, 4 + t), tokens)
    return apart


def louder(model, factor=2.0):
    """Weights that are not near nothing, so that mistakes show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor).add_(0.05 * torch.randn_like(parameter))
    return model


RECURRENT = [
    {},
    {"cell": "gru"},
    {"cell": "gru-reset-before"},
    {"cell": "gru-reset-before", "encoder_layers": 2, "bidirectional": False, "decoder_layers": 2},
    {"attention": "none"},
    {"attention": "none", "bidirectional": False, "cell": "gru"},
    {"attention": "dot"},
    {"attention": "dot", "bidirectional": False},
    {"attention": "general", "encoder_layers": 2, "decoder_layers": 2},
    {"tied": True, "embedding": 6},
    {"tied": True, "attention": "none", "embedding": 6},
    {"reverse_source": True},
]


@pytest.mark.parametrize("shape", RECURRENT, ids=str)
def test_recurrent(shape):
    torch.manual_seed(0)
    model = louder(Seq2Seq(Seq2SeqConfig(**{"hidden": 8, "embedding": 8, **shape}), **SIZES))
    assert farthest(model, WORDS) < 1e-5


SPELT = tuple(
    spellings(["", "", "", "", *symbols]) for symbols in ("aáäbcd", ("a", "á", "e", "é", "s", "t", "t͡s", "st"))
)


def monotonic(order, spelling=True, **shape):
    config = MonotonicConfig(**{"order": order, "hidden": 8, "embedding": 6, "spelling": spelling, **shape})
    return louder(Monotonic(config, spelt=SPELT if spelling else None, **SIZES))


MONOTONIC = [
    {},
    {"spelling": False},
    {"cell": "gru"},
    {"cell": "gru", "spelling": False},
    {"encoder_layers": 2, "decoder_layers": 2},
    {"cell": "gru", "encoder_layers": 3, "decoder_layers": 2},
]


@pytest.mark.parametrize("shape", MONOTONIC, ids=str)
@pytest.mark.parametrize("order", ["zeroth", "first", "edits"])
def test_monotonic(order, shape):
    torch.manual_seed(0)
    assert farthest(monotonic(order, **shape), WORDS) < 1e-5


@pytest.mark.parametrize("jumps", [1, 2, 9])
def test_jumps_beyond_the_source_and_all_alike(jumps):
    torch.manual_seed(0)
    assert farthest(monotonic("first", jumps=jumps), [*WORDS, [5, 6] * 9]) < 1e-5


def test_the_monotonic_encoder_gives_what_the_model_reads():
    torch.manual_seed(0)
    model, source = monotonic("first", encoder_layers=2).eval(), pad(WORDS)
    given = read(session(build_graphs(model).encoder), source)
    with torch.no_grad():
        memory, mask = model.encode(source)
    assert np.array_equal(given["mask"], mask.numpy())
    assert np.abs(given["memory"] - memory.numpy()).max() < 1e-5
    assert np.array_equal(given["hidden"], np.zeros((3, 1, 8)))
    assert np.array_equal(given["arrivals"][:, 0], np.zeros((3, 12)))
    assert np.array_equal(given["arrivals"][:, 1:], np.full((3, 5, 12), np.float32(NEVER)))


@pytest.mark.parametrize("order", ["zeroth", "first", "edits"])
def test_nothing_arrives_at_padding_and_padding_changes_nothing(order):
    torch.manual_seed(0)
    model = monotonic(order)
    graphs = build_graphs(model)
    encoder, step = session(graphs.encoder), session(graphs.step)

    def arrivals(words):
        given = read(encoder, pad(words))
        memory, state = ({name: given[name] for name in names} for names in (graphs.memory, graphs.state))
        for t in range(40):
            found = named(step, {"tokens": np.full(len(words), 4 + t % 8), **memory, **state})
            state = {name: found[f"new.{name}"] for name in state}
        return state["arrivals"]

    together = arrivals(WORDS)
    assert np.isfinite(together).all()
    for word, own in zip(WORDS, together, strict=True):
        assert (own[len(word) + 1 :] < NEVER / 2).all()
        alone = arrivals([word])[0]
        real = alone > NEVER / 2
        assert np.allclose(own[: len(word) + 1][real], alone[real], atol=1e-4)


TRANSFORMERS = [
    {},
    {"positions": "rotary"},
    {"positions": "relative"},
    {"positions": "learned", "max_positions": 40},
    {"norm": "post"},
    {"norm": "rms", "activation": "swiglu"},
    {"norm": "batch"},
    {"activation": "geglu"},
    {"norm": "weight", "activation": "silu"},
    {"norm": "none", "activation": "gelu", "decoder_norm": "rms"},
    {"output_block": True, "embedding_norm": True},
    {"kind": "causal"},
    {"kind": "causal", "positions": "rotary", "norm": "post"},
    {"kind": "causal", "positions": "learned"},
    {"tied": False, "output_bias": False, "head_width": 6, "embedding_scale": False},
]


@pytest.mark.parametrize("tags", [(), (8, 9)], ids=["words", "features"])
@pytest.mark.parametrize("shape", TRANSFORMERS, ids=str)
def test_transformers(shape, tags):
    torch.manual_seed(0)
    sizes = {"width": 8, "heads": 2, "feedforward": 16, "encoder_layers": 2, "decoder_layers": 2}
    model = louder(Transformer(TransformerConfig(**(sizes | shape)), features=tags, **SIZES), 1.3)
    if shape.get("norm") == "batch":
        for norm in model.modules():
            if isinstance(norm, torch.nn.BatchNorm1d):
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2.0)
    assert farthest(model, TAGGED if tags else WORDS) < 2e-5


def test_a_difference_would_show():
    torch.manual_seed(0)
    model = louder(Seq2Seq(Seq2SeqConfig(hidden=8, embedding=8), **SIZES)).eval()
    graphs = build_graphs(model)
    with torch.no_grad():
        model.output.bias[5] += 0.01
    step, given = (
        session(graphs.step),
        named(session(graphs.encoder), {"tokens": np.array([[5]]), "lengths": np.array([1])}),
    )
    found = named(step, {"tokens": np.array([model.bos]), **given})["log_probs"]
    with torch.no_grad():
        expected = model.step(torch.tensor([model.bos]), model.begin(pad([[5]])))[0].numpy()
    real = np.isfinite(found)
    assert np.abs(found[real] - expected[real]).max() > 1e-4


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Seq2Seq(Seq2SeqConfig(hidden=8, cell="rnn-tanh"), **SIZES), "cell=rnn-tanh"),
        (lambda: Seq2Seq(Seq2SeqConfig(hidden=8, residual="residual"), **SIZES), "residual=residual"),
        (lambda: Seq2Seq(Seq2SeqConfig(hidden=8, attention_map="sparsemax"), **SIZES), "attention_map=sparsemax"),
        (lambda: Transformer(TransformerConfig(width=8, attention_map=1.5), **SIZES), "attention_map=1.5"),
        (lambda: Transformer(TransformerConfig(width=8, norm="instance"), **SIZES), "instance norm"),
        (
            lambda: Transformer(TransformerConfig(width=8, pointer=True), copies=torch.full((10,), -1), **SIZES),
            "pointer",
        ),
        (lambda: torch.nn.Linear(2, 2), "got Linear"),
    ],
)
def test_what_has_no_graph_is_refused(model, said):
    with pytest.raises(ConfigError, match=said):
        build_graphs(model())


def test_an_absent_package_gives_the_pip_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'thalweg\[onnx\]'"):
        Graph("x")
    assert package("json").loads("1") == 1


def test_a_graph_is_checked():
    graph = Graph("wrong")
    graph.output("y", "nothing", FLOAT, ["N"])
    with pytest.raises(Exception, match="nothing"):
        graph.model()
