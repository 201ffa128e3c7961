"""Random changes of images that keep their class, on whole batches at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from thalweg.errors import ConfigError, ShapeError
from thalweg.limits import SIDE

# Uniform numbers that one image takes: flip, crop (2), brightness, contrast, saturation, angle, zoom, cutout (2).
DRAWS = 10

# The largest zoom, which leaves a hundredth of each side.
_ZOOM = 99


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Which random changes an image goes through, in this order; zero turns one off.

    Attributes:
        flip: mirror left and right with probability 1/2.
        crop: shift by up to so many pixels each way; what comes in mirrors the border.
        rotate: turn about the centre by up to so many degrees each way (bilinear, mirrored border).
        scale: zoom about the centre by a factor from ``1 / (1 + scale)`` to ``1 + scale``.
        colour: multiply brightness, contrast and saturation each by a factor from ``1 - colour`` to ``1 + colour``.
        cutout: paint over a square of so many pixels a side, about any pixel (DeVries and Taylor, 2017).

    >>> Augmentation(crop=2).active
    True
    >>> Augmentation(colour=2.0)
    Traceback (most recent call last):
        ...
    thalweg.errors.ConfigError: `colour` of the augmentation must be from 0 to 1, got 2.0
    """

    flip: bool = True
    crop: int = 4
    rotate: float = 0.0
    scale: float = 0.0
    colour: float = 0.0
    cutout: int = 0

    def __post_init__(self) -> None:
        most = {"crop": SIDE, "cutout": SIDE, "rotate": 180, "scale": _ZOOM, "colour": 1}
        for name, high in most.items():
            value = getattr(self, name)
            # A comparison with NaN is false either way, so it fails here too.
            if not 0 <= value <= high:
                raise ConfigError(f"`{name}` of the augmentation must be from 0 to {high:g}, got {value}")
            if name in ("crop", "cutout") and value != int(value):
                raise ConfigError(f"`{name}` of the augmentation must be a whole number of pixels, got {value}")

    @property
    def active(self) -> bool:
        """Whether it changes anything."""
        return bool(self.flip or self.crop or self.rotate or self.scale or self.colour or self.cutout)


def augment(
    images: Tensor, config: Augmentation, draws: Tensor, *, fill: Tensor | Sequence[float] | float = 0.5
) -> Tensor:
    r"""Every image changed in its own way.

    Args:
        images: ``(B, C, H, W)``, uint8 or floating point in [0, 1], on any device.
        draws: ``(B, DRAWS)`` random numbers in [0, 1); column by column ``u``: flip where ``u < 1/2``; shift down and
            right by :math:`\lfloor u (2 p + 1) \rfloor - p` pixels with p the crop; brightness, contrast, saturation by
            :math:`1 + c (2 u - 1)`; the angle :math:`a (2 u - 1)`; the zoom :math:`(1 + s)^{2 u - 1}`; the row and
            column of the cutout's centre :math:`\lfloor u H \rfloor, \lfloor u W \rfloor`.
        fill: the colour of the cutout, in [0, 1]: one number or ``(C,)``.
    Returns:
        ``(B, C, H, W)`` in [0, 1], of the type of ``images``, float32 for uint8. Time and memory O(B C H W).

    The pixel at (i, j) comes from :math:`c + R (q - c) / z + d`, where q is (i, j), or (i, W - 1 - j) in a flipped
    image, c the centre, R the rotation, z the zoom and d the shift; past the border, from its mirror image.

    >>> draws = torch.full((1, DRAWS), 0.25)
    >>> augment(torch.tensor([[[[0.0, 0.5, 1.0]]]]), Augmentation(crop=0), draws)
    tensor([[[[1.0000, 0.5000, 0.0000]]]])
    """
    if images.ndim != 4:
        raise ShapeError(f"`images` must be (B, C, H, W), got {tuple(images.shape)}")
    if draws.shape != (len(images), DRAWS):
        raise ShapeError(f"`draws` must be ({len(images)}, {DRAWS}), got {tuple(draws.shape)}")
    draws = draws.to(images.device, non_blocking=True)
    if config.rotate or config.scale:
        moved = _warp(_unit(images), config, draws)
    elif config.flip or config.crop:
        moved = _unit(_shift(images, config, draws))  # whole pixels move as they are: bytes cost a quarter
    else:
        moved = _unit(images)
    if config.colour:
        moved = _recolour(moved, 1 + config.colour * (2 * draws[:, 3:6].to(moved.dtype) - 1))
    if config.cutout:
        moved = _cut_out(moved, config.cutout, draws[:, 8:10], fill)
    return moved


def normalisation_of(mean: Tensor, std: Tensor, *, in_bytes: bool) -> tuple[Tensor, Tensor]:
    """What to multiply every channel by and then to add, each ``(C, 1, 1)``, so that it is (image - mean) / std.

    Args:
        mean, std: ``(C,)``, in units of [0, 1], as :func:`thalweg.data.channel_statistics` gives them; a channel that
            never varies is only centred.
        in_bytes: whether images are uint8, which counts as 1/255 each.

    >>> normalisation_of(torch.tensor([0.5]), torch.tensor([0.25]), in_bytes=False)
    (tensor([[[4.]]]), tensor([[[-2.]]]))
    """
    centre, spread = mean[:, None, None], std[:, None, None]
    spread = torch.where(spread > 0, spread, 1.0)
    return 1 / (255 * spread if in_bytes else spread), -centre / spread


def _unit(images: Tensor) -> Tensor:
    return images if images.is_floating_point() else images * (1 / 255)


def _offsets(u: Tensor, crop: int) -> Tensor:
    return (u * (2 * crop + 1)).long() - crop


def _mirror(place: Tensor, size: int) -> Tensor:
    """Indices beyond 0..size-1 reflected at the border pixels, which are not repeated."""
    if size == 1:
        return torch.zeros_like(place)
    place = place.remainder(2 * (size - 1))
    return torch.minimum(place, 2 * (size - 1) - place)


def _shift(images: Tensor, config: Augmentation, draws: Tensor) -> Tensor:
    """Flip and crop as one gather."""
    B, C, H, W = images.shape
    rows = torch.arange(H, device=images.device).expand(B, H)
    columns = torch.arange(W, device=images.device).expand(B, W)
    if config.flip:
        columns = torch.where(draws[:, :1] < 0.5, W - 1 - columns, columns)
    if config.crop:
        rows = _mirror(rows + _offsets(draws[:, 1:2], config.crop), H)
        columns = _mirror(columns + _offsets(draws[:, 2:3], config.crop), W)
    place = (rows[:, :, None] * W + columns[:, None, :]).view(B, 1, H * W)
    return images.reshape(B, C, H * W).gather(2, place.expand(B, C, H * W)).view(B, C, H, W)


def _warp(images: Tensor, config: Augmentation, draws: Tensor) -> Tensor:
    """Flip, crop, rotation and zoom as one bilinear sampling."""
    B, _, H, W = images.shape
    dtype, device = images.dtype, images.device
    angle = math.radians(config.rotate) * (2 * draws[:, 6] - 1)
    inverse = (1 + config.scale) ** (1 - 2 * draws[:, 7])
    cosine, sine = (angle.cos() * inverse).view(B, 1, 1).to(dtype), (angle.sin() * inverse).view(B, 1, 1).to(dtype)
    y = (torch.arange(H, device=device, dtype=dtype) - (H - 1) / 2).view(1, H, 1)
    x = (torch.arange(W, device=device, dtype=dtype) - (W - 1) / 2).view(1, 1, W)
    if config.flip:
        x = torch.where((draws[:, 0] < 0.5).view(B, 1, 1), -x, x)
    down, right = (_offsets(draws[:, n], config.crop).view(B, 1, 1) for n in (1, 2))
    source_y, source_x = cosine * y + sine * x + down, cosine * x - sine * y + right
    # With aligned corners -1 and 1 are the centres of the outermost pixels, and reflection does not repeat them.
    grid = torch.stack([source_x / max((W - 1) / 2, 0.5), source_y / max((H - 1) / 2, 0.5)], -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=True)


def _grey(images: Tensor) -> Tensor:
    """Luma of RGB (ITU-R BT.601), the mean of any other channels: ``(B, 1, H, W)``."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.split(1, dim=1)
    # Plain numbers: a tensor of them would have to cross over to the device, which waits for all that is under way.
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _recolour(images: Tensor, factors: Tensor) -> Tensor:
    """Brightness, then contrast about the mean grey, then saturation about each pixel's grey."""
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind(1)
    images = (images * brightness).clamp_(0, 1)
    centre = _grey(images).mean((2, 3), keepdim=True)
    images = torch.lerp(centre, images, contrast).clamp_(0, 1)
    return torch.lerp(_grey(images), images, saturation).clamp_(0, 1)


def _cut_out(images: Tensor, side: int, draws: Tensor, fill: Tensor | Sequence[float] | float) -> Tensor:
    H, W = images.shape[2:]
    top, left = (draws[:, :1] * H).long() - side // 2, (draws[:, 1:] * W).long() - side // 2
    y, x = torch.arange(H, device=images.device), torch.arange(W, device=images.device)
    in_rows = (y >= top) & (y < top + side)
    in_columns = (x >= left) & (x < left + side)
    hole = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
    colour = torch.as_tensor(fill, dtype=images.dtype, device=images.device).reshape(-1, 1, 1)
    return torch.where(hole, colour, images)
