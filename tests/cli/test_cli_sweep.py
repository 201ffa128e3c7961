"""``thalweg sweep`` from a terminal: files, words, errors, lines and tables, Ctrl-C."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

SPACE = "sweep.space.learning_rate=[0.01, 0.001]"


@pytest.fixture
def config(pairs: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    raw = {
        "data": {"train": str(pairs)},
        "model": {"hidden": 4, "embedding": 4},
        "training": {"epochs": 1, "batch_size": 64, "device": "cpu", "metric": "loss"},
        "sweep": {"space": {"cell": ["gru", "lstm"]}, "method": "grid"},
    }
    path.write_text(yaml.safe_dump(raw))
    return path


def test_sweep_then_train(cli: Any, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    done = cli("sweep", config, "sweep.seeds=0,1", "--out", out, "--workers", 0)
    assert done.exit_code == 0, done.output
    assert "trials  2 settings x 2 seeds, grid, by loss" in done.stderr
    assert done.stderr.count("complete  loss") == 2
    assert "best    trial" in done.stdout
    assert f"config  {out / 'best.yaml'}" in done.stdout
    for name in ("best.yaml", "report.html", "trials.tsv", "sweep.json"):
        assert (out / name).is_file()
    trained = cli("train", out / "best.yaml", "--out", tmp_path / "run")
    assert trained.exit_code == 0, trained.output

    refused = cli("sweep", config, "--out", out)
    assert refused.exit_code == 2
    assert "holds a sweep already; resume it with --resume" in refused.stderr
    again = cli("sweep", "--resume", "--out", out, "--workers", 0)
    assert again.exit_code == 0, again.output
    assert "2 done before" in again.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.yaml"], "expected a config file, got no such file"),
        (["no-such-recipe"], "no-such-recipe"),
        (["a.yaml", "b.yaml"], "expected one config or recipe"),
        (["--resume"], "--resume needs the sweep to go on with"),
        (["--resume", "--out", "absent"], "expected a sweep to resume"),
        (["epochs=1"], "sweep.space: expected at least one key"),
        ([SPACE, "--metric", "acuracy"], "metric must be one that is measured"),
        ([SPACE, "sweep.method=gird"], "input should be 'grid', 'random', 'tpe' or 'halving', got 'gird'"),
        ([SPACE, "--engine", "dask"], "dask"),
        ([SPACE, "sweep.method=grid", "--gpus-per-trial", "0.5", "data.train=x.tsv"], "torch finds no GPU here"),
    ],
)
def test_mistakes(words: list[str], said: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = cli("sweep", *words)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert done.stderr.count("error:") == 1


def test_all_trials_failing(cli: Any, config: Path, tmp_path: Path) -> None:
    done = cli("sweep", config, "data.train=absent.tsv", "--out", tmp_path / "s", "--workers", 0)
    assert done.exit_code == 2
    assert "failed  2 of 2" in done.stdout
    assert "absent.tsv" in done.stdout
    assert "no trial was completed" in done.stderr


def test_missing_packages_are_named(cli: Any, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, words in (("ray", ["--engine", "ray"]), ("optuna", [])):
        monkeypatch.setitem(sys.modules, package, None)
        done = cli("sweep", config, "--out", tmp_path / package, *words)
        assert done.exit_code == 2
        assert f"pip install {package}" in done.stderr


def test_table_on_a_terminal(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from thalweg.cli import sweep as module
    from thalweg.tasks.config import read_config
    from thalweg.tasks.sweeping import plan_sweep, run_sweep

    written = io.StringIO()
    screen = Console(file=written, force_terminal=True, width=120, height=20, color_system=None)
    monkeypatch.setattr(module, "console", lambda **options: screen)
    plan = plan_sweep(read_config(config), ["sweep.space.hidden=[4, -1]"])
    with module.SweepDisplay() as display:
        run_sweep(plan, tmp_path / "s", workers=0, listener=display)
        screen.print(display._render())
    last = written.getvalue()[-1600:]
    for words in ("best", "failed", "cell", "hidden", "1/1", "2 complete, 2 failed of 4 settings"):
        assert words in last
    assert "must be at least 1" in written.getvalue()


def test_ctrl_c_leaves_a_sweep_that_goes_on(cli: Any, start: Any, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    words = ["epochs=1000000", "checkpoint_every=1"]
    process = start("sweep", config, *words, "--out", out, "--workers", 1, stdout=subprocess.PIPE)
    last = out / "trials" / "000" / "seed-0" / "last.safetensors"
    until = time.monotonic() + 120
    while not last.exists():
        assert process.poll() is None, f"ended too early: {process.communicate()}"
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, notes = process.communicate(timeout=120)
    assert process.returncode == 130, notes
    assert f"thalweg sweep --resume --out {out}" in notes
    assert "Traceback" not in notes
    assert '"interrupted"' in (last.parent / "log.jsonl").read_text(), "asked, not killed"
    assert (out / "report.html").exists()
