"""What a service is started with, and how it travels to other processes."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from thalweg.errors import ConfigError
from thalweg.limits import PROCESSES, check_numbers, check_threads
from thalweg.serve.batching import Size

VARIABLE = "THALWEG_SERVE"
"""The environment variable that tells worker processes their settings."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a service is started with.

    Attributes:
        runs: run directories, model files, or names of models that come with the package.
        token: what callers must show; empty asks for none, which is for this machine alone.
        local: whether only names of this machine are answered to.
        device: where models are put.
        waiting: questions that may wait for each model; one too many is answered with 429.
        batch: questions that are answered together at most.
        threads: of torch in each process; 0 is the cores shared out among the workers.
        workers: processes.

    >>> Settings(runs=("demo",)).waiting
    1024
    """

    runs: Sequence[str]
    token: str = ""
    local: bool = True
    device: str = "auto"
    waiting: int = 1024
    batch: int = 32
    threads: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        check_numbers(self, "serve", 1, 10**6, "waiting", "batch")
        check_numbers(self, "serve", 1, PROCESSES, "workers")
        check_numbers(self, "serve", 0, 10**6, "threads")
        check_threads(self.threads)
        if not (self.token.isascii() and self.token.isprintable() and " " not in self.token):
            raise ConfigError(
                "--token must be printable ASCII without spaces, got another; `openssl rand -hex 16` gives one"
            )

    @property
    def size(self) -> Size:
        """Of each model's queue."""
        return Size(waiting=self.waiting, batch=self.batch)

    def limit_threads(self) -> None:
        """Let torch use this process's share of the cores."""
        import torch

        torch.set_num_threads(self.threads or max(1, (os.cpu_count() or 1) // self.workers))
        # A thread that computes takes the interpreter back a dozen times a batch, while another one is busy with
        # requests: by default it may wait 5 ms each time.
        sys.setswitchinterval(5e-5)

    def publish(self) -> None:
        """Put the settings where worker processes find them."""
        os.environ[VARIABLE] = json.dumps(dataclasses.asdict(self))

    @classmethod
    def published(cls) -> Settings:
        """The settings that :meth:`publish` put there."""
        return cls(**json.loads(os.environ[VARIABLE]))
