from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The same cases on every run and no clock: a loaded machine must not fail a test.
settings.register_profile("data", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("data")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with ar2en, g2p, multi30k: THALWEG_DATA, else ../shared/data beside the repository."""
    named = os.environ.get("THALWEG_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
    if not (folder / "ar2en" / "train.tsv").is_file():
        pytest.skip(f"needs the data of the recipes (ar2en, g2p): not in {folder}; set THALWEG_DATA")
    return folder
