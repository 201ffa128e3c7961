"""Readers of text files: pairs for training and evaluation, sources for prediction."""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from thalweg.errors import DataError
from thalweg.limits import LENGTH

Lines = Generator[tuple[int, str], None, None]

GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")

# Bytes that a line of as many characters as it may have cannot reach: four each, byte order mark and end.
_LONGEST = 4 * LENGTH + len(BOM) + 3


@dataclass(frozen=True, slots=True)
class Pair:
    """A source and its target, the line of the file (from 1) where they stand, and the tags of a third column.

    >>> Pair("cat", "K AE T", 1).target
    'K AE T'
    >>> Pair("run", "ran", 2, ("V", "PST")).features
    ('V', 'PST')
    """

    source: str
    target: str
    line: int
    features: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class PairFile:
    """The pairs of one file, in order; nothing is dropped.

    >>> file = PairFile("x.tsv", (Pair("a", "1", 1), Pair("a", "2", 2), Pair("a", "1", 3)))
    >>> file.duplicates, file.ambiguous
    (1, 1)
    """

    path: str
    pairs: tuple[Pair, ...]

    @cached_property
    def duplicates(self) -> int:
        """Pairs that repeat an earlier pair exactly."""
        return len(self.pairs) - len({(pair.source, pair.features, pair.target) for pair in self.pairs})

    @cached_property
    def ambiguous(self) -> int:
        """Sources (with their tags, if any) that occur with several distinct targets."""
        return sum(len(targets) > 1 for targets in self.questions().values())

    @cached_property
    def featured(self) -> bool:
        """Whether the pairs have tags.

        >>> read_pairs("x.tsv", text="run\\tran\\tV;PST\\n", features=True).featured
        True
        """
        return any(pair.features for pair in self.pairs)

    def sources(self) -> tuple[str, ...]:
        """The first column."""
        return tuple(pair.source for pair in self.pairs)

    def targets(self) -> tuple[str, ...]:
        """The second column."""
        return tuple(pair.target for pair in self.pairs)

    def questions(self) -> dict[tuple[str, tuple[str, ...]], tuple[str, ...]]:
        """For each distinct source with its tags the distinct targets, in the order of the file.

        >>> read_pairs("x.tsv", text="go\\tgoes\\t3;SG\\ngo\\twent\\tPST\\n", features=True).questions()
        {('go', ('3', 'SG')): ('goes',), ('go', ('PST',)): ('went',)}
        """
        grouped: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
        for pair in self.pairs:
            grouped.setdefault((pair.source, pair.features), {})[pair.target] = None
        return {question: tuple(targets) for question, targets in grouped.items()}

    def summary(self) -> str:
        """One line for people.

        >>> read_pairs("x.tsv", text="a\\tb\\na\\tc\\n").summary()
        'x.tsv: 2 pairs, 0 duplicates, 1 source with several targets'
        """

        def count(n: int, noun: str) -> str:
            return f"{n:,} {noun}{'' if n == 1 else 's'}"

        return (
            f"{self.path}: {count(len(self.pairs), 'pair')}, {count(self.duplicates, 'duplicate')}, "
            f"{count(self.ambiguous, 'source')} with several targets"
        )

    def __len__(self) -> int:
        return len(self.pairs)


def split_tags(text: str) -> tuple[str, ...]:
    """The tags of a feature column; semicolons and white space part them.

    >>> split_tags("V;PST"), split_tags("N  PL;GEN")
    (('V', 'PST'), ('N', 'PL', 'GEN'))
    """
    return tuple(tag for tag in re.split(r"[;\s]+", text) if tag)


def read_pairs(path: str | Path, *, text: str | None = None, features: bool | None = False) -> PairFile:
    """Read lines of source, tab, target, and perhaps tab, tags.

    UTF-8, with or without byte order mark; LF or CRLF; gzip is recognised by its content; no line is
    a comment. White space around a field is dropped. Empty lines at the end of the file are passed over.
    A missing or extra column, an empty field, an empty line between others, invalid UTF-8, a file that is
    empty, absent, a folder or cut short is a ``DataError`` with file and line.

    Args:
        path: the file, or ``-`` for standard input.
        text: read this instead of the file; ``path`` then only names it in messages.
        features: whether each line has a third column of tags (see :func:`split_tags`); None means just when the
            first line has one. All lines must be alike.

    >>> read_pairs("names.tsv", text="cat\\tK AE T\\n").pairs
    (Pair(source='cat', target='K AE T', line=1),)
    """
    name, lines = numbered_lines(path, text)
    with closing(lines):
        return _pairs(name, lines, features)


def read_sources(path: str | Path) -> Iterator[tuple[int, str]]:
    """The first column of a file and its line numbers (from 1), one line at a time as they arrive.

    An empty line gives ``""``, so that answers stay beside their lines. Encodings are those of
    :func:`read_pairs`; that a file is absent is said at once, a broken line when it is reached.

    Args:
        path: the file, or ``-`` for standard input.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "words.txt")
    ...     _ = file.write_text("cat\\tK AE T\\ndog\\n")
    ...     list(read_sources(file))
    [(1, 'cat'), (2, 'dog')]
    """
    _, lines = numbered_lines(path)
    return ((number, line.partition("\t")[0].strip()) for number, line in lines)


def read_tagged_sources(path: str | Path) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Line numbers (from 1), sources and tags of a file, one line at a time as they arrive.

    A line has source, tab, tags; or source, tab, target, tab, tags, as a file of pairs has them. An empty line gives
    ``""`` and no tags. Otherwise as :func:`read_sources`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "verbs.tsv")
    ...     _ = file.write_text("run\\tV;PST\\ngo\\twent\\tV;PST\\n")
    ...     list(read_tagged_sources(file))
    [(1, 'run', ('V', 'PST')), (2, 'go', ('V', 'PST'))]
    """
    name, lines = numbered_lines(path)

    def rows() -> Iterator[tuple[int, str, tuple[str, ...]]]:
        with closing(lines):
            for number, line in lines:
                yield number, *_tagged(line, f"{name}:{number}")

    return rows()


def _tagged(line: str, where: str) -> tuple[str, tuple[str, ...]]:
    fields = [field.strip() for field in line.split("\t")]
    if fields == [""]:
        return "", ()
    tags = split_tags(fields[-1])
    if len(fields) not in (2, 3) or not tags:
        raise DataError(
            f"{where}: expected source, tab, tags (such as `V;PST`), which this run reads, got "
            f"{_shown(line)!r}; put the tags into the last column"
        )
    return fields[0], tags


def numbered_lines(path: str | Path, text: str | None = None) -> tuple[str, Lines]:
    """What to call a file in messages, and its lines with their numbers (from 1), as they arrive.

    That a file is absent is said at once; closing the lines closes it. ``text``, if given, is read instead.
    """
    name = "<stdin>" if str(path) == "-" else str(path)
    if text is not None:
        return name, _decode(io.BytesIO(text.encode("utf-8")), name)
    if name != "<stdin>" and not Path(path).exists():
        raise DataError(f"{name}: expected a text file, got no such file; check the path")
    if name != "<stdin>" and Path(path).is_dir():
        raise DataError(f"{name}: expected a text file, got a folder; name a file in it")

    def lines() -> Lines:
        with _open(path, name) as stream:
            yield from _decode(stream, name)

    return name, lines()


def _pairs(name: str, lines: Iterator[tuple[int, str]], features: bool | None) -> PairFile:
    pairs: list[Pair] = []
    blank = 0
    settled = features is not None
    for number, line in lines:
        if not line.strip() and "\t" not in line:
            blank = blank or number
            continue
        if blank:
            raise DataError(f"{name}:{blank}: expected source, tab, target, got an empty line; delete the line")
        if features is None:
            features = line.count("\t") == 2
        pairs.append(_pair(name, number, line, features, settled=settled))
    if not pairs:
        raise DataError(f"{name}: expected lines of source, tab, target, got an empty file; give a file with pairs")
    return PairFile(name, tuple(pairs))


def _pair(name: str, number: int, line: str, features: bool, *, settled: bool) -> Pair:
    columns = ("source", "target", "tags")[: 2 + features]
    fields = [field.strip() for field in line.split("\t")]
    if len(fields) != len(columns):
        raise DataError(
            f"{name}:{number}: expected {len(columns)} columns ({', tab, '.join(columns)}), got {len(fields)} in "
            f"{_shown(line)!r}; {_column_remedy(len(fields), features, settled)}"
        )
    for column, field_ in zip(columns, fields, strict=True):
        if not field_:
            article = "" if column == "tags" else "a "
            raise DataError(
                f"{name}:{number}: expected {article}{column}, got an empty field; fill it in or delete the line"
            )
    tags = split_tags(fields[2]) if features else ()
    if features and not tags:
        raise DataError(f"{name}:{number}: expected tags such as `V;PST`, got {fields[2]!r}; fill them in")
    return Pair(fields[0], fields[1], number, tags)


def _column_remedy(count: int, features: bool, settled: bool) -> str:
    if features and count == 2:
        whose = "as this run was trained with" if settled else "as the first line has them"
        return f"add the tags, {whose}"
    if count == 1:
        return "put one tab between them"
    if features:
        return "remove the extra tab"
    if count == 3 and settled:
        return "keep the first two or remove the extra tab (`data.features=auto` trains with a third column of tags)"
    if count == 3:
        return "keep the first two, or give every line a third column of tags (the first line has none)"
    return "keep the first two or remove the extra tab"


def _shown(line: str) -> str:
    return line if len(line) <= 60 else line[:57] + "..."


def _decode(stream: BinaryIO, name: str) -> Lines:
    """Number and decode the lines; only LF and CRLF end a line (``str.splitlines`` knows a dozen others)."""
    number = 0
    try:
        # Bounded: a device, or a file that is no text, may have no end of line at all.
        for number, raw in enumerate(iter(lambda: stream.readline(_LONGEST), b""), 1):
            if number == 1:
                if raw.startswith(UTF16):
                    raise DataError(f"{name}:1: expected UTF-8, got UTF-16; save the file as UTF-8")
                raw = raw.removeprefix(BOM)
            yield number, _text(raw, f"{name}:{number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{name}:{number + 1}: expected a whole gzip file, got one that is cut short or damaged "
            f"({error}); copy it again"
        ) from None
    except OSError as error:
        raise DataError(f"{name}:{number + 1}: {_unreadable(error)}") from None


def _text(raw: bytes, where: str) -> str:
    """A line without its end."""
    try:
        line = raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        if len(raw) < _LONGEST - len(BOM):  # else it was cut in the middle of a character
            bad = error.object[error.start]
            raise DataError(
                f"{where}: expected UTF-8, got byte 0x{bad:02x} at byte {error.start + 1} of the line; "
                "save the file as UTF-8"
            ) from None
        line = raw.decode("utf-8", "replace")
    if len(line) > LENGTH:
        raise DataError(f"{where}: expected at most {LENGTH:,} characters a line, got more; shorten or split the line")
    if "\r" in line:
        raise DataError(
            f"{where}: expected lines that end with LF or CRLF, got a carriage return inside a line; "
            "convert the line ends"
        )
    return line


def _unreadable(error: OSError) -> str:
    return f"expected a file that can be read, got an error ({error.strerror or error}); check it, or copy it again"


@contextmanager
def _open(path: str | Path, name: str) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked if they are gzip; standard input is left open."""
    if name == "<stdin>":
        if sys.stdin is None:
            raise DataError("<stdin>: expected lines of text, got standard input closed; name a file or pipe one in")
        raw: Any = sys.stdin.buffer  # whatever a caller put in its place may lack `peek`
        buffered = raw if hasattr(raw, "peek") else io.BufferedReader(raw)
        try:
            yield _unpack(buffered, name)
        finally:
            if buffered is not raw:
                buffered.detach()  # else the wrapper closes standard input when it is collected
        return
    try:
        file = Path(path).open("rb")  # noqa: SIM115 (a `with` here would catch the reader's errors as well)
    except OSError as error:
        raise DataError(f"{name}: cannot be opened ({error.strerror or error}); check its permissions") from None
    with file:
        yield _unpack(file, name)


def _unpack(stream: io.BufferedReader, name: str) -> BinaryIO:
    try:
        packed = stream.peek(2)[:2] == GZIP
    except OSError as error:
        raise DataError(f"{name}: {_unreadable(error)}") from None
    return cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if packed else stream
