"""Configs: every mistake is one line with a remedy, every config survives YAML, every preset builds."""

from __future__ import annotations

import dataclasses
import math

import pytest

from thalweg.errors import ConfigError
from thalweg.tasks.config import config_from, lay_over, read_config, to_yaml
from thalweg.tasks.registry import apply_overrides, build_config
from thalweg.tasks.transduce.config import DataConfig, TransduceConfig
from thalweg.tasks.transduce.presets import PRESETS
from thalweg.tasks.transduce.search_settings import SearchConfig


def refused(raw, kind=TransduceConfig):
    with pytest.raises(ConfigError) as caught:
        config_from(raw, kind, where="file.yaml")
    message = str(caught.value)
    assert message.startswith("file.yaml: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"trainin": {}}, "`trainin` is not a setting; did you mean `training`?"),
        ({"training": {"epocs": 3}}, "`training.epocs` is not a setting; did you mean `epochs`?"),
        ({"model": {"hiden": 3}}, "`model.hiden` is not a setting; did you mean `hidden`?"),
        ({"data": {"zzz": 3}}, "`data.zzz` is not a setting; choose one of: dev, features, held_out, "),
        ({"search": {1: 3}}, "`search.1` is not a setting"),
        ({"data": "train.tsv"}, "expected settings as `key: value` lines under `data.`, got str"),
        ({"model": [1]}, "expected settings as `key: value` lines under `model.`, got list"),
        ([], "expected settings as `key: value` lines under `the top`, got list"),
    ],
)
def test_unknown_keys_and_wrong_shapes(raw, said):
    assert said in refused(raw)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"training": {"epochs": "many"}}, "`training.epochs`: input should be a valid integer"),
        ({"training": {"epochs": 2.5}}, "`training.epochs`: input should be a valid integer"),
        ({"training": {"epochs": None}}, "`training.epochs`: input should be a valid integer"),
        ({"model": {"hidden": [8]}}, "`model.hidden`: input should be a valid integer"),
        ({"model": {"dropout": "much"}}, "`model.dropout`: input should be a valid number"),
        ({"model": {"bidirectional": "perhaps"}}, "`model.bidirectional`: input should be a valid boolean"),
        (
            {"model": {"cell": "lsmt"}},
            "`model.cell`: input should be 'lstm', 'gru', 'gru-reset-before', 'rnn-tanh', 'rnn-relu', 'rnn-tanh-pre' "
            "or 'rnn-relu-pre', got 'lsmt'",
        ),
        (
            {"training": {"optimiser": "adam"}},
            "`training.optimiser`: input should be 'sgd', 'adam_l2', 'adamw' or 'adafactor'",
        ),
        ({"search": {"search": "bem"}}, "`search.search`: input should be"),
        ({"data": {"train": {"a": 1}}}, "`data.train`: input should be a valid string"),
        ({"data": {"source_symbols": "letters"}}, "`data.source_symbols`: input should be"),
    ],
)
def test_wrong_types(raw, said):
    assert said in refused(raw)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"model": {"dropout": 1.0}}, "model.dropout must be in [0, 1), got 1.0"),
        ({"model": {"hidden": 0}}, "model.hidden must be at least 1, got 0"),
        ({"training": {"epochs": -1}}, "training.epochs must be 0 or more, got -1"),
        ({"training": {"metric": "acuracy"}}, "did you mean `accuracy`?"),
        ({"data": {"held_out": 0}}, "data.held_out must be in (0, 1), got 0"),
        ({"data": {"held_out": 1}}, "data.held_out must be in (0, 1), got 1"),
        ({"data": {"held_out": math.nan}}, "data.held_out must be in (0, 1), got nan"),
        ({"search": {"width": 0}}, "search.width must be at least 1, got 0"),
        ({"search": {"top_p": 0}}, "search.top_p must be in (0, 1], got 0"),
        ({"search": {"top_p": 1.5}}, "search.top_p must be in (0, 1], got 1.5"),
        ({"search": {"temperature": 0}}, "search.temperature must be positive, got 0"),
        ({"search": {"temperature": math.nan}}, "search.temperature must be positive, got nan"),
        ({"search": {"length_penalty": math.nan}}, "search.length_penalty"),
        ({"search": {"max_length": -1}}, "search.max_length must be 0 or more, got -1"),
        ({"search": {"top_k": -1}}, "search.top_k must be 0 or more, got -1"),
    ],
)
def test_wrong_values(raw, said):
    assert said in refused(raw)


def test_a_switch_is_no_number():
    # `hidden: yes` of a YAML file arrives as True, which Python would take for 1.
    assert "`model.hidden`" in refused({"model": {"hidden": True}})
    assert "`training.epochs`" in refused({"training": {"epochs": True}})


def test_python_users_are_told_too():
    with pytest.raises(ConfigError, match="bem"):
        SearchConfig(search="bem")
    with pytest.raises(ConfigError, match="letters"):
        DataConfig(source_symbols="letters")


def test_configs_are_frozen_and_by_keyword():
    with pytest.raises(dataclasses.FrozenInstanceError):
        build_config({}).model.hidden = 3
    with pytest.raises(TypeError):
        SearchConfig("beam")


def test_numbers_as_yaml_gives_them():
    # YAML 1.1 reads 3e-3 as a text.
    config = build_config(apply_overrides({}, ["learning_rate=3e-3", "epochs=7", "tied=true", "dropout=0"]))
    assert config.training.learning_rate == 3e-3
    assert (config.training.epochs, config.model.tied, config.model.dropout) == (7, True, 0.0)


def test_overrides_find_their_section():
    raw = {"model": {"hidden": 64}, "training": None}
    result = apply_overrides(raw, ["hidden=128", "training.epochs=3", " width = 9", "train=a=b.tsv", "dev="])
    assert result == {
        "model": {"hidden": 128},
        "training": {"epochs": 3},
        "search": {"width": 9},
        "data": {"train": "a=b.tsv", "dev": ""},
    }
    assert raw == {"model": {"hidden": 64}, "training": None}, "the caller's settings are left alone"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("hidden", "expected `key=value`, got `hidden`"),
        ("hiden=3", "`hiden` is not a setting; did you mean `hidden`?"),
        ("=3", "`` is not a setting"),
    ],
)
def test_bad_words(word, said):
    with pytest.raises(ConfigError) as caught:
        apply_overrides({}, [word])
    assert said in str(caught.value)


def test_every_key_is_unambiguous_or_says_where_it_could_go():
    homes: dict[str, list[str]] = {}
    for section in dataclasses.fields(TransduceConfig):
        for field in dataclasses.fields(getattr(TransduceConfig(), section.name)):
            homes.setdefault(field.name, []).append(section.name)
    for key, sections in homes.items():
        if len(sections) == 1:
            value = getattr(getattr(TransduceConfig(), sections[0]), key)
            assert apply_overrides({}, [f"{key}={value}"]).keys() == {sections[0]}
        else:
            with pytest.raises(ConfigError, match="is ambiguous; write one of"):
                apply_overrides({}, [f"{key}=1"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twice:
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    other: SearchConfig = dataclasses.field(default_factory=SearchConfig)


def test_an_ambiguous_key():
    with pytest.raises(ConfigError, match=r"`width` is ambiguous; write one of `search.width`, `other.width`"):
        lay_over({}, ["width=3"], Twice)
    assert lay_over({}, ["other.width=3", "train=x.tsv"], Twice) == {"other": {"width": 3}, "data": {"train": "x.tsv"}}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_build_and_survive_yaml(tmp_path, preset):
    config = build_config(apply_overrides(PRESETS[preset], ["train=x.tsv"]), where=preset)
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert build_config(read_config(tmp_path / "config.yaml")) == config


def test_round_trip_of_every_value(tmp_path):
    raw = {
        "data": {"train": "سلام é: 1 #.tsv", "dev": "no", "held_out": 0.25, "target_symbols": "spaced"},
        "model": {"cell": "gru-reset-before", "tied": True, "dropout": 0.0, "attention": "none"},
        "training": {"learning_rate": 1e-05, "clip": 0.0, "metric": "bleu", "weight_decay": 1.5e-4},
        "search": {"search": "nucleus", "temperature": 0.7, "length_penalty": -0.5},
    }
    config = build_config(raw)
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    again = build_config(read_config(tmp_path / "config.yaml"))
    assert again == config
    assert build_config(dataclasses.asdict(config)) == config
    for section, settings in raw.items():
        for key, value in settings.items():
            assert getattr(getattr(again, section), key) == value


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected settings, got an empty file"),
        (b"# only words\n", "expected settings, got an empty file"),
        (b"- a\n- b\n", "expected `key: value` lines, got list"),
        (b"just text", "expected `key: value` lines, got str"),
        (b"model: {hidden: 8\n", "expected YAML, got something else"),
        (b"model:\n  hidden: 8\n bad\n", ":3: expected YAML"),
        (b"\xff\xfe\x00", "expected YAML, got something else"),
        (b"a: \x07\n", "expected YAML, got something else"),
        (b"!!python/object/apply:os.system ['true']\n", "expected YAML, got something else"),
    ],
)
def test_bad_files(tmp_path, content, said):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert said in message
    assert "\n" not in message


def test_absent_file(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a config file, got no such file; use `--data train\.tsv`"):
        read_config(tmp_path / "absent.yaml")
