"""Several runs on one file: the figures follow from the written answers, every task can, and mistakes are one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from toy_task import toy_config, write_pairs

import thalweg
from oracles.comparison import indices, paired
from oracles.metrics import error_rate
from thalweg.errors import CheckpointError, ConfigError, DataError
from thalweg.tasks import Comparison, compare, registry, train


@pytest.fixture
def runs(halfway: Path, learnt: Path, tmp_path: Path) -> tuple[Path, Path]:
    return shutil.copytree(halfway, tmp_path / "halfway"), shutil.copytree(learnt, tmp_path / "learnt")


def answers(found: Comparison) -> list[list[str]]:
    lines = (found.directory / "answers.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines]


def test_figures_follow_from_the_answers(runs, toy_files):
    found = thalweg.compare(runs, str(toy_files[1]), k=2, device="cpu")
    assert found.directory == runs[0] / "evaluation" / "test" / "comparison"
    assert found.names == ("halfway", "learnt")
    head, *rows = answers(found)
    assert head == ["source", "references", "halfway", "learnt"]
    assert [row[:2] for row in rows] == [line.split("\t") for line in toy_files[1].read_text().splitlines()]
    items = [[(tuple(row[place]), [tuple(row[1])]) for row in rows] for place in (2, 3)]
    draws = indices(56, 1000, 0)
    oracles = {
        "accuracy": lambda each: sum(text in gold for text, gold in each) / len(each),
        "cer": lambda each: error_rate([text for text, _ in each], [gold for _, gold in each]),
    }
    for key, score in oracles.items():
        mine = found.differences[0][key]
        assert (mine.value, mine.low, mine.high, mine.p) == pytest.approx(paired(score, *items, draws), abs=1e-9)
        assert found.evaluations[1].scores[key].value == pytest.approx(score(items[1]))
        assert mine.better
    assert found.differences[0].keys() == found.evaluations[0].scores.keys()

    again = thalweg.compare(runs, str(toy_files[1]), k=2, device="cpu")
    assert again.differences == found.differences
    back = thalweg.compare(runs[::-1], str(toy_files[1]), k=2, device="cpu")
    for key, mine in found.differences[0].items():
        other = back.differences[0][key]
        assert (other.value, other.low, other.high) == pytest.approx((-mine.value, -mine.high, -mine.low))
        assert other.p == mine.p

    facts = json.loads((found.directory / "comparison.json").read_text(encoding="utf-8"))
    assert facts == found.to_json()
    assert [model["run"] for model in facts["models"]] == [str(run) for run in runs]
    assert facts["models"][1]["differences"]["cer"]["value"] == found.differences[0]["cer"].value
    assert facts["test"]["correction"] is None
    page = found.page.read_text(encoding="utf-8")
    assert page.count("<mark>") > 0
    assert f"{found.differences[0]['cer'].value:+.4f}" in page
    assert f"thalweg evaluate {runs[0]} {runs[1]} {toy_files[1]} --search beam --width 5 --k 2" in page
    assert all(file.is_file() for file in found.files())


def test_three_runs_are_corrected(runs, toy_files, tmp_path):
    third = shutil.copytree(runs[0], tmp_path / "deep" / "halfway")
    found = compare([*runs, third], str(toy_files[1]), device="cpu")
    assert found.names == (f"{tmp_path.name}/halfway", f"{tmp_path.name}/learnt", "deep/halfway")
    learnt, same = (each["accuracy"] for each in found.differences)
    assert learnt.corrected == pytest.approx(2 * learnt.p)
    assert (same.value, same.p, same.corrected) == (0, 1, 1)
    row = next(row for row in found.tables()[0].rows if row["run"].endswith("learnt"))
    assert row["p (Holm)"] == f"{learnt.corrected:.4f}"
    assert found.to_json()["test"]["correction"] == "holm"


def test_scores_of_different_units_are_left_out(tmp_path):
    pairs = [("ab a", "BA A"), ("ba b", "AB B"), ("a b a", "A B A"), ("bb aa", "BB AA")] * 5
    path = write_pairs(tmp_path / "sentences.tsv", pairs)
    for kind in ("characters", "spaced"):
        symbols = {"source_symbols": "characters", "target_symbols": kind}
        train(toy_config(path, dev=path, epochs=1, data=symbols), tmp_path / kind)
    found = compare([tmp_path / "characters", tmp_path / "spaced"], str(path), device="cpu")
    assert found.evaluations[0].scores.keys() >= {"chrf", "bleu-13a"}
    assert found.differences[0].keys() == {"accuracy", "wer@3", "wer@5"}
    assert [line.split(" is not")[0] for line in found.left_out] == ["CER", "WER", "BLEU", "BLEU (13a)", "chrF"]
    assert "counts characters, NFC in" in found.left_out[0]
    assert "items are few" in "\n".join(found.remarks())


def test_subwords_and_characters_are_compared_by_characters(toy_files, tmp_path):
    for kind in ("characters", "subwords"):
        data = {"source_symbols": "characters", "target_symbols": kind, "vocabulary": 20}
        train(toy_config(toy_files[0], dev=toy_files[1], epochs=1, data=data), tmp_path / kind)
    found = compare([tmp_path / "characters", tmp_path / "subwords"], str(toy_files[1]), device="cpu")
    assert found.differences[0].keys() == found.evaluations[0].scores.keys()
    assert found.evaluations[1].scores.keys() - found.evaluations[0].scores.keys() == {"chrf"}
    assert found.left_out[0].startswith("chrF is not compared, since it counts nothing in ")


def test_mistakes(runs, toy_files, tmp_path, monkeypatch):
    data = str(toy_files[1])
    with pytest.raises(ConfigError, match="needs two runs or more, got 1"):
        compare(runs[:1], data)
    with pytest.raises(ConfigError, match="expected each run once, got it twice"):
        compare([runs[0], runs[1], runs[0] / "model.safetensors"], data)
    with pytest.raises(CheckpointError, match=r"absent/model\.safetensors: expected a checkpoint, got no such file"):
        compare([runs[0], tmp_path / "absent"], data)
    with pytest.raises(ConfigError, match="standard input can be read once"):
        compare(runs, "-")
    with pytest.raises(DataError, match="no such file"):
        compare(runs, str(tmp_path / "absent.tsv"), device="cpu")
    assert not (runs[0] / "evaluation").exists()


def density(path: Path, out: Path, components: int, rows: int = 60) -> Path:
    path.write_text("x,y\n" + "".join(f"{n % 7},{n % 5}\n" for n in range(rows)))
    settings = {"task": "density", "data": {"path": str(path)}, "training": {"epochs": 3, "device": "cpu"}}
    train({**settings, "model": {"components": components}}, out)
    return out


def test_densities_and_data_that_differ(runs, toy_files, tmp_path):
    table = tmp_path / "points.csv"
    one, three = (density(table, tmp_path / str(count), count) for count in (1, 3))
    found = compare([one, three], str(table))
    assert found.differences[0].keys() == {"nll", "unusual"}
    values = [[-rating["log_density"] for rating in predictions(each)] for each in found.evaluations]
    mine = found.differences[0]["nll"]
    expected = paired(lambda each: sum(each) / len(each), *values, indices(60, 1000, 0))
    assert (mine.value, mine.low, mine.high, mine.p) == pytest.approx(expected, abs=1e-9)
    assert "reference" not in found.page.read_text(encoding="utf-8"), "nothing is right or wrong"

    with pytest.raises(ConfigError, match=r"expected a run of the task transduce as .* is, got one of density"):
        compare([runs[0], one], str(toy_files[1]))
    fewer = density(tmp_path / "fewer.csv", tmp_path / "59", 1, rows=59)
    with pytest.raises(DataError, match=r"on the same items, got 60 of them for .* and 59 for .*; name the data"):
        compare([one, fewer])
    moved = density(tmp_path / "moved.csv", tmp_path / "moved", 1)
    with pytest.raises(DataError, match=r"got as item 1 `.*points.csv row 1.*` for .* and `.*moved.csv row 1"):
        compare([one, moved])


def predictions(evaluation) -> list[dict]:
    return [json.loads(line) for line in (evaluation.directory / "predictions.jsonl").read_text().splitlines()]


def test_images(tmp_path):
    quick = {"epochs": 1, "batch_size": 256, "device": "cpu", "threads": 1}
    for name, channels in (("thin", [4]), ("wide", [16])):
        model = {"channels": channels, "hidden": [], "dropout": 0.0}
        train({"task": "classify", "data": {"path": "digits"}, "model": model, "training": quick}, tmp_path / name)
    found = compare([tmp_path / "thin", tmp_path / "wide"], "test", device="cpu")
    rights = [[item["correct"] for item in predictions(each)] for each in found.evaluations]
    mine = found.differences[0]["accuracy"]
    expected = paired(lambda each: sum(each) / len(each), *rights, indices(len(rights[0]), 1000, 0))
    assert (mine.value, mine.low, mine.high, mine.p) == pytest.approx(expected, abs=1e-9)
    assert found.differences[0].keys() == found.evaluations[0].scores.keys()


def test_a_task_without_items_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    registry.register("line", "line_task:TASK")
    points = tmp_path / "points.tsv"
    points.write_text("".join(f"{x / 8}\t{x / 4 + 1}\n" for x in range(-8, 9)))
    for name in ("one", "two"):
        settings = {"task": "line", "data": {"path": str(points)}, "training": {"epochs": 1}}
        train({**settings, "model": "straight"}, tmp_path / name)
    with pytest.raises(ConfigError, match="runs of the task line cannot be compared item by item"):
        compare([tmp_path / "one", tmp_path / "two"], str(points))
