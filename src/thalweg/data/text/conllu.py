"""Reader of CoNLL-U, the format of Universal Dependencies: sentences of words with ten columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from thalweg.data.text.readers import numbered_lines
from thalweg.errors import DataError, nearest

_WORD = re.compile("[1-9][0-9]*")
_RANGE = re.compile("([1-9][0-9]*)-([1-9][0-9]*)")  # 3-4: a word of the text that is several words of the grammar
_EMPTY = re.compile("[0-9]+[.][1-9][0-9]*")  # 3.1: a word that is not in the text


@dataclass(frozen=True, slots=True)
class Word:
    """One line of a sentence; the columns of CoNLL-U by their names.

    ``_``, which says that a value is not given, is read as ``""`` (as None for ``head``, as no features for
    ``feats``); ``form`` and ``lemma`` stay as they are, for there ``_`` may be the word.

    Attributes:
        id: place in the sentence, from 1.
        head: ``id`` of the word this one depends on; 0 for the root.
        feats: features by name, as ``{"Number": "Sing"}``.
        line: of the file, from 1.

    >>> word = read_conllu("x.conllu", text="1\\tcats\\tcat\\tNOUN\\t_\\tNumber=Plur\\t0\\troot\\t_\\t_\\n")[0].words[0]
    >>> word.lemma, word.upos, word.xpos, word.feats, word.head
    ('cat', 'NOUN', '', {'Number': 'Plur'}, 0)
    """

    id: int
    form: str
    lemma: str
    upos: str
    xpos: str
    feats: dict[str, str]
    head: int | None
    deprel: str
    deps: str
    misc: str
    line: int


COLUMNS = tuple(field.name for field in fields(Word))[:-1]  # the names of the ten columns, in their order


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence and the comments before them.

    Attributes:
        words: in order; ranges of words written as one (``3-4``) and empty nodes (``3.1``) are left out.
        comments: without the leading ``#``.
        line: of the file (from 1) where its first word stands.

    >>> text = "# sent_id = a1\\n1\\tGo\\tgo\\tVERB\\t_\\t_\\t0\\troot\\t_\\t_\\n"
    >>> sentence = read_conllu("x.conllu", text=text)[0]
    >>> len(sentence), sentence.metadata
    (1, {'sent_id': 'a1'})
    """

    words: tuple[Word, ...]
    comments: tuple[str, ...]
    line: int

    @cached_property
    def metadata(self) -> dict[str, str]:
        """Comments of the form ``key = value``; one without ``=`` is a key with the value ``""``."""
        pairs = (comment.partition("=") for comment in self.comments)
        return {key.strip(): value.strip() for key, _, value in pairs}

    def column(self, name: str) -> list[Any]:
        """One column of all words.

        >>> row = "_\\t_\\t0\\troot\\t_\\t_"
        >>> read_conllu("x.conllu", text=f"1\\tGo\\tgo\\tVERB\\t{row}\\n")[0].column("upos")
        ['VERB']
        """
        if name not in COLUMNS:
            raise DataError(f"`name` must be a column of CoNLL-U, got {name!r}; {nearest(name, COLUMNS)}")
        return [getattr(word, name) for word in self.words]

    def __len__(self) -> int:
        return len(self.words)


def read_conllu(path: str | Path, *, text: str | None = None) -> list[Sentence]:
    """Read the sentences of a CoNLL-U file.

    Encodings are those of :func:`read_pairs`: UTF-8 with or without byte order mark, LF or CRLF, gzip, ``-`` for
    standard input. The empty line after the last sentence may be absent. A line without ten columns, words not
    numbered 1, 2, ..., a head outside the sentence, a feature without ``=``, or comments without words is a
    ``DataError`` with file and line.

    Args:
        path: the file, or ``-``.
        text: read this instead of the file; ``path`` then only names it in messages.

    >>> first = "1\\tbirds\\tbird\\tNOUN\\t_\\t_\\t2\\tnsubj\\t_\\t_\\n"
    >>> second = "2\\tsing\\tsing\\tVERB\\t_\\t_\\t0\\troot\\t_\\t_\\n"
    >>> [sentence] = read_conllu("x.conllu", text=first + second)
    >>> sentence.column("form"), sentence.column("head")
    (['birds', 'sing'], [2, 0])
    """
    name, lines = numbered_lines(path, text)
    with closing(lines):
        return _sentences(name, lines)


def _sentences(name: str, lines: Iterator[tuple[int, str]]) -> list[Sentence]:
    sentences: list[Sentence] = []
    comments: list[str] = []
    words: list[Word] = []

    def close(number: int) -> None:
        if words:
            _check_heads(name, words)
            sentences.append(Sentence(tuple(words), tuple(comments), words[0].line))
        elif comments:
            raise DataError(f"{name}:{number}: expected words after the comments, got none; delete the comments")
        words.clear()
        comments.clear()

    number = 0
    for number, line in lines:
        if not line.strip():
            close(number)
        elif line.startswith("#") and not words:  # a word may be a hash: lines of words begin with a number
            comments.append(line[1:].strip())
        elif word := _word(name, number, line, len(words) + 1):
            words.append(word)
    close(number)
    if not sentences:
        raise DataError(f"{name}: expected sentences in CoNLL-U, got an empty file; give a file with words")
    return sentences


def _word(name: str, number: int, line: str, place: int) -> Word | None:
    """The word of a line; None where the line is a range or an empty node."""
    columns = line.split("\t")
    if len(columns) != len(COLUMNS):
        shown = line if len(line) <= 60 else line[:57] + "..."
        remedy = "put a tab between them, not spaces" if len(columns) == 1 else "write `_` for what is not given"
        raise DataError(f"{name}:{number}: expected 10 columns between tabs, got {len(columns)} in {shown!r}; {remedy}")
    if "" in columns:
        column = COLUMNS[columns.index("")]
        raise DataError(f"{name}:{number}: expected a value in column {column}, got nothing; write `_`")
    if _EMPTY.fullmatch(columns[0]):
        return None
    if ends := _RANGE.fullmatch(columns[0]):
        if not place == int(ends[1]) <= int(ends[2]):
            raise DataError(f"{name}:{number}: expected a range of words from {place} on, got {columns[0]!r}")
        return None
    if not _WORD.fullmatch(columns[0]) or int(columns[0]) != place:
        remedy = "; put an empty line between sentences" if columns[0] == "1" else ""
        raise DataError(f"{name}:{number}: expected word {place} of the sentence, got id {columns[0]!r}{remedy}")
    _, form, lemma, *given = columns
    upos, xpos, feats, head, deprel, deps, misc = ("" if value == "_" else value for value in given)
    if head and not (head.isascii() and head.isdigit()):
        raise DataError(f"{name}:{number}: expected the number of a word as head, got {head!r}")
    place_of_head = int(head) if head else None
    return Word(
        place, form, lemma, upos, xpos, _features(name, number, feats), place_of_head, deprel, deps, misc, number
    )


def _features(name: str, number: int, text: str) -> dict[str, str]:
    features: dict[str, str] = {}
    for feature in text.split("|") if text else ():
        key, equals, value = feature.partition("=")
        if not (key and equals and value):
            raise DataError(f"{name}:{number}: expected features as Name=Value|Name=Value, got {feature!r}")
        features[key] = value
    return features


def _check_heads(name: str, words: list[Word]) -> None:
    for word in words:
        if word.head is not None and word.head > len(words):
            raise DataError(
                f"{name}:{word.line}: expected a head of 0 ... {len(words)}, the words of the sentence, got {word.head}"
            )
