"""Decoding with a Transformer: a cache that is written in place and read through each row's lineage.

Keys and values of step s lie in slot s of a buffer, row by row as they were when the step was made. A search that
reorders rows changes integers alone: ``lineage[r, s]`` says in which row of slot s the past of row r lies. Keys and
values of a source are computed once and shared by all rows that belong to it.

States are values: a step from a state whose next slot was already written (by another step from it) first copies
its own past into a fresh buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from thalweg.layers.hopfield.separation_maps import Separation
from thalweg.layers.multihead import head_weights, mean_weights
from thalweg.layers.norms import Normalisation
from thalweg.layers.padded import Padded, checked
from thalweg.layers.positions import rotate
from thalweg.layers.transformer import GATES

if TYPE_CHECKING:
    from thalweg.energies.transformer.model import Transformer


_FIRST_SLOTS = 16
_FUNCTIONS = {"relu": nn.functional.relu, "gelu": nn.functional.gelu, "silu": nn.functional.silu}

_Map = Callable[[Tensor], Tensor]


class _LayerNorm(NamedTuple):
    """The weights of a LayerNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float


_Norm = _LayerNorm | _Map  # any other is called


class _Block(NamedTuple):
    """Weights of one decoder layer, taken out of their modules; each norm is the one that follows its block."""

    project: _Map
    out: _Map
    norm: _Norm
    query: _Map | None
    cross_out: _Map | None
    cross_norm: _Norm | None
    up: _Map
    gate: _Map | None
    down: _Map
    last_norm: _Norm


class _Plan(NamedTuple):
    """What every step needs, looked up once: attribute access on modules costs as much as a small product."""

    table: Tensor
    width: int  # of keys and values
    first_norm: _Norm | None
    blocks: tuple[_Block, ...]
    output: _Map
    map: Separation | None  # of attention, where it is not the softmax


@dataclass(frozen=True, eq=False)
class Sources:
    """B sources, as all steps read them.

    Attributes:
        memories: ``(B, S, 2, D)`` a layer, keys and values.
        lengths: ``(B,)`` int64 on the model's device; longest: the greatest, known to Python.
        reach: in a causal model, no bos stands at a greater position; else 0.
        mask: ``(B, S)`` bool.
        starts: ``(B,)`` the position of bos in a causal model.
        copies: ``(B, S)`` target symbol that each position copies to, or -1.
        plan: the model's weights, for the fast path; None on the differentiable one.
    """

    memories: tuple[Tensor, ...]
    lengths: Tensor
    longest: int
    reach: int
    mask: Tensor
    starts: Tensor | None
    copies: Tensor | None
    plan: _Plan | None


class Buffer:
    """Keys and values of all layers, ``(L, T, N, 2, D)``, of which the first ``written`` slots hold something."""

    def __init__(self, cache: Tensor, written: int = 0):
        self.cache, self.written = cache, written


@dataclass(frozen=True, eq=False)
class TransformerState:
    """Where R partial targets stand.

    Attributes:
        sources: what belongs to the sources.
        items: ``(R,)`` the source of each row.
        length: symbols fed so far, t.
        lineage: ``(R, t)`` row of the buffer's slot s that holds the past of row r.
        buffer: keys and values of the past; None before the first step and on the differentiable path.
        pasts: on the differentiable path, ``(R, t, 2, D)`` a layer, after the source's in a causal model.
        said: ``(R, t)`` the symbols fed, where a rule of the model looks back at them.

    >>> from thalweg.energies import Transformer, TransformerConfig
    >>> config = TransformerConfig(width=8, heads=2, feedforward=16, encoder_layers=1, decoder_layers=1)
    >>> model = Transformer(config, source_size=9, target_size=9).eval()
    >>> source = Padded(torch.tensor([[4, 5]]), torch.tensor([2]), torch.ones(1, 2, dtype=torch.bool))
    >>> with torch.no_grad():
    ...     _, state = model.step(torch.tensor([model.bos]), model.begin(source))
    >>> state.length, model.select(state, torch.tensor([0, 0, 0])).lineage.tolist()
    (1, [[0], [0], [0]])
    """

    sources: Sources
    items: Tensor
    length: int
    lineage: Tensor
    buffer: Buffer | None = None
    pasts: tuple[Tensor, ...] | None = None
    said: Tensor | None = None


def begin(model: Transformer, inputs: Padded) -> TransformerState:
    """The state of B rows before bos: sources encoded, nothing said. One row a source.

    In evaluation mode without gradients the state is made for the fast path, else for the differentiable one.
    """
    inputs = checked(inputs, model.source_embedding.num_embeddings)
    encoded = model.encode(inputs)
    device = inputs.tokens.device
    plain = model.training or torch.is_grad_enabled()
    longest = int(inputs.lengths.max())
    sources = Sources(
        memories=encoded.memories if plain else tuple(part.contiguous() for part in encoded.memories),
        lengths=inputs.lengths.to(device, non_blocking=True),
        longest=longest,
        reach=longest + model.counted_from if model.causal else 0,
        mask=inputs.mask,
        starts=encoded.starts,
        copies=encoded.copies,
        plan=None if plain else _decoder_weights(model),
    )
    items = torch.arange(inputs.size, device=device)
    lineage = items.new_empty((inputs.size, 0))
    pasts = None
    if plain:
        # In a causal model the source is the first part of every row's past.
        nothing = (part[:, :0] for part in encoded.memories)
        pasts = encoded.memories if model.causal else tuple(nothing)
    return TransformerState(sources, items, 0, lineage, None, pasts)


def select(state: TransformerState, rows: Tensor) -> TransformerState:
    """The state of the given rows: R' x t integers are gathered."""
    pasts = None if state.pasts is None else tuple(part[rows] for part in state.pasts)
    lineage = state.lineage[rows] if state.length else state.lineage.new_empty((rows.size(0), 0))
    said = None if state.said is None else state.said[rows]
    return replace(state, items=state.items[rows], lineage=lineage, pasts=pasts, said=said)


def step(model: Transformer, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
    """Feed ``tokens (R,)``: log-probabilities ``(R, V)`` and the state after."""
    if state.sources.plan is None:
        return _plain_step(model, tokens, state)
    with torch.no_grad():
        return _fast_step(model, tokens, state, state.sources.plan)


def _plain_step(model: Transformer, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
    """The modules themselves, with the past concatenated: any mode, any gradient."""
    sources, items = state.sources, state.items
    assert state.pasts is not None
    positions = _positions(state)
    x = model.embed(tokens.unsqueeze(1), positions, _reach(state), source=False)
    rotary = model.rotary_turns(_reach(state), positions)
    seen = sources.mask[items][:, None, None, :]
    memories = mask = None
    if model.causal:
        said = seen.new_ones((items.size(0), 1, 1, state.length + 1))
        mask = torch.cat((seen, said), dim=3)
    else:
        memories = tuple(part[items] for part in sources.memories)
    about = {"rotary": rotary, "pasts": state.pasts, "bias": _bias(model, state)}
    out = model.decoder(x, memories=memories, memory_mask=seen, mask=mask, **about)
    logits = model.logits(out.output)
    if model.pointer is not None:
        read = out.own if out.read is None else out.read
        keys = read.memory[:, : seen.size(3), 0]
        weights = mean_weights(read.queries, keys, model.config.heads, seen, model.attention_map)
        assert sources.copies is not None
        logits = model.mixture(out.output, read.output, x, weights, sources.copies[items])
    after = replace(state, length=state.length + 1, lineage=_longer(state), pasts=out.memories)
    return model.normalise(logits.squeeze(1)), after


class _Step(NamedTuple):
    """What all layers of one step share."""

    state: TransformerState
    cache: Tensor
    lineage: Tensor
    turns: tuple[Tensor, Tensor] | None
    heads: int
    scale: float
    pre: bool
    activation: Callable[[Tensor], Tensor]
    map: Separation | None
    bias: Tensor | None  # (1, H, 1, t + 1) on the scores of self-attention


def _fast_step(
    model: Transformer, tokens: Tensor, state: TransformerState, plan: _Plan
) -> tuple[Tensor, TransformerState]:
    """The same with as few calls as possible, over the buffer."""
    config = model.config
    buffer, lineage = _with_room(state, plan)
    scale = (config.attention_width // config.heads) ** -0.5
    activation = {**_FUNCTIONS, **GATES}[config.activation]
    turns, pre = _turns(model, state), config.norm == "pre"
    bias = _bias(model, state)
    now = _Step(state, buffer.cache, lineage, turns, config.heads, scale, pre, activation, plan.map, bias)
    inputs = residual = h = _embedded(model, tokens, state, plan)
    if isinstance(plan.first_norm, _LayerNorm):
        weight, bias, eps = plan.first_norm
        h = nn.functional.layer_norm(h, weight.shape, weight, bias, eps)
    elif plan.first_norm is not None:
        h = plan.first_norm(h)
    context = queries = h
    for n, block in enumerate(plan.blocks):
        context, queries, h, residual = _own(now, n, block, h, residual)
        if block.query is not None:
            context, queries, h, residual = _cross(now, n, block, h, residual)
        h, residual = _feed(now, block, h, residual)
    buffer.written = state.length + 1
    after = replace(state, length=state.length + 1, lineage=lineage, buffer=buffer)
    return _answer(model, plan, h, context, inputs, queries, state), after


def _own(now: _Step, n: int, block: _Block, h: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Self-attention of layer n: its output, its queries, and both streams (with and without norm) after it."""
    projected = block.project(h)
    R, D = projected.size(0), projected.size(1) // 3
    if now.turns is not None:
        both = projected[:, : 2 * D]
        both.copy_(rotate(both.unflatten(1, (2 * now.heads, -1)), *now.turns).view(R, 2 * D))
    cache = now.cache[n]
    cache[now.state.length, :R].view(R, 2 * D).copy_(projected[:, D:])
    queries = projected[:, :D].mul_(now.scale)
    if now.state.sources.starts is not None:
        read = _attend_both(now, n, queries, now.state.sources)
    else:
        read = _attend(now, queries, _past(now, n), bias=now.bias)
    context = block.out(read)
    return context, queries, *_added(now, context, residual, block.norm)


def _cross(now: _Step, n: int, block: _Block, h: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross-attention of layer n, as :func:`_own`."""
    assert block.query is not None
    assert block.cross_out is not None
    assert block.cross_norm is not None
    sources = now.state.sources
    queries = block.query(h).mul_(now.scale)
    items, S = now.state.items, sources.longest
    read = _attend(now, queries, sources.memories[n][items, :S], sources.mask[items, :S])
    context = block.cross_out(read)
    return context, queries, *_added(now, context, residual, block.cross_norm)


def _feed(now: _Step, block: _Block, h: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    inner = block.up(h)
    inner = now.activation(inner) if block.gate is None else now.activation(block.gate(h)).mul_(inner)
    return _added(now, block.down(inner), residual, block.last_norm)


def _added(now: _Step, change: Tensor, residual: Tensor, norm: _Norm) -> tuple[Tensor, Tensor]:
    total = change + residual
    h = nn.functional.layer_norm(total, norm.weight.shape, *norm) if isinstance(norm, _LayerNorm) else norm(total)
    return h, total if now.pre else h


def _answer(
    model: Transformer,
    plan: _Plan,
    h: Tensor,
    context: Tensor,
    inputs: Tensor,
    queries: Tensor,
    state: TransformerState,
) -> Tensor:
    """Log-probabilities ``(R, V)`` from the last outputs."""
    if model.pointer is None:
        logits = plan.output(h)
        narrow = logits.dtype in (torch.bfloat16, torch.float16)
        return torch.log_softmax(logits, dim=1, dtype=torch.float32 if narrow else None)
    sources, items = state.sources, state.items
    assert sources.copies is not None
    # The queries are scaled already, which `mean_weights` would do again.
    queries = queries * (model.config.attention_width // model.config.heads) ** 0.5
    seen, keys = sources.mask[items][:, None, None, :], sources.memories[-1][:, :, 0][items]
    weights = mean_weights(queries.unsqueeze(1), keys, model.config.heads, seen, model.attention_map)
    h, context, inputs = (part.unsqueeze(1) for part in (h, context, inputs))
    return model.normalise(model.mixture(h, context, inputs, weights, sources.copies[items]).squeeze(1))


def _attend_both(now: _Step, n: int, queries: Tensor, sources: Sources) -> Tensor:
    """One attention over the row's source and its own past: the self-attention of a causal model."""
    items, S = now.state.items, sources.longest
    both = torch.cat((sources.memories[n][items, :S], _past(now, n)), dim=1)
    seen = sources.mask[items, :S]
    return _attend(now, queries, both, nn.functional.pad(seen, (0, both.size(1) - S), value=True))


def _past(now: _Step, n: int) -> Tensor:
    """``(R, t, 2, D)`` keys and values of each row's own past in layer n."""
    return now.cache[n][torch.arange(now.lineage.size(1), device=now.lineage.device), now.lineage]


def _attend(
    now: _Step, queries: Tensor, memory: Tensor, seen: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Attention of ``queries (R, D)``, scaled already, over ``memory (R, S, 2, D)`` by any map -> ``(R, D)``."""
    keys, values = memory.unflatten(3, (now.heads, -1)).permute(2, 0, 3, 1, 4)  # (R, H, S, d)
    queries = queries.unflatten(1, (now.heads, -1)).unsqueeze(2)
    mask = None if seen is None else seen[:, None, None, :]
    if now.map is None and (mask is None or bias is None):  # torch's own reads keys and values where they lie
        given = bias if mask is None else mask
        read = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=given, scale=1.0)
        return read.flatten(1)
    return (head_weights(queries, keys, mask, now.map, bias).to(values.dtype) @ values).flatten(1)


def _reach(state: TransformerState) -> int:
    """One more than the greatest position that this step can use."""
    return state.sources.reach + state.length + 1


def _positions(state: TransformerState) -> Tensor:
    """``(R or 1, 1)`` the position of the symbol fed now."""
    starts = state.sources.starts
    if starts is None:
        return torch.full((1, 1), state.length, dtype=torch.long, device=state.items.device)
    return starts[state.items].unsqueeze(1) + state.length


def _embedded(model: Transformer, tokens: Tensor, state: TransformerState, plan: _Plan) -> Tensor:
    x = nn.functional.embedding(tokens, plan.table)
    table, scale = model.position_table(_reach(state)), model.config.width**0.5
    if table is not None:
        starts = state.sources.starts
        vectors = table[state.length] if starts is None else table[starts[state.items] + state.length]
        x = torch.add(vectors, x, alpha=scale) if model.config.embedding_scale else x + vectors
    elif model.config.embedding_scale:
        x = x * scale
    return x if model.target_norm is None else model.target_norm(x)


def _turns(model: Transformer, state: TransformerState) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines ``(R or 1, 1, d/2)`` of the position fed now."""
    if model.config.positions != "rotary":
        return None
    return model.rotary_turns(_reach(state), _positions(state))


def _bias(model: Transformer, state: TransformerState) -> Tensor | None:
    """``(1, H, 1, t + 1)`` what distances add to the scores of self-attention, where positions are relative."""
    if model.target_bias is None:
        return None
    return model.target_bias(_positions(state), torch.arange(state.length + 1, device=state.items.device).unsqueeze(0))


def _longer(state: TransformerState) -> Tensor:
    """The lineage after a step: each row lies in its own row of the new slot."""
    rows = torch.arange(state.items.size(0), device=state.items.device).unsqueeze(1)
    return torch.cat((state.lineage, rows), dim=1) if state.length else rows


def _with_room(state: TransformerState, plan: _Plan) -> tuple[Buffer, Tensor]:
    """A buffer whose slot t is free for R rows, and the lineage in it after the step."""
    buffer, t, R = state.buffer, state.length, state.items.size(0)
    if buffer is None:
        shape = (len(plan.blocks), _FIRST_SLOTS, R, 2, plan.width)
        return Buffer(plan.table.new_empty(shape)), _longer(state)
    L, T, N, _, D = buffer.cache.shape
    if R <= N and t < T and buffer.written == t:
        return buffer, _longer(state)
    # No slot or too few rows, or another step has taken the slot: the past of each row moves to its own row.
    fresh = buffer.cache.new_empty((L, 2 * T if t == T else T, R, 2, D))
    steps = torch.arange(t, device=state.items.device).unsqueeze(1)
    fresh[:, :t] = buffer.cache[:, steps, state.lineage.t()]
    rows = torch.arange(R, device=state.items.device).unsqueeze(1)
    return Buffer(fresh, t), rows.expand(R, t + 1).contiguous()


def _decoder_weights(model: Transformer) -> _Plan:
    """The weights of the decoder in the order in which a step uses them."""
    layers, pre = model.decoder.each, model.config.norm == "pre"
    # Norms come after the sums, or before the next block: which one follows a sum is known either way.
    starts = [layer.attention_norm for layer in layers[1:]]
    blocks = []
    for layer, following in zip(layers, [*starts, model.decoder.norm], strict=True):
        cross, inner = layer.cross, layer.feedforward
        norms = [layer.attention_norm, *([] if cross is None else [layer.cross_norm]), layer.feedforward_norm]
        if pre:
            assert following is not None
            norms = [*norms[1:], following]
        first, *second, third = [_norm(norm) for norm in norms]
        blocks.append(
            _Block(
                project=_map(layer.attention.project),
                out=_map(layer.attention.out),
                norm=first,
                query=None if cross is None else _map(cross.query),
                cross_out=None if cross is None else _map(cross.out),
                cross_norm=second[0] if second else None,
                up=_map(inner.up),
                gate=None if inner.gate is None else _map(inner.gate),
                down=_map(inner.down),
                last_norm=third,
            )
        )
    first_norm = _norm(layers[0].attention_norm) if pre else None
    other = None if model.config.has_softmax else model.attention_map
    return _Plan(
        model.target_embedding.weight, model.config.attention_width, first_norm, tuple(blocks), _output(model), other
    )


def _norm(module: nn.Module) -> _Norm:
    if isinstance(module, nn.LayerNorm):
        return _LayerNorm(module.weight, module.bias, module.eps)
    assert isinstance(module, Normalisation)
    return module.layer  # one position alone: no mask


def _map(module: nn.Module) -> _Map:
    """A linear layer as a call without the module around it; another module in its place is called as it is."""
    normed = isinstance(module, nn.Linear) and is_parametrized(module, "weight")
    if type(module) is not nn.Linear and not normed:
        return module
    # Of weight norm: the matrix is made here, once for all steps.
    weight, bias = cast("Tensor", module.weight), cast("Tensor | None", module.bias)
    return lambda x: nn.functional.linear(x, weight, bias)


def _output(model: Transformer) -> _Map:
    mask, output, block = model.never + model.unread, model.output, model.block
    if type(output) is not nn.Linear:
        return lambda x: output(x if block is None else block(x)) + mask
    # -inf in the bias forbids a symbol without another pass over the logits.
    weight, bias = output.weight, mask if output.bias is None else output.bias + mask
    return lambda x: nn.functional.linear(x if block is None else block(x), weight, bias)
