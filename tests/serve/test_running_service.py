"""A service in a process of its own: its client, its signals, its load; and the app under Ray Serve."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from thalweg.serve.batching import Batcher
from thalweg.serve.client import Client, ServiceError
from thalweg.serve.starting import _Workers, bound
from thalweg.tasks.registry import task_named

PATIENCE = 120  # seconds: the machine may have other work


def direct(run: Path, words: list[str], **options: Any) -> list[Any]:
    records = task_named("transduce").predict(run, (), device="cpu", text=words, **options)
    return [record.to_json() for record in records]


def texts(records: list[Any]) -> list[Any]:
    return [[answer["text"] for answer in record["answers"]] for record in records]


def test_client(start: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    started = start(run)
    with Client(started.address) as client:
        assert client.models()[0]["name"] == "tiny"
        assert texts(client.predict(["abc", "fed"], k=3)) == texts(direct(run, ["abc", "fed"], k=3))
        with pytest.raises(ServiceError, match="k") as refused:
            client.predict("abc", k=0)
        assert (refused.value.status, refused.value.code, refused.value.field) == (422, "invalid", "k")
        (tmp_path / "test.tsv").write_text("abc\tcba\nfed\tdef\n")
        said = list(client.evaluate(tmp_path / "test.tsv", k=1))
        assert [name for name, _ in said] == ["records", "progress", "scores", "done"]


def resident(started: Any) -> int:
    """Bytes of a service's memory."""
    fields = Path(f"/proc/{started.process.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_under_load_all_are_answered_together(start: Callable[..., Any], run: Path) -> None:
    """64 callers at a queue that has room for half of them: who is turned away comes back, and nobody waits in vain."""
    started = start(run, "--queue", 32, "--batch", 16)
    words = ["".join(letters) for letters in product("abcdef", repeat=2)]
    expected = dict(zip(words, texts(direct(run, words, k=3)), strict=True))
    wrong: list[Any] = []
    answered: list[str] = []

    def ask(caller: int) -> None:
        with Client(started.address, timeout=PATIENCE, patience=PATIENCE) as client:
            for n in range(5):
                word = words[(caller + 7 * n) % len(words)]
                (found,) = texts(client.predict(word, k=3))
                answered.append(word)
                if found != expected[word]:
                    wrong.append((word, found))

    before = resident(started) if sys.platform == "linux" else 0
    asking = [threading.Thread(target=ask, args=(caller,)) for caller in range(64)]
    for each in asking:
        each.start()
    for each in asking:
        each.join(PATIENCE)
    assert not wrong
    assert len(answered) == 64 * 5
    with urllib.request.urlopen(f"{started.address}/metrics", timeout=PATIENCE) as answer:
        counted = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    assert float(counted['thalweg_requests_total{model="tiny"}']) == 64 * 5
    assert float(counted['thalweg_batch_inputs_count{model="tiny"}']) < 64 * 5  # some were answered together
    if sys.platform == "linux":
        assert resident(started) - before < 128 * 2**20  # what torch takes for larger batches, once


def test_the_end_answers_what_was_accepted(start: Callable[..., Any], run: Path) -> None:
    started = start(run)
    place = urlsplit(started.address)
    body = json.dumps({"inputs": ["abcdef"] * 50, "search": "mbr", "samples": 64, "k": 1}).encode()
    head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE) as caller:
        caller.sendall(head.encode())
        assert caller.recv(1000).startswith(b"HTTP/1.1 100 ")  # the app has the request and reads its body
        started.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        caller.sendall(body)
        with caller.makefile("rb") as answer:
            said = answer.read()
    assert said.startswith(b"HTTP/1.1 200 "), said[:200]
    assert len(json.loads(said.partition(b"\r\n\r\n")[2])["records"]) == 50
    assert started.process.wait(PATIENCE) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def test_a_model_is_swapped_without_dropping_a_request(
    start: Callable[..., Any], run: Path, other_run: Path, tmp_path: Path
) -> None:
    served = Path(shutil.copytree(run, tmp_path / "tiny"))
    started = start(served)
    before, after = (texts(direct(each, ["abcde"], k=5)) for each in (run, other_run))
    assert before != after
    seen: list[Any] = []
    over = threading.Event()

    def ask() -> None:
        with Client(started.address) as client:
            while not over.is_set():
                seen.append(texts(client.predict(["abcde"], k=5)))

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for each in asking:
        each.start()
    while len(seen) < 20 and any(each.is_alive() for each in asking):
        time.sleep(0.01)
    shutil.copy(other_run / "model.safetensors", tmp_path / "new")
    os.replace(tmp_path / "new", served / "model.safetensors")
    started.process.send_signal(signal.SIGHUP)
    until = time.monotonic() + PATIENCE
    while (not seen or seen[-1] != after) and time.monotonic() < until:
        time.sleep(0.01)
    over.set()
    for each in asking:
        each.join(PATIENCE)
    assert seen[-1] == after
    assert all(each in (before, after) for each in seen)
    # One that cannot be loaded leaves the old one in its place.
    (served / "model.safetensors").write_bytes(b"broken")
    started.process.send_signal(signal.SIGHUP)
    assert any("kept tiny as it was: " in line for line in started.process.stderr)  # the line comes, or the test hangs
    with Client(started.address) as client:
        assert texts(client.predict(["abcde"], k=5)) == after


def test_the_collector_passes_over_what_was_loaded_until_it_is_replaced(make: Callable[..., Any], run: Path) -> None:
    app = make(run).app
    library = app.state.service.library

    async def main() -> tuple[int, int]:
        async with app.router.lifespan_context(app):
            began = len(gc.get_objects())
            old = weakref.ref(library.shelves["tiny"].servant)
            library.reload()
            assert old() is None
            return began, len(gc.get_objects())

    assert max(asyncio.run(main())) < 10_000  # torch alone is ten times as many


class Slow:
    """Stands in for a model that takes its time, until it is let go."""

    def __init__(self, service: Any):
        (shelf,) = service.library.ready.values()
        self.servant, self.batcher, self.answered = shelf.servant, shelf.batcher, []
        self.go, self.entered = threading.Event(), threading.Event()
        self.answer = self.servant.answer
        self.servant.answer = self.slowly

    def slowly(self, questions: Any, plan: Any) -> Any:
        self.entered.set()
        assert self.go.wait(PATIENCE)
        self.answered += [question.text for question in questions]
        return self.answer(questions, plan)

    async def has_waiting(self, questions: int) -> None:
        """Wait until there are so many in the queue."""
        while self.batcher.waiting < questions:
            await asyncio.sleep(0.001)


async def post(app: Any, words: list[str], **more: Any) -> Any:
    media = {"content-type": "application/json"}
    return await app.ask("POST", "/v1/predict", json.dumps({"inputs": words}).encode(), media, **more)


def test_over_capacity_is_429_and_nobody_hangs(make: Callable[..., Any], run: Path) -> None:
    app = make(run, waiting=4)
    slow = Slow(app.service)

    async def main() -> Any:
        first = asyncio.ensure_future(post(app, ["a"]))
        while not slow.entered.is_set():
            await asyncio.sleep(0.001)
        waiting = [asyncio.ensure_future(post(app, [word])) for word in "bcde"]
        await slow.has_waiting(4)
        refused = await asyncio.wait_for(post(app, ["f"]), PATIENCE)
        slow.go.set()
        return refused, await asyncio.gather(first, *waiting)

    refused, answered = asyncio.run(main())
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "busy"
    assert [answer.status for answer in answered] == [200] * 5
    assert sorted(slow.answered) == list("abcde")


def test_who_goes_away_costs_nothing(make: Callable[..., Any], run: Path) -> None:
    app = make(run)
    slow = Slow(app.service)

    async def main() -> None:
        first = asyncio.ensure_future(post(app, ["a"]))
        while not slow.entered.is_set():
            await asyncio.sleep(0.001)
        gone = asyncio.Event()
        leaves, stays = asyncio.ensure_future(post(app, ["b"], gone=gone)), asyncio.ensure_future(post(app, ["c"]))
        await slow.has_waiting(2)
        gone.set()
        assert (await asyncio.wait_for(leaves, PATIENCE)).status == 499
        slow.go.set()
        assert {(await first).status, (await stays).status} == {200}

    asyncio.run(main())
    assert sorted(slow.answered) == ["a", "c"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--host", "0.0.0.0"], "needs a token"),
        (["--host", "192.0.2.1", "--token", "x"], "cannot listen on"),
        (["--token", "two words"], "--token must be"),
    ],
)
def test_wrong_starts_are_one_line(run: Path, args: list[str], said: str) -> None:
    from typer.testing import CliRunner

    from thalweg.cli.main import app

    done = CliRunner().invoke(app, ["serve", str(run), *args])
    assert done.exit_code == 2
    assert said in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_absent_run_is_one_line(workers: str) -> None:
    from typer.testing import CliRunner

    from thalweg.cli.main import app

    done = CliRunner().invoke(app, ["serve", "absent", "--port", "0", "--workers", workers])
    assert done.exit_code == 2
    assert "expected a checkpoint, got no such file" in done.output
    assert done.output.count("\n") == 1


def test_a_port_that_is_taken_is_one_line(run: Path) -> None:
    from typer.testing import CliRunner

    from thalweg.cli.main import app

    with bound("127.0.0.1", 0) as taken:
        done = CliRunner().invoke(app, ["serve", str(run), "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 2
    assert "choose another --host or --port" in done.output
    assert done.output.count("\n") == 1


def test_several_processes_that_end_leave_nobody_waiting() -> None:
    workers = _Workers.__new__(_Workers)  # without its handlers of signals
    with bound("127.0.0.1", 0) as listener:
        port, workers.sockets, workers.processes = listener.getsockname()[1], [listener], []
        workers.terminate_all()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def test_the_client_needs_the_standard_library_alone() -> None:
    code = (
        "import sys; import thalweg.serve.client; "
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'fastapi','uvicorn','pydantic','starlette'}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert ran.stdout.strip() == "[]"


def test_queues_end_with_their_threads() -> None:
    async def main() -> None:
        batcher = Batcher()
        await batcher.submit(lambda asked: asked, [1])
        await asyncio.to_thread(batcher.close)

    before = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() <= before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_processes(start: Callable[..., Any], run: Path) -> None:
    started = start(run, "--workers", 2)
    expected = texts(direct(run, ["abc"], k=5))

    def ask() -> None:
        with Client(started.address) as client:
            for _ in range(50):
                assert texts(client.predict(["abc"], k=5)) == expected

    asking = [threading.Thread(target=ask) for _ in range(8)]
    for each in asking:
        each.start()
    for each in asking:
        each.join(120)
    with urllib.request.urlopen(f"{started.address}/metrics") as answer:
        counted = answer.read().decode()
    assert 'thalweg_requests_total{model="tiny"} 400.0' in counted  # of both
    started.process.send_signal(signal.SIGHUP)
    time.sleep(3)
    ask()
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(4 * PATIENCE) in (0, -signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_is_flat_over_a_hundred_thousand_requests(start: Callable[..., Any], run: Path) -> None:
    started = start(run)

    def ask(count: int) -> None:
        with Client(started.address) as client:
            for n in range(count):
                client.predict("".join("abcdef"[(n >> shift) % 6] for shift in range(0, 12, 2)), k=2, search="beam")

    def all_ask(count: int) -> None:
        asking = [threading.Thread(target=ask, args=(count // 16,)) for _ in range(16)]
        for each in asking:
            each.start()
        for each in asking:
            each.join()

    all_ask(10_000)
    before = resident(started)
    all_ask(100_000)
    assert resident(started) - before < 16 * 2**20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
def test_under_ray_serve(run: Path) -> None:
    """The page on serving shows this deployment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"""
import os
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
import json, urllib.request
import ray
from ray import serve
from thalweg.serve.app import create_app
from thalweg.serve.settings import Settings

settings = Settings(runs=({str(run)!r},), device="cpu", threads=1)

@serve.deployment(num_replicas=2, max_ongoing_requests=64)
@serve.ingress(lambda: create_app(settings))
class Thalweg:
    pass

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(http_options={{"host": "127.0.0.1", "port": {port}}})
serve.run(Thalweg.bind(), name="thalweg")
body = json.dumps({{"inputs": ["abc"], "k": 5}}).encode()
asked = urllib.request.Request("http://127.0.0.1:{port}/v1/predict", body, {{"Content-Type": "application/json"}})
print("ANSWER", urllib.request.urlopen(asked, timeout=60).read().decode())
serve.shutdown()
ray.shutdown()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, env=os.environ)
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("ANSWER")] or [ran.stderr[-3000:]]
    assert line.startswith("ANSWER"), line
    assert texts(json.loads(line[7:])["records"]) == texts(direct(run, ["abc"], k=5))
