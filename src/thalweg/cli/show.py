"""``thalweg show``: what a model is made of and what each layer costs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg.cli.output import note, say, show_table, use_utf8
from thalweg.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from thalweg.diagnostics.costs import CostTable

__all__ = ["show"]

RIGHT = ("parameters", "share", "multiply-adds", "share ", "activations")


@dataclass(frozen=True)
class _Shown:
    """A model, how it was set, and what one call of it takes."""

    name: str
    task: str
    config: Any
    model: nn.Module
    inputs: tuple[Any, ...]
    about: str


def show(
    subject: Annotated[
        str,
        typer.Argument(metavar="RUN|CONFIG|RECIPE", help="A run directory, a YAML config, or a recipe's name."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings laid over a config's.", show_default=False),
    ] = None,
    image: Annotated[
        str, typer.Option(metavar="CxHxW", help="Of a config of images: channels, height and width.")
    ] = "3x48x48",
    classes: Annotated[int, typer.Option(min=1, metavar="N", help="Of a config of images: classes.")] = 6,
    symbols: Annotated[int, typer.Option(min=1, metavar="N", help="Of a config of strings: symbols a side.")] = 40,
    length: Annotated[int, typer.Option(min=1, metavar="N", help="Of strings: symbols of source and target.")] = 10,
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

    shown = _open(subject, overrides or [], image=image, classes=classes, symbols=symbols, length=length)
    table = cost_table(shown.model, shown.inputs)
    changed = _changed(shown.config)
    reasons = _reasons(shown.model, table)
    if as_json:
        use_utf8()
        record = {"name": shown.name, "task": shown.task, "settings": changed, "input": shown.about}
        typer.echo(json.dumps(record | table.to_json() | {"reasons": reasons}, indent=2, ensure_ascii=False))
        return
    note(f"{shown.name}: {shown.task}; costs of {shown.about}")
    for section, settings in changed.items():
        say(f"{section:<9}" + " ".join(f"{key}={_plain(value)}" for key, value in settings.items()))
    say()
    show_table(table.cells(), right=RIGHT)
    say()
    for line in reasons:
        say(line)


def _open(subject: str, overrides: list[str], *, image: str, classes: int, symbols: int, length: int) -> _Shown:
    path = Path(subject)
    if path.is_dir() or path.suffix == ".safetensors":
        if overrides:
            raise ConfigError("KEY=VALUE words change configs, not runs; give the run's config.yaml instead")
        return _open_run(path, length)
    settings, name = _settings(subject)
    from thalweg.tasks.registry import task_of

    task = task_of(settings, subject)
    config = task.build(task.overrides(settings, overrides), subject)
    if task.name == "classify":
        from thalweg.tasks.classifier import build_classifier

        channels, height, width = _image_shape(image)
        net = build_classifier(config, classes, channels, (height, width))
        return _Shown(name, task.name, config, net, *_image_call(net))
    from thalweg.data import Alphabet, Symbols
    from thalweg.tasks.models import build_model
    from thalweg.tasks.sides import Side

    side = Side(Symbols(), Alphabet.build([[chr(0x4E00 + n)] for n in range(symbols)]))
    model = build_model(config, side, side)
    return _Shown(name, task.name, config, model, *_pair_call(length))


def _open_run(path: Path, length: int) -> _Shown:
    from thalweg.learning.checkpoint import load_checkpoint
    from thalweg.tasks.registry import task_of

    file = path if path.is_file() else path / "model.safetensors"
    if path.is_dir() and not file.is_file():
        raise ConfigError(
            f"{path}: expected a run with model.safetensors, got a folder without; give what `train` wrote"
        )
    meta = load_checkpoint(file).meta
    settings = meta.get("config")
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{file}: expected a model with its settings, got another checkpoint; name another run")
    task = task_of(settings, str(path))
    name = path.resolve().parent.name if path.is_file() else path.resolve().name
    config = task.build(settings, str(path))
    if task.name == "classify":
        from thalweg.tasks.classifier import load_classifier

        net = load_classifier(file, device="cpu").model
        return _Shown(name, task.name, config, net, *_image_call(net))
    from torch import nn

    from thalweg.tasks.transducer import load

    model = load(file, device="cpu").model
    assert isinstance(model, nn.Module)
    return _Shown(name, task.name, config, model, *_pair_call(length))


def _settings(subject: str) -> tuple[Mapping[str, Any], str]:
    """Plain settings of a YAML file or a recipe, and what to call them."""
    from thalweg.recipes import list_recipes

    path = Path(subject)
    if path.suffix in (".yaml", ".yml"):
        from thalweg.tasks.config import read_config

        return read_config(path), path.stem
    recipes = {recipe.name: recipe for recipe in list_recipes() if recipe.config}
    if subject not in recipes:
        raise ConfigError(
            f"{subject}: expected a run directory, a YAML config or a recipe, got none of them; "
            "see `thalweg recipe list`, or give what `thalweg train --out` wrote"
        )
    return recipes[subject].config, subject


def _image_shape(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text, re.ASCII)
    if not found:
        raise ConfigError(f"--image must be channels, height and width such as 3x48x48, got `{text}`")
    return int(found[1]), int(found[2]), int(found[3])


def _image_call(net: Any) -> tuple[tuple[Any, ...], str]:
    import torch

    H, W = net.size
    return (torch.zeros(1, net.channels, H, W),), f"one image of {net.channels} x {H} x {W}"


def _pair_call(length: int) -> tuple[tuple[Any, ...], str]:
    from thalweg.data import EOS, UNK, pad

    row = pad([[*[UNK] * (length - 1), EOS]])
    return (row, row), f"a source and a target of {length} symbols"


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


def _reasons(model: nn.Module, table: CostTable) -> list[str]:
    """Where the parameters are, and why, in sentences."""
    if not table.rows:
        return []
    top = table.largest
    lines = [
        f"{table.parameters:,} trainable parameters; {top.name or 'the model'} ({top.kind}) holds {top.parameters:,} "
        f"of them, {table.share(top):.1%}."
    ]
    from thalweg.energies.convnet import ConvNet

    if isinstance(model, ConvNet) and model.config.head == "flatten":
        lines.append(_flatness(model, table))
    return lines


def _flatness(model: Any, table: CostTable) -> str:
    """What flattening costs: the same network with each channel's mean, which is never run."""
    import torch

    from thalweg.energies.convnet import ConvNet

    with torch.device("meta"):
        pooled = ConvNet(dataclasses.replace(model.config, head="average"), model.classes, model.channels, model.size)
    less = sum(p.numel() for p in pooled.parameters() if p.requires_grad)
    reader = next(row for row in table.rows if row.name.startswith("classifier.") and row.parameters)
    head = next(row for row in table.rows if row.name == "head")
    values, width = head.output[-1], model.config.channels[-1]
    return (
        f"{reader.name} reads all {values:,} values of the flattened maps ({width} channels of {values // width} "
        f"positions), and has weights for each: {reader.parameters:,}. With the mean of each channel (head=average) "
        f"it would read {width}, and the network would have {less:,} parameters, {table.parameters / less:.1f} times "
        "fewer."
    )
