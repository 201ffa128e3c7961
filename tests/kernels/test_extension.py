"""The compiled extension: its arithmetic at every level of instructions, its threads, and what happens without it."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

kernels: Any = pytest.importorskip("thalweg._kernels", reason="the extension is not compiled")

from thalweg.errors import ShapeError  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RANGES = {np.float32: (-87.0, 88.0), np.float64: (-708.0, 709.0)}
DTYPES = list(RANGES)


def applied(function: Any, x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    function(x, out)
    return out


def ulps(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest error in units of the last place, relative to the exact value."""
    return float(np.max(np.abs(found - exact) / np.abs(exact)) / np.finfo(found.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp_to_an_ulp(level: str, dtype: Any) -> None:
    low, high = RANGES[dtype]
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(low, high, 20_001), rng.uniform(-1, 1, 20_000)]).astype(dtype)
    assert ulps(applied(kernels.exp, x), np.exp(x.astype(np.longdouble))) < 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_to_an_ulp(level: str, dtype: Any) -> None:
    low, high = RANGES[dtype]
    rng = np.random.default_rng(1)
    x = np.concatenate([np.exp(rng.uniform(low, high, 20_001)), rng.uniform(1.001, 2, 20_000)]).astype(dtype)
    x = np.concatenate([x, rng.uniform(0.5, 0.999, 20_000).astype(dtype)])
    assert ulps(applied(kernels.log, x), np.log(x.astype(np.longdouble))) < 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_of_exp_and_log(level: str, dtype: Any) -> None:
    tiny = np.finfo(dtype).smallest_subnormal * 1000
    x = np.array([0, -np.inf, np.inf, np.nan, -1e4, 1e4, np.log(np.longdouble(tiny))], dtype)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(applied(kernels.exp, x), np.exp(x), rtol=1e-2)
        y = np.array([0, -1, -np.inf, np.inf, np.nan, 1, tiny, np.finfo(dtype).max], dtype)
        np.testing.assert_allclose(applied(kernels.log, y), np.log(y), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 7, 16, 33, 1000])
def test_softmax(level: str, dtype: Any, count: int) -> None:
    x = (10 * np.random.default_rng(count).standard_normal(count)).astype(dtype)
    x[::3] = -np.inf
    x[count // 2] = 50.0
    out = np.empty_like(x)
    total = kernels.softmax(x, out)
    wide = np.exp(x.astype(np.longdouble) - 50)
    eps = float(np.finfo(dtype).eps)  # x - 50 is rounded to half of it times its size, which is the relative error
    np.testing.assert_allclose(out, (wide / wide.sum()).astype(dtype), rtol=64 * eps)
    assert float(total) == pytest.approx(float(50 + np.log(wide.sum())), rel=4 * eps)


def test_softmax_of_nothing_but_minus_infinity(level: str) -> None:
    out = np.ones(5)
    assert kernels.softmax(np.full(5, -np.inf), out) == -np.inf
    assert not out.any()


def test_what_does_not_fit_is_refused() -> None:
    x = np.zeros(4, np.float32)
    with pytest.raises(ShapeError, match=r"`out` must be \(4,\), got \(3,\)"):
        kernels.exp(x, np.zeros(3, np.float32))
    wrong: list[Any] = [
        np.zeros(4),  # another type than `x`
        np.zeros((2, 2), np.float32),  # another number of axes
        np.zeros(8, np.float32)[::2],  # not contiguous
        np.frombuffer(bytes(16), np.float32),  # not to be written to
        None,
        [0.0] * 4,
    ]
    for out in wrong:
        with pytest.raises(TypeError, match="incompatible function arguments"):
            kernels.exp(x, out)


def test_levels_share_no_code() -> None:
    """A function that two levels define is kept once by the linker, perhaps as an old processor cannot run it."""
    objects = [path for path in (ROOT / "build").glob("kernels-*/CMakeFiles/kernels_*.dir/**/*.o") if path.is_file()]
    if not objects or not shutil.which("nm"):
        pytest.skip("needs nm and the objects of a build in this tree")
    for path in objects:
        level = next(part for part in path.parts if part.startswith("kernels_")).removeprefix("kernels_").split(".")[0]
        listed = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout.splitlines()
        weak = [line for line in listed if re.search(r" [WVu] ", line)]
        assert [line for line in weak if f"thalweg::{level}::" not in line] == [], path


def parts(count: int, threads: int, bad: int = -1) -> np.ndarray:
    out = np.zeros(count, np.int64)
    kernels.share_test(out, threads, bad)
    return out


def expected(count: int) -> list[int]:
    return [sum(i % (k + 2) for i in range(10_000)) for k in range(count)]


@pytest.mark.parametrize("threads", [-1, 0, 1, 2, 3, 10_000])
def test_every_part_is_done(threads: int) -> None:
    want = expected(20)
    for _ in range(50):
        assert parts(20, threads).tolist() == want
    assert not len(parts(0, threads))


@pytest.mark.parametrize("bad", [0, 7, 19])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_exception_reaches_the_caller(bad: int, threads: int) -> None:
    with pytest.raises(ShapeError, match=f"part {bad} failed"):
        parts(20, threads, bad)
    assert parts(4, threads).tolist() == expected(4)  # and the threads go on


def test_idle_threads_sleep() -> None:
    parts(20, 4)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_many_callers_at_once() -> None:
    want, found = expected(20), []
    callers = [
        threading.Thread(target=lambda: found.append([parts(20, 3).tolist() for _ in range(20)])) for _ in "1234"
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [[want] * 20] * 4


def _in_child(queue: Any) -> None:
    queue.put([parts(20, 2).tolist() for _ in range(20)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork() -> None:
    parts(20, 2)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == [expected(20)] * 20
    child.join(60)
    assert child.exitcode == 0
    assert parts(20, 2).tolist() == expected(20)


@pytest.mark.skipif(os.name == "nt", reason="sends a signal")
def test_control_c_ends_a_loop_of_calls_and_a_process_with_threads_ends() -> None:
    code = (
        "import numpy as np, os, signal, threading\n"
        "from thalweg import _kernels\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "out = np.zeros(64, np.int64)\n"
        "threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    while True:\n"
        "        _kernels.share_test(out, 2, -1)\n"
        "except KeyboardInterrupt:\n"
        "    print('stopped', _kernels.share_test(out, 2, -1))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["stopped", "64"], ended.stderr


def test_without_the_extension_the_reference_answers_and_says_so() -> None:
    code = (
        "import sys, torch\n"
        "sys.modules['thalweg._kernels'] = None\n"
        "from thalweg.inference import LinearChain\n"
        "from thalweg.layers import sparsemax\n"
        "chain = LinearChain(torch.zeros(2, 3, 2, requires_grad=True), torch.zeros(2, 2))\n"
        "chain.log_partition.sum().backward()\n"
        "value = chain.log_partition.exp().round().int().tolist()\n"
        "print(value, chain.mode.shape, sparsemax(torch.zeros(1, 2)).tolist())\n"
        "try:\n"
        "    LinearChain(torch.zeros(2, 3, 2), torch.zeros(2, 2), backend='cpu').log_partition\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    lines = ended.stdout.splitlines()
    assert lines[0] == "[8, 8] torch.Size([2, 3]) [[0.5, 0.5]]"
    assert lines[1].startswith('MissingDependencyError backend "cpu" needs thalweg._kernels: install Thalweg again')
    assert ended.stderr.count("the compiled kernels are missing") == 1
    assert len(ended.stderr.splitlines()) == 1
