"""Options that several commands share, and what is made of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from thalweg import limits

# How answers are searched.
Search = Literal["beam", "greedy", "diverse", "exact", "nucleus", "typical", "min-p", "sample", "stochastic", "mbr"]

# What counts as right where a source has several targets.
References = Literal["each", "any"]

# What to do with a source symbol that the model has never seen.
Unknown = Literal["report", "copy"]

# Numbers that a model computes with.
Precision = Literal["float32", "bf16", "int8"]

# The run directory of commands that use a model.
Run = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run directory that `thalweg train` wrote, or `english`.", show_default=False),
]

# What commands that look at a model take.
Subject = Annotated[
    str, typer.Argument(metavar="RUN|CONFIG|RECIPE", help="A run directory, a YAML config, or a recipe's name.")
]

# Settings that are laid over those of a config or recipe.
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings laid over a config's.", show_default=False)
]

# Where NAME:SPLIT data sets lie.
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        envvar="THALWEG_DATA",
        metavar="DIR",
        help="Folder of the known data sets, for NAME:SPLIT.",
        show_default=False,
    ),
]

ANSWERS, BEAM, SAMPLING, MODEL = "Answers", "Beam and exact search", "Sampling", "Models"

# What `--search` offers, for the help page of every command that has it.
SEARCHES = """\b
Searches:
  beam, greedy       the best few beginnings at each step, or the best one
  diverse            a beam in groups that avoid one another's symbols
  exact              the most probable answer, proved
  sample             drawn at random
  nucleus, typical,
    min-p            drawn at random, improbable symbols left out
  stochastic         drawn at random, no answer twice
  mbr                of many drawn, those most like the others"""


def _option(*names: str, panel: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


@dataclass(frozen=True)
class Chosen:
    """What the shared options say: where the model is, and what was given beside, by the options' names.

    >>> Chosen("cpu", {"width": 3}).given
    {'width': 3}
    """

    device: str
    given: dict[str, Any]


def _shared(
    search: Annotated[Search, typer.Option(help="How answers are searched; see above.")] = "beam",
    max_length: Annotated[
        int, _option(panel=ANSWERS, help="Symbols at most, end included; 0 suits the training data.")
    ] = 0,
    min_length: Annotated[int, _option(panel=ANSWERS, help="Symbols at least, end included.")] = 0,
    lexicon: Annotated[
        str | None, _option(panel=ANSWERS, metavar="FILE", help="Only answers in this file, one a line.")
    ] = None,
    prefix: Annotated[str | None, _option(panel=ANSWERS, metavar="TEXT", help="What answers begin with.")] = None,
    width: Annotated[int, _option(panel=BEAM, min=1, max=limits.ANSWERS, help="Beam width; at least k is used.")] = 5,
    length_penalty: Annotated[
        float, _option(panel=BEAM, help="Exponent of the length that divides a score; 0 is none.")
    ] = 0.0,
    groups: Annotated[int, _option(panel=BEAM, help="Of diverse search; 0 is one for each hypothesis.")] = 0,
    diversity: Annotated[
        float, _option(panel=BEAM, help="Of diverse search: log-probability lost per group that said it.")
    ] = 0.5,
    max_expansions: Annotated[
        int, _option(panel=BEAM, help="Of exact search: steps per source before it gives up the proof; 0 is no limit.")
    ] = 10_000,
    temperature: Annotated[float, _option(panel=SAMPLING, help="Below 1 sharpens, above flattens.")] = 1.0,
    top_p: Annotated[float, _option(panel=SAMPLING, help="Of nucleus: the mass that is kept.")] = 0.9,
    top_k: Annotated[int, _option(panel=SAMPLING, help="The symbols kept; 0 is all.")] = 0,
    typical: Annotated[float, _option(panel=SAMPLING, help="Of typical: the mass that is kept.")] = 0.95,
    min_p: Annotated[float, _option(panel=SAMPLING, help="Of min-p: least share of the best probability.")] = 0.05,
    samples: Annotated[
        int, _option(panel=SAMPLING, min=1, max=limits.COMPARED, help="Of mbr: answers drawn and compared.")
    ] = 32,
    seed: Annotated[int, _option(panel=SAMPLING, help="Of what is drawn.")] = 0,
    ensemble: Annotated[
        list[Path] | None,
        _option(panel=MODEL, metavar="RUN", help="Another run that answers too; may be repeated."),
    ] = None,
    vote: Annotated[
        bool, _option("--vote", panel=MODEL, help="The runs vote; without, their probabilities are averaged.")
    ] = False,
    precision: Annotated[Precision, _option(panel=MODEL, help="Of linear layers, on the CPU.")] = "float32",
    device: Annotated[str, _option(panel=MODEL, help="auto, cpu, cuda or mps.", metavar="NAME")] = "auto",
) -> None:
    """Options that evaluating and predicting share; which of them a run has a use for, its task says."""


def takes_search(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter ``chosen`` is made of the options that evaluating and predicting share.

    >>> def command(run: Path, chosen: Chosen) -> None: ...
    >>> list(inspect.signature(takes_search(command)).parameters)[:3]
    ['run', 'search', 'max_length']
    """
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "chosen"]
    shared = list(inspect.signature(_shared, eval_str=True).parameters.values())

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        options = {p.name: (given.pop(p.name), p.default) for p in shared}
        device = str(options.pop("device")[0])
        # An option that is not given says nothing, whatever its default is.
        said = {name: value for name, (value, usual) in options.items() if value != usual and value != []}
        command(**given, chosen=Chosen(device, said))

    example = "\b\nExample:"
    wrapped.__doc__ = (inspect.getdoc(command) or "").replace(example, f"{SEARCHES}\n\n{example}")
    # Typer reads the parameters from here.
    wrapped.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return wrapped
