"""Masked-language-model training of an encoder on the texts of both sides, before a pair is made of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.data import Batch, Batches, Example
from thalweg.data.datasets import unit_hash
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.hub import quietly
from thalweg.energies.pretrained.loading import build_encoder
from thalweg.files import append
from thalweg.learning.checkpoint import LAST, MODEL, load_checkpoint
from thalweg.learning.settings import Moment, TrainerConfig
from thalweg.learning.trainer import Trainer
from thalweg.tasks.runs import Listener
from thalweg.tasks.transduce.codec import Codec
from thalweg.tasks.transduce.config import TransduceConfig

_HELD_OUT, _SEED = 0.05, 1
# Of the hidden symbols, so many are replaced by another and so many stay (Devlin et al., 2019).
_OTHER, _SAME = 0.1, 0.1


def train_masked(
    config: TransduceConfig, side: Codec, texts: Sequence[Sequence[int]], out: Path, listener: Listener | None
) -> Path:
    r"""Train a BERT encoder to say what is hidden in texts, and write it as transformers reads it.

    .. math:: \ell = -\sum_{t \in M} \log p(x_t \mid x_{\setminus M})

    with M a ``model.masked_share`` of the positions of each text, drawn anew in every epoch: most are replaced by the
    begin symbol, which no text holds, a tenth by any symbol, a tenth stay (Devlin et al., 2019).

    Args:
        side: the codec of both sides; texts: as its numbers.
        out: run directory; the encoder is ``out/masked/encoder``, which is used as it is where it is there already.
    """
    model, home = config.model, out / "masked"
    assert isinstance(model, PretrainedConfig)
    if (home / "encoder" / "config.json").is_file():
        return home / "encoder"
    network = build_encoder(model, len(side.alphabet), side.special)
    held = [text for text in texts if unit_hash(" ".join(map(str, text))) < _HELD_OUT]
    kept = [text for text in texts if unit_hash(" ".join(map(str, text))) >= _HELD_OUT]
    training, made = config.training, partial(Batches, pad=side.alphabet.pad, end=side.alphabet.eos)
    batches = made(
        [Example(tuple(text), ()) for text in kept or texts],
        size=training.batch_size,
        tokens=training.batch_tokens,
        seed=training.seed,
    )
    measured = made([Example(tuple(text), ()) for text in held or texts], size=512, shuffle=False)
    masking = _Masking(model.masked_share, side)
    trainer = Trainer(
        _Masked(network),
        _settings(config),
        loss=masking.loss,
        evaluate=lambda module: {"loss": masking.measure(module, measured)},
        directory=home,
        meta={"task": "masked", "config": dataclasses.asdict(model)},
        listener=_Told(home / "log.jsonl", model.masked_epochs, listener),
    )
    if not trainer.fit(batches, resume=(home / LAST).is_file()).finished:
        raise KeyboardInterrupt
    trainer.raw.load_state_dict(load_checkpoint(home / MODEL).tensors)
    with quietly():
        network.cpu().save_pretrained(home / "encoder")
    return home / "encoder"


def _settings(config: TransduceConfig) -> TrainerConfig:
    model, training = config.model, config.training
    assert isinstance(model, PretrainedConfig)
    shared = {field.name: getattr(training, field.name) for field in dataclasses.fields(TrainerConfig)}
    own = {"epochs": model.masked_epochs, "learning_rate": model.masked_rate, "schedule": "cosine", "warmup": 100}
    own |= {"metric": "loss", "patience": 0, "evaluate_every": 1, "average": 0.0, "layer_decay": 1.0, "accumulate": 1}
    return TrainerConfig(**{**shared, **own, "checkpoint_seconds": 60.0})


class _Masked(nn.Module):
    """Logits ``(B, T, V)`` of what each position held."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.network(input_ids=tokens, attention_mask=mask.long()).logits


class _Masking:
    """Hides symbols of a batch, and says how well they are told."""

    def __init__(self, share: float, side: Codec):
        self.share, self.hidden, self.size = share, side.alphabet.bos, len(side.alphabet)

    def loss(self, model: Any, batch: Batch, moment: Moment) -> tuple[Tensor, int]:
        # Drawn on the CPU, whose generator a resumed run restores: the same symbols are hidden again.
        return self._told(model, batch, None)

    def measure(self, model: nn.Module, batches: Any) -> float:
        generator = torch.Generator().manual_seed(_SEED)
        device = next(model.parameters()).device
        found = [self._told(model, batch.to(device), generator) for batch in batches.iterate(0)]
        return sum(float(loss) for loss, _ in found) / max(1, sum(count for _, count in found))

    def _told(self, model: Any, batch: Batch, generator: torch.Generator | None) -> tuple[Tensor, int]:
        tokens, mask = batch.source.tokens, batch.source.mask
        drawn = torch.rand(2, *tokens.shape, generator=generator)
        others = torch.randint(self.size, tokens.shape, generator=generator).to(tokens.device)
        place, fate = drawn.to(tokens.device)
        chosen = (place < self.share) & mask
        chosen[:, 0] |= ~chosen.any(dim=1)  # short names would hide nothing
        read = torch.where(chosen & (fate < 1 - _OTHER - _SAME), self.hidden, tokens)
        read = torch.where(chosen & (fate >= 1 - _OTHER), others, read)
        logits = model(read, mask)[chosen]
        return nn.functional.cross_entropy(logits.float(), tokens[chosen], reduction="sum"), int(chosen.sum())


class _Told:
    """Passes the epochs of a masked training on as notes, and keeps them in a log."""

    def __init__(self, path: Path, epochs: int, listener: Listener | None):
        self.path, self.epochs, self.listener = path, epochs, listener

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] != "epoch":
            return
        append(self.path, json.dumps(event) + "\n")
        if self.listener:
            loss, seconds = event["dev"].get("loss", event["loss"]), event["seconds"]
            message = f"masked  epoch {event['epoch']}/{self.epochs}  dev loss {loss:.4f}  {seconds:.0f} s so far"
            self.listener({"event": "note", "message": message})
