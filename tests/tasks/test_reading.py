"""Texts as words: numbers, punctuation, accents, abbreviations, and what is named as not read."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.number_words import ordinal, value
from thalweg.tasks.pronounce.dictionary import pronunciations
from thalweg.tasks.pronounce.numbers import LARGEST, spelt
from thalweg.tasks.pronounce.reading import plain, read


def test_numbers_mean_what_they_say():
    rng = random.Random(0)
    for n in [*range(2200), *(rng.randrange(10**15) for _ in range(2000)), *(10**e for e in range(15)), LARGEST]:
        words = spelt(str(n))
        assert words is not None
        assert value(words) == n
        assert spelt(f"{n:,}") == words


def test_ordinals_mean_what_they_say():
    for n in [*range(1, 1300), 10**6, 10**9, 21 * 10**6 + 12]:
        ending = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
        assert ordinal(spelt(f"{n}{ending}") or ()) == n
        for wrong in {"st", "nd", "rd", "th"} - {ending}:
            assert spelt(f"{n}{wrong}") is None


def test_the_oracle_can_fail():
    for wrong in (("one", "two"), ("hundred",), ("one", "thousand", "two", "million"), ("ten", "one")):
        with pytest.raises(AssertionError):
            value(wrong)


def test_digits_one_by_one():
    assert spelt("007") == ("zero", "zero", "seven")
    assert spelt("0") == ("zero",)
    assert spelt("0.50") == ("zero", "point", "five", "zero")
    assert spelt(str(LARGEST + 1)) == ("one", *["zero"] * 15)
    assert len(spelt("9" * 5000) or ()) == 5000
    for none in ("", "1,23", "1,2345", ",123", "1.", "½", "٣", "1st.", "-1"):
        assert spelt(none) is None


KNOWN = {"it's", "dr.", "dogs'", "able-bodied", "well", "u.", "'tis", "etc."}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, world!", "hello world"),
        ("It’s 'fine'.", "it's fine"),
        ("Dr. Strange.", "dr. strange"),
        ("the dogs' bones", "the dogs' bones"),
        ("’Tis “quoted”—twice…", "'tis quoted twice"),
        ("able-bodied, well-known", "able-bodied well known"),
        ("U.S.A.", "u. s a"),
        ("the end.Next", "the end next"),
        ("Café naïve Ångström", "cafe naive angstrom"),
        ("3.5% of 1,234", "three point five percent of one thousand two hundred thirty four"),
        ("-5 pages 3-4", "minus five pages three four"),
        ("the 21st, 2th", "the twenty first two th"),
        ("at 10:30", "at ten thirty"),
        ("B2B covid19", "b two b covid nineteen"),
        ("rock & roll + 1 = x@y", "rock and roll plus one equals x at y"),
        ("snake_case a/b", "snake case a b"),
        ("1984", "one thousand nine hundred eighty four"),
        ("", ""),
        (" \t\n", ""),
        ("...!?", ""),
        ("'''", ""),
    ],
)
def test_words_of_a_text(text, words):
    assert " ".join(read(text, KNOWN).words) == words
    assert read(text, KNOWN).unread == ()


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        ("5 € or $6", ("€", "$")),
        ("x² ½", ("²", "½")),
        ("Привет", tuple("привет")),
        ("日本", ("日", "本")),
        ("a\x00b", ("\x00",)),
    ],
)
def test_what_is_not_read_is_named(text, unread):
    assert read(text, ()).unread == unread


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30))
def test_any_text_can_be_read(text):
    reading = read(text, KNOWN)
    for word in reading.words:
        assert word in KNOWN or set(word) <= set("abcdefghijklmnopqrstuvwxyz'")
        assert read(word, KNOWN).words == (word,)  # a word read again is itself
    assert plain(plain(text)) == plain(text)


def test_the_dictionary():
    known = pronunciations()
    assert len(known) > 120_000
    assert known["hannah"] == ("HH AE N AH",)
    assert known["read"] == ("R EH D", "R IY D")
    assert known["a"] == ("AH", "EY")
    assert known["dr."] == ("D R AY V", "D AA K T ER")
    assert all(ways and all(way and not set(way) & set("0123456789#") for way in ways) for ways in known.values())
    phones = {phone for ways in known.values() for way in ways for phone in way.split()}
    assert len(phones) == 39
