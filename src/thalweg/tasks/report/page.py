"""What every page is made of: the template, sections with links to them, cards, facts, commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from thalweg.files import write_text
from thalweg.tasks.report.text import escape, foreign

# What a page may load: nothing, or images that lie in it.
_POLICY = ("default-src 'none';", "default-src 'none'; img-src data:;")


def page_of(title: str, body: str, *, images: bool = False) -> str:
    """A whole page; it loads nothing from elsewhere and runs no script. ``images``: it may hold some.

    >>> "a &lt; b" in page_of("a < b", "")
    True
    """
    template = files("thalweg.tasks.report").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template.replace(*_POLICY) if images else template).substitute(title=escape(title), body=body)


def write_page(path: Path, title: str, body: str) -> Path:
    """Writes :func:`page_of`, replacing what is there in one step; returns the path."""
    write_text(path, page_of(title, body))
    return path


def sectioned(parts: Sequence[tuple[str, str, str]]) -> str:
    """Sections, each a key, a title and HTML, after a row of links to them.

    >>> sectioned([("a", "A", "<p>x</p>")])
    '<nav><a href="#a">A</a></nav><main><section id="a"><h2>A</h2><p>x</p></section></main>'
    """
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in parts)
    bodies = "".join(f'<section id="{key}"><h2>{title}</h2>{body}</section>' for key, title, body in parts)
    return f"<nav>{links}</nav><main>{bodies}</main>"


def fact_list(facts: Iterable[tuple[str, str]], kind: str = "facts") -> str:
    """Names and what is so; a fact without a value is left out."""
    rows = (f"<div><dt>{escape(name)}</dt><dd>{foreign(value)}</dd></div>" for name, value in facts if value)
    return f'<dl class="{kind}">{"".join(rows)}</dl>'


def command_lines(lines: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Commands ready to paste, each after what it does."""
    body = "".join(f"<p>{escape(what)}</p><pre>{escape(shlex.join(words))}</pre>" for what, words in lines)
    return f'<div class="card commands">{body}</div>'


def tile(value: str, name: str, more: str) -> str:
    """A key figure, its name, and a word on it."""
    words = f'<span>{escape(name)}</span><span class="muted">{escape(more)}</span>'
    return f'<div class="tile"><span class="value">{escape(value)}</span>{words}</div>'


def bar(share: float) -> str:
    """A share of 1 as a bar."""
    return f'<div class="bar plain"><i class="fill" style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></i></div>'


def chart_card(title: str, svg: str, keys: str = "") -> str:
    """A chart under its title, and the key of its colours as HTML."""
    return f'<figure class="card"><figcaption><b>{escape(title)}</b>{keys}</figcaption>{svg}</figure>'
