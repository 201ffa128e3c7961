"""The entry point ``thalweg``: commands, and one line for every error that a person can mend."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import thalweg
from thalweg.cli import data, recipe
from thalweg.cli.diagnose import diagnose
from thalweg.cli.evaluate import evaluate
from thalweg.cli.output import flowing, note
from thalweg.cli.predict import predict
from thalweg.cli.show import show
from thalweg.cli.sweep import sweep
from thalweg.cli.train import train
from thalweg.errors import ThalwegError

__all__ = ["app", "run"]

# What the place of a file, not the program, is to blame for.
PLACE = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOSPC, errno.EROFS}

# What a wrong word on the command line raises; typer names only this kind of it.
USAGE: Any = typer.BadParameter.__mro__[1]


class _Group(TyperGroup):
    """Turns an error into one line and a status; ``--debug``, anywhere on the line, keeps the traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        if "--debug" in args[:end]:
            args.remove("--debug")
            args.insert(0, "--debug")
        try:
            return super().parse_args(ctx, args)
        except USAGE as error:
            _refuse(error)

    def invoke(self, ctx: Any) -> Any:
        debug = bool(ctx.params.get("debug"))
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe is found here rather than when the interpreter ends
            return result
        except USAGE as error:
            _refuse(error)
        except ThalwegError as error:
            if debug:
                raise
            _fail(str(error))
        except BrokenPipeError:
            # The reader has seen enough: what is still in the buffer must not fail a second time.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit(128 + 13) from None
        except OSError as error:
            if debug or error.errno not in PLACE or error.filename is None:
                raise
            _fail(f"{error.filename}: {error.strerror}; choose another place or mend this one")
        except KeyboardInterrupt:
            if debug:
                raise
            note("stopped")
            raise typer.Exit(130) from None


def _fail(message: str) -> NoReturn:
    note("error: " + " ".join(message.split()), style="red")
    raise typer.Exit(2) from None


def _refuse(error: Any) -> NoReturn:
    """One line for a wrong word, with the page that tells the right ones; a group alone shows its page."""
    if type(error).__name__ == "NoArgsIsHelpError":
        raise error
    message = error.format_message().replace("Value error, ", "").rstrip(".")
    page = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
    _fail(message[:1].lower() + message[1:] + page)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
"""All commands."""


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"thalweg {thalweg.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Thalweg turns pairs of strings, or folders of images, into a trained, measured, usable model.

    \b
    Example:
      thalweg train --data train.tsv --dev dev.tsv --out runs/names
      thalweg evaluate runs/names test.tsv
      thalweg predict runs/names --text Hannah --k 5
      thalweg train --task classify photos.zip --out runs/photos
    """


for _command in (train, evaluate, predict, show, sweep, diagnose):
    app.command(help=flowing(_command))(_command)
app.add_typer(recipe.app, name="recipe")
app.add_typer(data.app, name="data")


def run() -> None:
    """Run the command line on ``sys.argv``; the console script ``thalweg`` calls this.

    >>> from typer.testing import CliRunner
    >>> CliRunner().invoke(app, ["data", "check", "absent.tsv"]).exit_code
    2
    """
    app(prog_name="thalweg")
