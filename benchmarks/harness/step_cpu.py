"""The shortest sequential step on one core: a reduction over C values that waits for the last. Needs a C compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = """
void walk(float *x, long count, long steps) {
    const float share = 0.5f / count;
    for (long s = 0; s < steps; ++s) {
        float total = 0;
        for (long i = 0; i < count; ++i) total += x[i];
        for (long i = 0; i < count; ++i) x[i] = x[i] * 0.5f + total * share;
    }
}
"""
OPTIONS = ("-O3", "-march=native", "-ffast-math", "-shared", "-fPIC")  # for the processor it is measured on


@cache
def _compiled() -> Any:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise RuntimeError("the rate of one core is measured in C: install gcc or clang, got no compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "walk.so"
        command = [compiler, *OPTIONS, "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=SOURCE, text=True, check=True)
        walk = ctypes.CDLL(str(library)).walk
    walk.argtypes, walk.restype = (ctypes.c_void_p, ctypes.c_long, ctypes.c_long), None
    return walk


def walk(x: Any, steps: int) -> None:
    """Replace x (C,), float32 of NumPy, by what ``steps`` dependent reductions make of it; its mean stays."""
    _compiled()(x.ctypes.data, len(x), steps)
