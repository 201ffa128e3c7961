"""Cases that may crash or hang, each in a process of its own, at the price of a fork.

A module of cases has ``CASES``, functions without arguments by name, and may have ``warm()``, which compiles what they
share, and ``at_random(seed)``, asked for as "at_random(7)". A nursery process imports the module once, with one thread,
and forks for each case. What a case raises, the signal that ends it or the time it takes too long is told to the caller
as an :class:`Outcome`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from thalweg.errors import ThalwegError

TESTS = Path(__file__).resolve().parents[1]


class Outcome(NamedTuple):
    """What became of a case: ``kind`` is "ok", "raised", "signal" or "hang"."""

    kind: str
    text: str = ""


class Nursery:
    """The process that forks; ``run`` asks it for one case."""

    def __init__(self, module: str):
        path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONFAULTHANDLER": ""}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, name: str, seconds: float = 30.0) -> Outcome:
        """The outcome of one case."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, seconds]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the nursery ended with {self.process.wait()}"
        return Outcome(*json.loads(line))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


def refused(call: Callable[[], object], *words: str, kind: type[ThalwegError] = ThalwegError) -> None:
    """An error of that kind, of one line with these words; nothing else."""
    try:
        found = call()
    except kind as error:
        text = str(error)
        assert "\n" not in text, text
        assert all(word in text for word in words), (words, text)
        return
    raise AssertionError(f"taken without a word: {found}")


def _child(case: Callable[[], object], told: int) -> None:
    """Run the case, write what came of it, and end without the habits of an interpreter that ends."""
    outcome: list[str] = ["ok", ""]
    try:
        case()
    except BaseException:  # an interrupt that escapes is an outcome too
        outcome = ["raised", traceback.format_exc()]
    os.write(told, json.dumps(outcome).encode())
    os._exit(0)


def _fork(case: Callable[[], object], seconds: float) -> list[str]:
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(heard)
        _child(case, told)
    os.close(told)
    said, end = b"", time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([heard], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(heard)
            return ["hang", f"no answer in {seconds:g} s"]
        piece = os.read(heard, 65536)
        if not piece:
            break
        said += piece
    os.close(heard)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return ["signal", signal.Signals(os.WTERMSIG(status)).name]
    return json.loads(said) if said else ["signal", f"exit {os.WEXITSTATUS(status)} without a word"]


def _serve(module_name: str) -> None:
    import torch

    torch.set_num_threads(1)  # no thread may be running where a process forks
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # half a second of imports, here instead of in every case
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a case prints is not an answer
    module = importlib.import_module(module_name)
    if hasattr(module, "warm"):
        module.warm()
    faulthandler.enable()
    for line in sys.stdin:
        name, seconds = json.loads(line)
        drawn = re.fullmatch(r"at_random\((\d+)\)", name)
        case = partial(module.at_random, int(drawn[1])) if drawn else module.CASES[name]
        answers.write(json.dumps(_fork(case, seconds)) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
    os._exit(0)  # to take torch down takes a second
