"""Families of models: which settings each has, how a family is recognised, and presets by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from thalweg.energies.seq2seq import Seq2SeqConfig
from thalweg.energies.transformer import TransformerConfig
from thalweg.errors import ConfigError, nearest

__all__ = ["FAMILIES", "PRESETS", "ModelConfig", "family_keys", "family_name", "family_of"]

ModelConfig = Seq2SeqConfig | TransformerConfig
"""Shape of a model of either family."""

FAMILIES: dict[str, type[Seq2SeqConfig] | type[TransformerConfig]] = {
    "recurrent": Seq2SeqConfig,
    "transformer": TransformerConfig,
}
"""The settings of each family's models, by the name that ``model.family`` has; the first is the default."""

# Wu et al. (2021), who found a large batch, much dropout and a slow start to be what small data need, and who take the
# usual second beta of Transformers. By tokens: about 400 words with their transcriptions.
_SMALL_DATA = {
    "batch_tokens": 8000,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "beta2": 0.98,
    "schedule": "inverse_sqrt",
    "warmup": 4000,
    "label_smoothing": 0.1,
}

PRESETS: dict[str, dict[str, Any]] = {
    "lstm-attention": {"model": {"family": "recurrent", "cell": "lstm", "attention": "additive"}},
    "gru-attention": {"model": {"family": "recurrent", "cell": "gru", "attention": "additive"}},
    "lstm": {"model": {"family": "recurrent", "cell": "lstm", "attention": "none"}},
    "gru": {"model": {"family": "recurrent", "cell": "gru", "attention": "none"}},
    "transformer": {"model": {"family": "transformer"}, "training": _SMALL_DATA},
    "transformer-rotary": {"model": {"family": "transformer", "positions": "rotary"}, "training": _SMALL_DATA},
    "transformer-pointer": {"model": {"family": "transformer", "pointer": True}, "training": _SMALL_DATA},
    "causal": {"model": {"family": "transformer", "kind": "causal"}, "training": _SMALL_DATA},
}
"""Settings by the name given to ``--model``; anything in them can be overridden."""


def family_keys(family: str) -> dict[str, Any]:
    """The settings of a family's models and their types.

    >>> "heads" in family_keys("transformer"), "heads" in family_keys("recurrent")
    (True, False)
    """
    return get_type_hints(FAMILIES[family])


def family_name(config: ModelConfig) -> str:
    """The family that a model's settings belong to.

    >>> family_name(Seq2SeqConfig())
    'recurrent'
    """
    return next(name for name, kind in FAMILIES.items() if isinstance(config, kind))


def family_of(model: Mapping[str, Any] | object, words: Collection[str] = ()) -> str:
    """The family of plain settings: what ``family`` says, else the one family whose own settings they name.

    A setting that several families have tells one where only that one knows its value.

    Args:
        model: the ``model`` section; anything but a mapping says nothing.
        words: further keys, looked at only where ``model`` leaves the family open.

    >>> family_of({"heads": 2}), family_of({"dropout": 0.1}), family_of({}, ["hidden"]), family_of({"cell": "gru"})
    ('transformer', 'recurrent', 'recurrent', 'recurrent')
    >>> family_of({"norm": "post"}), family_of({"norm": "layer"}), family_of({"norm": "layer", "heads": 2})
    ('transformer', 'recurrent', 'transformer')
    >>> family_of({"heads": 2, "hidden": 8})
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: model settings of two families: `hidden` (recurrent), `heads` (transformer); ...
    """
    section = model if isinstance(model, Mapping) else {}
    if "family" in section:
        named = section["family"]
        if named not in FAMILIES:
            raise ConfigError(f"model.family `{named}` is not known; {nearest(str(named), FAMILIES)}")
        return str(named)
    for keys in (section, words):
        own = {name: _first_own(name, keys) for name in FAMILIES}
        told = {name: key for name, key in own.items() if key}
        if len(told) > 1:
            listed = ", ".join(f"`{key}` ({name})" for name, key in told.items())
            raise ConfigError(f"model settings of two families: {listed}; keep to one, or say `model.family`")
        if told:
            return next(iter(told))
    return next(iter(FAMILIES))


def _first_own(family: str, keys: Collection[str]) -> str:
    """The first key that this family has and no other, or whose value this family knows and no other."""
    others = [family_keys(name) for name in FAMILIES if name != family]
    hints = family_keys(family)

    def knows(hint: Any, value: Any) -> bool:
        return get_origin(hint) is not Literal or value in get_args(hint)

    for key in keys:
        shared = [hints_of[key] for hints_of in others if key in hints_of]
        if key not in hints:
            continue
        if not shared:
            return key
        value = keys[key] if isinstance(keys, Mapping) else None
        if value is not None and knows(hints[key], value) and not any(knows(hint, value) for hint in shared):
            return key
    return ""
