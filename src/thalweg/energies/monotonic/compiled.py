"""A transducer with hard monotonic attention as the CPU's compiled searches take it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from thalweg.energies.monotonic.alignments import NEVER
from thalweg.inference.search.compiled import CompiledPlan, kept
from thalweg.layers.cells import cell_of, read_in_place
from thalweg.layers.padded import Padded
from thalweg.layers.spelling import SpeltEmbedding, SpeltLinear

if TYPE_CHECKING:
    from thalweg.energies.monotonic.model import Monotonic


def _made(model: Monotonic, ops: Any, embedding: Tensor, output: Tensor) -> Any:
    """The model of the kernels."""
    linear = ops.linear_of
    return ops.Monotonic(
        cell=model.config.cell,
        target_embedding=ops.array(embedding),
        decoder=[cell_of(ops, model.decoder, n, 0) for n in range(model.config.decoder_layers)],
        join=linear(model.join_target.weight),
        pull=linear(model.pull.weight, model.pull.bias),
        jumps=None if model.jumps is None else linear(model.jumps.weight, model.jumps.bias),
        output=linear(output, model.output.bias),
        walks=model.config.order == "edits",
    )


def compiled_plan(model: Monotonic, source: Padded) -> CompiledPlan | None:
    """How the model would search the sources in one call, or None where it cannot.

    The encoder runs by itself before it: all its positions are known.
    """
    offer = read_in_place(model, source)
    if offer is None:
        return None
    ops, source = offer
    embedding, output = model.target_embedding, model.output

    def search(first: int, last: int, request: Any) -> tuple[Any, ...]:
        if isinstance(embedding, SpeltEmbedding) and isinstance(output, SpeltLinear):
            # Anew, as what they are made of may have changed.
            made = _made(model, ops, embedding.whole(), output.whole())
        else:
            addresses = tuple(x.data_ptr() for x in model.parameters())
            made = kept(model, addresses, lambda: _made(model, ops, embedding.weight, output.weight))
        memory, mask = model.encode(source.part(first, last))
        read = {"lengths": mask.sum(1), "memory": memory[mask], "never": model.never.clamp(min=NEVER)}
        return made.search(request, **{name: ops.array(x) for name, x in read.items()})

    # A row keeps its states, and the symbols of every position, however many steps there are; few take less than 4.
    places = int(source.lengths.max()) + 1
    row = 4 * (model.config.decoder_layers * 9 * model.config.hidden + 2 * places * (model.vocab_size + 1))
    return CompiledPlan(source.size, math.inf, 16 + row // 4, model.never + model.unread, None, search)
