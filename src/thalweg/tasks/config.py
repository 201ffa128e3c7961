"""Configs from YAML and ``key=value`` words: frozen, checked, with a remedy for every mistake."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from thalweg.energies.seq2seq import Seq2SeqConfig
from thalweg.errors import ConfigError, nearest
from thalweg.learning.settings import TrainingConfig

__all__ = [
    "PRESETS",
    "DataConfig",
    "SearchConfig",
    "TransduceConfig",
    "apply_overrides",
    "build_config",
    "read_config",
    "to_yaml",
]

T = TypeVar("T")
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

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ConfigError(f"data.held_out must be in (0, 1), got {self.held_out}")
        _check_choices(self, "data")


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How answers are searched.

    Attributes:
        search: ``greedy``, ``beam`` or ``nucleus`` (sampling).
        width: beam width.
        length_penalty: exponent of the length that divides a finished hypothesis' score; 0 is none.
        max_length: symbols at most, end included; 0 means twice the longest training target plus 10.
        temperature, top_k, top_p: of sampling; top_k 0 is none.
        sampling_seed: of sampling.

    >>> SearchConfig(search="beam").width
    5
    """

    search: Literal["greedy", "beam", "nucleus"] = "greedy"
    width: int = 5
    length_penalty: float = 0.0
    max_length: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.9
    sampling_seed: int = 0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"search.width must be at least 1, got {self.width}")
        if self.max_length < 0 or self.top_k < 0:
            raise ConfigError("search.max_length and search.top_k must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"search.top_p must be in (0, 1], got {self.top_p}")
        if not self.temperature > 0:  # NaN too
            raise ConfigError(f"search.temperature must be positive, got {self.temperature}")
        if not math.isfinite(self.length_penalty):
            raise ConfigError(f"search.length_penalty must be finite, got {self.length_penalty}")
        _check_choices(self, "search")


@dataclass(frozen=True, kw_only=True)
class TransduceConfig:
    """Everything about a transduction run; ``search`` is the one used to measure on the dev data while training.

    >>> TransduceConfig(data=DataConfig(train="train.tsv")).model.cell
    'lstm'
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: Seq2SeqConfig = field(default_factory=Seq2SeqConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    search: SearchConfig = field(default_factory=SearchConfig)


PRESETS: dict[str, dict[str, Any]] = {
    "lstm-attention": {"model": {"cell": "lstm", "attention": "additive"}},
    "gru-attention": {"model": {"cell": "gru", "attention": "additive"}},
    "lstm": {"model": {"cell": "lstm", "attention": "none"}},
    "gru": {"model": {"cell": "gru", "attention": "none"}},
}
"""Settings by the name given to ``--model``; anything in them can be overridden."""


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
    from pydantic import TypeAdapter, ValidationError

    _check_keys(raw, kind, where, "")
    try:
        return TypeAdapter(kind).validate_python(dict(raw))
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{where}: {cause}") from None
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(f"{where}: `{key}`: {message}, got {first['input']!r}") from None


def _check_keys(raw: object, kind: Any, where: str, prefix: str) -> None:
    if not isinstance(raw, Mapping):
        got = type(raw).__name__
        raise ConfigError(f"{where}: expected settings as `key: value` lines under `{prefix or 'the top'}`, got {got}")
    hints = get_type_hints(kind)
    for key, value in raw.items():
        if key not in hints:
            raise ConfigError(f"{where}: `{prefix}{key}` is not a setting; {nearest(str(key), hints)}")
        if isinstance(value, bool) and hints[key] in (int, float):
            raise ConfigError(f"{where}: `{prefix}{key}`: expected a number, got {str(value).lower()}")
        if dataclasses.is_dataclass(hints[key]):
            _check_keys(value, hints[key], where, f"{prefix}{key}.")


def apply_overrides(raw: Mapping[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """Settings with ``key=value`` words laid over them; a key may leave out its section where that is unambiguous.

    >>> apply_overrides({"model": {"hidden": 64}}, ["hidden=128", "training.epochs=3"])
    {'model': {'hidden': 128}, 'training': {'epochs': 3}}
    """
    import yaml

    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    homes: dict[str, list[str]] = {}
    for section, kind in get_type_hints(TransduceConfig).items():
        for key in get_type_hints(kind):
            homes.setdefault(key, []).append(section)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"expected `key=value`, got `{word}`; for example `hidden=256`")
        section, dot, leaf = key.strip().partition(".")
        if not dot:
            leaf = section
            if leaf not in homes:
                raise ConfigError(f"`{leaf}` is not a setting; {nearest(leaf, homes)}")
            if len(homes[leaf]) > 1:
                places = ", ".join(f"`{home}.{leaf}`" for home in homes[leaf])
                raise ConfigError(f"`{leaf}` is ambiguous; write one of {places}")
            section = homes[leaf][0]
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            parsed = value
        home = result.setdefault(section, {})
        if home is None:  # an empty section of a YAML file
            home = result[section] = {}
        if isinstance(home, dict):  # anything else is for `build_config` to refuse
            home[leaf] = "" if parsed is None else parsed
    return result


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


def to_yaml(config: Any) -> str:
    """A config as YAML that :func:`read_config` reads back.

    >>> "epochs: 3" in to_yaml(build_config({"training": {"epochs": 3}}))
    True
    """
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)
