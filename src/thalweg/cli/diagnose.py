"""``thalweg diagnose``: why a model trains or does not, and what to change."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg.cli.options import DataRoot
from thalweg.cli.output import note, say, show_table, use_utf8
from thalweg.errors import ConfigError

if TYPE_CHECKING:
    from thalweg.tasks.diagnosing import Diagnosis, ImageLook
    from thalweg.tasks.findings import Finding

__all__ = ["diagnose"]

STYLES = {"problem": "red", "warning": "yellow", "note": "", "good": "green"}


def diagnose(
    subject: Annotated[
        str,
        typer.Argument(metavar="RUN|CONFIG|RECIPE", help="A run directory, a YAML config, or a recipe's name."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings laid over a config's.", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Pairs to look at it on: TSV, .gz or NAME:SPLIT; or images: a folder, a zip, digits, or train, val or "
            "test of its own. Its dev data if not given.",
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Of a run: the model as it started.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PAGE", help="The HTML page; RUN/diagnosis.html or NAME-diagnosis.html if not given."),
    ] = None,
    rows: Annotated[int, typer.Option(min=2, metavar="N", help="Pairs or images in the batch.")] = 32,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Of training on a copy, for updates and decay.")] = 8,
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or mps.")] = "auto",
    data_root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and measurements as JSON.")] = False,
) -> None:
    """Say why a model trains or does not: where gradients vanish or explode, what saturates, what to change.

    Looks at a trained run, or at a model as it starts, on one batch: gradients through depth and time, singular values
    of Jacobians over layers and spans of time, saturated gates, what weight decay does, what norms would measure; of
    image networks also dead units, channels that do not vary and what their norms measure. Writes a page and, beside
    it, the same as JSON.

    \b
    Example:
      thalweg diagnose runs/names
      thalweg diagnose runs/names --fresh --data test.tsv
      thalweg diagnose config.yaml encoder_layers=8 decoder_layers=8
      thalweg diagnose deep-plain --data-root data
      thalweg diagnose runs/digits-convnet-norm
      thalweg diagnose c1 --data-root data units=4
    """
    from thalweg.tasks.diagnosing import diagnose as measure
    from thalweg.tasks.findings import findings
    from thalweg.tasks.report.diagnosis import write_diagnosis
    from thalweg.tasks.subjects import open_subject

    source, command = _source(subject, overrides or [])
    name = Path(subject).stem if subject.endswith((".yaml", ".yml")) or not Path(subject).exists() else ""
    opened = open_subject(source, data=data, fresh=fresh, root=data_root, device=device, name=name)
    page = out or (
        Path(subject) / "diagnosis.html" if Path(subject).is_dir() else Path(f"{opened.name}-diagnosis.html")
    )
    if page.suffix != ".html" or page.is_dir():
        raise ConfigError(f"--out must be a page to write, such as `page.html`, got `{page}`")
    diagnosis = measure(opened, rows=rows, steps=steps)
    found = findings(diagnosis)
    page.parent.mkdir(parents=True, exist_ok=True)
    written, beside = write_diagnosis(diagnosis, found, page, command=command)
    if as_json:
        use_utf8()
        typer.echo(beside.read_text(encoding="utf-8").rstrip("\n"))
        return
    kind = "as trained" if opened.trained else "as it starts"
    note(f"{opened.name} {kind}, on {diagnosis.batch[0]} {opened.words.items} of {opened.data}")
    _show(diagnosis, found)
    say()
    say(f"page    {written}")
    say(f"json    {beside}")


def _source(subject: str, overrides: list[str]) -> tuple[Any, str]:
    """What to open, and the command that would train it again."""
    path = Path(subject)
    if path.is_dir():
        if overrides:
            raise ConfigError("KEY=VALUE words change configs, not runs; give the run's config.yaml instead")
        return path, f"thalweg train {shlex.quote(str(path / 'config.yaml'))} --out {shlex.quote(f'{path}-mended')}"
    if path.exists():
        return _config(subject, overrides), f"thalweg train {shlex.join([subject, *overrides])}"
    from thalweg.recipes import list_recipes

    recipes = {recipe.name: recipe for recipe in list_recipes() if recipe.config}
    if subject in recipes:
        from thalweg.tasks.registry import task_of

        task = task_of(recipes[subject].config, f"recipe {subject}")
        config = task.build(task.overrides(recipes[subject].config, overrides), f"recipe {subject}")
        words = shlex.join([subject, *overrides])
        return config, f"thalweg recipe run {words} --out {shlex.quote(f'runs/{subject}-mended')}"
    raise ConfigError(
        f"{subject}: expected a run directory, a YAML config or a recipe, got none of them; "
        "see `thalweg recipe list`, or train one with `thalweg train --data train.tsv --out RUN`"
    )


def _config(subject: str, overrides: list[str]) -> Any:
    from thalweg.tasks.config import read_config
    from thalweg.tasks.registry import task_of

    if not subject.endswith((".yaml", ".yml")):
        raise ConfigError(f"{subject}: expected a run directory or a YAML config, got another file")
    settings = read_config(Path(subject))
    task = task_of(settings, subject)
    return task.build(task.overrides(settings, overrides), subject)


def _show(diagnosis: Diagnosis, found: tuple[Finding, ...]) -> None:
    rows = []
    for stack, sites in diagnosis.flow.stacks().items():
        first, last = sites[0], sites[-1]
        spans = [layer for layer in diagnosis.spans if layer.stack == stack]
        carried = [float(layer.report.largest[-1].median()) for layer in spans]
        ratio = diagnosis.flow.through_depth(stack)
        rows.append(
            {
                "stack": stack or "layers",
                "layers": str(last.depth),
                "gradient, last": f"{last.gradient:.1e}",
                "first": f"{first.gradient:.1e}",
                "first/last": "" if math.isnan(ratio) else f"{ratio:.1e}",
                "states differ": f"{last.spread:.1e}",
            }
        )
        if diagnosis.images is not None:
            rows[-1] |= _of_images(diagnosis, diagnosis.images, stack)
        else:
            rows[-1]["steps"] = str(spans[0].report.spans[-1]) if spans else ""
            rows[-1]["carried"] = f"{min(carried):.2g} to {max(carried):.2g}" if carried else ""
    show_table(rows, right=tuple(rows[0])[1:] if rows else ())
    say()
    for finding in found:
        say(str(finding), style=STYLES[finding.severity])


def _of_images(diagnosis: Diagnosis, look: ImageLook, stack: str) -> dict[str, str]:
    """Columns that only image networks have: of the layers of a stack, the ends of stretches and the worst shares."""
    stretches = [row.largest for row in look.stretches if row.stack == stack]
    names = {row.name for row in look.channels if row.stack == stack}
    dead = [row.stuck for row in diagnosis.saturation.rows if row.name in names]
    return {
        "stretch": f"{min(stretches):.2g} to {max(stretches):.2g}" if stretches else "",
        "stuck": f"{max(dead):.0%}" if dead else "",
        "constant": f"{max((row.constant for row in look.channels if row.stack == stack), default=0.0):.0%}",
    }
