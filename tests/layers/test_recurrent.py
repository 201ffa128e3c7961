"""Recurrent stacks: whole sequences, single steps and plain-Python recursions agree for every cell and shape."""

import copy
import math

import pytest
import torch

from oracles.recurrent import run
from thalweg.errors import ConfigError, ShapeError
from thalweg.layers import Recurrent, ResetBeforeGRU

CELLS = ["lstm", "gru", "gru-reset-before"]
LAYERS = [1, 2, 3]
B, T, D, H = 3, 5, 3, 4
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def build(cell, seed=0, **settings):
    torch.manual_seed(seed)
    return Recurrent(cell, D, H, **settings).double().eval()


def inputs(seed=1, batch=B, length=T):
    return torch.randn(batch, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_state(stack, batch=B):
    parts, directions = (2 if stack.cell == "lstm" else 1), (2 if stack.bidirectional else 1)
    torch.manual_seed(7)
    return tuple(torch.randn(stack.layers * directions, batch, H).double() for _ in range(parts))


def plain_stack(stack, xs, state):
    """Outputs (T lists) and final states of one sequence by the plain-Python cells, layer on layer."""
    weights = {name: value.tolist() for name, value in stack.state_dict().items()}
    directions = 2 if stack.bidirectional else 1
    finals = []
    for layer in range(stack.layers):
        sides = []
        # The oracle knows layer 0 alone: the parameters of this layer are handed to it under that name.
        renamed = {}
        for name, value in weights.items():
            short = name.replace(f"_l{layer}", "_l0").replace(f"_{layer}_", "_0_")
            if f"_l{layer}" in name or f"_{layer}_" in name:
                renamed[f"side.{short}"] = value
        for direction in range(directions):
            start = tuple(part[layer * directions + direction] for part in state)
            outputs, final = run(renamed, "side", direction, stack.cell, xs, start)
            sides.append(outputs)
            finals.append(final)
        xs = [[value for side in sides for value in side[t]] for t in range(len(xs))]
    return xs, finals


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_equals_plain_python(cell, layers, bidirectional):
    stack = build(cell, layers=layers, bidirectional=bidirectional)
    x, state = inputs(), random_state(stack)
    outputs, final = stack(x, state)
    assert outputs.shape == (B, T, stack.width)
    for b in range(B):
        expected, finals = plain_stack(stack, x[b].tolist(), tuple(part[:, b].tolist() for part in state))
        torch.testing.assert_close(outputs[b], torch.tensor(expected, dtype=torch.float64), **EXACT)
        for index, parts in enumerate(finals):
            for ours, theirs in zip(final, parts, strict=True):
                torch.testing.assert_close(ours[index, b], torch.tensor(theirs, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("cell", CELLS)
def test_the_plain_stack_can_disagree(cell):
    stack, broken = build(cell, layers=2, bidirectional=True), build(cell, layers=2, bidirectional=True)
    with torch.no_grad():
        last = next(p for n, p in broken.named_parameters() if "_l1_reverse" in n or n.endswith("_1_1"))
        last[0] += 0.1
    x, state = inputs(), random_state(stack)
    expected, _ = plain_stack(broken, x[0].tolist(), tuple(part[:, 0].tolist() for part in state))
    found = stack(x, state)[0][0]
    assert not torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-4)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("length", [1, T])
def test_whole_sequence_equals_steps(cell, layers, length):
    stack = build(cell, layers=layers)
    x, state = inputs(length=length), random_state(stack)
    outputs, final = stack(x, state)
    for t in range(length):
        output, state = stack.step(x[:, t], state)
        torch.testing.assert_close(output, outputs[:, t], **EXACT)
    for ours, theirs in zip(state, final, strict=True):
        assert ours.shape == theirs.shape == (layers, B, H)
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("cell", CELLS)
def test_no_state_is_the_zero_state(cell):
    stack = build(cell, layers=2, bidirectional=True)
    zeros = tuple(torch.zeros_like(part) for part in random_state(stack))
    torch.testing.assert_close(stack(inputs())[0], stack(inputs(), zeros)[0], **EXACT)


RAGGED = torch.tensor([3, 5, 1])


def ragged_mask():
    return torch.arange(T) < RAGGED[:, None]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("filling", [0.0, 1e30, math.nan])
def test_ragged_equals_one_by_one(cell, layers, bidirectional, filling):
    stack = build(cell, layers=layers, bidirectional=bidirectional)
    state = random_state(stack)
    x = inputs().masked_fill(~ragged_mask()[:, :, None], filling)
    outputs, final = stack(x, state, lengths=RAGGED, mask=ragged_mask())
    assert outputs.shape == (B, T, stack.width)
    for b, n in enumerate(RAGGED.tolist()):
        alone, ending = stack(x[b : b + 1, :n], tuple(part[:, b : b + 1] for part in state))
        torch.testing.assert_close(outputs[b, :n], alone[0], **EXACT)
        for ours, theirs in zip(final, ending, strict=True):
            torch.testing.assert_close(ours[:, b], theirs[:, 0], **EXACT)


@pytest.mark.parametrize("cell", CELLS)
def test_lengths_alone_say_where_sequences_end(cell):
    stack = build(cell)
    _, final = stack(inputs(), lengths=RAGGED)
    _, expected = stack(inputs(), lengths=RAGGED, mask=ragged_mask())
    torch.testing.assert_close(final[0], expected[0], **EXACT)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_padding_changes_no_gradient(cell, bidirectional):
    def gradients(filling):
        stack = build(cell, layers=2, bidirectional=bidirectional)
        x = inputs().masked_fill(~ragged_mask()[:, :, None], filling).requires_grad_()
        outputs, final = stack(x, lengths=RAGGED, mask=ragged_mask())
        (outputs[ragged_mask()].square().sum() + final[0].sum()).backward()
        return [x.grad, *(p.grad for p in stack.parameters())]

    for clean, filled in zip(gradients(0.0), gradients(50.0), strict=True):
        torch.testing.assert_close(filled, clean, **EXACT)
    assert (gradients(50.0)[0][~ragged_mask()] == 0).all()


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradcheck(cell, bidirectional):
    torch.manual_seed(0)
    stack = Recurrent(cell, 2, 2, layers=2, bidirectional=bidirectional).double()
    names, values = zip(*stack.named_parameters(), strict=True)
    lengths, mask = torch.tensor([2, 3]), torch.tensor([[True, True, False], [True, True, True]])

    def forward(x, *parameters):
        outputs, final = torch.func.functional_call(
            stack, dict(zip(names, parameters, strict=True)), (x,), {"lengths": lengths, "mask": mask}
        )
        return (outputs * mask[:, :, None], *final)

    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        forward, (x, *(v.detach().clone().requires_grad_() for v in values)), fast_mode=True
    )


def sigmoid(v):
    return 1 / (1 + math.exp(-v))


def reset_before(x_rows, h, W_f, W_o, W, U_f, U_o, U, b):
    """R4: h~ = tanh(W x + U (i_f * h) + b), h' = i_o * h + (1 - i_o) * h~; gates with biases b_f, b_o."""
    n = len(h)

    def times(M, v):
        return [sum(M[i][j] * v[j] for j in range(len(v))) for i in range(n)]

    for x in x_rows:
        a, c = times(W_f, x), times(U_f, h)
        i_f = [sigmoid(a[i] + c[i] + b[i]) for i in range(n)]
        a, c = times(W_o, x), times(U_o, h)
        i_o = [sigmoid(a[i] + c[i] + b[n + i]) for i in range(n)]
        a, c = times(W, x), times(U, [i_f[i] * h[i] for i in range(n)])
        candidate = [math.tanh(a[i] + c[i] + b[2 * n + i]) for i in range(n)]
        h = [i_o[i] * h[i] + (1 - i_o[i]) * candidate[i] for i in range(n)]
    return h


def test_reset_before_is_worked_example_r4():
    torch.manual_seed(0)
    layer = ResetBeforeGRU(D, H).double()
    W_f, W_o, W = layer.input_0_0.detach().chunk(3)
    U_f, U_o = layer.gates_0_0.detach().chunk(2)
    U, b = layer.candidate_0_0.detach(), layer.bias_0_0.detach()
    start = torch.randn(1, 1, H, dtype=torch.float64)
    x = inputs(batch=1)
    parts = [part.tolist() for part in (W_f, W_o, W, U_f, U_o, U, b)]
    expected = reset_before(x[0].tolist(), start[0, 0].tolist(), *parts)
    _, final = layer(x, start)
    torch.testing.assert_close(final[0, 0], torch.tensor(expected, dtype=torch.float64), **EXACT)


def torch_twin(layer):
    """Torch's own GRU with the same numbers."""
    twin = torch.nn.GRU(D, H, batch_first=True).double()
    with torch.no_grad():
        twin.weight_ih_l0.copy_(layer.input_0_0)
        twin.weight_hh_l0.copy_(torch.cat((layer.gates_0_0, layer.candidate_0_0)))
        twin.bias_ih_l0.copy_(layer.bias_0_0)
        twin.bias_hh_l0.zero_()
    return twin


def test_reset_before_differs_from_torch_exactly_where_the_matrix_mixes():
    torch.manual_seed(0)
    layer = ResetBeforeGRU(D, H).double()
    x, start = inputs(), torch.randn(1, B, H, dtype=torch.float64)
    assert not torch.allclose(layer(x, start)[0], torch_twin(layer)(x, start)[0], atol=1e-3)
    # A diagonal matrix commutes with the reset gate: U (i * h) = i * (U h).
    diagonal = copy.deepcopy(layer)
    with torch.no_grad():
        diagonal.candidate_0_0.copy_(torch.diag(torch.randn(H, dtype=torch.float64)))
    torch.testing.assert_close(diagonal(x, start)[0], torch_twin(diagonal)(x, start)[0], **EXACT)


@pytest.mark.parametrize("cell", CELLS)
def test_dropout_is_between_layers_and_only_in_training(cell):
    stack = build(cell, layers=2, dropout=0.5)
    x = inputs()
    torch.testing.assert_close(stack(x)[0], stack(x)[0], rtol=0, atol=0)
    stack.train()
    assert not torch.equal(stack(x)[0], stack(x)[0])
    # The state of the first layer lies before any dropout.
    torch.testing.assert_close(stack(x)[1][0][0], stack(x)[1][0][0], rtol=0, atol=0)
    single = build(cell, layers=1, dropout=0.5).train()
    torch.testing.assert_close(single(x)[0], single(x)[0], rtol=0, atol=0)


def test_wrong_use():
    with pytest.raises(ConfigError, match="cell `lsmt` is not known; did you mean `lstm`"):
        Recurrent("lsmt", D, H)
    stack = build("gru", bidirectional=True)
    with pytest.raises(ShapeError, match="needs a unidirectional stack"):
        stack.step(inputs()[:, 0], random_state(stack))
