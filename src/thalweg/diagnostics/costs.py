"""What a network costs, layer by layer: parameters, multiply-adds and memory of one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from thalweg.layers.convolution import DropPath
from thalweg.layers.dropout import Dropout

# What does nothing when a trained model is used.
_NOTHING = (nn.Identity, nn.Sequential, nn.modules.dropout._DropoutNd, Dropout, DropPath)
_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs in one call of the model.

    Attributes:
        name: as in ``named_modules``; kind: its class.
        output: shape of its (last) output; empty where it was not called.
        parameters: trainable numbers of its own; those shared with a layer above count there. frozen: the others.
        multiply_adds: of convolutions, matrix products and recurrences, and one for each value that is normalised;
            look-ups, comparisons and activations count nothing.
        activation_bytes: of its outputs; calls: how often it was called.

    >>> LayerCost("out", "Linear", (1, 6), 3078, 0, 3072, 24, 1).parameters
    3078
    """

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    frozen: int
    multiply_adds: int
    activation_bytes: int
    calls: int


@dataclass(frozen=True)
class CostTable:
    """Layers in the order of their first call, then those not called; ``str`` is a table.

    >>> table = cost_table(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 4))
    >>> table.parameters, table.multiply_adds, table.largest.name
    (23, 18, '0')
    >>> print(table)
    layer  kind    output  parameters  share  multiply-adds  share  activations
    0      Linear  1 x 3           15  65.2%             12  66.7%         12 B
    1      ReLU    1 x 3            0   0.0%              0   0.0%         12 B
    2      Linear  1 x 2            8  34.8%              6  33.3%          8 B
    total                          23                    18                32 B
    """

    rows: tuple[LayerCost, ...]

    @property
    def parameters(self) -> int:
        """Trainable ones in all."""
        return sum(row.parameters for row in self.rows)

    @property
    def frozen(self) -> int:
        """Parameters in all that are not trained."""
        return sum(row.frozen for row in self.rows)

    @property
    def multiply_adds(self) -> int:
        """Of one call of the model."""
        return sum(row.multiply_adds for row in self.rows)

    @property
    def activation_bytes(self) -> int:
        """Of all outputs of one call: what training keeps, about; use alone needs a layer's at a time."""
        return sum(row.activation_bytes for row in self.rows)

    @property
    def largest(self) -> LayerCost:
        """The layer with most parameters, the first of equals."""
        return max(self.rows, key=lambda row: row.parameters + row.frozen)

    def share(self, row: LayerCost) -> float:
        """A layer's share of all trainable parameters."""
        return row.parameters / max(1, self.parameters)

    def cells(self) -> list[dict[str, str]]:
        """The table as text, a dictionary a row, the total last; for terminals and pages.

        >>> cost_table(nn.Linear(4, 3), torch.zeros(1, 4)).cells()[-1]["parameters"]
        '15'
        """
        found = []
        for row in self.rows:
            found.append(
                {
                    "layer": row.name or "(model)",
                    "kind": row.kind + (f" ({row.calls} calls)" if row.calls > 1 else ""),
                    "output": " x ".join(map(str, row.output)),
                    "parameters": f"{row.parameters:,}" + (f" + {row.frozen:,} frozen" if row.frozen else ""),
                    "share": f"{self.share(row):.1%}",
                    "multiply-adds": f"{row.multiply_adds:,}",
                    "share ": f"{row.multiply_adds / max(1, self.multiply_adds):.1%}",
                    "activations": _size(row.activation_bytes),
                }
            )
        last = dict.fromkeys(found[0] if found else ("layer",), "")
        frozen = f" + {self.frozen:,} frozen" if self.frozen else ""
        last |= {"layer": "total", "parameters": f"{self.parameters:,}{frozen}"}
        last |= {"multiply-adds": f"{self.multiply_adds:,}", "activations": _size(self.activation_bytes)}
        return [*found, last]

    def __str__(self) -> str:
        """Aligned columns."""
        cells = self.cells()
        names = list(cells[0])
        widths = {name: max(len(name.strip()), *(len(row[name]) for row in cells)) for name in names}
        left = ("layer", "kind", "output")

        def line(row: Mapping[str, str]) -> str:
            parts = (row[name].ljust(widths[name]) if name in left else row[name].rjust(widths[name]) for name in names)
            return "  ".join(parts).rstrip()

        return "\n".join(line(row) for row in [{name: name.strip() for name in names}, *cells])

    def to_json(self) -> dict[str, Any]:
        """Rows and totals that ``json`` can write."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "parameters": self.parameters,
            "frozen": self.frozen,
            "multiply_adds": self.multiply_adds,
            "activation_bytes": self.activation_bytes,
        }


def cost_table(model: nn.Module, inputs: Any, *, call: Callable[..., Any] | None = None) -> CostTable:
    r"""Parameters, multiply-adds and activations of every layer, measured in one call in evaluation mode.

    A layer is a module without parts (or one of torch's attention, which computes with its parts' weights itself);
    what a larger module computes or owns itself has a row of its own. Counted by formula are

    - convolutions: output values times :math:`K^2 C / \text{groups}`; linear layers: output values times D;
    - recurrent layers: :math:`G H (D + H)` at each step, layer and direction, G = 4 (LSTM), 3 (GRU) or 1;
    - attention: its maps, and :math:`2 L S D` for scores and means; norms: one for each value;

    and anything else by the matrix products that torch is seen to run meanwhile. Compiled kernels outside torch are not
    seen. The modes of the parts are as before afterwards.

    Args:
        model: any network.
        inputs: a tensor or a tuple of what the model is called with; one item gives the cost an item.
        call: instead of ``model(*inputs)``, called with the model and the inputs.

    >>> cost_table(nn.LSTM(2, 3), torch.zeros(5, 1, 2)).rows[0].multiply_adds  # 5 steps of 4 * 3 * (2 + 3)
    300
    """
    inputs = inputs if type(inputs) in (tuple, list) else (inputs,)  # a packed sequence is a tuple too
    meter = _Meter(model)
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), meter.watching(), meter.products:
            (model if call is None else lambda *given: call(model, *given))(*inputs)
    finally:
        for part, training in modes.items():
            part.training = training
    return CostTable(tuple(meter.rows()))


@dataclass
class _Seen:
    """What was seen of a layer."""

    output: tuple[int, ...] = ()
    calls: int = 0
    bytes: int = 0
    formula: int | None = None
    products: int = 0


class _Products(TorchDispatchMode):
    """Counts multiply-adds of matrix products and convolutions for the module that is on top of the stack."""

    def __init__(self, add: Callable[[int], None]):
        super().__init__()
        self.add = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", None)
        name = str(packet)
        if packet in flop_registry:
            self.add(flop_registry[packet](*args, **(kwargs or {}), out_val=out) // 2)
        elif name in ("aten.mv", "aten.addmv", "aten.dot"):
            self.add(args[1 if name == "aten.addmv" else 0].numel())
        elif name == "aten._scaled_dot_product_flash_attention_for_cpu":
            query, key, value = args[:3]
            self.add(query.shape[:-1].numel() * key.shape[-2] * (key.shape[-1] + value.shape[-1]))
        return out


@dataclass
class _Meter:
    """Watches the calls of a model's parts."""

    model: nn.Module
    seen: dict[nn.Module, _Seen] = field(default_factory=dict)
    stack: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.products = _Products(self._add)
        self.layers: dict[nn.Module, str] = {}
        self.inner: dict[nn.Module, str] = {}
        hidden: set[nn.Module] = set()
        for name, part in self.model.named_modules():
            if part in hidden:
                continue
            if _is_layer(part):
                self.layers[part] = name
                hidden.update(list(part.modules())[1:])
            else:
                self.inner[part] = name

    def _add(self, count: int) -> None:
        part = self.stack[-1] if self.stack else self.model
        self.seen.setdefault(part, _Seen()).products += count

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for part in (*self.layers, *self.inner):
            handles.append(part.register_forward_pre_hook(self._enter))
            handles.append(part.register_forward_hook(self._leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, part: nn.Module, inputs: Any) -> None:
        self.stack.append(part)

    def _leave(self, part: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        self.stack.pop()
        seen = self.seen.setdefault(part, _Seen())
        seen.calls += 1
        if part not in self.layers:
            return
        tensors = list(_tensors(output))
        seen.output = tuple(tensors[0].shape) if tensors else ()
        seen.bytes += sum(t.numel() * t.element_size() for t in tensors)
        count = _multiply_adds(part, (*inputs, *named.values()), tensors)
        if count is not None:
            seen.formula = (seen.formula or 0) + count

    def rows(self) -> Iterator[LayerCost]:
        counted: set[nn.Parameter] = set()
        named = {**self.layers, **self.inner}
        order = [part for part in self.seen if part in named] + [part for part in named if part not in self.seen]
        found = []
        # Shared parameters belong to the first module that has them, whatever is called first.
        own = {part: self._own(part, counted) for part in named}
        for part in order:
            seen = self.seen.get(part, _Seen())
            trained, frozen = own[part]
            work = seen.products if seen.formula is None else seen.formula
            if not (trained or frozen or work) and (part in self.inner or isinstance(part, _NOTHING) or not seen.calls):
                continue
            kind = type(part).__name__.removeprefix("Parametrized").lstrip("_")
            kind = kind if part in self.layers else f"{kind} itself"
            found.append(
                LayerCost(named[part], kind, seen.output, trained, frozen, work, seen.bytes, seen.calls),
            )
        yield from found

    def _own(self, part: nn.Module, counted: set[nn.Parameter]) -> tuple[int, int]:
        """Trainable and frozen numbers that no module before has."""
        fresh = [p for p in part.parameters(recurse=part in self.layers) if p not in counted]
        counted.update(fresh)
        trained = sum(p.numel() for p in fresh if p.requires_grad)
        return trained, sum(p.numel() for p in fresh) - trained


def _is_layer(part: nn.Module) -> bool:
    children = [name for name, _ in part.named_children()]
    return (
        not children
        or isinstance(part, nn.MultiheadAttention)
        or (parametrize.is_parametrized(part) and children == ["parametrizations"])
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.utils.rnn.PackedSequence):
        yield value.data
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _tensors(each)


def _multiply_adds(part: nn.Module, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> int | None:
    """Of one call by formula; None for a layer without one."""
    given = list(_tensors(inputs))
    if not outputs or not given:
        return None
    values = outputs[0].numel()
    if isinstance(part, nn.modules.conv._ConvNd):
        size = math.prod(part.kernel_size)
        if part.transposed:
            return given[0].numel() * size * part.out_channels // part.groups
        return values * size * part.in_channels // part.groups
    if isinstance(part, nn.Linear):
        return values * part.in_features
    if isinstance(part, nn.Bilinear):
        return values * part.in1_features * (part.in2_features + 1)
    if isinstance(part, nn.RNNBase):
        return _recurrent(part, given[0])
    if isinstance(part, nn.RNNCellBase):
        return values * part.weight_ih.shape[0] // part.hidden_size * (part.input_size + part.hidden_size)
    if isinstance(part, nn.MultiheadAttention):
        return _attention(part, given, values)
    if isinstance(part, _NORMS):
        return values
    return 0 if isinstance(part, nn.Embedding | nn.EmbeddingBag) else None


def _recurrent(part: nn.RNNBase, data: Tensor) -> int:
    """(steps, B, D), (B, steps, D), (steps, D) or packed: as many row-steps as there are vectors of width D."""
    steps = data.numel() // part.input_size
    gates = {"LSTM": 4, "GRU": 3}.get(part.mode, 1)
    back = part.proj_size or part.hidden_size
    directions = 2 if part.bidirectional else 1
    total = 0
    for layer in range(part.num_layers):
        width = part.input_size if layer == 0 else back * directions
        total += gates * part.hidden_size * (width + back) + part.hidden_size * part.proj_size
    return steps * directions * total


def _attention(part: nn.MultiheadAttention, given: Sequence[Tensor], values: int) -> int:
    """Four maps, scores and means; ``values`` is B L D."""
    query, key, value = given[:3]
    D = part.embed_dim
    batched = query.dim() == 3
    S = key.shape[(1 if part.batch_first else 0) if batched else 0]
    keys, means = key.numel() // key.shape[-1], value.numel() // value.shape[-1]
    return 2 * values * D + keys * key.shape[-1] * D + means * value.shape[-1] * D + 2 * values * S


def _size(count: int) -> str:
    """Bytes in words: ``1.5 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return ""
