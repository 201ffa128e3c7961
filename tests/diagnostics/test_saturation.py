"""Saturated gates and activations: recomputed gates against numpy, counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from oracles import jacobians as oracle
from thalweg.data import Batches, Example
from thalweg.diagnostics import saturation, unrolled
from thalweg.energies import Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from thalweg.layers.blocks import Highway


def test_gates_of_a_fused_lstm_are_those_of_numpy() -> None:
    torch.manual_seed(0)
    net = nn.LSTM(2, 3, batch_first=True).double()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(6)
    x = torch.randn(2, 5, 2, dtype=torch.float64)
    with unrolled(net) as traces:
        net(x)
    report = saturation(net, lambda m: m(x))
    W, U, b = (part.detach().numpy() for part in (net.weight_ih_l0, net.weight_hh_l0, net.bias_ih_l0 + net.bias_hh_l0))
    rows = [oracle.lstm_gates(W, U, b, np.zeros(3), np.zeros(3), row) for row in x.numpy()]
    for place, (gate, low) in enumerate((("input", 0.05), ("forget", 0.05), ("candidate", -0.95), ("output", 0.05))):
        wanted = np.stack([row[place] for row in rows])
        np.testing.assert_allclose(traces[0].gates[gate], wanted, atol=1e-12)
        found = next(row for row in report.rows if row.gate == gate)
        assert (found.low, found.high) == pytest.approx(oracle.share(wanted, low, 0.95))
        assert found.mean == pytest.approx(wanted.mean())
    assert any(row.share > 0 for row in report.rows)


def test_counting_can_fail() -> None:
    values = np.array([0.01, 0.5, 0.99, 0.97])
    assert oracle.share(values, 0.05, 0.95) == (0.25, 0.5)
    assert oracle.share(values, 0.05, 0.98) != (0.25, 0.5)


@pytest.mark.parametrize(("cell", "gates"), [("gru", 3), ("gru-reset-before", 3), ("lstm", 4), ("rnn-relu", 1)])
def test_every_cell_has_rows_and_padding_does_not_count(cell: str, gates: int) -> None:
    torch.manual_seed(0)
    config = Seq2SeqConfig(cell=cell, hidden=5, embedding=4, bidirectional=False, dropout=0.0)
    model = Seq2Seq(config, source_size=9, target_size=9).eval()
    long, short = Example((4, 5, 6, 7), (4, 5)), Example((5,), (4,))

    def rows(examples):
        pairs = next(Batches(examples, size=9).iterate(0))
        return saturation(model, lambda m: m(pairs.source, pairs.target)).rows

    both = rows([long, short])
    assert [row.name for row in both] == ["encoder 1"] * gates + ["decoder 1"] * gates + ["combine"]
    apart = [rows([long]), rows([short])]
    for n in range(gates):  # the encoder's: four positions and one
        assert both[n].mean == pytest.approx((4 * apart[0][n].mean + apart[1][n].mean) / 5, abs=1e-6)
    assert ("relu" in {row.kind for row in both}) == (cell == "rnn-relu")


def test_dead_units_and_open_gates() -> None:
    net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1), nn.Sigmoid())
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0], [-1.0], [0.0], [0.0]]))
        net[0].bias.copy_(torch.tensor([0.0, 0.0, -1.0, 1.0]))
        net[2].weight.zero_()
        net[2].bias.fill_(9.0)
    relu, sigmoid = saturation(net, lambda m: m(torch.tensor([[1.0], [-1.0]]))).rows
    assert (relu.stuck, relu.low, relu.share) == (0.25, 0.5, 0.25)
    assert (sigmoid.high, sigmoid.stuck) == (1.0, 1.0)


def test_r5_a_highway_gate_at_one_closes_the_identity_path() -> None:
    """The identity path closes when i saturates at 1: the report says so."""
    block = Highway(3)
    with torch.no_grad():
        block.gate.weight.zero_()
        block.gate.bias.fill_(8.0)
    rows = {row.gate: row for row in saturation(nn.Sequential(block), lambda m: m(torch.randn(5, 3))).rows}
    assert rows["carry"].high == 1.0


def test_transformers_have_their_feed_forward_units_counted() -> None:
    config = TransformerConfig(width=8, heads=2, feedforward=16, encoder_layers=1, decoder_layers=2, dropout=0.0)
    model = Transformer(config, source_size=9, target_size=9).eval()
    with torch.no_grad():
        model.encoder.layers[0].feedforward.up.bias[:4] = -100
    pairs = next(Batches([Example((4, 5), (6,))] * 2, size=2).iterate(0))
    report = saturation(model, lambda m: m(pairs.source, pairs.target))
    assert [(row.name, row.gate) for row in report.rows] == [
        *(("encoder 1", "feedforward"), ("decoder 1", "feedforward"), ("decoder 2", "feedforward"))
    ]
    assert report.rows[0].stuck >= 0.25
    assert report.worst(1)[0].stuck == max(row.stuck for row in report.rows)
    assert "feedforward" in str(report)


def test_no_activations_and_no_rows() -> None:
    assert saturation(nn.Linear(2, 2), lambda m: m(torch.ones(1, 2))).rows == ()
    empty = saturation(nn.Sequential(nn.Tanh()), lambda m: m(torch.ones(0, 2))).rows[0]
    assert (empty.low, empty.high, empty.stuck) == (0.0, 0.0, 0.0)
