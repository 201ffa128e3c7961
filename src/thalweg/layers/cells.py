"""Recurrent layers as the compiled CPU kernels take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from thalweg.kernels import dispatch
from thalweg.layers.low_precision import ReducedLinear
from thalweg.layers.padded import Padded, checked
from thalweg.layers.recurrent import Recurrent, ResetBeforeGRU


def cell_of(ops: Any, stack: Recurrent, layer: int, side: int) -> Any:
    """A layer in one direction, of what :func:`thalweg.kernels.dispatch.search_kernels` gave as ``ops``."""
    core = stack.core
    if isinstance(core, ResetBeforeGRU):
        names = (f"{name}_{layer}_{side}" for name in ("input", "bias", "gates", "candidate"))
        weight, bias, gates, candidate = (getattr(core, name) for name in names)
        linear = ops.linear_of
        return ops.Cell(input=linear(weight, bias), past=linear(gates), candidate=linear(candidate))
    end = f"_l{layer}{'_reverse' if side else ''}"
    maps = (
        ops.linear_of(getattr(core, f"weight_{name}{end}"), getattr(core, f"bias_{name}{end}")) for name in ("ih", "hh")
    )
    return ops.Cell(input=next(maps), past=next(maps), candidate=None)


def lies_plainly(model: nn.Module) -> bool:
    """Whether all weights are float32 on the CPU, none in fewer bits, and nothing is training: they are read in place.

    >>> lies_plainly(nn.Linear(2, 2).eval()), lies_plainly(nn.Linear(2, 2).half().eval())
    (True, False)
    """
    if model.training or any(part.training for part in model.children()):
        return False
    if any(isinstance(part, ReducedLinear) for part in model.modules()):  # few of its weights are linear layers'
        return False
    return all(x.dtype is torch.float32 and x.is_cpu and x.is_contiguous() for x in model.parameters())


def read_in_place(model: Any, source: Padded) -> tuple[Any, Padded] | None:
    """The kernels that search such a model, and its sources, looked at; None where they cannot, and for no sources."""
    ops = dispatch.search_kernels(model.output.weight.device)
    if ops is None or not lies_plainly(model):
        return None
    source = checked(source, model.source_embedding.num_embeddings)
    return (ops, source) if source.size and source.tokens.is_cpu else None
