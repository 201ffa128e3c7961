"""A third column of tags: end to end for both families, in a namespace of its own, with errors that help."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest
from toy_task import TINY, toy_config

from thalweg.data import Alphabet, Symbols
from thalweg.errors import CheckpointError, ConfigError, DataError
from thalweg.tasks import build_config, evaluate, load, train
from thalweg.tasks.transduce.answers import Source
from thalweg.tasks.transduce.codec import Codec, is_tag, tag_symbol

RULES = {"PST": lambda word: word + "ed", "PRS": lambda word: word + "s"}


@pytest.fixture(scope="module")
def inflection(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inflection")
    words = ["".join(letters) for letters in itertools.product("abcd", repeat=3)]
    lines = [f"{word}\t{rule(word)}\tV;{tag}\n" for word in words for tag, rule in RULES.items()]
    random.Random(0).shuffle(lines)
    (folder / "train.tsv").write_text("".join(lines[:100]))
    (folder / "test.tsv").write_text("".join(lines[100:]))
    return folder / "train.tsv", folder / "test.tsv"


def config_for(family, files, epochs=12, **sections):
    config = toy_config(files[0], dev=files[1], epochs=epochs, training={"learning_rate": 0.02}, **sections)
    if family == "recurrent":
        return config
    training = dataclasses.replace(config.training, learning_rate=0.01, epochs=2 * epochs, warmup=10)
    shape = build_config({"model": TINY | {"width": 32}}).model
    return dataclasses.replace(config, model=shape, training=training)


@pytest.fixture(scope="module", params=["recurrent", "transformer"])
def run(request, inflection, tmp_path_factory):
    run = tmp_path_factory.mktemp(request.param) / "run"
    train(config_for(request.param, inflection), run)
    return run


def test_tags_are_told_apart(run, inflection):
    transducer = load(run, device="cpu")
    assert transducer.featured
    assert [transducer.source.alphabet.symbols[n - 4] for n in transducer.source.features] == [
        "<PRS> ",
        "<PST> ",
        "<V> ",
    ]
    found = transducer.predict([Source("abc", ("V", "PST")), Source("abc", ("V", "PRS"))], attention=True)
    past, present = list(found)
    assert (past.answers[0].text[-1:], present.answers[0].text[-1:]) == ("d", "s")
    assert past.features == ("V", "PST")
    assert len(past.answers[0].attention[0]) == 5, "two tags and three letters"
    scores = evaluate(run, str(inflection[1]), device="cpu").scores
    assert scores["cer"].value < 0.5


def test_evaluation_writes_the_tags(run, inflection):
    directory = evaluate(run, str(inflection[1]), device="cpu", references="any", name="any").directory
    records = [json.loads(line) for line in (directory / "predictions.jsonl").read_text().splitlines()]
    assert all(record["features"][0] == "V" for record in records)
    assert len(records) == 28
    pictures = json.loads((directory / "attention.json").read_text())
    assert all(picture["source"][0] == "<V>" for picture in pictures)


def test_unknown_tags_are_left_out_and_told(run):
    transducer = load(run, device="cpu")
    one, other = transducer.predict([Source("abc", ("V", "FUT")), Source("abc", ("V",))])
    assert one.unknown_features == ("FUT",)
    assert one.answers == other.answers


def test_tags_are_there_where_they_belong_and_nowhere_else(run, learnt, inflection, toy_files):
    with pytest.raises(ConfigError, match="this run reads tags beside the text, got none with `abc`"):
        next(load(run, device="cpu").predict(["abc"]))
    with pytest.raises(ConfigError, match="trained without features, got `V;PST` with `abc`"):
        next(load(learnt, device="cpu").predict([Source("abc", ("V", "PST"))]))
    with pytest.raises(DataError, match=r"test.tsv:1: expected 3 columns .*as this run was trained with"):
        evaluate(run, str(toy_files[1]), device="cpu")
    with pytest.raises(DataError, match=r"test.tsv:1: expected 2 columns .*data.features=auto"):
        evaluate(learnt, str(inflection[1]), device="cpu")
    with pytest.raises(DataError, match="cmudict:dev: expected pairs with tags"):
        evaluate(run, "cmudict:dev", device="cpu")


def test_training_with_and_without(inflection, toy_files, tmp_path):
    with pytest.raises(DataError, match=r"train.tsv:1: expected 2 columns .*data.features=auto"):
        train(config_for("recurrent", inflection, data={"features": "none"}), tmp_path / "run")
    with pytest.raises(DataError, match=r"test.tsv:1: expected 3 columns"):
        train(config_for("recurrent", (inflection[0], toy_files[1])), tmp_path / "run")
    train(config_for("recurrent", inflection, epochs=1), tmp_path / "run")
    other = tmp_path / "other.tsv"
    other.write_text(inflection[0].read_text().replace("PST", "XXX", 1).replace("XXX", "PRS"))
    with pytest.raises(CheckpointError, match="expected the training pairs it was begun with"):
        train(config_for("recurrent", (other, inflection[1]), epochs=2), tmp_path / "run", resume=True)


@pytest.mark.parametrize("kind", ["characters", "graphemes", "spaced"])
def test_no_text_is_cut_into_a_tag(kind):
    symbols = Symbols(kind=kind)
    for text in ("<V>", "<V> ", " <V> x", "\u0600 ", "< V > ", "<\u0301> "):
        assert not any(map(is_tag, symbols.split(text)))
    assert is_tag(tag_symbol("V"))
    side = Codec(symbols, Alphabet.build([symbols.split("<V> V"), (tag_symbol("V"),)]))
    assert len(side.features) == 1
    assert side.encode("<V>", ["V"])[0] == side.features[0]
    assert side.features[0] not in side.encode("<V> V")
