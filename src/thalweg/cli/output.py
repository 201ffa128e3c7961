"""Where words go: results to standard output, notes to standard error; colour only on a terminal."""

from __future__ import annotations

import inspect
import io
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Without a terminal there is no width to keep to; rich would fold tables at 80 columns.
WIDE = 240


def console(*, stderr: bool = False) -> Console:
    """A console on the stream as it is now (tests put others in its place).

    >>> console().stderr
    False
    """
    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=WIDE)


def say(text: str = "", style: str = "") -> None:
    """One line of results; never folded, so that a path can be copied.

    >>> say("model  runs/x/model.safetensors")
    model  runs/x/model.safetensors
    """
    console().print(Text(text, style=style), soft_wrap=True)


def note(text: str, style: str = "") -> None:
    """One line for the person, on standard error.

    >>> note("reading from the keyboard")
    """
    console(stderr=True).print(Text(text, style=style), soft_wrap=True)


def note_next(commands: Iterable[str]) -> None:
    """What to do next; where `thalweg` is not on the PATH, by the way in which this one was started.

    >>> note_next(["thalweg serve runs/demo"])
    """
    started = Path(sys.argv[0])
    own = "thalweg"
    if started.name == own and shutil.which(own) is None:
        own = shlex.quote(os.path.relpath(started))
    note("\n  ".join(["next:", *(own + command.removeprefix("thalweg") for command in commands)]))


def show_table(rows: Sequence[Mapping[str, str]], *, right: Iterable[str] = ()) -> None:
    """Rows with the same keys, which become the heading; columns named in ``right`` are right-aligned.

    >>> show_table([{"metric": "CER", "value": "0.2"}])
     metric   value
    ────────────────
     CER      0.2
    """
    if not rows:
        return
    from rich import box

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=True)
    for name in rows[0]:
        table.add_column(name, justify="right" if name in set(right) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    console().print(table)


def duration(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``.

    >>> duration(61.2), duration(3600)
    ('1:01', '1:00:00')
    """
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def use_utf8() -> None:
    """Write text to standard output as UTF-8, which is how it is read, whatever the locale says.

    >>> use_utf8()
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # a file's name may be no text


def flowing(command: Callable[..., object]) -> str:
    """A command's docstring for its help page: paragraphs without line breaks, so that any width suits them.

    Those that begin with a line ``\\b`` stay as they are.

    >>> def greet():
    ...     '''Greet.
    ...
    ...     Say hello
    ...     to all.
    ...     '''
    >>> flowing(greet)
    'Greet.\\n\\nSay hello to all.'
    """
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(part if part.startswith("\b") else part.replace("\n", " ") for part in paragraphs)
