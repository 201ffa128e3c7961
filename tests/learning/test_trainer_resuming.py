"""The training loop stopped and taken up again: to the bit, at every step, whatever stopped it."""

from __future__ import annotations

import collections
import gc
import itertools
import os
import signal
import threading
import tracemalloc

import pytest
import torch
from tiny_regression import COUNT, Data, Killed, kill_at, make, same_files, squares

from thalweg.errors import CheckpointError

SETTINGS = {
    "adamw": {},
    "adam_l2, average": {"optimiser": "adam_l2", "average": 0.9},
    "adafactor": {"optimiser": "adafactor", "learning_rate": 0.01},
    "sgd, cosine, warm-up": {"optimiser": "sgd", "momentum": 0.9, "schedule": "cosine", "warmup": 4},
    "plateau": {"schedule": "plateau", "plateau_patience": 0, "learning_rate": 0.5},
    "measured by steps": {"evaluate_every": 0, "epochs": 40, "average": 0.9, "checkpoint_seconds": 1000.0},
    "plateau, measured every second epoch": {"schedule": "plateau", "plateau_patience": 0, "evaluate_every": 2},
    "inverse_sqrt, no clipping": {"schedule": "inverse_sqrt", "warmup": 2, "clip": 0.0},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_killed_at_every_step_and_resumed_equals_uninterrupted(tmp_path, case):
    whole = make(tmp_path / "whole", **SETTINGS[case]).fit(Data())
    epochs = SETTINGS[case].get("epochs", 3)
    assert (whole.finished, whole.epoch, whole.step) == ("epochs", epochs, 3 * epochs)
    # A kill in the first step leaves nothing to resume. A long training is cut at its ends alone.
    for step in range(2, 10) if epochs == 3 else (2, 9, 3 * epochs - 1):
        folder = tmp_path / f"cut-{step}"
        with pytest.raises(Killed):
            make(folder, listener=kill_at(step), **SETTINGS[case]).fit(Data())
        # A resumed process starts with another random state.
        trainer, data = make(folder, **SETTINGS[case]), Data()
        torch.rand(step)
        trainer.fit(data, resume=True)
        if not SETTINGS[case].get("checkpoint_seconds"):
            assert data.given[0] == divmod(step - 1, COUNT)
        same_files(tmp_path / "whole", folder)


def test_killed_again_and_again(tmp_path):
    make(tmp_path / "whole", average=0.8).fit(Data())
    with pytest.raises(Killed):
        make(tmp_path / "cut", average=0.8, listener=kill_at(2)).fit(Data())
    for _ in range(7):
        with pytest.raises(Killed):
            make(tmp_path / "cut", average=0.8, listener=kill_at(2)).fit(Data(), resume=True)
    make(tmp_path / "cut", average=0.8).fit(Data(), resume=True)
    same_files(tmp_path / "whole", tmp_path / "cut")


def test_the_comparison_can_fail(tmp_path):
    make(tmp_path / "one").fit(Data())
    make(tmp_path / "other", seed=1).fit(Data())
    with pytest.raises(AssertionError):
        same_files(tmp_path / "one", tmp_path / "other")


def test_two_runs_are_the_same(tmp_path):
    for name in ("one", "other"):
        make(tmp_path / name, average=0.5).fit(Data())
    same_files(tmp_path / "one", tmp_path / "other")


def test_evaluating_and_saving_draw_no_random_numbers(tmp_path):
    states = []
    trainer = make(tmp_path, average=0.5, listener=lambda e: states.append((e["event"], torch.get_rng_state())))
    trainer.fit(Data())
    for (before, one), (now, other) in itertools.pairwise(states):
        if now == "epoch":
            assert before == "step"
            assert torch.equal(one, other)
    assert sum(event == "epoch" for event, _ in states) == 3


def stop_with(trainer, how):
    if how == "flag":
        trainer._stop.set()
    else:
        os.kill(os.getpid(), how)


@pytest.mark.parametrize("how", ["flag", signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, 3, 5, 9])
def test_interruption_leaves_a_resumable_run(tmp_path, how, step):
    make(tmp_path / "whole").fit(Data())
    events = []
    trainer = make(tmp_path / "cut", checkpoint_every=1000)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def listener(event):
        events.append(event["event"])
        if event["event"] == "step" and events.count("step") == step:
            stop_with(trainer, how)

    trainer.listener = listener
    progress = trainer.fit(Data())
    assert {number: signal.getsignal(number) for number in before} == before
    assert progress.step == step
    if step == 9:  # nothing was left to do
        assert (progress.finished, events[-1]) == ("epochs", "end")
    else:
        assert (progress.finished, events[-1]) == ("", "interrupted")
        make(tmp_path / "cut", checkpoint_every=1000).fit(Data(), resume=True)
    same_files(tmp_path / "whole", tmp_path / "cut")


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    trainer, before = make(tmp_path), signal.getsignal(signal.SIGINT)

    def listener(event):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    trainer.listener = listener
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Data())
    assert signal.getsignal(signal.SIGINT) is before


def test_training_in_another_thread(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(make(tmp_path / "thread").fit(Data()).finished))
    thread.start()
    thread.join()
    assert results == ["epochs"]


def growth(folder, loss):
    """Live tensors and traced bytes at step 250 less those at step 50."""
    tensors, sizes = [], []

    def listener(event):
        if event["event"] == "step" and event["batch"] in (50, 250):
            gc.collect()
            # By type: asking some deprecated proxies of torch for their class warns.
            tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
            sizes.append(tracemalloc.get_traced_memory()[0])

    trainer = make(folder, loss=loss, epochs=1, checkpoint_every=10_000, average=0.9, listener=listener)
    data = Data(260)
    data.given = collections.deque(maxlen=1)
    tracemalloc.start()
    try:
        trainer.fit(data)
    finally:
        tracemalloc.stop()
    return tensors[1] - tensors[0], sizes[1] - sizes[0]


def test_memory_does_not_grow_with_steps(tmp_path):
    tensors, size = growth(tmp_path, squares)
    assert tensors == 0
    assert size < 200 * 200  # bytes a step: a tensor, a dictionary or a float kept from each would be more


@pytest.mark.slow
def test_growing_memory_would_be_seen(tmp_path):
    kept = []

    def hoarding(model, batch, moment):
        summed, terms = squares(model, batch, moment)
        kept.append({"loss": summed, "value": [summed.item()], "size": [0] * 4})
        return summed, terms

    tensors, size = growth(tmp_path, hoarding)
    assert tensors >= 200
    assert size > 200 * 200


def test_resume_with_what_does_not_fit(tmp_path):
    with pytest.raises(CheckpointError, match="got no such file"):
        make(tmp_path).fit(Data(), resume=True)
    make(tmp_path).fit(Data())
    with pytest.raises(CheckpointError, match=r"last\.safetensors: does not fit this config"):
        make(tmp_path, model=torch.nn.Linear(2, 1)).fit(Data(), resume=True)
    (tmp_path / "last.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="does not fit this config"):
        make(tmp_path).fit(Data(), resume=True)
