"""What every benchmark needs: spreads, facts about the machine, workers in other environments, result files."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


class WrongAnswerError(Exception):
    """A result that must not be timed: what was expected, what was found."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def over(self, other: Spread) -> dict[str, float]:
        """Ratio of the medians, with what the quartiles allow at worst and at best."""
        return {
            "median": self.median / other.median,
            "low": self.low / other.high,
            "high": self.high / other.low,
        }

    def to_json(self) -> dict[str, float]:
        """As plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.median:,.0f} [{self.low:,.0f}, {self.high:,.0f}]"


def machine() -> dict[str, Any]:
    """The processor by name and number of cores, the operating system, and how busy the machine is."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    # Work by others slows the side with more threads and processes most, so a ratio needs a quiet machine.
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load is {load:.1f} before the start; ratios from a busy machine do not count")
    system = f"{platform.system()} {platform.machine()}"
    return {"cpu": name, "cores": os.cpu_count(), "system": system, "load_before": load}


class Worker:
    """A driver script in another Python: one JSON object a line goes in, one comes back.

    It stays alive between commands, so that its imports and its model are paid for once.
    """

    def __init__(self, python: str, script: Path, *, threads: int):
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
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


def version_in(python: str, package: str) -> str | None:
    """The version of a package in another Python's environment, or None where it cannot be imported."""
    code = f"import importlib.metadata as m, {package}; print(m.version({package!r}))"
    try:
        ran = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        sys.exit(f"--peer-python: expected a Python interpreter, got `{python}` ({error.strerror})")
    return ran.stdout.split()[-1] if ran.returncode == 0 else None


def write_results(name: str, facts: dict[str, Any], markdown: str) -> None:
    """``results/NAME.json`` with every figure and ``results/NAME.md`` for people."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
    (RESULTS / f"{name}.md").write_text(markdown, encoding="utf-8")
