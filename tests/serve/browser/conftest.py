"""Chromium, and a server: two small runs of strings, one of images, one that trains still, the model in the box."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from contracts.small_runs import ARABIC, start_log, train_digits, train_strings

SOURCE = Path(__file__).resolve().parents[3] / "src"
PATIENCE = 120  # seconds: the machine may have other work; what is waited for comes in one where it has none
SERVED = ("backwards", "arabic", "digits", "live", "english")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def absent(reason: str) -> NoReturn:
    """Without a browser there is nothing to try, except where everything must be tried."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason)
    pytest.skip(reason)


class Served(NamedTuple):
    """Where a server is, and the folder of its runs."""

    url: str
    runs: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    train_strings(folder, "backwards", "abcdef", lambda word: " ".join(reversed(word.upper())))
    train_strings(folder, "arabic", "".join(ARABIC), lambda word: "".join(ARABIC[letter] for letter in word))
    train_digits(folder)
    (folder / "live").mkdir()
    shutil.copy(folder / "backwards" / "config.yaml", folder / "live")
    start_log(folder / "live")
    return folder


@pytest.fixture(scope="module")
def served(runs: Path, chromium: Any) -> Iterator[Served]:
    """`thalweg serve`, as a person starts it."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "thalweg", "serve", *SERVED, "--port", "0"]
    with open(runs / "server.log", "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=runs,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        found = re.search(r"http://[\w.:]+/", process.stdout.readline())  # from here on it answers, soon or late
        assert found, (runs / "server.log").read_text(encoding="utf-8")
        yield Served(found[0], runs)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("playwright is not installed; `make setup` installs it")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        absent("no Chromium; `apt-get install chromium` brings it, and `make test` does so where it may")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=1000 * PATIENCE)
        yield browser
        browser.close()


class Visit:
    """A page of the playground; what its console complains of is kept."""

    def __init__(self, context: Any, url: str):
        self.page, self.url = context.new_page(), url
        self.complaints: list[str] = []
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text)
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.set_default_timeout(1000 * PATIENCE)

    def see(self, place: str) -> Any:
        """Go to a view by its link, and wait until it has been drawn."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}#{place}")
        self.page.locator("#content > section, #content > .empty").first.wait_for()
        return self.page


@pytest.fixture
def visit(chromium: Any, served: Served) -> Iterator[Callable[..., Visit]]:
    """Opens pages; none may have left a complaint in the console when the test ends."""
    contexts, visits = [], []

    def visit(**options: Any) -> Visit:
        contexts.append(chromium.new_context(**{"reduced_motion": "reduce", **options}))
        visits.append(Visit(contexts[-1], served.url))
        return visits[-1]

    yield visit
    complaints = [complaint for each in visits for complaint in each.complaints]
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def at(visit: Callable[..., Visit]) -> Callable[[str], Any]:
    """One page, at the view of a link."""
    return visit().see
