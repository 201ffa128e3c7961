"""Drives yoyodyne for the part ``recurrent`` of ``decoding.py``: ``peers/yoyodyne_run.py`` with a choice of the cell.

Runs in an environment of its own and needs nothing but yoyodyne.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import yoyodyne_run
from yoyodyne import models, optimizers
from yoyodyne.models import modules


class Driver(yoyodyne_run.Driver):
    """The same commands on a model with LSTM or GRU cells."""

    def _model(self) -> Any:
        settings = self.settings
        if settings["cell"] == "lstm":
            return super()._model()
        size = {"dropout": settings["dropout"], "embedding_size": settings["embedding"]}
        encoder = modules.GRUEncoder(hidden_size=settings["hidden"], layers=1, bidirectional=True, **size)
        return models.SoftAttentionGRUModel(
            source_encoder=encoder,
            embedding_size=settings["embedding"],
            decoder_hidden_size=settings["hidden"],
            decoder_layers=1,
            decoder_dropout=settings["dropout"],
            teacher_forcing=True,
            optimizer=functools.partial(optimizers.Adam, lr=settings["learning_rate"]),
            vocab_size=self.data.vocab_size,
            target_vocab_size=self.data.target_vocab_size,
            max_source_length=self.data.max_source_length,
            max_target_length=self.data.max_target_length,
        )


if __name__ == "__main__":
    yoyodyne_run.Driver = Driver
    yoyodyne_run.main()
