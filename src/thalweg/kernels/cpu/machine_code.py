"""Modules of LLVM as machine code in memory, kept on the disk from one run of Python to the next."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding as llvm

from thalweg.files import write_atomically

__all__ = ["data_layout", "load_code"]

_engines: list[Any] = []  # code that threads may be in is never taken away


@cache
def _host() -> tuple[str, str]:
    """The processor and its features."""
    features = ""
    with suppress(RuntimeError):  # some systems cannot tell
        features = llvm.get_host_cpu_features().flatten()
    return llvm.get_host_cpu_name(), features


@cache
def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in ("exp", "log", "pow", "sqrt"):
        if not llvm.address_of_symbol(name):
            library = ctypes.CDLL(ctypes.util.find_library("m") or ctypes.util.find_library("msvcrt"))
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    name, features = _host()
    return llvm.Target.from_default_triple().create_target_machine(cpu=name, features=features, opt=2, jit=True)


def data_layout() -> str:
    """How this machine lays numbers out, as LLVM writes it.

    >>> data_layout()[0]
    'e'
    """
    return str(_machine().target_data)


@cache
def _folder() -> Path | None:
    """Where code is kept: as Numba does, NUMBA_CACHE_DIR or beside the sources; None where nothing can be written."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(named) / "thalweg" if named else Path(__file__).parent / "__pycache__"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return None


@cache
def _sources() -> bytes:
    """A digest of all that decides what code comes out: this folder's sources, the compiler, the processor."""
    digest = hashlib.sha256("|".join((llvmlite.__version__, *_host())).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def _kept_at(name: str) -> Path | None:
    """The file of a function's code; None where it cannot be kept."""
    folder = _folder()
    if folder is None:
        return None
    with suppress(OSError):
        return folder / f"{name}.{_host()[0]}.{_sources().hex()[:24]}.o"
    return None


def _compile(module: str, unroll: bool) -> bytes:
    code = llvm.parse_assembly(module)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = unroll
    options.loop_vectorization = options.slp_vectorization = False  # what pays is written as vectors already
    passes = llvm.create_pass_builder(_machine(), options)
    passes.getModulePassManager().run(code, passes)
    return _machine().emit_object(code)


def _keep(path: Path, code: bytes) -> None:
    """Write a file whole or not at all, and take away what other sources left under the name."""
    with suppress(OSError):
        for old in path.parent.glob(f"{path.name.rsplit('.', 2)[0]}.*.o"):
            old.unlink()
        write_atomically(path, code)


def load_code(name: str, write: Callable[[], str], *, keep: bool = True, unroll: bool = True) -> int:
    """The address of function ``name`` of the module that ``write()`` gives as text.

    It is written and compiled only where the disk has no code of it from the same sources; with ``keep`` false the
    disk is neither read nor written. Loops that are not unrolled take half the time to compile.
    """
    machine, path = _machine(), _kept_at(name) if keep else None
    code = b""
    if path is not None:
        with suppress(OSError):
            code = path.read_bytes()
    if not code:
        code = _compile(write(), unroll)
        if path is not None:
            _keep(path, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(name)
