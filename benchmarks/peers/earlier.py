"""Drives another version of Thalweg: JSON commands in, JSON answers out.

The version is the one that PYTHONPATH names, such as a checkout of an earlier commit. It trains, so that the newer
version reads what the older one wrote, and both answer with the same weights.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import thalweg
from benchmarks.harness.process import serve
from thalweg.tasks import SearchConfig, build_config, load, train


class Driver:
    """The commands."""

    def setup(self, *, config: dict[str, Any], run: str, threads: int) -> dict[str, Any]:
        """Train, and load what came out."""
        torch.set_num_threads(threads)
        train(build_config(config), run)
        self.transducer = load(run, device="cpu")
        return {"version": thalweg.__version__, "file": thalweg.__file__}

    def predict(self, *, words: list[str], width: int, k: int) -> dict[str, Any]:
        """Seconds and the best answer to each word."""
        how = SearchConfig(search="beam", width=width) if width > 1 else SearchConfig(search="greedy")
        began = time.perf_counter()
        found = list(self.transducer.predict(words, k=k, how=how))
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "answers": [p.answers[0].text for p in found]}


if __name__ == "__main__":
    serve(Driver())
