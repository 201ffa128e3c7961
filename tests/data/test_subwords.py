"""Subwords learnt here: what is cut is joined again, on text of several scripts, and a file of them is checked."""

from __future__ import annotations

import pytest

from thalweg.data.text.subwords import Subwords, train_subwords
from thalweg.errors import ConfigError

TEXTS = ["the cat sees l'homme.", "the dog, the cat!", "près de 3 buissons", "اسم عربي", "the  cat"]


@pytest.mark.parametrize("how", ["bpe", "unigram"])
def test_what_is_cut_is_joined_again(how):
    rule = train_subwords(TEXTS, size=60, how=how)
    for text in [*TEXTS, "the dogcat, près (l'homme)"]:
        assert rule.join(rule.split(text)) == " ".join(text.split())
    assert rule.split("") == () == rule.split("  ")
    assert rule.join(()) == ""


def test_pieces_are_within_the_vocabulary_and_strangers_stand_alone():
    rule = train_subwords(TEXTS, size=60)
    assert len(rule.pieces) <= 60
    assert set(rule.split("the cat.")) <= set(rule.pieces)
    assert "▁the" in rule.split("the cat"), "the most frequent word is one piece"
    assert rule.split("caß")[-1] == "ß"
    assert "ß" not in rule.pieces
    assert rule.split("cat.")[-1] == "."
    decomposed = "pre\u0300s"
    assert rule.split(decomposed) == rule.split("près")


def test_the_same_texts_give_the_same_pieces_and_json_gives_them_back():
    rule, again = train_subwords(TEXTS, size=50), train_subwords(TEXTS, size=50)
    assert rule == again
    assert rule != train_subwords(TEXTS, size=40)
    restored = Subwords.from_json(rule.to_json())
    assert restored == rule
    assert restored.split("the cat") == rule.split("the cat")


@pytest.mark.parametrize("bad", [{}, {"kind": "subwords"}, {"kind": "subwords", "model": {"a": 1}}])
def test_other_json_is_one_line(bad):
    with pytest.raises(ConfigError, match="subwords must"):
        Subwords.from_json(bad)
    with pytest.raises(ConfigError, match="`bpe` or `unigram`"):
        train_subwords(TEXTS, how="words")  # type: ignore[arg-type]
