from __future__ import annotations

import gzip
import io
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.data_plain import count_pairs
from thalweg.data import Pair, PairFile, read_pairs, read_sources
from thalweg.data.text.readers import read_tagged_sources
from thalweg.errors import DataError

GOOD = "cat\tK AE T\n#hash\tHH\nna\u00efve\tN\n".encode()
PAIRS = (Pair("cat", "K AE T", 1), Pair("#hash", "HH", 2), Pair("na\u00efve", "N", 3))


def write(folder: Path, content: bytes, name: str = "x.tsv") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def feed(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        GOOD.rstrip(b"\n"),
        GOOD + b"\n",
        GOOD + b"\r\n \n",
        b"\xef\xbb\xbf" + GOOD,
        GOOD.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b"\r\n",
        GOOD.replace(b"\t", b" \t "),
        gzip.compress(GOOD, mtime=0),
        gzip.compress(GOOD[:10], mtime=0) + gzip.compress(GOOD[10:], mtime=0),
        gzip.compress(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"), mtime=0),
    ],
)
def test_forms_of_one_file(tmp_path, monkeypatch, content):
    assert read_pairs(write(tmp_path, content)).pairs == PAIRS
    assert read_pairs(str(write(tmp_path, content, "x.gz"))).pairs == PAIRS
    feed(monkeypatch, content)
    file = read_pairs("-")
    assert file.pairs == PAIRS
    assert file.path == "<stdin>"


def test_text_in_place_of_a_file():
    assert read_pairs("nowhere.tsv", text=GOOD.decode()).pairs == PAIRS


def test_other_unicode_line_ends_are_text():
    (pair,) = read_pairs("x", text="a\u2028b\x0bc\u0085d\te\n").pairs
    assert pair.source == "a\u2028b\x0bc\u0085d"


BAD = [
    (b"a\tb\nc\n", ":2:", "got 1 in 'c'; put one tab"),
    (b"a b\n", ":1:", "got 1 in 'a b'"),
    (b"a\tb\nc\td\te\n", ":2:", "got 3"),
    (b"a\tb\t\n", ":1:", "got 3"),
    (b"a\tb\n" + b"x" * 500 + b"\n", ":2:", "\\.\\.\\."),
    (b"\tb\n", ":1:", "expected a source, got an empty field"),
    (b"a\t\n", ":1:", "expected a target, got an empty field"),
    (b"a\tb\na\t  \n", ":2:", "expected a target, got an empty field"),
    (b"a\tb\n\t\n", ":2:", "expected a source, got an empty field"),
    (b"a\tb\n\nc\td\n", ":2:", "empty line"),
    (b"\r\na\tb\n", ":1:", "empty line"),
    (b"a\tb\nc\t\xe9\n", ":2:", "expected UTF-8, got byte 0xe9 at byte 3"),
    (b"a\t\xed\xa0\x80\n", ":1:", "expected UTF-8, got byte 0xed"),
    ("a\tb\n".encode("utf-16"), ":1:", "UTF-16"),
    (b"a\tb\rc\td\r", ":1:", "carriage return"),
    (b"", ":", "empty file"),
    (b"\xef\xbb\xbf", ":", "empty file"),
    (b"\n \r\n", ":", "empty file"),
    (gzip.compress(b"", mtime=0), ":", "empty file"),
    (gzip.compress(GOOD, mtime=0)[:-9], ":", "cut short or damaged"),
    (gzip.compress(GOOD, mtime=0)[:-1], ":", "cut short or damaged"),
    (b"\x1f\x8b", ":1:", "cut short or damaged"),
    (b"\x1f\x8bnonsense", ":1:", "cut short or damaged"),
    (
        gzip.compress(GOOD, mtime=0)[:12] + b"\xff\xff\xff" + gzip.compress(GOOD, mtime=0)[15:],
        ":1:",
        "cut short or damaged",
    ),
    (gzip.compress(b"a\tb\nc\n", mtime=0), ":2:", "got 1 in 'c'"),
]


@pytest.mark.parametrize(("content", "place", "says"), BAD)
def test_bad_files(tmp_path, monkeypatch, content, place, says):
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=says) as caught:
        read_pairs(path)
    message = str(caught.value)
    assert message.startswith(f"{path}{place}")
    assert "\n" not in message
    feed(monkeypatch, content)
    with pytest.raises(DataError, match=says) as caught:
        read_pairs("-")
    assert str(caught.value).startswith(f"<stdin>{place}")


@pytest.mark.parametrize("read", [read_pairs, read_sources])
def test_absent_file_and_folder(tmp_path, read):
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "absent.tsv")
    with pytest.raises(DataError, match="got a folder"):
        read(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        read(str(tmp_path / "a" / "b"))


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_forbidden_file(tmp_path):
    path = write(tmp_path, GOOD)
    path.chmod(0)
    with pytest.raises(DataError, match="cannot be opened"):
        read_pairs(path)


def test_open_failure_is_one_line(tmp_path, monkeypatch):
    path = write(tmp_path, GOOD)

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"Permission denied.*permissions"):
        read_pairs(path)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), min_size=1, max_size=20))
def test_counts_agree_with_the_oracle(pairs):
    text = "".join(f"{source}\t{target}\n" for source, target in pairs)
    file = read_pairs("x", text=text)
    assert (len(file), file.duplicates, file.ambiguous) == count_pairs(text)
    assert list(zip(file.sources(), file.targets(), strict=True)) == pairs
    assert [pair.line for pair in file.pairs] == list(range(1, len(pairs) + 1))
    questions = file.questions()
    assert sum(map(len, questions.values())) == len(set(pairs))
    assert all(target in questions[source, ()] for source, target in pairs)


def test_the_count_oracle_can_fail():
    once = PairFile("x", tuple({Pair(*line.split("\t"), 1) for line in ("a\tb", "a\tb")}))
    assert (len(once), once.duplicates, once.ambiguous) != count_pairs("a\tb\na\tb\n")


def test_summary():
    file = read_pairs("x.tsv", text="a\tb\na\tb\na\tc\nd\te\n")
    assert file.summary() == "x.tsv: 4 pairs, 1 duplicate, 1 source with several targets"


def test_sources(tmp_path, monkeypatch):
    content = b"\xef\xbb\xbfcat\r\n\ndog\tD\tAO\n#x \nlast"
    expected = [(1, "cat"), (2, ""), (3, "dog"), (4, "#x"), (5, "last")]
    assert list(read_sources(write(tmp_path, content))) == expected
    assert list(read_sources(write(tmp_path, gzip.compress(content, mtime=0)))) == expected
    feed(monkeypatch, content)
    assert list(read_sources("-")) == expected
    assert list(read_sources(write(tmp_path, b""))) == []


def test_sources_before_a_broken_line_still_come(tmp_path):
    lines = read_sources(write(tmp_path, b"cat\n\xff\ndog\n"))
    assert next(lines) == (1, "cat")
    with pytest.raises(DataError, match=r"x\.tsv:2: expected UTF-8, got byte 0xff at byte 1"):
        next(lines)
    with pytest.raises(DataError, match="cut short"):
        list(read_sources(write(tmp_path, gzip.compress(GOOD, mtime=0)[:-4])))


def test_sources_come_as_they_arrive(monkeypatch):
    """The first answer must not wait for the second question."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as raw, os.fdopen(writer, "wb", buffering=0) as out:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(raw))
        lines = read_sources("-")
        got: list[tuple[int, str]] = []
        out.write(b"cat\n")
        first = threading.Thread(target=lambda: got.append(next(lines)))
        first.start()
        first.join(timeout=10)
        alive = first.is_alive()
        out.close()
        first.join()
        assert not alive
        assert got == [(1, "cat")]
        assert list(lines) == []
        assert not raw.closed


def test_an_abandoned_reader_closes_its_file(tmp_path):
    lines = read_sources(write(tmp_path, GOOD))
    next(lines)
    del lines  # a ResourceWarning would be an error


def test_ar2en_counts(shared_data):
    for split, count in (("train", 12_877), ("dev", 1_431), ("test", 1_590)):
        path = shared_data / "ar2en" / f"{split}.tsv"
        file = read_pairs(path)
        assert len(file) == count
        assert list(read_sources(path)) == [(pair.line, pair.source) for pair in file.pairs]
    small = shared_data / "ar2en" / "dev.tsv"
    file = read_pairs(small)
    assert (len(file), file.duplicates, file.ambiguous) == count_pairs(small.read_text(encoding="utf-8"))


def test_a_third_column_of_tags():
    text = "run\tran\tV;PST\nrun\truns\tV PRS;3\nrun\tran\tV;PST\n"
    for features in (True, None):
        file = read_pairs("x.tsv", text=text, features=features)
        assert [pair.features for pair in file.pairs] == [("V", "PST"), ("V", "PRS", "3"), ("V", "PST")]
        assert file.featured
        # The same word with other tags is another question.
        assert (file.duplicates, file.ambiguous) == (1, 0)
        assert file.questions() == {("run", ("V", "PST")): ("ran",), ("run", ("V", "PRS", "3")): ("runs",)}
    assert not read_pairs("x.tsv", text="a\tb\n", features=None).featured


@pytest.mark.parametrize(
    ("text", "features", "says"),
    [
        ("a\tb\tc\n", False, r"x.tsv:1: expected 2 columns .* got 3 .*`data.features=auto` trains with a third column"),
        ("a\tb\nc\td\te\n", None, "x.tsv:2: expected 2 columns .* got 3 .*the first line has none"),
        ("a\tb\tc\nd\te\n", None, "x.tsv:2: expected 3 columns .* got 2 .*add the tags, as the first line has them"),
        ("a\tb\n", True, "x.tsv:1: expected 3 columns .*add the tags, as this run was trained with"),
        ("a\tb\tc\td\n", True, "x.tsv:1: expected 3 columns .* got 4 .*remove the extra tab"),
        ("a\tb\t\n", True, "x.tsv:1: expected tags, got an empty field"),
        ("a\tb\t;\n", True, "x.tsv:1: expected tags such as `V;PST`, got ';'"),
    ],
)
def test_columns_that_are_missing_or_too_many(text, features, says):
    with pytest.raises(DataError, match=says) as caught:
        read_pairs("x.tsv", text=text, features=features)
    assert "\n" not in str(caught.value)


def test_sources_with_tags(tmp_path):
    file = tmp_path / "x.tsv"
    file.write_text("run\tV;PST\n\ngo\twent\tV PST\nalone\n")
    reader = read_tagged_sources(file)
    assert [next(reader) for _ in range(3)] == [(1, "run", ("V", "PST")), (2, "", ()), (3, "go", ("V", "PST"))]
    with pytest.raises(DataError, match=r"x.tsv:4: expected source, tab, tags .*got 'alone'; put the tags"):
        next(reader)
