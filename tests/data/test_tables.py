"""Tables of numbers from CSV and .npy files."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from thalweg.data.tables import read_table
from thalweg.errors import DataError


@pytest.mark.parametrize("mark", [",", "\t", ";"])
def test_headings_and_marks(mark):
    table = read_table("x", text=f"a{mark}b\n1{mark}2.5\n\n-3e2{mark}4\n")
    assert table.names == ("a", "b")
    assert table.values.tolist() == [[1.0, 2.5], [-300.0, 4.0]]
    assert len(table) == 2
    bare = read_table("x", text=f"1{mark}2.5\n")
    assert (bare.names, bare.values.tolist()) == (("x1", "x2"), [[1.0, 2.5]])


def test_files_with_a_mark_of_order_and_windows_ends(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes("﻿größe,b\r\n1,2\r\n".encode())
    assert read_table(path).names == ("größe", "b")


def test_missing_cells():
    table = read_table("x", text="1,NA\n,?\nnan,null\n2,3\n")
    assert np.isnan(table.values).tolist() == [[False, True], [True, True], [True, True], [False, False]]
    assert table.missing == 5


def test_sequences_by_a_column_and_what_is_taken():
    text = "t,who,x\n1,anna,2\n2,anna,3\n3,ben,4\n4,anna,5\n"
    table = read_table("x", text=text, sequence="who")
    assert (table.names, table.lengths, table.labels) == (("t", "x"), (2, 1, 1), ("anna", "ben", "anna"))
    assert len(table) == 3
    part = table.take([2, 0])
    assert part.values.tolist() == [[4.0, 5.0], [1.0, 2.0], [2.0, 3.0]]
    assert (part.lengths, part.labels) == ((1, 2), ("anna", "anna"))
    assert len(table.take([]).values) == 0


def test_arrays_stay_on_the_disk(tmp_path):
    flat, deep = tmp_path / "flat.npy", tmp_path / "deep.npy"
    np.save(flat, np.arange(6.0, dtype=np.float32).reshape(3, 2))
    np.save(deep, np.arange(24).reshape(2, 4, 3))
    table = read_table(flat)
    assert isinstance(table.values, np.memmap) or isinstance(table.values.base, np.memmap)
    assert table.values.dtype == np.float32
    table = read_table(deep)
    assert (table.lengths, table.values.shape) == ((4, 4), (8, 3))
    assert table.take([1]).values.tolist() == np.arange(12, 24).reshape(4, 3).tolist()


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.csv", b"", "expected rows of numbers, got an empty file"),
        ("x.csv", b"a,b\n", "got a heading alone"),
        ("x.csv", b"1,2\n3\n", ":2: expected 2 cells as in the first line, got 1"),
        ("x.csv", b"a,b\n1,2\n3,inf\n", ":3: expected a number in column 2, got `inf`"),
        ("x.csv", b"a,a\n1,2\n", ":1: expected columns of different names, got `a` twice"),
        ("x.csv", b"\xff\xfe1\x00", "expected UTF-8 text"),
        ("x.npy", b"no array", "got a file that is none"),
        ("x.npy", pickle.dumps(Trap()), "got a file that is none"),
    ],
)
def test_bad_files_are_one_line(tmp_path, name, content, told):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_table(path)
    assert told in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "array",
    [np.array([1, "a"], dtype=object), np.array(["a"]), np.zeros((2, 0)), np.zeros((1, 1, 1, 1)), np.array([1j])],
)
def test_arrays_of_something_else(tmp_path, array):
    path = tmp_path / "x.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(DataError, match=r"x\.npy: expected"):
        read_table(path)


def test_wrong_columns(tmp_path):
    with pytest.raises(DataError, match=r"expected a column `wo`, got none; did you mean `who`"):
        read_table("x", text="who,x\na,1\n", sequence="wo")
    with pytest.raises(DataError, match="expected a column of numbers beside `who`"):
        read_table("x", text="who\na\n", sequence="who")
    with pytest.raises(DataError, match=r"x:2: expected a number in column 3, got `z`"):
        read_table("x", text="t,who,x\n1,a,z\n", sequence="who")
    with pytest.raises(DataError, match="no such file"):
        read_table(tmp_path / "absent.csv")
    with pytest.raises(DataError, match="no such file"):
        read_table(tmp_path / "absent.npy")
    np.save(tmp_path / "x.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match="no columns by name"):
        read_table(tmp_path / "x.npy", sequence="who")


def test_a_number_is_never_a_heading():
    assert math.isnan(read_table("x", text="1,NA\n2,3\n").values[0, 1])
