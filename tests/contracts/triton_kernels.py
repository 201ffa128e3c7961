"""What every test of Triton kernels shares: for real on a GPU, else through the interpreter in a process of its own.

The interpreter must be chosen before Triton is imported, which other tests may have done already.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
RUNS = INTERPRETED or DEVICE == "cuda"

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
here_only = pytest.mark.skipif(not RUNS, reason="needs a GPU, or TRITON_INTERPRET=1 as test_gpu_interpreted has it")
outside = pytest.mark.skipif(RUNS, reason="this is the interpreter's process, or there is a GPU")
for_hopper = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


def quicken_the_interpreter() -> None:
    """Once for the process what it does at every call of a function and for every value: most of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))  # type: ignore[arg-type]
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    look, known = interpreter._get_np_dtype, {}

    def remembered(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = look(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = remembered
    # Sums of integers are looked at for overflow by five more operations each: sizes here are far from 2^31.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    _share_types(tl.core, interpreter.interpreter_semantic)


def _share_types(core: Any, semantic: Any) -> None:
    """What a type says of its shape is worked out once for every shape, and nothing is done to equal shapes."""
    build, broadcast, facts = core.block_type.__init__, type(semantic).broadcast_impl_value, {}
    alone = core.constexpr(1), core.tuple([])

    def build_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
        if key not in facts:
            build(self, element_ty, shape)
            facts[key] = self.shape, self.numel, (core.constexpr(self.numel), core.tuple(map(core.constexpr, key)))
        self.element_ty = element_ty
        self.shape, self.numel, self.sizes = facts[key]
        self.name = f"<{key}, {element_ty}>"

    def build_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes if type.is_block() else alone

    def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = build_type, build_tensor
    type(semantic).broadcast_impl_value = broadcast_unequal


def offer_them_to_structures() -> None:
    """Once for the process: backend "gpu" takes tensors of the CPU, and nobody looks for NaN on its behalf."""
    from thalweg.kernels import dispatch, lattice

    dispatch._DEVICE["gpu"] = "cpu"
    lattice.on_cpu = lambda x: False


if INTERPRETED and importlib.util.find_spec("triton") is not None:
    quicken_the_interpreter()
    offer_them_to_structures()


def run_in_the_interpreter(files: Sequence[str], *options: str) -> None:
    """Run files of tests in a process in which Triton interprets; the tests in them must pass, and some must run."""
    alone = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout", *options, *files],
        cwd=Path(__file__).parents[1],
        env=os.environ | alone,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout, ran.stdout


def compile_instead(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """From now on launches compile for Hopper and compute nothing, without a GPU; the names of kernels that were."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    done: set[str] = set()

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **given: Any) -> None:
        """What a launch does before it starts anything: types and what is known of numbers are looked at as there."""
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, kinds, options = bind(*arguments, **given, debug=False)
        options, signature, constants, facts = kernel._pack_args(backend, given, bound, kinds, options)
        source = ASTSource(kernel, signature, constants, facts)
        made = triton.compile(source, target=target, options=options.__dict__)
        assert made.metadata.shared < 227 * 1024, f"{kernel} wants {made.metadata.shared} bytes of shared memory"
        done.add(kernel.__name__)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    return done
