"""Section R: residual and highway blocks, and plain recurrences with the activation before or after the matrix."""

import numpy as np
import pytest
import torch
from torch import nn

from oracles import blocks as oracle
from thalweg.errors import ConfigError, ShapeError
from thalweg.layers.blocks import CARRY, Chained, Highway, Residual, connected
from thalweg.layers.plain_recurrence import ACTIVATIONS, PlainRecurrence, initialise

B, T, D, H = 3, 5, 3, 4
EXACT = {"rtol": 1e-12, "atol": 1e-12}
WIDTHS = [1, 2, 5]


def jacobian(block, x):
    return torch.autograd.functional.jacobian(block, x)


def residual(width, seed=0):
    torch.manual_seed(seed)
    return Residual(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh())).double()


def highway(width, seed=0, **settings):
    torch.manual_seed(seed)
    return Highway(width, **settings).double()


def point(width, seed=1):
    return torch.randn(width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", WIDTHS)
def test_r5_residual_jacobian_is_identity_plus_diagonal_times_matrix(width):
    """R5: residual y = x + s(Wx): dy/dx = I + diag(s'(z)) W."""
    block, x = residual(width), point(width)
    W = block.inner[0].weight.detach().numpy()
    expected = oracle.residual_jacobian(W, x.numpy())
    torch.testing.assert_close(jacobian(block, x), torch.from_numpy(expected), **EXACT)
    np.testing.assert_allclose(oracle.differences(lambda v: v + np.tanh(W @ v), x.numpy()), expected, atol=1e-8)
    assert not np.allclose(oracle.residual_jacobian(W + 0.1, x.numpy()), expected, atol=1e-4)


@pytest.mark.parametrize("width", WIDTHS)
def test_r5_residual_jacobian_is_never_zero_when_s_saturates(width):
    """R5: (never zero when s saturates): s'(z) = 0 leaves the identity, where s(Wx) alone has no gradient left."""
    block = residual(width)
    with torch.no_grad():
        block.inner[0].weight.copy_(torch.eye(width))
    x = 1e3 * point(width).sign()
    assert (jacobian(block.inner, x) == 0).all()
    assert torch.equal(jacobian(block, x), torch.eye(width, dtype=torch.float64))


@pytest.mark.parametrize("width", WIDTHS)
def test_r5_highway_jacobian(width):
    """R5: highway y = (1-i) * x + i * s(Wx), i = s(W_g x)."""
    block, x = highway(width, bias=0.3), point(width)
    inner = block.inner[0]
    parts = [p.detach().numpy() for p in (inner.weight, inner.bias, block.gate.weight, block.gate.bias)]
    W, b, W_g, b_g = parts

    def plain(v):
        i = oracle.sigmoid(W_g @ v + b_g)
        return (1 - i) * v + i * np.tanh(W @ v + b)

    torch.testing.assert_close(block(x), torch.from_numpy(plain(x.numpy())), **EXACT)
    expected = oracle.highway_jacobian(*parts, x.numpy())
    torch.testing.assert_close(jacobian(block, x), torch.from_numpy(expected), **EXACT)
    np.testing.assert_allclose(oracle.differences(plain, x.numpy()), expected, atol=1e-8)


@pytest.mark.parametrize("width", WIDTHS)
def test_r5_highway_identity_path_closes_when_the_gate_saturates_at_one(width):
    """R5: the identity path closes when i saturates at 1; at 0 it is all there is."""
    x = point(width)
    block = highway(width, bias=1e4)
    torch.testing.assert_close(jacobian(block, x), jacobian(block.inner, x), **EXACT)
    with torch.no_grad():
        block.inner[0].bias.fill_(1e4)
    assert (jacobian(block, x) == 0).all(), "both saturated: no gradient is left, unlike a residual's"
    block = highway(width, bias=-1e4)
    assert torch.equal(jacobian(block, x), torch.eye(width, dtype=torch.float64))


def test_r5_highway_starts_with_the_carry_open():
    block = highway(4)
    torch.testing.assert_close(block.gate.bias.detach(), torch.full((4,), CARRY, dtype=torch.float64))
    assert torch.sigmoid(torch.tensor(CARRY)).item() == pytest.approx(0.1192, abs=1e-4)


@pytest.mark.parametrize("name", ["none", "residual", "highway"])
@pytest.mark.parametrize("outputs", [3, 2])
def test_blocks_by_name(name, outputs):
    torch.manual_seed(0)
    block = connected(name, nn.Linear(3, outputs), 3, outputs).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    y = block(x)
    assert y.shape == (2, 4, outputs)
    inner = block.inner(x)
    if name == "none":
        assert type(block) is Chained
        torch.testing.assert_close(y, inner)
    else:
        around = x if outputs == 3 else x @ block.shortcut.weight.t()
        share = 1.0 if name == "residual" else torch.sigmoid(block.gate(x))
        torch.testing.assert_close(y, around + inner if name == "residual" else around + share * (inner - around))
        if outputs == 2:
            W = block.shortcut.weight.detach()
            torch.testing.assert_close(W @ W.t(), torch.eye(2, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    assert torch.autograd.gradcheck(block, (x,))
    assert block(x[:0]).shape == (0, 4, outputs)


def test_blocks_wrong_use():
    with pytest.raises(ConfigError, match="residual `resdual` is not known; did you mean `residual`"):
        connected("resdual", nn.Identity(), 2, 2)
    with pytest.raises(ShapeError, match="as wide as its output, 3, got 2; give a `shortcut`"):
        Residual(nn.Linear(2, 3))(torch.zeros(2))
    with pytest.raises(ConfigError, match="give `inputs`"):
        Highway(nn.Linear(2, 2))


def recurrences(activation, seed=0, bidirectional=False, width=H):
    """The same numbers with the activation after and before the matrix."""
    torch.manual_seed(seed)
    pair = [
        PlainRecurrence(D, width, activation=activation, place=place, bidirectional=bidirectional).double()
        for place in ("post", "pre")
    ]
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


def inputs(seed=1, batch=B, length=T):
    return torch.randn(batch, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, H])
def test_r1_pre_and_post_activation_are_the_same_network(activation, width):
    """R1: h_t = W s(h_{t-1}) + U x_t + b and g_t = s(W g_{t-1} + U x_t + b) are the same network: g_t = s(h_t)."""
    post, pre = recurrences(activation, width=width)
    s = ACTIVATIONS[activation]
    h_0, x = torch.randn(1, B, width, dtype=torch.float64), inputs()
    h, g = pre.states(x, h_0), post.states(x, s(h_0))
    torch.testing.assert_close(s(h), g, **EXACT)
    torch.testing.assert_close(pre(x, h_0)[0], g, **EXACT)
    if activation not in oracle.ACTIVATIONS:
        return
    W, U = (getattr(post.core, f"weight_{n}_l0").detach().numpy() for n in ("hh", "ih"))
    b = (post.core.bias_ih_l0 + post.core.bias_hh_l0).detach().numpy()
    plain = oracle.ACTIVATIONS[activation]
    for row in range(B):
        start, xs = h_0[0, row].numpy(), x[row].numpy()
        expected = oracle.pre_activation(W, U, b, plain, start, xs)
        torch.testing.assert_close(h[row].detach(), torch.from_numpy(expected), **EXACT)
        expected = oracle.post_activation(W, U, b, plain, plain(start), xs)
        torch.testing.assert_close(g[row].detach(), torch.from_numpy(expected), **EXACT)
        if width > 1 and activation != "identity":
            broken = oracle.post_activation(W.T, U, b, plain, plain(start), xs)
            assert not np.allclose(g[row].detach().numpy(), broken, atol=1e-4), "the oracle can disagree"


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("filling", [0.0, float("nan")])
def test_r1_holds_for_ragged_batches_in_both_directions(activation, bidirectional, filling):
    post, pre = recurrences(activation, bidirectional=bidirectional)
    s, lengths = ACTIVATIONS[activation], torch.tensor([3, 5, 1])
    mask = torch.arange(T) < lengths[:, None]
    x = inputs().masked_fill(~mask[:, :, None], filling).requires_grad_()
    h_0 = torch.randn(2 if bidirectional else 1, B, H, dtype=torch.float64)
    (ours, h), (theirs, g) = pre(x, h_0, mask=mask), post(x, s(h_0), lengths=lengths)
    torch.testing.assert_close(ours[mask], theirs[mask], **EXACT)
    torch.testing.assert_close(s(h), g, **EXACT)
    for row, n in enumerate(lengths.tolist()):
        alone, end = pre(x[row : row + 1, :n], h_0[:, row : row + 1])
        torch.testing.assert_close(ours[row, :n], alone[0], **EXACT)
        torch.testing.assert_close(h[:, row], end[:, 0], **EXACT)
    (ours[mask].square().sum() + h.square().sum()).backward()
    assert all(p.grad.isfinite().all() for p in [x, *pre.parameters()])
    assert (x.grad[~mask] == 0).all()


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
@pytest.mark.parametrize("place", [0, 1])
def test_plain_recurrence_steps_and_gradients(activation, place):
    layer = recurrences(activation)[place]
    x, state = inputs(), torch.randn(1, B, H, dtype=torch.float64)
    outputs, final = layer(x, state)
    now = state[0]
    for t in range(T):
        output, now = layer.step(x[:, t], now)
        torch.testing.assert_close(output, outputs[:, t], **EXACT)
    torch.testing.assert_close(now, final[0], **EXACT)
    start = state[:, :2].requires_grad_()
    assert torch.autograd.gradcheck(layer, (x[:2, :3].requires_grad_(), start))
    assert layer(x[:0])[0].shape == (0, T, H)
    assert layer(x[:1, :1])[0].shape == (1, 1, H)


def test_plain_recurrence_wrong_use():
    with pytest.raises(ConfigError, match="activation `tan` is not known; did you mean `tanh`"):
        PlainRecurrence(2, 2, activation="tan")
    with pytest.raises(ConfigError, match="place `before` is not known; choose one of: post, pre"):
        PlainRecurrence(2, 2, place="before")
    layer = PlainRecurrence(2, 2, bidirectional=True)
    with pytest.raises(ShapeError, match="needs a layer of one direction"):
        layer.step(torch.zeros(1, 2), torch.zeros(1, 2))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_orthogonal_start_carries_lengths(kind):
    layer = kind(6, 4, 2, bidirectional=True).double()
    initialise(layer, 4, "orthogonal")
    for name, p in layer.named_parameters():
        if "bias" in name:
            assert (p == 0).all()
            continue
        for gate in p.detach().split(4):
            torch.testing.assert_close(gate @ gate.t(), torch.eye(4, dtype=torch.float64), **EXACT)
    before = [p.clone() for p in layer.parameters()]
    initialise(layer, 4, "default")
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    with pytest.raises(ConfigError, match="initialisation `orthogonl` is not known; did you mean `orthogonal`"):
        initialise(layer, 4, "orthogonl")


def test_orthogonal_linear_recurrence_neither_shrinks_nor_grows():
    layer = PlainRecurrence(D, H, activation="identity").double()
    initialise(layer, H, "orthogonal")
    start = torch.randn(1, B, H, dtype=torch.float64)
    states = layer.states(torch.zeros(B, 50, D, dtype=torch.float64), start)
    torch.testing.assert_close(states.norm(dim=2), start[0].norm(dim=1)[:, None].expand(B, 50), **EXACT)
