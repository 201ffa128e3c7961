"""The model in the box: by name, with a dictionary, in three megabytes, and nothing ever written beside it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import thalweg
from thalweg.data import load_dataset
from thalweg.errors import ConfigError, DataError
from thalweg.learning.checkpoint import load_checkpoint
from thalweg.limits import LENGTH
from thalweg.recipes import load_recipe
from thalweg.recipes.resolving import resolve
from thalweg.tasks.boxed.models import FILES, boxed, copied, folder_of, list_boxed
from thalweg.tasks.comparison import is_run
from thalweg.tasks.pronounce.dictionary import pronunciations
from thalweg.tasks.registry import task_named, task_of_run
from thalweg.tasks.transduce.answers import Source
from thalweg.tasks.transduce.search_settings import SearchConfig

BOX = boxed("english")
assert BOX is not None


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def english():
    return thalweg.load("english", device="cpu")


def inside() -> dict[str, int]:
    return {
        str(path): path.stat().st_mtime_ns for path in BOX.folder.parent.rglob("*") if "__pycache__" not in str(path)
    }


def test_every_box_is_whole():
    for name, box in list_boxed().items():
        assert all((box.folder / file).is_file() for file in (*FILES, "LICENCE.txt", "figures.json")), name
        assert sum(path.stat().st_size for path in box.folder.iterdir()) <= 3_000_000, name
        assert load_recipe(name).config
        assert task_of_run(name).load(name, device="cpu")


def test_the_model_is_that_of_its_recipe_and_never_saw_the_test_words():
    recipe, meta = load_recipe("english"), load_checkpoint(BOX.folder / "model.safetensors", values=False).meta
    task = task_named("transduce")
    asked, had = (task.settings(task.configure(settings)) for settings in (recipe.config, meta["config"]))
    for settings in (asked, had):  # what leaves the weights as they are
        for key in ("threads", "checkpoint_every", "checkpoint_seconds"):
            settings["training"].pop(key)
    assert asked == had
    assert (asked["data"]["train"], asked["data"]["dev"]) == ("cmudict:train", "cmudict:dev")
    test = {pair.source for pair in load_dataset("cmudict", "test").pairs}
    seen = {pair.source for split in ("train", "dev") for pair in load_dataset("cmudict", split).pairs}
    assert test
    assert not test & seen


def figures(split):
    return json.loads((BOX.folder / "figures.json").read_text())["measured"][f"cmudict:{split}"]


def test_its_figures_are_of_the_stored_weights(english):
    """A few test words, by the model alone: within what chance allows of the measured share."""
    words = load_dataset("cmudict", "test").questions()
    asked = list(words.items())[::12]
    plain = thalweg.load(BOX.folder, device="cpu")
    found = plain.predict([source for (source, _), _ in asked])
    right = sum(said.answers[0].text in ways for said, (_, ways) in zip(found, asked, strict=True))
    expected = 1 - figures("test")["scores"]["wer"]["value"]
    spread = (expected * (1 - expected) / len(asked)) ** 0.5
    assert abs(right / len(asked) - expected) < 4 * spread
    assert figures("test")["items"] == len(words)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["dev", "test"])
def test_its_figures_can_be_measured_again(split):
    found = thalweg.evaluate("english", f"cmudict:{split}", references="any", device="cpu")
    for key, name in (("cer", "per"), ("wer", "wer"), ("wer@5", "wer@5")):
        assert found.scores[key].value == pytest.approx(figures(split)["scores"][name]["value"], abs=0.002)


def test_a_servant_has_read_the_dictionary_before_anyone_asks():
    pronunciations.cache_clear()
    task_of_run("english").serving("english", device="cpu")
    assert pronunciations.cache_info().currsize == 1


def test_a_servant_is_examined_without_its_dictionary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = "read\tR EH D\nread\tR IY D\nthalwegs\tTH AE L W EH G Z\ncolonel\tK ER N AH L\n"
    (tmp_path / "pairs.tsv").write_text(pairs)
    servant = task_of_run("english").serving("english", device="cpu").examined
    plan = servant.plan_of({"k": 3})
    exam = servant.exam(pairs, plan)
    records = servant.answer(exam.questions, plan)
    assert all("from" not in answer for record in records for answer in record.to_json()["answers"])
    measured = thalweg.evaluate("english", "pairs.tsv", k=3, device="cpu")
    assert exam.scores(records) == measured.scores


def test_the_exact_optimum_beside_a_beam_is_the_models_own():
    servant = task_of_run("english").serving("english", device="cpu")
    (question,) = servant.questions(["read"])  # the dictionary has it, with other probabilities
    exact = servant.tree(question, servant.plan_of({"width": 3}), exact=True)["exact"]
    assert exact["optimal"]
    assert exact["log_prob"] < 0
    model = thalweg.load("english", device="cpu")
    ids = model.source.alphabet.encode("read")
    found = model.search([ids], k=1, how=SearchConfig(search="exact"))
    assert exact["log_prob"] == pytest.approx(float(found.scores[0, 0]))


def test_words_of_the_dictionary_have_all_their_pronunciations(english):
    hannah, read = english.predict(["Hannah", "READ"])
    assert [answer.text for answer in hannah.answers] == ["HH AE N AH"]
    assert [answer.text for answer in read.answers] == ["R EH D", "R IY D"]
    record = read.to_json()
    assert record["source"] == "READ"
    assert [answer["from"] for answer in record["answers"]] == ["dictionary", "dictionary"]
    assert [answer["probability"] for answer in record["answers"]] == pytest.approx([0.5, 0.5])
    assert record["words"] == [{"word": "read", "answers": record["answers"]}]
    assert next(read.tsv()).split("\t") == ["READ", "R EH D", "-0.693147", "0.5", "dictionary"]


def test_other_words_are_the_models(english):
    plain = thalweg.load(BOX.folder, device="cpu")
    words = ["thalweg", "blorptastic", "o'thalweg"]
    for ours, theirs in zip(english.predict(words, k=3), plain.predict(words, k=3), strict=True):
        assert [a.text for a in ours.answers] == [a.text for a in theirs.answers]
        assert [a.log_prob for a in ours.answers] == pytest.approx([a.log_prob for a in theirs.answers])
        assert {answer.to_json()["from"] for answer in ours.answers} == {"model"}
        assert ours.origin == "model"


def test_sentences_word_by_word(english):
    said = next(english.predict(["Hannah read 2 blorptastic books, €!"], k=4))
    assert [word.source for word in said.words] == ["hannah", "read", "two", "blorptastic", "books"]
    assert (said.origin, said.unknown) == ("dictionary+model", ("€",))
    first = said.answers[0]
    assert first.text.split(" | ")[:3] == ["HH AE N AH", "R EH D", "T UW"]
    best = sum(max(answer.log_prob for answer in word.answers) for word in said.words)
    assert first.log_prob == pytest.approx(best)
    assert len({answer.text for answer in said.answers}) == 4
    assert math.isclose(sum(answer.share for answer in said.answers), 1.0)
    json.dumps(said.to_json())


def test_nothing_to_say(english):
    for text in ("", "  ", "?!", "日本"):
        found = next(english.predict([text]))
        assert (found.answers, found.words) == ((), ())
        assert len(list(found.tsv())) == 1
    assert list(english.predict([])) == []


def test_search_and_attention_are_of_the_models_words(english):
    said = next(english.predict(["blorptastic"], k=2, how=SearchConfig(search="beam", width=4), attention=True))
    for answer in said.answers:
        rows = torch.tensor(answer.attention)
        assert rows.shape == (len(answer.symbols) + 1, len("blorptastic"))
        assert torch.allclose(rows.sum(dim=1), torch.ones(len(rows)), atol=1e-4)
    steps = list(english.stream("Blorptastic"))
    assert steps[-1].text == next(english.predict(["blorptastic"])).answers[0].text
    with pytest.raises(ConfigError, match="expected one word, got 2"):
        next(iter(english.stream("two words")))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"k": 0}, "k must be"), ({"unknown": "copy"}, "unknown must be"), ({"batch_size": 0}, "batch_size")],
)
def test_wrong_options_are_one_line(english, options, said):
    with pytest.raises(ConfigError, match=said):
        list(english.predict(["a"], **options))


def test_wrong_sources_are_one_line(english):
    with pytest.raises(ConfigError, match="reads no features"):
        next(english.predict([Source("a", ("V",))]))
    with pytest.raises(DataError, match="at most"):
        next(english.predict(["a" * (LENGTH + 1)]))


def test_streams_are_read_a_batch_at_a_time(english):
    taken = []

    def words():
        for word in ("cat", "dog", "thalweg", "bird"):
            taken.append(word)
            yield word

    stream = english.predict(words(), batch_size=2)
    next(stream)
    assert taken == ["cat", "dog"]


def test_a_run_in_the_working_directory_wins():
    Path("english").mkdir()
    (Path("english") / "notes.txt").write_text("some text")
    assert boxed("english") is not None  # a folder that is no run takes nothing away
    shutil.copy(BOX.folder / "config.yaml", "english")
    assert boxed("english") is None
    assert folder_of("english") == Path("english")
    assert task_of_run("english").name == "transduce"
    shutil.rmtree("english")
    assert boxed(Path("english")) is not None
    for other in ("runs/english", "English", "englisch", "", ".", "/english"):
        assert boxed(other) is None
    assert is_run("english")


def test_measuring_writes_to_a_copy():
    before = inside()
    Path("test.tsv").write_text("thalweg\tTH AA L W EH G\nhannah\tHH AE N AH\n")
    for _ in range(2):
        result = thalweg.evaluate("english", "test.tsv", device="cpu")
    assert result.directory == Path("runs/english-boxed/evaluation/test")
    records = [json.loads(line) for line in (result.directory / "predictions.jsonl").read_text().splitlines()]
    assert not any("from" in answer for record in records for answer in record["answers"])  # the model alone
    assert inside() == before
    (Path("runs/english-boxed") / "config.yaml").write_text("other")
    with pytest.raises(ConfigError, match="move runs/english-boxed away"):
        copied("english")


def test_it_is_compared_with_other_runs():
    shutil.copytree(BOX.folder, "runs/mine")
    Path("test.tsv").write_text("thalweg\tTH AA L W EH G\nhannah\tHH AE N AH\n")
    for runs in (["english", "runs/mine"], ["runs/mine", "english"]):
        found = thalweg.compare(runs, "test.tsv", device="cpu")
        assert [each.directory.parts[1] for each in found.evaluations] == [
            "english-boxed" if run == "english" else "mine" for run in runs
        ]


def test_it_is_looked_at_by_name():
    found = resolve("english")
    assert (found.run, found.name) == (BOX.folder, "english")
    assert found.task.example(found.config, found.run).about.startswith("a source")
    assert "recipe run english" in found.command
    changed = resolve("english", ["training.epochs=3"])  # the recipe, with other settings
    assert (changed.run, changed.config.training.epochs) == (None, 3)


def test_it_is_not_trained():
    with pytest.raises(ConfigError, match="recipe run english"):
        task_of_run("english").train(None, "runs/x")
