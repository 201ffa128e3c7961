"""Pretrained models through the same commands as our own: fine-tuned on a TSV, resumed, saved, measured, refused."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
import torch

from contracts.checkpoints import ARCHITECTURES, PAIRS, transformers, write_bert, write_checkpoint, write_pairs
from thalweg.data import load_dataset, pad
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.transformer.huggingface import ConvertedTransformer
from thalweg.errors import CheckpointError, ConfigError, DataError
from thalweg.inference.search.beam import search as beam
from thalweg.inference.search.compiled import compiled_search
from thalweg.learning.checkpoint import load_checkpoint
from thalweg.tasks.config import as_settings
from thalweg.tasks.registry import build_config, evaluate, load, train
from thalweg.tasks.transduce.answers import Source
from thalweg.tasks.transduce.codec import read_sides, write_sides
from thalweg.tasks.transduce.prediction import predict_lines
from thalweg.tasks.transduce.pretrained import open_checkpoint
from thalweg.tasks.transduce.search_settings import SearchConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Rec")
FRESH = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
SMALL_BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 64,
}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    write_pairs(folder / "train.tsv")
    write_pairs(folder / "dev.tsv", PAIRS[::8])
    for name in ARCHITECTURES:
        write_checkpoint(name, folder / name)
    return folder


def settings(home, model, **training):
    usual = {"epochs": 1, "batch_size": 20, "learning_rate": 0.01, "device": "cpu", "threads": 1}
    model = {"checkpoint": str(home / model)} if isinstance(model, str) else model
    return {
        "data": {"train": str(home / "train.tsv"), "dev": str(home / "dev.tsv")},
        "model": {"family": "pretrained", **model},
        "training": {**usual, **training},
        "search": {"max_length": 12},
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_checkpoint_is_trained_saved_and_used_there_and_here(home, tmp_path, monkeypatch, name):
    result = train(settings(home, name), tmp_path / "run")
    assert result.best.keys() >= {"loss", "cer", "bleu"}
    run = load(tmp_path / "run", device="cpu")
    source = PAIRS[3][0]
    asked: list = []
    with monkeypatch.context() as patch:
        patch.setattr(beam, "compiled_search", lambda *given: asked.append(given[0]) or compiled_search(*given))
        answer = next(run.predict([source], k=2)).answers[0]
    assert [type(model) for model in asked] == [ConvertedTransformer], "the compiled call is asked first"
    assert answer.text == run.target.decode(run.target.alphabet.encode(answer.symbols))
    assert (
        evaluate(tmp_path / "run", str(home / "dev.tsv"), device="cpu")
        .said()
        .endswith(", converted to our Transformer")
    )
    # What we save, transformers loads: the same numbers of the same text, and the same logits.
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(str(tmp_path / "run" / "pretrained")).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "run" / "pretrained"))
    ids = list(run.source.encode(source))
    assert ids == tokenizer(run.source.symbols.prefix + source)["input_ids"]
    x, y = pad([ids], pad=run.model.pad), pad([run.target.encode(PAIRS[3][1])], pad=run.model.pad, end=run.model.eos)
    start = torch.cat((torch.full((1, 1), run.model.bos), y.tokens[:, :-1]), 1)
    with torch.no_grad():
        expected = theirs(input_ids=x.tokens, attention_mask=x.mask.long(), decoder_input_ids=start).logits
        torch.testing.assert_close(run.model(x, y), expected, atol=1e-5, rtol=1e-4)
    # And the reverse: what was trained here is a checkpoint to begin from.
    again = open_checkpoint(build_config(settings(home, {"checkpoint": str(tmp_path / "run" / "pretrained")})).model)
    assert again.source.encode(source) == tuple(ids)


def test_targets_are_as_transformers_shifts_them(home):
    """Decoder start, targets and end are the decoder inputs and labels that the models' own rules give."""
    for name in ARCHITECTURES:
        sides = open_checkpoint(build_config(settings(home, name)).model)
        tokenizer = sides.target.symbols.tokenizer
        labels = tokenizer(text_target=PAIRS[3][1])["input_ids"]
        ours = [*sides.target.encode(PAIRS[3][1]), sides.target.alphabet.eos]
        start = sides.target.alphabet.bos
        if name == "mbart":  # there the language is last among labels, and comes first of what is fed
            assert labels == [*ours, start]
        elif name == "bert2bert":
            assert labels == [start, *ours]
        else:
            assert labels == ours
        assert sides.target.decode(ours) == PAIRS[3][1]


def test_resumed_to_the_bit(home, tmp_path):
    whole = settings(home, "t5", epochs=2, accumulate=2, batch_size=4)
    train(whole, tmp_path / "whole")
    train(settings(home, "t5", epochs=1, accumulate=2, batch_size=4), tmp_path / "parts")
    train(whole, tmp_path / "parts", resume=True)
    one, two = (load_checkpoint(tmp_path / name / "last.safetensors") for name in ("whole", "parts"))
    assert one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(value, two.tensors[key]) for key, value in one.tensors.items())
    other = settings(home, "t5", epochs=2, accumulate=1, batch_size=4)
    with pytest.raises(CheckpointError, match=r"training\.accumulate=2 as before, got 1"):
        train(other, tmp_path / "parts", resume=True)


def test_task_parameters_are_applied_and_overridable(home, tmp_path):
    events: list = []
    frozen = settings(home, {"checkpoint": str(home / "t5"), "freeze": ["*"]})
    result = train(frozen, tmp_path / "run", listener=events.append)
    assert result.reason == "frozen"
    assert any("num_beams 4" in line for line in events[0]["lines"])
    run = load(tmp_path / "run", device="cpu")
    assert (run.usual.width, run.usual.max_length) == (4, 29)
    assert run.source.symbols.prefix == "translate English to French: "
    dev = str(home / "dev.tsv")
    evaluate(tmp_path / "run", dev, device="cpu")
    told = json.loads((tmp_path / "run" / "evaluation" / "dev" / "metrics.json").read_text())["search"]
    assert (told["width"], told["k"], told["max_length"], told["length_penalty"]) == (4, 4, 29, 1.0)
    evaluate(tmp_path / "run", dev, device="cpu", width=2, max_length=5, k=1, name="other")
    told = json.loads((tmp_path / "run" / "evaluation" / "other" / "metrics.json").read_text())["search"]
    assert (told["width"], told["k"], told["max_length"]) == (2, 1, 5)
    plain = open_checkpoint(build_config(settings(home, {"checkpoint": str(home / "t5"), "source_prefix": ""})).model)
    assert plain.source.symbols.prefix == ""
    with pytest.raises(ConfigError, match="task_params `x` is not among those"):
        train(settings(home, {"checkpoint": str(home / "t5"), "task_params": "x"}), tmp_path / "x")


def test_adapters_and_depth(home, tmp_path):
    pytest.importorskip("peft")
    model = {"checkpoint": str(home / "bart"), "lora": 2, "lora_dropout": 0.1}
    train(settings(home, model, layer_decay=0.9), tmp_path / "run")
    start = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    run = load(tmp_path / "run", device="cpu")
    assert start["parameters"] == sum(p.numel() for name, p in run.model.named_parameters() if "lora" in name)
    assert start["parameters"] + start["frozen"] == sum(p.numel() for p in run.model.parameters())
    assert any("lora_A" in name for name, _ in run.model.named_parameters())
    merged = transformers.AutoModelForSeq2SeqLM.from_pretrained(str(tmp_path / "run" / "pretrained"))
    assert not any("lora" in name for name, _ in merged.named_parameters())
    next(run.predict(["the cat sees the dog"]))


@pytest.mark.parametrize("how", ["bpe", "unigram"])
def test_fresh_t5_on_our_subwords_loads_in_transformers(home, tmp_path, how):
    model = {"architecture": "t5", "shape": FRESH}
    data = {"source_symbols": "subwords", "target_symbols": "subwords", "vocabulary": 60, "subwords": how}
    config = settings(home, model)
    config["data"] |= data
    train(config, tmp_path / "run")
    run = load(tmp_path / "run", device="cpu")
    assert run.source.alphabet == run.target.alphabet
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "run" / "pretrained"))
    for text in PAIRS[5]:
        assert tokenizer(text)["input_ids"] == list(run.source.encode(text))
        assert tokenizer.decode(run.source.encode(text)) == text
    best = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[1])["dev"]
    assert set(best) == {"loss", "accuracy", "cer", "wer", "bleu"}


def test_our_transformer_on_subwords_counts_errors_in_characters(home, tmp_path):
    small = {"width": 16, "heads": 2, "feedforward": 16, "encoder_layers": 1, "decoder_layers": 1, "shared": True}
    config = settings(home, {"family": "transformer", **small}, epochs=2)
    config["data"] |= {"source_symbols": "subwords", "target_symbols": "subwords", "vocabulary": 60}
    train(config, tmp_path / "run")
    found = evaluate(tmp_path / "run", str(home / "dev.tsv"), device="cpu", search="greedy")
    lines = (found.directory / "predictions.jsonl").read_text().splitlines()
    edits = sum(json.loads(line)["edits"] for line in lines)
    length = sum(len(target) for _, target in PAIRS[::8])
    assert found.scores["cer"].value == pytest.approx(edits / length)


def test_an_encoder_is_pretrained_by_masking_then_paired(home, tmp_path):
    model = {"architecture": "bert", "shape": BERT, "masked_epochs": 2, "share_weights": True}
    config = settings(home, model)
    config["data"] |= {"source_symbols": "characters", "target_symbols": "characters"}
    events: list = []
    train(config, tmp_path / "run", listener=events.append)
    told = [event["message"] for event in events if event["event"] == "note"]
    assert [line.split()[2] for line in told] == ["1/2", "2/2"]
    encoder = transformers.AutoModel.from_pretrained(str(tmp_path / "run" / "masked" / "encoder"))
    assert encoder.config.hidden_size == 16
    next(load(tmp_path / "run", device="cpu").predict(["the cat"]))


def test_codecs_survive_json(home):
    for name in ("t5", "byt5", "marian"):
        sides = open_checkpoint(build_config(settings(home, name)).model)
        stored = json.loads(json.dumps(write_sides(sides.source, sides.target)))
        assert stored["target"]["tokenizer"] == "source", "one tokenizer is stored once"
        source, target = read_sides(stored)
        for text in (*PAIRS[0], "zéro ~ 9", ""):
            assert source.encode(text) == sides.source.encode(text)
            assert target.encode(text) == sides.target.encode(text)


def test_two_encoders_have_two_tokenizers(home, tmp_path):
    one = write_bert(tmp_path / "one", texts=[source for source, _ in PAIRS])
    two = write_bert(tmp_path / "two", texts=[target for _, target in PAIRS])
    train(settings(home, {"checkpoint": str(one), "decoder": str(two)}), tmp_path / "run")
    run = load(tmp_path / "run", device="cpu")
    assert run.source.alphabet.symbols != run.target.alphabet.symbols
    assert (tmp_path / "run" / "pretrained" / "target_tokenizer" / "tokenizer.json").is_file()
    _check_taken_up(home, tmp_path)


def _check_taken_up(home, tmp_path):
    """What the run in ``tmp_path`` saved answers as the run, as the checkpoint of another."""
    saved = {"checkpoint": str(tmp_path / "run" / "pretrained"), "freeze": ["*"]}
    train(settings(home, saved), tmp_path / "again")
    one, other = (
        [[(answer.text, answer.log_prob) for answer in found.answers] for found in run.predict(["the cat", "dog"], k=2)]
        for run in (load(tmp_path / name, device="cpu") for name in ("run", "again"))
    )
    for first, second in zip(one, other, strict=True):
        assert [text for text, _ in first] == [text for text, _ in second]
        assert [score for _, score in first] == pytest.approx([score for _, score in second], abs=1e-5)


def test_fresh_weights_with_two_alphabets_are_taken_up_again(home, tmp_path):
    config = settings(home, {"architecture": "t5", "shape": FRESH})
    config["data"] |= {"source_symbols": "characters", "target_symbols": "spaced"}
    train(config, tmp_path / "run")
    _check_taken_up(home, tmp_path)


def test_texts_longer_than_positions_are_named_or_cut(home, tmp_path):
    long = " ".join(["the cat"] * 40)
    write_pairs(tmp_path / "long.tsv", [*PAIRS[:3], (long, "le tac")])
    config = settings(home, "bart")
    config["data"] |= {"train": str(tmp_path / "long.tsv")}
    with pytest.raises(DataError, match=r"long\.tsv:4: expected a source of at most 64 pieces.*model\.truncate=true"):
        train(config, tmp_path / "run")
    config["model"]["truncate"] = True
    train(config, tmp_path / "run")
    run = load(tmp_path / "run", device="cpu")
    assert len(run.source.encode(long)) == 64
    next(run.predict([long]))


def test_lines_longer_than_positions_are_named_after_training_too(home, tmp_path):
    write_pairs(tmp_path / "long.tsv", [*PAIRS[:3], (" ".join(["the cat"] * 40), "le tac")])
    train(settings(home, {"checkpoint": str(home / "bart"), "freeze": ["*"]}), tmp_path / "run")
    file, line = str(tmp_path / "long.tsv"), r"long\.tsv:4: expected a source of at most 64 pieces.*got"
    with pytest.raises(DataError, match=line):
        evaluate(tmp_path / "run", file, device="cpu", search="greedy")
    with pytest.raises(DataError, match=line):
        list(predict_lines(tmp_path / "run", files=[file], how={"search": "greedy"}, device="cpu"))
    with pytest.raises(DataError, match=r"^expected a source of at most 64 pieces"):
        next(load(tmp_path / "run", device="cpu").predict(["the cat " * 40]))


def test_tokenizers_of_other_models_are_refused(home, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"expected a tokenizer of at most 37 pieces.*got number 319.*leave model.tok"
    ):
        train(settings(home, {"checkpoint": str(home / "t5"), "tokenizer": str(home / "bart")}), tmp_path / "run")
    with pytest.raises(CheckpointError, match="expected the model's own tokenizer, with"):
        train(settings(home, {"checkpoint": str(home / "byt5"), "tokenizer": str(home / "mbart")}), tmp_path / "run")


@pytest.mark.parametrize("name", ["t5", "mt5", "byt5", "bart", "mbart", "bert2bert"])
def test_a_folder_without_a_tokenizer_is_refused(home, tmp_path, name):
    """Transformers makes an empty one, which reads every text as unknown."""
    bare = shutil.copytree(home / name, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "added_tok*"))
    with pytest.raises(CheckpointError, match=r"expected a tokenizer, got one without .* model.tokenizer$"):
        open_checkpoint(PretrainedConfig(checkpoint=str(bare)))
    sides = open_checkpoint(PretrainedConfig(checkpoint=str(bare), tokenizer=str(home / name)))
    assert len(set(sides.source.encode("the cat sees"))) > 3


def test_a_tokenizer_may_be_a_sentencepiece_model_alone(home, tmp_path):
    """As the hub has mT5: nothing but `spiece.model`."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = shutil.copytree(home / "byt5", tmp_path / "mt5")
    for file in ("added_tokens.json", "tokenizer_config.json"):
        (folder / file).unlink()
    settings_of_it = {"vocab_size": 60, "hard_vocab_limit": False, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    with (folder / "spiece.model").open("wb") as written:
        texts = iter([text for pair in PAIRS for text in pair])
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts, model_writer=written, minloglevel=2, **settings_of_it
        )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    sides = open_checkpoint(build_config(settings(home, {"checkpoint": str(folder)})).model)
    assert sides.source.encode(PAIRS[3][0]) == (*pieces.encode(PAIRS[3][0]), 1)
    assert sides.target.decode(sides.target.encode(PAIRS[3][1])) == PAIRS[3][1]


def test_languages_are_told(home, tmp_path):
    model = {"checkpoint": str(home / "mbart"), "source_language": "de_DE", "target_language": "en_XX"}
    sides = open_checkpoint(build_config(settings(home, model)).model)
    tokenizer = sides.source.symbols.tokenizer
    assert sides.source.encode("the")[-1] == tokenizer.convert_tokens_to_ids("de_DE")
    assert sides.target.alphabet.bos == tokenizer.convert_tokens_to_ids("en_XX")
    with pytest.raises(ConfigError, match="got `xx_XX`"):
        train(settings(home, {**model, "source_language": "xx_XX"}), tmp_path / "run")
    with pytest.raises(ConfigError, match="do not go with T5Tokenizer"):
        train(settings(home, {"checkpoint": str(home / "t5"), "source_language": "de_DE"}), tmp_path / "run")


def test_tags_and_missing_checkpoints_are_one_line(home, tmp_path):
    (tmp_path / "tags.tsv").write_text("run\tran\tV;PST\ngo\twent\tV;PST\n")
    config = settings(home, "t5")
    config["data"] |= {"train": str(tmp_path / "tags.tsv"), "dev": str(tmp_path / "tags.tsv")}
    with pytest.raises(ConfigError, match="read text alone, got a column of tags"):
        train(config, tmp_path / "run")
    with pytest.raises(ConfigError, match="no checkpoint: give `checkpoint=FOLDER`"):
        train(settings(home, {}), tmp_path / "run")


def test_settings_are_complete_in_yaml_and_back(home):
    config = build_config({"model": "t5", "data": {"train": "x.tsv"}})
    assert build_config(as_settings(config)) == config
    assert config.training.optimiser == "adafactor"
    published = build_config({"model": {"family": "pretrained", "checkpoint": "x"}}).training
    chosen = (published.learning_rate, published.batch_size, published.epochs, published.patience, published.metric)
    assert chosen == (2e-5, 4, 10, 3, "cer")


def test_multi30k_by_name(tmp_path):
    folder = tmp_path / "multi30k"
    folder.mkdir()
    for stem in ("train", "val", "test_2016_flickr"):
        (folder / f"{stem}.en").write_text("A dog.\n\nA cat.\n")
        (folder / f"{stem}.fr").write_text("Un chien.\nVide.\nUn chat.\n")
    found = load_dataset("multi30k", "test", root=tmp_path)
    assert [(pair.source, pair.target, pair.line) for pair in found.pairs] == [
        ("A dog.", "Un chien.", 1),
        ("A cat.", "Un chat.", 3),
    ]
    (folder / "val.fr").write_text("Un chien.\n")
    with pytest.raises(DataError, match=r"val\.fr: expected 3 lines as in val\.en, got 1"):
        load_dataset("multi30k", "dev", root=tmp_path)


def test_an_empty_source_has_an_empty_answer(home, tmp_path):
    train(settings(home, "byt5"), tmp_path / "run")
    found = list(load(tmp_path / "run", device="cpu").predict([Source(""), Source("the cat")]))
    assert found[0].answers == ()
    assert found[1].answers


def test_rules_of_a_task_hold_in_every_search(home, tmp_path):
    """What the line at the start says is what is done: n-grams and the least length too."""
    folder = shutil.copytree(home / "t5", tmp_path / "t5")
    told = json.loads((folder / "config.json").read_text())
    task = {"num_beams": 4, "max_length": 20, "min_length": 6, "no_repeat_ngram_size": 2, "length_penalty": 2.0}
    (folder / "config.json").write_text(json.dumps(told | {"task_specific_params": {"summarization": task}}))
    train(settings(home, {"checkpoint": str(folder), "freeze": ["*"]}), tmp_path / "run")
    run = load(tmp_path / "run", device="cpu")
    assert (run.usual.width, run.usual.min_length, run.usual.length_penalty) == (4, 6, 2.0)
    for how in (run.usual, SearchConfig(search="greedy", max_length=20)):
        row = next(run.predict(["the cat"], how=how)).answers[0].symbols
        assert len({*itertools.pairwise(row)}) == len(row) - 1
    train(settings(home, {"checkpoint": str(folder), "freeze": ["*"], "task_params": "none"}), tmp_path / "none")
    plain = load(tmp_path / "none", device="cpu")
    assert (plain.usual.width, plain.model.decoder.rules.no_repeat) == (SearchConfig().width, 0)
    row = next(plain.predict(["the cat"], how=SearchConfig(search="greedy", max_length=20))).answers[0].symbols
    assert len({*itertools.pairwise(row)}) < len(row) - 1, "the test needs a model that goes in circles"


def test_a_decoder_is_of_a_pair(home):
    with pytest.raises(ConfigError, match=r"model\.decoder goes with an encoder"):
        open_checkpoint(PretrainedConfig(checkpoint=str(home / "t5"), decoder=str(home / "bert2bert" / "half")))


@pytest.mark.parametrize("name", ["t5", "byt5", "bart", "marian", "bert2bert"])
def test_texts_go_in_and_come_out_as_with_generate(home, tmp_path, name):
    """From text to text, ragged sources in one batch: what a user of transformers would get."""
    folder = shutil.copytree(home / name, tmp_path / "checkpoint")
    network = transformers.AutoModelForSeq2SeqLM.from_pretrained(str(folder))
    torch.manual_seed(0)
    with torch.no_grad():  # away from where a network starts, that sources matter
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    model = {"checkpoint": str(folder), "freeze": ["*"], "source_prefix": ""}
    train(settings(home, model), tmp_path / "run")
    texts = [*(source for source, _ in PAIRS[:5]), "cat", "the dog sees the house the night the stone"]
    how = SearchConfig(search="greedy", max_length=15)
    ours = [found.answers[0].text for found in load(tmp_path / "run", device="cpu").predict(texts, how=how)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    network.generation_config.forced_eos_token_id = network.generation_config.max_length = None
    theirs = network.eval().generate(**inputs, max_new_tokens=15, do_sample=False, num_beams=1)
    assert ours == [text.strip() for text in tokenizer.batch_decode(theirs, skip_special_tokens=True)]
    assert len(set(ours)) > 1 or name == "marian", "the test needs a model that reads its source"


def test_a_lexicon_goes_with_a_model_of_more_rows_than_pieces(home, tmp_path):
    """As T5 has: 32,128 rows, 32,100 pieces."""
    folder = shutil.copytree(home / "byt5", tmp_path / "byt5")
    network = transformers.AutoModelForSeq2SeqLM.from_pretrained(str(folder))
    network.resize_token_embeddings(400)
    network.save_pretrained(folder)
    train(settings(home, {"checkpoint": str(folder), "freeze": ["*"]}), tmp_path / "run")
    (tmp_path / "words.txt").write_text("le tac\nvoit\n")
    how = SearchConfig(search="beam", lexicon=str(tmp_path / "words.txt"))
    answer = next(load(tmp_path / "run", device="cpu").predict(["the cat"], how=how)).answers[0]
    assert answer.text in ("le tac", "voit")


def test_fresh_models_say_which_line_is_longer_than_their_positions(home, tmp_path):
    """Before anything is trained, the masked encoder included."""
    model = {"architecture": "bert", "shape": {**BERT, "max_position_embeddings": 26}, "masked_epochs": 1}
    config = settings(home, model)
    config["data"] |= {"source_symbols": "characters", "target_symbols": "characters"}
    longest = max(len(text) for pair in PAIRS for text in pair)
    assert longest < 26
    write_pairs(tmp_path / "dev.tsv", [("the cat", "le tac"), ("cat", "tac" * 9)])
    config["data"]["dev"] = str(tmp_path / "dev.tsv")
    with pytest.raises(DataError, match=r"dev\.tsv:2: expected a target of at most 26 symbols.* got 28"):
        train(config, tmp_path / "run")
    model["shape"]["max_position_embeddings"] = 10
    with pytest.raises(DataError, match=r"train\.tsv:1: expected a source of at most 10 symbols.*model\.shape"):
        train(config, tmp_path / "other")


def test_a_target_with_the_end_in_it_and_settings_for_fresh_weights_are_refused(home, tmp_path):
    write_pairs(tmp_path / "ends.tsv", [*PAIRS[:2], ("the cat", "le </s> tac")])
    config = settings(home, "bart")
    config["data"]["train"] = str(tmp_path / "ends.tsv")
    with pytest.raises(DataError, match=r"ends\.tsv:3: expected a target without `</s>`, which ends it"):
        train(config, tmp_path / "run")
    config = settings(home, "bart")
    config["data"]["source_symbols"] = "graphemes"
    with pytest.raises(ConfigError, match=r"data\.source_symbols goes with fresh weights, got `graphemes`"):
        train(config, tmp_path / "run")


def test_an_mbart_of_fifty_languages_says_its_language_first(home, tmp_path):
    """Its decoder starts from the end symbol, so that nothing but a rule tells the language."""
    tokenizer = transformers.MBart50Tokenizer(
        vocab=[
            ("<s>", 0.0),
            ("<pad>", 0.0),
            ("</s>", 0.0),
            ("<unk>", 0.0),
            ("▁the", -1.0),
            ("▁cat", -1.0),
            ("▁", -3.0),
        ],
        src_lang="en_XX",
        tgt_lang="fr_XX",
    )
    folder, shape = tmp_path / "mbart50", {**SMALL_BART, "vocab_size": len(tokenizer), "decoder_start_token_id": 2}
    torch.manual_seed(0)
    transformers.MBartForConditionalGeneration(transformers.MBartConfig(**shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = {"checkpoint": str(folder), "source_language": "de_DE", "target_language": "fr_XX", "freeze": ["*"]}
    train(settings(home, model), tmp_path / "run")
    run, french = load(tmp_path / "run", device="cpu"), tokenizer.convert_tokens_to_ids("fr_XX")
    assert run.source.encode("the cat")[0] == tokenizer.convert_tokens_to_ids("de_DE")
    assert run.target.encode("the cat")[0] == french
    found = run.search([run.source.encode("the cat")], k=1, how=SearchConfig(search="beam", max_length=5))
    assert found.tokens[0, 0, 0] == french


def test_two_vocabularies_in_one_tokenizer_are_refused(home, tmp_path):
    """Numbers of targets would be read in the vocabulary of sources."""
    folder = shutil.copytree(home / "marian", tmp_path / "marian")
    shutil.copy(folder / "vocab.json", folder / "target_vocab.json")
    files = {"source_spm": "source.spm", "target_spm": "target.spm", "vocab": "vocab.json"}
    files["target_vocab_file"] = "target_vocab.json"
    places = {key: str(folder / name) for key, name in files.items()}
    transformers.MarianTokenizer(**places, separate_vocabs=True).save_pretrained(folder)
    with pytest.raises(ConfigError, match="expected one vocabulary for both sides, got two"):
        open_checkpoint(build_config(settings(home, {"checkpoint": str(folder)})).model)


def test_adapters_are_resumed_to_the_bit(home, tmp_path):
    pytest.importorskip("peft")
    model = {"checkpoint": str(home / "bart"), "lora": 2, "lora_dropout": 0.1, "freeze": ["encoder"]}
    how = {"accumulate": 2, "batch_size": 4, "precision": "bf16-mixed", "layer_decay": 0.9, "average": 0.9}
    train(settings(home, model, epochs=2, **how), tmp_path / "whole")
    train(settings(home, model, epochs=1, **how), tmp_path / "parts")
    train(settings(home, model, epochs=2, **how), tmp_path / "parts", resume=True)
    one, two = (load_checkpoint(tmp_path / name / "last.safetensors") for name in ("whole", "parts"))
    assert one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(value, two.tensors[key]) for key, value in one.tensors.items())
