"""Every search on a trained model: against all answers there are, one by one, streamed, drawn, and by several runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from toy_task import TINY, toy_config, write_pairs

from thalweg.data import pad
from thalweg.errors import ConfigError, DataError
from thalweg.tasks import Answer, Prediction, SearchConfig, build_config, evaluate, load, train
from thalweg.tasks.transduce.answers import Source
from thalweg.tasks.transduce.ensembles import VotingTransducer, _count, open_runs
from thalweg.tasks.transduce.search_settings import SearchName

WORDS = ["abc", "fed", "a", "cab"]


@pytest.fixture(scope="module", params=["recurrent", "transformer"])
def transducer(request, halfway, toy_files, tmp_path_factory):
    if request.param == "recurrent":
        return load(halfway, device="cpu")
    run = tmp_path_factory.mktemp("small") / "run"
    config = toy_config(toy_files[0], dev=toy_files[1], epochs=4, training={"learning_rate": 0.01})
    train(dataclasses.replace(config, model=build_config({"model": TINY}).model), run)
    return load(run, device="cpu")


def all_answers(transducer, word, limit):
    """Log-probability of every finished answer of at most ``limit`` symbols, end included, by the forward pass."""
    letters = range(4, len(transducer.target.alphabet))
    answers = [
        (*ids, 3) for length in range(limit) for ids in itertools.product(letters, repeat=length)
    ]  # fmt: skip
    source = pad([transducer.source.encode(word)] * len(answers))
    with torch.no_grad():
        scores = transducer.model.log_prob(source, pad(answers))
    return {transducer.target.decode(ids): float(score) for ids, score in zip(answers, scores, strict=True)}


@pytest.mark.parametrize("search", get_args(SearchName))
def test_scores_are_those_of_the_model(transducer, search):
    how = SearchConfig(search=search, max_length=4, samples=8)
    for word in WORDS[:2]:
        every = all_answers(transducer, word, 4)
        (found,) = transducer.predict([word], k=3, how=how)
        assert 1 <= len(found.answers) <= 3
        for answer in found.answers:
            if answer.finished:
                assert answer.log_prob == pytest.approx(every[answer.text], abs=1e-4)
        assert (found.answers[0].optimal is not None) == (search in ("beam", "exact"))
        if found.answers[0].optimal:
            assert every[found.answers[0].text] == pytest.approx(max(every.values()), abs=1e-4)
        distinct = {(answer.text, answer.finished): answer.share for answer in found.answers}
        assert sum(distinct.values()) == pytest.approx(1)
        if search == "exact":
            assert found.answers[0].optimal


@pytest.mark.parametrize("search", ["greedy", "beam", "diverse", "exact"])
def test_batches_change_nothing(transducer, search):
    how = SearchConfig(search=search)
    together = [prediction.answers for prediction in transducer.predict(WORDS, k=2, how=how)]
    for word, answers in zip(WORDS, together, strict=True):
        (alone,) = transducer.predict([word], k=2, how=how)
        assert [a.text for a in alone.answers] == [a.text for a in answers]
        assert [a.log_prob for a in alone.answers] == pytest.approx([a.log_prob for a in answers], abs=1e-4)


@pytest.mark.parametrize("search", ["nucleus", "typical", "min-p", "sample", "stochastic", "mbr"])
def test_draws_depend_on_their_seed_alone(transducer, search):
    first, again, other = (
        [p.answers for p in transducer.predict(WORDS, k=4, how=SearchConfig(search=search, sampling_seed=seed))]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert search == "mbr" or first != other
    if search in ("stochastic", "mbr"):
        assert all(len({a.text for a in row}) == len(row) for row in first)


@pytest.mark.parametrize("search", ["greedy", "beam", "diverse", "exact", "nucleus", "mbr"])
def test_lexicon_prefix_and_least_length(transducer, tmp_path, search):
    lexicon = tmp_path / "words.txt"
    lexicon.write_text("CBA\nDEF\tignored\n\nA\nŻ\n")
    for word in WORDS:
        (found,) = transducer.predict([word], k=3, how=SearchConfig(search=search, lexicon=str(lexicon)))
        assert {a.text for a in found.answers} <= {"CBA", "DEF", "A"}
        (found,) = transducer.predict([word], k=3, how=SearchConfig(search=search, prefix="FE"))
        assert all(a.text.startswith("FE") for a in found.answers)
        (found,) = transducer.predict([word], k=3, how=SearchConfig(search=search, min_length=7, max_length=8))
        assert all(len(a.symbols) >= 6 for a in found.answers)
    if search == "exact":
        every = all_answers(transducer, "abc", 4)
        (found,) = transducer.predict(["abc"], how=SearchConfig(search=search, lexicon=str(lexicon)))
        assert found.answers[0].text == max(("CBA", "DEF", "A"), key=every.__getitem__)


def test_constraints_that_cannot_hold(transducer, tmp_path):
    def answer(**settings):
        return next(transducer.predict(["abc"], how=SearchConfig(search="beam", **settings)))

    empty, foreign = tmp_path / "empty.txt", tmp_path / "foreign.txt"
    empty.write_text("\n")
    foreign.write_text("żż\n")
    with pytest.raises(DataError, match=r"empty.txt: expected answers, one a line, got an empty file"):
        answer(lexicon=str(empty))
    with pytest.raises(DataError, match=r"foreign.txt: expected answers that the model can write, got none of 1"):
        answer(lexicon=str(foreign))
    with pytest.raises(ConfigError, match="the prefix must be of symbols that the model writes, got `ż`"):
        answer(prefix="Aż")
    with pytest.raises(ConfigError, match="which prefix and lexicon do not go with"):
        next(transducer.predict(["abc"], how=SearchConfig(search="beam", prefix="A"), unknown="copy"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"search": "stochastic", "prefix": "A"}, "search.prefix does not go with `stochastic` search"),
        ({"search": "stochastic", "min_length": 2}, "search.min_length does not go with `stochastic`"),
        ({"search": "bem"}, "search.search `bem` is not known; did you mean `beam`?"),
        ({"groups": 3, "width": 5}, "search.groups must divide search.width = 5, got 3"),
        ({"groups": 6, "width": 5}, "search.groups must be at most search.width = 5, got 6"),
        ({"min_length": 5, "max_length": 4}, "search.min_length must be at most search.max_length = 4, got 5"),
        ({"typical": 0.0}, "search.typical must be in (0, 1], got 0.0"),
        ({"min_p": math.nan}, "search.min_p must be in (0, 1], got nan"),
        ({"samples": 0}, "search.samples must be at least 1, got 0"),
        ({"diversity": -1.0}, "search.diversity must be 0 or more, got -1.0"),
        ({"max_expansions": -1}, "search.max_expansions must be 0 or more, got -1"),
    ],
)
def test_settings_that_contradict(settings, said):
    with pytest.raises(ConfigError) as caught:
        SearchConfig(**settings)
    assert said in str(caught.value)


@pytest.mark.parametrize("search", ["greedy", "beam", "nucleus"])
def test_a_stream_ends_with_the_answer(transducer, search):
    how = SearchConfig(search=search)
    for word in WORDS:
        growing = list(transducer.stream(word, how=how))
        (prediction,) = transducer.predict([word], how=how)
        answer = prediction.answers[0]
        # A search that is watched goes step by step, another may not: the last digits are another sum's.
        assert growing[-1].log_prob == pytest.approx(answer.log_prob, rel=1e-6)
        assert dataclasses.replace(growing[-1], log_prob=answer.log_prob) == answer
        assert len(growing) > 1
        assert all(len(answer.symbols) <= n for n, answer in enumerate(growing[:-1], start=1))
        if search == "greedy":
            assert all(growing[-1].text.startswith(answer.text) for answer in growing)
    assert list(transducer.stream("")) == []
    with pytest.raises(ConfigError, match="`exact` search has no answer that grows"):
        next(transducer.stream("abc", how=SearchConfig(search="exact")))


def test_the_tree_is_drawn(transducer, tmp_path):
    how = SearchConfig(search="beam", width=3)
    for name in ("tree.png", "tree.dot"):
        transducer.draw_tree(Source("abc"), tmp_path / "new" / name, how=how)
    assert (tmp_path / "new" / "tree.png").read_bytes().startswith(b"\x89PNG")
    assert "digraph" in (tmp_path / "new" / "tree.dot").read_text()
    with pytest.raises(ConfigError, match=r"tree.xyz: expected a name that ends in .png"):
        transducer.draw_tree(Source("abc"), tmp_path / "tree.xyz", how=how)


@pytest.fixture
def own_run(halfway, tmp_path):
    """A copy: an evaluation is written into its run, and other tests want that as it was."""
    return Path(shutil.copytree(halfway, tmp_path / "own"))


def test_exact_evaluation_tells_about_the_beam(own_run, toy_files):
    how = SearchConfig(search="exact", width=1, max_length=6)
    result = evaluate(own_run, str(toy_files[1]), how=how, name="exact", device="cpu")
    report, transducer = result.exact, load(own_run, device="cpu")
    words = [line.split("\t")[0] for line in toy_files[1].read_text().splitlines()]
    exact = [p.answers[0] for p in transducer.predict(words, how=how)]
    beam = [p.answers[0] for p in transducer.predict(words, how=dataclasses.replace(how, search="beam"))]
    assert report.proved == sum(a.optimal for a in exact) == report.items == len(words)
    assert report.beam_optimal == sum(a.text == b.text for a, b in zip(exact, beam, strict=True))
    assert report.beam_optimal + report.beam_beaten == len(words)
    assert report.empty == sum(a.text == "" for a in exact)
    saved = json.loads((result.directory / "metrics.json").read_text())["exact"]
    assert (
        saved
        == result.to_json()["exact"]
        == pytest.approx(
            {"width": 1, "proved": 1, "empty": report.empty / len(words)}
            | {name: getattr(report, name) / len(words) for name in ("beam_optimal", "beam_beaten")}
        )
    )
    assert evaluate(own_run, str(toy_files[1]), name="beam", device="cpu").exact is None


def test_an_ensemble_is_the_mean(halfway, learnt, toy_files, tmp_path):
    train(toy_config(toy_files[0], dev=toy_files[1], epochs=1), tmp_path / "second")
    both = open_runs([halfway, tmp_path / "second"], device="cpu")
    members = [load(run, device="cpu") for run in (halfway, tmp_path / "second")]
    source, first = pad([members[0].source.encode("abc")]), torch.tensor([2])
    mean = sum(m.model.step(first, m.model.begin(source))[0].exp() for m in members) / 2
    assert torch.allclose(both.model.step(first, both.model.begin(source))[0].exp(), mean, atol=1e-6)
    (prediction,) = both.predict(["abc"], k=2, attention=True)
    assert len(prediction.answers) == 2
    assert sum(prediction.answers[0].attention[0]) == pytest.approx(1, abs=1e-4)
    (same,) = open_runs([halfway, halfway], device="cpu").predict(["abc"], k=2)
    (alone,) = members[0].predict(["abc"], k=2)
    assert [a.text for a in same.answers] == [a.text for a in alone.answers]


def test_runs_that_do_not_go_together(halfway, tmp_path):
    for name, pairs in (("letters", [("xyz" * n, "ZYX") for n in (1, 2, 3)]), ("phones", [("abc", "K A N G")] * 3)):
        file = write_pairs(tmp_path / f"{name}.tsv", pairs)
        train(toy_config(file, dev=file, epochs=1), tmp_path / name)
    with pytest.raises(
        ConfigError, match=r"letters: expected the source alphabet of .*symbols differ: `a`.*or use --vote"
    ):
        open_runs([halfway, tmp_path / "letters"], device="cpu")
    with pytest.raises(ConfigError, match=r"phones: expected targets cut as in .*characters, NFC.*got spaced"):
        open_runs([halfway, tmp_path / "phones"], vote=True, device="cpu")
    assert isinstance(open_runs([halfway, tmp_path / "letters"], vote=True, device="cpu"), VotingTransducer)


def test_votes_are_counted():
    def vote(*answers):
        rows = [Prediction("x", (Answer(text, tuple(text), math.log(p), True),)) for text, p in answers]
        return [(answer.text, answer.votes) for answer in _count(rows)]

    assert vote(("a", 0.9), ("b", 0.1), ("b", 0.1)) == [("b", 2), ("a", 1)]
    assert vote(("a", 0.1), ("b", 0.9)) == [("b", 1), ("a", 1)]
    assert vote(("a", 0.5), ("b", 0.5)) == [("a", 1), ("b", 1)]
    assert _count([Prediction("x", ())]) == ()


def test_a_vote_over_a_file(own_run, learnt, toy_files):
    jury = open_runs([own_run, learnt, learnt], vote=True, device="cpu")
    best = [p.answers[0] for p in load(learnt, device="cpu").predict(WORDS)]
    found = [p.answers[0] for p in jury.predict(WORDS, k=2, batch_size=3)]
    assert [a.text for a in found] == [a.text for a in best]
    assert all(a.votes >= 2 and a.share >= 2 / 3 for a in found)
    with pytest.raises(ConfigError, match="--tree draws one beam"):
        jury.draw_tree(Source("abc"), toy_files[0], how=SearchConfig(search="beam"))
    scores = evaluate(
        own_run, str(toy_files[1]), ensemble=[learnt, learnt], vote=True, name="vote", device="cpu"
    ).scores
    assert scores["accuracy"].value > 0.9


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_reduced_precision_stays_near(halfway, precision):
    full, less = (load(halfway, device="cpu", precision=p) for p in ("float32", precision))
    one, other = (next(t.predict(["abc"])).answers[0] for t in (full, less))
    assert one.log_prob == pytest.approx(other.log_prob, abs=0.1)
    assert one.log_prob != other.log_prob
