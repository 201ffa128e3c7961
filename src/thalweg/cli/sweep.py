"""``thalweg sweep``: try many settings of a task, and write down which is best."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thalweg.cli.options import DataRoot
from thalweg.cli.output import console, duration, note, note_next, say, show_table
from thalweg.errors import ConfigError
from thalweg.limits import PROCESSES

if TYPE_CHECKING:
    from thalweg.sweeps.store import Trial
    from thalweg.tasks.sweeping import SweepPlan, SweepResult


STYLES = {"best": "bold green", "complete": "", "running": "cyan", "pruned": "yellow", "failed": "red"}
# Rows of the last table.
LAST = 10


def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|RECIPE|KEY=VALUE",
            help="A YAML config with a section `sweep`, or a recipe's name, and settings laid over it.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The sweep's directory; sweeps/CONFIG if not given.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=PROCESSES,
            metavar="N",
            help="Runs at a time; one, or as many as the GPUs hold, if not given; 0: no processes.",
        ),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes on this machine, or tasks on a Ray cluster.")
    ] = "local",
    gpus_per_trial: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="SHARE", help="Of a GPU for each run, such as 0.25.")
    ] = 0.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep in --out.")] = False,
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="Dev metric to compare by; the training's own if not given.")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Try many settings of any task: a grid, at random, by what was learnt (tpe), or the best ever longer (halving).

    The section `sweep` of the config holds `space` (keys with lists or {low, high, log, step}), `method`, `trials`,
    `seeds`, `metric`, `prune` and more; each may be given as a word. Ctrl-C or a kill loses nothing: the same
    directory goes on with --resume. A trial that fails is recorded with its error. The best setting is written
    to DIR/best.yaml, which `thalweg train` takes, and DIR/report.html shows all of them.

    \b
    Example:
      thalweg sweep config.yaml --out sweeps/names --workers 4
      thalweg sweep config.yaml 'sweep.space.learning_rate=[0.1, 0.01]' sweep.method=grid sweep.seeds=0,1,2
      thalweg sweep config.yaml 'sweep.space.learning_rate={low: 1.0e-4, high: 0.1, log: true}' sweep.trials=30
      thalweg sweep config.yaml --engine ray --gpus-per-trial 0.25
      thalweg sweep --resume --out sweeps/names
    """
    from thalweg.tasks.sweeping import plan_sweep, run_sweep

    settings, overrides, where = _settings(words or [], out, resume)
    overrides += [f"sweep.metric={metric}"] if metric else []
    plan = plan_sweep(settings, overrides, where=where)
    out = out or Path("sweeps") / (Path(where).stem if where != "settings" else "sweep")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: expected a directory, got a file; choose another --out")
    note(f"sweep   {out}")
    with SweepDisplay() as display:
        result = run_sweep(
            plan,
            out,
            workers=workers,
            engine=engine,
            gpus_per_trial=gpus_per_trial,
            resume=resume,
            root=data_root,
            listener=display,
        )
    _finish(plan, result)


def _settings(words: list[str], out: Path | None, resume: bool) -> tuple[dict[str, Any], list[str], str]:
    """Plain settings, the words laid over them, and where the settings are from."""
    from thalweg.recipes.resolving import named_settings
    from thalweg.tasks.sweeping import saved_sweep

    names = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(names) > 1:
        raise ConfigError(f"expected one config or recipe, got {shlex.join(names)}; a setting is written `key=value`")
    if not names:
        if not resume:
            return {}, overrides, "settings"
        if out is None:
            raise ConfigError("--resume needs the sweep to go on with; give `--out DIR`")
        return saved_sweep(out), overrides, str(out / "sweep.yaml")
    settings, _ = named_settings(names[0])
    return dict(settings), overrides, names[0]


def _finish(plan: SweepPlan, result: SweepResult) -> None:
    from thalweg.sweeps.store import ranked

    quoted = shlex.quote(str(result.directory))
    if result.reason == "interrupted":
        note(f"stopped; go on with:\n  thalweg sweep --resume --out {quoted}")
        raise typer.Exit(130)
    rows = [_cells(trial, plan, None) for trial in ranked(result.trials, higher=plan.higher)[:LAST]]
    for row in rows:
        row.pop("state")
    show_table(rows, right=("trial", plan.metric))
    for state in ("pruned", "failed"):
        count = sum(trial.state == state for trial in result.trials)
        if count:
            say(f"{state:<7} {count} of {len(result.trials)}")
    failed: list[Trial] = [trial for trial in result.trials if trial.state == "failed"]
    if failed:
        say(f"        trial {failed[0].number}: {failed[0].error}", style="red")
    if result.reason == "hours":
        note(f"the time was up after {len(result.trials)} of {plan.config.settings} settings; --resume goes on")
    say(f"report  {result.directory / 'report.html'}")
    if result.best is None:
        raise ConfigError(f"no trial was completed; see {result.directory / 'report.html'} for the errors")
    say(f"best    trial {result.best.number}: {_score(result.best, plan)}", style="bold")
    say(f"config  {result.directory / 'best.yaml'}")
    note_next([f"thalweg train {quoted}/best.yaml"])


def _score(trial: Trial, plan: SweepPlan) -> str:
    values = ", ".join(f"{key}={_short(value)}" for key, value in trial.values.items())
    return f"{plan.metric} {trial.score} with {values}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cells(trial: Trial, plan: SweepPlan, progress: dict[int, str] | None) -> dict[str, str]:
    """A row of the tables: number, state, metric, values, seeds done, and what the runs are doing."""
    row = {"trial": str(trial.number), "state": trial.state, plan.metric: trial.score}
    row |= {key: _short(value) for key, value in trial.values.items()}
    row["seeds"] = f"{len(trial.runs)}/{len(plan.config.seeds)}"
    if progress is not None:
        row["now"] = "  ".join(list(progress.values())) if trial.state == "running" else ""
        if trial.state == "pruned":
            row["now"] = f"stopped after epoch {trial.pruned_at}"
        elif trial.state == "failed":
            row["now"] = trial.error
    return row


class SweepDisplay:
    """Shows a sweep on standard error: a table that lives on a terminal, plain lines in a log.

    Use it as a context and as the listener of :func:`~thalweg.tasks.sweeping.run_sweep`.

    >>> with SweepDisplay() as display:
    ...     display({"event": "unknown"})
    """

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._live: Live | None = None
        self._plan: SweepPlan | None = None
        self._trials: dict[int, Trial] = {}
        self._progress: dict[int, dict[int, str]] = {}
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> SweepDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        match event["event"]:
            case "sweep":
                self._plan = event["plan"]
                self._trials = {trial.number: trial for trial in event["trials"]}
                self._line(self._opening(event["plan"], event["trials"]))
            case "trial":
                self._trials[event["trial"].number] = event["trial"]
                self._trial(event["trial"])
            case "run":
                self._run(event["trial"], event["seed"], event["of"])

    def _opening(self, plan: SweepPlan, trials: list[Trial]) -> str:
        seeds = len(plan.config.seeds)
        each = f" x {seeds} seeds" if seeds > 1 else ""
        done = sum(trial.state != "running" for trial in trials)
        before = f", {done} done before" if trials else ""
        return f"trials  {plan.config.settings} settings{each}, {plan.config.method}, by {plan.metric}{before}"

    def _trial(self, trial: Trial) -> None:
        assert self._plan is not None
        values = ", ".join(f"{key}={_short(value)}" for key, value in trial.values.items())
        match trial.state:
            case "running":
                self._line(f"trial {trial.number:>3}  begun     {values}")
            case "complete":
                self._line(f"trial {trial.number:>3}  complete  {_score(trial, self._plan)}")
            case "pruned":
                last = trial.curve.get(trial.pruned_at, math.nan)
                at = f"{self._plan.metric} {last:.4f} after epoch {trial.pruned_at}"
                self._line(f"trial {trial.number:>3}  pruned    {at} with {values}")
            case "failed":
                self._line(f"trial {trial.number:>3}  failed    {trial.error} (with {values})", style="red")

    def _run(self, trial: Trial, seed: int, event: dict[str, Any]) -> None:
        progress = self._progress.setdefault(trial.number, {})
        match event["event"]:
            case "start":
                progress[seed] = f"seed {seed}: 0/{event['epochs']}"
            case "epoch":
                of = f"/{event['epochs']}" if event["epochs"] else ""
                progress[seed] = f"seed {seed}: {event['epoch']}{of}, {event['value']:.4f}"
            case "lost":
                progress.pop(seed, None)
                self._line(f"trial {trial.number:>3}  seed {seed}: {event['error']}", style="yellow")
            case "end":
                progress.pop(seed, None)
                if len(self._plan.config.seeds) > 1 and self._live is None:  # type: ignore[union-attr]
                    took = duration(event.get("seconds", 0.0))
                    self._line(f"trial {trial.number:>3}  seed {seed}: {event['value']:.4f} in {took}")
            case _:
                progress.pop(seed, None)

    def _line(self, text: str, style: str = "") -> None:
        if self._live is None or style or text.startswith("trials"):
            self._console.print(Text(text, style=style), soft_wrap=True)

    def _render(self) -> Table:
        """What runs, then the best; as many rows as the terminal has."""
        from thalweg.sweeps.store import ranked

        table = Table(box=box.SIMPLE_HEAD, show_edge=False)
        if self._plan is None or not self._trials:
            return table
        plan = self._plan
        trials = list(self._trials.values())  # drawn by another thread than the one that adds to them
        done = ranked(trials, higher=plan.higher)
        running = [trial for trial in trials if trial.state == "running"]
        ended = [trial for trial in trials if trial.state in ("pruned", "failed")]
        room = max(3, self._console.height - 6)
        best = done[0] if done else None
        rows = []
        for trial in [*running, *done, *reversed(ended)][:room]:
            state = "best" if trial is best else trial.state
            rows.append(_cells(trial, plan, self._progress.get(trial.number, {})) | {"state": state})
        for name in rows[0]:
            # What the runs are doing is cut where the terminal is narrow, the figures are not.
            least = None if name == "now" else max(len(name), *(len(row[name]) for row in rows))
            right = "right" if name in ("trial", plan.metric) else "left"
            table.add_column(name, justify=right, no_wrap=True, min_width=least)
        for row in rows:
            table.add_row(*(Text(value, overflow="ellipsis") for value in row.values()), style=STYLES[row["state"]])
        counts = {state: sum(t.state == state for t in trials) for state in ("complete", "pruned", "failed")}
        said = ", ".join(f"{count} {state}" for state, count in counts.items() if count or state == "complete")
        table.caption = f"{said} of {plan.config.settings} settings"
        return table
