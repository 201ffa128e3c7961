"""Memories as files: one safetensors file each, tensors and JSON metadata, replaced atomically, never executable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thalweg.energies.hopfield.post import Identity, LayerNorm, PostTransform, UnitNorm
from thalweg.errors import ConfigError
from thalweg.files import TensorFormat, making_sense, read_tensors, write_tensors
from thalweg.layers.hopfield.separation_maps import (
    ChainMarginals,
    ChainSparseMAP,
    Entmax,
    KSubsets,
    NormMax,
    Separation,
    Softmax,
)

if TYPE_CHECKING:
    from thalweg.energies.hopfield.memory import HopfieldMemory


# Version of the files written here; those with a higher one are refused.
FORMAT = 2

_FILES = TensorFormat(
    kind="thalweg-memory",
    version=FORMAT,
    name="a saved memory",
    absent="save one or name another file",
    damaged="restore it from a copy",
    other="name a file that `save` wrote",
)
_WITH_ALPHA: dict[str, type[Entmax | NormMax]] = {"entmax": Entmax, "normmax": NormMax}
_CHAINS: dict[str, type[ChainMarginals | ChainSparseMAP]] = {
    "chain-marginals": ChainMarginals,
    "chain-sparsemap": ChainSparseMAP,
}
_POSTS: dict[str, type[PostTransform]] = {"identity": Identity, "l2": UnitNorm, "layernorm": LayerNorm}


def save_memory(path: Path, memory: HopfieldMemory) -> None:
    """Write a memory: patterns, values, mask, names and settings; see :meth:`HopfieldMemory.save`.

    >>> from thalweg.energies.hopfield.memory import HopfieldMemory
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "memory.safetensors"
    >>> save_memory(path, HopfieldMemory(torch.eye(2), beta=3.0))
    >>> read_arguments(path)["beta"]
    3.0
    """
    separation, numbers = _describe(memory.separation)
    post = next((name for name, kind in _POSTS.items() if type(memory.post) is kind), None)
    if post is None:
        raise ConfigError(f"a memory with {type(memory.post).__name__} cannot be saved; save its state dict instead")
    held = {"patterns": memory.patterns, "values": memory.values, "mask": memory.mask, "log_beta": memory.log_beta}
    held |= {f"separation.{name}": tensor for name, tensor in numbers.items()}
    held |= {f"post.{name}": tensor for name, tensor in memory.post.state_dict(keep_vars=True).items()}
    tensors = {name: tensor for name, tensor in held.items() if tensor is not None}
    meta = {
        "beta": memory.beta_value,
        "separation": separation,
        "post": post,
        "learned": sorted(name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)),
    }
    if memory.names is not None:
        # Not in the header, which the format keeps below 100 MB: a million names may be more.
        text = json.dumps(memory.names, ensure_ascii=False).encode()
        tensors["names"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    write_memory(path, tensors, meta)


def read_arguments(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What to make a saved memory from, by the names of the arguments; ``log_beta`` too where it was learned.

    >>> from thalweg.energies.hopfield.memory import HopfieldMemory
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "memory.safetensors"
    >>> HopfieldMemory(torch.eye(2), names=["a", "b"]).save(path)
    >>> read_arguments(path)["names"]
    ['a', 'b']
    """
    tensors, meta = read_memory(path)
    with making_sense(path, "the memory is incomplete", "restore it from a copy"):
        names = json.loads(bytes(tensors.pop("names").numpy())) if "names" in tensors else None
        learned = set(meta["learned"])
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        parts: dict[str, Any] = {
            name: nn.Parameter(tensor) if name in learned else tensor for name, tensor in tensors.items()
        }
        post = {name.removeprefix("post."): parts[name] for name in tensors if name.startswith("post.")}
        return {
            "patterns": parts["patterns"],
            "beta": meta["beta"],
            "separation": _restore(meta["separation"], parts),
            "values": parts.get("values"),
            "post": _POSTS[meta["post"]](**post),
            "mask": parts.get("mask"),
            "names": names,
            "log_beta": parts.get("log_beta"),
        }


def _describe(separation: Separation) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A separation as JSON and tensors."""
    if type(separation) is Softmax:
        return {"kind": "softmax"}, {}
    if type(separation) is KSubsets:
        return {"kind": "k-subsets", "k": separation.k}, {}
    for kind, cls in _WITH_ALPHA.items():
        if type(separation) is cls:
            alpha = separation.alpha
            return (
                ({"kind": kind}, {"alpha": alpha})
                if isinstance(alpha, Tensor)
                else ({"kind": kind, "alpha": alpha}, {})
            )
    for kind, cls in _CHAINS.items():
        if type(separation) is cls:
            return {"kind": kind}, {"transitions": separation.transitions}
    raise ConfigError(f"a memory with {type(separation).__name__} cannot be saved; save its state dict instead")


def _restore(meta: dict[str, Any], parts: dict[str, Any]) -> Separation:
    if meta["kind"] == "softmax":
        return Softmax()
    if meta["kind"] == "k-subsets":
        return KSubsets(meta["k"])
    if meta["kind"] in _CHAINS:
        return _CHAINS[meta["kind"]](parts["separation.transitions"])
    return _WITH_ALPHA[meta["kind"]](meta["alpha"] if "alpha" in meta else parts["separation.alpha"])


def write_memory(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write tensors and JSON metadata as one safetensors file, replacing what was there in one go.

    A reader, or a kill at any moment, sees the old file or the new one, whole.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "memory.safetensors"
    >>> write_memory(path, {"patterns": torch.eye(2)}, {"beta": 2.0})
    >>> read_memory(path)[1]
    {'beta': 2.0}
    """
    write_tensors(path, tensors, meta, _FILES)


def read_memory(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a file that :func:`write_memory` made; anything else is a one-line error.

    >>> read_memory(Path("absent.safetensors"))
    Traceback (most recent call last):
    ...
    thalweg.errors.CheckpointError: absent.safetensors: expected a saved memory, got no such file; ...
    """
    return read_tensors(path, _FILES)
