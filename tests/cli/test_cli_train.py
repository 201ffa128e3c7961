"""``thalweg train``: what it says, what it takes, what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from thalweg.cli.train import default_out, split_words
from thalweg.errors import ConfigError


def test_prints_guesses_progress_and_next_commands(
    cli: Any, pairs: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = cli("train", "--data", pairs, "--dev", pairs, "--out", run, *tiny, "epochs=2")
    assert done.exit_code == 0, done.output
    notes = done.stderr
    assert "60 pairs, " in notes
    assert "source  characters, NFC, 10 symbols (guessed; source_symbols=... sets them)" in notes
    assert "target  characters, NFC, 10 symbols" in notes
    epochs = [line for line in notes.splitlines() if line.startswith("epoch ")]
    assert [line.split()[1] for line in epochs] == ["1/2", "2/2"]
    assert all("pairs/s" in line and "CER" in line for line in epochs)
    assert " left" in epochs[0]
    assert f"thalweg evaluate {run} test.tsv" in notes
    assert f"thalweg predict {run}" in notes
    assert done.stdout.startswith("best    epoch ")
    assert f"model   {run / 'model.safetensors'}" in done.stdout
    assert f"report  {run / 'report.html'}" in done.stdout
    assert (run / "report.html").is_file()
    assert "\x1b" not in done.output


def test_set_symbols_are_not_called_guessed(cli: Any, pairs: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    done = cli("train", pairs, "--out", tmp_path / "run", *tiny, "target_symbols=graphemes")
    assert "target  graphemes, NFC, 10 symbols\n" in done.stderr


def test_default_out(cli: Any, pairs: Path, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pairs.parent)
    done = cli("train", "--data", pairs.name, "--model", "gru", *tiny)
    assert done.exit_code == 0, done.output
    config = yaml.safe_load(Path("runs/pairs-gru/config.yaml").read_text())
    assert (config["model"]["cell"], config["model"]["attention"]) == ("gru", "none")
    assert default_out("cmudict:train", "lstm") == Path("runs/cmudict-train-lstm")
    assert default_out("g2p/high/eng_us:dev", "lstm") == Path("runs/g2p-high-eng_us-dev-lstm")


def test_standard_input(cli: Any, pairs: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = cli("train", "--data", "-", "--dev", pairs, "--out", run, *tiny, stdin=pairs.read_bytes())
    assert done.exit_code == 0, done.output
    assert "<stdin>: 60 pairs" in done.stderr


def test_preset_then_file_then_options_then_words(cli: Any, pairs: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"data: {{train: {pairs}}}\nmodel: {{attention: dot}}\ntraining: {{seed: 1, epochs: 9}}\n")
    run = tmp_path / "run"
    words = [*tiny, "learning_rate=1e-3"]
    done = cli("train", file, "--model", "gru", "--seed", 7, "--out", run, *words)
    assert done.exit_code == 0, done.output
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["cell"] == "gru"  # preset
    assert config["model"]["attention"] == "dot"  # file over preset
    assert config["training"]["seed"] == 7  # option over file
    assert config["training"]["epochs"] == 1  # word over file
    assert config["training"]["learning_rate"] == 1e-3
    again = cli("train", run / "config.yaml", "--out", tmp_path / "again")
    assert again.exit_code == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "again"))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_words() -> None:
    assert split_words(["hidden=8", "c.yml"]) == (Path("c.yml"), ["hidden=8"])
    assert split_words(["data.train=x.yaml"]) == (None, ["data.train=x.yaml"])
    with pytest.raises(ConfigError, match="expected one config file, got 2"):
        split_words(["a.yaml", "b.yaml"])


BAD = {
    "nothing": ([], "no training data; give `--data train.tsv`"),
    "missing file": (["--data", "absent.tsv"], "absent.tsv: expected a text file, got no such file"),
    "missing column": (["--data", "column.tsv"], "column.tsv:2: expected 2 columns"),
    "missing dev": (["--data", "pairs.tsv", "--dev", "absent.tsv"], "absent.tsv: expected a text file"),
    "misspelt key": (["--data", "pairs.tsv", "hiden=8"], "`hiden` is not a setting; did you mean `hidden`?"),
    "misspelt section": (["--data", "pairs.tsv", "trainin.epochs=8"], "did you mean `training`?"),
    "bad type": (
        ["--data", "pairs.tsv", "epochs=many"],
        "`training.epochs`: input should be a valid integer",
    ),
    "bad range": (["--data", "pairs.tsv", "dropout=2"], "model.dropout must be in [0, 1), got 2"),
    "bad choice": (["--data", "pairs.tsv", "attention=dott"], "input should be 'none', 'dot', 'general'"),
    "no equals": (
        ["--data", "pairs.tsv", "hidden"],
        "expected pairs in one place, got hidden, pairs.tsv; settings are `key=value`",
    ),
    "preset": (["--data", "pairs.tsv", "--model", "lstm-atention"], "did you mean `lstm-attention`?"),
    "device": (["--data", "pairs.tsv", "--device", "abacus"], "'auto', 'cpu', 'cuda' or 'mps', got 'abacus'"),
    "neither data nor setting": (["hidden"], "hidden: expected a text file, got no such file"),
    "data of another task": (["pairs.npy"], "expected pairs, got `pairs.npy`; for rows add --task density"),
    "absent config": (["absent.yaml"], "absent.yaml: expected a config file, got no such file"),
    "broken config": (["broken.yaml"], "broken.yaml:2: expected YAML"),
    "empty config": (["empty.yaml"], "empty.yaml: expected settings, got an empty file"),
    "section is a word": (["word.yaml", "epochs=3"], "word.yaml: expected settings as `key: value` lines"),
    "unknown key in config": (
        ["key.yaml"],
        "key.yaml: `model.hiddn` is not a setting; did you mean `hidden`?",
    ),
    "resume nothing": (["--resume", "--out", "nowhere"], "nowhere: expected a run to resume"),
    "resume without out": (["--resume"], "--resume needs the run to go on with; give `--out RUN`"),
    "out is a file": (["--data", "pairs.tsv", "--out", "pairs.tsv"], "expected a run directory, got a file"),
    "out in a file": (["--data", "pairs.tsv", "--out", "pairs.tsv/run"], "pairs.tsv"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_line(cli: Any, pairs: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(pairs.parent)
    Path("column.tsv").write_text("a\tb\nc\n")
    Path("broken.yaml").write_text("model: {a: 1}\n  b: [\n")
    Path("empty.yaml").write_text("")
    Path("word.yaml").write_text("training: fast\n")
    Path("key.yaml").write_text("data: {train: pairs.tsv}\nmodel: {hiddn: 8}\n")
    before = sorted(os.listdir())
    args, said = BAD[case]
    done = cli("train", *args)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert said in done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("run ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert sorted(os.listdir()) == before, "a refused training leaves nothing behind"


def test_empty_section_takes_words(cli: Any, pairs: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"data: {{train: {pairs}}}\ntraining:\nmodel:\n")
    assert cli("train", file, "--out", tmp_path / "run", *tiny).exit_code == 0


def test_existing_run_is_not_overwritten(cli: Any, trained: Path, pairs: Path, tiny: tuple[str, ...]) -> None:
    before = (trained / "model.safetensors").read_bytes()
    done = cli("train", "--data", pairs, "--out", trained, *tiny)
    assert done.exit_code == 2
    assert "holds a run already; resume it with --resume or choose another --out" in done.stderr
    assert (trained / "model.safetensors").read_bytes() == before


def _events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_resume_of_a_finished_run(cli: Any, run: Path) -> None:
    again = cli("train", "--resume", "--out", run)
    assert again.exit_code == 0, again.output
    assert [event["event"] for event in _events(run)] == ["start", "epoch", "start", "end"]
    more = cli("train", "--resume", "--out", run, "epochs=3")
    assert more.exit_code == 0, more.output
    assert [event["epoch"] for event in _events(run) if event["event"] == "epoch"] == [1, 2, 3]
    assert yaml.safe_load((run / "config.yaml").read_text())["training"]["epochs"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hidden=9"], "expected model.hidden=8 as before, got 9"),
        (["batch_size=3"], "expected training.batch_size=16 as before, got 3"),
        (["data.train=OTHER"], "expected the source and target symbols it was trained on, got others"),
        (["--model", "gru"], "--model cannot change a run that is resumed"),
    ],
)
def test_resume_refuses_another_model_or_data(cli: Any, run: Path, pairs: Path, words: list[str], said: str) -> None:
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    # As many symbols as before, but others: the shapes fit, the meaning does not.
    other = pairs.with_name("other.tsv")
    other.write_text(pairs.read_text().translate(str.maketrans("abcdef", "ghijkl")))
    done = cli("train", "--resume", "--out", run, *(word.replace("OTHER", str(other)) for word in words))
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before


@pytest.mark.parametrize("damage", ["truncated", "foreign", "newer", "model"])
def test_resume_from_a_damaged_checkpoint(cli: Any, run: Path, damage: str) -> None:
    last = run / "last.safetensors"
    if damage == "truncated":
        last.write_bytes(last.read_bytes()[:-100])
    elif damage == "foreign":
        save_file({"weight": torch.ones(2)}, last)
    elif damage == "newer":
        save_file({"weight": torch.ones(2)}, last, metadata={"kind": "thalweg", "format": "99", "meta": "{}"})
    else:
        last.write_bytes((run / "model.safetensors").read_bytes())
    done = cli("train", "--resume", "--out", run)
    said = {
        "truncated": "expected a whole safetensors file",
        "foreign": "expected a checkpoint, got a safetensors file of another kind",
        "newer": "upgrade thalweg",
        "model": "expected a transduction run, got another kind",
    }
    assert done.exit_code == 2, done.output
    assert said[damage] in done.stderr
