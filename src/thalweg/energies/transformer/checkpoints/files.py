"""Hugging Face checkpoints on disk: configs, and tensors by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import CheckpointError, MissingDependencyError


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file of a checkpoint holds.

    >>> read_json(Path("absent/config.json"))
    Traceback (most recent call last):
    thalweg.errors.CheckpointError: absent/config.json: expected a Hugging Face checkpoint, got no such file; ...
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
        return found
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: expected a Hugging Face checkpoint, got no such file; give the directory that "
            "`save_pretrained` or `hf download` wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a JSON object, got {error}; write or download it anew") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole or in shards, from safetensors alone.

    >>> read_weights(Path("absent"))
    Traceback (most recent call last):
    thalweg.errors.CheckpointError: absent/model.safetensors: expected the weights, got no such file; download it ...
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        files = [single]
    elif index.exists():
        files = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    elif any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder}: expected model.safetensors, got pytorch_model.bin alone, a pickle, which can run code; if you "
            "trust it, load it with transformers and `save_pretrained` it, which writes safetensors"
        )
    else:
        raise CheckpointError(f"{single}: expected the weights, got no such file; download it beside config.json")
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise MissingDependencyError(
            "a Hugging Face checkpoint needs the package safetensors; run: pip install safetensors"
        ) from None
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: expected a safetensors file, got {error}; download it anew") from None
    return weights


class Names:
    """The checkpoint's tensors by name, and which of them were taken.

    >>> names = Names({"model.shared.weight": torch.ones(3, 2)})
    >>> names.embedding("encoder").shape, names.shared, names.taken
    (torch.Size([3, 2]), True, {'shared.weight'})
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        # A checkpoint of the bare model lacks the prefix; what is shared is written once or under all its names.
        self.weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        self.taken: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.weights:
            raise CheckpointError(f"the checkpoint must hold the tensor `{name}`, got none; compare its config.json")
        self.taken.add(name)
        return self.weights[name]

    def get(self, *names: str) -> Tensor:
        """The first of these that is there."""
        return self[next((name for name in names if name in self.weights), names[0])]

    def embedding(self, side: str) -> Tensor:
        """``(V, D)`` symbol vectors of the encoder or decoder."""
        other = {"encoder": "decoder", "decoder": "encoder"}[side]
        own = f"{side}.embed_tokens.weight"
        return self.get(own, "shared.weight", "lm_head.weight", f"{other}.embed_tokens.weight")

    @property
    def shared(self) -> bool:
        """Whether both sides have the same symbol vectors; older checkpoints hold them under every name."""
        one, other = self.embedding("encoder"), self.embedding("decoder")
        return one is other or (one.shape == other.shape and torch.equal(one, other))

    def linear(self, ours: str, *theirs: str) -> Iterator[tuple[str, Tensor]]:
        """Weight and bias of one of our maps, which may be several of theirs on top of one another."""
        for part in ("weight", "bias"):
            yield f"{ours}.{part}", torch.cat([self[f"{name}.{part}"] for name in theirs])
