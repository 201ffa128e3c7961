"""Drives yoyodyne: JSON commands on standard input, JSON answers on standard output.

Runs in an environment of its own and needs nothing but yoyodyne (``pip install -c constraints.txt yoyodyne==0.5.27``).
Models, data and trainer are built as yoyodyne's command line builds them; progress bar, logger and model summary
are off, which can only make it faster.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import logging
import os
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("WANDB_MODE", "disabled")
warnings.filterwarnings("ignore")

try:
    import torchvision  # noqa: F401
except ModuleNotFoundError:
    pass
except (ImportError, OSError, RuntimeError):
    # yoyodyne requires it without using it, and its PyPI build does not load beside a CPU build of torch;
    # torchmetrics then fails as it defines its image metrics, of which none is used here.
    for part in ("torchvision", "torchvision.transforms", "torchvision.models", "torchvision.ops"):
        sys.modules[part] = MagicMock(name=part)

import lightning  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch import callbacks as lightning_callbacks  # noqa: E402
from yoyodyne import callbacks, data, models, optimizers, trainers  # noqa: E402
from yoyodyne.models import modules  # noqa: E402

from benchmarks.harness.process import serve  # noqa: E402


class BatchClock(lightning.Callback):
    """Seconds in batches alone: validation, checkpoints and the start of the data workers stay outside.

    Training runs from the end of the first batch to the end of the last, so that waiting for data counts but the
    start of the loading process does not; prediction from the start of the first batch to the end of the last.
    """

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        self.batches = 0

    @property
    def seconds(self) -> float:
        """Between the two ends."""
        return self.ended - self.began

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        """Start at the end of the first batch, then move the end on."""
        self.ended = time.perf_counter()
        self.batches = number + 1
        if number == 0:
            self.began = self.ended

    def on_predict_batch_start(self, trainer: Any, module: Any, batch: Any, number: int, *rest: Any) -> None:
        """Start with the first batch."""
        if number == 0:
            self.began = time.perf_counter()

    def on_predict_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int, *rest: Any
    ) -> None:
        """Comes after the callback that writes the predictions, which is listed before this one."""
        self.ended = time.perf_counter()
        self.batches = number + 1


class Driver:
    """The peer's model and data, and the commands on them."""

    def setup(self, **settings: Any) -> dict[str, Any]:
        """Build data and model as the command line does from a config file."""
        self.settings = settings
        torch.set_num_threads(settings["threads"])
        lightning.seed_everything(settings["seed"], verbose=False)
        self.data = self._data(train=settings["train"])
        self.model = self._model()
        return {
            "parameters": self.model.num_parameters,
            "versions": {
                "yoyodyne": importlib.metadata.version("yoyodyne"),
                "lightning": lightning.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "threads": torch.get_num_threads(),
        }

    def train(self) -> dict[str, Any]:
        """One more epoch over the training pairs; the optimiser starts anew, which costs nothing."""
        clock = BatchClock()
        self._trainer([clock], max_epochs=1, enable_checkpointing=False).fit(self.model, self.data)
        return {"seconds": clock.seconds, "batches": clock.batches}

    def predict(self, *, words: str, batch: int, width: int) -> dict[str, Any]:
        """Predict a file by the path of ``yoyodyne predict``: trainer, loader and prediction writer."""
        place = str(Path(self.settings["directory"]) / "predictions.txt")
        writer = callbacks.PredictionWriter(place, target_sep=self.settings["target_sep"])
        clock = BatchClock()
        self.model.beam_width = width
        trainer = self._trainer([writer, clock], enable_checkpointing=False)
        trainer.predict(self.model, datamodule=self._data(predict=words, batch=batch))
        self.model.beam_width = 1
        with open(place, encoding="utf-8", newline="") as file:
            if width > 1:
                answers = [row[0] for row in csv.reader(file, delimiter="\t")]
            else:
                answers = file.read().split("\n")[:-1]
        return {"seconds": clock.seconds, "answers": answers}

    def full(self, *, epochs: int) -> dict[str, Any]:
        """A whole training from the start that leaves the weights of the epoch best on the dev data."""
        lightning.seed_everything(self.settings["seed"], verbose=False)
        self.data = self._data(train=self.settings["train"], val=self.settings["dev"])
        self.model = self._model()
        folder = str(Path(self.settings["directory"]) / "checkpoints")
        keeper = lightning_callbacks.ModelCheckpoint(folder, monitor="val_accuracy", mode="max", save_top_k=1)
        began = time.perf_counter()
        self._trainer([keeper], max_epochs=epochs).fit(self.model, self.data)
        seconds = time.perf_counter() - began
        best = torch.load(keeper.best_model_path, map_location="cpu", weights_only=False)
        self.model.load_state_dict(best["state_dict"])
        return {
            "seconds": seconds,
            "best_epoch": best["epoch"] + 1,
            "dev_accuracy": float(keeper.best_model_score),
        }

    def _data(self, *, batch: int | None = None, **paths: str) -> data.DataModule:
        settings = self.settings
        return data.DataModule(
            model_dir=settings["directory"],
            source_sep=settings["source_sep"],
            target_sep=settings["target_sep"],
            batch_size=batch or settings["batch_size"],
            max_target_length=settings["max_length"],
            **paths,
        )

    def _model(self) -> Any:
        settings = self.settings
        size = {"dropout": settings["dropout"], "embedding_size": settings["embedding"]}
        cell = settings["cell"].upper()
        encoder = getattr(modules, f"{cell}Encoder")(
            hidden_size=settings["hidden"], layers=1, bidirectional=True, **size
        )
        return getattr(models, f"SoftAttention{cell}Model")(
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

    def _trainer(self, listed: list[lightning.Callback], **options: Any) -> trainers.Trainer:
        return trainers.Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=listed,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=self.settings["directory"],
            **options,
        )


if __name__ == "__main__":
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    serve(Driver())
