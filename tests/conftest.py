"""What every test folder shares: the path to the oracles, one torch thread, and the data."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# For this process and every one that a test starts; both are asked for once, when torch and numpy are loaded. Threads
# that wait for one another in loops take several times what they compute where other processes want the cores.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}

import torch

TESTS = Path(__file__).resolve().parent

# `from oracles.x import ...` and `from contracts.x import ...` work from every folder.
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

# The tests use small tensors: threads cost more than they save, and sums are then the same on every machine.
torch.set_num_threads(1)

# Ten thousand tests are millions of objects that live to the end. Nothing looks for garbage while they are made, which
# is half of the time that collecting takes, and none of them is looked at again.
gc.disable()

# The packages that are installed stay as they are: Fabric looks through all of them for every training.
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)


# Files that take ten seconds or more, the longest first: each is one process's from its first test to its last.
LONG = (
    *("test_playground", "test_tooling", "test_gpu_interpreted", "test_hostile_command_line", "test_hostile_chains"),
    *("test_running_service", "test_sweep_ray", "test_chain_contract", "test_sweeping", "test_classify"),
    *("test_reference_chain", "test_trainer_resuming", "test_hostile_service", "test_default_model"),
    "test_cli_stopping",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They go first, so that no process is left with one of them at the end."""
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _written_is_written() -> Iterator[None]:
    """Tests outlive no loss of power: nothing waits for the disk, which takes longer than most trainings here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor) and None)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data sets: `$THALWEG_DATA`, else `shared/data` beside the repository; skips without."""
    named = os.environ.get("THALWEG_DATA")
    root = Path(named) if named else TESTS.parents[1] / "shared" / "data"
    if not root.is_dir():
        source = "THALWEG_DATA names" if named else "THALWEG_DATA is not set and the default is"
        pytest.skip(f"no data: {source} `{root}`, which is not a folder")
    return root


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Every call is shared out between two threads, however small."""
    kernels = pytest.importorskip("thalweg._kernels")
    before, least = torch.get_num_threads(), kernels.set_least_operations(1)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    kernels.set_least_operations(least)
