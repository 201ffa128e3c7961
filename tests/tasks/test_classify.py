"""Classification: trained, stopped and resumed to the bit, loaded, measured; its pages and files."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from contracts.image_folders import CLASSES, TINY, write_images
from thalweg.errors import CheckpointError, ConfigError, DataError
from thalweg.learning.checkpoint import load_checkpoint
from thalweg.tasks.classify.classifier import load_classifier
from thalweg.tasks.classify.evaluation import evaluate
from thalweg.tasks.classify.pictures import worst_mistakes
from thalweg.tasks.classify.training import dev_metrics, open_images
from thalweg.tasks.config import read_config
from thalweg.tasks.registry import task_named, train
from thalweg.tasks.report import write_report
from thalweg.tasks.transduce.transducer import load

TASK = task_named("classify")


def config_for(folder, *words, preset="convnet-norm"):
    return TASK.configure(TASK.overrides(TASK.presets[preset], [f"path={folder}", *TINY, *words]))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("THALWEG_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images") / "stripes", {"train": 24, "val": 8, "test": 10})


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THALWEG_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        out = tmp_path_factory.mktemp("runs") / "stripes"
        train(config_for(folder, "epochs=10", "learning_rate=0.01", "average=0.5"), out)
    return out


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def same_weights(one, other, name="model.safetensors"):
    first, second = load_checkpoint(one / name), load_checkpoint(other / name)
    return first.tensors.keys() == second.tensors.keys() and all(
        torch.equal(value, second.tensors[key]) for key, value in first.tensors.items()
    )


def test_it_learns_and_says_how(run, folder):
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    start, end = log[0], log[-1]
    assert start["task"] == "classify"
    assert start["classes"] == list(CLASSES)
    assert start["train"]["images"] == 72
    assert start["images"] == {"channels": 3, "height": 8, "width": 8}
    epochs = [event for event in log if event["event"] == "epoch"]
    assert {"loss", "accuracy", "f1", "ece"} == epochs[0]["dev"].keys()
    assert all(event["images_per_second"] > 0 and event["data_seconds"] >= 0 for event in epochs)
    assert "teacher_forcing" not in epochs[0]
    assert "gradient_norm" not in epochs[0], "there is none where nothing is clipped"
    assert end["event"] == "end"
    assert end["best"]["accuracy"] > 0.9
    assert read_config(run / "config.yaml")["task"] == "classify"


def test_the_loaded_model_is_the_best_one(run, folder):
    classifier = load_classifier(run, device="cpu")
    assert classifier.classes == CLASSES
    assert (classifier.size, classifier.colour) == ((8, 8), "rgb")
    data = open_images(config_for(folder).data)
    found = dev_metrics(classifier.log_probs(data.val), data.val.labels)
    assert found == pytest.approx(load_checkpoint(run / "model.safetensors").meta["metrics"], abs=1e-6)
    flat = classifier.log_probs(data.val, temperature=4.0)
    assert torch.equal(flat.argmax(1), classifier.log_probs(data.val).argmax(1))
    assert flat.max(1).values.mean() < classifier.log_probs(data.val).max(1).values.mean()
    (prediction,) = classifier.predict(data.val.images[:1], k=9)
    assert len(prediction.answers) == 3, "there are no more classes than that"
    assert sum(answer.probability for answer in prediction.answers) == pytest.approx(1, abs=1e-5)
    assert classifier.log_probs(data.val.images[:0]).shape == (0, 3)


@pytest.mark.parametrize("stop", [3, 5, 8])
def test_stopped_and_resumed_equals_uninterrupted(folder, tmp_path, stop):
    words = ["epochs=2", "mixup=0.3", "dropout=0.2", "average=0.9", "checkpoint_every=1", "colour=0.2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config_for(folder, *words), whole)

    class Killed(Exception):  # noqa: N818
        pass

    steps = []

    def kill(event):
        steps.append(event["event"] == "step")
        if sum(steps) == stop and event["event"] == "step":
            raise Killed

    with pytest.raises(Killed):
        train(config_for(folder, *words), parts, listener=kill)
    result = train(config_for(folder, *words), parts, resume=True)
    assert result.reason == "epochs"
    assert same_weights(whole, parts)
    assert same_weights(whole, parts, "last.safetensors")
    epochs = [json.loads(line) for line in (parts / "log.jsonl").read_text().splitlines()]
    assert [event["epoch"] for event in epochs if event["event"] == "epoch"] == [1, 2]


def test_an_epoch_that_follows_soon_writes_no_checkpoint(folder, tmp_path):
    words = ["epochs=3", "checkpoint_seconds=1000"]
    seen = []

    def look(event):
        if event["event"] == "epoch":
            seen.append((tmp_path / "run" / "last.safetensors").stat().st_mtime_ns)

    train(config_for(folder, *words), tmp_path / "run", listener=look)
    assert len(seen) == 3
    assert len(set(seen)) == 1, "but for the one that comes before the first model"
    assert load_checkpoint(tmp_path / "run" / "last.safetensors").meta["progress"]["finished"] == "epochs"


def test_what_must_not_change_when_resuming(copy, folder, tmp_path):
    with pytest.raises(ConfigError, match="holds a run already"):
        train(config_for(folder), copy)
    words = ("epochs=10", "learning_rate=0.01", "average=0.5")
    for word, said in (("channels=4,4", r"model.channels=\[4, 8\] as before"), ("seed=3", "training.seed=0 as before")):
        with pytest.raises(CheckpointError, match=said):
            train(config_for(folder, *words, word), copy, resume=True)
    others = write_images(tmp_path / "others", {"train": 24, "val": 8}, seed=9)
    with pytest.raises(CheckpointError, match="expected the training images it was begun with"):
        train(config_for(others, *words), copy, resume=True)
    longer = train(config_for(folder, "epochs=11", *words[1:]), copy, resume=True)
    assert longer.reason == "epochs"


def test_each_kind_of_run_refuses_the_other(run, tmp_path):
    with pytest.raises(CheckpointError, match="expected a transduction model, got something else"):
        load(run)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{a}{b}\t{b}{a}\n" for a in "abcd" for b in "abcd"))
    task = task_named("transduce")
    words = [f"train={pairs}", "hidden=8", "embedding=8", "epochs=1", "device=cpu", "held_out=0.3"]
    task.train(task.configure(task.overrides({}, words)), tmp_path / "strings")
    with pytest.raises(CheckpointError, match="expected a classification model, got something else"):
        load_classifier(tmp_path / "strings")
    with pytest.raises(CheckpointError, match="expected a classification run, got one of transduce"):
        train(config_for("digits"), tmp_path / "strings", resume=True)


@pytest.mark.parametrize("loss", ["hinge", "square_square", "mce", "sparsemax"])
def test_other_losses_train(folder, tmp_path, loss):
    result = train(config_for(folder, f"loss={loss}", "epochs=2", preset="convnet"), tmp_path / "run")
    assert result.reason == "epochs"


def test_a_model_without_numbers_is_never_the_best():
    nothing = dev_metrics(torch.full((2, 3), torch.nan), torch.tensor([0, 1]))
    assert nothing["accuracy"] == 0
    assert nothing["loss"] != nothing["loss"]


def test_evaluation_files_and_figures(copy, folder):
    result = evaluate(copy, "test", k=2)
    assert result.items == 30
    assert result.scores.keys() == {"accuracy", "accuracy@2", "f1", "nll", "brier", "ece"}
    assert result.confusion.sum() == 30
    assert result.scores["accuracy"].value == pytest.approx(result.confusion.trace() / 30)
    assert result.temperature is not None
    facts = json.loads((result.directory / "metrics.json").read_text())
    assert facts["names"] == list(CLASSES)
    assert facts["confusion"] == result.confusion.tolist()
    assert facts["reliability"].keys() == {"before", "after"}
    lines = [json.loads(line) for line in (result.directory / "predictions.jsonl").read_text().splitlines()]
    assert len(lines) == 30
    assert sum(line["correct"] for line in lines) == result.confusion.trace()
    assert {"confusion.png", "reliability.png", "pictures.json"} <= {file.name for file in result.files()}
    shown = json.loads((result.directory / "pictures.json").read_text())
    wrong = 30 - int(result.confusion.trace())
    assert len(shown["mistakes"]) == min(24, wrong)
    assert {"image", "smooth", "integrated", "cam"} <= shown["saliency"][0].keys()
    assert [block["name"] for block in shown["maps"]["blocks"]] == ["block 1", "block 2"]
    page = write_report(copy).read_text(encoding="utf-8")
    for words in ("Most confident mistakes", "Accuracy against confidence", "across", "First filters", "thalweg show"):
        assert words in page
    assert "script" not in page.lower()
    assert page.count("data:image/png") > 4
    assert write_report(copy).read_text(encoding="utf-8") == page


def test_a_page_of_a_damaged_run(copy):
    folder = copy / "evaluation" / "test"
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text('{"confusion": [[1], 2], "names": ["<b>"], "classes": 3, "reliability": []}')
    evil = {"mistakes": [{"image": "https://x/y.png", "gold": "<script>"}], "maps": [], "filters": {"image": 3}}
    (folder / "pictures.json").write_text(json.dumps(evil))
    page = write_report(copy).read_text(encoding="utf-8")
    assert "https://x" not in page
    assert "<script" not in page
    for text in ("", "[]", "{", "null"):
        (folder / "pictures.json").write_text(text)
        (folder / "metrics.json").write_text(text)
        write_report(copy)


def test_other_images(copy, folder, tmp_path):
    loose = write_images(tmp_path / "loose", {"": 4}, seed=5)
    result = evaluate(copy, str(loose))
    assert result.items == 12, "of a folder without splits all images count"
    assert result.directory.name == "loose-test"
    assert evaluate(copy, f"{folder}:val", name="mine").items == 24
    larger = write_images(tmp_path / "larger", {"test": 2}, size=16)
    assert evaluate(copy, str(larger)).items == 6
    (loose / "across").rename(loose / "strange")
    with pytest.raises(DataError, match="strange"):
        evaluate(copy, str(loose))


def test_without_its_data_a_run_has_no_temperature(folder, tmp_path):
    moving = shutil.copytree(folder, tmp_path / "here")
    train(config_for(moving, "epochs=1"), tmp_path / "run")
    moving.rename(tmp_path / "there")
    result = evaluate(tmp_path / "run", str(tmp_path / "there"))
    assert result.temperature is None
    assert "after" not in json.loads((result.directory / "metrics.json").read_text())["reliability"]
    write_report(tmp_path / "run")
    with pytest.raises(DataError):
        evaluate(tmp_path / "run", "test")


def test_mistakes_come_worst_first():
    rows = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]).log()
    assert worst_mistakes(rows, torch.tensor([1, 1, 1, 0])) == [1, 3, 0]
    assert worst_mistakes(rows, torch.tensor([1, 1, 1, 0]), count=1) == [1]
    assert worst_mistakes(rows[:0], torch.zeros(0, dtype=torch.long)) == []
