"""Checkpoints: one safetensors file each, tensors plus JSON metadata, replaced atomically, never executable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thalweg.files import TensorFormat, making_sense, read_tensors, write_tensors

FORMAT = 2
"""Version of the layout written here; files with a higher one are refused."""

MODEL, LAST = "model.safetensors", "last.safetensors"
"""The files of a run: its best model, and what its training goes on from."""

# Ends the name of the scales of a matrix that is kept as int8.
_SCALE = "#scale"

_FILES = TensorFormat(
    kind="thalweg",
    version=FORMAT,
    name="a checkpoint",
    absent="train first or name another run directory",
    damaged="restore it from a copy or train again",
    other="name a run directory",
)


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


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, atomically; tensors that share storage are stored once per name.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> save_checkpoint(path, Checkpoint({"weight": torch.ones(2)}, {"epoch": 3}))
    >>> load_checkpoint(path).meta["epoch"]
    3
    """
    write_tensors(path, checkpoint.tensors, checkpoint.meta, _FILES)


def load_checkpoint(path: Path, *, values: bool = True) -> Checkpoint:
    """Read a checkpoint onto the CPU; :class:`CheckpointError` says what is wrong with a bad one.

    Without ``values`` its metadata alone are read: a moment, whatever the size of the model.

    >>> load_checkpoint(Path("absent.safetensors"))
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent.safetensors: expected a checkpoint, got no such file; train first or ...
    """
    tensors, meta = read_tensors(path, _FILES, values=values)
    with making_sense(path, "expected packed matrices with their scales, got others", _FILES.damaged):
        return Checkpoint(_unpacked(tensors), meta)


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    r"""A model's tensors in a quarter of the room; :func:`load_checkpoint` gives float32 again.

    A matrix is kept as int8 with a scale for each row, :math:`W_{ij} \approx s_i q_{ij}` with
    :math:`s_i = \max_j |W_{ij}| / 127`; vectors as float16; whole numbers as they are.

    >>> tensors = packed({"weight": torch.tensor([[0.5, -1.27]]), "bias": torch.ones(2)})
    >>> {name: tensor.dtype for name, tensor in tensors.items()}
    {'weight': torch.int8, 'weight#scale': torch.float32, 'bias': torch.float16}
    >>> _unpacked(tensors)["weight"]
    tensor([[ 0.5000, -1.2700]])
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            result[name] = tensor
        elif tensor.dim() < 2:
            result[name] = tensor.half()
        else:
            rows = tensor.float().flatten(1)
            scale = (rows.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            result[name] = (rows / scale.unsqueeze(1)).round().to(torch.int8).view(tensor.shape)
            result[name + _SCALE] = scale
    return result


def _unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, with those that :func:`packed` made as float32."""
    scales = {name.removesuffix(_SCALE): scale for name, scale in tensors.items() if name.endswith(_SCALE)}
    if not scales:
        return tensors
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in scales:
            result[name] = (tensor.flatten(1) * scales[name].unsqueeze(1)).view(tensor.shape)
        elif not name.endswith(_SCALE):
            result[name] = tensor.float() if tensor.dtype == torch.float16 else tensor
    return result


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
        expected_slot = _factored(slot, shapes[index])
        if tensor.dim() and tensor.shape != expected_slot:
            expected, got = tuple(expected_slot), tuple(tensor.shape)
            raise ValueError(f"optimiser tensor {name} must be {expected}, got {got}")
        state.setdefault(index, {})[slot] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": groups})


def _factored(slot: str, shape: torch.Size) -> torch.Size:
    """The shape of a slot: the parameter's, but for the means over rows and columns that Adafactor keeps."""
    if slot == "row_var":
        return shape[:-1] + torch.Size([1])
    return shape[:-2] + torch.Size([1, shape[-1]]) if slot == "col_var" and len(shape) > 1 else shape


def _places(groups: list[dict[str, Any]]) -> dict[int, int]:
    """Torch's number of each parameter, counted through the groups -> its place in the model."""
    return {
        index: place
        for group in groups
        for index, place in zip(group["params"], group.get("places", group["params"]), strict=True)
    }
