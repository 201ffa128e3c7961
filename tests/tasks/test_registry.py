"""Tasks by name: settings find their task, words their section, and any task is trained from plain settings."""

from __future__ import annotations

import pytest
import yaml

from thalweg.errors import ConfigError
from thalweg.tasks.classify.config import IMAGE_PRESETS, AugmentConfig, ClassifyConfig, ImageDataConfig
from thalweg.tasks.config import as_settings, to_yaml
from thalweg.tasks.registry import apply_overrides, build_config, list_tasks, task_named, task_of, train
from thalweg.tasks.transduce.config import TransduceConfig


def test_every_task_builds_its_defaults():
    for name in list_tasks():
        task = task_named(name)
        config = task.configure({})
        assert isinstance(config, task.kind)
        assert task.default_model in task.presets
        section, _, key = task.data.partition(".")
        assert getattr(getattr(config, section), key) == ""
        for preset in task.presets.values():
            built = task.configure(preset)
            settings = task.settings(built)
            assert settings["task"] == name
            assert task_of(settings).name == name
            assert task.configure(yaml.safe_load(to_yaml(built))) == built == task.configure(settings)


def test_settings_without_a_task_are_of_transduction():
    assert task_of({}).name == "transduce"
    assert task_of({"task": "classify"}).name == "classify"
    with pytest.raises(ConfigError, match=r"a\.yaml: task `clasify` is not known; did you mean `classify`"):
        task_of({"task": "clasify"}, "a.yaml")
    assert build_config({"task": "transduce"}) == TransduceConfig()
    with pytest.raises(ConfigError, match="expected settings of the task transduce, got those of `classify`"):
        task_of({}).configure({"task": "classify"})
    assert isinstance(build_config({"task": "classify"}), ClassifyConfig)
    assert "task" not in as_settings(TransduceConfig()), "configs of transduction are written as before"


@pytest.mark.parametrize("settings", [None, 3, b"config.yaml", ["epochs=3"]])
def test_what_is_neither_settings_nor_a_config_is_told(tmp_path, settings):
    said = f"expected a config, settings by name or a YAML file, got {type(settings).__name__}"
    with pytest.raises(ConfigError, match=said):
        train(settings, tmp_path / "run")


def test_words_find_the_sections_of_their_task():
    task = task_named("classify")
    words = ["path=digits", "channels=4,8", "hidden=", "units=2", "flip=false", "crop=2", "mixup=0.2", "loss=hinge"]
    raw = task.overrides({"task": "classify", "model": {}}, [*words, "pool=1,2", "data.size=12,16"])
    assert raw["model"] == {"channels": [4, 8], "hidden": [], "units": 2, "pool": [1, 2]}
    config = task.configure(raw)
    assert config.model.channels == (4, 8)
    assert config.model.hidden == ()
    assert config.augment.settle((8, 8), "x").flip is False
    assert config.data.shape == (12, 16)
    assert task.configure(task.overrides({}, ["channels=32"])).model.channels == (32,)
    assert task.configure(task.overrides({}, ["channels=32,640"])).model.channels == (32, 640)
    for word, said in (
        ("cell=gru", "`cell` is not a setting"),
        ("epocs=3", "did you mean `epochs`"),
        ("dropuot=0", "did you mean `dropout`"),
    ):
        with pytest.raises(ConfigError, match=said):
            task.overrides({}, [word])
    with pytest.raises(ConfigError, match="`flip` is not a setting"):
        apply_overrides({}, ["flip=true"])


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"task": "transduce"}, "expected settings of the task classify, got those of `transduce`"),
        ({"data": {"pth": 1}}, "`data.pth` is not a setting; did you mean `path`"),
        ({"data": {"colours": "red"}}, "`data.colours`: input should be"),
        ({"data": {"held_out": 1}}, r"data.held_out must be in \(0, 1\)"),
        ({"data": {"size": [1, 2, 3]}}, "data.size must be pixels of a side"),
        ({"data": {"size": [0, 2]}}, "data.size must be pixels of a side"),
        ({"data": {"workers": -2}}, "data.workers"),
        ({"augment": {"crop": -2}}, "augment.crop must be 0 or more"),
        ({"augment": {"flip": "perhaps"}}, "augment.flip"),
        ({"augment": {"colour": 3}}, "colour"),
        ({"training": {"teacher_forcing": 1}}, "`training.teacher_forcing` is not a setting"),
        ({"search": {}}, "`search` is not a setting"),
        ({"model": {"norm": "btach"}}, "model.norm|`model.norm`"),
    ],
)
def test_mistakes_are_one_line(raw, said):
    with pytest.raises(ConfigError, match=said) as caught:
        task_named("classify").configure(raw, "file.yaml")
    assert str(caught.value).startswith("file.yaml: ")
    assert "\n" not in str(caught.value)


def test_augmentation_suits_the_images():
    assert AugmentConfig().settle((48, 64), "intel").crop == 4
    assert AugmentConfig().settle((1, 1), "x").crop == 0
    assert AugmentConfig().settle((8, 8), "digits").flip is False
    assert AugmentConfig(flip=True).settle((8, 8), "digits").flip is True
    with pytest.raises(ConfigError, match="colours"):
        ImageDataConfig(colours="red")
    assert ClassifyConfig().task == "classify"
    assert all(preset["task"] == "classify" for preset in IMAGE_PRESETS.values())


def test_plain_settings_are_trained(tmp_path):
    with pytest.raises(ConfigError, match="did you mean `training`"):
        train({"trainin": {}}, tmp_path / "run")
    with pytest.raises(ConfigError, match="no images: give a folder"):
        train({"task": "classify"}, tmp_path / "run")
    assert not (tmp_path / "run").exists()
