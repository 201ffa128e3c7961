"""``thalweg diagnose``: why a model trains or does not, and what to change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thalweg.cli.options import DataRoot, Overrides, Subject
from thalweg.cli.output import note, say, show_table, use_utf8
from thalweg.errors import ConfigError
from thalweg.limits import COUNT

if TYPE_CHECKING:
    from thalweg.tasks.diagnosis.findings import Finding
    from thalweg.tasks.diagnosis.measures import Diagnosis


# More steps than these are a training, which tells more.
STEPS = 10_000

STYLES = {"problem": "red", "warning": "yellow", "note": "", "good": "green"}


def diagnose(
    subject: Subject,
    overrides: Overrides = None,
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
    rows: Annotated[int, typer.Option(min=2, max=COUNT, metavar="N", help="Pairs or images in the batch.")] = 32,
    steps: Annotated[
        int, typer.Option(min=1, max=STEPS, metavar="N", help="Of training on a copy, for updates and decay.")
    ] = 8,
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
    from thalweg.recipes.resolving import resolve
    from thalweg.tasks.diagnosis.findings import findings
    from thalweg.tasks.diagnosis.measures import diagnose as measure
    from thalweg.tasks.report.diagnosis import write_diagnosis

    found = resolve(subject, overrides or [], fresh=fresh)
    opened = found.subject(data=data, root=data_root, device=device)
    page = out or (
        Path(subject) / "diagnosis.html" if Path(subject).is_dir() else Path(f"{opened.name}-diagnosis.html")
    )
    if page.suffix != ".html" or page.is_dir():
        raise ConfigError(f"--out must be a page to write, such as `page.html`, got `{page}`")
    diagnosis = measure(opened, rows=rows, steps=steps)
    said = findings(diagnosis)
    page.parent.mkdir(parents=True, exist_ok=True)
    written, beside = write_diagnosis(diagnosis, said, page, command=found.command)
    if as_json:
        use_utf8()
        typer.echo(beside.read_text(encoding="utf-8").rstrip("\n"))
        return
    kind = "as trained" if opened.trained else "as it starts"
    note(f"{opened.name} {kind}, on {diagnosis.batch[0]} {opened.words.items} of {opened.data}")
    _show(diagnosis, said)
    say()
    say(f"page    {written}")
    say(f"json    {beside}")


def _show(diagnosis: Diagnosis, found: tuple[Finding, ...]) -> None:
    rows = []
    for stack, sites in diagnosis.flow.stacks().items():
        first, last = sites[0], sites[-1]
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
        rows[-1] |= diagnosis.columns(stack)
    show_table(rows, right=tuple(rows[0])[1:] if rows else ())
    say()
    for finding in found:
        say(str(finding), style=STYLES[finding.severity])
