"""Costs by layer against counts by hand and against torch's own counter."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from thalweg.data import pad
from thalweg.diagnostics.costs import cost_table
from thalweg.energies.convnet.config import ConvNetConfig
from thalweg.energies.convnet.model import ConvNet
from thalweg.energies.seq2seq.model import Seq2Seq, Seq2SeqConfig
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.energies.transformer.model import Transformer


def counted(model, *inputs):
    """Half the floating-point operations that torch counts in matrix products and convolutions."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(*inputs)
    return counter.get_total_flops() // 2


def norms(table):
    return sum(row.multiply_adds for row in table.rows if "Norm" in row.kind)


def rows(table):
    return {row.name: row for row in table.rows}


def test_the_flat_network_by_layer():
    table = cost_table(ConvNet(ConvNetConfig(), classes=6), torch.zeros(1, 3, 48, 48))
    found = rows(table)
    assert table.parameters == 5_340_742
    assert found["classifier.hidden1"].parameters == 4608 * 1024 + 1024 == table.largest.parameters
    assert table.share(table.largest) == pytest.approx(0.8837, abs=1e-4)
    assert found["blocks.1.convolution"].multiply_adds == 24 * 24 * 64 * 32 * 9
    assert found["blocks.0.pool"].output == (1, 32, 24, 24)
    assert found["blocks.0.convolution"].activation_bytes == 48 * 48 * 32 * 4
    assert not any("ropout" in row.kind for row in table.rows)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"norm": "batch", "hidden_norm": True, "head": "average"},
        {"norm": "weight", "skip": "highway", "head": "attention"},
        {"norm": "group", "skip": "residual", "separable": True, "squeeze": 4, "pooling": "stride", "mirror": True},
    ],
    ids=str,
)
def test_networks_of_images_agree_with_torch(config):
    model = ConvNet(ConvNetConfig(channels=(8, 16), hidden=(12,), **config), classes=3, size=(12, 12))
    images = torch.zeros(2, 3, 12, 12)
    table = cost_table(model, images)
    assert table.multiply_adds - norms(table) == counted(model, images)
    assert table.parameters == sum(p.numel() for p in model.parameters())


def test_a_wrong_formula_would_be_seen():
    model = nn.Conv2d(4, 8, 3, groups=2, padding=1)
    x = torch.zeros(1, 4, 5, 5)
    wrong = 8 * 5 * 5 * 9 * 4  # groups forgotten
    assert cost_table(model, x).multiply_adds == counted(model, x) != wrong


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv1d(4, 6, 3, stride=2), torch.zeros(2, 4, 9)),
        (nn.Conv2d(4, 6, (3, 1), groups=2, dilation=2), torch.zeros(2, 4, 9, 9)),
        (nn.Conv3d(2, 3, 2), torch.zeros(1, 2, 4, 4, 4)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), torch.zeros(2, 4, 5, 5)),
        (nn.Linear(4, 6), torch.zeros(2, 3, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_single_layers_agree_with_torch(layer, x):
    table = cost_table(layer, x)
    assert table.multiply_adds == counted(layer, x)
    assert [row.name for row in table.rows] == [""]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent_layers(kind, directions):
    D, H, T, B = 3, 5, 4, 2
    layer = getattr(nn, kind)(D, H, num_layers=2, bidirectional=directions == 2, batch_first=True)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    expected = B * T * directions * gates * H * ((D + H) + (H * directions + H))
    assert cost_table(layer, torch.zeros(B, T, D)).multiply_adds == expected
    packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(B, T, D), torch.tensor([4, 2]), batch_first=True)
    assert cost_table(layer, packed).multiply_adds == expected * 6 // 8
    cell = getattr(nn, f"{kind}Cell")(D, H)
    assert cost_table(cell, torch.zeros(B, D)).multiply_adds == B * gates * H * (D + H)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projected_lstm():
    layer = nn.LSTM(3, 5, proj_size=2)
    assert cost_table(layer, torch.zeros(4, 1, 3)).multiply_adds == 4 * (4 * 5 * (3 + 2) + 5 * 2)


@pytest.mark.parametrize("first", [True, False])
def test_attention_agrees_with_torch(first):
    layer = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=first)
    B, L, S = 2, 3, 5
    shapes = [(B, L, 8), (B, S, 6), (B, S, 4)]
    given = tuple(torch.zeros(shape if first else (shape[1], shape[0], shape[2])) for shape in shapes)
    expected = B * (L * 8 * 8 + S * 6 * 8 + S * 4 * 8 + 2 * L * S * 8 + L * 8 * 8)
    table = cost_table(layer, given)
    assert [row.kind for row in table.rows] == ["MultiheadAttention"]
    assert table.multiply_adds == expected
    assert table.parameters == sum(p.numel() for p in layer.parameters())


def test_models_of_strings():
    source = pad([[4] * 6])
    for model in (
        Seq2Seq(Seq2SeqConfig(hidden=8, embedding=4), source_size=9, target_size=7),
        Transformer(
            TransformerConfig(width=8, heads=2, feedforward=16, encoder_layers=1, decoder_layers=1),
            source_size=9,
            target_size=7,
        ),
    ):
        table = cost_table(model, (source, source))
        assert table.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
        if isinstance(model, Transformer):
            # Torch's counter does not know the attention of the CPU: 2 T S D for each of three attentions.
            attention = sum(row.multiply_adds for row in table.rows if row.kind.endswith("itself"))
            assert attention == 3 * 2 * 6 * 6 * 8
            assert table.multiply_adds - norms(table) - attention == counted(model, source, source)


class _Odd(nn.Module):
    """Owns a matrix, shares one, has a part that is never called and one that is called twice."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(4, 4))
        self.twice = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.twice.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 3, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x, *, scale):
        return self.frozen(self.tied(self.twice(self.twice(x))) @ self.matrix) * scale


def test_odd_models():
    model = _Odd()
    model.twice.eval()
    table = cost_table(model, torch.zeros(1, 4), call=lambda m, x: m(x, scale=2.0))
    found = rows(table)
    assert (found["twice"].parameters, found["twice"].calls, found["twice"].multiply_adds) == (16, 2, 32)
    assert (found["tied"].parameters, found["tied"].multiply_adds) == (0, 16)
    assert (found["unused"].parameters, found["unused"].calls, found["unused"].output) == (6, 0, ())
    assert (found["frozen"].parameters, found["frozen"].frozen) == (0, 12)
    assert (found[""].parameters, found[""].multiply_adds, found[""].kind) == (16, 16, "_Odd itself".lstrip("_"))
    assert table.parameters == 38
    assert table.frozen == 12
    assert "38 + 12 frozen" in str(table)
    assert "(2 calls)" in str(table)
    assert (model.training, model.twice.training) == (True, False)
    assert json.dumps(table.to_json())


def test_a_model_that_fails_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(RuntimeError):
        cost_table(model, torch.zeros(1, 3))
    assert model.training
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_nothing_to_count():
    assert cost_table(nn.Identity(), torch.zeros(1)).rows == ()
    assert "total" in str(cost_table(nn.Identity(), torch.zeros(1)))
    assert cost_table(nn.Embedding(5, 3), torch.tensor([1])).multiply_adds == 0
    assert cost_table(nn.LayerNorm(3), torch.zeros(2, 3)).multiply_adds == 6
