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
from torch import Tensor

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


if INTERPRETED and importlib.util.find_spec("triton") is not None:
    quicken_the_interpreter()


def run_in_the_interpreter(files: Sequence[str]) -> None:
    """Run files of tests in a process in which Triton interprets; the tests in them must pass, and some must run."""
    alone = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout", *files],
        cwd=Path(__file__).parents[1],
        env=os.environ | alone,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout, ran.stdout


def compile_instead(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> set[str]:
    """From now on launches compile for Hopper and compute nothing, without a GPU; the names of kernels that were.

    ``modules`` are those that start kernels by ``launching.launch`` or ``repeated``, which would look for a device.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    names = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16"}
    names |= {torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.bool: "*i1"}
    done: set[str] = set()

    def kind(value: object) -> str:
        if isinstance(value, Tensor):
            return names[value.dtype]
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{names[value.base.dtype][1:]}{list(value.block_shape)}>"
        return "fp32" if isinstance(value, float) else "constexpr" if value == 1 else "i32"

    def compile_only(kernel, *arguments, grid, warmup, num_warps: int = 4, num_stages: int = 3, **constants) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        cooperative = {
            name: constants.pop(name) for name in ("launch_cooperative_grid", "enable_fp_fusion") if name in constants
        }
        signature = {name: kind(value) for name, value in given.items()}
        # A launch makes a constant of every 1, which changes what the kernel is allowed to do with it.
        constants |= {name: 1 for name, what in signature.items() if what == "constexpr"}
        fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, fixed)
        options = {"num_warps": num_warps, "num_stages": num_stages, **cooperative}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared < 227 * 1024, f"{kernel} wants {made.metadata.shared} bytes of shared memory"
        done.add(kernel.__name__)

    def start(kernel, grid, *given, key=None, **options):
        kernel[grid](*given, **options)
        return lambda **new: None

    monkeypatch.setattr(JITFunction, "run", compile_only)
    for module in modules:
        for name in ("launch", "repeated"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, start)
    return done
