"""The parameters of a mixture as a person gives them, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.energies.mixture.covariances import SHAPES
from thalweg.errors import ConfigError, ShapeError, nearest


def check_shape(name: Any) -> str:
    """The name of one of the four shapes of covariances.

    >>> check_shape("diag")
    Traceback (most recent call last):
    ...
    thalweg.errors.ConfigError: `covariance_type` 'diag' is not known; did you mean `diagonal`?
    """
    if not isinstance(name, str) or name not in SHAPES:
        raise ConfigError(f"`covariance_type` {name!r} is not known; {nearest(str(name), SHAPES)}")
    return name


def read_given(
    shape: str, N: int | None, D: int | None, *, weights: Any = None, means: Any = None, covariances: Any = None
) -> dict[str, Tensor]:
    """What is given of the three, as tensors of one type on one device, those of ``means`` where it is given.

    Args:
        shape: of the covariances.
        N, D: components and dimensions, where they are known; those of ``means`` must be these.
        weights: ``(N,)``, above 0; scaled to sum 1.
        means: ``(N, D)``.
        covariances: in their shape, positive definite; for ``spherical`` a number too.

    >>> read_given("spherical", None, None, means=[[0.0], [1.0]], covariances=0.5)["covariances"]
    tensor([0.5000, 0.5000])
    """
    found = {name: _tensor(name, value) for name, value in
             (("means", means), ("weights", weights), ("covariances", covariances)) if value is not None}  # fmt: skip
    if "means" in found:
        N, D = _check_means(found["means"], N, D)
    like = next(iter(found.values()), torch.zeros(()))
    found = {name: value.to(like) for name, value in found.items()}
    if "weights" in found:
        found["weights"] = _shares(found["weights"], N)
    if "covariances" in found and N is not None and D is not None:
        found["covariances"] = _checked(found["covariances"], shape, N, D)
    return found


def _tensor(name: str, value: Any) -> Tensor:
    try:
        # Torch shares no array that may not be written to.
        tensor = torch.as_tensor(value.copy() if isinstance(value, np.ndarray) else value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise ShapeError(f"`{name}` must be numbers: a tensor, an array or lists, got {type(value).__name__}") from None
    if tensor.is_complex() or tensor.layout is not torch.strided or tensor.dtype is torch.bool:
        raise ShapeError(f"`{name}` must be dense real numbers, got {tensor.dtype} {tensor.layout}")
    tensor = tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
    if not bool(tensor.isfinite().all()):
        raise ShapeError(f"`{name}` must be finite, got NaN or infinity")
    return tensor


def _check_means(means: Tensor, N: int | None, D: int | None) -> tuple[int, int]:
    if means.dim() != 2 or not means.numel():
        raise ShapeError(f"`means` must be (N, D), got {tuple(means.shape)}")
    for letter, size, wanted in zip("ND", means.shape, (N, D), strict=True):
        if wanted is not None and size != wanted:
            what = "as in `n_components`" if letter == "N" else "as in X"
            raise ShapeError(f"`means` must be (N, D) with {letter} = {wanted} {what}, got {tuple(means.shape)}")
    return means.size(0), means.size(1)


def _shares(weights: Tensor, N: int | None) -> Tensor:
    if N is not None and weights.shape != (N,):
        raise ShapeError(f"`weights` must be (N,) with N = {N}, got {tuple(weights.shape)}")
    if weights.dim() != 1 or not bool((weights > 0).all()):
        raise ConfigError("`weights` must be (N,) and above 0; leave out components without weight")
    return weights / weights.sum()


def _checked(covariances: Tensor, shape: str, N: int, D: int) -> Tensor:
    wanted = SHAPES[shape].shape(N, D)
    if shape == "spherical" and not covariances.dim():
        covariances = covariances.expand(wanted)
    if covariances.shape != wanted:
        letters = {"full": "(N, D, D)", "tied": "(D, D)", "diagonal": "(N, D)", "spherical": "(N,) or a number"}
        raise ShapeError(
            f"`covariances` must be {letters[shape]} for {shape} ones with N = {N} and D = {D}, "
            f"got {tuple(covariances.shape)}"
        )
    if shape in ("full", "tied"):
        if not torch.allclose(covariances, covariances.mT, rtol=1e-4, atol=1e-6):
            raise ConfigError("`covariances` must be symmetric")
        covariances = (covariances + covariances.mT) / 2
    if not bool(SHAPES[shape].factors(covariances).isfinite().all()):
        kind = "positive definite" if shape in ("full", "tied") else "above 0"
        raise ConfigError(f"`covariances` must be {kind}; add a small number to the variances")
    return covariances
