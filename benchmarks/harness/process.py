"""Work in other processes: one call alone, or a peer in another Python. Needs the standard library alone."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def alone(
    function: Callable[..., Any], *, threads: int, timeout: float = 600.0, environment: Any = None, **arguments: Any
) -> Any:
    """What ``function(**arguments)`` gives in a new process, as JSON; a note where it is ended or takes too long."""
    # A fixed threshold makes large blocks leave the process when they are freed, so that the peak is what was needed.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", **(environment or {})}
    asked = pickle.dumps((function, threads, arguments))
    command = [sys.executable, "-m", "benchmarks.harness.process"]
    try:
        ran = subprocess.run(command, input=asked, capture_output=True, env=env, cwd=ROOT, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"note": f"left out, more than {timeout:,.0f} s"}
    if ran.returncode < 0:
        return {"note": "out of memory (ended by the system)"}
    if ran.returncode:
        raise RuntimeError(f"{function.__name__}({arguments}) failed alone:\n{ran.stderr.decode()}")
    return json.loads(ran.stdout.splitlines()[-1])


class Worker:
    """A module of ``benchmarks.peers`` in another Python: one JSON object a line goes in, one comes back.

    It stays alive between commands, so that its imports and its model are paid for once.
    """

    def __init__(self, python: str, module: str, *, threads: int, environment: dict[str, str] | None = None):
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **(environment or {})}
        command = [python, "-m", f"benchmarks.peers.{module}"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer below tells the story
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended during `{do}` with status {self.process.wait()}; see above")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the peer failed in `{do}`: {answer['error']}")
        return answer

    def close(self) -> None:
        """Let it end by itself, and stop it if it does not."""
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(driver: Any) -> None:
    """The other end of a :class:`Worker`: each command is a method of the driver."""
    # Libraries print where they like; answers have a channel of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            result = getattr(driver, command.pop("do"))(**command)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(result) + "\n")


def version_in(python: str, package: str) -> str | None:
    """The version of a package in another Python's environment, or None where it cannot be imported."""
    code = f"import importlib.metadata as m, {package}; print(m.version({package!r}))"
    try:
        ran = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        sys.exit(f"--peer-python: expected a Python interpreter, got `{python}` ({error.strerror})")
    return ran.stdout.split()[-1] if ran.returncode == 0 else None


def _answer_alone() -> None:
    function, threads, arguments = pickle.load(sys.stdin.buffer)
    import torch

    torch.set_num_threads(threads)
    print(json.dumps(function(**arguments)))


if __name__ == "__main__":
    _answer_alone()
