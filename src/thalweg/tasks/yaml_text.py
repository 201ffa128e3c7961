"""YAML as configs and words hold it: plain values of a sensible size, every key once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from thalweg.errors import ConfigError

# Characters of a config, values in it with every alias written out, and how deep they may lie in one another.
_LONGEST, _MOST, _DEEPEST = 2**20, 100_000, 32

# What the parser raises where it makes nothing of a number, a date or a tag is whatever Python raised.
_STRANGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; anything else is an error that names the line where it can.

    >>> parse_yaml("hidden: 64", "config.yaml")
    {'hidden': 64}
    >>> parse_yaml("hidden: 64\\nhidden: 8", "config.yaml")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: config.yaml:2: expected YAML, got something else (the key `hidden` a second time)
    """
    import yaml

    if len(text) > _LONGEST:
        raise ConfigError(f"{where}: expected at most {_LONGEST:,} characters, got {len(text):,}; is this a config?")
    try:
        value = yaml.load(text, Loader=_loader())
        _check_extent(value)
        return value
    except (yaml.YAMLError, RecursionError, *_STRANGE) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        if isinstance(error, RecursionError):
            problem = f"nested more than {_DEEPEST} deep"
        raise ConfigError(f"{where}{line}: expected YAML, got something else ({problem})") from None


def parse_word(text: str) -> Any:
    """The value of a ``key=value`` word: as YAML, or the text itself where it is none.

    >>> parse_word("[1, 2]"), parse_word("[1,")
    ([1, 2], '[1,')
    """
    try:
        return parse_yaml(text, "")
    except ConfigError:
        return text


@cache
def _loader() -> Any:
    import yaml
    from yaml.composer import ComposerError

    class Strict(yaml.SafeLoader):
        """Refuses a key that is given twice, of which YAML would silently keep the last."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if (key.tag, key.value) in seen:
                        raise ComposerError(None, None, f"the key `{key.value}` a second time", key.start_mark)
                    seen.add((key.tag, key.value))
            return node

    return Strict


def _check_extent(value: Any) -> None:
    """A few lines of aliases of aliases stand for billions of values, or for a value inside itself."""
    counts: dict[int, int] = {}

    def count(value: Any, depth: int) -> int:
        if depth > _DEEPEST:
            raise RecursionError
        if isinstance(value, str) and any("\ud800" <= mark <= "\udfff" for mark in value):
            raise ValueError("a character that is no text")
        if id(value) not in counts:
            inner = [*value, *value.values()] if isinstance(value, Mapping) else value
            inner = inner if isinstance(inner, (list, set)) else ()
            counts[id(value)] = 1 + sum(count(each, depth + 1) for each in inner)
        return counts[id(value)]

    if count(value, 0) > _MOST:
        raise ValueError(f"more than {_MOST:,} values")
