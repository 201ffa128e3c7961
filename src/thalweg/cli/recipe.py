"""``thalweg recipe``: published experiments, run again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from thalweg.cli.options import DataRoot, Overrides
from thalweg.cli.output import note, note_next, say, show_table
from thalweg.cli.progress import Display

app = typer.Typer(
    no_args_is_help=True,
    help="""Run published experiments again and set our figures beside theirs.

\b
Example:
  thalweg recipe list
  thalweg recipe run demo --out runs/demo
""",
)
"""The commands under ``thalweg recipe``."""

# Runs of one recipe.
SEEDS = 1000

Name = Annotated[str, typer.Argument(metavar="NAME", help="One of `thalweg recipe list`.", show_default=False)]


@app.command("list")
def list_command() -> None:
    """List the recipes.

    \b
    Example:
      thalweg recipe list
    """
    from thalweg.recipes import list_recipes

    rows = []
    for recipe in list_recipes():
        published = ", ".join(f"{metric} {value:.4f}" for metric, value in recipe.published.items())
        rows.append({"name": recipe.name, "what": recipe.title, "published": published})
    show_table(rows)


@app.command("show")
def show_command(name: Name) -> None:
    """Print a recipe: its settings, seeds and measurements, and the published figures.

    \b
    Example:
      thalweg recipe show demo
    """
    from thalweg.recipes import load_recipe

    typer.echo(load_recipe(name).text.rstrip("\n"))


@app.command("run")
def run_command(
    name: Name,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the runs go; runs/NAME if not given.")] = None,
    data_root: DataRoot = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=SEEDS, metavar="N", help="Runs that differ in the seed alone.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away what an earlier run left in --out.")] = False,
) -> None:
    """Train and measure as a recipe says; run again after Ctrl-C, it goes on where it stopped.

    An experiment (hopfield-...) trains no run: it ends with a page of tables and pictures.

    \b
    Example:
      thalweg recipe run demo --out runs/demo
      thalweg recipe run demo --seeds 3 epochs=2
      thalweg recipe run hopfield-digits --out runs/digits stored=50
    """
    from thalweg.recipes import load_recipe, run_recipe
    from thalweg.tasks.registry import task_of_run

    recipe = load_recipe(name)
    out = out or Path("runs") / recipe.name
    note(f"{recipe.name}: {recipe.title}")
    if recipe.note:
        note(recipe.note)
    with Display() as display:
        result = run_recipe(
            recipe,
            out,
            root=data_root,
            seeds=seeds,
            overrides=list(overrides or []),
            fresh=fresh,
            listener=display,
        )
    if display.interrupted or not result.finished:
        note("stopped; the same command goes on" + (" (without --fresh)" if fresh else ""))
        raise typer.Exit(130)
    if result.examples:
        show_table(result.examples)
        say()
    show_table(result.table)
    say()
    if recipe.experiment:
        for picture in result.pictures:
            say(f"picture {picture}")
        say(f"page    {result.report}")
        return
    say(f"runs    {result.directory}")
    if result.report is not None:
        say(f"report  {result.report}")
        run = shlex.quote(str(result.report.parent))
        note_next(task_of_run(result.report.parent).next_steps(run)[-2:])
