"""A density from a table, by the command line and from Python: three families, resumed, with gaps, refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import thalweg
from thalweg.data.tables import Table, read_table
from thalweg.learning.checkpoint import load_checkpoint
from thalweg.tasks.registry import apply_overrides, build_config

FAMILIES = {
    "mixture": ["components=2"],
    "hmm": ["states=2", "covariance=full"],
    "vae": ["hidden=16", "learning_rate=0.01"],
}


def cli(*words: object) -> Result:
    from thalweg.cli.main import app

    return CliRunner().invoke(app, [str(word) for word in words], env={"NO_COLOR": "1"})


def done(*words: object) -> str:
    result = cli(*words)
    assert result.exit_code == 0, result.output + str(result.stderr)
    return result.stdout


def refused(*words: object) -> str:
    result = cli(*words)
    told = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert (result.exit_code, len(told)) == (2, 1), result.stderr
    assert "Traceback" not in result.stderr
    return told[0]


def points(seed: int = 0) -> np.ndarray:
    """Two clouds of different widths, and one point far from both."""
    rng = np.random.default_rng(seed)
    clouds = [rng.normal([0, 100], [1, 10], (150, 2)), rng.normal([8, 300], [0.5, 20], (100, 2))]
    return np.concatenate([*clouds, [[40.0, -500.0]]])


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "points.csv"
    path.write_text("x,y\n" + "".join(f"{x!r},{y!r}\n" for x, y in points().tolist()))
    return path


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every sequence spends ten steps here and five there."""
    path, rng = tmp_path_factory.mktemp("sequences") / "steps.csv", np.random.default_rng(0)
    lines = ["who,x,y"]
    for who in range(12):
        for step in range(15):
            x, y = rng.normal([0, 0] if step < 10 else [6, 3], 0.5)
            lines.append(f"s{who},{float(x)!r},{float(y)!r}")
    path.write_text("\n".join(lines) + "\n")
    return path


def words(family: str, table: Path, sequences: Path, out: Path) -> list[object]:
    data = [sequences, "sequence=who"] if family == "hmm" else [table]
    return ["train", "--task", "density", *data, "--model", family, "--out", out, *FAMILIES[family], "device=cpu"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_from_end_to_end(tmp_path, table, sequences, family):
    out, data = tmp_path / "run", sequences if family == "hmm" else table
    said = done(*words(family, table, sequences, out), "epochs=4")
    assert f"report  {out / 'report.html'}" in said
    found = json.loads(done("evaluate", out, data, "--json"))
    lines = done("predict", out, data, "--format", "jsonl", "--k", 2).splitlines()
    ratings = [json.loads(line) for line in lines]
    assert len(ratings) == found["items"] == (12 if family == "hmm" else 251)
    assert found["scores"]["nll"]["value"] == pytest.approx(-np.mean([each["log_density"] for each in ratings]))
    assert all(0 <= each["rank"] <= 1 for each in ratings)
    if family == "vae":
        assert not ratings[0]["answers"]
    else:
        assert sum(part["probability"] for part in ratings[0]["answers"]) == pytest.approx(1)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Least usual" in page
    assert "Log density of each item" in page
    assert "trainable parameters" in done("show", out)
    loaded = thalweg.load(out, device="cpu")
    again = [rating.to_json() for rating in loaded.predict(data, k=2, sequence="who" if family == "hmm" else "")]
    assert again == ratings


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, table, sequences, family):
    settings = {"task": "density", "model": family, "data": {"path": str(table)}}
    settings["data"] |= {"path": str(sequences), "sequence": "who"} if family == "hmm" else {}
    for out, epochs in ((tmp_path / "whole", [5]), (tmp_path / "cut", [2, 5])):
        for count in epochs:
            config = build_config(apply_overrides(settings, [*FAMILIES[family], f"epochs={count}", "patience=0"]))
            thalweg.train(config, out, resume=count != epochs[0])
    whole, cut = (load_checkpoint(tmp_path / name / "last.safetensors").tensors for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(np.array_equal(whole[key].numpy(), cut[key].numpy()) for key in whole)
    assert "expected the training rows it was begun with" in refused(
        *words(family, table, sequences, tmp_path / "cut"), "held_out=0.3", "--resume"
    )


def test_densities_are_those_of_the_file_s_units_and_the_odd_one_is_told(tmp_path, table):
    out = tmp_path / "run"
    done("train", "--task", "density", table, "--out", out, "components=2", "epochs=20", "device=cpu")
    model = thalweg.load(out, device="cpu")
    ratings = list(model.predict(table))
    odd = min(ratings, key=lambda rating: rating.log_density)
    assert odd.source == "points.csv row 251"
    assert odd.rank == 0
    # p integrates to one over the plane, in the units of the file.
    x, y = np.linspace(-10, 60, 281), np.linspace(-700, 600, 521)
    grid = np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 2)
    total = np.exp(model.log_densities(Table("grid", grid, ("x", "y")))).sum() * (x[1] - x[0]) * (y[1] - y[0])
    assert total == pytest.approx(1, abs=0.02)


def test_missing_numbers(tmp_path, table):
    text = table.read_text().splitlines()
    gaps = tmp_path / "gaps.csv"
    gaps.write_text("\n".join(line.split(",")[0] + "," if n % 7 == 3 else line for n, line in enumerate(text)) + "\n")
    assert read_table(gaps).missing == 36
    done("train", "--task", "density", gaps, "--out", tmp_path / "run", "components=2", "epochs=3", "device=cpu")
    found = [json.loads(line) for line in done("predict", tmp_path / "run", gaps, "--format", "jsonl").splitlines()]
    assert np.isfinite([each["log_density"] for each in found]).all()
    said = refused("train", "--task", "density", gaps, "--model", "vae", "--out", tmp_path / "vae")
    assert "numbers, got" in said or "missing" in said
    many = ["--model", "hmm", "states=2", "epochs=2", "covariance=full", "device=cpu"]
    done("train", "--task", "density", gaps, "--out", tmp_path / "hmm", *many)


@pytest.mark.parametrize(
    ("content", "more", "told"),
    [
        ("", (), "expected rows of numbers, got an empty file"),
        ("a,b\n1,x\n", (), ":2: expected a number in column 2, got `x`"),
        ("1,2\n3,4\n", (), "expected three rows or more, got 2"),
        ("1,2\n3,4\n5,6\n7,8\n", ("components=30",), "at least 30 rows to learn from for components=30, got 3 beside"),
        ("1,2\n3,4\n5,6\n7,8\n", ("--model", "hmm", "states=9"), "at least 9 rows to learn from for states=9, got 3"),
        ("1,2\n" * 9, (), "x.csv: expected rows that differ, got one distinct point 8 times"),
        ("1,2\n" * 9, ("--model", "hmm"), "one distinct point 8 times"),
        ("1,2\n" * 9, ("--model", "vae"), "one distinct point 8 times"),
        ("1,2\n3,4\n5,6\n", ("components=0",), "model.components must be at least 1"),
        ("1,2\n3,4\n5,6\n", ("covarianc=full",), "did you mean `covariance`"),
        ("1,2\n3,4\n5,6\n", ("sequence=who",), "expected a column `who`"),
        ("a,b\n1,\n2,\n3,\n", (), "expected numbers in column `b`, got none"),
    ],
)
def test_bad_tables_are_one_line(tmp_path, content, more, told):
    path = tmp_path / "x.csv"
    path.write_text(content)
    assert told in refused("train", "--task", "density", path, "--out", tmp_path / "run", *more)


def test_other_columns_and_other_options_are_refused(tmp_path, table):
    out = tmp_path / "run"
    done("train", "--task", "density", table, "--out", out, "components=1", "epochs=1", "device=cpu")
    other = tmp_path / "other.csv"
    other.write_text("1,2,3\n")
    assert "expected 2 columns of numbers as in training, got 3" in refused("predict", out, other)
    assert "a density has no use for it" in refused("predict", out, table, "--width", 3)
    assert "no numbers; name CSV files" in refused("predict", out)
    assert "the name of an evaluation must be a plain name" in refused("evaluate", out, table, "--name", "../../x")
    assert f"{out}/evaluation/points/" in done("evaluate", out / "model.safetensors", table)


def test_a_table_without_sequences_is_one_to_an_hmm(tmp_path, table):
    out = tmp_path / "run"
    done("train", "--task", "density", table, "--model", "hmm", "states=2", "--out", out, "epochs=2", "device=cpu")
    (line,) = done("predict", out, table).splitlines()
    assert line.startswith("points.csv sequence 1\t")
