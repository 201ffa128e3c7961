"""Tiny runs, an app in this process, and a service in another one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import thalweg
from thalweg.serve.app import create_app
from thalweg.serve.settings import Settings

SOURCE = Path(__file__).resolve().parents[2] / "src"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def write_pairs(path: Path, letters: str = "abcdef", features: bool = False) -> Path:
    rng = random.Random(0)
    words = ["".join(rng.choices(letters, k=rng.randint(2, 6))) for _ in range(60)]
    tags = ["\tPL", "\tSG"] if features else ["", ""]
    lines = [f"{word}\t{word[::-1]}{tags[n % 2]}\n" for n, word in enumerate(words)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def train(folder: Path, **more: Any) -> Path:
    pairs = write_pairs(folder / "pairs.tsv", **{k: v for k, v in more.items() if k in ("letters", "features")})
    settings = {
        "data": {"train": str(pairs), **({"features": True} if more.get("features") else {})},
        "model": {"hidden": 8, "embedding": 8},
        "training": {"epochs": 1, "batch_size": 16, "device": "cpu", "seed": more.get("seed", 0)},
    }
    thalweg.train(settings, folder / "tiny")
    return folder / "tiny"


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("strings"))


@pytest.fixture(scope="session")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same kind, other weights."""
    return train(tmp_path_factory.mktemp("others"), seed=7)


class InProcess:
    """The app without a network: what an ASGI server would hand to it."""

    def __init__(self, app: Any):
        self.app, self.service = app, app.state.service
        self.service.library.open()

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, gone: Any = None
    ) -> Answer:
        """One request; ``gone`` is an event that says when the caller goes away."""
        path, _, query = path.partition("?")
        given = {"host": "localhost", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(key.lower().encode(), value.encode("latin-1")) for key, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        waiting = [{"type": "http.request", "body": body, "more_body": False}]
        status, sent, parts = 0, {}, []

        async def receive() -> dict[str, Any]:
            if waiting:
                return waiting.pop()
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent.update({key.decode(): value.decode("latin-1") for key, value in message["headers"]})
            else:
                parts.append(message.get("body", b""))

        await self.app(scope, receive, send)
        return Answer(status, sent, b"".join(parts))

    def get(self, path: str, **headers: str) -> Answer:
        return asyncio.run(self.ask("GET", path, headers=headers))

    def post(self, path: str, body: Any, media: str = "application/json", **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return asyncio.run(self.ask("POST", path, data, {"content-type": media, **headers}))

    def close(self) -> None:
        self.service.library.close()


@pytest.fixture(scope="session")
def make() -> Iterator[Callable[..., InProcess]]:
    made: list[InProcess] = []

    def make(*runs: object, **settings: Any) -> InProcess:
        app = create_app(Settings(runs=tuple(map(str, runs)), device="cpu", threads=1, **settings))
        made.append(InProcess(app))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def served(make: Callable[..., InProcess], run: Path) -> InProcess:
    return make(run)


class Started(NamedTuple):
    process: subprocess.Popen[str]
    address: str


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    """``thalweg serve`` in a process of its own, once it answers; none outlives its test."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: object) -> Started:
        path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-m", "thalweg", "serve", *map(str, args), "--port", "0", "--threads", "1"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "", "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 180)
        found = re.search(r"http://[\w.:]+", process.stdout.readline() if ready else "")
        assert found, process.stderr.read() if process.stderr and process.poll() is not None else "nothing was said"
        wait_for(found[0])
        return Started(process, found[0])

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def wait_for(address: str, seconds: float = 180) -> None:
    import urllib.error
    import urllib.request

    until = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=30):
                return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < until, "it never answered"
            time.sleep(0.05)
