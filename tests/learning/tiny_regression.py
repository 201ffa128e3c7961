"""A tiny regression for the trainer's tests: data, a net, scripted dev metrics, kills, and a strict comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from thalweg.learning import Trainer, TrainingConfig
from thalweg.learning.checkpoint import load_checkpoint

COUNT = 3


@dataclass
class Rows:
    """One batch."""

    x: torch.Tensor
    y: torch.Tensor

    def to(self, device):
        return Rows(self.x.to(device), self.y.to(device))


class Data:
    """Batches of a noisy linear map; each depends on (epoch, number) alone."""

    def __init__(self, count=COUNT):
        self.count, self.given = count, []

    def __len__(self):
        return self.count

    def iterate(self, epoch, start=0):
        for number in range(start, self.count):
            self.given.append((epoch, number))
            generator = torch.Generator().manual_seed(1000 * epoch + number)
            x = torch.randn(4, 2, generator=generator)
            yield Rows(x, x @ torch.tensor([[1.0], [-2.0]]) + 0.3)


class Net(torch.nn.Module):
    """Dropout draws random numbers, batch norm has buffers, one of them whole numbers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.3), torch.nn.Linear(5, 1)
        )

    def forward(self, x):
        return self.layers(x)


def squares(model, batch, moment):
    return (model(batch.x) - batch.y).square().sum(), batch.x.size(0)


def dev_loss(model):
    assert not model.training
    assert not torch.is_grad_enabled()
    x = torch.linspace(-1, 1, 10).view(5, 2)
    return {"loss": float((model(x) - x @ torch.tensor([[1.0], [-2.0]])).square().mean())}


class Script:
    """Dev metrics given in advance, by epoch."""

    def __init__(self, name, values):
        self.name, self.values = name, list(values)

    def __call__(self, model):
        return {self.name: self.values.pop(0)}


def make(folder, *, evaluate=dev_loss, loss=squares, listener=None, model=None, **settings):
    defaults = {"epochs": 3, "learning_rate": 0.05, "weight_decay": 0.01, "schedule": "constant", "warmup": 0}
    defaults |= {"average": 0.0, "metric": "loss", "device": "cpu", "checkpoint_every": 1}
    defaults |= {"evaluate_every": 1, "checkpoint_seconds": 0.0}
    config = TrainingConfig(**(defaults | settings))
    torch.manual_seed(config.seed)
    return Trainer(
        model or Net(),
        config,
        loss=loss,
        evaluate=evaluate,
        directory=Path(folder),
        meta={"task": "test"},
        listener=listener,
    )


class Killed(Exception):  # noqa: N818
    """Stands for kill -9: nothing after it runs in the trainer."""


def kill_at(step):
    seen = []

    def listener(event):
        seen.append(event)
        if event["event"] == "step" and sum(e["event"] == "step" for e in seen) == step:
            raise Killed

    return listener


def same_files(one, other):
    for name in ("model.safetensors", "last.safetensors"):
        first, second = load_checkpoint(Path(one) / name), load_checkpoint(Path(other) / name)
        assert first.tensors.keys() == second.tensors.keys()
        different = [key for key, value in first.tensors.items() if not torch.equal(value, second.tensors[key])]
        assert not different, f"{name}: {different}"
        kept = [
            {k: v for k, v in c.meta.get("progress", c.meta).items() if "seconds" not in k} for c in (first, second)
        ]
        assert kept[0] == kept[1], name
