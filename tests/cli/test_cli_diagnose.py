"""``thalweg diagnose`` and ``train --watch``: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_diagnose_a_run(cli, run: Path, pairs: Path) -> None:
    done = cli("diagnose", run, "--data", pairs, "--rows", 8, "--steps", 2, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "encoder" in done.stdout
    assert "decay" in done.stdout
    assert (run / "diagnosis.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    record = json.loads((run / "diagnosis.json").read_text(encoding="utf-8"))
    assert record["trained"] is True
    again = cli("diagnose", run, "--data", pairs, "--rows", 8, "--steps", 2, "--device", "cpu", "--json")
    assert json.loads(again.stdout) == record


def test_diagnose_a_config_and_a_run_as_it_started(cli, run: Path, pairs: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deep.yaml").write_text(
        f"data: {{train: {pairs}}}\nmodel: {{hidden: 8, embedding: 8, bidirectional: false, dropout: 0}}\n",
        encoding="utf-8",
    )
    words = ("encoder_layers=8", "decoder_layers=8", "--rows", 8, "--steps", 1, "--device", "cpu")
    done = cli("diagnose", "deep.yaml", *words)
    assert done.exit_code == 0, done.output
    assert "problem  gradients vanish on their way down the encoder" in done.stdout
    assert "try model.residual=residual model.norm=layer" in done.stdout
    assert "thalweg train deep.yaml" in Path("deep-diagnosis.html").read_text(encoding="utf-8")
    page = tmp_path / "sub" / "page.html"
    done = cli("diagnose", run, "--fresh", "--out", page, "--rows", 8, "--steps", 1, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))["trained"] is False


def test_diagnose_names_recipes(cli, shared_data: Path, tmp_path: Path) -> None:
    if not (shared_data / "ar2en" / "train.tsv").is_file():
        pytest.skip("needs ar2en")
    words = ("encoder_layers=2", "decoder_layers=2", "hidden=8", "--rows", 4, "--steps", 1, "--device", "cpu")
    done = cli("diagnose", "deep-plain", *words, "--data-root", shared_data, "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert "deep-plain as it starts" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["absent"], "expected a run directory, a YAML config or a recipe"),
        (["demo", "hiden=3"], "did you mean `hidden`"),
        (["{pairs}"], "expected a run directory or a YAML config, got another file"),
        (["{run}", "hidden=3"], "change configs, not runs"),
        (["{run}", "--out", "page.txt"], "--out must be a page to write"),
        (["{run}", "--data", "absent.tsv"], "give the pairs to look at with --data"),
        (["{run}", "--rows", "1"], "rows"),
        (["{folder}"], "folder without config.yaml"),
    ],
)
def test_mistakes_are_one_line(cli, run: Path, pairs: Path, tmp_path: Path, args: list[str], words: str) -> None:
    (tmp_path / "empty").mkdir()
    filled = [word.format(run=run, pairs=pairs, folder=tmp_path / "empty") for word in args]
    done = cli("diagnose", *filled, "--device", "cpu")
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.strip().count("\n") == 0


def test_help_has_an_example(cli) -> None:
    done = cli("diagnose", "--help")
    assert "thalweg diagnose runs/names" in done.stdout
    assert "diagnose" in cli("--help").stdout


def test_train_watches_gradients(cli, pairs: Path, tmp_path: Path, tiny: tuple[str, ...]) -> None:
    args = ("--data", pairs, *tiny)
    done = cli("train", *args, "--out", tmp_path / "a", "--watch", "gradients", "--watch-every", 2)
    assert done.exit_code == 0, done.output
    events = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    profiles = [event for event in events if event["event"] == "gradients"]
    assert [event["step"] for event in profiles] == list(range(0, 2 * len(profiles), 2))
    assert "encoder 1" in profiles[0]["layers"]
    refused = cli("train", *args, "--out", tmp_path / "b", "--watch", "gradient")
    assert refused.exit_code == 2
    assert "did you mean `gradients`" in refused.stderr
    assert not (tmp_path / "b").exists()


def test_diagnose_image_networks(cli, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("channels=4,6", "hidden=8", "epochs=1", "device=cpu")
    done = cli("train", "--task", "classify", "digits", *small, "--out", "net", "--watch", "gradients")
    assert done.exit_code == 0, done.output
    assert "convolutions 2" in Path("net/log.jsonl").read_text(encoding="utf-8")
    done = cli("diagnose", "net", "--rows", 8, "--steps", 1, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "net as trained, on 8 images of digits (val)" in done.stderr
    assert "gradients reach every layer of the convolutions" in done.stdout
    assert json.loads(Path("net/diagnosis.json").read_text(encoding="utf-8"))["batch"]["height"] == 8
    Path("deep.yaml").write_text(
        "task: classify\ndata: {path: digits}\nmodel: {channels: [6], hidden: [8], activation: tanh}\n",
        encoding="utf-8",
    )
    done = cli("diagnose", "deep.yaml", "units=12", "--rows", 8, "--steps", 1, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "problem  gradients vanish on their way down the convolutions" in done.stdout
    assert "try model.norm=batch model.skip=residual" in done.stdout
    refused = cli("diagnose", "net", "--data", "absent", "--device", "cpu")
    assert refused.exit_code == 2
    assert "give the images to look at with --data" in refused.stderr
    assert refused.stderr.strip().count("\n") == 0


def test_diagnose_image_recipes(cli, tmp_path: Path) -> None:
    page = ("--out", tmp_path / "page.html")
    done = cli("diagnose", "c2", "path=digits", "channels=4,6", "hidden=8", "--steps", 1, "--device", "cpu", *page)
    assert done.exit_code == 0, done.output
    assert "c2 as it starts" in done.stderr
    refused = cli("diagnose", "c1", "--data-root", tmp_path, "--device", "cpu", *page)
    assert refused.exit_code == 2
    assert "intel48.zip: expected in the folder" in refused.stderr
    assert refused.stderr.strip().count("\n") == 0
