"""The experiment on large margins, made small: its settings, its figures, its pictures."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from sklearn.svm import SVC

from thalweg.diagnostics import kkt_report
from thalweg.errors import ConfigError
from thalweg.recipes import load_recipe, run_recipe
from thalweg.recipes.experiments import build_settings
from thalweg.recipes.experiments.large_margin import Panel, draw_boundary, half_circles, worked_examples
from thalweg.recipes.experiments.plots import canvas, to_png

SMALL = ["points=30", "prices=[1, 10]", "held_out=100", "grid=21"]


def test_settings_are_checked():
    for word, message in (("points=3", "10 or more"), ("prices=[]", "more than 0"), ("prices=[-1]", "more than 0")):
        with pytest.raises(ConfigError, match=message):
            build_settings("large-margin", {}, [word], where="recipe")


def test_recipe_from_end_to_end(tmp_path):
    lines: list[Any] = []
    result = run_recipe(load_recipe("large-margin"), tmp_path, seeds=2, overrides=SMALL, listener=lines.append)
    assert any("seed 1: error " in str(line) for line in lines)
    assert [row["price"] for row in result.table] == ["C = 1", "C = 10"]
    assert [path.name for path in result.pictures] == ["large-margin-worked.png", "large-margin-circles.png"]
    record = json.loads((tmp_path / "results-large-margin.json").read_text())
    titles = [table["title"] for table in record["tables"]]
    assert titles[2:4] == ["KKT certificate: exclusive or", "KKT certificate: hard margin"]
    for table in record["tables"][2:]:
        assert all(row["holds"] == "yes" for row in table["rows"])
    page = (tmp_path / "large-margin.html").read_text()
    assert "sum a t = 0" in page
    worked = record["figures"]["worked"]["hard margin"]
    assert worked["margin"] == pytest.approx(1 / math.sqrt(2))
    assert run_recipe(load_recipe("large-margin"), tmp_path, seeds=2, overrides=SMALL).table == result.table


def test_k1_and_k2_are_drawn_as_they_are_listed():
    xor, hard = worked_examples().values()
    assert np.abs(xor.machine.dual_coef_) == pytest.approx(np.full((1, 4), 1 / 8))
    assert hard.machine.coef_ == pytest.approx(np.array([[2.0, 2.0]]))
    assert hard.report.only.on_margin.tolist() == [0, 2, 4, 5]


def test_half_circles_are_drawn_from_the_seed():
    X, y = half_circles(41, 0.1, 3)
    assert X.shape == (41, 2)
    assert (y == -1).sum() == 21
    assert np.array_equal(half_circles(41, 0.1, 3)[0], X)
    assert not np.array_equal(half_circles(41, 0.1, 4)[0], X)


def test_any_machine_of_two_classes_can_be_drawn():
    X, y = half_circles(30, 0.1, 0)
    names = np.where(y > 0, "upper", "lower")
    machine = SVC(gamma=1.0).fit(X, names)
    figure, axes = canvas(1, 1, (2, 2))
    draw_boundary(axes[0, 0], Panel(machine, kkt_report(machine, X, names), X, names), grid=11)
    assert to_png(figure).startswith(b"\x89PNG")
    assert len(axes[0, 0].collections) == 1 + 2 + 2  # contours, points of two classes, two kinds of rings
