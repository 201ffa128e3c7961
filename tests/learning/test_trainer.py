"""The training loop: what a step does, which model is kept, when it ends, what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_regression import Data, Killed, Script, dev_loss, kill_at, make, squares

from thalweg.errors import ConfigError, ThalwegError
from thalweg.learning import TrainingConfig
from thalweg.learning.checkpoint import load_checkpoint


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("accuracy", [0.1, 0.5, 0.3, 0.4], 2),
        ("cer", [0.5, 0.3, 0.1, 0.4], 3),
        ("loss", [1.0, 2.0, 3.0, 4.0], 1),
        ("bleu", [1.0, 2.0, 3.0, 4.0], 4),
        ("wer", [0.4, 0.2, 0.2, 0.2], 2),  # of equals the first
        ("accuracy", [0.4, 0.4, 0.4, 0.4], 1),
        ("accuracy", [math.nan, 0.0, math.nan, 0.0], 2),  # NaN is never best
    ],
)
def test_the_best_model_is_kept(tmp_path, metric, values, best):
    events, weights = [], []
    trainer = make(tmp_path, evaluate=Script(metric, values), metric=metric, epochs=4)
    trainer.listener = lambda event: (
        events.append(event),
        weights.append(trainer.raw.layers[0].weight.detach().clone()) if event["event"] == "epoch" else None,
    )
    progress = trainer.fit(Data())
    assert progress.best_epoch == best
    assert progress.best_metrics == {metric: values[best - 1]}
    kept = load_checkpoint(tmp_path / "model.safetensors")
    assert torch.equal(kept.tensors["layers.0.weight"], weights[best - 1])
    assert kept.meta == {"task": "test", "epoch": best, "metrics": {metric: values[best - 1]}}
    epochs = [event for event in events if event["event"] == "epoch"]
    assert max(event["epoch"] for event in epochs if event["best"]) == best
    end = events[-1]
    assert (end["event"], end["reason"], end["best_epoch"]) == ("end", "epochs", best)


def test_equal_metrics_are_settled_by_the_loss(tmp_path):
    metrics = [(0.5, 3.0), (0.5, 2.0), (0.5, 2.5), (0.4, 1.0), (0.5, math.nan), (0.5, 1.9)]
    script = iter(metrics)
    best = []

    def evaluate(model):
        accuracy, loss = next(script)
        return {"accuracy": accuracy, "loss": loss}

    trainer = make(
        tmp_path,
        evaluate=evaluate,
        metric="accuracy",
        epochs=6,
        listener=lambda e: best.append(e["best"]) if e["event"] == "epoch" else None,
    )
    assert trainer.fit(Data()).best_epoch == 6
    assert best == [True, True, False, False, False, True]


@pytest.mark.parametrize(
    ("patience", "values", "epochs", "reason"),
    [
        (2, [0.1, 0.2, 0.2, 0.1, 0.9, 0.9], 4, "patience"),  # a tie is no improvement
        (1, [0.1, 0.2, 0.3, 0.2, 0.9, 0.9], 4, "patience"),
        (3, [0.1, 0.2, 0.1, 0.1, 0.3, 0.1], 6, "epochs"),
        (0, [0.9, 0.2, 0.1, 0.1, 0.1, 0.1], 6, "epochs"),
        (2, [math.nan] * 6, 2, "patience"),
    ],
)
def test_patience(tmp_path, patience, values, epochs, reason):
    trainer = make(tmp_path, evaluate=Script("accuracy", values), metric="accuracy", epochs=6, patience=patience)
    progress = trainer.fit(Data())
    assert (progress.epoch, progress.finished) == (epochs, reason)


def test_patience_survives_resuming_and_can_be_extended(tmp_path):
    settings = {"metric": "accuracy", "epochs": 9, "patience": 3}
    with pytest.raises(Killed):
        make(tmp_path, evaluate=Script("accuracy", [0.5, 0.4]), listener=kill_at(7), **settings).fit(Data())
    progress = make(tmp_path, evaluate=Script("accuracy", [0.4, 0.4, 9]), **settings).fit(Data(), resume=True)
    assert (progress.epoch, progress.finished) == (4, "patience")
    again = make(tmp_path, evaluate=Script("accuracy", []), **settings).fit(Data(), resume=True)
    assert (again.epoch, again.finished) == (4, "patience")
    longer = make(tmp_path, evaluate=Script("accuracy", [0.6, 0, 0, 0, 0]), **(settings | {"patience": 4}))
    progress = longer.fit(Data(), resume=True)
    assert (progress.epoch, progress.finished, progress.best_epoch) == (9, "epochs", 5)


def test_the_plateau_cuts_the_learning_rate(tmp_path):
    rates = []
    trainer = make(
        tmp_path,
        evaluate=Script("accuracy", [0.5, 0.4, 0.4, 0.6, 0.1, 0.1, 0.1]),
        listener=lambda e: rates.append(e["learning_rate"]) if e["event"] == "epoch" else None,
        metric="accuracy",
        epochs=7,
        learning_rate=0.8,
        schedule="plateau",
        plateau_factor=0.5,
        plateau_patience=1,
    )
    trainer.fit(Data())
    assert rates == pytest.approx([0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.2])


def test_schedule_and_moment_reach_the_step(tmp_path):
    seen, rates, events = [], [], []

    class Loss:
        def __call__(self, model, batch, moment):
            seen.append(moment)
            rates.append(trainer.optimiser.param_groups[0]["lr"])
            return squares(model, batch, moment)

        def logged(self, moment):
            return {"twice": 2 * moment.share}

    trainer = make(tmp_path, loss=Loss(), listener=events.append, schedule="cosine", warmup=2, learning_rate=0.4)
    trainer.fit(Data())
    assert [(moment.epoch, moment.step) for moment in seen] == [(n // 3, n) for n in range(9)]
    assert [moment.share for moment in seen] == pytest.approx([n / 8 for n in range(9)])
    assert [e["twice"] for e in events if e["event"] == "epoch"] == pytest.approx([2 * n / 8 for n in (2, 5, 8)])
    cosine = [0.2 * (1 + math.cos(math.pi * n / 7)) for n in range(7)]
    assert rates == pytest.approx([0.2, 0.4, *cosine])


def test_a_step_is_clipped_gradient_descent(tmp_path):
    model = torch.nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    data = Data(1)
    batch = next(Data(1).iterate(0))
    settings = {"epochs": 1, "optimiser": "sgd", "weight_decay": 0.0, "learning_rate": 0.1, "clip": 0.5}
    events = []
    make(tmp_path, model=model, listener=events.append, **settings).fit(data)
    start = before.double()[0]
    residual = batch.x.double() @ start - batch.y.double()[:, 0]
    gradient = 2 * residual @ batch.x.double() / 4  # the mean over terms
    norm = gradient.norm()
    assert norm > 0.5
    expected = start - 0.1 * gradient * 0.5 / norm
    torch.testing.assert_close(model.weight.detach().double()[0], expected, rtol=1e-5, atol=1e-5)
    epoch = next(e for e in events if e["event"] == "epoch")
    assert epoch["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert epoch["loss"] == pytest.approx(residual.square().mean().item(), rel=1e-5)


def test_the_average_is_what_is_evaluated_and_kept(tmp_path):
    steps, evaluated = [], []

    def evaluate(model):
        evaluated.append({name: value.clone() for name, value in model.state_dict().items()})
        return dev_loss(model)

    def listener(event):
        if event["event"] == "step":
            steps.append({name: value.clone() for name, value in trainer.raw.state_dict().items()})

    trainer = make(tmp_path, average=0.6, epochs=2, evaluate=evaluate)
    start = {name: value.clone() for name, value in trainer.raw.state_dict().items()}
    trainer.listener = listener
    trainer.fit(Data())
    name = "layers.0.weight"
    average = start[name].double()
    for number, weights in enumerate(steps):
        decay = min(0.6, (1 + number) / (10 + number))
        average = decay * average + (1 - decay) * weights[name].double()
        if number in (2, 5):
            torch.testing.assert_close(evaluated[number // 3][name].double(), average, rtol=1e-5, atol=1e-6)
    assert evaluated[1]["layers.1.num_batches_tracked"] == 6
    # Training itself goes on with the plain weights.
    assert torch.equal(trainer.raw.state_dict()[name], steps[-1][name])
    assert not torch.equal(evaluated[1][name], steps[-1][name])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number(tmp_path, value):
    def loss(model, batch, forcing):
        summed, terms = squares(model, batch, forcing)
        return (summed * value if len(data.given) == 5 else summed), terms

    data = Data()
    trainer = make(tmp_path, loss=loss, learning_rate=0.05)
    with pytest.raises(ThalwegError, match=rf"the loss became {value} at step 5; .*`learning_rate` \(now 0.05\)"):
        trainer.fit(data)
    last = load_checkpoint(tmp_path / "last.safetensors")
    assert last.meta["progress"]["step"] == 4
    assert all(t.isfinite().all() for name, t in last.tensors.items() if name.startswith("model."))


def test_the_metric_must_be_measured(tmp_path):
    with pytest.raises(ConfigError, match="metric `bleu` is not among the dev metrics: loss"):
        make(tmp_path, metric="bleu").fit(Data())
    with pytest.raises(ConfigError, match="did you mean `accuracy`"):
        TrainingConfig(metric="acuracy")
    with pytest.raises(ConfigError, match="one that a single answer has, got `wer@3`"):
        TrainingConfig(metric="wer@3")  # the dev search gives one answer


def test_checkpoint_metadata_is_json(tmp_path):
    make(tmp_path).fit(Data())
    json.dumps(load_checkpoint(tmp_path / "last.safetensors").meta, allow_nan=False)


BAD = [("epochs", -1), ("batch_size", 0), ("checkpoint_every", 0), ("learning_rate", 0.0), ("learning_rate", math.inf)]
BAD += [("learning_rate", math.nan), ("weight_decay", -1.0), ("weight_decay", math.nan), ("clip", math.nan)]
BAD += [("momentum", -0.1), ("momentum", math.nan), ("warmup", -1), ("patience", -1), ("teacher_forcing", 1.1)]
BAD += [
    ("teacher_forcing_end", -0.1),
    ("label_smoothing", 1.0),
    ("average", 1.0),
    ("plateau_factor", 1.0),
    ("beta2", 0.0),
    ("beta2", 1.0),
    ("beta2", math.nan),
    ("seed", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_settings(name, value):
    with pytest.raises(ConfigError, match=rf"training\.{name} must be"):
        TrainingConfig(**{name: value})


def test_an_absent_device():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="device `cuda` was asked for but torch finds none here"):
        make(Path("unused"), device="cuda")


@pytest.mark.parametrize(("epochs", "count", "every"), [(40, 3, 2), (40, 60, 1), (200, 25, 4), (5, 1, 1)])
def test_short_epochs_are_measured_by_steps(tmp_path, epochs, count, every):
    assert TrainingConfig(epochs=epochs).planned(count).evaluate_every == every
    assert TrainingConfig(epochs=epochs, evaluate_every=3).planned(count).evaluate_every == 3, "what is said is meant"
    if epochs * count > 300:
        return
    events: list[dict] = []
    trainer = make(tmp_path, epochs=epochs, evaluate_every=0, listener=events.append)
    assert trainer.fit(Data(count)).best_epoch % every == 0
    measured = [event["epoch"] for event in events if event["event"] == "epoch" and event["dev"]]
    assert measured == list(range(every, epochs + 1, every))
    assert [event["epoch"] for event in events if event["event"] == "epoch"] == list(range(1, epochs + 1))


def test_the_plateau_counts_the_epochs_between_two_measurements(tmp_path):
    rates: list[float] = []
    settings = {"schedule": "plateau", "plateau_patience": 2, "epochs": 6, "metric": "wer", "evaluate_every": 2}
    listener = lambda event: rates.append(event["learning_rate"]) if event["event"] == "epoch" else None  # noqa: E731
    make(tmp_path, evaluate=Script("wer", [0.1, 0.2, 0.2]), listener=listener, **settings).fit(Data())
    assert rates == pytest.approx([0.05] * 6)
    rates.clear()
    make(
        tmp_path / "b", evaluate=Script("wer", [0.1, 0.2, 0.2, 0.2]), listener=listener, **settings | {"epochs": 8}
    ).fit(Data())
    assert rates == pytest.approx([0.05] * 6 + [0.025] * 2)
