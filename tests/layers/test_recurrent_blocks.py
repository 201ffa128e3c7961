"""Recurrent layers in blocks: whole sequences, single steps and plain numpy agree for every cell, path and norm."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from oracles import blocks as oracle
from thalweg.errors import ConfigError
from thalweg.layers.recurrent import Recurrent

CELLS = ["lstm", "gru", "gru-reset-before", "rnn-tanh", "rnn-relu", "rnn-tanh-pre", "rnn-relu-pre"]
GATED = CELLS[:3]
PATHS = ["none", "residual", "highway"]
NORMS = ["none", "batch", "layer", "instance", "rms", "weight"]
STEPPED = ["none", "layer", "rms", "weight"]
B, T, D, H, L = 3, 5, 3, 4, 3
EXACT = {"rtol": 1e-11, "atol": 1e-11}
LENGTHS = torch.tensor([3, 5, 2])
MASK = torch.arange(T) < LENGTHS[:, None]

# Every pair of cell, path and norm occurs; not every triple.
MIXES = [(CELLS[(i + 2 * j) % len(CELLS)], path, norm) for i, path in enumerate(PATHS) for j, norm in enumerate(NORMS)]
MIXES += [(cell, PATHS[1 + i % 2], NORMS[i % len(NORMS)]) for i, cell in enumerate(CELLS)]


def build(cell, *, seed=0, inputs=D, **settings):
    torch.manual_seed(seed)
    stack = Recurrent(cell, inputs, H, **({"layers": L} | settings)).double()
    with torch.no_grad():  # scales and shifts of norms start at 1 and 0, which would hide mistakes
        for name, p in stack.named_parameters():
            if "norm.layer" in name or "last.layer" in name:
                p.add_(0.3 * torch.randn_like(p))
        for name, buffer in stack.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
    return stack.eval()


def inputs(seed=1, batch=B, length=T, width=D):
    return torch.randn(batch, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain(stack, x, lengths, *, residual, norm, training=False):
    w = {name: value.numpy() for name, value in stack.state_dict().items()}
    batch = [row[:n].numpy() for row, n in zip(x, lengths.tolist(), strict=True)]
    shape = {"hidden": H, "layers": stack.layers, "bidirectional": stack.bidirectional}
    return oracle.blocks(w, batch, cell=stack.cell, residual=residual, norm=norm, training=training, **shape)


def is_wrapped(cell, residual, norm):
    """Others are one fused call: tests/layers/test_recurrent.py."""
    return residual != "none" or norm not in ("none", "weight") or cell.endswith("-pre")


@pytest.mark.parametrize(("cell", "residual", "norm"), [mix for mix in MIXES if is_wrapped(*mix)])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_equals_plain_numpy(cell, residual, norm, bidirectional, training):
    settings = {"residual": residual, "norm": norm}
    stack = build(cell, bidirectional=bidirectional, **settings)
    x, before = inputs().masked_fill(~MASK[:, :, None], math.nan), copy.deepcopy(stack)
    outputs, final = stack.train(training)(x, lengths=LENGTHS, mask=MASK)
    expected, finals = plain(before, x, LENGTHS, training=training, **settings)
    for b, n in enumerate(LENGTHS.tolist()):
        torch.testing.assert_close(outputs[b, :n], torch.from_numpy(expected[b]), **EXACT)
        for index, parts in enumerate(finals[b]):
            for ours, theirs in zip(final, parts, strict=True):
                torch.testing.assert_close(ours[index, b], torch.from_numpy(theirs), **EXACT)


@pytest.mark.parametrize("residual", ["residual", "highway"])
def test_the_plain_blocks_can_disagree(residual):
    stack = build("gru", residual=residual, norm="layer")
    broken = build("gru", residual=residual, norm="layer")
    with torch.no_grad():
        broken.core.blocks[1].norm.layer.bias[0] += 0.1
    expected, _ = plain(broken, inputs(), torch.tensor([T] * B), residual=residual, norm="layer")
    assert not np.allclose(stack(inputs())[0][0].detach().numpy(), expected[0], atol=1e-4)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("residual", PATHS)
@pytest.mark.parametrize("norm", STEPPED)
def test_whole_sequence_equals_steps(cell, residual, norm):
    stack = build(cell, residual=residual, norm=norm, initialisation="orthogonal")
    torch.manual_seed(3)
    state = tuple(torch.randn(L, B, H).double() for _ in range(2 if cell == "lstm" else 1))
    x, projected = inputs(), state
    outputs, final = stack(x, state)
    for t in range(T):
        output, state = stack.step(x[:, t], state)
        torch.testing.assert_close(output, outputs[:, t], **EXACT)
        output, projected = stack.step(stack.project(x[:, t]), projected, projected=True)
        torch.testing.assert_close(output, outputs[:, t], **EXACT)
    for ours, theirs in zip(state, final, strict=True):
        assert ours.shape == theirs.shape == (L, B, H)
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize(("cell", "residual", "norm"), MIXES[::2])
def test_padding_changes_no_gradient(cell, residual, norm):
    def gradients(filling):
        stack = build(cell, bidirectional=True, residual=residual, norm=norm, layers=2).train()
        x = inputs().masked_fill(~MASK[:, :, None], filling).requires_grad_()
        outputs, final = stack(x, lengths=LENGTHS, mask=MASK)
        (outputs[MASK].square().sum() + final[0].sum()).backward()
        return [x.grad, *(p.grad for p in stack.parameters())]

    for clean, filled in zip(gradients(0.0), gradients(math.nan), strict=True):
        torch.testing.assert_close(filled, clean, **EXACT)
    assert (gradients(math.nan)[0][~MASK] == 0).all()


@pytest.mark.parametrize(
    ("cell", "residual", "norm"),
    [("lstm", "highway", "batch"), ("gru", "residual", "weight"), ("rnn-tanh-pre", "residual", "instance")],
)
def test_gradcheck(cell, residual, norm):
    stack = build(cell, layers=2, residual=residual, norm=norm, bidirectional=True).train()
    names, values = zip(*stack.named_parameters(), strict=True)

    def forward(x, *parameters):
        own = dict(zip(names, parameters, strict=True))
        # A copy: running statistics follow every call.
        outputs, final = torch.func.functional_call(
            copy.deepcopy(stack), own, (x,), {"lengths": torch.tensor([2, 3]), "mask": mask}
        )
        return (outputs * mask[:, :, None], *final)

    mask = torch.tensor([[True, True, False], [True, True, True]])
    x = inputs(batch=2, length=3).requires_grad_()
    leaves = tuple(v.detach().clone().requires_grad_() for v in values)
    assert torch.autograd.gradcheck(forward, (x, *leaves), fast_mode=True)


def test_batch_norm_keeps_running_statistics_for_inference():
    stack = build("gru", norm="batch", layers=1).train()
    norm = stack.core.blocks[0].norm.layer
    for seed in range(200):
        stack(3 + 2 * inputs(seed), lengths=LENGTHS, mask=MASK)
    torch.testing.assert_close(norm.running_mean, torch.full((D,), 3.0).double(), rtol=0, atol=0.6)
    assert (norm.running_var > 2).all()
    stack.eval()
    alone = stack(inputs()[:1])[0]
    torch.testing.assert_close(stack(inputs())[0][:1], alone, **EXACT)  # an item does not see its batch


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_statistics_over_positions_cannot_be_stepped(norm):
    stack = build("gru", norm=norm)
    with pytest.raises(ConfigError, match=f"{norm} norm needs whole sequences, got one step"):
        stack.step(inputs()[:, 0], (torch.zeros(L, B, H).double(),))


@pytest.mark.parametrize(
    ("cell", "kind"), [("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn-tanh", nn.RNN), ("rnn-relu", nn.RNN)]
)
@pytest.mark.parametrize("norm", ["none", "weight"])
def test_nothing_between_layers_is_one_fused_call(cell, kind, norm):
    stack = build(cell, layers=8, initialisation="orthogonal", norm=norm)
    assert isinstance(stack.core, kind)
    assert stack.core.num_layers == 8


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("residual", ["none", "residual"])
def test_normalised_matrices_start_as_they_were(cell, residual):
    plain_one, normed = (build(cell, residual=residual, norm=norm) for norm in ("none", "weight"))
    torch.testing.assert_close(normed(inputs())[0], plain_one(inputs())[0], rtol=1e-5, atol=1e-5)  # made in float32
    lengths = [p for name, p in normed.named_parameters() if name.endswith("original0")]
    with torch.no_grad():
        for p in lengths:
            p.mul_(2)
    assert lengths
    assert not torch.allclose(normed(inputs())[0], plain_one(inputs())[0], atol=1e-3)


def test_parameter_names_of_before():
    assert list(Recurrent("lstm", 2, 3, layers=2).state_dict()) == [
        f"core.{part}_{side}_l{n}" for n, part, side in itertools.product(range(2), ("weight", "bias"), ("ih", "hh"))
    ]
    names = list(Recurrent("gru-reset-before", 2, 3).state_dict())
    assert names == ["core.input_0_0", "core.gates_0_0", "core.candidate_0_0", "core.bias_0_0"]


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_r1_stacks_are_the_same_network(activation, bidirectional):
    """R1 at any depth: a stack whose states are taken before the activation has the outputs of one that does not."""
    post = build(f"rnn-{activation}", bidirectional=bidirectional)
    pre = build(f"rnn-{activation}-pre", bidirectional=bidirectional)
    weights = post.core.state_dict()
    with torch.no_grad():
        for name, p in pre.named_parameters():
            _, _, n, *_, leaf = name.split(".")
            p.copy_(weights[leaf.replace("_l0", f"_l{n}")])
    s = getattr(torch, activation)
    directions = 2 if bidirectional else 1
    h_0 = torch.randn(L * directions, B, H, dtype=torch.float64)
    outputs, (h,) = pre(inputs(), (h_0,), lengths=LENGTHS, mask=MASK)
    expected, (g,) = post(inputs(), (s(h_0),), lengths=LENGTHS, mask=MASK)
    torch.testing.assert_close(outputs[MASK], expected[MASK], **EXACT)
    torch.testing.assert_close(s(h), g, **EXACT)


def reset_before(xs, h, W_f, W_o, W, U_f, U_o, U, b):
    """R4 as it is written, biases of the gates included."""
    b_f, b_o, b = np.split(b, 3)
    for x in xs:
        i_f, i_o = oracle.sigmoid(W_f @ x + U_f @ h + b_f), oracle.sigmoid(W_o @ x + U_o @ h + b_o)
        candidate = np.tanh(W @ x + U @ (i_f * h) + b)
        h = i_o * h + (1 - i_o) * candidate
        yield h


def test_r4_gru_resets_before_the_matrix_in_two_stacked_layers_with_softmax_output():
    """R4: h~ = f(W x + U (i_f * h) + b), h_t = i_o * h_{t-1} + (1 - i_o) * h~; two stacked layers; softmax output."""
    stack = build("gru-reset-before", layers=2)
    output = nn.Linear(H, 6).double()
    found = output(stack(inputs())[0]).softmax(dim=2)
    core = stack.core
    for b in range(B):
        xs = inputs()[b].numpy()
        for n in range(2):
            parts = (
                getattr(core, f"{name}_{n}_0").detach().numpy() for name in ("input", "gates", "candidate", "bias")
            )
            ins, gates, U, bias = parts
            xs = list(reset_before(xs, np.zeros(H), *np.split(ins, 3), *np.split(gates, 2), U, bias))
        logits = np.stack(xs) @ output.weight.detach().numpy().T + output.bias.detach().numpy()
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        expected = powers / powers.sum(axis=1, keepdims=True)
        torch.testing.assert_close(found[b], torch.from_numpy(expected), **EXACT)


def test_r4_torch_resets_after_the_matrix_and_both_are_offered():
    """R4: (reset before the matrix; PyTorch's own GRU resets after: offer both): they differ where U mixes units."""
    before, after = build("gru-reset-before", layers=2), build("gru", layers=2)
    assert isinstance(after.core, nn.GRU)

    def share(diagonal):
        with torch.no_grad():
            for n in range(2):
                if diagonal:
                    getattr(before.core, f"candidate_{n}_0").copy_(torch.diag(torch.randn(H)))
                recurrent = [getattr(before.core, f"{name}_{n}_0") for name in ("gates", "candidate")]
                getattr(after.core, f"weight_hh_l{n}").copy_(torch.cat(recurrent))
                getattr(after.core, f"weight_ih_l{n}").copy_(getattr(before.core, f"input_{n}_0"))
                getattr(after.core, f"bias_ih_l{n}").copy_(getattr(before.core, f"bias_{n}_0"))
                getattr(after.core, f"bias_hh_l{n}").zero_()
        start = (torch.randn(2, B, H, dtype=torch.float64),)
        return (before(inputs(), start)[0] - after(inputs(), start)[0]).abs().max().item()

    torch.manual_seed(0)
    assert share(diagonal=False) > 1e-2
    # A diagonal matrix commutes with the gate: U (i_f * h) = i_f * (U h).
    assert share(diagonal=True) < 1e-12


def first_gradient(stack, depth_of=0):
    """Size of the gradient that reaches the input, from the outputs at every position."""
    x = inputs(width=H).requires_grad_()
    stack(x)[0].square().mean().backward()
    return x.grad.norm().item()


@pytest.mark.parametrize("cell", ["rnn-tanh", "gru", "lstm"])
def test_gradients_reach_the_input_of_a_deep_stack_only_with_a_path(cell):
    bare = first_gradient(build(cell, layers=12, inputs=H))
    for settings in ({"residual": "residual"}, {"residual": "highway"}, {"residual": "residual", "norm": "layer"}):
        assert first_gradient(build(cell, layers=12, inputs=H, **settings)) > 100 * bare


@pytest.mark.parametrize("norm", NORMS)
def test_edges_copies_and_single_precision(norm):
    stack = build("lstm", residual="highway", norm=norm, layers=1, bidirectional=True)
    assert stack(inputs()[:0])[0].shape == (0, T, 2 * H)
    assert stack(inputs()[:1, :1])[0].shape == (1, 1, 2 * H)
    torch.testing.assert_close(copy.deepcopy(stack)(inputs())[0], stack(inputs())[0])
    single = copy.deepcopy(stack).float()
    outputs, _ = single(inputs().float())
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs.double(), stack(inputs())[0], rtol=1e-4, atol=1e-4)
    again = build("lstm", seed=5, residual="highway", norm=norm, layers=1, bidirectional=True)
    again.load_state_dict(stack.state_dict())
    torch.testing.assert_close(again(inputs())[0], stack(inputs())[0], **EXACT)


def test_dropout_is_on_what_layers_add_and_not_on_the_last():
    stack = build("gru", layers=2, residual="residual", dropout=0.5, inputs=H).train()
    assert [block.dropout.p for block in stack.core.blocks] == [0.5, 0.0]
    assert not torch.equal(stack(inputs(width=H))[0], stack(inputs(width=H))[0])
    single = build("gru", layers=1, residual="residual", dropout=0.5).train()
    assert torch.equal(single(inputs())[0], single(inputs())[0])


def test_wrong_names():
    for settings, words in (
        ({"residual": "resnet"}, "residual `resnet` is not known"),
        ({"norm": "bach"}, "normalisation `bach` is not known; did you mean `batch`"),
        ({"initialisation": "orthogonl"}, "initialisation `orthogonl` is not known; did you mean `orthogonal`"),
    ):
        with pytest.raises(ConfigError, match=words):
            Recurrent("gru", D, H, **settings)
