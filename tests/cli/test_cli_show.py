"""``thalweg show``: the costs of runs, configs and recipes."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from thalweg.energies.convnet.config import ConvNetConfig
from thalweg.energies.convnet.model import ConvNet
from thalweg.learning.checkpoint import Checkpoint, save_checkpoint

FLAT = "task: classify\ndata: {path: digits}\nmodel: {}\n"


@pytest.fixture
def images_run(tmp_path: Path) -> Path:
    """A classifier as a training would leave it."""
    config = ConvNetConfig(channels=(4, 8), hidden=(), head="average")
    model = ConvNet(config, classes=3, channels=1, size=(8, 8))
    settings = {"task": "classify", "data": {"path": "digits"}, "model": asdict(config)}
    meta = {"config": settings, "classes": ["a", "b", "c"], "channels": 1, "size": [8, 8], "mean": [0.5], "std": [0.2]}
    save_checkpoint(tmp_path / "images" / "model.safetensors", Checkpoint(dict(model.state_dict()), meta))
    return tmp_path / "images"


def test_show_says_why_the_flat_network_is_large(cli, tmp_path: Path) -> None:
    (tmp_path / "flat.yaml").write_text(FLAT, encoding="utf-8")
    done = cli("show", tmp_path / "flat.yaml")
    assert done.exit_code == 0, done.output
    assert "flat: classify; costs of one image of 3 x 48 x 48" in done.stderr
    assert "5,340,742 trainable parameters; classifier.hidden1 (Linear) holds 4,719,616 of them, 88.4%" in done.stdout
    assert "reads all 4,608 values of the flattened maps (128 channels of 36 positions)" in done.stdout
    assert "753,222 parameters, 7.1 times fewer" in done.stdout
    normed = cli("show", tmp_path / "flat.yaml", "norm=batch", "hidden_norm=true", "head=average")
    assert "756,742 trainable parameters" in normed.stdout
    assert "times fewer" not in normed.stdout
    assert "model    norm=batch head=average hidden_norm=true" in normed.stdout


def test_show_other_images(cli, tmp_path: Path) -> None:
    (tmp_path / "flat.yaml").write_text(FLAT, encoding="utf-8")
    words = ("channels=[4,8]", "hidden=[]", "--image", "1x8x8", "--classes", "10", "--json")
    record = json.loads(cli("show", tmp_path / "flat.yaml", *words).stdout)
    assert record["parameters"] == (9 + 1) * 4 + (36 + 1) * 8 + 32 * 10 + 10
    assert record["settings"]["model"] == {"channels": [4, 8], "hidden": []}
    assert record["rows"][0]["output"] == [1, 4, 8, 8]


def test_show_a_run_of_images(cli, images_run: Path) -> None:
    done = cli("show", images_run)
    assert done.exit_code == 0, done.output
    assert "images: classify; costs of one image of 1 x 8 x 8" in done.stderr
    assert "classifier.output" in done.stdout
    again = cli("show", images_run / "model.safetensors", "--json")
    assert json.loads(again.stdout)["parameters"] == 40 + 296 + 27


def test_show_a_run_of_strings(cli, run: Path, tmp_path: Path) -> None:
    short, long = (json.loads(cli("show", run, "--length", n, "--json").stdout) for n in (5, 10))
    assert short["task"] == "transduce"
    assert short["parameters"] == long["parameters"]
    assert short["multiply_adds"] < long["multiply_adds"]
    moved = Path(shutil.copytree(run, tmp_path / "moved"))  # costs need no data
    assert cli("show", moved).exit_code == 0


def test_show_a_recipe(cli) -> None:
    done = cli("show", "demo", "--symbols", 30)
    assert done.exit_code == 0, done.output
    assert "trainable parameters" in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["absent"], "expected a run directory, a YAML config or a recipe"),
        (["absent.yaml"], "expected a config file"),
        (["{run}", "hidden=3"], "change configs, not runs"),
        (["{folder}"], "got a folder without"),
        (["{folder}/flat.yaml", "haed=average"], "did you mean `head`"),
        (["{folder}/flat.yaml", "--image", "48"], "--image must be channels, height and width"),
        (["{folder}/flat.yaml", "--image", "3x4x4"], "too small to pool"),
        (["{folder}/odd.yaml"], "did you mean `classify`"),
    ],
)
def test_mistakes_are_one_line(cli, run: Path, tmp_path: Path, args: list[str], words: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "flat.yaml").write_text(FLAT, encoding="utf-8")
    (folder / "odd.yaml").write_text("task: clasify\n", encoding="utf-8")
    done = cli("show", *[word.format(run=run, folder=folder) for word in args])
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert done.stderr.strip().count("\n") == 0


def test_help_has_an_example(cli) -> None:
    assert "thalweg show runs/landscapes" in cli("show", "--help").stdout
