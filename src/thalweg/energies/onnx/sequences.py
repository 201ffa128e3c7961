"""What the two graphs of a sequence model are, and what a search must know of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thalweg.energies.onnx.graph import FLOAT, Graph


@dataclass(frozen=True)
class Graphs:
    """An encoder and a decoder step; see ``docs/export.md``.

    Attributes:
        encoder: tokens ``(B, S)`` and lengths ``(B,)`` -> ``memory``, which no step changes, and the first ``state``.
        step: tokens ``(R,)``, memory and state of R rows -> ``log_probs (R, V)`` and ``new.`` states.
        memory, state: names of tensors; the first dimension of each is the rows.
        reach: symbols at most that source and target may have; None: as many as there are.

    >>> Graphs(None, None, ("memory",), ("past",), 512).reach
    512
    """

    encoder: Any
    step: Any
    memory: tuple[str, ...]
    state: tuple[str, ...]
    reach: int | None


def finish(graph: Graph, logits: str, never: Tensor, unread: Tensor, size: int) -> None:
    """Log-probabilities ``(R, V)`` of logits, without symbols that are never said."""
    barred = graph.op("Add", logits, graph.constant(never + unread))
    graph.output("log_probs", graph.op("LogSoftmax", barred, axis=-1), FLOAT, ["R", size])
