"""Plain counterparts of what a sweep computes: grids, means with errors, and halving told by hand."""

from __future__ import annotations

import math
from typing import Any


def grid(space: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination, the last key fastest."""
    found: list[dict[str, Any]] = [{}]
    for key, values in space.items():
        found = [{**known, key: value} for known in found for value in values]
    return found


def mean_and_error(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def halving_stops(curves: list[list[float]], *, least: int, reduction: int, higher: bool) -> list[int]:
    """The epoch after which each of the settings, trained one after the other, is stopped; 0 for those that are not.

    Asynchronous successive halving (Li et al. 2020): at epochs ``least * reduction ** rung`` a setting goes on where it
    is among the best ``1 / reduction`` of those that have been there, or the very best where these are too few.
    """
    rungs: dict[int, list[float]] = {}
    stops = []
    for curve in curves:
        rung, stop = 0, 0
        for epoch, value in enumerate(curve, 1):
            if epoch < least * reduction**rung:
                continue
            seen = rungs.setdefault(rung, [])
            seen.append(value)
            ordered = sorted(seen, reverse=higher)
            bar = ordered[max(1, len(ordered) // reduction) - 1]
            rung += 1
            if (value < bar if higher else value > bar) and epoch < len(curve):
                stop = epoch
                break
        stops.append(stop)
    return stops
