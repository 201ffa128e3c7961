"""Configs from YAML and ``key=value`` words: frozen, checked, with a remedy for every mistake.

A task's config is a frozen dataclass of sections (``data``, ``model``, ``training`` ...), each a frozen dataclass of
settings; the functions here work for any such class. What a class may say beside its sections:

- ``presets``: settings by the name that ``model`` may give;
- ``families``: kinds of ``model`` by the name that ``model.family`` gives, the first being the default, and
  ``learns_with``: training settings of each that stand where nothing else is said;
- ``aliases``: other spellings of keys.

Which task plain settings belong to is :mod:`thalweg.tasks.registry`'s question.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from thalweg.errors import ConfigError, nearest
from thalweg.tasks.yaml_text import parse_word, parse_yaml

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
Kinds = Mapping[str, type]


def config_from(raw: Mapping[str, Any], kind: type[T], *, where: str = "config") -> T:
    """A checked config from plain dictionaries; unknown keys and wrong types are one-line errors.

    >>> from thalweg.learning.settings import TrainingConfig
    >>> config_from({"epochs": 3}, TrainingConfig).epochs
    3
    >>> config_from({"epocs": 3}, TrainingConfig)
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: config: `epocs` is not a setting; did you mean `epochs`?
    """
    raw = with_preset(raw, getattr(kind, "presets", {}), where)
    families = getattr(kind, "families", {})
    _check_keys(raw, kind, where)
    settings = dict(raw)
    if families and isinstance(model := settings.get("model"), Mapping):
        family = _family(model, families, where)
        shape = {key: value for key, value in model.items() if key != "family"}
        settings["model"] = _validated(shape, families[family], where, "model.")
        settings["training"] = learnt_with(kind, family, settings.get("training", {}))
    return _validated(settings, kind, where, "")


def learnt_with(kind: Any, family: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The ``training`` section of a family's model: what is given, and what the family brings where nothing is.

    A ``batch_size`` that is given is meant: the family's ``batch_tokens`` then stands back.

    >>> from thalweg.tasks.transduce.config import TransduceConfig
    >>> learnt_with(TransduceConfig, "transformer", {"learning_rate": 0.1})["learning_rate"]
    0.1
    >>> "batch_tokens" in learnt_with(TransduceConfig, "transformer", {"batch_size": 16})
    False
    """
    brought = getattr(kind, "learns_with", {}).get(family, {})
    if "batch_size" in given:
        brought = {key: value for key, value in brought.items() if key != "batch_tokens"}
    return {**brought, **given}


def with_preset(
    settings: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]], where: str = "config"
) -> Mapping[str, Any]:
    """Settings laid over the preset that they name: ``model: NAME``, or ``preset: NAME`` in the section ``model``.

    >>> presets = {"gru": {"model": {"cell": "gru"}}}
    >>> with_preset({"model": "gru", "training": {"epochs": 3}}, presets)
    {'model': {'cell': 'gru'}, 'training': {'epochs': 3}}
    >>> with_preset({"model": {"preset": "gru", "hidden": 2}}, presets)
    {'model': {'cell': 'gru', 'hidden': 2}}
    >>> with_preset({"model": "gruu"}, presets)
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: config: model `gruu` is not known; did you mean `gru`?
    """
    model = settings.get("model") if isinstance(settings, Mapping) else None
    own = {"preset": model} if isinstance(model, str) else dict(model) if isinstance(model, Mapping) else {}
    name = own.pop("preset", None)
    if name is None or not presets:
        return settings
    if not isinstance(name, str) or name not in presets:
        raise ConfigError(f"{where}: model `{name}` is not known; {nearest(str(name), presets)}")
    result = {**presets[name], **settings, "model": own}
    for section, values in presets[name].items():
        if isinstance(values, Mapping) and isinstance(result[section], Mapping):
            result[section] = {**values, **result[section]}
    return result


@cache
def _validator(kind: type[T]) -> TypeAdapter[T]:
    """Reading the types of a class takes longer than training a small model for an epoch: once is enough."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _validated(raw: Mapping[str, Any], kind: type[T], where: str, prefix: str) -> T:
    from pydantic import ValidationError

    try:
        return _validator(kind).validate_python(dict(raw))
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{where}: {cause}") from None
        key = prefix + ".".join(str(part) for part in first["loc"])
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(f"{where}: `{key}`: {message}, got {first['input']!r}") from None


def _family(model: object, families: Kinds, where: str) -> str:
    try:
        return family_of(model, families)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_keys(raw: object, kind: Any, where: str, prefix: str = "", families: Kinds | None = None) -> None:
    """Every key must be a setting; ``families`` where the section is of one of several kinds."""
    if not isinstance(raw, Mapping):
        got = type(raw).__name__
        raise ConfigError(f"{where}: expected settings as `key: value` lines under `{prefix or 'the top'}`, got {got}")
    family = _family(raw, families, where) if families else ""
    hints = {**get_type_hints(families[family]), "family": str} if families else get_type_hints(kind)
    for key, value in raw.items():
        if key not in hints:
            raise ConfigError(f"{where}: `{prefix}{key}` is not a setting{_remedy(str(key), hints, families, family)}")
        if isinstance(value, bool) and hints[key] in (int, float, str | float):
            raise ConfigError(f"{where}: `{prefix}{key}`: expected a number, got {str(value).lower()}")
        several = getattr(kind, "families", None) if key == "model" and not prefix else None
        if dataclasses.is_dataclass(hints[key]) or several:
            _check_keys(value, hints[key], where, f"{prefix}{key}.", several)


def _remedy(key: str, choices: Iterable[str], families: Kinds | None, family: str) -> str:
    for other, kind in (families or {}).items():
        if family != other and key in get_type_hints(kind):
            return f" of {family} models but of {other} ones; leave it out or set `model.family={other}`"
    return f"; {nearest(key, choices)}"


def lay_over(raw: Mapping[str, Any], words: Iterable[str], kind: type) -> dict[str, Any]:
    """Settings with ``key=value`` words laid over them; a key may leave out its section where that is unambiguous.

    Which settings a model has depends on its family: that of ``raw``, or the one that a word names. ``model=NAME``
    names a preset, whose settings of the model go before those of ``raw``. Where a setting is a list, ``32,64`` and a
    single ``32`` are one too.

    Args:
        raw: settings as a YAML file holds them; left as they are.
        words: ``key=value`` or ``section.key=value``, each value as YAML.
        kind: the config that the settings are for.

    >>> from thalweg.tasks.transduce.config import TransduceConfig
    >>> lay_over({"model": {"hidden": 64}}, ["hidden=128", "training.epochs=3"], TransduceConfig)
    {'model': {'hidden': 128}, 'training': {'epochs': 3}}
    """
    words, aliases, families = list(words), getattr(kind, "aliases", {}), getattr(kind, "families", {})
    told = {key.strip(): value.strip() for key, _, value in (word.partition("=") for word in words)}
    presets = getattr(kind, "presets", {})
    for key in (key for key in told if presets and key in ("model", "model.preset")):
        own = raw.get("model")
        raw = dict(with_preset({**raw, "model": str(_value(told[key], None))}, presets))
        if isinstance(own, Mapping):
            raw["model"] = {**{name: value for name, value in own.items() if name != "preset"}, **raw["model"]}
        words = [word for word in words if word.partition("=")[0].strip() != key]
    raw = with_preset(raw, presets)
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    hints = get_type_hints(kind)
    sections = {name: get_type_hints(hint) for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    family = ""
    if families:
        named = told.get("model.family", told.get("family"))
        family = family_of({"family": named} if named else raw.get("model"), families)
        sections = {name: sections.get(name, {}) for name in hints if name in sections or name == "model"}
        sections["model"] = {**get_type_hints(families[family]), "family": str}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"expected `key=value`, got `{word}`; for example `epochs=30`")
        section, dot, leaf = aliases.get(key.strip(), key.strip()).partition(".")
        if not dot:
            section, leaf = _home(section, sections, families, family), section
        home = result.setdefault(section, {})
        if home is None:  # an empty section of a YAML file
            home = result[section] = {}
        if isinstance(home, dict):  # anything else is for `config_from` to refuse
            home[leaf] = _value(value, sections.get(section, {}).get(leaf))
    return result


def _home(key: str, sections: Mapping[str, Mapping[str, Any]], families: Kinds, family: str) -> str:
    """The section of a setting that a word gives."""
    homes = [name for name, keys in sections.items() if key in keys]
    if not homes:
        choices = {each for keys in sections.values() for each in keys}
        raise ConfigError(f"`{key}` is not a setting{_remedy(key, choices, families, family)}")
    if len(homes) > 1:
        places = ", ".join(f"`{home}.{key}`" for home in homes)
        raise ConfigError(f"`{key}` is ambiguous; write one of {places}")
    return homes[0]


def _value(text: str, hint: Any) -> Any:
    parsed = parse_word(text)
    kinds = [get_origin(each) for each in (hint, *get_args(hint))]
    if tuple in kinds and "," in text and not isinstance(parsed, list):
        return [_value(part, None) for part in text.split(",") if part.strip()]
    if kinds[0] is tuple and not isinstance(parsed, list):
        return [] if parsed is None else [parsed]
    return "" if parsed is None else parsed


def family_of(model: Mapping[str, Any] | object, families: Kinds) -> str:
    """The family that the key ``family`` of plain settings names; the first where it names none.

    Args:
        model: the ``model`` section; anything but a mapping names none.
        families: the settings of each, by name.

    >>> from thalweg.tasks.transduce.presets import FAMILIES
    >>> family_of({"family": "transformer", "heads": 2}, FAMILIES), family_of({"dropout": 0.1}, FAMILIES)
    ('transformer', 'recurrent')
    >>> family_of({"family": "transfomer"}, FAMILIES)
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: model.family `transfomer` is not known; did you mean `transformer`?
    """
    named = model.get("family", next(iter(families))) if isinstance(model, Mapping) else next(iter(families))
    if not isinstance(named, str) or named not in families:
        raise ConfigError(f"model.family `{named}` is not known; {nearest(str(named), families)}")
    return named


def read_config(path: Path) -> dict[str, Any]:
    """Plain dictionaries from a YAML file.

    >>> read_config(Path("absent.yaml"))
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: absent.yaml: expected a config file, got no such file; ...
    """
    if not path.is_file():
        raise ConfigError(
            f"{path}: expected a config file, got no such file; use `--data train.tsv` to train without one"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected YAML, got something else (it is not UTF-8 text)") from None
    raw = parse_yaml(text, str(path))
    if raw is None:
        raise ConfigError(f"{path}: expected settings, got an empty file")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, got {type(raw).__name__}")
    return raw


def as_settings(config: Any) -> dict[str, Any]:
    """Plain dictionaries and lists that :func:`config_from` takes back; the family of a model is named.

    >>> from thalweg.tasks.transduce.config import TransduceConfig
    >>> as_settings(TransduceConfig())["model"]
    {'family': 'auto'}
    """
    settings = _plain(dataclasses.asdict(config))
    for name, kind in getattr(config, "families", {}).items():
        if isinstance(config.model, kind):
            settings["model"] = {"family": name, **settings["model"]}
    return settings


def _plain(value: Any) -> Any:
    """Tuples as the lists that JSON and YAML make of them, so that settings compare equal after a round trip."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def to_yaml(config: Any) -> str:
    """A config as YAML that :func:`read_config` reads back.

    >>> from thalweg.tasks.transduce.config import TransduceConfig
    >>> "family: auto" in to_yaml(TransduceConfig())
    True
    """
    import yaml

    return yaml.safe_dump(as_settings(config), sort_keys=False, allow_unicode=True)
