"""Normalisation by name: batch, layer, instance, root mean square and weight, over padded sequences too."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from thalweg.errors import ConfigError, ShapeError
from thalweg.limits import check_choice

Norm = Literal["none", "batch", "layer", "instance", "rms", "weight"]
"""Kinds of normalisation; ``weight`` acts on matrices (:func:`normalise_weights`), the others on activations."""

# At inference these look at one position alone, so that a decoder may use them step by step; ``instance`` does not.
POSITIONWISE = frozenset({"none", "batch", "layer", "rms", "weight"})


class Normalisation(nn.Module):
    r"""Normalises the D features of ``(B, D)`` or ``(B, T, D)`` and scales and shifts them by learnt numbers.

    .. math:: y = \gamma \odot \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta

    where mean and (population) variance are taken over

    - ``batch``: all real positions of all items, for each feature; kept as running statistics for inference (Ioffe and
      Szegedy, 2015);
    - ``layer``: the features, at each position (Ba et al., 2016);
    - ``instance``: the real positions of an item, for each item and feature (Ulyanov et al., 2016);
    - ``rms``: as ``layer`` with no mean taken off and no shift (Zhang and Sennrich, 2019);
    - ``none`` and ``weight``: nothing; y = x.

    With a mask, whatever stands in the padding (NaN included) changes nothing, and y is 0 there. The modules are
    torch's own; only sums over masked positions are taken here, in float32 at least, in O(B T D).
    :func:`normalisation` builds one.

    >>> norm = normalisation("instance", 1)
    >>> x = torch.tensor([[[1.0], [3.0], [9.0]]])
    >>> norm(x, torch.tensor([[True, True, False]])).flatten().round(decimals=2).tolist()
    [-1.0, 1.0, 0.0]
    """

    def __init__(self, name: Norm, features: int, layer: nn.Module):
        super().__init__()
        self.name: Norm = name
        self.features, self.layer = features, layer

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x (B, D)`` or ``(B, T, D)``, ``mask`` bool of x's shape without D, true at real places -> as x."""
        if x.dim() not in (2, 3) or x.shape[-1] != self.features:
            D = self.features
            raise ShapeError(f"`x` must be (B, {D}) or (B, T, {D}) as the norm was built, got {tuple(x.shape)}")
        if mask is not None and mask.shape != x.shape[:-1]:
            raise ShapeError(f"`mask` must be {tuple(x.shape[:-1])} as `x` without features, got {tuple(mask.shape)}")
        if isinstance(self.layer, BatchNorm | InstanceNorm):
            return self.layer(x, mask)
        if mask is None or isinstance(self.layer, nn.Identity):
            return self.layer(x)
        # Both ways: else a NaN in the padding times a gradient of 0 would reach the scale's gradient.
        real = mask.unsqueeze(-1)
        return torch.where(real, self.layer(torch.where(real, x, 0)), 0)

    def extra_repr(self) -> str:
        """Name and width, for ``print(model)``."""
        return f"{self.name}, {self.features}"


class BatchNorm(nn.BatchNorm1d):
    """Torch's batch norm with features last and a mask; statistics of real positions alone.

    While training, the running mean and (unbiased) variance follow those of the batches as torch's do; a batch without
    real positions leaves them as they are. A single real position has variance 0 and becomes the shift.

    >>> norm = BatchNorm(1, momentum=1.0)
    >>> _ = norm(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
    >>> norm.running_mean, norm.running_var
    (tensor([2.]), tensor([2.]))
    >>> norm.eval()(torch.tensor([[[2.0]]])).item()
    0.0
    """

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """``input (B, D)`` or ``(B, T, D)``, ``mask`` of its shape without D -> as the input."""
        rows = input.reshape(-1, input.shape[-1])
        learning = self.training or self.running_mean is None
        if mask is None and (not learning or len(rows) > 1):
            return super().forward(rows).view(input.shape)
        real = torch.ones_like(rows[:, :1], dtype=torch.bool) if mask is None else mask.reshape(-1, 1)
        if learning:
            mean, variance, count = _moments(rows, real, 0)
            self._follow(mean.detach(), variance.detach(), count)
        else:
            assert self.running_mean is not None
            assert self.running_var is not None
            mean, variance = self.running_mean, self.running_var
        return _standardised(rows, real, mean, variance, self).view(input.shape)

    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share: Any = 1 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
        share = (count.squeeze() > 0).to(mean.dtype) * share
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for kept, now in ((self.running_mean, mean), (self.running_var, unbiased)):
            kept.lerp_(now.view_as(kept).to(kept.dtype), share.to(kept.dtype))


class InstanceNorm(nn.Module):
    """Instance norm with features last and a mask: each feature over the real positions of its item.

    An item with a single real position has variance 0 and becomes the shift: nothing of it is left.

    >>> InstanceNorm(1)(torch.tensor([[[1.0], [3.0]], [[4.0], [8.0]]])).flatten().round(decimals=2).tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """

    def __init__(self, features: int, *, eps: float = 1e-5, affine: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(features)) if affine else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x (B, T, D)``, or ``(B, D)`` as one position each, ``mask`` of its shape without D -> as x."""
        items = x.unsqueeze(1) if x.dim() == 2 else x
        if mask is None and items.shape[1] > 1 and x.numel():
            flipped = items.transpose(1, 2)  # (B, D, T), torch's order
            return nn.functional.instance_norm(flipped, None, None, self.weight, self.bias, eps=self.eps).transpose(
                1, 2
            )
        real = torch.ones_like(items[..., :1], dtype=torch.bool) if mask is None else mask.view(*items.shape[:2], 1)
        mean, variance, _ = _moments(items, real, 1)
        return _standardised(items, real, mean, variance, self).view(x.shape)


def _moments(x: Tensor, real: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and population variance over ``dim`` where ``real``, and how many that is; 0 where there are none."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = torch.where(real, x, 0).to(wide)
    count = real.sum(dim, keepdim=True).to(wide)
    mean = x.sum(dim, keepdim=True) / count.clamp(min=1)
    away = torch.where(real, x - mean, 0)
    return mean, away.square().sum(dim, keepdim=True) / count.clamp(min=1), count


def _standardised(x: Tensor, real: Tensor, mean: Tensor, variance: Tensor, norm: BatchNorm | InstanceNorm) -> Tensor:
    """Scaled and shifted where ``real``, 0 elsewhere, in x's own type."""
    y = (torch.where(real, x, 0).to(mean.dtype) - mean) * torch.rsqrt(variance + norm.eps)
    if norm.weight is not None and norm.bias is not None:
        y = y * norm.weight + norm.bias
    return torch.where(real, y, 0).to(x.dtype)


def normalisation(name: Norm, features: int, *, eps: float = 1e-5, affine: bool = True, momentum: float | None = 0.1):
    """The :class:`Normalisation` of that name over D features.

    Args:
        name: ``none``, ``batch``, ``layer``, ``instance``, ``rms`` or ``weight``. The last is the identity here:
            what it normalises are the matrices before, by :func:`normalise_weights`.
        eps: added to the variance.
        affine: with a learnt scale and shift.
        momentum: of ``batch``: share of a batch in the running statistics; None takes the mean of all batches.

    >>> normalisation("layer", 2, eps=0.0)(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.,  1.]], grad_fn=<NativeLayerNormBackward0>)
    >>> normalisation("bach", 2)
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: normalisation `bach` is not known; did you mean `batch`?
    """
    check_choice("normalisation", name, get_args(Norm))
    if features < 1:
        raise ConfigError(f"a normalisation must have at least 1 feature, got {features}; give the width of its input")
    layer: nn.Module = nn.Identity()
    if name == "batch":
        layer = BatchNorm(features, eps=eps, momentum=momentum, affine=affine)
    elif name == "layer":
        layer = nn.LayerNorm(features, eps=eps, elementwise_affine=affine)
    elif name == "rms":
        layer = nn.RMSNorm(features, eps=eps, elementwise_affine=affine)
    elif name == "instance":
        layer = InstanceNorm(features, eps=eps, affine=affine)
    return Normalisation(name, features, layer)


def normalise_weights(module: nn.Module) -> nn.Module:
    r"""Weight normalisation of every matrix in a module, in place: rows become :math:`g_i u_i / \|u_i\|`.

    Torch's own parametrisation (Salimans and Kingma, 2016): ``original0`` holds the lengths g, ``original1`` the
    directions u; the module computes what it did before until they are trained. Linear, convolutional and recurrent
    layers all take it, torch's ``nn.LSTM`` and ``nn.GRU`` too; embeddings, norms and biases are left alone. The norm
    of each row is taken again at every call, O(size of the matrices).

    >>> layer = normalise_weights(nn.Linear(3, 2, bias=False))
    >>> {name: tuple(p.shape) for name, p in layer.named_parameters()}
    {'parametrizations.weight.original0': (2, 1), 'parametrizations.weight.original1': (2, 3)}
    """
    from torch.nn.utils import parametrizations, parametrize

    for part in list(module.modules()):
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, parametrize.ParametrizationList)):
            continue
        own = part.named_parameters(recurse=False)
        matrices = [name for name, p in own if p.dim() > 1 and not name.startswith("bias")]
        for name in matrices:
            parametrizations.weight_norm(part, name)
        if matrices and isinstance(part, nn.RNNBase):
            part.register_forward_pre_hook(_refresh)
            part.register_forward_hook(_release)
    return module


def _refresh(module: nn.Module, inputs: object) -> None:
    """Torch's recurrent layers read a list that is made once; here the matrices are new at every call."""
    assert isinstance(module, nn.RNNBase)
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _release(module: nn.Module, inputs: object, outputs: object) -> None:
    """The list must not hold the graph longer than the call: it would keep memory, and copying would fail."""
    assert isinstance(module, nn.RNNBase)
    module._flat_weights = [weight.detach() for weight in module._flat_weights if weight is not None]
