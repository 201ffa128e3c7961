"""What is shown while something runs."""

from __future__ import annotations

from typing import Any

import pytest

from thalweg.cli.output import duration, show_table
from thalweg.cli.progress import Display, metrics_line

START: dict[str, Any] = {
    "event": "start",
    "device": "cpu",
    "parameters": 1234,
    "lines": ["train   t.tsv: 60 pairs", "target  spaced, NFC, 11 symbols"],
    "items": 60,
    "unit": "pairs",
    "names": {"cer": "PER"},
    "epochs": 10,
    "resumed": True,
}
EPOCH: dict[str, Any] = {
    "event": "epoch",
    "epoch": 2,
    "loss": 1.5,
    "dev": {"loss": 1.25, "cer": 0.5, "bleu": 12.3456},
    "pairs_per_second": 2100.4,
    "seconds": 30.0,
    "best": True,
}


def test_log_has_one_plain_line_per_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as display:
        for event in (
            START,
            {"event": "step", "epoch": 2, "batch": 1, "batches": 4},
            EPOCH,
            {"event": "new"},
            {**START, "lines": [], "frozen": 9000, "resumed": False},
        ):
            display(event)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "train   t.tsv: 60 pairs",
        "target  spaced, NFC, 11 symbols",
        "model   1,234 parameters on cpu, resumed",
        "epoch  2/10  loss 1.5000  dev loss 1.2500  PER 0.5000  BLEU 12.35  2,100 pairs/s"
        "  0:30 so far  2:00 left  best",
        "model   1,234 + 9,000 frozen parameters on cpu",
    ]
    assert display.names


def test_terminal_has_a_bar_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take any stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    clock = iter(range(10_000))
    with Display() as display:
        assert display._bar is not None
        display._bar.get_time = lambda: float(next(clock))
        display(START)
        for batch in range(1, 5):
            display({"event": "step", "epoch": 2, "batch": batch, "batches": 40})
            display._moved = 0.0
        display._bar.refresh()
        display({"event": "predicted", "done": 256, "of": 1000})
        display._bar.refresh()
    shown = capsys.readouterr().err
    assert "epoch 2/10" in shown
    assert "pairs/s, " in shown
    assert " left" in shown
    assert "predicting" in shown


def test_metrics_and_durations() -> None:
    assert metrics_line({"accuracy": 0.5, "wer@3": 0.25}) == "accuracy 0.5000  wer@3 0.2500"
    assert [duration(s) for s in (0, 59.6, 3599.4, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]


def test_table_takes_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show_table([{"name": "[bold]x[/bold]", "n": "1"}], right=["n"])
    show_table([])
    assert "[bold]x[/bold]" in capsys.readouterr().out
