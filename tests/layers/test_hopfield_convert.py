"""Weights in the naming of hflayers become layers that give what its formulas give."""

import numpy as np
import pytest
import torch
from torch import nn

from oracles.hopfield_layers import associate, of_hflayers
from thalweg.errors import ConfigError
from thalweg.layers.hopfield.convert import from_attention, from_hflayers
from thalweg.layers.hopfield.layer import Hopfield
from thalweg.layers.hopfield.learned import HopfieldLookup, HopfieldPooling

B, T, N, E, H, D = 3, 4, 6, 8, 2, 5
EXACT = {"rtol": 1e-10, "atol": 1e-10}
NORMS = ("norm_stored_pattern", "norm_state_pattern", "norm_pattern_projection")


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def packed(rows=3 * E, *, bias=True, norms=NORMS, out=E, across=E, prefix=""):
    """A state dict with one input matrix, as hflayers has where all widths are equal."""
    weights = {"association_core.in_proj_weight": draw(rows, E)}
    if out:
        weights["association_core.out_proj.weight"] = draw(out, across, seed=3)
    if bias:
        weights["association_core.in_proj_bias"] = draw(rows, seed=1)
        weights |= {"association_core.out_proj.bias": draw(out, seed=4)} if out else {}
    return _with_norms(weights, norms, dict.fromkeys(NORMS, E), prefix)


def apart(*, hidden=D, pattern=3, stored=7, values=9, out=6, bias=True, norms=NORMS, prefix="", connected=False):
    """A state dict with three input matrices."""
    weights = {
        "association_core.q_proj_weight": draw(H * hidden, E),
        "association_core.k_proj_weight": draw(H * hidden, stored, seed=1),
        "association_core.v_proj_weight": draw(H * pattern, H * hidden if connected else values, seed=2),
        "association_core.out_proj.weight": draw(out, H * pattern, seed=3),
    }
    if bias:
        weights["association_core.in_proj_bias"] = draw(H * (2 * hidden + pattern), seed=5)
        weights["association_core.out_proj.bias"] = draw(out, seed=6)
    widths = dict(zip(NORMS, (stored, E, values), strict=True))
    return _with_norms(weights, norms, widths, prefix)


def _with_norms(weights, norms, widths, prefix):
    for name in norms:
        weights |= {f"{name}.weight": draw(widths[name], seed=7), f"{name}.bias": draw(widths[name], seed=8)}
    return {prefix + name: value for name, value in weights.items()}


def oracle(weights, stored, state, values, *, static=(), beta=None, hidden, heads=H, eps=1e-5, **given):
    plain = {name.removeprefix("hopfield."): value.numpy() for name, value in weights.items()}
    parts = of_hflayers(plain, static=static, eps=eps)
    beta = [hidden**-0.5 if beta is None else beta] * heads
    rows = zip(*(part.numpy() for part in (stored, state, values)), strict=True)
    return torch.tensor(np.array([associate(parts, *row, heads=heads, beta=beta, **given)[0] for row in rows]))


def inputs(stored=E, state=E, values=E):
    return draw(B, N, stored), draw(B, T, state, seed=1), draw(B, N, values, seed=2)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norms", [NORMS, NORMS[1:2], ()])
def test_one_matrix(steps, bias, norms):
    weights = packed(bias=bias, norms=norms)
    layer = from_hflayers(weights, heads=H, steps=steps)
    data = inputs()
    torch.testing.assert_close(layer(*data), oracle(weights, *data, hidden=E // H, steps=steps), **EXACT)
    assert layer.out.weight.dtype == torch.float64


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_three_matrices(steps, bias):
    weights = apart(bias=bias)
    layer = from_hflayers(weights, heads=H, steps=steps, beta=0.3)
    data = inputs(7, E, 9)
    torch.testing.assert_close(layer(*data), oracle(weights, *data, hidden=D, beta=0.3, steps=steps), **EXACT)
    assert (layer.hidden, layer.pattern, layer.output) == (D, 3, 6)


def test_connected_values():
    weights = apart(pattern=D, values=7, connected=True)
    layer = from_hflayers(weights, heads=H, connected=True, steps=2)
    data = inputs(7, E, 7)
    torch.testing.assert_close(layer(*data), oracle(weights, *data, hidden=D, connected=True, steps=2), **EXACT)


@pytest.mark.parametrize("static", [("state",), ("stored",), ("stored", "state"), ("values",)])
def test_static_parts(static):
    rows = (3 - len(static)) * E
    # hflayers keeps a bias for values even where they are static.
    weights = packed(rows, norms=()) | {"association_core.in_proj_bias": draw(rows + E * ("values" in static), seed=1)}
    layer = from_hflayers(weights, static=static, steps=2)
    data = inputs()
    want = oracle(weights, *data, static=static, hidden=E, heads=1, steps=2)
    torch.testing.assert_close(layer(*data), want, **EXACT)


@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("norms", [NORMS, NORMS[:2]], ids=["norm of values", "without"])
def test_static_values_that_nothing_maps_keep_their_width(heads, norms):
    """hflayers answers heads * values features, whatever the width of a head is."""
    hidden = 6 // heads
    weights = packed(2 * 6, norms=norms, out=0) | {"association_core.in_proj_bias": draw(2 * 6 + 6, seed=1)}
    # Of several heads hflayers mixes the items of a batch.
    data = [part[:1] for part in inputs()]
    want = oracle(weights, *data, static=("values",), hidden=hidden, heads=heads)
    assert want.shape == (1, T, heads * E)
    layer = from_hflayers(weights, heads=heads, static=("values",), values=E)
    torch.testing.assert_close(layer(*data), want, **EXACT)
    peer = Peer(weights, scaling=hidden**-0.5, update_steps_max=0)
    for name, value in {"num_heads": heads, "head_dim": hidden, "value_as_static": True, "vdim": E}.items():
        setattr(peer.association_core, name, value)
    for name in norms:
        getattr(peer, name).eps = 1e-5
    torch.testing.assert_close(from_hflayers(peer.eval())(*data), want, **EXACT)


def test_no_output_matrix_and_zero_pattern():
    weights = packed(out=0)
    layer = from_hflayers(weights, heads=H, zero_pattern=True)
    data = inputs()
    torch.testing.assert_close(layer(*data), oracle(weights, *data, hidden=E // H, zero=True), **EXACT)
    assert layer.out is None


def test_norms_of_the_association_space():
    weights = packed() | {"association_core.p_norm_weight": draw(4), "association_core.p_norm_bias": draw(4, seed=1)}
    layer = from_hflayers(weights, heads=H, steps=3)
    data = inputs()
    torch.testing.assert_close(layer(*data), oracle(weights, *data, hidden=E // H, steps=3), **EXACT)
    plain = packed(norms=())
    found = from_hflayers(plain, heads=H, normalise=("stored", "space"))(*data)  # norms without weights
    unit = {f"{NORMS[0]}.weight": torch.ones(E), f"{NORMS[0]}.bias": torch.zeros(E)}
    unit |= {"association_core.p_norm_weight": torch.ones(4), "association_core.p_norm_bias": torch.zeros(4)}
    torch.testing.assert_close(found, oracle(plain | unit, *data, hidden=E // H), **EXACT)


def test_weights_that_hflayers_never_uses_are_left_out():
    weights = packed() | {"association_core.bias_k": draw(1, 1, E), "association_core.bias_v": draw(1, 1, E, seed=1)}
    data = inputs()
    torch.testing.assert_close(from_hflayers(weights, heads=H)(*data), oracle(weights, *data, hidden=E // H), **EXACT)


@pytest.mark.parametrize("batch_first", [True, False])
def test_pooling(batch_first):
    shape = (1, 3, E) if batch_first else (3, 1, E)
    weights = packed(prefix="hopfield.") | {"pooling_weights": draw(*shape)}
    layer = from_hflayers(weights, heads=H, steps=2, batch_first=batch_first)
    assert isinstance(layer, HopfieldPooling)
    stored, _, values = inputs()
    states = weights["pooling_weights"].reshape(1, 3, E).expand(B, -1, -1)
    want = oracle(weights, stored, states, values, hidden=E // H, steps=2)
    # hflayers flattens (queries, B, output) where the batch is not first; here B equals the queries, too.
    want = (want if batch_first else want.transpose(0, 1)).flatten(1)
    given = (stored, values) if batch_first else (stored.transpose(0, 1), values.transpose(0, 1))
    torch.testing.assert_close(layer(*given), want, **EXACT)


@pytest.mark.parametrize("separate", [True, False])
def test_lookup(separate):
    weights = packed(prefix="hopfield.") | {"lookup_weights": draw(1, 7, E)}
    weights |= {"target_weights": draw(1, 7, E, seed=9)} if separate else {}
    layer = from_hflayers(weights, heads=H, steps=2)
    assert isinstance(layer, HopfieldLookup)
    _, state, _ = inputs()
    stored = weights["lookup_weights"].expand(B, -1, -1)
    values = weights["target_weights"].expand(B, -1, -1) if separate else stored
    want = oracle(weights, stored, state, values, hidden=E // H, steps=2)
    torch.testing.assert_close(layer(state), want, **EXACT)


class Peer(nn.Module):
    """The names under which a module of hflayers keeps its settings, and nothing else of it."""

    def __init__(self, weights, **given):
        super().__init__()
        self.association_core = nn.Module()
        core = {"num_heads": H, "dropout": 0.1, "add_zero_attn": False, "value_as_connected": False, "head_dim": E // H}
        core |= {"key_as_static": False, "query_as_static": False, "value_as_static": False}
        core |= {"normalize_pattern": False, "normalize_pattern_eps": 1e-5}
        for name, value in core.items():
            setattr(self.association_core, name, value)
        self.association_activation, self.batch_first = None, True
        self.scaling, self.update_steps_max, self.update_steps_eps = 0.7, 2, 1e-4
        for name, value in given.items():
            setattr(self, name, value)
        for name in NORMS:
            norm = nn.LayerNorm(E, eps=1e-3).double() if f"{name}.weight" in weights else None
            setattr(self, name, norm)
        self.weights = weights

    def state_dict(self):
        return self.weights


def test_a_module_tells_its_settings():
    weights = packed()
    layer = from_hflayers(Peer(weights).eval())
    data = inputs()
    torch.testing.assert_close(
        layer(*data), oracle(weights, *data, hidden=E // H, beta=0.7, steps=3, eps=1e-3), **EXACT
    )
    assert (layer.dropout, layer.steps, layer.tolerance, layer.training) == (0.1, 3, None, False)
    endless = from_hflayers(Peer(weights, update_steps_max=None))
    assert endless.training
    assert endless.tolerance == 1e-4
    assert endless.steps > 100
    alike = Peer(weights, scaling=torch.full((H,), 0.7), update_steps_max=torch.full((H,), 2))
    torch.testing.assert_close(from_hflayers(alike.eval())(*data), layer(*data), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_hflayers(Peer(packed(), scaling=torch.tensor([1.0, 2.0]))), "`scaling` of hflayers must be one"),
        (lambda: from_hflayers(Peer(packed(), association_activation=torch.tanh)), "`association_activation`"),
        (lambda: from_hflayers(nn.Linear(2, 2)), "expected a Hopfield module of hflayers, got Linear"),
        (lambda: from_hflayers({}), "found no hflayers weights to convert"),
        (lambda: from_hflayers(packed(), heads=3), "cannot serve `heads` = 3"),
        (lambda: from_hflayers(packed(2 * E + 1), static=("state",)), "mend `static`"),
        (lambda: from_hflayers(apart(), heads=H, static=("state",)), "contradiction at ['state']"),
        (lambda: from_attention(nn.MultiheadAttention(4, 2, add_bias_kv=True)), "add_bias_kv"),
    ],
)
def test_what_cannot_be_converted_says_so(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_given_options_go_first():
    layer = from_hflayers(Peer(packed(), scaling=torch.tensor([1.0, 2.0])), beta=(1.0, 2.0), separation="sparsemax")
    assert layer.beta.tolist() == [1.0, 2.0]
    assert str(layer.separation) == "sparsemax"
    assert isinstance(layer, Hopfield)


def test_the_oracle_can_disagree():
    weights, data = packed(), inputs()
    found = from_hflayers(weights, heads=H)(*data)
    wrong = weights | {"association_core.in_proj_bias": weights["association_core.in_proj_bias"].roll(1)}
    assert not torch.allclose(found, oracle(wrong, *data, hidden=E // H), atol=1e-3)
