"""A recurrent encoder-decoder as the CPU's compiled searches take it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thalweg.inference.search.compiled import CompiledPlan, kept
from thalweg.layers.cells import cell_of, read_in_place
from thalweg.layers.padded import Padded

if TYPE_CHECKING:
    from thalweg.energies.seq2seq.model import Seq2Seq


def _made(model: Seq2Seq, ops: Any) -> Any:
    """The model of the kernels."""
    config, combine, H = model.config, model.combine, model.config.hidden
    attends = config.attention != "none"
    own = values = keys = query = None
    if combine is not None:
        own = ops.linear_of(combine.weight[:, :H], combine.bias)
        values = ops.linear_of(combine.weight[:, H:]) if attends else None
    if config.attention in ("general", "additive"):
        keys = ops.linear_of(model.attention.key.weight, model.attention.key.bias)
    if config.attention == "additive":
        query = ops.linear_of(model.attention.query.weight)
    sides = range(2 if config.bidirectional else 1)
    return ops.Recurrent(
        cell=config.cell,
        source_embedding=ops.array(model.source_embedding.weight),
        target_embedding=ops.array(model.target_embedding.weight),
        encoder=[[cell_of(ops, model.encoder, n, side) for side in sides] for n in range(config.encoder_layers)],
        decoder=[cell_of(ops, model.decoder, n, 0) for n in range(config.decoder_layers)],
        bridge=[ops.linear_of(layer.weight, layer.bias) for layer in model.bridge or ()],
        own=own,
        values=values,
        keys=keys,
        query=query,
        folded=attends and model.folded,
        output=ops.linear_of(model.output.weight, model.output.bias),
    )


def _symbols(model: Seq2Seq, source: Padded) -> Tensor:
    """All symbols of the sources, one after the other, in the order in which they are read."""
    tokens, lengths, mask = source
    if model.config.reverse_source:
        turned = lengths[:, None] - 1 - torch.arange(tokens.size(1))
        tokens = tokens.gather(1, torch.where(turned >= 0, turned, turned + tokens.size(1)))
    return tokens[mask]


def compiled_plan(model: Seq2Seq, source: Padded) -> CompiledPlan | None:
    """How the model would search the sources in one call, or None where it cannot."""
    offer = read_in_place(model, source) if model.config.has_softmax and model.config.has_bare_gates else None
    if offer is None:
        return None
    ops, source = offer
    config = model.config

    def search(first: int, last: int, request: Any) -> tuple[Any, ...]:
        made = kept(model, tuple(x.data_ptr() for x in model.parameters()), lambda: _made(model, ops))
        part = source.part(first, last)
        weights = model.attention.combine.weight.view(-1) if config.attention == "additive" else None
        read = {"lengths": part.lengths.contiguous(), "tokens": _symbols(model, part), "weights": weights}
        return made.search(request, **{name: ops.array(x) for name, x in read.items()})

    # A row keeps its states and what is read off them however many steps there are; few searches take less than 16.
    row = 4 * (config.decoder_layers * 9 * config.hidden + model.vocab_size)
    return CompiledPlan(source.size, math.inf, 16 + row // 16, model.never + model.unread, None, search)
