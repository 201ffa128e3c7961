"""Checkpoints that are not what they say: one line each, no code of theirs is run, nothing is taken in silence."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from contracts.checkpoints import ARCHITECTURES, write_bert, write_checkpoint
from thalweg.energies.pretrained import hub
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.decoding import positions_of
from thalweg.energies.pretrained.loading import build_encoder, build_network, fresh_reach, load_network
from thalweg.energies.pretrained.model import Pretrained
from thalweg.energies.pretrained.task_parameters import TaskParameters
from thalweg.energies.transformer.checkpoints.files import read_json
from thalweg.errors import CheckpointError, ConfigError, ThalwegError
from thalweg.tasks.transduce.pretrained import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SPECIAL = {"unk": 0, "pad": 1, "bos": 2, "eos": 3}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("checkpoints")
    found = {name: write_checkpoint(name, home / name) for name in ARCHITECTURES}
    return found | {"bert": write_bert(home / "bert")}


def changed(folder: Path, place: Path, **config: object) -> str:
    """A copy with other settings in its config."""
    shutil.copytree(folder, place)
    told = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**told, **config}))
    return str(place)


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_code_that_comes_with_a_checkpoint_is_not_run(folders, tmp_path, monkeypatch, what):
    """Nobody is asked either: lines that are piped in would answer."""
    ran = tmp_path / "ran"
    classes = "class C(PretrainedConfig):\n    model_type = 'own'\nclass M: pass\nclass T: pass\n"
    code = f"open({str(ran)!r}, 'w').close()\nfrom transformers import PretrainedConfig\n{classes}"
    own = {"AutoConfig": "own.C", "AutoModelForSeq2SeqLM": "own.M"}
    more = {"model_type": "own", "auto_map": own} if what == "model" else {}
    folder = changed(folders["t5"], tmp_path / "own", **more)
    Path(folder, "own.py").write_text(code)
    if what == "tokenizer":
        told = json.loads(Path(folder, "tokenizer_config.json").read_text())
        told |= {"auto_map": {"AutoTokenizer": ["own.T", None]}, "tokenizer_class": "Own"}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(told))
    answers = io.StringIO("y\ny\ny\n")
    monkeypatch.setattr(sys, "stdin", answers)
    config = PretrainedConfig(checkpoint=folder)
    if what == "model":
        with pytest.raises(CheckpointError, match="code of its own, which is not run"):
            load_network(config)
    else:
        open_checkpoint(config)  # transformers knows the kind by the model's config
    assert not ran.exists()
    assert answers.tell() == 0, "nothing was read"


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("t5", {"num_layers": 1}, r"weights of t5 and no more, got encoder\.block\.1\.\S+ and \d+ others"),
        ("bart", {"decoder_layers": 1}, r"weights of bart and no more, got model\.decoder\.layers\.1"),
        ("marian", {"encoder_layers": 3}, r"all weights of marian, got none for model\.encoder\.layers\.2"),
        ("bert", {"num_hidden_layers": 1}, "weights of bert and no more, got"),
        ("bert", {"num_hidden_layers": 3}, r"all weights of bert, got none for encoder\.layer\.2"),
        ("t5", {"vocab_size": 500}, r"expected shared\.weight to have the shape \(500, 16\).*got \(37, 16\)"),
        ("t5", {"vocab_size": 10**11}, "expected enough memory"),
        ("t5", {"d_ff": "x"}, "expected a checkpoint that transformers reads"),
        ("t5", {"num_heads": 0}, "config.json|transformers reads"),
        ("t5", {"num_layers": -3}, "no more, got"),
        ("t5", {"model_type": ["t5"]}, "expected a checkpoint that transformers reads"),
    ],
)
def test_a_config_of_other_weights_is_refused(folders, tmp_path, name, change, line):
    """Layers that the config does not name would be left out, those the file lacks would be drawn at random."""
    with pytest.raises(ThalwegError, match=line) as error:
        load_network(PretrainedConfig(checkpoint=changed(folders[name], tmp_path / "copy", **change)))
    assert "\n" not in str(error.value)


def test_heads_of_other_tasks_and_relics_may_be_left(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = changed(folders["t5"], tmp_path / "copy")
    weights = load_file(f"{folder}/model.safetensors")
    weights["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 2)
    weights["classification_head.weight"] = torch.zeros(3)
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
    load_network(PretrainedConfig(checkpoint=folder))


@pytest.mark.parametrize("content", ["[1, 2]", "{", "[" * 100_000])
def test_a_config_that_is_no_object_is_one_line(folders, tmp_path, content):
    folder = Path(changed(folders["t5"], tmp_path / "copy"))
    (folder / "config.json").write_text(content)
    for read in (
        lambda: load_network(PretrainedConfig(checkpoint=str(folder))),
        lambda: read_json(folder / "config.json"),
    ):
        with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON object"):
            read()
    (folder / "config.json").write_bytes(Path(folders["t5"], "config.json").read_bytes())
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: expected a JSON object"):
        open_checkpoint(PretrainedConfig(checkpoint=str(folder)))


def test_special_symbols_are_rows_of_the_model(folders, tmp_path):
    folder = Path(changed(folders["t5"], tmp_path / "copy", decoder_start_token_id=-5))
    told = json.loads((folder / "generation_config.json").read_text()) | {"decoder_start_token_id": -5}
    (folder / "generation_config.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=r"special symbols among the model's 37 rows, got bos = -5"):
        open_checkpoint(PretrainedConfig(checkpoint=str(folder)))


def test_a_tokenizer_whose_numbers_differ_is_refused(folders):
    """Its special symbols are the same and it has fewer pieces: nothing but the pieces themselves tells."""
    other = PretrainedConfig(checkpoint=str(folders["byt5"]), tokenizer=str(folders["t5"]))
    with pytest.raises(
        CheckpointError, match=r"expected a tokenizer with the pieces of .*byt5, got 34 of 37 other ones"
    ):
        open_checkpoint(other)
    open_checkpoint(PretrainedConfig(checkpoint=str(folders["byt5"]), tokenizer=str(folders["byt5"])))


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What was asked of a hub that does not answer, whose local cache is the test's own folder."""
    found: list[str] = []

    def fail(url: str, **options: object) -> None:
        found.append(url)
        raise ConnectionError("no route")

    hub._answers.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=fail))
    monkeypatch.setattr(hub, "_minute", lambda: 0)
    yield found
    hub._answers.cache_clear()


def test_a_name_is_asked_for_once(asked):
    """The hub's own client would ask for half a minute, and say so each time."""
    with pytest.raises(CheckpointError, match=r"got neither.* run `hf download google/byt5-small"):
        load_network(PretrainedConfig(checkpoint="google/byt5-small"))
    assert len(asked) == 1
    with pytest.raises(CheckpointError, match="got neither"):
        hub.check_place("a--b..c")


def test_what_is_in_the_cache_is_read_while_no_hub_answers(asked, folders, tmp_path):
    home, name = tmp_path / "models--ours--byt5", "0" * 40
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(name)
    shutil.copytree(folders["byt5"], home / "snapshots" / name)
    config = PretrainedConfig(checkpoint="ours/byt5")
    assert open_checkpoint(config).source.encode("a") == (100, 1)
    load_network(config)
    assert len(asked) == 1
    (home / "snapshots" / name / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"ours/byt5: expected model\.safetensors, .* set model\.weights=pickle"):
        load_network(config)


@pytest.mark.parametrize(
    "shape",
    [
        {"d_model": -1},
        {"d_model": "x"},
        {"num_heads": 0},
        {"num_heads": None},
        {"feed_forward_proj": "none"},
        {"dropout_rate": 5},
        {"relative_attention_num_buckets": 0},
    ],
)
def test_a_shape_that_cannot_be_is_one_line(shape):
    random = torch.random.get_rng_state()
    with pytest.raises(ConfigError, match=r"model\.shape must be a shape that t5 can have") as error:
        build_network(PretrainedConfig(architecture="t5", shape={**T5, **shape}), 11, SPECIAL)
    assert "\n" not in str(error.value)
    torch.random.set_rng_state(random)


def test_what_the_data_say_is_not_said_by_a_shape():
    for key in ("vocab_size", "pad_token_id", "is_encoder_decoder"):
        with pytest.raises(ConfigError, match=rf"model\.shape\.{key} follows from the data"):
            build_network(PretrainedConfig(architecture="t5", shape={**T5, key: 3}), 11, SPECIAL)
    with pytest.raises(ConfigError, match="a shape that bert can have"):
        build_encoder(PretrainedConfig(architecture="bert", shape={**BERT, "type_vocab_size": 0}), 11, SPECIAL)
    with pytest.raises(ThalwegError, match=r"expected enough memory.*lower the sizes in model\.shape"):
        build_network(PretrainedConfig(architecture="t5", shape={**T5, "d_model": 10**12}), 11, SPECIAL)


def test_settings_of_another_kind_of_model_are_not_passed_over(folders):
    for key, value in (("tokenizer", "x"), ("truncate", True), ("source_prefix", ""), ("weights", "pickle")):
        if value:
            with pytest.raises(ConfigError, match=rf"model\.{key} goes with a model\.checkpoint"):
                PretrainedConfig(architecture="t5", **{key: value})
    with pytest.raises(ConfigError, match=r"share_weights is of a pair"):
        PretrainedConfig(architecture="t5", share_weights=True)
    with pytest.raises(ConfigError, match=r"model\.share_weights goes with an encoder"):
        load_network(PretrainedConfig(checkpoint=str(folders["t5"]), share_weights=True))
    with pytest.raises(ConfigError, match="expected a BERT-like encoder, got t5"):
        open_checkpoint(PretrainedConfig(checkpoint=str(folders["bert"]), decoder=str(folders["t5"])))


def test_adapters_of_a_frozen_part_are_frozen(folders):
    pytest.importorskip("peft")
    config = PretrainedConfig(checkpoint=str(folders["t5"]), lora=2, freeze=("encoder",))
    trained = {name for name, p in Pretrained(load_network(config), config).named_parameters() if p.requires_grad}
    assert trained
    assert all(".decoder." in name and "lora" in name for name in trained)
    named = PretrainedConfig(checkpoint=str(folders["t5"]), lora=2, freeze=("*.SelfAttention.q.weight",))
    Pretrained(load_network(named), named)  # by the name that the parameter has without adapters


@pytest.mark.parametrize("name", ["t5", "bart", "bert2bert"])
def test_adapters_learn_through_gradient_checkpointing(folders, name):
    """With frozen embeddings nothing that enters a checkpointed layer has a gradient; its adapters must."""
    from thalweg.data import pad

    pytest.importorskip("peft")
    config = PretrainedConfig(checkpoint=str(folders[name]), lora=2, gradient_checkpointing=True)
    model = Pretrained(load_network(config), config).train()
    model(pad([[5, 6, 7], [8]], pad=model.pad), pad([[7, 8], [9]], pad=model.pad, end=model.eos)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_positions_are_known_of_either_kind():
    kinds = {"bart": 64, "roberta": 62, "xlm-roberta": 62, "camembert": 62, "bert": 64, "t5": None, "mt5": None}
    for kind, most in kinds.items():
        told = SimpleNamespace(model_type=kind, max_position_embeddings=64, pad_token_id=1)
        assert positions_of(told) == most
    assert fresh_reach(PretrainedConfig(architecture="t5", shape=T5)) is None
    assert fresh_reach(PretrainedConfig(architecture="bert", shape={**BERT, "max_position_embeddings": 9})) == 9


def test_tasks_may_be_left_out_and_say_more_than_beams():
    task = {"num_beams": 4, "max_length": 20, "min_length": 6, "no_repeat_ngram_size": 2, "prefix": "x: "}
    config = {"task_specific_params": {"summarization": task}}
    found = TaskParameters.read(config, {}, "")
    assert (found.search()["min_length"], found.no_repeat, found.prefix) == (6, 2, "x: ")
    none = TaskParameters.read(config, {"num_beams": 3}, "none")
    assert (none.name, none.search()["width"], none.no_repeat, none.prefix) == ("", 3, 0, "")
    assert none.lines() == ["task    generation config: num_beams 3"], "who says none is not asked again"
