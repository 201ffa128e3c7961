"""The shape of the code: imports point one way, every public name is documented, every example runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = "thalweg"

# A room may import itself and the rooms before it. The service knows nothing of the terminal, and of the terminal's
# commands the one that starts it alone knows the service.
ROOMS = (
    *("errors", "limits", "files", "processes", "kernels", "inference", "layers", "energies", "data", "metrics"),
    *("learning", "diagnostics", "sweeps", "tasks", "recipes", "serve", "cli"),
)
RANK = {room: place for place, room in enumerate(ROOMS)}
STARTS_SERVICE = "thalweg.cli.serve"

# Third-party packages that a room may import at module level; inside a function anything may be imported.
CORE = {"torch", "numpy"}
THIRD_PARTY = {
    "cli": CORE | {"typer", "rich"},
    "serve": CORE | {"fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client"},
}
# Compiled backends are themselves imported only where a kernel is asked for.
BACKENDS = {"thalweg.kernels.gpu": {"triton"}}

EXTENSION = "_kernels"  # compiled from kernels/cpu/csrc: a part of that room

# Public classes and functions that need no example, each with the reason. Error classes never need one.
WITHOUT_EXAMPLE: dict[str, str] = {}

LONGEST_MODULE = 500
LONGEST_IMPORT = 0.08  # of the time that torch's own import takes: what `import thalweg` may add to it
SAYS_NAME = re.compile(r"\s*>>> .*\.__name__").match
PICKLING = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}


class Import(NamedTuple):
    """One imported name: ``from a.b import c`` is ``a.b.c``."""

    target: str
    line: int
    at_module_level: bool
    typing_only: bool


def imports_of(tree: ast.Module, module: str, is_package: bool = False) -> Iterator[Import]:
    """Every import of a module, relative ones resolved; ``import_module("a.b")`` counts.

    A plain ``import thalweg`` is as good or bad as what is then taken from it: ``thalweg.x`` counts instead.
    """

    def visit(node: ast.AST, level: bool, typing_only: bool) -> Iterator[Import]:
        names: list[str] = []
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names if alias.name != PACKAGE or alias.asname]
            case ast.Attribute(value=ast.Name(id=name)) if name == PACKAGE:
                names = [f"{PACKAGE}.{node.attr}"]
            case ast.ImportFrom():
                parts = module.split(".")
                # Relative imports start from a package itself, but from the parent of a plain module.
                kept = len(parts) - node.level + (1 if is_package else 0)
                base = ".".join([*parts[:kept], *([node.module] if node.module else [])])
                base = base if node.level else (node.module or "")
                names = [f"{base}.{alias.name}" for alias in node.names]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(text)), *_]):
                names = [text] if name in {"import_module", "__import__"} else []
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                level = False
            case _:
                pass
        yield from (Import(name, getattr(node, "lineno", 0), level, typing_only) for name in names)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from visit(child, level, True)
            for child in node.orelse:
                yield from visit(child, level, typing_only)
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child, level, typing_only)

    yield from visit(tree, True, False)


def room_of(module: str) -> str:
    """The room of a dotted name inside the package; ``python -m thalweg`` belongs to the command line."""
    parts = module.split(".")
    if len(parts) < 2:
        return ""
    return "cli" if parts[1] == "__main__" else parts[1]


def order_offences(tree: ast.Module, module: str, is_package: bool = False) -> list[str]:
    """Imports that point down the list of rooms, as lines to print."""
    room = room_of(module)
    if module == PACKAGE:  # it names everything, lazily: the import test holds it to that
        return []
    if room not in RANK:
        return [f"{module}: `{room}` is no room; the rooms are {', '.join(ROOMS)}"]
    offences = []
    for found in imports_of(tree, module, is_package):
        if found.target.split(".")[0] != PACKAGE or found.target == f"{PACKAGE}.__version__":
            continue
        other = room_of(found.target)
        if other == EXTENSION and module.startswith("thalweg.kernels."):
            continue
        if other not in RANK:
            offences.append(f"{module}:{found.line}: import from a room, not `{found.target}`")
        elif other != room and (RANK[other] >= RANK[room] or (other == "serve" and module != STARTS_SERVICE)):
            offences.append(f"{module}:{found.line}: `{room}` may not import `{found.target}`")
    return offences


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules of which each reaches every other."""

    def reached(start: str) -> set[str]:
        found, open_ = set(), [start]
        while open_:
            fresh = edges.get(open_.pop(), set()) - found
            found |= fresh
            open_ += fresh
        return found

    within = {name: reached(name) for name in edges}
    loops = {tuple(sorted(m for m in within[name] if name in within.get(m, set()))) for name in edges}
    return sorted(list(group) for group in loops if len(group) > 1)


def third_party_offences(tree: ast.Module, module: str, is_package: bool = False) -> list[str]:
    """Third-party imports that run when the module is imported and that its room may not have."""
    allowed = THIRD_PARTY.get(room_of(module), CORE) | {PACKAGE, "__future__"} | sys.stdlib_module_names
    allowed = allowed | {name for place, names in BACKENDS.items() if module.startswith(place) for name in names}
    return [
        f"{module}:{found.line}: import `{found.target}` inside the function that uses it"
        for found in imports_of(tree, module, is_package)
        if found.at_module_level and not found.typing_only and found.target.split(".")[0] not in allowed
    ]


def pickle_offences(tree: ast.Module, module: str, is_package: bool = False) -> list[str]:
    """Uses of anything that can execute code when a file is read."""
    offences = []
    for found in imports_of(tree, module, is_package):
        if found.target.split(".")[0] in PICKLING or found.target in {"torch.load", "torch.save"}:
            offences.append(f"{module}:{found.line}: `{found.target}`")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.load", "torch.save"}:
            offences.append(f"{module}:{node.lineno}: `{ast.unparse(node)}`")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            offences.append(f"{module}:{node.value.lineno}: `allow_pickle`")
    return offences


class Module(NamedTuple):
    """A module of the package, read but not imported."""

    name: str
    path: Path
    text: str
    tree: ast.Module
    is_package: bool


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(SOURCE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Module(name, path, text, ast.parse(text, str(path)), is_package))
    return tuple(found)


NAMES = [module.name for module in modules()]


def module_named(name: str) -> Module:
    return next(module for module in modules() if module.name == name)


Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def exports(module: Module) -> tuple[str, ...]:
    """What a package lists in ``__all__``; of a module the classes and functions without an underscore."""
    assigned = any(
        isinstance(target, ast.Name) and target.id == "__all__"
        for node in module.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    if assigned:
        return tuple(importlib.import_module(module.name).__all__)
    made = [] if module.is_package else [node for node in module.tree.body if isinstance(node, Documented)]
    return tuple(dict.fromkeys(node.name for node in made if not node.name.startswith("_")))


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Documented]]:
    """Classes, functions and methods with their qualified names."""
    for node in body:
        if isinstance(node, Documented):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from definitions(node.body + node.orelse, prefix)


@cache
def defined() -> dict[tuple[str, str], Documented]:
    """The source of a class or function by its module and qualified name.

    Read from the source, for a dataclass or a NamedTuple without a docstring is given one when it is made.
    """
    return {(module.name, name): node for module in modules() for name, node in definitions(module.tree.body)}


def source_of(value: object) -> Documented | None:
    """The definition of a class or function of this package, none for anything else."""
    if not (inspect.isclass(value) or callable(value)):
        return None
    return defined().get((getattr(value, "__module__", ""), getattr(value, "__qualname__", "")))


@cache
def described_constants(module: Module) -> frozenset[str]:
    """Names of a module with a string after their assignment, or a comment beside or before it."""
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
        if token.type == tokenize.COMMENT
    }
    names: set[str] = set()
    body = module.tree.body
    for place, node in enumerate(body):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        after = body[place + 1] if place + 1 < len(body) else None
        has_string = (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        )
        if has_string or {node.lineno, node.lineno - 1, node.end_lineno} & comments:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return frozenset(names)


def is_described(module: Module, name: str, value: object) -> bool:
    node = source_of(value)
    if node is not None:
        return bool(ast.get_docstring(node))
    if inspect.ismodule(value):
        return bool(value.__doc__)
    # A constant or a type alias: described where it is made, which for one passed on is another module.
    return name in described_constants(module) or any(
        name in described_constants(other) for other in modules() if other.name.startswith(f"{module.name}.")
    )


def has_example(node: Documented) -> bool:
    """Whether the docstring, or for a class that of one of its methods, holds an example."""
    nodes = [node, *(inner for _, inner in definitions(node.body))] if isinstance(node, ast.ClassDef) else [node]
    return any(">>>" in (ast.get_docstring(each) or "") for each in nodes)


# (a) and (b): imports


def test_no_cycles() -> None:
    """Imports in functions count; those for types alone do not. The package's own list of names is lazy."""
    known = {m.name for m in modules()}
    edges = {}
    for m in modules():
        targets = {found.target for found in imports_of(m.tree, m.name, m.is_package) if not found.typing_only}
        # What is imported is a module, or a name of the module before it.
        targets = {target if target in known else target.rpartition(".")[0] for target in targets}
        edges[m.name] = (targets & known) - {m.name, PACKAGE}
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert not cycles(edges)


def test_imports_point_one_way() -> None:
    offences = [line for m in modules() for line in order_offences(m.tree, m.name, m.is_package)]
    assert not offences, "\n".join(offences)


def test_third_party_imports_wait_until_needed() -> None:
    offences = [line for m in modules() for line in third_party_offences(m.tree, m.name, m.is_package)]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("thalweg.layers.attention", "from thalweg.energies import Seq2Seq"),
        ("thalweg.layers.attention", "from thalweg import energies"),
        ("thalweg.layers.attention", "import thalweg.energies.seq2seq.model as s"),
        ("thalweg.layers.attention", "from ..energies.seq2seq import Seq2Seq"),
        ("thalweg.layers.attention", "from .. import energies"),
        ("thalweg.layers.attention", "def f():\n    from thalweg.energies import Seq2Seq"),
        ("thalweg.layers.attention", "def f():\n    return importlib.import_module('thalweg.energies')"),
        ("thalweg.layers.attention", "if TYPE_CHECKING:\n    from thalweg.energies import Seq2Seq"),
        ("thalweg.layers.attention", "import thalweg as t"),
        ("thalweg.layers.attention", "import thalweg\ndef f():\n    return thalweg.energies.Seq2Seq"),
        ("thalweg.layers.attention", "import thalweg\ndef f():\n    return thalweg.Seq2Seq"),
        ("thalweg.layers.attention", "from thalweg import Seq2Seq"),
        ("thalweg.cli.main", "from thalweg.serve import app"),
        ("thalweg.serve.app", "from thalweg.cli.main import run"),
        ("thalweg.cellar.x", "import torch"),
    ],
)
def test_order_checker_can_fail(module: str, code: str) -> None:
    assert len(order_offences(ast.parse(code), module)) == 1


def test_order_checker_lets_the_rest_pass() -> None:
    code = (
        "from . import padded\nfrom .padded import Padded\nfrom ..errors import nearest\n"
        "import torch\nimport thalweg\nthalweg.__version__\n"
        "from thalweg import __version__\nfrom thalweg.inference import greedy\n"
    )
    assert not order_offences(ast.parse(code), "thalweg.layers.attention")
    assert not order_offences(ast.parse("from .padded import Padded"), "thalweg.layers", is_package=True)
    assert not order_offences(ast.parse("from thalweg.serve.starting import start"), STARTS_SERVICE)
    assert order_offences(ast.parse("from ..energies import Seq2Seq"), "thalweg.layers", is_package=True)


def test_third_party_checker_can_fail() -> None:
    outside = ast.parse("try:\n    import regex\nexcept ImportError:\n    regex = None")
    inside = ast.parse("import numpy as np\nimport json\ndef f():\n    import regex")
    assert third_party_offences(outside, "thalweg.data.text.symbols")
    assert not third_party_offences(inside, "thalweg.data.text.symbols")
    assert third_party_offences(ast.parse("import typer"), "thalweg.tasks.transduce")
    assert not third_party_offences(ast.parse("import typer"), "thalweg.cli.main")


# (c): what `import thalweg` costs

PROBE = f"""
import json, sys, time
first = time.process_time()
import numpy, torch
known = set(sys.modules)
before = time.process_time()
import {PACKAGE}
share = (time.process_time() - before) / (before - first)
print(json.dumps([share, sorted(set(sys.modules) - known)]))
"""


def probe() -> tuple[float, set[str]]:
    """What the package adds to torch's import in a fresh process: a share of its time, and the top-level names."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    share, names = json.loads(ran.stdout)
    return share, {name.partition(".")[0] for name in names}


def test_import_is_light() -> None:
    share, names = probe()
    extra = names - sys.stdlib_module_names - {PACKAGE, *CORE}
    assert not extra, f"`import {PACKAGE}` also imports {', '.join(sorted(extra))}"
    # The best of three, since a busy machine slows any one, and the first may compile; a fast one settles it.
    for _ in range(2):
        if share >= LONGEST_IMPORT:
            share = min(share, probe()[0])
    assert share < LONGEST_IMPORT, f"`import {PACKAGE}` adds {share:.0%} to torch's own import"


# (d) and (e): documentation


@pytest.mark.parametrize("name", NAMES)
def test_public_names_are_described(name: str) -> None:
    module = module_named(name)
    assert ast.get_docstring(module.tree), f"{name} has no docstring"
    if module.is_package and len(module.tree.body) == 1:
        return  # a folder and what it is for
    loaded = importlib.import_module(name)
    assert not module.is_package or hasattr(loaded, "__all__"), f"{name} has no __all__"
    public = exports(module)
    assert len(public) == len(set(public)), f"{name}.__all__ repeats a name"
    missing = [each for each in public if not hasattr(loaded, each)]
    assert not missing, f"{name}.__all__ names what is not there: {', '.join(missing)}"
    bare = [each for each in public if each != "__version__" and not is_described(module, each, getattr(loaded, each))]
    assert not bare, f"{name}: no docstring: {', '.join(bare)}"


def room_names() -> Iterator[tuple[str, object]]:
    """The public classes and functions of the rooms, as ``thalweg.room.name``; errors are plain by nature."""
    for room in ROOMS:
        # A terminal command or an HTTP route is used by other means; its help page carries the example.
        if room in {"cli", "serve"} or f"{PACKAGE}.{room}" not in NAMES:
            continue
        loaded = importlib.import_module(f"{PACKAGE}.{room}")
        for name in exports(module_named(f"{PACKAGE}.{room}")):
            value = getattr(loaded, name)
            if not (inspect.isclass(value) and issubclass(value, BaseException)):
                yield f"{PACKAGE}.{room}.{name}", value


def test_rooms_show_examples() -> None:
    without = {name for name, value in room_names() if (node := source_of(value)) and not has_example(node)}
    lacking = sorted(without - WITHOUT_EXAMPLE.keys())
    assert not lacking, f"no example (>>>) in the docstring of: {', '.join(lacking)}"
    stale = sorted(WITHOUT_EXAMPLE.keys() - without)
    assert not stale, f"take these out of WITHOUT_EXAMPLE, they have an example or are gone: {', '.join(stale)}"


def run_examples(module: Module, namespace: dict[str, object]) -> tuple[int, str]:
    """How many examples of a module ran, and what the failing ones said.

    The docstrings are taken from the source, so that one hidden behind a decorator or a descriptor runs too.
    """
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    nodes = [
        (module.name, module.tree),
        *((f"{module.name}.{n}", d) for n, d in definitions(module.tree.body)),
    ]
    for name, node in nodes:
        text = ast.get_docstring(node)
        if text:
            line = node.body[0].lineno - 1
            case = doctest.DocTestParser().get_doctest(text, dict(namespace), name, str(module.path), line)
            runner.run(case, out=said.append)
    return runner.tries, "".join(said)


@pytest.mark.parametrize("name", [module.name for module in modules() if ">>>" in module.text])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an example may write files
    monkeypatch.setenv("MPLBACKEND", "Agg")
    _, said = run_examples(module_named(name), vars(importlib.import_module(name)))
    assert not said, said


def test_example_runner_can_fail() -> None:
    text = '@decorated\ndef f():\n    """F.\n\n    >>> 1 + 1\n    3\n    """\n'
    ran, said = run_examples(Module("made.up", Path("up.py"), text, ast.parse(text), False), {})
    assert ran == 1
    assert "Expected:\n    3" in said


# What a docstring refers to by its whole name: :class:`~thalweg.room.Name`, or a text with <the name> after it.
REFERRED = re.compile(r":\w+:`(?:[^`<]*<|~)?(thalweg(?:\.\w+)+)>?`")


def unknown_names(text: str) -> list[str]:
    """Of the names that a text refers to, those that cannot be imported."""
    unknown = []
    for name in REFERRED.findall(text):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            unknown.append(name)
    return unknown


def test_docstrings_refer_to_what_is_there() -> None:
    found = [f"{m.name}: {name}" for m in modules() for name in unknown_names(m.text)]
    assert not found, "\n".join(found)
    absent = ":class:`thalweg.tasks.Absent`, :meth:`it <thalweg.tasks.base.Task.predicted>`, :func:`~thalweg.x`"
    known = ":class:`~thalweg.tasks.Task`, :meth:`it <thalweg.tasks.base.Task.predict>`, :func:`local`"
    assert len(unknown_names(absent)) == 3
    assert not unknown_names(known)


# (f), (g) and (h): files


def test_modules_are_short() -> None:
    long = {module.name: count for module in modules() if (count := module.text.count("\n")) > LONGEST_MODULE}
    assert not long, f"more than {LONGEST_MODULE} lines: {long}"


def prefix_families(names: list[str]) -> set[str]:
    """Folders with three modules or more that share the word before the first ``_``, as ``folder.word``."""
    shared = Counter(f"{folder}.{name.partition('_')[0]}" for folder, _, name in (n.rpartition(".") for n in names))
    return {prefix for prefix, count in shared.items() if count > 2}


def test_folders_stand_where_prefixes_did() -> None:
    assert prefix_families(["a.beam", "a.beam_tree", "a.beam_steps", "b.x", "b.x_y"]) == {"a.beam"}
    # Kernels are named by what they compute and how.
    found = {prefix for prefix in prefix_families(NAMES) if not prefix.startswith(f"{PACKAGE}.kernels")}
    assert not found, f"make a folder of each: {', '.join(sorted(found))}"


def test_examples_show_use() -> None:
    named = [f"{m.name}:{n}" for m in modules() for n, line in enumerate(m.text.splitlines(), 1) if SAYS_NAME(line)]
    assert not named, f"an example that only shows a name: {', '.join(named)}"
    assert SAYS_NAME("    >>> Chain.__name__")


def test_nothing_is_pickled() -> None:
    offences = [line for m in modules() for line in pickle_offences(m.tree, m.name, m.is_package)]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from torch import load",
        "import torch\ntorch.save(1, 'x')",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_pickle_checker_can_fail(code: str) -> None:
    assert pickle_offences(ast.parse(code), "thalweg.learning.checkpoint")


def tracked_files() -> list[Path]:
    """The files of the repository, those that wait to be added included."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, or git is not installed")
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


# Folders of one machine; after a word or a dot the slash is part of a web address or of a relative path.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:" + "|".join(("work", "root", "home", "Users")) + r")/\w")


def test_no_machine_paths() -> None:
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # not text
        found += [f"{path.relative_to(ROOT)}:{n}" for n, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]
    assert not found, f"paths of one machine: {', '.join(found)}"


def test_machine_path_pattern_can_match() -> None:
    assert MACHINE_PATH.search("open('" + "/".join(("", "home", "ada", "x.tsv")) + "')")
    assert not MACHINE_PATH.search("https://example.org/" + "home/ada")
