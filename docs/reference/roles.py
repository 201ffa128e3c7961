"""Docstrings as Markdown: references to names become code, formulas and examples blocks of it."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|math):`~?([^`]+)`")
_FORMULA = re.compile(r"^( *)\.\. math::[ \n]+(.+(?:\n(?:\1 +.+))*)", re.MULTILINE)
_EXAMPLE = re.compile(r"^( *)>>> .+(?:\n.+)*", re.MULTILINE)


def markdown(text: str) -> str:
    """What a docstring says, with ``code`` for what is a role and blocks for formulas and examples."""

    def formula(found: re.Match[str]) -> str:
        lines = [line.strip() for line in found[2].splitlines()]
        return "\n".join(found[1] + line for line in ("```latex", *lines, "```"))

    text = _FORMULA.sub(formula, _ROLE.sub(r"`\1`", text))
    return _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", text)


class Roles(griffe.Extension):
    """Changes the docstring of every object before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of modules, classes, functions and attributes alike."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
