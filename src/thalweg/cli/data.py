"""``thalweg data``: look at data sets and check files before training on them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from thalweg.cli.options import DataRoot
from thalweg.cli.output import note, say, show_table, use_utf8

app = typer.Typer(
    no_args_is_help=True,
    help="""Look at data sets and check files.

\b
Example:
  thalweg data check train.tsv
  thalweg data show cmudict:dev --lines 5
""",
)
"""The commands under ``thalweg data``."""


@app.command("list")
def list_command(data_root: DataRoot = None) -> None:
    """List the data sets that can be named as NAME:SPLIT.

    \b
    Example:
      thalweg data list --data-root data
    """
    from thalweg.data import list_datasets

    infos = list_datasets(data_root)
    rows = [
        {
            "name": info.name,
            "splits": ", ".join(info.splits),
            "at hand": "yes" if info.available else "no",
            "what": info.description,
            "licence": info.licence,
        }
        for info in infos
    ]
    show_table(rows)
    say()
    origins = {info.source: info.name for info in infos}
    for source, name in origins.items():
        say(f"{name.split('/')[0]}: {source}")
    if not all(info.available for info in infos):
        note("give the folder of the others by --data-root or THALWEG_DATA")


@app.command("show")
def show_command(
    spec: Annotated[str, typer.Argument(metavar="NAME:SPLIT", help="A data set's part, or a file.")],
    lines: Annotated[int, typer.Option("--lines", min=1, help="Pairs at most.")] = 10,
    data_root: DataRoot = None,
) -> None:
    """Print the first pairs of a data set: source, tab, target.

    \b
    Example:
      thalweg data show cmudict:dev --lines 5
    """
    from thalweg.data.text.named_pairs import open_pairs

    pairs = open_pairs(spec, data_root)
    note(pairs.summary())
    use_utf8()
    for pair in pairs.pairs[:lines]:
        sys.stdout.write(f"{pair.source}\t{pair.target}\n")


@app.command("check")
def check_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Pairs: TSV, .gz, - for stdin, or NAME:SPLIT.")],
    data_root: DataRoot = None,
) -> None:
    """Read a file as training would and say what is in it, or what is wrong with it and where.

    \b
    Example:
      thalweg data check train.tsv
    """
    from thalweg.data import Alphabet, guess_symbols
    from thalweg.data.text.named_pairs import open_pairs

    pairs = open_pairs(file, data_root)
    say(pairs.summary())
    for side, texts in (("source", pairs.sources()), ("target", pairs.targets())):
        symbols = guess_symbols(texts)
        split = [symbols.split(text) for text in texts]
        alphabet = Alphabet.build(split)
        longest = max(map(len, split))
        mean = sum(map(len, split)) / len(split)
        say(
            f"{side}  {symbols} (guessed), {len(alphabet)} symbols with 4 special ones, "
            f"{mean:.1f} a text, {longest} at most"
        )
