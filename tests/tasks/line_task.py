"""A whole task in one file: a line through points. ``register("line", "line_task:TASK")`` is all that it asks for."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, DataError
from thalweg.files import write_atomically
from thalweg.learning.checkpoint import MODEL, load_checkpoint
from thalweg.learning.settings import TrainerConfig
from thalweg.metrics import Score
from thalweg.tasks.base import Evaluation, Shown, Task
from thalweg.tasks.config import config_from
from thalweg.tasks.diagnosis.measures import Diagnosis, measure_plain
from thalweg.tasks.diagnosis.subject import Subject, Words, planned_steps
from thalweg.tasks.runs import TrainResult, meta_of

PRESETS = {"straight": {"model": {"hidden": 0}}, "bent": {"model": {"hidden": 8}, "training": {"warmup": 5}}}


@dataclass(frozen=True, kw_only=True)
class PointsConfig:
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class LineConfig:
    hidden: int = 0


@dataclass(frozen=True, kw_only=True)
class FitTraining(TrainerConfig):
    epochs: int = 60
    batch_size: int = 8
    learning_rate: float = 0.1
    weight_decay: float = 0.001
    metric: str = "loss"
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    task: str = "line"
    data: PointsConfig = field(default_factory=PointsConfig)
    model: LineConfig = field(default_factory=LineConfig)
    training: FitTraining = field(default_factory=FitTraining)

    presets = PRESETS


def read_points(path: str) -> Tensor:
    """``(N, 2)`` from lines of x, tab, y."""
    try:
        rows = [[float(cell) for cell in line.split("\t")] for line in Path(path).read_text().splitlines()]
        return torch.tensor(rows).reshape(-1, 2)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected x, tab, y on every line, got another file ({error}); give points") from None


class Points:
    """Batches of points; the order is that of the file."""

    def __init__(self, points: Tensor, size: int):
        self.parts = points.split(size)

    def __len__(self) -> int:
        return len(self.parts)

    def iterate(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        yield from self.parts[start:]


def net(config: LineConfig) -> nn.Module:
    return nn.Linear(1, 1) if not config.hidden else nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))


def mean_square(model: nn.Module, points: Tensor) -> Tensor:
    return (model(points[:, :1]) - points[:, 1:]).square().mean()


@dataclass(frozen=True)
class Value:
    source: str
    y: float

    @property
    def answers(self) -> tuple[Value, ...]:
        return (self,)

    @property
    def text(self) -> str:
        return f"{self.y:.3f}"

    probability = 1.0

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, "y": self.y}

    def tsv(self) -> Iterator[str]:
        yield f"{self.source}\t{self.text}"


class Line:
    def __init__(self, model: nn.Module):
        self.model = model

    def predict(self, numbers: Any, k: int = 1) -> Iterator[Value]:
        with torch.no_grad():
            for text in numbers:
                yield Value(str(text), float(self.model(torch.tensor([[float(text)]]))))


@dataclass(frozen=True)
class LineSubject(Subject):
    words: ClassVar[Words] = Words(
        items="points",
        given="x",
        other="another x",
        per="a point",
        reads="read its x",
        frequencies="their mean",
        sizes=("rows", "columns", "more"),
        shape="two numbers each",
    )
    points: Tensor

    def measure(self, rows: int, steps: int) -> Diagnosis:
        batch = self.points[:rows]
        other = torch.stack([batch[:, 0].roll(1), batch[:, 1]], dim=1)
        return measure_plain(self, batch, other, Points(self.points, 8), mean_square, steps=steps)


class Fitting(Task):
    name = "line"
    about = "a line through points"
    items = "points"
    kind = FitConfig
    presets = PRESETS
    default_model = "straight"

    def fit(self, config, log, root) -> TrainResult:
        points = read_points(config.data.path)
        torch.manual_seed(config.training.seed)
        return log.train(
            net(config.model),
            Points(points, config.training.batch_size),
            config,
            meta=meta_of(config, data=config.data.path),
            facts={"train": {"points": len(points)}},
            loss=lambda model, batch, moment: (mean_square(model, batch) * len(batch), len(batch)),
            evaluate=lambda model: {"loss": float(mean_square(model, points))},
            told={"lines": [f"train   {len(points)} points"]},
        )

    def load(self, run, *, device="auto", **options) -> Line:
        path = Path(run)
        found = load_checkpoint(path if path.is_file() else path / MODEL)
        model = net(config_from(found.meta["config"], FitConfig).model)
        model.load_state_dict(found.tensors)
        return Line(model.eval())

    def evaluate(self, run, data=None, *, k=5, name=None, device="auto", root=None, listener=None, **options):
        self.check_options(options)
        points = read_points(data or "")
        began = time.perf_counter()
        xs, ys = points.T.tolist()
        errors = [abs(value.y - y) for value, y in zip(self.load(run).predict(xs), ys, strict=True)]
        score = Score("MAE", statistics.fmean(errors), 0.0, max(errors), len(errors), False)
        speed = len(points) / (time.perf_counter() - began)
        result = Evaluation(
            Path(run) / "evaluation" / (name or "points"), str(data), {"mae": score}, len(points), speed
        )
        write_atomically(result.directory / "metrics.json", json.dumps(result.to_json()).encode())
        return result

    def predict(self, run, inputs=(), *, k=1, device="auto", listener=None, **options) -> Iterator[Value]:
        self.check_options(options)
        if not inputs:
            raise ConfigError("no numbers; give some: `thalweg predict RUN 1.5`")
        return self.load(run).predict(inputs)

    def subject(self, config, run=None, *, data=None, root=None, device="cpu", name="config") -> LineSubject:
        points = read_points(data or config.data.path)
        model = net(config.model) if run is None else self.load(run).model
        steps = 0 if run is None else planned_steps(run)
        return LineSubject(name, run is not None, model, config, steps, data or config.data.path, points)

    def example(self, config, run=None, **sizes) -> Shown:
        model = net(config.model) if run is None else self.load(run).model
        return Shown(model, (torch.zeros(1, 1),), "one number")


TASK = Fitting()
