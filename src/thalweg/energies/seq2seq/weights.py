"""The weights of a recurrent encoder-decoder as compiled searches read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thalweg.kernels import dispatch
from thalweg.layers.recurrent import Recurrent, ResetBeforeGRU

if TYPE_CHECKING:
    from thalweg.energies.seq2seq.model import Seq2Seq

__all__ = ["PANEL", "Stack", "Weights", "padded"]

# Outputs of a panel of packed weights.
PANEL = 16
# Beyond it what is left of a closed gate, some 1e-18, counts; infinities would have to meet the zeros that are skipped.
_LARGEST = 1e10

Map = tuple[Tensor, Tensor | None]
"""A weight and its bias."""


def padded(count: int) -> int:
    """So many outputs, in whole panels.

    >>> padded(17)
    32
    """
    return -(-count // PANEL) * PANEL


class Stack:
    """Maps that read the same numbers, as one matrix; outputs are padded to whole panels.

    >>> Stack([(torch.ones(3, 2), None)]).outer
    16
    """

    def __init__(self, maps: list[Map]):
        self.ops: Any = dispatch.search_kernels(torch.device("cpu"))
        assert self.ops.PANEL == PANEL
        self.inner = maps[0][0].size(1)
        self.outer = padded(sum(len(weight) for weight, _ in maps))
        self.weight, self.bias = torch.zeros(self.outer, self.inner), torch.zeros(self.outer)
        self.panels: Tensor | None = None
        self.read(maps)

    def read(self, maps: list[Map]) -> None:
        """Take the maps over."""
        first = 0
        for weight, bias in maps:
            last = first + len(weight)
            self.weight[first:last] = weight
            self.bias[first:last] = 0 if bias is None else bias
            first = last
        if self.panels is not None:
            self.ops.pack(self.weight, self.panels)

    def laid_out(self, many: bool) -> Tensor:
        """The weights for many rows or for few."""
        if many and self.panels is None:
            self.panels = self.ops.pack(self.weight)
        return self.panels if many and self.panels is not None else self.weight

    def op(self, x: Tensor, out: Tensor, *, many: bool, first: int | None = None) -> tuple:
        """The operation out = x W' + b, or the ``first`` outputs of it in whole panels."""
        kind = self.ops.PANELS if many else self.ops.LINEAR
        outer = self.outer if first is None else padded(first)
        sizes = (out.stride(0) * 4, x, x.stride(0) * 4, self.laid_out(many), self.inner, outer)
        return (kind, out, *sizes, 0, self.bias, 0)


class Weights:
    """All weights of a model, derived ones included, for all its searches; kept up to date by :meth:`read`.

    ``tame`` says that all are numbers of a size with which compiled searches and PyTorch agree.
    """

    def __init__(self, model: Seq2Seq):
        config = model.config
        self.copies: list[Tensor] = []
        self.tame = True
        self.table = model.decoder.project(model.target_embedding.weight).detach()
        self.layers = [Stack(_read_off(model, n)) for n in range(config.decoder_layers)]
        self.candidates = [Stack(_candidate(model, n)) for n in range(config.decoder_layers)]
        self.output = Stack(_output(model))
        self.bridge = [] if model.bridge is None else [Stack(_bridge(model, n)) for n in range(len(model.bridge))]
        self.memory = Stack(_memory(model)) if config.attention != "none" else None
        self.sources, self.past, self.fed = None, [], []
        self.directions = 2 if config.bidirectional else 1
        if self.encodes(model):
            self.sources = _sources(model)
            layers = range(config.encoder_layers)
            self.past = [Stack(_encoder_past(model, n)) for n in layers]
            self.fed = [Stack(_encoder_fed(model, n)) for n in layers[1:]]

    @staticmethod
    def encodes(model: Seq2Seq) -> bool:
        """Whether the encoder is compiled too: cells that need one product a step, a table of symbols of 64 MiB."""
        gates = 4 if model.config.cell == "lstm" else 3
        size = model.source_embedding.num_embeddings * gates * model.encoder.width
        return model.config.cell != "gru-reset-before" and size <= 1 << 24

    @torch.no_grad()
    def read(self, model: Seq2Seq, parameters: Sequence[Tensor]) -> None:
        """Take over what has changed since the last time, wherever it lies now; all must be float32."""
        ops: Any = dispatch.search_kernels(torch.device("cpu"))
        tensors = [*parameters, model.never, model.unread]
        if self.copies and ops.unchanged(tensors, self.copies):
            return
        self.copies = [tensor.detach().contiguous().clone() for tensor in tensors]
        # A bias of -inf at the output forbids a symbol: it is added last, and nothing is skipped there.
        looked_at = [x.detach().clamp(min=0.0) if x is model.output.bias else x for x in parameters]
        ends = [torch.stack(torch.aminmax(tensor)) for tensor in looked_at if tensor.numel()]
        self.tame = bool((torch.stack(ends).abs() <= _LARGEST).all())
        self.table.copy_(model.decoder.project(model.target_embedding.weight))
        for n, (layer, candidate) in enumerate(zip(self.layers, self.candidates, strict=True)):
            layer.read(_read_off(model, n))
            candidate.read(_candidate(model, n))
        self.output.read(_output(model))
        for n, bridge in enumerate(self.bridge):
            bridge.read(_bridge(model, n))
        if self.memory is not None:
            self.memory.read(_memory(model))
        if self.sources is not None:
            self.sources.copy_(_sources(model))
        for n, past in enumerate(self.past):
            past.read(_encoder_past(model, n))
        for n, fed in enumerate(self.fed):
            fed.read(_encoder_fed(model, n + 1))


def _fed(stack: Recurrent, layer: int, end: str = "") -> Map:
    """What a layer makes of its input."""
    core = stack.core
    if isinstance(core, ResetBeforeGRU):
        return getattr(core, f"input_{layer}_0"), getattr(core, f"bias_{layer}_0")
    weight, bias, more = (getattr(core, f"{name}_l{layer}{end}") for name in ("weight_ih", "bias_ih", "bias_hh"))
    return weight, bias + more if stack.cell == "lstm" else bias


def _past(stack: Recurrent, layer: int, end: str = "") -> Map:
    """What a layer makes of its own last state."""
    core = stack.core
    if isinstance(core, ResetBeforeGRU):
        return getattr(core, f"gates_{layer}_0"), None
    bias = None if stack.cell == "lstm" else getattr(core, f"bias_hh_l{layer}{end}")
    return getattr(core, f"weight_hh_l{layer}{end}"), bias


def _read_off(model: Seq2Seq, layer: int) -> list[Map]:
    """All that reads the new state of a decoder layer: first its own next step."""
    config, maps = model.config, [_past(model.decoder, layer)]
    if layer + 1 < config.decoder_layers:
        return [*maps, _fed(model.decoder, layer + 1)]
    if config.attention == "additive":
        maps.append((model.attention.query.weight, None))
    if model.combine is not None:
        maps.append((model.combine.weight[:, : config.hidden], model.combine.bias))
    return maps


def _candidate(model: Seq2Seq, layer: int) -> list[Map]:
    """The second product of a GRU that resets before it; an empty one for others."""
    core = model.decoder.core
    weight = getattr(core, f"candidate_{layer}_0") if isinstance(core, ResetBeforeGRU) else torch.zeros(0, 1)
    return [(weight, None)]


def _output(model: Seq2Seq) -> list[Map]:
    bias = model.never + model.unread
    return [(model.output.weight, bias if model.output.bias is None else bias + model.output.bias)]


def _bridge(model: Seq2Seq, part: int) -> list[Map]:
    assert model.bridge is not None
    layer = model.bridge[part]
    assert isinstance(layer, nn.Linear)
    return [(layer.weight, layer.bias)]


def _memory(model: Seq2Seq) -> list[Map]:
    """What is made of the encoder's outputs: keys, unless they are the outputs, and mapped values."""
    assert model.combine is not None
    values: Map = (model.combine.weight[:, model.config.hidden :], None)
    return (
        [values] if model.attention.score == "dot" else [(model.attention.key.weight, model.attention.key.bias), values]
    )


def _ends(model: Seq2Seq) -> tuple[str, ...]:
    return ("", "_reverse") if model.config.bidirectional else ("",)


def _sources(model: Seq2Seq) -> Tensor:
    """(V, directions * gates): what the first layer makes of every symbol."""
    vectors = model.source_embedding.weight.detach()
    return torch.cat([nn.functional.linear(vectors, *_fed(model.encoder, 0, end)) for end in _ends(model)], dim=1)


def _encoder_past(model: Seq2Seq, layer: int) -> list[Map]:
    """Both directions, each in whole panels."""
    maps: list[Map] = []
    for end in _ends(model):
        weight, bias = _past(model.encoder, layer, end)
        maps += [(weight, bias), (weight.new_zeros(-len(weight) % PANEL, weight.size(1)), None)]
    return maps


def _encoder_fed(model: Seq2Seq, layer: int) -> list[Map]:
    return [_fed(model.encoder, layer, end) for end in _ends(model)]
