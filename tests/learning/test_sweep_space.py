"""What a sweep varies, and its settings."""

from __future__ import annotations

from typing import Any

import pytest

from thalweg.errors import ConfigError
from thalweg.sweeps.settings import SweepConfig
from thalweg.sweeps.space import Parameter, read_space


def one(values: Any) -> Parameter:
    return read_space({"key": values})[0]


def test_lists_hold_values_of_any_kind() -> None:
    values = [1, 0.5, "a", True, None, [32, 64]]
    assert one(values).points() == one({"choices": values}).points() == values
    stored = one(values).distribution().choices  # type: ignore[attr-defined]
    assert [Parameter.value(each) for each in stored] == values


@pytest.mark.parametrize(
    ("values", "points"),
    [
        ({"low": 1, "high": 4}, [1, 2, 3, 4]),
        ({"low": 1, "high": 8, "step": 3}, [1, 4, 7]),
        ({"low": 0, "high": 0.3, "step": 0.1}, [0.0, 0.1, 0.2, 0.3]),
        ({"low": "0.1", "high": 0.35, "step": "1e-1"}, [0.1, 0.2, 0.3]),
    ],
)
def test_points_of_ranges(values: dict[str, Any], points: list[float]) -> None:
    assert one(values).points() == points
    assert [type(point) for point in one(values).points()] == [type(point) for point in points]


@pytest.mark.parametrize("values", [{"low": 0.0, "high": 1.0}, {"low": 1, "high": 100, "log": True}])
def test_a_grid_needs_points(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a grid needs a list or a step"):
        one(values).points()


@pytest.mark.parametrize("values", [{"low": 1, "high": 9, "step": 3}, {"low": 0.0, "high": 1.0, "step": 0.3}])
def test_distributions_keep_to_steps(values: dict[str, Any]) -> None:
    parameter = one(values)
    found = parameter.distribution()
    assert found.high == parameter.points()[-1]  # type: ignore[attr-defined]
    assert found.step == values["step"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (5, "expected a list of values or {low, high}, got 5"),
        ([], "got an empty list"),
        ([1, 1], "every value once"),
        ({"low": 1}, "got no `high`"),
        ({"low": 2, "high": 1}, "expected low < high"),
        ({"low": 1, "hihg": 2}, "did you mean `high`"),
        ({"low": 0, "high": 1, "log": True}, "needs low > 0"),
        ({"low": 1, "high": 9, "log": True, "step": 2}, "`log` or `step`"),
        ({"low": 1, "high": 2, "step": 5}, "a step in"),
        ({"low": "a", "high": 2}, "`low` must be a number"),
        ({"low": float("nan"), "high": 2}, "`low` must be a number"),
        ({"low": True, "high": 2}, "`low` must be a number"),
        ({"low": 1, "high": 2, "log": "yes"}, "`log` must be true or false"),
        ({"choices": [1], "low": 2}, "either `choices` or"),
    ],
)
def test_mistakes_in_the_space(values: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.space\.key: ") as caught:
        one(values)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_many_points() -> None:
    with pytest.raises(ConfigError, match="1000 values at most, got 5001"):
        one({"low": 0, "high": 5000}).points()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "gird"}, "did you mean `grid`"),
        ({"seeds": (0, 0)}, "different numbers"),
        ({"seeds": ()}, "different numbers"),
        ({"metric": "acuracy"}, "metric must be one"),
        ({"reduction": 1}, r"sweep\.reduction must be at least 2"),
        ({"hours": float("nan")}, "must be 0 or more"),
        ({"method": "halving", "prune": "median"}, "prunes by halving"),
        ({"method": "grid", "trials": 1, "space": {"x": [1, 2]}}, "the grid has 2 settings, got 1"),
    ],
)
def test_mistakes_in_the_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SweepConfig(**settings)


def test_how_many_settings_and_what_prunes() -> None:
    assert SweepConfig(space={"x": [1, 2], "y": {"low": 1, "high": 3}}, method="grid").settings == 6
    assert SweepConfig().settings == 20
    assert SweepConfig(trials=3, prune="median").pruner == "median"
    assert SweepConfig(method="halving").pruner == "halving"
    # An unknown metric is fine where its direction is given.
    assert SweepConfig(metric="mine", direction="max").higher("mine")
