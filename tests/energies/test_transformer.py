"""Transformer: equal to a plain numpy network and to torch's own, inert padding, gradients, features, copying."""

import itertools
from dataclasses import asdict

import numpy as np
import pytest
import torch

from oracles.transformer import plain_log_probs
from thalweg.data import pad
from thalweg.energies import Transformer, TransformerConfig
from thalweg.errors import ConfigError, ShapeError
from thalweg.inference import greedy

KINDS = ["encoder-decoder", "causal"]
NORMS = ["pre", "post"]
POSITIONS = ["sinusoidal", "learned", "rotary"]
ACTIVATIONS = ["relu", "gelu", "silu", "swiglu"]
VOCABULARY = 9
SOURCES = [[4, 5, 6, 7], [8], [5, 4, 4]]
TARGETS = [[4, 5], [6, 6, 5], []]
# Source 4 copies to 4, 5 to 8, the others to nothing; the last two would copy what is never said.
COPIES = torch.tensor([0, 1, 2, -1, 4, 8, -1, -1, -1, 6, -1])


def build(seed=0, *, features=(), copies=None, forbidden=None, unk=0, **settings):
    torch.manual_seed(seed)
    small = {"width": 8, "heads": 2, "feedforward": 12, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
    config = TransformerConfig(**(small | settings))
    if config.pointer and copies is None:
        copies = COPIES
    size = VOCABULARY if config.shared else len(COPIES)
    rest = {"features": features, "copies": copies, "forbidden": forbidden, "unk": unk}
    model = Transformer(config, source_size=size, target_size=VOCABULARY, **rest).double().eval()
    with torch.no_grad():  # biases and norms away from their starting values, so that each one counts
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def numbers(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def agree(model, **options):
    weights, config = numbers(model), asdict(model.config)
    with torch.no_grad():
        found = model.normalise(model(pad(SOURCES), pad(TARGETS, end=3)))
        looked = model.attention_weights(pad(SOURCES), pad(TARGETS, end=3))
    for b, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        expected, attended = plain_log_probs(weights, config, source, [*target, 3], **options)
        T, S = attended.shape
        np.testing.assert_allclose(found[b, :T].numpy(), expected, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(looked[b, :T, :S].numpy(), attended, rtol=1e-10, atol=1e-10)
        assert (looked[b, :, S:] == 0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_plain_numpy(kind, norm, positions, activation):
    agree(build(kind=kind, norm=norm, positions=positions, activation=activation))


@pytest.mark.parametrize(
    "settings",
    [
        {"tied": False},
        {"shared": True},
        {"embedding_norm": True},
        {"embedding_scale": False, "positions": "learned"},
        {"embedding_scale": False, "positions": "rotary", "embedding_norm": True},
        {"output_bias": False},
        {"heads": 1, "encoder_layers": 1, "decoder_layers": 3},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_equals_plain_numpy(kind, settings):
    agree(build(kind=kind, **settings))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_pointer_and_features_equal_plain_numpy(kind, positions):
    copies = [c if c in (4, 8, 6) else -1 for c in COPIES.tolist()]
    model = build(kind=kind, positions=positions, pointer=True, features=(6, 8))
    agree(model, copies=copies, features=(6, 8))


def test_the_oracle_can_disagree():
    model = build()
    weights = numbers(model)
    weights["encoder.layers.1.feedforward.up.bias"] = weights["encoder.layers.1.feedforward.up.bias"] + 0.1
    broken, _ = plain_log_probs(weights, asdict(model.config), [4, 5], [4, 3])
    found = model.normalise(model(pad([[4, 5]]), pad([[4]], end=3)))[0].detach().numpy()
    assert np.abs(broken[:, 3:] - found[:, 3:]).max() > 1e-4


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_equals_torchs_own_transformer(norm, activation):
    model = build(norm=norm, activation=activation)
    options = {"dropout": 0.0, "activation": activation, "batch_first": True, "norm_first": norm == "pre"}
    last = (torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)) if norm == "pre" else (None, None)
    encoder_layer = torch.nn.TransformerEncoderLayer(8, 2, 12, **options)
    encoder = torch.nn.TransformerEncoder(encoder_layer, 2, last[0], enable_nested_tensor=False)
    decoder = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(8, 2, 12, **options), 2, last[1])
    theirs = torch.nn.ModuleDict({"encoder": encoder, "decoder": decoder}).double().eval()
    ours = model.state_dict()
    state = {}
    for side in ("encoder", "decoder"):
        for n in range(2):
            here = there = f"{side}.layers.{n}"
            norms = ["attention", "feedforward"] if side == "encoder" else ["attention", "cross", "feedforward"]
            for end in ("weight", "bias"):
                state[f"{there}.self_attn.in_proj_{end}"] = ours[f"{here}.attention.project.{end}"]
                state[f"{there}.self_attn.out_proj.{end}"] = ours[f"{here}.attention.out.{end}"]
                state[f"{there}.linear1.{end}"] = ours[f"{here}.feedforward.up.{end}"]
                state[f"{there}.linear2.{end}"] = ours[f"{here}.feedforward.down.{end}"]
                for number, name in enumerate(norms, start=1):
                    state[f"{there}.norm{number}.{end}"] = ours[f"{here}.{name}_norm.{end}"]
                if side == "decoder":
                    both = [ours[f"{here}.cross.query.{end}"], ours[f"{here}.cross.memory.{end}"]]
                    state[f"{there}.multihead_attn.in_proj_{end}"] = torch.cat(both)
                    state[f"{there}.multihead_attn.out_proj.{end}"] = ours[f"{here}.cross.out.{end}"]
    if norm == "pre":
        state |= {name: value for name, value in ours.items() if name.startswith(("encoder.norm", "decoder.norm"))}
    theirs.load_state_dict(state)
    source, target = torch.randn(2, 5, 8).double(), torch.randn(2, 4, 8).double()
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    encoded = encoder(source, src_key_padding_mask=~mask)
    expected = decoder(target, encoded, tgt_mask=causal, memory_key_padding_mask=~mask)
    seen = mask[:, None, None, :]
    memory = model.memorise(model.encoder(source, mask=seen).output)
    found = model.decoder(target, memories=memory, memory_mask=seen, causal=True).output
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pointer", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_batch_equals_one_by_one_and_padding_is_inert(kind, positions, pointer):
    model = build(kind=kind, positions=positions, pointer=pointer)
    together = model.log_prob(pad(SOURCES), pad(TARGETS, end=3))
    alone = [model.log_prob(pad([s]), pad([t], end=3)) for s, t in zip(SOURCES, TARGETS, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)
    source, target = pad(SOURCES), pad(TARGETS, end=3)
    odd_source = source._replace(tokens=source.tokens.masked_fill(~source.mask, 7))
    odd_target = target._replace(tokens=target.tokens.masked_fill(~target.mask, 5))
    torch.testing.assert_close(model.log_prob(odd_source, odd_target), together, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_padding_are_zero(kind):
    model = build(kind=kind, tied=False)
    source = pad([[4, 5, 6], [4]])
    source = source._replace(tokens=source.tokens.masked_fill(~source.mask, 7))
    model.energy(source, pad([[4], [5]], end=3)).sum().backward()
    assert (model.source_embedding.weight.grad[7] == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("kind", "pointer"), [("encoder-decoder", True), ("causal", False), ("causal", True)])
def test_gradcheck(kind, pointer):
    settings = {
        "width": 4,
        "heads": 2,
        "feedforward": 3,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "activation": "gelu",
    }
    model = build(kind=kind, pointer=pointer, positions="rotary", features=(7,), **settings)
    source, target = pad([[7, 4, 5], [6]]), pad([[4], [5, 6]], end=3)
    names, values = zip(*model.named_parameters(), strict=True)

    def energy(*parameters):
        given = {f"model.{n}": p for n, p in zip(names, parameters, strict=True)}
        return torch.func.functional_call(_Energy(model), given, (source, target))

    given = tuple(v.detach().clone().requires_grad_() for v in values)
    assert torch.autograd.gradcheck(energy, given, fast_mode=True)


class _Energy(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, source, target):
        return self.model.energy(source, target)


@pytest.mark.parametrize("pointer", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_of_all_targets_sum_to_one(kind, pointer):
    model = build(seed=3, kind=kind, pointer=pointer)
    answers = [list(y) for n in range(3) for y in itertools.product(range(4, VOCABULARY), repeat=n)]
    finished = model.log_prob(pad([[4, 8, 5]] * len(answers)), pad(answers, end=3)).exp().sum()
    # What is left is the mass of the prefixes of three symbols.
    prefixes = [list(y) for y in itertools.product(range(4, VOCABULARY), repeat=3)]
    source, target = pad([[4, 8, 5]] * len(prefixes)), pad(prefixes)
    left = model.log_prob(source, target).exp().sum()
    assert (finished + left).item() == pytest.approx(1.0, abs=1e-10)


def test_pointer_without_copyable_symbols_only_generates():
    model = build(pointer=True)
    with torch.no_grad():
        model.pointer.gate.bias.fill_(-1e4)  # copy whatever can be copied
        log_probs = model.normalise(model(pad([[6, 7], [4, 6]]), pad([[], []], end=3)))
    assert log_probs[0, 0, 3:].isfinite().all()
    torch.testing.assert_close(log_probs[1, 0].exp()[4], torch.tensor(1.0).double())


def test_pointer_gradients_survive_extreme_gates():
    for bias in (-1e3, 1e3):
        model = build(pointer=True)
        with torch.no_grad():
            model.pointer.gate.bias.fill_(bias)
        energy = model.energy(pad([[4, 6], [7, 7]]), pad([[4, 8], [5]], end=3))
        energy.sum().backward()
        assert energy.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("positions", POSITIONS)
def test_feature_tags_are_a_set(positions):
    model = build(features=(8, 9, 10), positions=positions)
    target = pad([[4, 5]], end=3)
    orders = [[8, 9, 4, 5, 6], [9, 8, 4, 5, 6], [4, 9, 5, 8, 6], [4, 5, 6, 8, 9]]
    first, *others = [model.log_prob(pad([order]), target) for order in orders]
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-12, atol=1e-12)
    swapped = model.log_prob(pad([[8, 9, 5, 4, 6]]), target)
    assert abs(swapped - first) > 1e-6
    plain = build(positions=positions)
    assert abs(plain.log_prob(pad([orders[0]]), target) - plain.log_prob(pad([orders[2]]), target)) > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forcing(kind):
    model = build(kind=kind)
    source, target = pad(SOURCES), pad(TARGETS, end=3)
    forced = model(source, target)
    torch.testing.assert_close(model(source, target, teacher_forcing=1 - 1e-12), forced)
    # At zero every position is fed the guess of the forced pass.
    guesses = target._replace(tokens=forced.argmax(2))
    torch.testing.assert_close(model(source, target, teacher_forcing=0.0), model(source, guesses))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_deterministic_and_training_is_not(kind):
    model = build(kind=kind, dropout=0.4, attention_dropout=0.2)
    source, target = pad(SOURCES), pad(TARGETS, end=3)
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))


def test_symbols_that_are_never_said():
    log_probs = build().normalise(build()(pad(SOURCES), pad(TARGETS, end=3)))
    assert torch.isinf(log_probs[..., [0, 1, 2]]).all()
    assert log_probs[..., 3:].isfinite().all()
    free = build(forbidden=(), unk=None)
    assert free.normalise(free(pad(SOURCES), pad(TARGETS, end=3))).isfinite().all()


def test_bfloat16_probabilities_are_float32():
    model = build(pointer=True).bfloat16()
    log_probs = model.normalise(model(pad(SOURCES), pad(TARGETS, end=3)))
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(2), torch.ones(3, 4), rtol=1e-5, atol=1e-5)


def test_names_of_parameters():
    model = build(positions="learned", embedding_norm=True, activation="swiglu", tied=False)
    names = set(model.state_dict())
    for name in (
        *("source_embedding.weight", "target_embedding.weight", "source_positions.weight", "target_positions.weight"),
        *("source_norm.weight", "target_norm.bias", "encoder.layers.1.attention.project.weight", "encoder.norm.weight"),
        *("encoder.layers.0.attention.out.bias", "encoder.layers.0.attention_norm.weight", "decoder.norm.bias"),
        *(
            "decoder.layers.1.cross.query.weight",
            "decoder.layers.1.cross.memory.weight",
            "decoder.layers.1.cross.out.bias",
        ),
        *(
            "decoder.layers.1.cross_norm.weight",
            "decoder.layers.0.feedforward.gate.weight",
            "output.weight",
            "output.bias",
        ),
        *("decoder.layers.0.feedforward.up.weight", "decoder.layers.0.feedforward.down.bias"),
    ):
        assert name in names
    assert model.decoder.layers[0].cross.memory.weight.shape == (16, 8)
    tied = build(shared=True)
    assert tied.output.weight is tied.target_embedding.weight is tied.source_embedding.weight


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"width": 0}, "width"),
        ({"width": 6, "heads": 4}, "multiple of model.heads"),
        ({"width": 5, "heads": 1}, "even width"),
        ({"width": 6, "heads": 2, "positions": "rotary"}, "even width"),
        ({"dropout": 1.0}, "dropout"),
        ({"norm": "prae"}, "did you mean `pre`"),
        ({"kind": "encoder"}, "did you mean `encoder-decoder`"),
        ({"activation": "swiglue"}, "did you mean `swiglu`"),
        ({"positions": "none"}, "choose one of"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ConfigError, match=words):
        TransformerConfig(**settings)


def test_bad_constructions():
    config = {"width": 8, "heads": 2, "feedforward": 8, "encoder_layers": 1, "decoder_layers": 1}
    with pytest.raises(ConfigError, match="one alphabet"):
        Transformer(TransformerConfig(shared=True, **config), source_size=9, target_size=8)
    with pytest.raises(ConfigError, match="needs `copies`"):
        Transformer(TransformerConfig(pointer=True, **config), source_size=9, target_size=8)
    with pytest.raises(ConfigError, match="`copies` must hold target symbols"):
        Transformer(
            TransformerConfig(pointer=True, **config), source_size=2, target_size=8, copies=torch.tensor([8, 0])
        )
    with pytest.raises(ConfigError, match="`features` must be source symbols"):
        Transformer(TransformerConfig(**config), source_size=9, target_size=8, features=(9,))


@pytest.mark.parametrize("kind", KINDS)
def test_learned_positions_end(kind):
    model = build(kind=kind, positions="learned", max_positions=6)
    with pytest.raises(ShapeError, match="learned positions reach 6"):
        model(pad([[4] * 7]), pad([[4]], end=3))
    with pytest.raises(ShapeError, match="learned positions reach 6"):
        model(pad([[4]]), pad([[4] * 7], end=3))


@pytest.mark.parametrize(
    ("kind", "positions", "turn"), [("encoder-decoder", "sinusoidal", -1), ("causal", "rotary", 1)]
)
def test_learns_to_reverse_and_to_copy(kind, positions, turn):
    torch.manual_seed(0)
    size = {"width": 32, "heads": 2, "feedforward": 64, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0}
    model = Transformer(TransformerConfig(kind=kind, positions=positions, **size), source_size=12, target_size=12)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, 450)
    generator = torch.Generator().manual_seed(1)

    def words(n):
        lengths = torch.randint(1, 7, (n,), generator=generator).tolist()
        return [torch.randint(4, 12, (length,), generator=generator).tolist() for length in lengths]

    for _ in range(450):
        batch = words(64)
        target = pad([word[::turn] for word in batch], end=3)
        loss = model.energy(pad(batch), target).sum() / target.mask.sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if loss < 0.004:
            break
    held_out = words(100)
    answers = greedy(model.eval(), pad(held_out), max_length=8).sequences()
    assert [answer[0] for answer in answers] == [[*word[::turn], 3] for word in held_out]
