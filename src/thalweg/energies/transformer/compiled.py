"""A Transformer as the CPU's compiled searches take it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thalweg.inference.search.compiled import CompiledPlan, kept
from thalweg.kernels import dispatch
from thalweg.layers.low_precision import ReducedLinear
from thalweg.layers.norms import Normalisation
from thalweg.layers.padded import Padded, checked
from thalweg.layers.transformer import TransformerStack

if TYPE_CHECKING:
    from thalweg.energies.transformer.model import Transformer


def _linear(ops: Any, layer: nn.Module | None) -> Any:
    if layer is None:
        return None
    if isinstance(layer, ReducedLinear):
        return ops.linear_of(layer.stored, layer.bias, layer.scale)
    assert isinstance(layer, nn.Linear)
    return ops.linear_of(layer.weight, layer.bias)


def _norm(ops: Any, norm: nn.Module | None) -> Any:
    if isinstance(norm, Normalisation):
        norm = norm.layer
    if norm is None:
        return None
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    assert norm.eps is not None
    centred = isinstance(norm, nn.LayerNorm)
    return ops.norm_of(norm.weight, norm.bias if centred else None, norm.eps, centred=centred)


def _blocks(ops: Any, stack: TransformerStack) -> list[Any]:
    """The layers, each with the norms that follow its sums: its own, or those of what comes next."""
    blocks, layers = [], stack.each
    for n, layer in enumerate(layers):
        cross, inner = layer.cross, layer.feedforward
        norms = [layer.attention_norm, None if cross is None else layer.cross_norm, layer.feedforward_norm]
        if layer.first:
            following = layers[n + 1].attention_norm if n + 1 < len(layers) else stack.norm
            norms = [norms[1] or norms[2], norms[2] and cross and norms[2], following]
        blocks.append(
            ops.Block(
                project=_linear(ops, layer.attention.project),
                out=_linear(ops, layer.attention.out),
                attention_norm=_norm(ops, norms[0]),
                query=None if cross is None else _linear(ops, cross.query),
                cross_out=None if cross is None else _linear(ops, cross.out),
                cross_norm=None if cross is None else _norm(ops, norms[1]),
                up=_linear(ops, inner.up),
                gate=_linear(ops, inner.gate),
                down=_linear(ops, inner.down),
                feedforward_norm=_norm(ops, norms[2]),
            )
        )
    return blocks


def _first(ops: Any, stack: TransformerStack) -> Any:
    return _norm(ops, stack.each[0].attention_norm) if stack.each[0].first else None


def _made(model: Transformer, ops: Any) -> Any:
    """The model of the kernels, with an encoder if theirs serves."""
    config, head = model.config, model.block
    encoder = model.encoder if _encoder_serves(model) else None
    return ops.Transformer(
        heads=config.heads,
        activation=config.activation,
        encoder=[] if encoder is None else _blocks(ops, encoder),
        decoder=_blocks(ops, model.decoder),
        encoder_first=None if encoder is None else _first(ops, encoder),
        decoder_first=_first(ops, model.decoder),
        memory=[]
        if encoder is None
        else [_linear(ops, layer.cross.memory) for layer in model.decoder.each if layer.cross],
        embedding=ops.array(model.target_embedding.weight),
        scale=config.width**0.5 if config.embedding_scale else 1.0,
        embedding_norm=_norm(ops, model.target_norm),
        head=None if head is None else _linear(ops, head[0]),
        head_norm=None if head is None else _norm(ops, head[2]),
        output=_linear(ops, model.output),
    )


def _serves(model: Transformer) -> bool:
    """Whether the model is one that is searched so."""
    plain = not (model.causal or model.pointer or model.training) and getattr(model, "barred", ()) is not None
    config = model.config
    if not plain or not config.has_softmax or config.norm_of_decoder not in ("layer", "rms"):
        return False
    # A matrix that is made anew from others does not lie anywhere.
    if any(isinstance(part, nn.Linear) and type(part) is not nn.Linear for part in model.decoder.modules()):
        return False
    numbers = (*model.parameters(), *model.buffers())
    stored = {id(part.stored) for part in model.modules() if isinstance(part, ReducedLinear)}
    known = all(x.dtype is torch.float32 or not x.is_floating_point() or id(x) in stored for x in numbers)
    return known and all(x.is_contiguous() for x in numbers)


def _encoder_serves(model: Transformer) -> bool:
    """Whether the encoder too is in the compiled call; any other runs by itself before it."""
    config = model.config
    usual = config.encoder_norm == "layer" and config.attention_width == config.width
    return usual and config.positions != "relative"


def _tables(model: Transformer, ops: Any, source: Padded, steps: int) -> dict[str, Any]:
    """What a search of so many steps reads beside the weights, and its sources, place after place."""
    mask, tables = source.mask, {"inputs": None, "positions": None, "distances": None}
    if _encoder_serves(model):
        x, positions = model.embed_source(source)
        tables |= {"inputs": x[mask], "positions": positions.expand_as(mask)[mask]}
        memories = []
    else:
        memories = [ops.array(found.flatten(2)[mask]) for found in model.encode(source).memories]
    if model.target_bias is not None:
        back = torch.arange(steps).unsqueeze(0)
        tables["distances"] = model.target_bias(back, back[:, :1]).view(-1, steps)
    reach = max(steps, mask.size(1)) + 1
    turns: Any = model.rotary_turns(reach, torch.arange(reach)) or (None, None)
    tables |= {"cosines": turns[0], "sines": turns[1], "vectors": model.position_table(steps)}
    arrays = {name: ops.array(None if x is None else x.contiguous()) for name, x in tables.items()}
    return {**arrays, "lengths": ops.array(source.lengths.contiguous()), "memories": memories}


def compiled_plan(model: Transformer, source: Padded) -> CompiledPlan | None:
    """How the model would search the sources in one call, or None where it cannot."""
    ops: Any = dispatch.search_kernels(model.device)
    if ops is None:
        return None
    source = checked(source, model.source_embedding.num_embeddings)
    if not source.size or not source.tokens.is_cpu:
        return None
    config = model.config
    most = math.inf if config.positions != "learned" else config.max_positions
    if not _serves(model) or int(source.lengths.max()) + model.counted_from > most:
        return None  # the ordinary search says what is wrong

    def search(first: int, last: int, request: Any) -> tuple[Any, ...]:
        where = tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers()))
        made = kept(model, where, lambda: _made(model, ops))
        return made.search(request, **_tables(model, ops, source.part(first, last), request.max_length))

    barred: Tensor | None = None
    if rules := getattr(model, "barred", ()):
        barred = torch.zeros(model.vocab_size).index_fill_(0, torch.tensor(rules), 1.0)
    past = 8 * config.attention_width * config.decoder_layers
    return CompiledPlan(source.size, most, past, model.never + model.unread, barred, search)
