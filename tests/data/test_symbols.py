from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.data import Symbols, guess_symbols, read_pairs
from thalweg.errors import ConfigError, MissingDependencyError

ALL = [
    Symbols(kind=kind, normalise=normalise)
    for kind in ("characters", "graphemes", "spaced")
    for normalise in ("nfc", "nfd", "none")
]


@pytest.mark.parametrize(
    ("symbols", "text", "expected"),
    [
        (Symbols(), "e\u0301a", ("\u00e9", "a")),
        (Symbols(normalise="none"), "e\u0301a", ("e", "\u0301", "a")),
        (Symbols(normalise="none"), "\u00e9", ("\u00e9",)),
        (Symbols(normalise="nfd"), "\ud55c", ("\u1112", "\u1161", "\u11ab")),
        (Symbols(), "a b", ("a", " ", "b")),
        (Symbols(kind="graphemes"), "a\u0320\u0303m", ("\u00e3\u0320", "m")),
        (Symbols(kind="graphemes"), "\U0001f469\u200d\U0001f52cx", ("\U0001f469\u200d\U0001f52c", "x")),
        (Symbols(kind="graphemes", normalise="nfd"), "\u00e9", ("e\u0301",)),
        (Symbols(kind="spaced"), "  t\u0361s  a\u00a0b ", ("t\u0361s", "a", "b")),
        (Symbols(kind="spaced"), " ", ()),
        (Symbols(), "", ()),
        (Symbols(kind="graphemes"), "", ()),
    ],
)
def test_split(symbols, text, expected):
    assert symbols.split(text) == expected


@given(st.text(max_size=20), st.sampled_from(ALL))
def test_split_join_split_is_split(text, symbols):
    once = symbols.split(text)
    assert symbols.split(symbols.join(once)) == once
    if symbols.kind != "spaced":
        assert symbols.join(once) == (text if symbols.normalise == "none" else unicodedata.normalize("NFC", text))


@given(st.text(alphabet="abc\r\n ", max_size=12))
def test_ascii_clusters_take_the_same_cut_as_regex(text):
    import regex

    assert Symbols(kind="graphemes").split(text) == tuple(regex.findall(r"\X", text))


def test_the_round_trip_can_fail():
    broken = "".join(Symbols(kind="spaced").split("K AE T"))
    assert Symbols(kind="spaced").split(broken) != ("K", "AE", "T")


def test_json_and_printing():
    for symbols in ALL:
        assert Symbols.from_json(json.loads(json.dumps(symbols.to_json()))) == symbols
    assert str(Symbols()) == "characters, NFC"
    assert str(Symbols(kind="graphemes", normalise="none")) == "graphemes, as is"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Symbols(kind="charcters"), "`characters`"),  # pyright: ignore
        (lambda: Symbols(normalise="nfkc"), "`nfc`"),  # pyright: ignore
        (lambda: Symbols(normalise="x"), "choose one of"),  # pyright: ignore
        (lambda: Symbols.from_json({"kin": "characters"}), "`kind`"),
        (lambda: Symbols.from_json(["characters"]), "object"),  # pyright: ignore
        (lambda: Symbols.from_json({"kind": ["characters"]}), "kind"),
    ],
)
def test_wrong_settings(make, says):
    with pytest.raises(ConfigError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_missing_regex_names_the_pip_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "regex", None)
    with pytest.raises(MissingDependencyError, match="pip install regex"):
        Symbols(kind="graphemes").split("\u00e9")


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], "characters, NFC"),
        (["a"], "characters, NFC"),
        (["", " "], "characters, NFC"),
        (["K AE1 T", "D AO1 G", "AH0"], "spaced, NFC"),
        (["h e l l o", "w o r l d"], "spaced, NFC"),
        (["two men are running", "a dog is in a car"], "characters, NFC"),
        (["new york", "paris", "rome"], "characters, NFC"),
        (["👩‍🔬👩‍❤️‍👨", "👩‍🔬"], "graphemes, NFC"),
        (["កក្កដា", "កង់", "ខ្មែរ"], "characters, NFC"),
        (["aː", "t͡s", "b a"], "spaced, NFC"),
        (["kæt", "dɒɡ"], "characters, NFC"),
        (["ɑ̃fɑ̃", "bɔ̃", "sɛ̃"], "graphemes, NFC"),
        (["नमस्ते", "हिन्दी", "कृपया", "धन्यवाद", "स्वागत", "विद्यालय", "किताब", "पानी"], "characters, NFC"),
    ],
)
def test_guess(texts, expected):
    assert str(guess_symbols(texts)) == expected


def test_guess_takes_hangul_apart():
    syllables = [chr(0xAC00 + 13 * index) for index in range(400)]
    assert str(guess_symbols(syllables)) == "characters, NFD"


def test_guess_looks_at_the_whole_file_evenly():
    texts = ["K AE T"] * 15_000 + ["cat"] * 45_000
    assert guess_symbols(texts).kind == "characters"
    assert guess_symbols(texts[::-1]).kind == "characters"


def test_guess_on_real_files(shared_data):
    for path in sorted(shared_data.glob("g2p/*/*_*.tsv")):
        file = read_pairs(path)
        source = "characters, NFD" if path.name.startswith("kor") else "characters, NFC"
        assert (path.name, str(guess_symbols(file.sources()))) == (path.name, source)
        assert (path.name, str(guess_symbols(file.targets()))) == (path.name, "spaced, NFC")
    for path in sorted(shared_data.glob("ar2en/*.tsv")):
        file = read_pairs(path)
        assert guess_symbols(file.sources()) == guess_symbols(file.targets()) == Symbols()


@pytest.mark.parametrize("language", ["en", "fr"])
def test_sentences_are_not_phones(shared_data, language):
    path = shared_data / "multi30k" / f"val.{language}"
    if not path.is_file():
        pytest.skip("needs multi30k")
    assert guess_symbols(path.read_text(encoding="utf-8").split("\n")[:-1]) == Symbols()
