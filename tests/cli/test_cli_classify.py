"""``train``, ``evaluate`` and ``predict`` with images, as a person types them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from contracts.image_folders import CLASSES, TINY, write_images


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("THALWEG_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("cli-images") / "stripes", {"train": 20, "test": 6})


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    from thalweg.cli.main import app

    out = tmp_path_factory.mktemp("cli-runs") / "stripes"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THALWEG_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        words = ["train", "--task", "classify", str(folder), "--out", str(out)]
        result = CliRunner().invoke(app, [*words, *TINY, "epochs=6", "learning_rate=0.01"])
    assert result.exit_code == 0, result.output
    return out, result.output


def test_training_says_what_it_does(run, folder):
    out, said = run
    for words in ("images (train)", "8 x 8 RGB, 3 classes: across, down, plain", "images/s"):
        assert words in said
    assert "best    epoch" in said
    assert f"thalweg evaluate {out}" in said
    assert (out / "report.html").is_file()
    assert (out / "evaluation" / "val" / "metrics.json").is_file()


def test_evaluate_prints_tables_and_json(run, cli):
    out, _ = run
    shown = cli("evaluate", out)
    assert shown.exit_code == 0, shown.output
    for words in ("accuracy", "macro F1", "ECE", "precision", "across", "temperature", "confusion.png"):
        assert words in shown.output
    facts = json.loads(cli("evaluate", out, "val", "--json").stdout)
    assert facts["scores"]["accuracy"]["value"] == pytest.approx(
        sum(facts["confusion"][n][n] for n in range(3)) / facts["items"]
    )
    assert [each["name"] for each in facts["classes"]] == list(CLASSES)


def test_predict_tsv_and_json_lines(run, folder, cli):
    out, _ = run
    images = sorted((folder / "test" / "down").glob("*.png"))[:2]
    shown = cli("predict", out, *images, "--k", 2)
    rows = [line.split("\t") for line in shown.stdout.splitlines()]
    assert [row[0] for row in rows] == [str(images[0])] * 2 + [str(images[1])] * 2
    assert all(row[1] in CLASSES and 0 <= float(row[3]) <= 1 for row in rows)
    lines = cli("predict", out, f"{folder / 'test'}/", "--format", "jsonl").stdout.splitlines()
    assert len(lines) == 18
    first = json.loads(lines[0])
    assert first["source"].startswith(f"{folder / 'test'}/across")
    assert first["answers"][0]["text"] in CLASSES


def test_bad_images_are_named(run, folder, cli, tmp_path):
    out, _ = run
    (tmp_path / "bad.png").write_bytes(b"\x89PNG nothing")
    alone = cli("predict", out, tmp_path / "bad.png")
    assert alone.exit_code == 2
    assert "bad.png" in alone.stderr
    good = next((folder / "test" / "down").glob("*.png"))
    (tmp_path / "good.png").write_bytes(good.read_bytes())
    both = cli("predict", out, tmp_path)
    assert both.exit_code == 0
    assert "skipped" in both.stderr
    assert len(both.stdout.splitlines()) == 1


def test_resume_and_config_files(folder, cli, tmp_path):
    out = tmp_path / "run"
    assert cli("train", "--task", "classify", folder, "--out", out, *TINY).exit_code == 0
    again = cli("train", "--resume", "--out", out, "epochs=3")
    assert again.exit_code == 0, again.output
    assert "resumed" in again.output
    assert sum('"event": "epoch"' in line for line in (out / "log.jsonl").read_text().splitlines()) == 3
    other = cli("train", out / "config.yaml", "--out", tmp_path / "other", "epochs=1")
    assert other.exit_code == 0, other.output
    wrong = cli("train", out / "config.yaml", "--task", "transduce", "--out", tmp_path / "third")
    assert wrong.exit_code == 2
    assert "is for the task classify" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "clasify", "digits"], "did you mean `classify`"),
        (["--task", "classify"], "no images; give a folder"),
        (["digits"], "for images add --task classify"),
        (["--task", "classify", "digits", "--model", "gru"], "choose one of: convnet"),
        (["--task", "classify", "digits", "other"], "expected images in one place"),
        (["--task", "classify", "digits", "chanels=3"], "did you mean `channels`"),
        (["--task", "classify", "digits", "--dev", "x"], "--dev is for pairs"),
        (["--task", "classify", "absent"], "absent: expected a folder"),
        (["--task", "classify", "digits", "channels=8,8,8,8"], "too small to pool"),
    ],
)
def test_mistakes(words, said, cli, tmp_path):
    result = cli("train", *words, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert said in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error")]) == 1
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_options_of_strings_are_refused(run, cli, tmp_path):
    out, _ = run
    for words, said in (
        (["--width", 3], "--width is for runs on strings"),
        (["--seed", 3], "--seed is for runs on strings"),
        (["--ensemble", "x"], "--ensemble is for runs on strings"),
        (["--text", "x"], "--text is for runs on strings"),
        ([], "no images; name files"),
    ):
        result = cli("predict", out, *words)
        assert result.exit_code == 2
        assert said in result.stderr
    assert "expected a folder" in cli("evaluate", out, "absent").stderr


def test_a_run_on_strings_needs_a_file(cli, tmp_path):
    result = cli("evaluate", tmp_path / "absent")
    assert result.exit_code == 2
    assert "no test pairs; give a file" in result.stderr


def test_digits_are_there(cli, tmp_path):
    result = cli("train", "--task", "classify", "digits", "--out", tmp_path / "run", *TINY, "epochs=1")
    assert result.exit_code == 0, result.output
    assert "10 classes" in result.output
