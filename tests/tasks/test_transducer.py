"""Prediction: order, k-best, streaming, unknown symbols, attention, scripts, and every way loading can fail."""

from __future__ import annotations

import itertools
import math
import shutil
import unicodedata

import pytest
import torch
from toy_task import toy_config, write_pairs

from thalweg.data import Symbols, pad
from thalweg.errors import CheckpointError, ConfigError
from thalweg.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from thalweg.tasks import Answer, SearchConfig, load, train
from thalweg.tasks.transduce.answers import join_answers

WORDS = ["abc", "fed", "aaa", "cab", "f", "abcdef", "bad", "abc", "ea"]


@pytest.fixture(scope="module")
def transducer(halfway):
    return load(halfway, device="cpu")


def texts(prediction):
    return [a.text for a in prediction.answers]


@pytest.mark.parametrize("search", ["greedy", "beam", "nucleus"])
@pytest.mark.parametrize("batch_size", [1, 4, 256])
def test_order_is_kept_and_answers_are_sorted(transducer, search, batch_size):
    how = SearchConfig(search=search, width=4)
    found = list(transducer.predict(WORDS, k=3, how=how, batch_size=batch_size))
    assert [p.source for p in found] == WORDS
    for prediction in found:
        assert 1 <= len(prediction.answers) <= (1 if search == "greedy" else 3)
        assert prediction.unknown == ()
        keys = [(not a.finished, -a.log_prob) for a in prediction.answers]
        assert keys == sorted(keys)
        for a in prediction.answers:
            assert a.log_prob <= 0
            assert a.probability == math.exp(a.log_prob)
            assert a.text == "".join(a.symbols)
            assert a.attention is None
        if search == "beam":
            assert len(set(texts(prediction))) == len(prediction.answers) == 3


@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_batches_change_nothing(transducer, search):
    how = SearchConfig(search=search)
    together = list(transducer.predict(WORDS, k=2, how=how))
    alone = [next(transducer.predict([word], k=2, how=how)) for word in WORDS]
    for one, other in zip(together, alone, strict=True):
        assert texts(one) == texts(other)
        assert [a.log_prob for a in one.answers] == pytest.approx([a.log_prob for a in other.answers], abs=1e-5)


def test_log_probabilities_are_the_models(transducer):
    for prediction in transducer.predict(WORDS, k=3):
        for a in prediction.answers:
            source = transducer.source.encode(prediction.source)
            target = transducer.target.encode(a.text)
            assert a.finished
            expected = transducer.model.log_prob(pad([source]), pad([target], end=3)).item()
            assert a.log_prob == pytest.approx(expected, abs=1e-5)


def test_a_wide_beam_is_exact_on_short_answers(transducer):
    """Every answer of at most two symbols, by brute force, against a beam that holds them all."""
    source = transducer.source.encode("fa")
    symbols = transducer.target.alphabet.symbols
    every = ["".join(p) for n in (0, 1, 2) for p in itertools.product(symbols, repeat=n)]
    targets = pad([transducer.target.encode(text) for text in every], end=3)
    with torch.no_grad():
        scores = transducer.model.log_prob(pad([source] * len(every)), targets).tolist()
    expected = sorted(zip(scores, every, strict=True), reverse=True)[:5]
    how = SearchConfig(search="beam", width=64, max_length=3)
    (found,) = transducer.predict(["fa"], k=5, how=how)
    assert texts(found) == [text for _, text in expected]
    assert [a.log_prob for a in found.answers] == pytest.approx([score for score, _ in expected], abs=1e-5)


def test_an_answer_cut_short_is_not_finished(transducer):
    (found,) = transducer.predict(["abc"], how=SearchConfig(search="greedy", max_length=2))
    assert not found.answers[0].finished
    assert len(found.answers[0].symbols) == 2


@pytest.mark.parametrize("batch_size", [1, 3])
def test_streaming_reads_at_most_a_batch_ahead(transducer, batch_size):
    read = []

    def source():
        for word in WORDS:
            read.append(word)
            yield word

    stream = transducer.predict(source(), batch_size=batch_size)
    assert read == []
    for given, prediction in enumerate(stream):
        assert prediction.source == WORDS[given]
        assert len(read) - given <= batch_size
    assert read == WORDS


def test_nothing_and_empty_texts(transducer):
    assert list(transducer.predict([])) == []
    found = list(transducer.predict(["", "abc", ""], k=2))
    assert [len(p.answers) for p in found] == [0, 2, 0]
    assert [p.source for p in found] == ["", "abc", ""]
    assert next(transducer.predict([""], unknown="copy")).answers == ()
    assert [len(p.answers) for p in transducer.predict(["", ""], attention=True)] == [0, 0]


def test_sampling_is_reproducible_and_independent(transducer):
    def draw(seed, words):
        how = SearchConfig(search="nucleus", sampling_seed=seed, temperature=1.5, top_p=1.0)
        return [texts(p) for p in transducer.predict(words, k=4, how=how)]

    assert draw(0, WORDS) == draw(0, WORDS)
    assert draw(0, WORDS) != draw(1, WORDS)
    same = draw(0, ["abc"] * 20)
    assert len({tuple(row) for row in same}) > 5, "equal words are drawn anew"
    before = torch.get_rng_state()
    draw(0, WORDS)
    assert torch.equal(before, torch.get_rng_state())


def test_unknown_symbols_are_reported(transducer):
    found = list(transducer.predict(["ab", "aXbYX", "Z"], k=2))
    assert [p.unknown for p in found] == [(), ("X", "Y"), ("Z",)]
    assert all(len(p.answers) == 2 for p in found)
    # Every unknown symbol is read alike.
    one, other = transducer.predict(["aXb", "aYb"])
    assert texts(one) == texts(other)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_copied_symbols_join_the_best_answers_of_the_pieces(transducer, k):
    (found,) = transducer.predict(["aX-bcXde"], k=k, unknown="copy")
    assert found.unknown == ("X", "-")
    pieces = [next(transducer.predict([piece], k=k)).answers for piece in ("a", "bc", "de")]
    every = [(sum(a.log_prob for a in combination), combination) for combination in itertools.product(*pieces)]
    every.sort(key=lambda pair: -pair[0])
    joined = [(score, f"{a.text}X-{b.text}X{c.text}") for score, (a, b, c) in every]
    assert [a.log_prob for a in found.answers] == pytest.approx([score for score, _ in joined[:k]], abs=1e-5)
    assert found.answers[0].text == joined[0][1]
    assert set(texts(found)) <= {text for _, text in joined}
    assert len(found.answers) == k
    for a in found.answers:
        assert a.text == "".join(a.symbols)


def test_copying_where_nothing_or_everything_is_unknown(transducer):
    known, copied = (next(transducer.predict(["abc"], k=3, unknown=how)) for how in ("report", "copy"))
    assert known == copied
    (strange,) = transducer.predict(["XYZ"], k=3, unknown="copy", attention=True)
    assert [(a.text, a.log_prob, a.finished) for a in strange.answers] == [("XYZ", 0.0, True)]
    assert strange.unknown == ("X", "Y", "Z")


@pytest.mark.parametrize("search", ["greedy", "beam", "nucleus"])
def test_attention_has_a_row_for_each_symbol_and_sums_to_one(transducer, search):
    for prediction in transducer.predict(WORDS, k=2, how=SearchConfig(search=search), attention=True):
        for a in prediction.answers:
            assert a.attention is not None
            assert len(a.attention) == len(a.symbols) + a.finished
            for row in a.attention:
                assert len(row) == len(prediction.source)
                assert sum(row) == pytest.approx(1.0, abs=1e-5)
                assert min(row) >= 0
    plain = list(transducer.predict(WORDS, k=2))
    assert [texts(p) for p in plain] == [texts(p) for p in transducer.predict(WORDS, k=2, attention=True)]


def test_a_model_without_attention_gives_none(toy_files, tmp_path):
    train(toy_config(toy_files[0], epochs=1, model={"attention": "none"}), tmp_path / "run")
    (found,) = load(tmp_path / "run", device="cpu").predict(["abc"], attention=True)
    assert found.answers[0].attention is None


def test_wrong_arguments(transducer):
    for wrong in ({"k": 0}, {"batch_size": 0}, {"batch_size": -1}, {"unknown": "cpy"}):
        with pytest.raises(ConfigError):
            list(transducer.predict(["abc"], **wrong))


@pytest.fixture(scope="module")
def korean(tmp_path_factory):
    """한국 and its like to Latin letters; the source is taken apart into letters."""
    folder = tmp_path_factory.mktemp("korean")
    pairs = [("한국", "hangug"), ("국한", "gughan"), ("각하", "gagha"), ("나", "é"), ("가나", "ga né")] * 4
    config = toy_config(
        write_pairs(folder / "x.tsv", pairs), dev=folder / "x.tsv", epochs=30, data={"source_normalise": "nfd"}
    )
    train(config, folder / "run")
    return load(folder / "run", device="cpu")


def test_korean_and_decomposed_text(korean):
    composed, apart = "한국", unicodedata.normalize("NFD", "한국")
    assert composed != apart
    one, other = korean.predict([composed, apart])
    assert (one.source, other.source) == (composed, apart), "the text is given back as it came"
    assert texts(one) == texts(other) == ["hangug"]
    # A syllable that never occurred, of letters that did.
    (new,) = korean.predict(["학"])
    assert new.unknown == ()
    (strange,) = korean.predict(["밥"])
    assert strange.unknown == ("\u1107", "\u11b8"), "the two consonants, as letters"
    (accent,) = korean.predict(["나"])
    assert texts(accent) == [unicodedata.normalize("NFC", "é")]


def test_the_attention_of_decomposed_text_counts_letters(korean):
    (found,) = korean.predict(["한국"], attention=True)
    assert {len(row) for row in found.answers[0].attention} == {len(unicodedata.normalize("NFD", "한국"))}


def test_graphemes_and_spaced_symbols(tmp_path):
    flag, accent = "🇩🇪", "ɑ̃"
    pairs = [(f"{flag}a", "D AE"), (f"a{accent}", "AE OO"), (accent, "OO"), ("a", "AE")] * 5
    path = write_pairs(tmp_path / "x.tsv", pairs)
    config = toy_config(path, dev=path, epochs=30, data={"source_symbols": "graphemes", "target_symbols": "spaced"})
    train(config, tmp_path / "run")
    transducer = load(tmp_path / "run", device="cpu")
    assert set(transducer.source.alphabet.symbols) == {flag, "a", accent}
    assert set(transducer.target.alphabet.symbols) == {"D", "AE", "OO"}
    (found,) = transducer.predict([f"{flag}a"], attention=True)
    best = found.answers[0]
    assert (best.text, best.symbols) == ("D AE", ("D", "AE"))
    assert (len(best.attention), len(best.attention[0])) == (3, 2)
    (copied,) = transducer.predict([f"a🙂{accent}"], unknown="copy")
    assert copied.unknown == ("🙂",)
    assert copied.answers[0].text == "AE 🙂 OO"


def test_a_run_may_move_and_its_model_may_be_named(halfway, tmp_path):
    moved = shutil.copytree(halfway, tmp_path / "elsewhere")
    expected = texts(next(load(halfway, device="cpu").predict(["abc"], k=3)))
    assert texts(next(load(moved, device="cpu").predict(["abc"], k=3))) == expected
    alone = shutil.copy(halfway / "model.safetensors", tmp_path / "alone.safetensors")
    assert texts(next(load(alone, device="cpu").predict(["abc"], k=3))) == expected


def test_loading_what_is_not_there(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="expected a checkpoint, got no such file"):
            load(path)


def test_loading_a_truncated_model(halfway, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((halfway / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="expected a whole safetensors file"):
        load(tmp_path)


DAMAGE = {
    "no config": lambda meta: meta.pop("config"),
    "no alphabet": lambda meta: meta["source"].pop("alphabet"),
    "alphabet of another size": lambda meta: meta["target"]["alphabet"].append("new"),
    "alphabet with doubles": lambda meta: meta["target"].update(alphabet=["a", "a"]),
    "another shape": lambda meta: meta["config"]["model"].update(hidden=31),
    "setting of the future": lambda meta: meta["config"]["model"].update(flash=True),
    "symbols of the future": lambda meta: meta["source"]["symbols"].update(kind="bytes"),
    "no longest": lambda meta: meta.pop("longest"),
    "longest is a word": lambda meta: meta.update(longest="very"),
    "config is a word": lambda meta: meta.update(config="lstm"),
    "source is a list": lambda meta: meta.update(source=[]),
    "source is nothing": lambda meta: meta.update(source=None),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_loading_a_damaged_model(halfway, tmp_path, case):
    whole = load_checkpoint(halfway / "model.safetensors")
    DAMAGE[case](whole.meta)
    save_checkpoint(tmp_path / "model.safetensors", Checkpoint(whole.tensors, whole.meta))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: expected a transduction model, got something else")
    assert "\n" not in message


def test_the_file_for_resuming_is_not_a_model(halfway):
    with pytest.raises(CheckpointError, match="expected a transduction model, got something else"):
        load(halfway / "last.safetensors")


def test_joint_answers_name_a_text_once():
    def answer(text, log_prob):
        return Answer(text, tuple(text), log_prob, True)

    # "a" + "bc" and "ab" + "c" are one text: the better way counts.
    row = [(answer("a", -1.0), answer("ab", -2.0)), (answer("bc", -3.0), answer("c", -1.0))]
    joined = join_answers(row, Symbols(), 4)
    assert [(a.text, a.log_prob) for a in joined] == [("ac", -2.0), ("abc", -3.0), ("abbc", -5.0)]
