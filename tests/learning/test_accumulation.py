"""Several small batches are one large step; depth lowers rates; dev data are measured only now and then."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from thalweg.errors import ConfigError
from thalweg.learning.optimisers import build_optimiser
from thalweg.learning.settings import TrainerConfig
from thalweg.learning.trainer import Trainer

DATA = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0], [-1.0, 0.5], [0.5, 0.5], [2.5, -1.0], [1.5, 1.0]])


class Rows:
    """The rows in order, so many a batch."""

    def __init__(self, size: int):
        self.parts = list(DATA.split(size))

    def __len__(self) -> int:
        return len(self.parts)

    def iterate(self, n: int, start: int = 0):
        return iter(self.parts[start:])


def trained(tmp_path, name, size, events=None, **settings):
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    usual = {"epochs": 2, "device": "cpu", "optimiser": "sgd", "learning_rate": 0.01, "average": 0.0, "warmup": 0}
    trainer = Trainer(
        model,
        TrainerConfig(**{**usual, "schedule": "constant", "clip": 0.0, **settings}),
        loss=lambda m, batch, moment: ((m(batch[:, :1]) - batch[:, 1:]).square().sum(), len(batch)),
        evaluate=lambda m: {"loss": float(m.weight.detach().abs())},
        directory=tmp_path / name,
        meta={},
        listener=(lambda event: None) if events is None else events.append,
    )
    trainer.fit(Rows(size))
    return model, trainer


def test_accumulated_batches_are_one_large_batch(tmp_path):
    whole, _ = trained(tmp_path, "whole", 7)
    parts, trainer = trained(tmp_path, "parts", 3, accumulate=3)  # 3, 3 and 1 rows: means of means would be wrong
    other, _ = trained(tmp_path, "other", 3)
    assert trainer.progress.step == 2
    torch.testing.assert_close(parts.weight, whole.weight)
    assert not torch.allclose(other.weight, whole.weight)


def test_the_last_group_may_be_smaller_and_plans_count_steps(tmp_path):
    _, trainer = trained(tmp_path, "run", 2, accumulate=3)
    assert trainer.progress.step == 4  # two groups an epoch
    assert TrainerConfig(accumulate=4).planned(40).epochs == TrainerConfig().planned(10).epochs


def test_dev_data_are_measured_now_and_then_and_at_the_end(tmp_path):
    events: list = []
    trained(tmp_path, "run", 7, events, epochs=5, evaluate_every=2)
    measured = [bool(event["dev"]) for event in events if event["event"] == "epoch"]
    assert measured == [False, True, False, True, True]
    assert all(event["memory"] >= 0 for event in events if event["event"] == "epoch")
    assert json.dumps(events)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(2, 2), nn.Linear(2, 2)

    def depths(self):
        return {name: 1 if name.startswith("low") else 0 for name, _ in self.named_parameters()}


def test_rates_fall_with_depth_and_keep_their_places():
    model = Deep()
    optimiser = build_optimiser("adamw", model, learning_rate=1.0, weight_decay=0.1, layer_decay=0.5)
    scales = {id(p): group["scale"] for group in optimiser.param_groups for p in group["params"]}
    assert {name: scales[id(p)] for name, p in model.named_parameters()} == {
        **{f"low.{leaf}": 0.5 for leaf in ("weight", "bias")},
        **{f"high.{leaf}": 1.0 for leaf in ("weight", "bias")},
    }
    places = sorted(place for group in optimiser.param_groups for place in group["places"])
    assert places == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="layer_decay is of pretrained models"):
        build_optimiser("adamw", nn.Linear(1, 1), learning_rate=1.0, layer_decay=0.5)
    with pytest.raises(ConfigError, match=r"layer_decay must be in \(0, 1\]"):
        TrainerConfig(layer_decay=0.0)
