"""Two families of models in one config: recognised, checked and suggested for each by itself; old files load."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest

from thalweg.cli.train import TASKS
from thalweg.energies import Monotonic, Seq2Seq, Seq2SeqConfig
from thalweg.energies.pretrained.model import Pretrained
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.energies.transformer.model import Transformer
from thalweg.errors import ConfigError
from thalweg.tasks.config import as_settings, family_of, to_yaml
from thalweg.tasks.registry import apply_overrides, build_config, list_tasks, task_named
from thalweg.tasks.transduce.codec import Codec
from thalweg.tasks.transduce.models import build_model
from thalweg.tasks.transduce.presets import FAMILIES, PRESETS


def test_the_registry_lists_what_every_task_offers():
    assert tuple(TASKS) == list_tasks()
    for name, entry in TASKS.items():
        assert set(task_named(name).presets) == set(entry["models"])
        assert task_named(name).default_model == entry["models"][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_key_family_alone_tells_the_family(family):
    """Wherever it stands: no other setting is a hint, and one of another family is refused."""
    own = FAMILIES[family]()
    assert family_of({"family": family}, FAMILIES) == family
    assert family_of({"dropout": 0.1, "heads": 2}, FAMILIES) == next(iter(FAMILIES))
    assert build_config({"model": {"family": family}}).model == own
    assert build_config(apply_overrides({}, [f"model.family={family}"])).model == own
    # A key that several have is told as that of the first of them.
    others = {key: name for name in reversed(FAMILIES) if name != family for key in get_type_hints(FAMILIES[name])}
    for key in others.keys() - get_type_hints(FAMILIES[family]).keys():
        for settings in (
            {"model": {"family": family, key: 1}},
            apply_overrides({}, [f"family={family}", f"model.{key}=1"]),
        ):
            said = f"`model.{key}` is not a setting of {family} models but of {others[key]} ones"
            with pytest.raises(ConfigError, match=said):
                build_config(settings)


def test_configs_from_before_there_were_families():
    old = {"model": {"cell": "gru", "hidden": 8, "attention": "dot"}, "training": {"epochs": 2}}
    assert build_config(old).model == Seq2SeqConfig(cell="gru", hidden=8, attention="dot")
    assert build_config({"model": {}}).model == Seq2SeqConfig()


@pytest.mark.parametrize("model", [Seq2SeqConfig(hidden=9), TransformerConfig(width=12, positions="learned")])
def test_settings_name_the_family_and_come_back(model):
    config = dataclasses.replace(build_config({}), model=model)
    settings = as_settings(config)
    assert next(iter(settings["model"])) == "family"
    assert build_config(settings) == config
    assert "family:" in to_yaml(config)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"family": "transfomer"}, "model.family `transfomer` is not known; did you mean `transformer`?"),
        ({"family": "transformer", "hed": 2}, "`model.hed` is not a setting; did you mean `heads`?"),
        (
            {"family": "transformer", "heads": 2, "feedfoward": 8},
            "`model.feedfoward` is not a setting; did you mean `feedforward`?",
        ),
        (
            {"family": "transformer", "hidden": 2},
            "`model.hidden` is not a setting of transformer models but of recurrent",
        ),
        ({"family": "recurrent", "heads": 2}, "`model.heads` is not a setting of recurrent models but of transformer"),
        ({"hidden": 2, "heads": 2}, "`model.heads` is not a setting of recurrent models but of transformer ones"),
        ({"family": "transformer", "heads": 3}, "model.width must be a multiple of model.heads = 3, got 256"),
        ({"family": "transformer", "heads": True}, "`model.heads`: expected a number, got true"),
        ({"family": "transformer", "norm": "mid"}, "`model.norm`: input should be 'pre', 'post', 'none', 'batch', "),
        ({"family": "transformer", "norm": "rms", "encoder_norm": "batch"}, "name two kinds of norm; keep one"),
    ],
)
def test_mistakes_are_answered_for_the_family(raw, said):
    with pytest.raises(ConfigError) as caught:
        build_config({"model": raw}, where="x.yaml")
    assert str(caught.value).startswith("x.yaml: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_go_by_the_family():
    named = {"family": "transformer", "heads": 2}
    assert apply_overrides({}, ["heads=2", "family=transformer"]) == {"model": named}
    assert apply_overrides({}, ["width=3"]) == {"search": {"width": 3}}
    assert apply_overrides(PRESETS["causal"], ["heads=2"])["model"]["heads"] == 2
    with pytest.raises(ConfigError, match=r"`width` is ambiguous; write one of `model.width`, `search.width`"):
        apply_overrides(PRESETS["transformer"], ["width=3"])
    with pytest.raises(ConfigError, match="`heads` is not a setting of recurrent models but of transformer ones"):
        apply_overrides(PRESETS["lstm"], ["heads=3"])
    with pytest.raises(ConfigError, match="`hedas` is not a setting; did you mean `heads`"):
        apply_overrides(PRESETS["transformer"], ["hedas=3"])
    assert build_config(apply_overrides({}, ["family=transformer"])).model == TransformerConfig()
    assert PRESETS["transformer"]["model"] == {"family": "transformer"}, "presets are left alone"


def test_every_preset_is_built():
    from thalweg.data import Alphabet, Symbols

    side = Codec(Symbols(), Alphabet.build(["abc"]))
    for preset in PRESETS:
        if preset in ("pretrained", "lora"):
            continue  # of a checkpoint
        model = build_model(build_config(PRESETS[preset]), side, side)
        kinds = {"auto": Seq2Seq, "recurrent": Seq2Seq, "monotonic": Monotonic, "transformer": Transformer}
        kinds |= {"pretrained": Pretrained}
        assert isinstance(model, kinds[PRESETS[preset]["model"]["family"]])
        assert (model.vocab_size, model.eos) == (7, 3)


def test_the_small_data_settings():
    config = build_config(PRESETS["transformer"])
    shape = config.model
    assert (shape.width, shape.heads, shape.feedforward, shape.encoder_layers, shape.dropout) == (256, 4, 1024, 4, 0.3)
    training = config.training
    assert (training.schedule, training.warmup, training.learning_rate) == ("inverse_sqrt", 4000, 1e-3)
    assert (training.label_smoothing, training.beta2) == (0.1, 0.98)
    assert training.planned(25).epochs * 25 >= 5 * training.warmup, "the warm-up is a small part of the whole"
