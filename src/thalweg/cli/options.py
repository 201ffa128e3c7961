"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "DataRoot",
    "Device",
    "LengthPenalty",
    "MaxLength",
    "References",
    "Run",
    "SamplingSeed",
    "Search",
    "Temperature",
    "TopK",
    "TopP",
    "Unknown",
    "Width",
]


class Search(StrEnum):
    """How answers are searched."""

    beam = "beam"
    greedy = "greedy"
    nucleus = "nucleus"


class References(StrEnum):
    """What counts as right where a source has several targets."""

    each = "each"
    any = "any"


class Unknown(StrEnum):
    """What to do with a source symbol that the model has never seen."""

    report = "report"
    copy = "copy"


# The run directory of commands that use a model.
Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory that `thalweg train` wrote.", show_default=False)
]

# Where to compute.
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.", metavar="NAME")]

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

# Beam width.
Width = Annotated[int, typer.Option("--width", min=1, help="Beam width; at least k is used.")]

# Beam length penalty.
LengthPenalty = Annotated[
    float, typer.Option("--length-penalty", help="Exponent of the length that divides a score; 0 is none.")
]

# Longest answer.
MaxLength = Annotated[
    int, typer.Option("--max-length", help="Symbols at most, end included; 0 suits the training data.")
]

# Temperature of nucleus sampling.
Temperature = Annotated[float, typer.Option("--temperature", help="Of nucleus sampling.")]

# Mass that nucleus sampling keeps.
TopP = Annotated[float, typer.Option("--top-p", help="Of nucleus sampling: the mass that is kept.")]

# Symbols that nucleus sampling keeps.
TopK = Annotated[int, typer.Option("--top-k", help="Of nucleus sampling: the symbols kept; 0 is all.")]

# Seed of nucleus sampling.
SamplingSeed = Annotated[int, typer.Option("--seed", help="Of nucleus sampling.")]
