"""Models whose linear layers keep their weights in fewer bits, for inference on the CPU."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError
from thalweg.kernels import dispatch, on_cpu
from thalweg.kernels.tracing import traced
from thalweg.limits import check_choice

Precision = Literal["int8", "bf16"]
"""``int8``: 8 bits and a scale for every output; ``bf16``: float32 without its lower 16 bits."""

MANY_ROWS = 33  # from here on int8 products are faster than a pass over restored weights
FEW_ROWS = 64  # up to here weights are read as they are stored; with more the matrix library is as fast


@cache
def _multiplies_int8() -> bool:
    """Whether this build of PyTorch has integer matrix products that take plain tensors and give float32."""
    try:
        packed = torch.ops.onednn.qlinear_prepack(torch.full((4, 8), 127, dtype=torch.int8), None)
        x = torch.full((2, 8), 127, dtype=torch.uint8)
        return bool((_int8_product(x, 1.0, 0, packed, torch.ones(4), None) == 8 * 127 * 127).all())
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


def _takes_int8(rows: Tensor) -> bool:
    """Whether integers may stand for these rows: no gradient is asked for, and the product is there."""
    tracked = rows.requires_grad and torch.is_grad_enabled()
    return not tracked and rows.dtype == torch.float32 and on_cpu(rows) and _multiplies_int8()


def _int8_product(x: Tensor, step: float, zero: int, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """(x - zero) W^T * step * scale + bias for x (R, in) of uint8 and packed weights; (R, out) float32."""
    offsets = torch.zeros(len(scale), dtype=torch.int64)
    return torch.ops.onednn.qlinear_pointwise(
        *(x, step, zero, packed, scale, offsets, bias, 1.0, 0, torch.float32, "none", [], "")
    )


class ReducedLinear(nn.Module):
    r"""y = x W^T + b with W stored as ``int8`` or ``bf16``; inputs, outputs and bias are float32.

    ``int8`` stores :math:`Q_{ni} = \mathrm{round}(W_{ni} / s_n)` with :math:`s_n = \max_i |W_{ni}| / 127`. A few rows
    are multiplied by Q as they are, with float32 sums. Many rows are rounded to 7 bits of the range that they have
    together (with 8, processors without dot products of bytes overflow), so that integers are multiplied throughout.
    ``bf16`` rounds weights to 8 significant bits and restores them exactly, for many rows before the product.

    Args:
        layer: what to copy; float32 on the CPU.
        kind: ``int8`` or ``bf16``.

    >>> layer = nn.Linear(16, 4)
    >>> x = torch.randn(3, 16)
    >>> bool((ReducedLinear(layer, "bf16")(x) - layer(x)).abs().max() < 0.05)
    True
    """

    stored: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, kind: Precision):
        super().__init__()
        _check_kind(kind)
        weight = layer.weight.detach()
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise ConfigError(
                f"reduced precision needs float32 weights on the CPU, got {weight.dtype} on {weight.device}; "
                "use model.float().cpu()"
            )
        if not weight.isfinite().all():
            raise ConfigError("reduced precision needs finite weights, got NaN or infinities")
        self.kind, self.in_features, self.out_features = kind, layer.in_features, layer.out_features
        scale = None
        if kind == "int8":
            scale = weight.abs().amax(1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
            stored = (weight / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        else:
            stored = weight.to(torch.bfloat16)
        self.register_buffer("stored", stored.contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
        self._packed: Any = None  # what the integer product reads; made when first needed
        self.register_load_state_dict_post_hook(_forget_packed)

    @property
    def weight(self) -> Tensor:
        """The weights restored to float32, (out, in)."""
        weight = self.stored.float()
        return weight if self.scale is None else weight * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """``x (..., in)`` -> ``(..., out)``."""
        if x.shape[-1] != self.in_features:
            raise ShapeError(f"inputs must be (..., {self.in_features}), got {tuple(x.shape)}")
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        y = None
        if self.scale is not None and len(rows) >= MANY_ROWS and _takes_int8(rows):
            y = self._multiply(rows)
        if y is None:
            y = self._read(rows)
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _read(self, rows: Tensor) -> Tensor:
        """The product with float32 sums: a few rows by the weights as they are stored, others after restoring them."""
        numbers = [x for x in (rows, self.bias, self.scale) if x is not None]
        plain = all(x.dtype is torch.float32 and on_cpu(x) for x in numbers)
        tracked = traced() or (torch.is_grad_enabled() and any(x.requires_grad for x in numbers))
        few = 0 < len(rows) <= FEW_ROWS and self.stored.dtype in (torch.int8, torch.bfloat16)
        kernels: Any = dispatch.search_kernels(self.stored.device) if few and plain and not tracked else None
        if kernels is None:
            return nn.functional.linear(rows, self.weight.to(rows.dtype), self.bias)
        return kernels.linear(rows, self.stored, self.bias, self.scale)

    def _multiply(self, rows: Tensor) -> Tensor | None:
        """The integer product; none where the rows have no finite range."""
        assert self.scale is not None
        low, high = (float(bound) for bound in torch.aminmax(rows))
        low, high = min(low, 0.0), max(high, 0.0)
        step = (high - low) / 127
        if not torch.finfo(torch.float32).tiny < step < torch.finfo(torch.float32).max:  # also NaN
            return None
        zero = round(-low / step)
        if self._packed is None:
            self._packed = torch.ops.onednn.qlinear_prepack(self.stored, None)
        numbers = (rows * (1 / step)).add_(zero).round_().clamp_(0, 127).to(torch.uint8)
        return _int8_product(numbers, step, zero, self._packed, self.scale, self.bias)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # opaque to copies and files; made again when needed

    def extra_repr(self) -> str:
        """For ``print``: sizes and kind."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind!r}"


def _forget_packed(layer: Any, _: Any) -> None:
    layer._packed = None  # belongs to the weights before


def _check_kind(kind: str) -> None:
    check_choice("precision", kind, get_args(Precision))


def reduce_precision(module: nn.Module, kind: Precision) -> nn.Module:
    """A copy of a model for inference on the CPU whose linear layers are :class:`ReducedLinear`.

    Embeddings, norms, recurrent cells, attention and softmax stay float32. An output matrix tied to an embedding is
    stored by itself in fewer bits; the embedding keeps its own. The copy is in evaluation mode, and its weights take
    no gradient. The model itself is not changed.

    It saves memory: linear weights take a quarter (``int8``) or a half (``bf16``). Time it saves little without
    processor instructions for short numbers: some for a few rows at once, and, with ``int8``, for hundreds. What it
    costs in accuracy must be measured on the model at hand.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    >>> reduce_precision(model, "int8")[0]
    ReducedLinear(in_features=8, out_features=8, kind='int8')
    """
    _check_kind(kind)
    # Subclasses may be read by other means than a call, as those inside nn.MultiheadAttention are.
    if not any(type(part) is nn.Linear for part in module.modules()):
        raise ConfigError(
            f"reduced precision needs a model with linear layers, got {type(module).__name__} without any"
        )
    if type(module) is nn.Linear:
        return ReducedLinear(module, kind).eval()
    # Made before the copy, so that one layer that stands in two places stays one.
    made = {id(part): ReducedLinear(part, kind) for part in module.modules() if type(part) is nn.Linear}
    result = copy.deepcopy(module, memo=dict(made))
    return result.requires_grad_(False).eval()
