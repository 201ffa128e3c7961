"""The page of a sweep: the best setting, what mattered, every trial and every curve, in one self-contained file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.sweeps.loop import run_key
from thalweg.sweeps.store import Store, Trial
from thalweg.tasks.report.page import bar, chart_card, command_lines, fact_list, sectioned, tile, write_page
from thalweg.tasks.report.run import read_log
from thalweg.tasks.report.sweep_plots import Axis, Dot, axis_of, curves_svg, parallel_svg, shown, slice_svg
from thalweg.tasks.report.text import as_number, duration, escape, foreign, note
from thalweg.tasks.sweep_files import best_yaml

if TYPE_CHECKING:
    from thalweg.tasks.sweeping import SweepPlan


MARKS = {"complete": "ok", "pruned": "cut", "failed": "bad", "running": "muted"}
# Rows of the table that are open at once.
SHOWN = 30


@dataclass(frozen=True)
class _Page:
    """All that the sections read."""

    place: Path
    plan: SweepPlan
    store: Store
    best: Trial | None
    dots: dict[int, Dot]
    axes: list[Axis]


def write_sweep_report(directory: Path, plan: SweepPlan, store: Store) -> Path:
    """Writes ``report.html`` into a sweep's directory and returns its path.

    Made of the record and of the runs' logs; it loads nothing from elsewhere and runs no script. About a second, for
    the charts.
    """
    best = store.best()
    dots = _dots(store, best)
    axes = [
        axis_of(p.key, [dot.values[p.key] for dot in dots.values()], log=p.log, listed=bool(p.choices) or p.whole)
        for p in plan.config.parameters
    ]
    axes.append(axis_of(plan.metric, [dot.value for dot in dots.values()]))
    page = _Page(directory, plan, store, best, dots, axes)
    return write_page(directory / "report.html", f"{directory.resolve().name}, sweep", _body(page))


def _dots(store: Store, best: Trial | None) -> dict[int, Dot]:
    """Trials that have a value: complete ones their mean, pruned ones what they had when they were stopped."""
    values: dict[int, float] = {}
    for trial in store.trials:
        value = trial.curve.get(trial.pruned_at, math.nan) if trial.state == "pruned" else trial.value
        if trial.state in ("complete", "pruned") and math.isfinite(value):
            values[trial.number] = value
    done = sorted(values[t.number] for t in store.trials if t.state == "complete" and t.number in values)
    found = {}
    for trial in store.trials:
        if trial.number in values:
            value = values[trial.number]
            below = sum(other < value for other in done) if store.higher else sum(other > value for other in done)
            kind = "best" if trial is best else trial.state
            found[trial.number] = Dot(trial.values, value, below / max(1, len(done) - 1), kind)
    return found


def _body(page: _Page) -> str:
    sections = [
        ("settings", "Settings", _parallel(page)),
        ("importance", "Importance", _importance(page)),
        ("curves", "Curves", _curves(page)),
        ("trials", "Trials", _table(page)),
        ("best", "Best config", _best(page)),
    ]
    return _header(page) + sectioned(sections)


def _header(page: _Page) -> str:
    plan, config, trials = page.plan, page.plan.config, page.store.trials
    counts = {state: sum(trial.state == state for trial in trials) for state in MARKS}
    tiles = []
    if page.best is not None:
        tiles.append((page.best.score, f"best {plan.metric}", f"trial {page.best.number}"))
        for key, value in list(page.best.values.items())[:3]:
            tiles.append((shown(value), key, "of the best trial"))
    others = ", ".join(f"{counts[state]} {state}" for state in ("pruned", "failed", "running") if counts[state])
    tiles.append((f"{counts['complete']} of {config.settings}", "settings complete", others or "none pruned or failed"))
    cells = "".join(tile(*words) for words in tiles)
    seconds = sum(float(run.get("seconds", 0.0)) for trial in trials for run in trial.runs.values())
    pruning = {"none": "none", "median": "worse than the median", "halving": f"one in {config.reduction} goes on"}
    facts = [
        ("Task", plan.task.name),
        ("Compared by", f"{plan.metric} on the dev data, {'higher' if plan.higher else 'lower'} is better"),
        ("Method", f"{config.method}, seed {config.seed}"),
        ("Seeds of training", ", ".join(map(str, config.seeds))),
        (
            "Pruning",
            pruning[config.pruner] + (f", from epoch {config.min_epochs} on" if config.pruner != "none" else ""),
        ),
        ("Training time", duration(seconds)),
    ]
    return (
        f'<header><p class="brand">Thalweg · sweep report</p><h1>{foreign(page.place.resolve().name)}</h1>'
        f'<div class="tiles">{cells}</div>{fact_list(facts)}</header>'
    )


def _parallel(page: _Page) -> str:
    if not page.dots:
        return note("No trial has a value yet: see the table for errors.")
    keys = '<span class="key best">best</span><span class="key first">complete, the better the stronger</span>'
    if any(dot.kind == "pruned" for dot in page.dots.values()):
        keys += '<span class="key" style="--key:var(--muted)">pruned, with its value when it was stopped</span>'
    svg = parallel_svg(list(page.dots.values()), page.axes, prefix="parallel-")
    whole = _alone(chart_card("Every trial a line", svg, keys))
    charts = "".join(
        chart_card(axis.title, slice_svg(list(page.dots.values()), axis, page.plan.metric, prefix=f"slice{place}-"))
        for place, axis in enumerate(page.axes[:-1])
    )
    return f'{whole}<h3>One key at a time</h3><div class="charts">{charts}</div>'


def _importance(page: _Page) -> str:
    shares = page.store.importances()
    if not shares:
        return note("Nothing to compare: two complete trials with different values are needed.")
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td class="number">{share:.0%}</td>'
        f'<td class="wide">{bar(share)}</td></tr>'
        for key, share in shares.items()
    )
    count = sum(trial.state == "complete" for trial in page.store.trials)
    about = f"Share of the variation of {page.plan.metric} between the {count} complete trials that each key explains "
    about += "(functional ANOVA over a random forest); with few trials, a hint at most."
    table = f'<table class="metrics"><tbody>{rows}</tbody></table>'
    return f'<div class="card"><p class="muted">{escape(about)}</p>{table}</div>'


def _curves(page: _Page) -> str:
    found = []
    for trial in page.store.trials:
        for seed in page.plan.config.seeds:
            points = _points(page.place / "trials" / run_key(trial, seed), page.plan.metric)
            if points:
                dot = page.dots.get(trial.number) or Dot(trial.values, math.nan, 0.0, "pruned")
                found.append((dot, points))
    if not found:
        return note("No run has finished an epoch yet.")
    svg = curves_svg(found, page.plan.metric, prefix="curves-")
    keys = '<span class="key best">best trial</span>'
    return _alone(chart_card(f"{page.plan.metric} on the dev data, {len(found)} runs", svg, keys))


def _alone(chart: str) -> str:
    """A chart as wide as the page."""
    return f'<div class="charts" style="grid-template-columns:1fr">{chart}</div>'


def _points(run: Path, metric: str) -> list[tuple[int, float]]:
    log = read_log(run / "log.jsonl")
    pairs = [(e["epoch"], as_number((e.get("dev") or {}).get(metric))) for e in (log.epochs if log else [])]
    return [(int(epoch), value) for epoch, value in pairs if value is not None]


def _table(page: _Page) -> str:
    if not page.store.trials:
        return note("No trial was begun.")
    sign = -1 if page.plan.higher else 1
    order = {"complete": 0, "running": 1, "pruned": 2, "failed": 3}

    def key(trial: Trial) -> tuple[Any, ...]:
        dot = page.dots.get(trial.number)
        return order[trial.state], math.inf if dot is None else sign * dot.value, trial.number

    trials = sorted(page.store.trials, key=key)
    keys = [parameter.key for parameter in page.plan.config.parameters]
    head = ["trial", "", page.plan.metric, *keys, "seeds", "best epoch", "time", "run"]
    table = _rows(page, head, trials[:SHOWN])
    if len(trials) > SHOWN:
        rest = _rows(page, head, trials[SHOWN:])
        table += f"<details><summary>{len(trials) - SHOWN} more</summary>{rest}</details>"
    return f'<div class="card scroll">{table}</div>'


def _rows(page: _Page, head: Sequence[str], trials: Sequence[Trial]) -> str:
    heading = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(_row(page, trial, len(head)) for trial in trials)
    return f"<table><thead><tr>{heading}</tr></thead><tbody>{body}</tbody></table>"


def _row(page: _Page, trial: Trial, columns: int) -> str:
    runs = trial.runs.values()
    score = trial.score
    if trial.state == "pruned":
        score = f"{page.dots[trial.number].value:.4f}" if trial.number in page.dots else ""
    epochs = ", ".join(f"{run['best_epoch']}/{run['epochs']}" for run in runs if "epochs" in run)
    if trial.state == "pruned":
        epochs = f"stopped after {trial.pruned_at}"
    seconds = duration(sum(float(run.get("seconds", 0.0)) for run in runs)) if runs else ""
    folder = f"trials/{run_key(trial, page.plan.config.seeds[0])}"
    state = "best" if trial is page.best else trial.state
    cells = [f"<b>{escape(score)}</b>" if trial is page.best else escape(score)]
    cells += [escape(shown(value)) for value in trial.values.values()]
    cells += [f"{len(trial.runs)}/{len(page.plan.config.seeds)}", escape(epochs), seconds, escape(folder)]
    row = f'<td class="number">{trial.number}</td><td class="{MARKS[trial.state]}">{state}</td>'
    row = f"<tr>{row}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    if trial.error:
        row += f'<tr><td></td><td colspan="{columns - 1}" class="bad">{foreign(trial.error)}</td></tr>'
    return row


def _best(page: _Page) -> str:
    if page.best is None:
        return note("No trial is complete, so there is no best one.")
    place, first = page.place.as_posix(), run_key(page.best, page.plan.config.seeds[0])
    lines = [
        ("Train it again", ["thalweg", "train", f"{place}/best.yaml", "--out", f"{place}/best"]),
        ("Use the run that the sweep has trained", ["thalweg", "evaluate", f"{place}/trials/{first}", "DATA"]),
        ("Go on with more settings", ["thalweg", "sweep", "--resume", "--out", place, "sweep.trials=100"]),
    ]
    if page.plan.config.method == "grid":
        lines.pop()
    text = f"<pre>{escape(best_yaml(page.plan, page.best))}</pre>"
    config = f'<details class="card"><summary>best.yaml</summary>{text}</details>'
    return command_lines(lines) + config
