"""Which pixels a class energy depends on, and what the layers of an image network see.

All maps are of the score s(x) = -E(x, y) of one class y for each image: above 0 where a pixel speaks for the class.
Models are run in evaluation mode, in which the images of a batch do not see one another, and are left as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from thalweg.energies.convnet.model import ConvNet
from thalweg.errors import ConfigError, ShapeError


def smooth_gradient(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    noise: float = 0.15,
    samples: int = 25,
    seed: int = 0,
) -> Tensor:
    r"""SmoothGrad: the mean gradient over noisy copies of an image (Smilkov et al., 2017).

    .. math:: \frac1n \sum_{i=1}^n \frac{\partial s}{\partial x}\Big|_{x + \epsilon_i}, \qquad
              \epsilon_i \sim N(0, \sigma^2), \quad \sigma = \text{noise} \cdot (\max x - \min x)

    Args:
        model: images ``(B, C, H, W)`` to energies ``(B, classes)``.
        images: normalised, as the model takes them.
        classes: ``(B,)``; the predicted ones where not given.
        noise: standard deviation as a share of each image's range; 0 gives the plain gradient (Simonyan et al., 2014).
        samples: n; seed: of the noise.
    Returns:
        ``(B, C, H, W)``. Time: n passes.

    >>> linear = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    >>> grads = smooth_gradient(linear, torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 1]))
    >>> torch.allclose(grads[0].flatten(), -linear[1].weight[0])
    True
    """
    if samples < 1 or not 0 <= noise < float("inf"):
        raise ConfigError(f"`samples` must be at least 1 and `noise` 0 or more, got {samples} and {noise}")
    generator = torch.Generator(device=images.device).manual_seed(seed)
    flat = images.flatten(1)
    empty = not flat.numel()
    spread = noise * (flat.new_zeros(len(flat)) if empty else flat.amax(1) - flat.amin(1)).view(-1, 1, 1, 1)
    with _still(model):
        classes = _classes(model, images, classes)
        total = torch.zeros_like(images)
        for _ in range(samples):
            drawn = torch.randn(images.shape, generator=generator, dtype=images.dtype, device=images.device)
            total += _gradient(model, images + spread * drawn, classes)
    return total / samples


def integrated_gradients(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    baseline: Tensor | None = None,
    steps: int = 50,
) -> Tensor:
    r"""Attributions that add up to the change of the score from a baseline to the image (Sundararajan et al., 2017).

    .. math:: a = (x - x') \odot \int_0^1 \frac{\partial s}{\partial x}\Big|_{x' + t (x - x')} dt,
              \qquad \sum a = s(x) - s(x')

    The integral is taken by Gauss and Legendre's rule, exact for scores that are polynomials of degree ``2 steps``
    along the way; for networks with kinks more steps come closer.

    Args:
        baseline: ``(C, H, W)`` or ``(B, C, H, W)``; 0 where not given, the mean colour of normalised images.
        steps: points of the way.
    Returns:
        ``(B, C, H, W)``. Time: ``steps`` passes.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> images, classes = torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 1])
    >>> change = (model(torch.zeros_like(images)) - model(images)).gather(1, classes[:, None])[:, 0]
    >>> torch.allclose(integrated_gradients(model, images, classes).sum((1, 2, 3)), change, atol=1e-5)
    True
    """
    if steps < 1:
        raise ConfigError(f"`steps` must be at least 1, got {steps}; 50 is usual")
    start = torch.zeros_like(images) if baseline is None else baseline.to(images).expand_as(images)
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    with _still(model):
        classes = _classes(model, images, classes)
        total = torch.zeros_like(images)
        for node, weight in zip(nodes, weights, strict=True):
            total += float(weight) / 2 * _gradient(model, torch.lerp(start, images, float(node + 1) / 2), classes)
    return (images - start) * total


def grad_cam(model: ConvNet, images: Tensor, classes: Tensor | None = None, *, upsample: bool = True) -> Tensor:
    r"""Grad-CAM: where the last maps of a network speak for a class (Selvaraju et al., 2017).

    .. math:: M_{ij} = \max\Big(0, \sum_k \alpha_k A_{kij}\Big), \qquad
              \alpha_k = \frac{1}{HW} \sum_{ij} \frac{\partial s}{\partial A_{kij}}

    Args:
        upsample: to the size of the images, bilinearly; else the size of the maps A.
    Returns:
        ``(B, H, W)``, 0 or more. Time: one pass forth, and back through the head alone.

    >>> from thalweg.energies.convnet.config import ConvNetConfig
    >>> model = ConvNet(ConvNetConfig(channels=(4, 8), hidden=()), classes=3, channels=1, size=(8, 8))
    >>> grad_cam(model, torch.rand(2, 1, 8, 8)).shape, grad_cam(model, torch.rand(2, 1, 8, 8), upsample=False).shape
    (torch.Size([2, 8, 8]), torch.Size([2, 2, 2]))
    """
    with _still(model):
        classes = _classes(model, images, classes)
        with torch.enable_grad():
            maps = model.maps(images).detach().requires_grad_()
            scores = model.classifier(model.head(maps)).gather(1, classes[:, None]).sum()
            (grads,) = torch.autograd.grad(scores, maps)
        found = (grads.mean((2, 3), keepdim=True) * maps.detach()).sum(1, keepdim=True).relu()
    if upsample and found.numel():
        found = nn.functional.interpolate(found, size=images.shape[2:], mode="bilinear", align_corners=False)
    return found[:, 0] if found.numel() else found.new_zeros(len(images), *images.shape[2:])


def heat(attributions: Tensor, *, quantile: float = 0.99) -> Tensor:
    """Attributions ``(B, C, H, W)`` or ``(B, H, W)`` as pictures ``(B, H, W)`` in [0, 1].

    Absolute values are added up over channels and divided by each image's ``quantile``, so that a few pixels do not
    leave the others dark.

    >>> heat(torch.tensor([[[[0.0, -2.0], [4.0, 1.0]]]]), quantile=1.0)
    tensor([[[0.0000, 0.5000],
             [1.0000, 0.2500]]])
    """
    if attributions.dim() not in (3, 4):
        raise ShapeError(f"`attributions` must be (B, C, H, W) or (B, H, W), got {tuple(attributions.shape)}")
    if not 0 < quantile <= 1:
        raise ConfigError(f"`quantile` must be in (0, 1], got {quantile}; 0.99 is usual")
    values = attributions.abs()
    values = values.sum(1) if values.dim() == 4 else values
    if not values.numel():
        return values
    top = values.flatten(1).quantile(quantile, dim=1).clamp(min=torch.finfo(values.dtype).tiny)
    return (values / top.view(-1, 1, 1)).clamp(max=1)


def feature_maps(model: ConvNet, images: Tensor) -> dict[str, Tensor]:
    """What the stem and each block make of images: name to ``(B, C', H', W')``; one pass forth.

    >>> from thalweg.energies.convnet.config import ConvNetConfig
    >>> model = ConvNet(ConvNetConfig(channels=(4, 8), hidden=()), classes=3, channels=1, size=(8, 8))
    >>> {name: tuple(maps.shape) for name, maps in feature_maps(model, torch.rand(2, 1, 8, 8)).items()}
    {'block 1': (2, 4, 4, 4), 'block 2': (2, 8, 2, 2)}
    """
    found: dict[str, Tensor] = {}

    def keep(name: str):
        def hook(part: nn.Module, inputs: object, output: Tensor) -> None:
            found[name] = output.detach()

        return hook

    parts = {"stem": model.stem} if model.config.stem else {}
    parts |= {f"block {number}": block for number, block in enumerate(model.blocks, 1)}
    handles = [part.register_forward_hook(keep(name)) for name, part in parts.items()]
    try:
        with _still(model), torch.no_grad():
            model.maps(images)
    finally:
        for handle in handles:
            handle.remove()
    return found


def first_filters(model: nn.Module) -> Tensor:
    """The kernels ``(C', C, K, K)`` of a network's first convolution, as they are used; a copy.

    >>> first_filters(nn.Sequential(nn.Conv2d(3, 8, 5))).shape
    torch.Size([8, 3, 5, 5])
    """
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            return part.weight.detach().clone()
    raise ConfigError(f"the model must have a convolution, got {type(model).__name__} without one")


@contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; each part's own mode afterwards."""
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def _classes(model: nn.Module, images: Tensor, classes: Tensor | None) -> Tensor:
    if images.dim() != 4 or not images.is_floating_point():
        raise ShapeError(f"`images` must be (B, C, H, W) floats, got {tuple(images.shape)} of {images.dtype}")
    if classes is None:
        with torch.no_grad():
            return model(images).argmin(-1)
    if classes.shape != images.shape[:1]:
        raise ShapeError(f"`classes` must be ({len(images)},), one for each image, got {tuple(classes.shape)}")
    return classes.to(images.device)


def _gradient(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    with torch.enable_grad():
        images = images.detach().requires_grad_()
        score = -model(images).gather(1, classes[:, None]).sum()
        (found,) = torch.autograd.grad(score, images)
    return found
