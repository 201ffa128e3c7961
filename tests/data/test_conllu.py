from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from thalweg.data.text.conllu import Sentence, Word, read_conllu
from thalweg.errors import DataError

# A range, an empty node, an underscore that is a word, a hash that is a word, and comments of both forms.
TEXT = """\
# sent_id = 1
# text = don't _ # = x
# newpar
1-2\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tdo\tdo\tAUX\tVBP\tMood=Ind|Tense=Pres\t0\troot\t_\tSpaceAfter=No
2\tn't\tnot\tPART\t_\t_\t1\tadvmod\t1:advmod\t_
2.1\tgone\tgo\tVERB\t_\t_\t_\t_\t1:dep\t_
3\t_\t_\tSYM\t_\t_\t1\tdep\t_\t_
4\t#\t#\tSYM\t_\tForeign=Yes\t1\tdep\t_\t_

# sent_id = 2
1\tGo\tgo\tVERB\t_\t_\t_\t_\t_\t_
"""


def row(place: object = 1, head: object = 0, feats: str = "_") -> str:
    return f"{place}\ta\ta\tX\t_\t{feats}\t{head}\troot\t_\t_\n"


def test_columns_have_names():
    first, second = read_conllu("x.conllu", text=TEXT)
    assert first.words[0] == Word(
        id=1,
        form="do",
        lemma="do",
        upos="AUX",
        xpos="VBP",
        feats={"Mood": "Ind", "Tense": "Pres"},
        head=0,
        deprel="root",
        deps="",
        misc="SpaceAfter=No",
        line=5,
    )
    assert first.column("form") == ["do", "n't", "_", "#"]
    assert first.column("id") == [1, 2, 3, 4]
    assert first.column("lemma")[2] == "_"
    assert first.column("head") == [0, 1, 1, 1]
    assert first.column("deps") == ["", "1:advmod", "", ""]
    assert (first.line, second.line) == (5, 12)
    assert second == Sentence((Word(1, "Go", "go", "VERB", "", {}, None, "", "", "", 12),), ("sent_id = 2",), 12)
    assert len(first) == 4


def test_comments_are_metadata():
    first, second = read_conllu("x.conllu", text=TEXT)
    assert first.metadata == {"sent_id": "1", "text": "don't _ # = x", "newpar": ""}
    assert first.comments == ("sent_id = 1", "text = don't _ # = x", "newpar")
    assert second.metadata == {"sent_id": "2"}


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        TEXT.rstrip("\n").encode(),
        TEXT.encode() + b"\n\n",
        b"\n" + TEXT.encode(),
        b"\xef\xbb\xbf" + TEXT.encode(),
        TEXT.replace("\n", "\r\n").encode(),
        TEXT.replace("\n\n", "\n \n\n").encode(),
        gzip.compress(TEXT.encode(), mtime=0),
    ],
)
def test_forms_of_one_file(tmp_path: Path, content: bytes):
    path = tmp_path / "x.conllu"
    path.write_bytes(content)
    expected = read_conllu("x", text=TEXT)
    for found, sentence in zip(read_conllu(path), expected, strict=True):
        assert found.comments == sentence.comments
        for column in ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc"):
            assert found.column(column) == sentence.column(column)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.conllu: expected sentences in CoNLL-U, got an empty file"),
        ("\n \n", "got an empty file"),
        (row() + "2 b b X _ _ 0 root _ _\n", "x.conllu:2: expected 10 columns between tabs, got 1 .*not spaces"),
        ("1\ta\ta\tX\n", "x.conllu:1: expected 10 columns between tabs, got 4 in .*write `_`"),
        (row().replace("X", ""), "x.conllu:1: expected a value in column upos, got nothing"),
        (row() + row(3), "x.conllu:2: expected word 2 of the sentence, got id '3'$"),
        (row() + row(1), "x.conllu:2: .* got id '1'; put an empty line between sentences"),
        (row("x"), "x.conllu:1: expected word 1 of the sentence, got id 'x'"),
        (row("0"), "got id '0'"),
        (row("2-3"), "x.conllu:1: expected a range of words from 1 on, got '2-3'"),
        (row("1-0"), "got id '1-0'|got '1-0'"),
        (row(head="one"), "x.conllu:1: expected the number of a word as head, got 'one'"),
        (row(head="-1"), "got '-1'"),
        (row(head="²"), "got '²'"),
        (row() + row(2, head=3), r"x.conllu:2: expected a head of 0 ... 2, the words of the sentence, got 3"),
        (row(feats="Number"), "x.conllu:1: expected features as Name=Value|Name=Value, got 'Number'"),
        (row(feats="A=b|"), "got ''"),
        ("# alone\n\n" + row(), "x.conllu:2: expected words after the comments, got none"),
        (row() + "\n# at the end\n", "x.conllu:3: expected words after the comments, got none"),
        (row() + "# within\n", "x.conllu:2: expected 10 columns"),
    ],
)
def test_errors_name_the_line(text: str, message: str):
    with pytest.raises(DataError, match=message):
        read_conllu("x.conllu", text=text)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(DataError, match="got no such file"):
        read_conllu(tmp_path / "absent.conllu")
    with pytest.raises(DataError, match="got a folder"):
        read_conllu(tmp_path)
    (tmp_path / "latin.conllu").write_bytes(row().encode() + b"\xe9")
    with pytest.raises(DataError, match=r"latin.conllu:2: expected UTF-8"):
        read_conllu(tmp_path / "latin.conllu")


def test_column_names_are_checked():
    with pytest.raises(DataError, match=r"got 'pos'; did you mean `.pos`"):
        read_conllu("x", text=TEXT)[0].column("pos")


def test_atis(shared_data: Path):
    path = shared_data / "ud" / "atis-dev.conllu"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    sentences = read_conllu(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert sum(map(len, sentences)) == sum(line[:1].isdigit() for line in lines)
    assert [s.metadata["sent_id"] for s in sentences] == [x[12:] for x in lines if x.startswith("# sent_id = ")]
    assert all(" ".join(s.column("form")) == s.metadata["text"] for s in sentences)
    assert all(word.head is not None and word.upos for s in sentences for word in s.words)
