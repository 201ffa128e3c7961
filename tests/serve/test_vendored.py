"""The page is complete, and what others wrote of it is what it says it is."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

PAGE = Path(str(files("thalweg"))) / "serve" / "page"
VENDOR = PAGE / "vendor"
LIBRARIES = json.loads((VENDOR / "vendor.json").read_text(encoding="utf-8"))
LICENCES = {"MIT": "Permission is hereby granted, free of charge", "Apache-2.0": "Apache License"}
OWN = sorted(path for path in PAGE.rglob("*.js") if VENDOR not in path.parents)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library["file"])
def test_a_library_is_as_it_came(library: dict[str, str]) -> None:
    assert set(library) == {"name", "version", "licence", "file", "sha256", "licence_file", "source", "changed"}
    found = hashlib.sha256((VENDOR / library["file"]).read_bytes()).hexdigest()
    assert found == library["sha256"], f"{library['file']} is not what vendor.json says; vendor it again"
    assert library["version"] in library["source"]
    assert LICENCES[library["licence"]] in (VENDOR / library["licence_file"]).read_text(encoding="utf-8")


def test_every_vendored_file_is_named() -> None:
    named = {library[key] for library in LIBRARIES for key in ("file", "licence_file")} | {"vendor.json"}
    assert {path.name for path in VENDOR.iterdir()} == named


@pytest.mark.parametrize("path", [*OWN, *sorted(VENDOR.glob("*.mjs"))], ids=lambda path: path.name)
def test_a_module_imports_what_is_there(path: Path) -> None:
    """Modules are served as they are: a specifier is a relative path to a file."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"""(?:^|[;}\s])(?:import|from)\s*["']([\w@./-]+)["']""", text):
        assert name.startswith("."), f"{path.name} imports `{name}`, which a browser cannot find"
        assert (path.parent / name).is_file(), f"{path.name} imports `{name}`, which is not there"
    assert not re.search(r"\beval\(|\bnew Function\(|https?://(?!www\.w3\.org)", _code(text)), path.name


def _code(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def test_the_page_has_nothing_inline() -> None:
    """The content security policy allows scripts and styles of files alone."""
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)
    for name in re.findall(r'(?:src|href)="static/([^"]+)"', text):
        assert (PAGE / name).is_file(), name


def test_modules_stay_short() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in OWN}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
