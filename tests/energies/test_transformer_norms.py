"""Kinds of norm in a Transformer: a plain network, padding, gradients, every way to search, checkpoints old and new."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from oracles.transformer import plain_log_probs
from thalweg.data import pad
from thalweg.energies import Transformer, TransformerConfig
from thalweg.energies.transformer.fixed import FixedTransformer
from thalweg.errors import ConfigError
from thalweg.inference import beam_search, greedy
from thalweg.layers.low_precision import reduce_precision
from thalweg.layers.padded import Padded
from thalweg.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

KINDS = ["layer", "rms", "batch", "instance", "weight", "none"]
STEPWISE = ["layer", "rms", "weight", "none"]
MIXED = [("batch", "rms"), ("instance", "weight"), ("layer", "none"), ("weight", "layer"), ("rms", "layer")]
SOURCES = [[4, 5, 6, 7], [8, 9], [5, 4, 4]]
TARGETS = [[4, 5], [6, 6, 5], []]
COPIES = torch.tensor([-1, -1, -1, -1, 4, 5, -1, 7, -1, 6])
SMALL = {"width": 8, "heads": 2, "feedforward": 12, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}


def every_model() -> list[dict[str, str | bool]]:
    """Each kind in each variant it has."""
    models: list[dict[str, str | bool]] = []
    for place in ("pre", "post"):
        models += [{"norm": place, "encoder_norm": kind} for kind in KINDS]
    models += [{"encoder_norm": kind, "pointer": True} for kind in KINDS]
    models += [
        {"encoder_norm": kind, "kind": "causal", "norm": place} for kind in STEPWISE for place in ("pre", "post")
    ]
    models += [{"encoder_norm": kind, "kind": "causal", "pointer": True} for kind in STEPWISE]
    models += [{"encoder_norm": kind, "decoder_norm": other} for kind, other in MIXED]
    models += [{"encoder_norm": "rms", "positions": "rotary", "activation": "swiglu", "embedding_norm": True}]
    models += [{"encoder_norm": "weight", "attention_map": "sparsemax", "activation": "gelu"}]
    return models


def name_of(settings: dict[str, str | bool]) -> str:
    return "-".join(str(value) for value in settings.values())


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **settings) -> Transformer:
    torch.manual_seed(seed)
    config = TransformerConfig(**(SMALL | settings))
    copies = COPIES if config.pointer else None
    model = Transformer(config, source_size=10, target_size=8, copies=copies).to(dtype)
    with torch.no_grad():  # away from their starting values, so that each one counts
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(0.5 + torch.rand_like(buffer))
    return model.eval()


def feed(model: Transformer, source: Padded, columns: list[list[int]]) -> torch.Tensor:
    state, answers = model.begin(source), []
    for column in columns:
        log_probs, state = model.step(torch.tensor(column), state)
        answers.append(log_probs)
    return torch.stack(answers, dim=1)


@pytest.mark.parametrize("settings", every_model(), ids=name_of)
@torch.no_grad()
def test_the_plain_network(settings):
    if "attention_map" in settings:
        settings = {key: value for key, value in settings.items() if key != "attention_map"}
    model = build(**settings)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    copies = COPIES if model.pointer else None
    found = model.normalise(model(pad(SOURCES), pad(TARGETS, end=3)))
    for b, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        expected, _ = plain_log_probs(weights, asdict(model.config), source, [*target, 3], copies=copies)
        np.testing.assert_allclose(found[b, : len(expected)].numpy(), expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_broken_twin_is_noticed():
    model = build(encoder_norm="instance")
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    found = model.normalise(model(pad(SOURCES[:1]), pad(TARGETS[:1], end=3)))[0].numpy()
    for broken in (False, True):
        shape = asdict(model.config) | {"broken": broken}
        expected, _ = plain_log_probs(weights, shape, SOURCES[0], [*TARGETS[0], 3])
        assert np.allclose(found, expected, rtol=1e-9, atol=1e-9) != broken


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("settings", every_model(), ids=name_of)
def test_steps_equal_the_forced_pass(settings, gradients):
    model, prefixes = build(**settings), [[4, 5, 7], [6, 6, 5], [7, 4, 4]]
    with torch.set_grad_enabled(gradients):
        expected = model.normalise(model(pad(SOURCES), pad([[*prefix, 3] for prefix in prefixes])))
        found = feed(model, pad(SOURCES), [[2, 2, 2], *([prefix[t] for prefix in prefixes] for t in range(3))])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def searched_by_hand(model: Transformer, source: Padded, *, most: int) -> list[list[int]]:
    """Greedy answers by the forced pass alone, one source at a time, from the start at every symbol."""
    answers = []
    for b in range(source.size):
        own, said = pad([source.tokens[b, : source.lengths[b]].tolist()]), []
        while len(said) < most and (not said or said[-1] != 3):
            said.append(int(model.normalise(model(own, pad([[*said, 3]])))[0, -1].argmax()))
        answers.append(said)
    return answers


@pytest.mark.parametrize("settings", every_model(), ids=name_of)
@torch.no_grad()
def test_searches_equal_the_forced_pass(settings):
    """Whatever way a search takes: compiled where that is served, which is float32 alone, else the ordinary one."""
    model, source = build(3, torch.float32, **settings), pad([*SOURCES, [9, 9, 8, 7, 6]])
    found = greedy(model, source, max_length=6)
    assert [row[0] for row in found.sequences()] == searched_by_hand(model, source, most=6)
    beam = beam_search(model, source, width=3, max_length=6)
    for b, answers in enumerate(beam.sequences()):
        for answer, score, done in zip(answers, beam.scores[b], beam.finished[b], strict=True):
            if done:
                own = pad([source.tokens[b, : source.lengths[b]].tolist()])
                torch.testing.assert_close(model.log_prob(own, pad([answer]))[0], score, rtol=1e-5, atol=1e-5)
    ordinary = beam_search(model, source, width=3, max_length=6, rows_at_once=999)
    assert torch.equal(beam.tokens, ordinary.tokens)


def test_which_searches_serve_which_norms():
    compiled = {kind: build(dtype=torch.float32, encoder_norm=kind).compiled(pad(SOURCES)) for kind in KINDS}
    assert {kind for kind, found in compiled.items() if found is not None} == {"layer", "rms", "batch", "instance"}
    assert build(dtype=torch.float32, decoder_norm="none").compiled(pad(SOURCES)) is None
    fixed = {kind for kind in KINDS if FixedTransformer.serves(build(dtype=torch.float32, encoder_norm=kind))}
    assert fixed == {"layer", "batch", "instance"}, "the encoder runs as it is, the decoder's norms are LayerNorms"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind, training):
    """Neither answers nor gradients nor running statistics."""
    source, target = pad(SOURCES), pad(TARGETS, end=3)
    wide = [torch.nn.functional.pad(part, (0, 3), value=fill) for part, fill in ((source.tokens, 7), (source.mask, 0))]
    models = [build(encoder_norm=kind).train(training) for _ in range(2)]
    found = []
    for model, inputs in zip(models, (source, Padded(wide[0], source.lengths, wide[1])), strict=True):
        energy = model.energy(inputs, target)
        energy.sum().backward()
        found.append([energy.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_items_do_not_meet_at_inference(kind):
    model = build(encoder_norm=kind)
    together = model.energy(pad(SOURCES), pad(TARGETS, end=3))
    alone = [model.energy(pad([x]), pad([y], end=3))[0] for x, y in zip(SOURCES, TARGETS, strict=True)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("settings", every_model(), ids=name_of)
@torch.no_grad()
def test_no_position_sees_those_after_it(settings, training):
    """In training too: a target's first logits do not change with its later symbols, nor with other targets'."""
    models = [build(**settings).train(training) for _ in range(2)]
    first = models[0](pad(SOURCES), pad([[4, 5, 6, 3], [6, 3, 4, 3], [5, 3, 4, 3]]))
    other = models[1](pad(SOURCES), pad([[4, 5, 7, 3], [6, 4, 7, 3], [5, 7, 7, 3]]))
    torch.testing.assert_close(first[:, :2], other[:, :2], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(first[1:, 2:], other[1:, 2:])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    model = build(encoder_norm=kind, encoder_layers=1, decoder_layers=1).train()
    source, target = pad(SOURCES[:2]), pad(TARGETS[:2], end=3)
    names = [n for n, _ in model.named_parameters() if "norm" in n or "attention.project" in n]
    chosen = [dict(model.named_parameters())[name].detach().clone().requires_grad_() for name in names]

    def energy(*values):
        given = dict(zip(names, values, strict=True))
        given |= {name: buffer.clone() for name, buffer in model.named_buffers()}
        return torch.func.functional_call(model, given, (source, target)).logsumexp(2).sum(1)

    assert torch.autograd.gradcheck(energy, chosen, fast_mode=True)


def test_batch_norm_needs_no_more_than_one_item_and_learns_statistics():
    model = build(encoder_norm="batch").train()
    before = copy.deepcopy(model.state_dict())
    model(pad([[4]]), pad([[4, 3]])).logsumexp(2).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    norms = ("attention_norm", "feedforward_norm", "norm")
    ends = ("running_mean", "running_var", "num_batches_tracked")
    assert moved >= {f"encoder.layers.0.{norm}.layer.{end}" for norm in norms[:2] for end in ends}
    assert all(name.startswith("encoder.") for name in moved)


def test_the_same_weights_to_begin_with():
    """Which norm it is draws nothing: a comparison of norms starts from one network."""
    started = {}
    for kind in KINDS:
        torch.manual_seed(0)
        started[kind] = Transformer(TransformerConfig(**SMALL, encoder_norm=kind), source_size=10, target_size=8)
    for kind, model in started.items():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                other = dict(started["layer"].named_modules())[name]
                torch.testing.assert_close(module.weight, other.weight, msg=lambda m, k=kind: f"{k}: {m}")


def test_names_of_the_usual_norm_stay():
    plain, said = build(), build(norm="layer")
    assert plain.config == said.config == TransformerConfig(**SMALL)
    names = [name for name in plain.state_dict() if "norm" in name]
    assert len(names) == 2 * (2 * 2 + 1 + 2 * 3 + 1)
    assert all(name.rsplit(".", 1)[0].endswith("norm") for name in names)
    assert all(type(m) is torch.nn.LayerNorm for n, m in plain.named_modules() if n.endswith("norm"))


@pytest.mark.parametrize("settings", every_model(), ids=name_of)
@torch.no_grad()
def test_checkpoints_come_back(settings, tmp_path):
    model, other = build(**settings), build(1, **settings)
    save_checkpoint(tmp_path / "model.safetensors", Checkpoint(dict(model.state_dict()), {}))
    other.load_state_dict(load_checkpoint(tmp_path / "model.safetensors").tensors)
    here, there = (m(pad(SOURCES), pad(TARGETS, end=3)) for m in (model, other))
    assert torch.equal(here, there)
    assert TransformerConfig(**asdict(model.config)) == model.config


def test_configs_of_old_are_those_of_now():
    old = {key: value for key, value in asdict(TransformerConfig(norm="post")).items() if "er_norm" not in key}
    assert TransformerConfig(**old) == TransformerConfig(norm="post")
    assert TransformerConfig(**old).norm_of_decoder == "layer"


@torch.no_grad()
def test_fewer_bits():
    """Norms stay as they are; matrices under weight norm keep their bits."""
    for kind in KINDS:
        model = build(dtype=torch.float32, encoder_norm=kind)
        reduced = reduce_precision(model, "bf16")
        assert isinstance(reduced, Transformer)
        found = greedy(reduced, pad(SOURCES), max_length=4)
        forced = searched_by_hand(reduced, pad(SOURCES), most=4)
        assert [row[0] for row in found.sequences()] == forced


@torch.no_grad()
def test_a_search_follows_the_weights():
    """Matrices of weight norm are made anew for every search."""
    model, source = build(dtype=torch.float32, encoder_norm="weight"), pad(SOURCES)
    beam_search(model, source, width=2, max_length=5)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.5)
    found = greedy(model, source, max_length=5)
    assert [row[0] for row in found.sequences()] == searched_by_hand(model, source, most=5)


def test_settings():
    config = TransformerConfig(norm="batch")
    assert (config.norm, config.encoder_norm, config.norm_of_decoder) == ("pre", "batch", "layer")
    assert replace(config, norm="post").norm_of_decoder == "layer"
    assert replace(config, decoder_norm="rms").norm_of_decoder == "rms"
    assert TransformerConfig(norm="rms", kind="causal").norm_of_decoder == "rms"
    for settings, words in (
        ({"norm": "rsm"}, "model.norm `rsm` is not known; did you mean `rms`"),
        ({"encoder_norm": "bach"}, "did you mean `batch`"),
        ({"decoder_norm": "batch"}, "model.decoder_norm `batch` is not known"),
        ({"norm": "rms", "encoder_norm": "batch"}, "name two kinds of norm; keep one"),
        ({"norm": "instance", "kind": "causal"}, "got a causal model, which must not; choose layer"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            TransformerConfig(**settings)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("preset", "kind"), [("transformer", "rms"), ("transformer", "batch"), ("causal", "weight")])
def test_from_a_word_to_a_run_and_back(tmp_path, preset, kind):
    from thalweg.tasks import apply_overrides, build_config, load, train
    from thalweg.tasks.transduce.presets import PRESETS

    pairs = ["ab\tBA", "abc\tCBA", "c\tC", "cab\tBAC", "bb\tBB", "ba\tAB"]
    (tmp_path / "train.tsv").write_text("\n".join(pairs) + "\n", encoding="utf-8")
    words = [f"norm={kind}", "model.width=8", "heads=2", "feedforward=8", "encoder_layers=1", "decoder_layers=1"]
    data = {"data": {"train": str(tmp_path / "train.tsv"), "dev": str(tmp_path / "train.tsv")}}
    config = build_config(apply_overrides(PRESETS[preset] | data, [*words, "epochs=2"]))
    train(config, tmp_path / "run")
    again = load(tmp_path / "run", device="cpu")
    assert again.model.config == config.model
    assert (again.model.config.norm, again.model.config.encoder_norm) == ("pre", kind)
    together, alone = again.predict(["abc", "b"]), (next(again.predict([word])) for word in ("abc", "b"))
    for one, other in zip(together, alone, strict=True):
        assert one.answers[0].log_prob == pytest.approx(other.answers[0].log_prob, abs=1e-4)
