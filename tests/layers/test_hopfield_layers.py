"""Hopfield layers: the definition in plain numpy, attention as one step, masks, tolerance, energy, gradients."""

import numpy as np
import pytest
import torch
from torch import nn

from oracles.hopfield_layers import associate, of_ours
from thalweg.errors import ConfigError, ShapeError
from thalweg.layers.hopfield.convert import from_attention
from thalweg.layers.hopfield.core import Association
from thalweg.layers.hopfield.layer import Hopfield
from thalweg.layers.hopfield.learned import HopfieldLookup, HopfieldPooling
from thalweg.layers.hopfield.separation_maps import Softmax

B, T, N = 3, 4, 6
EXACT = {"rtol": 1e-9, "atol": 1e-9}
PADDING = torch.arange(N) >= torch.tensor([6, 3, 1])[:, None]

SHAPES = {
    "plain": {"heads": 2, "normalise": ()},
    "norms": {"heads": 2, "normalise": ("stored", "state", "values", "space")},
    "wide": {"heads": 2, "hidden": 5, "pattern": 3, "output": 7, "stored": 6, "values": 9},
    "beta": {"heads": 2, "beta": (0.5, 2.0), "steps": 3},
    "one beta": {"heads": 4, "beta": 1.5, "steps": 2, "bias": False},
    "static stored": {"static": ("stored",), "steps": 2},
    "static state": {"heads": 2, "static": ("state",), "stored": 5},
    "static values": {"heads": 2, "static": ("values",), "values": 3, "steps": 2},
    "static": {"static": ("stored", "state", "values", "output"), "normalise": (), "steps": 4, "beta": 2.0},
    "no output": {"heads": 2, "pattern": 3, "static": ("output",)},
    "connected": {"heads": 2, "connected": True, "pattern": 5, "steps": 2},
    "zero": {"heads": 2, "zero_pattern": True, "steps": 2},
    "sparse": {"heads": 2, "separation": "sparsemax", "steps": 3, "beta": 1.0},
    "entmax15": {"separation": "entmax15", "steps": 2},
    "alpha": {"separation": 1.3, "steps": 2, "zero_pattern": True},
    "tolerance": {"heads": 2, "steps": 30, "tolerance": 1e-2, "beta": 1.0},
}


def build(size=8, seed=0, **options):
    torch.manual_seed(seed)
    layer = Hopfield(size, **options).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.6)
    return layer


def data(layer, batch=B, states=T, patterns=N, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def draw(count, width):
        return torch.randn(batch, count, width, dtype=torch.float64, generator=generator)

    return draw(patterns, layer.stored), draw(states, layer.size), draw(patterns, layer.values)


def expected(layer, stored, state, values, added=None):
    """The oracle item by item: outputs, weights and energies of the state each query ends in."""
    parts = of_ours({name: value.numpy() for name, value in layer.state_dict().items()})
    given = {"heads": layer.heads, "beta": layer.beta.tolist(), "steps": layer.steps, "tolerance": layer.tolerance}
    name = {"entmax(1.3)": 1.3}.get(str(layer.separation), str(layer.separation))
    given |= {"map": name, "connected": layer.connected, "zero": layer.zero_pattern}
    found = []
    for b in range(len(stored)):
        extra = None if added is None else np.broadcast_to(added[b], (layer.heads, state.size(1), stored.size(1)))
        found.append(associate(parts, stored[b].numpy(), state[b].numpy(), values[b].numpy(), added=extra, **given))
    outputs, weights, energies = zip(*found, strict=True)
    return torch.tensor(np.array(outputs)), torch.tensor(np.array(weights)), energies


@pytest.mark.parametrize("name", SHAPES)
def test_equals_plain_numpy(name):
    layer = build(**SHAPES[name])
    stored, state, values = data(layer)
    added = torch.zeros(B, 1, 1, N).masked_fill(PADDING[:, None, None], -torch.inf)
    for mask, extra in ((None, None), (PADDING, added.numpy())):
        outputs, weights, _ = expected(layer, stored, state, values, extra)
        torch.testing.assert_close(layer(stored, state, values, key_padding_mask=mask), outputs, **EXACT)
        torch.testing.assert_close(layer.associations(stored, state, key_padding_mask=mask), weights, **EXACT)


def test_the_oracle_can_disagree():
    layer = build(heads=2, steps=2)
    stored, state, values = data(layer)
    outputs, _, _ = expected(layer, stored, state, values)
    layer.steps = 3
    assert not torch.allclose(layer(stored, state, values), outputs, atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "beta", "sparse", "entmax15", "zero"])
def test_energy_equals_plain_numpy_and_never_rises(name):
    layer = build(**{**SHAPES[name], "steps": 6})
    stored, state, values = data(layer)
    added = torch.zeros(B, 1, 1, N).masked_fill(PADDING[:, None, None], -torch.inf)
    _, _, energies = expected(layer, stored, state, values, added.numpy())
    found = torch.stack([layer.energy(stored, state, after=n, key_padding_mask=PADDING) for n in range(6)], dim=3)
    torch.testing.assert_close(found, torch.tensor(np.array(energies)), **EXACT)
    assert bool((found.diff(dim=3) <= 1e-12).all())


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 5}])
@pytest.mark.parametrize("batch_first", [True, False])
def test_one_step_is_multi_head_attention(sizes, batch_first):
    """H3: attention is one update with tied projections."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **sizes).eval()
    nn.init.normal_(attention.in_proj_bias)
    layer = from_attention(attention)
    k, q, v = data(layer)
    k, q, v = (part.float() if batch_first else part.float().transpose(0, 1) for part in (k, q, v))
    causal = torch.ones(T, N, dtype=torch.bool).triu(1)
    for mask in (causal, torch.randn(T, N), (torch.rand(B * 2, T, N) < 0.3) & (torch.arange(N) > 0)):
        want, weights = attention(
            q, k, v, key_padding_mask=_as(mask, PADDING), attn_mask=mask, average_attn_weights=False
        )
        masks = {"key_padding_mask": PADDING, "attention_mask": mask}
        torch.testing.assert_close(layer(k, q, v, **masks), want, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(layer.associations(k, q, **masks), weights, atol=1e-6, rtol=1e-6)


def _as(mask, padding):
    """torch wants both masks of one kind."""
    return padding if mask.dtype == torch.bool else torch.zeros(padding.shape).masked_fill(padding, -torch.inf)


def test_one_step_without_projections_is_attention_over_the_patterns():
    """H3 as it stands: softmax(Q X'/sqrt(D)) X."""
    layer = Hopfield(8, static=("stored", "state", "values", "output"), normalise=()).double()
    stored, state, _ = data(layer)
    want = (state @ stored.transpose(1, 2) / 8**0.5).softmax(dim=2) @ stored
    torch.testing.assert_close(layer(stored, state), want, **EXACT)
    assert not list(layer.parameters())


def test_one_softmax_step_is_one_fused_call(monkeypatch):
    calls = []
    fused = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(k["scale"]) or fused(*a, **k)
    )
    layer = build(heads=2)
    layer(*data(layer))
    assert calls == [0.5]
    build(heads=2, separation="sparsemax")(*data(layer))
    assert len(calls) == 1


def test_defaults_take_the_stored_patterns_for_the_rest():
    layer = build(heads=2, steps=2)
    stored, state, _ = data(layer)
    torch.testing.assert_close(layer(stored), layer(stored, stored, stored))
    torch.testing.assert_close(layer(stored, state), layer(stored, state, stored))


def test_attention_masks_reach_each_head():
    layer = build(heads=2, steps=2)
    stored, state, values = data(layer)
    hidden = (torch.rand(B, 2, T, N, generator=torch.Generator().manual_seed(3)) < 0.4) & (torch.arange(N) > 0)
    added = torch.zeros(B, 2, T, N).masked_fill(hidden, -torch.inf)
    want, _, _ = expected(layer, stored, state, values, added.numpy())
    for mask in (hidden, hidden.flatten(0, 1), added):
        torch.testing.assert_close(layer(stored, state, values, attention_mask=mask), want, **EXACT)
    assert bool((layer.associations(stored, state, attention_mask=hidden)[hidden] == 0).all())
    slope = torch.randn(T, N, dtype=torch.float64)
    want, _, _ = expected(layer, stored, state, values, slope.expand(B, 1, T, N).numpy())
    torch.testing.assert_close(layer(stored, state, values, attention_mask=slope), want, **EXACT)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15"])
def test_padding_is_inert_and_a_blind_query_reads_nothing(name):
    layer = build(heads=2, steps=2, separation=name, bias=True)
    stored, state, values = data(layer)
    padding = PADDING.clone()
    padding[2] = True  # nothing is stored
    grads = []
    for filler in (0.0, torch.nan):
        inputs = [stored.masked_fill(padding[..., None], filler), state, values.masked_fill(padding[..., None], filler)]
        inputs = [part.requires_grad_() for part in inputs]
        found = layer(*inputs, key_padding_mask=padding)
        assert bool((found[2] == layer.out.bias).all())
        energy = layer.energy(*inputs[:2], key_padding_mask=padding)
        assert bool(energy.isfinite().all())
        grads.append([found.detach(), energy.detach(), *torch.autograd.grad(found.sum() + energy.sum(), inputs)])
    for clean, dirty in zip(*grads, strict=True):
        assert bool(dirty.isfinite().all())
        torch.testing.assert_close(clean, dirty)
    assert bool((grads[0][2][padding] == 0).all())
    weights = layer.associations(stored, state, key_padding_mask=padding)
    assert bool((weights.transpose(2, 3).transpose(1, 2)[padding] == 0).all())


def test_each_query_rests_by_itself():
    layer = build(heads=2, steps=50, tolerance=1e-3, beta=1.0)
    stored, state, values = data(layer, states=12)
    whole = layer(stored, state, values)
    for b in range(B):
        for t in range(12):
            alone = layer(stored[b : b + 1], state[b : b + 1, t : t + 1], values[b : b + 1])
            torch.testing.assert_close(alone[0, 0], whole[b, t], **EXACT)
    steady = build(heads=2, steps=200, beta=1.0)(stored, state, values)
    torch.testing.assert_close(whole, steady, atol=0.2, rtol=0)
    layer.tolerance = 0.0
    torch.testing.assert_close(layer(stored, state, values), build(heads=2, steps=50, beta=1.0)(stored, state, values))


def test_a_settled_association_stops_early(monkeypatch):
    calls, fused = [], nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k)
    )
    eye = torch.eye(4, dtype=torch.float64).view(1, 1, 4, 4)
    rested = Association(eye * 0.9, eye, 60.0, Softmax(), None).settle(100, 1e-6)
    torch.testing.assert_close(rested.queries, eye, atol=1e-9, rtol=0)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["plain", "norms", "beta", "connected", "sparse", "entmax15"])
def test_gradients(name):
    layer = build(**{"heads": 2, **SHAPES[name]})
    inputs = [part[:, :2].clone().requires_grad_() for part in data(layer, batch=2)]
    padding = torch.tensor([[False, False], [False, True]])
    assert torch.autograd.gradcheck(lambda *x: layer(*x, key_padding_mask=padding), inputs)
    assert torch.autograd.gradcheck(lambda y, r: layer.energy(y, r, after=1, key_padding_mask=padding), inputs[:2])


def test_beta_can_be_learned():
    layer = build(heads=2, beta=(0.5, 2.0), learn_beta=True)
    with torch.no_grad():
        layer.log_beta.copy_(torch.tensor([0.5, 2.0]).log())
    inputs = data(layer)
    torch.testing.assert_close(layer(*inputs), expected(layer, *inputs)[0], rtol=1e-6, atol=1e-6)
    layer(*inputs).sum().backward()
    assert bool((layer.log_beta.grad != 0).all())
    assert "log_beta" in layer.state_dict()
    assert torch.equal(Hopfield(16, heads=4).beta, torch.full((4,), 0.5))


def test_dropout_falls_on_the_weights_while_training_alone():
    for name in ("softmax", "sparsemax"):
        layer = build(heads=2, dropout=0.5, separation=name)
        inputs = data(layer)
        torch.testing.assert_close(layer(*inputs), expected(layer, *inputs)[0], **EXACT)
        layer.train()
        torch.manual_seed(0)
        drawn = torch.stack([layer(*inputs) for _ in range(300)])
        assert drawn.std(0).max() > 0.01
        torch.testing.assert_close(drawn.mean(0), expected(layer, *inputs)[0], atol=0.6, rtol=0)


@pytest.mark.parametrize(("batch", "states", "patterns"), [(0, 2, 3), (1, 1, 1), (2, 0, 3), (2, 3, 1)])
def test_edge_sizes(batch, states, patterns):
    for name in ("softmax", "sparsemax"):
        layer = build(2, heads=2, steps=2, separation=name, tolerance=1e-3)
        inputs = data(layer, batch, states, patterns)
        found = layer(*inputs)
        assert found.shape == (batch, states, 2)
        if patterns == 1 and found.numel():
            torch.testing.assert_close(found, expected(layer, *inputs)[0], **EXACT)
        assert layer.energy(*inputs[:2]).shape == (batch, 2, states)


def test_a_batch_of_one_serves_all_and_layout_is_a_matter_of_taste():
    layer = build(heads=2, steps=2)
    stored, state, values = data(layer)
    one = layer(stored[:1], state, values[:1])
    torch.testing.assert_close(one, layer(stored[:1].expand(B, -1, -1), state, values[:1].expand(B, -1, -1)))
    turned = build(heads=2, steps=2, batch_first=False)
    found = turned(*(part.transpose(0, 1) for part in (stored, state, values)), key_padding_mask=PADDING)
    torch.testing.assert_close(found.transpose(0, 1), layer(stored, state, values, key_padding_mask=PADDING))


def test_half_precision_stays_near():
    layer = build(heads=2, steps=2, separation="entmax15")
    inputs = data(layer)
    want = layer(*inputs)
    found = layer.bfloat16()(*(part.bfloat16() for part in inputs))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), want, atol=0.15, rtol=0.1)


def test_pooling_is_association_of_learned_states():
    torch.manual_seed(0)
    pooling = HopfieldPooling(8, queries=3, heads=2, output=5, steps=2).double()
    stored, _, values = data(pooling.hopfield)
    masks = {"key_padding_mask": PADDING}
    states = pooling.queries.expand(B, -1, -1)
    want = pooling.hopfield(stored, states, values, **masks)
    torch.testing.assert_close(pooling(stored, values, **masks), want.flatten(1))
    turned = HopfieldPooling(8, queries=3, heads=2, output=5, steps=2, batch_first=False).double()
    turned.load_state_dict(pooling.state_dict())
    found = turned(stored.transpose(0, 1), values.transpose(0, 1), **masks)
    torch.testing.assert_close(found, want.flatten(1))
    assert pooling.associations(stored, **masks).shape == (B, 2, 3, N)
    assert pooling.energy(stored, after=1, **masks).shape == (B, 2, 3)
    pooling(stored).sum().backward()
    assert bool((pooling.queries.grad != 0).any())


def test_lookup_is_association_with_learned_patterns():
    torch.manual_seed(0)
    for separate in (False, True):
        lookup = HopfieldLookup(8, patterns=7, separate=separate, heads=2, steps=2).double()
        _, state, _ = data(lookup.hopfield)
        stored = lookup.patterns.expand(B, -1, -1)
        values = lookup.targets.expand(B, -1, -1) if separate else stored
        torch.testing.assert_close(lookup(state), lookup.hopfield(stored, state, values))
        mask = torch.arange(7).expand(B, 7) > 3
        want = lookup.hopfield(stored, state, values, key_padding_mask=mask)
        torch.testing.assert_close(lookup(state, key_padding_mask=mask), want)
        assert lookup.associations(state).shape == (B, 2, T, 7)
        assert lookup.energy(state).shape == (B, 2, T)
        lookup(state).sum().backward()
        assert bool((lookup.patterns.grad != 0).any())
    turned = HopfieldLookup(8, patterns=7, separate=True, heads=2, steps=2, batch_first=False).double()
    turned.load_state_dict(lookup.state_dict())
    torch.testing.assert_close(turned(state.transpose(0, 1)), lookup(state).transpose(0, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "`size` must be a multiple of `heads` = 3, got 8"),
        ({"heads": 0}, "heads"),
        ({"steps": 0}, "`steps` must be an integer of at least 1, got 0"),
        ({"beta": -1.0}, "`beta` must be a number above 0"),
        ({"heads": 2, "beta": (1.0, 2.0, 3.0)}, "one for each of 2 heads"),
        ({"tolerance": -1.0}, "`tolerance` must be None or at least 0"),
        ({"dropout": 1.0}, "`dropout` must be in"),
        ({"normalise": ("sate",)}, "`normalise` cannot hold `sate`; did you mean `state`?"),
        ({"static": ("stored",), "hidden": 5}, "static stored must have the width `hidden` = 5 of a head, got 8"),
        ({"connected": True, "static": ("values",)}, "`connected` values pass"),
        ({"static": ("output",), "output": 3}, "a static output is heads"),
        ({"separation": "sparsmax"}, "did you mean `sparsemax`?"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ConfigError) as error:
        Hopfield(8, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_inputs_are_checked():
    layer = Hopfield(8, stored=6, values=6)
    stored, state = torch.zeros(2, 5, 6), torch.zeros(2, 3, 8)
    wrong = [
        ((stored[0], state), {}, "`stored` must be (B, N, 6), got (5, 6)"),
        ((stored, state[..., :7]), {}, "`state` must be (B, T, 8), got (2, 3, 7)"),
        ((stored, state, stored[:, :4]), {}, "as many as `stored`, got 4 and 5"),
        ((stored, state.repeat(2, 1, 1)), {}, "one batch size"),
        ((stored, state), {"key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)}, "`key_padding_mask` must be bool"),
        ((stored, state), {"attention_mask": torch.zeros(3, 4)}, "`attention_mask` must be bool or floating"),
        ((stored, state), {"attention_mask": torch.zeros(4, 3, 5)}, "`attention_mask` must be bool or floating"),
    ]
    for inputs, masks, message in wrong:
        with pytest.raises(ShapeError) as error:
            layer(*inputs, **masks)
        assert message in str(error.value)
    with pytest.raises(ConfigError, match="need `separate=True`"):
        HopfieldLookup(8, patterns=3, values=5)
    with pytest.raises(ConfigError, match="`queries` must be"):
        HopfieldPooling(8, queries=0)


def test_a_layer_that_is_nothing_but_one_attention() -> None:
    torch.manual_seed(0)
    layer = Hopfield(6, beta=0.7, static=("stored", "state", "values", "output"), normalise=())
    stored, state = torch.randn(3, 5, 6, requires_grad=True), torch.randn(3, 4, 6, requires_grad=True)
    wanted = (0.7 * state @ stored.mT).softmax(-1) @ stored
    found = layer(stored, state)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(layer(stored, state, stored), wanted)  # the way round of layers that have more to do
    for one, two in zip(*(torch.autograd.grad(x.sin().sum(), (stored, state)) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(one, two)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[:, 3:] = True
    kept = stored[:, :3]
    expected = (0.7 * state @ kept.mT).softmax(-1) @ kept
    torch.testing.assert_close(layer(stored, state, key_padding_mask=padding), expected)
    layer.steps = 2
    torch.testing.assert_close(layer(stored, state), (0.7 * wanted @ stored.mT).softmax(-1) @ stored)
    layer.steps = 1
    with pytest.raises(ShapeError, match="`state` must be"):
        layer(stored, state[..., :5])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # says PyTorch of its own maps
@pytest.mark.parametrize("batch", [1, 3])
def test_the_short_way_of_bare_layers_is_the_long_one(batch: int) -> None:
    """One attention and nothing else: with and without gradients, and whatever goes round it."""
    layer = Hopfield(6, beta=0.8, static=("stored", "state", "values", "output"), normalise=())
    stored, state = torch.randn(batch, 9, 6), torch.randn(batch, 5, 6)
    weights = torch.softmax(0.8 * state.double() @ stored.double().mT, -1)
    torch.testing.assert_close(layer(stored, state).double(), weights @ stored.double(), atol=1e-6, rtol=0.0)
    learned = state.clone().requires_grad_()
    found = layer(stored, learned)
    assert found.requires_grad
    torch.testing.assert_close(found, layer(stored, state))
    torch.testing.assert_close(layer(stored, state, stored.clone()), layer(stored, state))
    mapped = torch.func.vmap(layer)(torch.stack((stored, stored)), torch.stack((state, -state)))
    torch.testing.assert_close(mapped[1], layer(stored, -state))
    with pytest.raises(ShapeError):
        layer(stored[..., :5], state[..., :5])
    with pytest.raises(ShapeError):
        layer(stored[0], state[0])
