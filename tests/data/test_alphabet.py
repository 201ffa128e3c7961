from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thalweg.data import BOS, EOS, PAD, UNK, Alphabet, Symbols, read_pairs
from thalweg.errors import DataError, ShapeError


def test_special_numbers():
    assert (UNK, PAD, BOS, EOS) == (0, 1, 2, 3)


def test_numbers_do_not_depend_on_the_order_of_the_data():
    forward = Alphabet.build(["cab", ("AE", "b")])
    backward = Alphabet.build([("b", "AE"), "bca"])
    assert forward == backward
    assert hash(forward) == hash(backward)
    assert forward.symbols == ("AE", "a", "b", "c")
    assert forward.encode(["c", "AE"]) == [7, 4]
    assert forward != Alphabet(["AE"])
    assert forward != ["AE", "a", "b", "c"]


@given(st.lists(st.text(min_size=1, max_size=3), max_size=10))
def test_encode_decode(symbols):
    alphabet = Alphabet.build([symbols])
    assert alphabet.decode(alphabet.encode(symbols)) == tuple(symbols)
    assert len(alphabet) == len(set(symbols)) + 4
    assert all(symbol in alphabet for symbol in symbols)
    assert Alphabet.from_json(json.loads(json.dumps(alphabet.to_json()))) == alphabet


def test_unseen_symbols():
    alphabet = Alphabet.build(["ab"])
    assert alphabet.encode("xay") == [UNK, 4, UNK]
    assert alphabet.unknown("xayx") == ("x", "y")
    assert alphabet.unknown("ab") == ()
    assert alphabet.decode([UNK, 4]) == ("\ufffd", "a")
    assert "x" not in alphabet


def test_decode_stops_at_the_end_and_passes_over_padding():
    alphabet = Alphabet.build(["ab"])
    assert alphabet.decode([BOS, 4, PAD, 5, EOS, 4, -1]) == ("a", "b")
    assert alphabet.decode(torch.tensor([4, 5, EOS, -1])) == ("a", "b")
    assert alphabet.decode([]) == ()


def test_the_empty_alphabet():
    assert len(Alphabet([])) == 4
    assert Alphabet.build([]).encode("a") == [UNK]


@pytest.mark.parametrize("number", [6, -2])
def test_a_number_outside_the_alphabet(number):
    with pytest.raises(ShapeError, match=rf"0\.\.5.*got {number}"):
        Alphabet(["a", "b"]).decode([number])


@pytest.mark.parametrize("data", [None, "ab", {"a": 1}, ["a", "a"], ["a", ""], ["a", 3], [["a"]]])
def test_broken_json(data):
    with pytest.raises(DataError, match="an alphabet"):
        Alphabet.from_json(data)


def test_a_text_is_no_list_of_symbols():
    with pytest.raises(DataError, match="build"):
        Alphabet("ab")


def test_ar2en_has_51_and_43_symbols(shared_data):
    file = read_pairs(shared_data / "ar2en" / "train.tsv")
    split = Symbols().split
    assert len(Alphabet.build(map(split, file.sources()))) == 51
    assert len(Alphabet.build(map(split, file.targets()))) == 43
