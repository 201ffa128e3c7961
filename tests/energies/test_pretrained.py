"""Checkpoints that transformers wrote, as energies: logits equal theirs; frozen parts, adapters; bad folders."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from contracts.checkpoints import ARCHITECTURES, transformers, write_bert, write_checkpoint
from thalweg.data import pad
from thalweg.energies.pretrained import adapting
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.hub import check_place
from thalweg.energies.pretrained.loading import build_network, load_network
from thalweg.energies.pretrained.model import Pretrained, reach_of
from thalweg.energies.pretrained.task_parameters import TaskParameters
from thalweg.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SPECIAL = {"unk": 0, "pad": 1, "bos": 2, "eos": 3}
SMALL = {
    "t5": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
    "bart": {
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    },
    "bert": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(name, home / name) for name in ARCHITECTURES}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(folders, name):
    config = PretrainedConfig(checkpoint=str(folders[name]))
    model = Pretrained(load_network(config), config).eval()
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(str(folders[name])).eval()
    source, target = pad([[5, 6, 7, 8], [9, 10]], pad=model.pad), pad([[7, 8, 9], [6]], pad=model.pad, end=model.eos)
    labels = target.tokens.masked_fill(~target.mask, -100)
    with torch.no_grad():
        ours = model(source, target)
        expected = theirs(
            input_ids=source.tokens,
            attention_mask=source.mask.long(),
            decoder_input_ids=torch.cat((torch.full((2, 1), model.bos), target.tokens[:, :-1]), 1),
            labels=labels,
        )
        pieces = model(source, target, items=torch.tensor([1, 0]))
    torch.testing.assert_close(ours[target.mask], expected.logits[target.mask], atol=1e-5, rtol=1e-4)
    nll = torch.nn.functional.cross_entropy(ours[target.mask], target.tokens[target.mask])
    torch.testing.assert_close(nll, expected.loss, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(pieces[0], ours[0]), "items say which source a target has"


def test_only_what_is_right_is_fed(folders):
    config = PretrainedConfig(checkpoint=str(folders["t5"]))
    model = Pretrained(load_network(config), config)
    with pytest.raises(ConfigError, match="teacher_forcing must be 1"):
        model(pad([[5]]), pad([[5]]), teacher_forcing=0.5)


@pytest.mark.parametrize("architecture", SMALL)
def test_fresh_architectures_are_built_for_our_symbols(architecture):
    config = PretrainedConfig(architecture=architecture, shape=SMALL[architecture], dropout=0.25)
    model = Pretrained(build_network(config, 11, SPECIAL), config)
    assert (model.bos, model.eos, model.pad, model.vocab_size) == (2, 3, 1, 11)
    assert model(pad([[4, 5]]), pad([[6]], end=3)).shape == (1, 2, 11)
    rates = {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} | {
        m.dropout for m in model.modules() if isinstance(getattr(m, "dropout", None), float)
    }
    assert 0.25 in rates
    with pytest.raises(ConfigError, match=rf"model\.shape\.widht is not a setting of {architecture}"):
        build_network(PretrainedConfig(architecture=architecture, shape={"widht": 3}), 11, SPECIAL)


def test_a_pair_of_encoders_gets_cross_attention_and_shares_on_request(tmp_path):
    one, other = write_bert(tmp_path / "one"), write_bert(tmp_path / "other", seed=1)
    pair = load_network(PretrainedConfig(checkpoint=str(one), decoder=str(other)))
    assert any("crossattention" in name for name, _ in pair.named_parameters())
    first = "encoder.layer.0.attention.self.query.weight"
    encoder, decoder = dict(pair.encoder.named_parameters()), dict(pair.decoder.base_model.named_parameters())
    assert not torch.equal(encoder[first], decoder[first]), "two checkpoints"
    shared = load_network(PretrainedConfig(checkpoint=str(one), share_weights=True))
    encoder, decoder = dict(shared.encoder.named_parameters()), dict(shared.decoder.base_model.named_parameters())
    assert encoder[first] is decoder[first]
    count = sum(p.numel() for p in shared.parameters())
    assert count < sum(p.numel() for p in pair.parameters())
    with pytest.raises(ConfigError, match=r"expected a BERT-like encoder, got t5"):
        load_network(PretrainedConfig(checkpoint=str(one), decoder=str(write_checkpoint("t5", tmp_path / "t5"))))


def test_parts_are_frozen(folders):
    config = PretrainedConfig(checkpoint=str(folders["bart"]), freeze=("encoder", "embeddings"))
    model = Pretrained(load_network(config), config)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert not any(".encoder." in name or "shared" in name or "embed_positions" in name for name in trained)
    with pytest.raises(ConfigError, match=r"freeze `encoder\.9` names nothing"):
        adapting.freeze(model.network, ("encoder.9",))


def test_adapters_start_at_nothing_and_merge(folders):
    pytest.importorskip("peft")
    plain = PretrainedConfig(checkpoint=str(folders["t5"]))
    config = PretrainedConfig(checkpoint=str(folders["t5"]), lora=2)
    before, model = Pretrained(load_network(plain), plain).eval(), Pretrained(load_network(config), config).eval()
    source, target = pad([[5, 6]], pad=0), pad([[7]], pad=0, end=1)
    torch.testing.assert_close(model(source, target), before(source, target))
    assert all("lora" in name for name, p in model.named_parameters() if p.requires_grad)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    assert not torch.allclose(model(source, target), before(source, target))
    whole = Pretrained(adapting.merged(model.network), plain).eval()
    torch.testing.assert_close(whole(source, target), model(source, target), atol=1e-5, rtol=1e-4)
    assert set(dict(whole.named_parameters())) == set(dict(before.named_parameters()))
    wrong = PretrainedConfig(checkpoint=str(folders["t5"]), lora=2, lora_targets=("nowhere",))
    with pytest.raises(ConfigError, match="lora_targets must name linear layers"):
        Pretrained(load_network(wrong), wrong)


def test_depths_count_from_the_top(folders):
    for name in ("t5", "bart", "bert2bert"):
        config = PretrainedConfig(checkpoint=str(folders[name]))
        depths = Pretrained(load_network(config), config).depths()
        layers = {depth for key, depth in depths.items() if ".0." in key or ".1." in key}
        assert layers >= {0, 1}, name
        assert max(depths.values()) == 2, name
        embedded = [depth for key, depth in depths.items() if "embed" in key or "shared" in key]
        assert 2 in embedded, name


def test_the_decoder_is_made_anew_after_weights_change(folders):
    config = PretrainedConfig(checkpoint=str(folders["t5"]))
    model = Pretrained(load_network(config), config).eval()
    random = torch.random.get_rng_state()
    first = model.decoder
    assert model.decoder is first
    assert torch.equal(torch.random.get_rng_state(), random)
    model.load_state_dict(model.state_dict())
    assert model.decoder is not first


def _broken(folder, tmp_path, *, drop=(), **config):
    copy = tmp_path / "broken"
    shutil.copytree(folder, copy)
    for name in drop:
        (copy / name).unlink()
    if config:
        told = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**told, **config}))
    return str(copy)


def test_a_folder_without_config_or_weights_is_one_line(folders, tmp_path):
    with pytest.raises(CheckpointError, match=r"got a folder without config\.json"):
        load_network(PretrainedConfig(checkpoint=_broken(folders["t5"], tmp_path, drop=["config.json"])))
    with pytest.raises(CheckpointError, match="got no weights"):
        load_network(PretrainedConfig(checkpoint=_broken(folders["t5"], tmp_path / "2", drop=["model.safetensors"])))
    with pytest.raises(CheckpointError, match="got a file"):
        check_place(str(folders["t5"] / "config.json"))


def test_pickled_weights_are_refused_unless_asked_for(folders, tmp_path):
    folder = _broken(folders["bart"], tmp_path)
    weights = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()
    torch.save(weights, tmp_path / "broken" / "pytorch_model.bin")
    (tmp_path / "broken" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a pickle, which can run code; .* model\.weights=pickle"):
        load_network(PretrainedConfig(checkpoint=folder))
    network = load_network(PretrainedConfig(checkpoint=folder, weights="pickle"))
    assert torch.equal(network.state_dict()["model.shared.weight"], weights["model.shared.weight"])


def test_weights_of_another_model_are_one_line(folders, tmp_path):
    wrong = _broken(folders["t5"], tmp_path, vocab_size=500)
    with pytest.raises(CheckpointError) as error:
        load_network(PretrainedConfig(checkpoint=wrong))
    assert "\n" not in str(error.value)
    deeper = _broken(folders["t5"], tmp_path / "2", num_layers=3)
    with pytest.raises(CheckpointError, match=r"weights are of another model than config\.json"):
        load_network(PretrainedConfig(checkpoint=deeper))


def test_a_hub_name_that_cannot_be_reached_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"hf download google/byt5-small --local-dir byt5-small.*checkpoint=byt5"):
        load_network(PretrainedConfig(checkpoint="google/byt5-small"))


def test_task_parameters_are_read_and_reach_is_known(folders):
    told = json.loads((folders["t5"] / "config.json").read_text())
    found = TaskParameters.read(told, {}, "")
    assert found.prefix == "translate English to French: "
    assert found.search() == {"search": "beam", "width": 4, "max_length": 29, "length_penalty": 1.0}
    assert "num_beams 4" in found.lines()[0]
    several = TaskParameters.read({"task_specific_params": {"a": {"num_beams": 2}, "b": {}}}, {}, "")
    assert several.name == ""
    assert several.search() == {}
    assert "a, b" in several.lines()[0]
    reach = {name: reach_of(load_network(PretrainedConfig(checkpoint=str(f))).config) for name, f in folders.items()}
    assert reach == {"t5": None, "mt5": None, "byt5": None, "bart": 64, "mbart": 64, "marian": 64, "bert2bert": 64}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"checkpoint": "x", "architecture": "t5"}, "keep one"),
        ({"shape": {"d_model": 3}}, "model.shape is of a model.architecture"),
        ({"architecture": "t5", "masked_epochs": 3}, "masked_epochs needs model.architecture=bert"),
        ({"dropout": 1.0}, r"model.dropout must be in \[0, 1\)"),
        ({"weights": "any"}, "model.weights `any` is not known"),
        ({"masked_share": 0.0}, "masked_share must be in"),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings, line):
    with pytest.raises(ConfigError, match=line):
        PretrainedConfig(**settings)
