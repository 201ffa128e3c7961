"""``thalweg show``: what a model is made of and what each layer costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg.cli.options import Overrides, Subject
from thalweg.cli.output import note, say, show_table, use_utf8
from thalweg.limits import LENGTH, WIDTH

if TYPE_CHECKING:
    from thalweg.diagnostics.costs import CostTable


RIGHT = ("parameters", "share", "multiply-adds", "share ", "activations")


def show(
    subject: Subject,
    overrides: Overrides = None,
    image: Annotated[
        str, typer.Option(metavar="CxHxW", help="Of a config of images: channels, height and width.")
    ] = "3x48x48",
    classes: Annotated[int, typer.Option(min=1, max=WIDTH, metavar="N", help="Of a config of images: classes.")] = 6,
    symbols: Annotated[
        int, typer.Option(min=1, max=WIDTH, metavar="N", help="Of a config of strings: symbols a side.")
    ] = 40,
    length: Annotated[
        int, typer.Option(min=1, max=LENGTH, metavar="N", help="Of strings: symbols of source and target.")
    ] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print settings and costs as JSON.")] = False,
) -> None:
    """Show what a model is made of: parameters, multiply-adds and memory of every layer.

    Looks at a trained run, or at a model that a config or a recipe describes. Costs are those of one image, or of one
    pair of strings.

    \b
    Example:
      thalweg show runs/landscapes
      thalweg show c1
      thalweg show config.yaml head=average --image 3x64x64 --classes 10
      thalweg show runs/names --length 20 --json
    """
    from thalweg.diagnostics.costs import cost_table
    from thalweg.recipes.resolving import resolve

    found = resolve(subject, overrides or [])
    sizes = {"image": image, "classes": classes, "symbols": symbols, "length": length}
    shown = found.task.example(found.config, found.run, **sizes)
    table = cost_table(shown.model, shown.inputs)
    changed = _changed(found.config)
    reasons = _reasons(table, shown.reasons)
    if as_json:
        use_utf8()
        record = {"name": found.name, "task": found.task.name, "settings": changed, "input": shown.about}
        typer.echo(json.dumps(record | table.to_json() | {"reasons": reasons}, indent=2, ensure_ascii=False))
        return
    note(f"{found.name}: {found.task.name}; costs of {shown.about}")
    for section, settings in changed.items():
        say(f"{section:<9}" + " ".join(f"{key}={_plain(value)}" for key, value in settings.items()))
    say()
    show_table(table.cells(), right=RIGHT)
    say()
    for line in reasons:
        say(line)


def _changed(config: Any) -> dict[str, dict[str, Any]]:
    """Settings that are not the default, by section; the model's whole where it has none."""
    found = {}
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if not dataclasses.is_dataclass(value):
            continue
        usual = type(value)()
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        own = {key: each for key, each in own.items() if each != getattr(usual, key)}
        if own:
            found[section.name] = own
    return found


def _plain(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ",".join(map(_plain, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reasons(table: CostTable, more: Callable[[Any], Sequence[str]]) -> list[str]:
    """Where the parameters are, and why, in sentences."""
    if not table.rows:
        return []
    top = table.largest
    first = (
        f"{table.parameters:,} trainable parameters; {top.name or 'the model'} ({top.kind}) holds {top.parameters:,} "
        f"of them, {table.share(top):.1%}."
    )
    return [first, *more(table)]
