"""Configs from YAML and ``key=value`` words: frozen, checked, with a remedy for every mistake.

A task's config is a frozen dataclass of sections (``data``, ``model``, ``training`` ...), each a frozen dataclass of
settings; the functions here work for any such class. Transduction is the default, and the one task whose ``model`` is
of several families. Which task plain settings belong to is :mod:`thalweg.tasks.registry`'s question.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from thalweg.energies.seq2seq import Seq2SeqConfig
from thalweg.errors import ConfigError, nearest
from thalweg.learning.settings import TrainingConfig
from thalweg.tasks.families import FAMILIES, ModelConfig, family_keys, family_name, family_of
from thalweg.tasks.search_settings import SearchConfig

__all__ = [
    "DataConfig",
    "SearchConfig",
    "TransduceConfig",
    "apply_overrides",
    "as_settings",
    "build_config",
    "read_config",
    "to_yaml",
]

T = TypeVar("T")
# Other spellings of keys.
_ALIASES = {"attention.map": "model.attention_map", "model.attention.map": "model.attention_map"}
Splitting = Literal["auto", "characters", "graphemes", "spaced"]
Normalising = Literal["auto", "nfc", "nfd", "none"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the pairs are and how each side is cut into symbols.

    Attributes:
        train, dev: a TSV file (``.gz`` too), or ``NAME:SPLIT`` of an embedded or known data set (``cmudict:train``).
        held_out: without ``dev``, this share of the training sources is kept apart as dev data.
        source_symbols, target_symbols: ``auto``, ``characters``, ``graphemes`` or ``spaced``.
        source_normalise, target_normalise: Unicode form ``nfc``, ``nfd`` or ``none``; ``auto`` is NFC except where
            composition would hide the letters (Korean syllables).
        features: ``auto`` reads a third column of tags (``V;PST``) where the training file has one; ``none`` expects
            two columns.

    >>> DataConfig(train="train.tsv").source_symbols
    'auto'
    """

    train: str = ""
    dev: str = ""
    held_out: float = 0.1
    source_symbols: Splitting = "auto"
    source_normalise: Normalising = "auto"
    target_symbols: Splitting = "auto"
    target_normalise: Normalising = "auto"
    features: Literal["auto", "none"] = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ConfigError(f"data.held_out must be in (0, 1), got {self.held_out}")
        _check_choices(self, "data")


@dataclass(frozen=True, kw_only=True)
class TransduceConfig:
    """Everything about a transduction run; ``search`` is the one used to measure on the dev data while training.

    In plain settings the section ``model`` may name its ``family`` (``recurrent`` or ``transformer``); without, the
    settings it holds tell, and where they do not it is recurrent.

    >>> TransduceConfig(data=DataConfig(train="train.tsv")).model.cell
    'lstm'
    >>> build_config({"model": {"heads": 2}}).model.positions
    'sinusoidal'
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=Seq2SeqConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    search: SearchConfig = field(default_factory=SearchConfig)


def _check_choices(config: object, section: str) -> None:
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ConfigError(f"{section}.{name} `{value}` is not known; {nearest(str(value), get_args(hint))}")


def build_config(raw: Mapping[str, Any], kind: type[T] = TransduceConfig, *, where: str = "config") -> T:
    """A checked config from plain dictionaries; unknown keys and wrong types are one-line errors.

    >>> build_config({"training": {"epochs": 3}}).training.epochs
    3
    >>> build_config({"training": {"epocs": 3}})
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: config: `training.epocs` is not a setting; did you mean `epochs`?
    """
    transduces = issubclass(kind, TransduceConfig)
    if transduces:
        raw = _without_task(raw, where)
    _check_keys(raw, kind, where, "")
    settings = dict(raw)
    if isinstance(model := settings.get("model"), Mapping) and transduces:
        shape = {key: value for key, value in model.items() if key != "family"}
        settings["model"] = _validated(shape, FAMILIES[_family(model, where)], where, "model.")
    return _validated(settings, kind, where, "")


def _without_task(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Settings of a transduction without the word that they are."""
    if not isinstance(raw, Mapping) or "task" not in raw:
        return raw
    if raw["task"] != "transduce":
        raise ConfigError(f"{where}: expected settings of the task transduce, got those of `{raw['task']}`")
    return {key: value for key, value in raw.items() if key != "task"}


def _validated(raw: Mapping[str, Any], kind: type[T], where: str, prefix: str) -> T:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(dict(raw))
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{where}: {cause}") from None
        key = prefix + ".".join(str(part) for part in first["loc"])
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(f"{where}: `{key}`: {message}, got {first['input']!r}") from None


def _family(model: object, where: str) -> str:
    try:
        return family_of(model)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_keys(raw: object, kind: Any, where: str, prefix: str) -> None:
    if not isinstance(raw, Mapping):
        got = type(raw).__name__
        raise ConfigError(f"{where}: expected settings as `key: value` lines under `{prefix or 'the top'}`, got {got}")
    family = _family(raw, where) if kind == ModelConfig else ""
    hints = {**family_keys(family), "family": str} if family else get_type_hints(kind)
    for key, value in raw.items():
        if key not in hints:
            raise ConfigError(f"{where}: `{prefix}{key}` is not a setting{_remedy(str(key), hints, family)}")
        if isinstance(value, bool) and hints[key] in (int, float, str | float):
            raise ConfigError(f"{where}: `{prefix}{key}`: expected a number, got {str(value).lower()}")
        if dataclasses.is_dataclass(hints[key]) or hints[key] == ModelConfig:
            _check_keys(value, hints[key], where, f"{prefix}{key}.")


def _remedy(key: str, choices: Iterable[str], family: str = "") -> str:
    for other in FAMILIES:
        if family not in ("", other) and key in family_keys(other):
            return f" of {family} models but of {other} ones; leave it out or set `model.family={other}`"
    return f"; {nearest(key, choices)}"


def apply_overrides(raw: Mapping[str, Any], words: Iterable[str], kind: type | None = None) -> dict[str, Any]:
    """Settings with ``key=value`` words laid over them; a key may leave out its section where that is unambiguous.

    Which settings a model has depends on its family: that of ``raw``, or the one that the words tell. The map of
    attention, ``model.attention_map``, may be written ``attention.map``. Where a setting is a list, ``32,64`` and a
    single ``32`` are one too.

    Args:
        raw: settings as a YAML file holds them; left as they are.
        words: ``key=value`` or ``section.key=value``, each value as YAML.
        kind: the config that the settings are for; a transduction's by default.

    >>> apply_overrides({"model": {"hidden": 64}}, ["hidden=128", "training.epochs=3"])
    {'model': {'hidden': 128}, 'training': {'epochs': 3}}
    """
    words = list(words)
    kind = kind or TransduceConfig
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    family = _family_told(raw.get("model"), words) if kind is TransduceConfig else ""
    sections = _sections(kind, family)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"expected `key=value`, got `{word}`; for example `epochs=30`")
        section, leaf = _place(key.strip(), sections, family)
        home = result.setdefault(section, {})
        if home is None:  # an empty section of a YAML file
            home = result[section] = {}
        if isinstance(home, dict):  # anything else is for `build_config` to refuse
            home[leaf] = _value(value, sections.get(section, {}).get(leaf))
    return result


def _sections(kind: type, family: str) -> dict[str, dict[str, Any]]:
    """The settings of each section of a config, and their types."""
    return {
        section: {**family_keys(family), "family": str} if hint == ModelConfig else get_type_hints(hint)
        for section, hint in get_type_hints(kind).items()
        if hint == ModelConfig or dataclasses.is_dataclass(hint)
    }


def _place(key: str, sections: Mapping[str, Mapping[str, Any]], family: str) -> tuple[str, str]:
    """Section and name of a setting that a word gives."""
    section, dot, leaf = (_ALIASES.get(key, key) if family else key).partition(".")
    if dot:
        return section, leaf
    homes = [name for name, keys in sections.items() if section in keys]
    if not homes:
        choices = {each for keys in sections.values() for each in keys}
        raise ConfigError(f"`{section}` is not a setting{_remedy(section, choices, family)}")
    if len(homes) > 1:
        places = ", ".join(f"`{home}.{section}`" for home in homes)
        raise ConfigError(f"`{section}` is ambiguous; write one of {places}")
    return homes[0], section


def _value(text: str, hint: Any) -> Any:
    import yaml

    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError:
        parsed = text
    kinds = [get_origin(each) for each in (hint, *get_args(hint))]
    if tuple in kinds and "," in text and not isinstance(parsed, list):
        return [_value(part, None) for part in text.split(",") if part.strip()]
    if kinds[0] is tuple and not isinstance(parsed, list):
        return [] if parsed is None else [parsed]
    return "" if parsed is None else parsed


def _family_told(model: object, words: Iterable[str]) -> str:
    """The family that a model section and ``key=value`` words tell; words of other sections tell nothing."""
    given = {key.strip(): value.strip() for key, _, value in (word.partition("=") for word in words)}
    named = given.get("model.family", given.get("family"))
    if named:
        return family_of({"family": named})
    elsewhere: set[str] = set()
    for section, kind in get_type_hints(TransduceConfig).items():
        elsewhere |= set() if section == "model" else set(get_type_hints(kind))
    keys = [key.removeprefix("model.") for key in given if key.startswith("model.") or key not in elsewhere]
    return family_of(model, keys)


def read_config(path: Path) -> dict[str, Any]:
    """Plain dictionaries from a YAML file.

    >>> read_config(Path("absent.yaml"))
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: absent.yaml: expected a config file, got no such file; ...
    """
    import yaml

    if not path.is_file():
        raise ConfigError(
            f"{path}: expected a config file, got no such file; use `--data train.tsv` to train without one"
        )
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path}{line}: expected YAML, got something else ({problem})") from None
    if raw is None:
        raise ConfigError(f"{path}: expected settings, got an empty file")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, got {type(raw).__name__}")
    return raw


def as_settings(config: Any) -> dict[str, Any]:
    """Plain dictionaries and lists that :func:`build_config` takes back; the family of a transducer's model is named.

    >>> as_settings(TransduceConfig())["model"]["family"]
    'recurrent'
    """
    settings = _plain(dataclasses.asdict(config))
    if isinstance(config, TransduceConfig):
        settings["model"] = {"family": family_name(config.model), **settings["model"]}
    return settings


def _plain(value: Any) -> Any:
    """Tuples as the lists that JSON and YAML make of them, so that settings compare equal after a round trip."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def to_yaml(config: Any) -> str:
    """A config as YAML that :func:`read_config` reads back.

    >>> "epochs: 3" in to_yaml(build_config({"training": {"epochs": 3}}))
    True
    """
    import yaml

    return yaml.safe_dump(as_settings(config), sort_keys=False, allow_unicode=True)
