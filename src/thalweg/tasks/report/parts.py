"""The sections of a report, each a function from what was read to HTML; what is absent is said so."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.metrics.bootstrap import full_scale
from thalweg.tasks.report.page import chart_card, command_lines, fact_list, tile
from thalweg.tasks.report.part import ReportPart
from thalweg.tasks.report.plots import Curve, curve_svg
from thalweg.tasks.report.run import EvaluationRecord, RunRecord, TrainingLog
from thalweg.tasks.report.text import as_number, describe, duration, escape, figure, foreign, note

NAMES = {
    "accuracy": "Accuracy",
    "cer": "CER",
    "wer": "WER",
    "bleu": "BLEU",
    "bleu-13a": "BLEU (13a)",
    "chrf": "chrF",
    "loss": "Loss",
    "f1": "Macro F1",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "ECE",
}
REASONS = {"epochs": "all epochs done", "patience": "stopped early"}
TILES = ("accuracy", "cer", "wer", "bleu", "chrf", "f1", "nll", "ece")


def header(record: RunRecord) -> str:
    """Name, the key figures of the first evaluation, and the facts of the run.

    >>> from pathlib import Path
    >>> "demo</bdi></h1>" in header(RunRecord(path=Path("demo"), name="demo"))
    True
    """
    return (
        f'<header><p class="brand">Thalweg · run report</p><h1>{foreign(record.name)}</h1>'
        f"{_tiles(record)}{fact_list(_facts(record))}</header>"
    )


def _tiles(record: RunRecord) -> str:
    for evaluation in record.evaluations:
        scores = [score for score in _scores(evaluation) if score.key in TILES]
        tiles = [tile(score.show(score.value), score.name, score.interval) for score in scores]
        if tiles:
            where = f'<p class="muted">on {foreign(evaluation.name)}, with 95 % intervals</p>'
            return f'<div class="tiles">{"".join(tiles)}</div>{where}'
    return ""


def _facts(record: RunRecord) -> Iterable[tuple[str, str]]:
    log = record.log or TrainingLog()
    start = log.start
    yield "Training data", _file_fact(start.get("train")) or describe(record.config.get("data") or "")
    yield "Development data", _file_fact(start.get("dev"))
    yield from record.part.facts(start)
    model = record.config.get("model")
    yield "Model", describe((record.part.shape(model) if isinstance(model, dict) else model) or "")
    frozen = f" + {figure(start['frozen'])} frozen" if "frozen" in start else ""
    yield "Parameters", f"{figure(start['parameters'])}{frozen}" if "parameters" in start else ""
    yield "Device", describe(start.get("device") or "")
    yield "Training", _training_fact(log)
    yield "Thalweg version", describe(start.get("version") or "")


def _file_fact(value: object) -> str:
    if not isinstance(value, dict):
        return describe(value or "")
    counts = [f"{figure(count)} {unit}" for unit, count in value.items() if as_number(count) is not None]
    return " · ".join(part for part in (describe(value.get("path") or ""), *counts) if part)


def _training_fact(log: TrainingLog) -> str:
    if not log.epochs:
        return ""
    parts = [f"{log.epochs[-1]['epoch']} epochs" if log.epochs[-1]["epoch"] != 1 else "1 epoch"]
    if log.best_epoch is not None:
        parts.append(f"best epoch {log.best_epoch}")
    if log.resumed:
        parts.append("resumed before epoch " + ", ".join(str(epoch) for epoch in log.resumed))
    if log.end is None:
        parts.append("not finished: running or interrupted")
    else:
        parts.append(REASONS.get(str(log.end.get("reason")), describe(log.end.get("reason") or "finished")))
    # an epoch's seconds count from the start of training
    parts.append(duration((log.end or log.epochs[-1]).get("seconds")))
    return " · ".join(part for part in parts if part != "–")


@dataclass(frozen=True)
class _Score:
    """A metric as the page shows it; a score saved without an interval has `low` and `high` at its value."""

    key: str
    name: str
    value: float
    low: float
    high: float
    better: str
    signature: str = ""

    @property
    def full(self) -> float:
        """The end of the scale: BLEU and chrF run to 100, rates to 1 or more (a CER can be above 1)."""
        return max(full_scale(self.key), self.high)

    @property
    def interval(self) -> str:
        return f"{self.show(self.low)} – {self.show(self.high)}"

    def show(self, number: float) -> str:
        return f"{number:.{2 if full_scale(self.key) > 1 else 4}f}"


def _scores(evaluation: EvaluationRecord) -> list[_Score]:
    saved = (evaluation.metrics or {}).get("scores")
    scores = []
    for key, score in (saved if isinstance(saved, dict) else {}).items():
        value = as_number(score.get("value")) if isinstance(score, dict) else None
        if value is None:
            continue
        low, high = (as_number(score.get(end)) for end in ("low", "high"))
        higher = score.get("higher_is_better")
        better = "" if not isinstance(higher, bool) else "higher is better" if higher else "lower is better"
        name = _display_name(key, score.get("name"))
        ends = (value if low is None else low, value if high is None else high)
        scores.append(_Score(key, name, value, *ends, better, str(score.get("signature") or "")))
    return scores


def _display_name(key: str, name: object = None) -> str:
    if isinstance(name, str) and name and name != key:
        return name
    stem, at, k = key.partition("@")
    return f"{NAMES.get(stem, stem)}{at}{k}"


def results(record: RunRecord) -> str:
    """One table of metrics for each evaluation, intervals as figures and drawn.

    >>> from pathlib import Path
    >>> "not been evaluated" in results(RunRecord(path=Path("demo"), name="demo"))
    True
    """
    if record.evaluations:
        body = "".join(_metrics_card(evaluation, record.part) for evaluation in record.evaluations)
    else:
        body = note("This run has not been evaluated yet: see the command at the end.")
    return f'<section id="results"><h2>Results</h2>{body}</section>'


def _metrics_card(evaluation: EvaluationRecord, part: ReportPart) -> str:
    title = f"<h3>{foreign(evaluation.name)}</h3>"
    metrics = evaluation.metrics
    if metrics is None:
        return f'<div class="card">{title}{note("metrics.json is absent or cannot be read.")}</div>'
    scores = _scores(evaluation)
    if not scores:
        return f'<div class="card">{title}{note("metrics.json holds no scores.")}</div>'
    rows = "".join(
        f'<tr><th scope="row">{escape(score.name)}<span class="muted">{score.better}</span></th>'
        f'<td class="number"><b>{score.show(score.value)}</b></td>'
        f'<td class="number">{score.interval}</td><td class="wide">{_bar(score)}</td></tr>'
        for score in scores
    )
    hundreds = [score.name for score in scores if full_scale(score.key) > 1]
    scale = f"of 1, {', '.join(hundreds)} of 100" if hundreds else "of 1"
    scale += ", NLL in nats" if any(score.key == "nll" for score in scores) else ""
    return (
        f'<div class="card">{title}<p class="muted">{_conditions(metrics, part)}</p>{part.remarks(metrics)}'
        '<table class="metrics"><thead><tr><th>metric</th><th class="number">value</th>'
        '<th class="number">95 % interval</th>'
        f'<th class="wide">{escape(scale)}</th></tr></thead><tbody>{rows}</tbody></table>{_signatures(scores)}</div>'
    )


def _signatures(scores: Sequence[_Score]) -> str:
    """How sacrebleu gets the same figures."""
    said = "<br>".join(f"{escape(each.name)}: {escape(each.signature)}" for each in scores if each.signature)
    return f'<p class="muted">{said}</p>' if said else ""


def _conditions(metrics: dict[str, Any], part: ReportPart) -> str:
    parts = [foreign(metrics["file"])] if metrics.get("file") else []
    parts += [f"{figure(metrics[key])} {key}" for key in ("pairs", "items") if key in metrics]
    parts += part.conditions(metrics)
    for key, value in metrics.items():
        if key.endswith("_per_second") and (speed := as_number(value)) is not None:
            parts.append(f"{figure(round(speed))} {escape(key.removesuffix('_per_second'))}/s")
    return " · ".join(parts)


def _bar(score: _Score) -> str:
    """The value as a bar from zero with its interval on top."""
    ends = (score.value, score.low, score.high)
    at, left, right = (100 * min(max(number / score.full, 0.0), 1.0) for number in ends)
    return (
        f'<div class="bar" role="img" aria-label="{score.show(score.value)} of {score.full:g}">'
        f'<i class="fill" style="width:{at:.2f}%"></i>'
        f'<i class="range" style="left:{left:.2f}%;width:{max(right - left, 0.0):.2f}%"></i>'
        f'<i class="tick" style="left:{at:.2f}%"></i></div>'
    )


def training(log: TrainingLog | None) -> str:
    """The curves: loss, every development metric, learning rate, and what else changed from epoch to epoch.

    >>> "no log" in training(None)
    True
    """
    if log is None:
        body = note("There is no log.jsonl in this run, so no log of training can be shown.")
    elif not log.epochs:
        body = note("The log holds no finished epoch yet.")
    else:
        charts = [_chart(place, title, curves, log) for place, (title, curves) in enumerate(_charts(log))]
        body = f'<div class="charts">{"".join(charts)}</div>' if charts else note("The log holds no figures.")
        if charts and log.resumed:
            body += '<p class="muted">A dotted line shows where training was resumed.</p>'
    if log is not None and log.unreadable:
        body += note(f"Lines of log.jsonl that could not be read and are left out: {log.unreadable}.")
    return f'<section id="training"><h2>Training</h2>{body}</section>'


def _charts(log: TrainingLog) -> Iterable[tuple[str, list[Curve]]]:
    loss = [_curve(log, "training", "first", "loss"), _curve(log, "development", "second", "dev", "loss")]
    candidates = [("Loss", loss)]
    dev = {key: None for epoch in log.epochs if isinstance(epoch.get("dev"), dict) for key in epoch["dev"]}
    for key in dev:
        if key != "loss":
            title = f"Development {_display_name(str(key))}"
            candidates.append((title, [_curve(log, title, "second", "dev", key)]))
    for key in ("learning_rate", "teacher_forcing", "gradient_norm"):
        title = key.replace("_", " ").capitalize()
        candidates.append((title, [_curve(log, title, "first", key)]))
    for title, curves in candidates:
        drawn = [curve for curve in curves if curve.points]
        constant = title == "Teacher forcing" and len({value for c in drawn for _, value in c.points}) < 2
        if drawn and not constant:
            yield title, drawn
    yield from watched_curves(log)


def _curve(log: TrainingLog, label: str, role: str, *keys: str) -> Curve:
    points = []
    for epoch in log.epochs:
        value: Any = epoch
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if (number := as_number(value)) is not None:
            points.append((epoch["epoch"], number))
    return Curve(label, role, tuple(points))


def _chart(place: int, title: str, curves: Sequence[Curve], log: TrainingLog) -> str:
    svg = curve_svg(curves, prefix=f"chart{place}-", best=log.best_epoch, resumed=log.resumed)
    labels = [f'<span class="key {curve.role}">{escape(curve.label)}</span>' for curve in curves]
    at_best = dict(curves[-1].points).get(log.best_epoch if log.best_epoch is not None else -1)
    best = "" if at_best is None else f'<span class="key best">{at_best:.4g} at best epoch</span>'
    legend = "".join(labels if len(labels) > 1 else []) + best
    return chart_card(title, svg, legend)


def commands(record: RunRecord) -> str:
    """The commands that evaluate, predict, resume and train again, ready to paste.

    >>> from pathlib import Path
    >>> "thalweg evaluate &#x27;my run&#x27; test.tsv" in commands(RunRecord(path=Path("my run"), name="x"))
    True
    """
    run = record.path.as_posix()
    lines = record.part.commands(run, record)
    lines += [
        ("Resume training", ["thalweg", "train", f"{run}/config.yaml", "--out", run, "--resume"]),
        ("Train again", ["thalweg", "train", f"{run}/config.yaml", "--out", f"{run}-again"]),
    ]
    return f'<section id="commands"><h2>Use it again</h2>{command_lines(lines)}</section>'


def config_section(record: RunRecord) -> str:
    """The resolved config as it lies in the run, collapsed.

    >>> from pathlib import Path
    >>> "seed: 1" in config_section(RunRecord(path=Path("r"), name="r", config_text="seed: 1"))
    True
    """
    if record.config_text is None:
        body = note("There is no config.yaml in this run.")
    else:
        text = f'<pre dir="auto">{escape(record.config_text)}</pre>'
        body = f'<details class="card"><summary>config.yaml</summary>{text}</details>'
    return f'<section id="config"><h2>Configuration</h2>{body}</section>'


def watched_curves(log: TrainingLog) -> Iterator[tuple[str, list[Curve]]]:
    """Titles and curves over epochs: gradients at the first layer of a stack over its last, and steps over weights.

    Of a log without profiles, nothing.

    >>> layers = {"encoder 1": [0.1, 1.0, 0.01], "encoder 2": [0.2, 1.0, 0.03]}
    >>> log = TrainingLog(epochs=[{"epoch": 1, "step": 10}], profiles=[{"step": 5, "layers": layers}])
    >>> for title, (curve,) in watched_curves(log):
    ...     print(title, curve.label, curve.points)
    Gradient, first layer over last encoder ((0.5, 0.5),)
    Step over weights median ((0.5, 0.02),)
    """
    each = as_number(log.epochs[-1].get("step")) if log.epochs else None
    if not log.profiles or not each:
        return
    each /= log.epochs[-1]["epoch"]
    ratios: dict[str, list[tuple[float, float]]] = {}
    steps: list[tuple[float, float]] = []
    for profile in log.profiles:
        layers = profile.get("layers")
        rows = {name: row for name, row in (layers if isinstance(layers, dict) else {}).items() if _is_row(row)}
        epoch = profile["step"] / each
        for stack, (first, last) in _ends(rows).items():
            if first and last:
                ratios.setdefault(stack, []).append((epoch, first / last))
        if rows:
            steps.append((epoch, statistics.median(row[2] for row in rows.values())))
    roles = ("first", "second")
    curves = [Curve(name, roles[n], tuple(points)) for n, (name, points) in enumerate(list(ratios.items())[:2])]
    if curves:
        yield "Gradient, first layer over last", curves
    if steps:
        yield "Step over weights", [Curve("median", "first", tuple(steps))]


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 3 and all(as_number(value) is not None for value in row)


def _ends(rows: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Gradients at the first and the last layer of each stack that has several."""
    stacks: dict[str, dict[int, float]] = {}
    for name, row in rows.items():
        stack, _, number = name.rpartition(" ")
        if number.isdigit():
            stacks.setdefault(stack, {})[int(number)] = row[0]
    return {stack: (found[min(found)], found[max(found)]) for stack, found in stacks.items() if len(found) > 1}
