"""The ONNX graphs of a model, whatever its family."""

from __future__ import annotations

from torch import nn

from thalweg.energies.monotonic.model import Monotonic
from thalweg.energies.onnx import monotonic, recurrent, transformer
from thalweg.energies.onnx.sequences import Graphs
from thalweg.energies.seq2seq.model import Seq2Seq
from thalweg.energies.transformer.model import Transformer
from thalweg.errors import ConfigError


def build_graphs(model: nn.Module) -> Graphs:
    """The graphs of a recurrent, monotonic or Transformer model, a causal one too; others are refused.

    >>> build_graphs(nn.Linear(1, 1))
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: ONNX export is of recurrent, monotonic and Transformer models, got Linear; ...
    """
    if isinstance(model, Seq2Seq):
        return recurrent.build(model)
    if isinstance(model, Monotonic):
        return monotonic.build(model)
    if isinstance(model, Transformer):
        return transformer.build(model)
    raise ConfigError(
        f"ONNX export is of recurrent, monotonic and Transformer models, got {type(model).__name__}; "
        "train with --model monotonic or lstm-attention"
    )
