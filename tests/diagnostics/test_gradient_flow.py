"""Gradients through depth and time: against autograd by hand, the same with layers unrolled, and while training."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from thalweg.data import Batches, Example
from thalweg.diagnostics import GradientWatch, gradient_flow, unrolled
from thalweg.diagnostics.layer_names import layer_of
from thalweg.energies import Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from thalweg.errors import ConfigError
from thalweg.layers.recurrent import Recurrent
from thalweg.learning.losses import sequence_nll
from thalweg.learning.settings import TrainingConfig
from thalweg.learning.trainer import Trainer

CELLS = ["lstm", "gru", "gru-reset-before", "rnn-tanh", "rnn-relu", "rnn-tanh-pre"]
PAIRS = [Example((4, 5, 6, 7), (4, 5)), Example((5, 6), (4, 5, 6)), Example((7,), (5,))]


def batch():
    return next(Batches(PAIRS, size=3).iterate(0))


def seq2seq(**settings) -> Seq2Seq:
    torch.manual_seed(0)
    config = Seq2SeqConfig(**{"hidden": 6, "embedding": 5, "encoder_layers": 2, "dropout": 0.0} | settings)
    return Seq2Seq(config, source_size=9, target_size=9).double().eval()


def energy(model):
    pairs = batch()
    return model.energy(pairs.source, pairs.target).mean()


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("more", [{}, {"residual": "residual", "norm": "layer"}, {"norm": "weight"}])
def test_unrolled_layers_give_the_same_values_and_gradients(cell: str, more: dict) -> None:
    model = seq2seq(cell=cell, **more)
    own = [p for p in model.parameters() if p.requires_grad]
    before = energy(model)
    wanted = torch.autograd.grad(before, own)
    with unrolled(model) as traces:
        after = energy(model)
    torch.testing.assert_close(after, before)
    for one, other in zip(torch.autograd.grad(after, own), wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)
    assert [trace.name for trace in traces] == [
        *("encoder 1", "encoder 1 backward", "encoder 2", "encoder 2 backward", "decoder 1")
    ]
    assert not any("Unrolled" in type(part).__name__ for part in model.modules())
    torch.testing.assert_close(energy(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_torchs_own_layers_are_unrolled_in_every_layout(kind: type, turned: bool) -> None:
    torch.manual_seed(1)
    net = kind(2, 3, num_layers=2, bidirectional=True, batch_first=turned, bias=turned).double()
    for shape in ((4, 5, 2), (5, 2)):
        x = torch.randn(*shape, dtype=torch.float64)
        wanted, final = net(x)
        with unrolled(net) as traces:
            found, last = net(x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(last, final)
        assert len(traces) == 4
    assert "forward" not in vars(net)


def test_gradient_is_the_total_derivative_through_time() -> None:
    """dL/dh_t of a plain recurrence by hand: W' diag(s') sends back what comes later."""
    torch.manual_seed(0)
    net = nn.RNN(2, 3, batch_first=True).double()
    x = torch.randn(4, 6, 2, dtype=torch.float64)
    flow = gradient_flow(net, lambda m: m(x)[0][:, -1].sum())
    outputs = net(x)[0].detach()
    gradient, wanted = torch.ones(4, 3, dtype=torch.float64), []
    for t in range(5, -1, -1):
        wanted.append(float(gradient.norm()))
        gradient = ((1 - outputs[:, t].square()) * gradient) @ net.weight_hh_l0.detach()
    assert flow.sites[0].by_time == pytest.approx(wanted[::-1])
    assert flow.sites[0].gradient == pytest.approx(math.hypot(*wanted))


def test_gradients_of_parameters_are_autograds_and_nothing_is_left_behind() -> None:
    model = seq2seq(encoder_layers=3, bidirectional=False)
    flow = gradient_flow(model, energy)
    assert all(p.grad is None for p in model.parameters())
    energy(model).backward()
    for row in flow.layers:
        own = [p for name, p in model.named_parameters() if layer_of(name) == row.name]
        size = sum(p.numel() for p in own)
        assert row.size == size
        total = sum(float(p.grad.square().sum()) for p in own if p.grad is not None)
        assert row.gradient == pytest.approx(math.sqrt(total / size), rel=1e-6)
    assert {row.name for row in flow.layers} >= {"encoder 1", "encoder 3", "decoder 1", "source_embedding", "output"}


def test_depth_of_a_plain_stack_vanishes_and_of_a_residual_one_does_not() -> None:
    plain, mended = (
        gradient_flow(seq2seq(encoder_layers=8, decoder_layers=8, bidirectional=False, **more), energy)
        for more in ({}, {"residual": "residual", "norm": "layer"})
    )
    for stack in ("encoder", "decoder"):
        assert plain.through_depth(stack) < 1e-3
        assert 0.1 < mended.through_depth(stack) < 10
    assert plain.stacks()["encoder"][-1].spread < 0.01 < mended.stacks()["encoder"][-1].spread
    assert "encoder 8" in str(plain)


def test_transformers_and_other_models_have_sites() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(width=8, heads=2, feedforward=16, encoder_layers=3, decoder_layers=2, dropout=0.0)
    model = Transformer(config, source_size=9, target_size=9).double().eval()
    flow = gradient_flow(model, energy)
    assert [site.name for site in flow.sites] == ["encoder 1", "encoder 2", "encoder 3", "decoder 1", "decoder 2"]
    assert all(site.gradient > 0 and 0 < site.spread < 2 for site in flow.sites)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    named = gradient_flow(net, lambda m: m(torch.ones(1, 2)).sum(), sites=["1"])
    assert [site.name for site in named.sites] == ["layer 2"]
    assert math.isnan(named.sites[0].spread)  # a single row has nothing to differ from
    with pytest.raises(ConfigError, match="no module `decoder`"):
        gradient_flow(net, lambda m: m(torch.ones(1, 2)).sum(), sites=["decoder"])
    with pytest.raises(ConfigError, match="one number"):
        gradient_flow(net, lambda m: m(torch.ones(2, 2)))


def test_a_constant_loss_has_no_gradient() -> None:
    flow = gradient_flow(nn.Linear(2, 1), lambda m: torch.tensor(3.0))
    assert flow.loss == 3
    assert [row.gradient for row in flow.layers] == [0.0]


class Steps:
    """Batches for the trainer."""

    def __init__(self) -> None:
        self.every = Batches(PAIRS * 8, size=3)

    def __len__(self) -> int:
        return len(self.every)

    def iterate(self, n: int, start: int = 0):
        return self.every.iterate(n, start)


def trained(folder: Path, watch: GradientWatch | None, **settings) -> tuple[dict, list]:
    torch.manual_seed(0)
    model = Seq2Seq(Seq2SeqConfig(hidden=6, embedding=5, dropout=0.2), source_size=9, target_size=9)
    events: list = []

    def loss(m, b, moment):
        logits = m(b.source, b.target, teacher_forcing=config.forcing_at(moment.share))
        return sequence_nll(logits, b.target.tokens, b.target.mask).sum(), int(b.target.lengths.sum())

    config = TrainingConfig(epochs=2, device="cpu", metric="loss", average=0.0, **settings)
    evaluate = {"evaluate": lambda m: {"loss": 1.0}, "directory": folder, "meta": {}}
    trainer = Trainer(model, config, loss=loss, listener=events.append, watch=watch, **evaluate)
    trainer.fit(Steps())
    return {name: value.clone() for name, value in model.state_dict().items()}, events


@pytest.mark.parametrize("forcing", [1.0, 0.5])
def test_watching_changes_no_weight_and_logs_profiles(tmp_path: Path, forcing: float) -> None:
    settings = {"teacher_forcing": forcing}
    plain, _ = trained(tmp_path / "a", None, **settings)
    seen, events = trained(tmp_path / "b", GradientWatch(every=5), **settings)
    assert all(torch.equal(value, seen[name]) for name, value in plain.items())
    profiles = [event for event in events if event["event"] == "gradients"]
    assert [event["step"] for event in profiles] == [0, 5, 10, 15]
    json.dumps(profiles, allow_nan=False)
    first = profiles[0]
    assert {"encoder 1", "decoder 1", "output"} <= first["layers"].keys()
    gradient, weight, update = first["layers"]["encoder 1"]
    assert gradient > 0
    assert 0 < update < 1 < weight
    assert len(first["sites"]["target_embedding"]) >= 2
    total = math.hypot(*(row[0] for row in first["layers"].values()))
    assert first["gradient"] == pytest.approx(total, rel=1e-3)


def test_watched_numbers_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    watch, optimiser = GradientWatch(every=1), torch.optim.SGD(net.parameters(), lr=0.5)
    x = torch.randn(4, 2)
    watch.begin(net)
    (7 * net(x).square().mean()).backward()
    watch.gradients(scale=7.0)  # as half precision multiplies the loss
    before = net[0].weight.detach().clone(), net[0].bias.detach().clone()
    optimiser.step()
    found = watch.finish()
    slope = math.hypot(float(net[0].weight.grad.norm()), float(net[0].bias.grad.norm()))
    moved = math.hypot(*(float((a - b.detach()).norm()) for a, b in zip(before, net[0].parameters(), strict=True)))
    size = math.hypot(*(float(part.norm()) for part in before))
    assert found["layers"]["layer 1"] == pytest.approx([slope / 7, size, moved / size], rel=1e-3)
    assert not net[0]._forward_hooks
    with pytest.raises(ConfigError, match="at least 1"):
        GradientWatch(every=0)


def test_blocks_are_watched_by_their_outputs() -> None:
    net = Recurrent("gru", 3, 4, layers=3, residual="residual")
    watch = GradientWatch()
    watch.begin(net)
    net(torch.randn(2, 5, 3))[0].sum().backward()
    watch.gradients()
    found = watch.finish()
    assert {"layer 1", "layer 2", "layer 3"} <= found["sites"].keys()
    assert all(len(times) == 5 for times in found["sites"].values())
