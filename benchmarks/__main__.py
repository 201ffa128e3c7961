"""Lists the benchmarks, or hands one of them to the harness: ``python -m benchmarks chain --quick``."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def found() -> dict[str, Path]:
    """Where each benchmark is declared: ``NAME.py``, or ``NAME/benchmark.py`` where it takes several files."""
    files = {path.stem: path for path in HERE.glob("[a-z]*.py")}
    folders = {path.parent.name: path for path in HERE.glob("*/benchmark.py")}
    return dict(sorted((files | folders).items()))


def overview() -> str:
    """Every name with the first line of its docstring, read without importing it."""
    lines = ["usage: python -m benchmarks NAME [options]    from the root of the repository; NAME --help says more", ""]
    for name, path in found().items():
        lines.append(f"  {name:<12} {(ast.get_docstring(ast.parse(path.read_text('utf-8'))) or '').splitlines()[0]}")
    return "\n".join(lines)


def main() -> None:
    """One benchmark by its name."""
    name = sys.argv[1].replace("-", "_") if len(sys.argv) > 1 else ""
    if name in found():
        from benchmarks.harness.main import run

        run(name, sys.argv[2:])
    elif name in ("", "_h", "__help"):
        print(overview())
    else:
        sys.exit(f"expected one of {', '.join(found())}, got `{sys.argv[1]}`")


if __name__ == "__main__":
    main()
