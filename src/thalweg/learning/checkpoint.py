"""Checkpoints: one safetensors file each, tensors plus JSON metadata, replaced atomically, never executable."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import CheckpointError

__all__ = [
    "FORMAT",
    "Checkpoint",
    "flatten_optimiser",
    "load_checkpoint",
    "restore_optimiser",
    "save_checkpoint",
    "write_atomically",
]

FORMAT = 1
"""Version of the layout written here; files with a higher one are refused."""

_KIND = "thalweg"


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint file: tensors by name, and JSON metadata.

    >>> Checkpoint({"weight": torch.zeros(2)}, {"epoch": 3}).part("w")
    {'eight': tensor([0., 0.])}
    """

    tensors: dict[str, Tensor]
    meta: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose name starts with ``prefix``, which is cut off."""
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: a reader, or a kill at any moment, sees the old file or the new one, whole.

    >>> write_atomically(Path(tempfile.mkdtemp()) / "x.json", b"{}")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        # mkstemp makes the file private; a run directory's files follow the user's umask like any other.
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(handle, 0o666 & ~umask)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; tensors that share storage are stored once per name.

    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> save_checkpoint(path, Checkpoint({"weight": torch.ones(2)}, {"epoch": 3}))
    >>> load_checkpoint(path).meta["epoch"]
    3
    """
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in checkpoint.tensors.items()}
    meta = {"kind": _KIND, "format": str(FORMAT), "meta": json.dumps(checkpoint.meta, ensure_ascii=False)}
    write_atomically(path, save(tensors, metadata=meta))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint onto the CPU; :class:`CheckpointError` says what is wrong with a bad one.

    >>> load_checkpoint(Path("absent.safetensors"))
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent.safetensors: expected a checkpoint, got no such file; train first or ...
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(
            f"{path}: expected a checkpoint, got no such file; train first or name another run directory"
        )
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            _check_header(path, header)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected a whole safetensors file, got one that cannot be read ({error}); "
            "restore it from a copy or train again"
        ) from None
    try:
        meta = dict(json.loads(header["meta"]).items())
    except (KeyError, ValueError, AttributeError):
        raise CheckpointError(f"{path}: the checkpoint's metadata is damaged; restore it or train again") from None
    return Checkpoint(tensors, meta)


def _check_header(path: Path, header: dict[str, str]) -> None:
    if header.get("kind") != _KIND:
        raise CheckpointError(
            f"{path}: expected a Thalweg checkpoint, got a safetensors file of another kind; name a run directory"
        )
    version = header.get("format", "0")
    if not version.isdigit() or int(version) > FORMAT:
        raise CheckpointError(
            f"{path}: expected checkpoint format {FORMAT} or older, got {version}; upgrade thalweg to read it"
        )


def flatten_optimiser(optimiser: torch.optim.Optimizer, prefix: str) -> dict[str, Tensor]:
    """The optimiser's tensors as ``{prefix}{parameter}.{slot}``; its settings come from the config, not from here.

    Parameters are numbered by their ``places`` where the groups have them
    (:func:`~thalweg.learning.optimisers.decay_groups`), else in the optimiser's own order.

    >>> weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.ones(2)
    >>> optimiser = torch.optim.Adam([weight]); optimiser.step()
    >>> sorted(flatten_optimiser(optimiser, "optimiser."))
    ['optimiser.0.exp_avg', 'optimiser.0.exp_avg_sq', 'optimiser.0.step']
    """
    content = optimiser.state_dict()
    places = _places(content["param_groups"])
    return {
        f"{prefix}{places[index]}.{slot}": value
        for index, slots in content["state"].items()
        for slot, value in slots.items()
        if isinstance(value, Tensor)
    }


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what :func:`flatten_optimiser` gave, prefix removed; the parameters may be grouped otherwise now.

    >>> optimiser = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    >>> slots = {"0.exp_avg": torch.ones(2), "0.exp_avg_sq": torch.ones(2), "0.step": torch.tensor(1.0)}
    >>> restore_optimiser(optimiser, slots)
    >>> next(iter(optimiser.state.values()))["exp_avg"]
    tensor([1., 1.])
    """
    groups = optimiser.state_dict()["param_groups"]
    indices = {place: index for index, place in _places(groups).items()}
    shapes = [p.shape for group in optimiser.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        place, slot = name.split(".", 1)
        if int(place) not in indices:
            raise ValueError(f"the optimiser has {len(shapes)} parameters, the file one numbered {place}")
        index = indices[int(place)]
        # Torch would take a tensor of any shape and fail, or go wrong, at the next step.
        if tensor.dim() and tensor.shape != shapes[index]:
            expected, got = tuple(shapes[index]), tuple(tensor.shape)
            raise ValueError(f"optimiser tensor {name} must be {expected}, got {got}")
        state.setdefault(index, {})[slot] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": groups})


def _places(groups: list[dict[str, Any]]) -> dict[int, int]:
    """Torch's number of each parameter, counted through the groups -> its place in the model."""
    return {
        index: place
        for group in groups
        for index, place in zip(group["params"], group.get("places", group["params"]), strict=True)
    }
