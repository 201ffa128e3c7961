"""The experiment on taggers, made small: three ways to teach one, with the gap of one of them."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

from thalweg.energies import LinearTagger
from thalweg.errors import ConfigError, DataError
from thalweg.recipes import load_recipe, run_recipe
from thalweg.recipes.experiments.tagged_sentences import Corpus, made_sentences, read_tagged
from thalweg.recipes.experiments.tagging import TEACHERS, TaggingSettings, right_words, with_interval

SMALL = ["data=made", "sentences=60", "svm_passes=4", "crf_passes=8", "perceptron_passes=3"]
SMALL += ["batch=16", "svm_regularisations=[0.02, 0.01]", "crf_regularisations=[0.001]"]


def test_recipe_from_end_to_end(tmp_path):
    lines = []
    result = run_recipe(load_recipe("structural-svm"), tmp_path, overrides=SMALL, listener=lines.append)
    assert result.report is not None
    assert result.report.is_file()
    assert lines
    assert [row["training"] for row in result.table] == ["structural SVM", "CRF", "averaged perceptron"]
    assert all(0.6 < float(row["words right"]) <= 1 for row in result.table)
    assert [path.name for path in result.pictures] == ["structural-svm-gap.png", "structural-svm-accuracy.png"]
    found = json.loads((tmp_path / "results-structural-svm.json").read_text())["figures"]["runs"][0]
    duals = [point["dual"] for point in found["svm"]["certificates"]]
    assert all(a <= b for a, b in itertools.pairwise(duals))
    assert found["svm"]["regularisation"] in (0.02, 0.01)
    assert found["crf"]["passes"] >= 8


@pytest.mark.parametrize("name", TEACHERS)
def test_every_teacher_learns_and_repeats(name):
    corpus = Corpus.of(train := made_sentences(60, 0))
    batches, held_out = corpus.batches(train, 16), corpus.batches(made_sentences(30, 1), 16)
    found = []
    for _ in range(2):
        tagger, seen = LinearTagger(len(corpus.indicators), len(corpus.tags)), []
        TEACHERS[name](tagger, batches, 0.01, 6, lambda done, seconds, seen=seen: seen.append((done, seconds)), 3)
        counts = right_words(tagger, held_out)
        assert seen
        assert counts[:, 1].sum() / counts[:, 0].sum() > 0.7
        found.append(tagger.weight.detach())
    assert torch.equal(*found)


def test_a_tag_that_nobody_saw_is_never_right():
    corpus = Corpus.of([(["a", "b"], ["X", "Y"])] * 2)
    [((_, lengths), gold)] = corpus.batches([(["a", "c", "b"], ["X", "Z", "Y"])], 4)
    assert gold.tolist() == [[0, 2, 1]]
    assert lengths.tolist() == [3]
    assert right_words(LinearTagger(len(corpus.indicators), 2), corpus.batches([(["c"], ["Z"])], 4)).tolist() == [
        [1, 0]
    ]


def test_intervals_hold_the_accuracy_and_shrink():
    counts = np.array([[10.0, 9.0], [10.0, 5.0]] * 20)
    value, low, high = with_interval(counts)
    assert value == 0.7
    assert low < 0.7 < high
    assert with_interval(np.tile(counts, (9, 1)))[2] - 0.7 < (high - 0.7) / 2


def test_what_is_absent_or_wrong_is_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("THALWEG_DATA", raising=False)
    with pytest.raises(
        DataError, match=r"ud/atis-train.conllu: expected in .* it is part of ud/atis \(questions about"
    ):
        run_recipe(load_recipe("structural-svm"), tmp_path, root=tmp_path)
    with pytest.raises(DataError, match="must be a treebank such as ud/atis, or `made`, got 'atis'"):
        read_tagged("atis", 3, 0)
    with pytest.raises(ConfigError, match="`svm_passes` must be more than 0, got 0"):
        TaggingSettings(svm_passes=0)
