"""The entry point ``thalweg``: commands, and one line for every error that a person can mend."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import thalweg
from thalweg.cli import data, recipe
from thalweg.cli.align import align
from thalweg.cli.diagnose import diagnose
from thalweg.cli.evaluate import evaluate
from thalweg.cli.export import export
from thalweg.cli.output import flowing, note
from thalweg.cli.predict import predict
from thalweg.cli.serve import serve
from thalweg.cli.show import show
from thalweg.cli.sweep import sweep
from thalweg.cli.train import train
from thalweg.errors import ConfigError, ThalwegError, WriteError
from thalweg.limits import within_memory

# Characters of a message: one that quotes what it was given is cut in the middle.
LONGEST = 800

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
            _check_words(args)
            return super().parse_args(ctx, args)
        except USAGE as error:
            _refuse(error)
        except ThalwegError as error:
            _fail(str(error))

    def invoke(self, ctx: Any) -> Any:
        debug = bool(ctx.params.get("debug"))
        try:
            with within_memory("lower the sizes or counts that were asked for"):
                result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe is found here rather than when the interpreter ends
            return result
        except USAGE as error:
            _refuse(error)
        except BrokenPipeError:
            _drop_output()  # the reader has seen enough
            raise typer.Exit(128 + 13) from None
        except KeyboardInterrupt:
            if debug:
                raise
            note("stopped")
            raise typer.Exit(130) from None
        except Exception as error:
            line = _line_of(error)
            if debug or line is None:
                raise
            _fail(line)


def _line_of(error: Exception) -> str | None:
    """What a person can mend, as a line; None is a defect."""
    if isinstance(error, WriteError):
        from thalweg.tasks.runs import what_is_whole

        return f"{error}{what_is_whole(error.path)}"
    if isinstance(error, ThalwegError):
        return str(error)
    if isinstance(error, OSError):
        return _of_system(error)
    if isinstance(error, RecursionError):
        return "expected plain settings and files, got something nested too deeply; --debug shows what reads it"
    return None


def _fail(message: str) -> NoReturn:
    message = " ".join(message.split())
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
    with suppress(OSError):  # where standard error is full, the status alone tells
        note("error: " + message, style="red")
    raise typer.Exit(2) from None


def _of_system(error: OSError) -> str:
    """What the system refused, in a line; a stream has no name."""
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {reason}; choose another place or mend this one"
    _drop_output()
    return f"standard output, or a file: {reason}; make room or write to another place, --debug shows which"


def _drop_output() -> None:
    """What is still in the buffer of standard output must not fail a second time, when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _check_words(words: list[str]) -> None:
    """Words end up in files of text: bytes that are none are refused here, before anything is written."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"expected UTF-8 on the command line, got {word[:100]!a}; rename the file") from None


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
      thalweg predict english --text Hannah
      thalweg train --data train.tsv --dev dev.tsv --out runs/names
      thalweg evaluate runs/names test.tsv
      thalweg predict runs/names --text Hannah --k 5
      thalweg train --task classify photos.zip --out runs/photos
    """


for _command in (train, evaluate, predict, serve, export, show, sweep, diagnose, align):
    app.command(help=flowing(_command))(_command)
app.add_typer(recipe.app, name="recipe")
app.add_typer(data.app, name="data")


def run() -> None:
    """Run the command line on ``sys.argv``; the console script ``thalweg`` calls this.

    >>> from typer.testing import CliRunner
    >>> CliRunner().invoke(app, ["data", "check", "absent.tsv"]).exit_code
    2
    """
    _open_streams()
    app(prog_name="thalweg")


def _open_streams() -> None:
    """Where a standard stream is closed, its number must not go to the next file that is opened.

    What is written to it is thrown away, as whoever closed it asked for; reading from it is an error of its own.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for as long as the process is)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may be no text
