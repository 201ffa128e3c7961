"""The benchmarks' shared main: results are laid out as written, wrong answers are refused, parts are merged."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as listing  # noqa: E402
from benchmarks.harness import main as harness  # noqa: E402
from benchmarks.harness.declaration import Benchmark, Facts, Run, WrongAnswerError, demand  # noqa: E402
from benchmarks.harness.process import alone  # noqa: E402
from benchmarks.harness.report import comparison, heading  # noqa: E402
from benchmarks.harness.timing import Job, Spread, rates_in_turn  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_report_lays_out_the_results_that_stand_beside_it(path: Path) -> None:
    benchmark, _ = harness.load(path.stem.removesuffix("-cpu").removesuffix("-gpu").replace("-", "_"))
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert harness.markdown(benchmark, facts) == path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_report_lays_out_any_part_by_itself(path: Path) -> None:
    benchmark, _ = harness.load(path.stem.removesuffix("-cpu").removesuffix("-gpu").replace("-", "_"))
    facts = json.loads(path.read_text(encoding="utf-8"))
    for part in benchmark.parts if len(benchmark.parts) > 1 else ():
        harness.markdown(
            benchmark, {key: fact for key, fact in facts.items() if key == part or key not in benchmark.parts}
        )


def test_results_belong_to_benchmarks_that_are_listed() -> None:
    measured = {path.stem.removesuffix("-cpu").removesuffix("-gpu").replace("-", "_") for path in RESULTS}
    assert measured <= set(listing.found())
    assert all(name in listing.overview() for name in measured)


@pytest.mark.parametrize("name", listing.found())
def test_help_tells_the_shared_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        harness.run(name, ["--help"])
    told = capsys.readouterr().out
    assert f"python -m benchmarks {name}" in told
    assert all(option in told for option in ("--threads", "--rounds", "--quick", "--write", "--render"))


def squares(run: Run, wrong: float) -> Facts:
    def check(answers: dict[str, float]) -> float:
        demand("square", abs(answers["ours"] - answers["peer"]), 0.5)
        return answers["ours"]

    jobs = [Job("ours", lambda: 9.0 + wrong), Job("peer", lambda: (time.sleep(1e-3), 9.0)[1])]
    compared = run.compare(jobs, check=check, over=lambda name: (name, "ours") if name == "peer" else None)
    assert compared.checked == 9.0
    return {"squares": [{"size": [3], **compared.to_json()}]}


def report(facts: Facts) -> list[str]:
    return heading(facts) + comparison(facts["squares"], ["n"], lambda cell: [str(cell["size"][0])])


def declared(monkeypatch: pytest.MonkeyPatch, folder: Path, wrong: float = 0.0) -> Path:
    def begin(run: Run) -> None:
        run.found({"peer": "1.0"}, ["another: left out, it is not here"])

    parts = {"squares": lambda run: squares(run, wrong), "other": lambda run: {"other": run.args.rounds}}
    benchmark = Benchmark(parts=parts, begin=begin, report=report, devices=("cpu",))
    monkeypatch.setattr(harness, "load", lambda name: (benchmark, "An example."))
    monkeypatch.setattr(harness, "RESULTS", folder)
    return folder / "example.json"


def test_a_run_writes_and_a_part_is_merged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = declared(monkeypatch, tmp_path)
    given = ["--threads", "1", "--write"]
    harness.run("example", ["--rounds", "2", *given])
    first = json.loads(path.read_text("utf-8"))
    assert first["one_run"]
    assert first["squares"][0]["ratios"]["peer"]["median"] > 1
    assert first["squares"][0]["jobs"]["ours"]["ms"]["repeats"] == 2
    assert "- another: left out" in path.with_suffix(".md").read_text("utf-8")
    harness.run("example", ["--rounds", "3", "--parts", "other", *given])
    again = json.loads(path.read_text("utf-8"))
    assert (again["squares"], again["other"], again["one_run"]) == (first["squares"], 3, False)
    path.with_suffix(".md").unlink()
    harness.run("example", ["--render"])
    assert "| 3 | " in path.with_suffix(".md").read_text("utf-8")


def test_a_wrong_answer_ends_the_run_unwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = declared(monkeypatch, tmp_path, wrong=1.0)
    with pytest.raises(SystemExit, match="nothing is reported: square"):
        harness.run("example", ["--threads", "1", "--rounds", "1", "--write"])
    assert not path.exists()


@pytest.mark.parametrize("given", [["--rounds", "0"], ["--budget", "0"], ["--quick", "--write"], ["--parts", "none"]])
def test_wrong_options_end_with_status_2(given: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    declared(monkeypatch, tmp_path)
    with pytest.raises(SystemExit, match="2"):
        harness.run("example", given)


def test_demand_refuses_nan() -> None:
    demand("equal", 0.0, 0.0)
    with pytest.raises(WrongAnswerError, match="nan"):
        demand("equal", float("nan"), 1.0)


def test_spreads_and_rates() -> None:
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)
    assert spread.over(Spread.of([1.5])) == {"median": 2.0, "low": 2.0 / 1.5, "high": 4.0 / 1.5}
    taken = rates_in_turn({"a": lambda: 2.0, "b": lambda: 8.0}, 4, budget=-1.0)
    assert taken == {"a": [2.0, 2.0], "b": [8.0, 8.0]}  # without a budget the first two rounds are all


def test_a_call_alone_runs_in_another_process() -> None:
    assert alone(os.getpid, threads=1) not in (os.getpid(), None)
    assert "left out" in alone(os.getpid, threads=1, timeout=1e-3)["note"]
