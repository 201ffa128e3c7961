r"""Losses of class energies by name, over batches whose images may be mixed.

Those that look at all classes take the energies F (B, C) as they are; those of pairs take the right class's energy and
those of all wrong ones, of which the most offending counts. Lower energy is better, E = -logit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, get_args

import torch
from torch import Tensor

from thalweg.learning import losses
from thalweg.learning.settings import ClassLossName, ClassTraining
from thalweg.limits import check_choice


class LabelledImages(Protocol):
    """A batch of images with their classes, as :class:`thalweg.data.images.batches.ImageBatch` is one."""

    @property
    def images(self) -> Tensor:
        """``(B, C, H, W)``."""
        ...

    @property
    def labels(self) -> Tensor:
        """``(B,)`` int64."""
        ...

    @property
    def mixed(self) -> tuple[Tensor, Tensor] | None:
        """The classes ``(B,)`` that were mixed in, and the weights ``(B,)`` of ``labels``; None where none was."""
        ...


def split_energies(energies: Tensor, gold: Tensor) -> tuple[Tensor, Tensor]:
    """The right class's energy, and those of the contrasts: +inf, no contrast, in the right class's place.

    Args:
        energies: ``(B, C)``.
        gold: ``(B,)`` int64.
    Returns:
        ``(B,)`` and ``(B, C)``.

    >>> split_energies(torch.tensor([[1.0, 2.0]]), torch.tensor([1]))
    (tensor([2.]), tensor([[1., inf]]))
    """
    own = gold.unsqueeze(1)
    return energies.gather(1, own).squeeze(1), energies.scatter(1, own, torch.inf)


def class_loss(
    name: ClassLossName,
    energies: Tensor,
    gold: Tensor,
    *,
    margin: float = 1.0,
    beta: float = 1.0,
    smoothing: float = 0.0,
) -> Tensor:
    r"""The loss of that name from :mod:`thalweg.learning.losses`, for class energies.

    Pair losses get the energy F of the right class and the contrast :math:`G = \min_{y' \ne y} E(x, y')`, the most
    offending one; with a single class there is none.

    Args:
        energies: ``(B, C)``, lower is better.
        gold: ``(B,)`` int64.
        margin: of ``hinge``, ``simple``, ``square_square`` and ``softmax_margin``.
        beta: inverse temperature of ``nll``, ``softmax_margin`` and ``mce``.
        smoothing: of ``nll``.
    Returns:
        ``(B,)``.

    >>> energies, gold = torch.tensor([[-1.0, 0.5, 3.0]]), torch.tensor([0])
    >>> class_loss("hinge", energies, gold, margin=2.0), class_loss("perceptron", energies, gold)
    (tensor([0.5000]), tensor([0.]))
    """
    whole: dict[str, Callable[[], Tensor]] = {
        "nll": lambda: (
            losses.label_smoothing(energies, gold, smoothing, beta) if smoothing else losses.nll(energies, gold, beta)
        ),
        "perceptron": lambda: losses.perceptron(energies, gold),
        "softmax_margin": lambda: losses.softmax_margin(energies, gold, margin, beta),
        "sparsemax": lambda: losses.fenchel_young(energies, gold, "sparsemax"),
        "entmax15": lambda: losses.fenchel_young(energies, gold, "entmax15"),
    }
    if name in whole:
        return whole[name]()
    check_choice("loss", name, get_args(ClassLossName))
    right, wrong = split_energies(energies, gold)
    pairs: dict[str, Callable[[], Tensor]] = {
        "hinge": lambda: losses.hinge(right, wrong, margin),
        "log": lambda: losses.log(right, wrong),
        "simple": lambda: losses.simple(right, wrong, margin),
        "square_square": lambda: losses.square_square(right, wrong, margin),
        "square_exponential": lambda: losses.square_exponential(right, wrong),
        "mce": lambda: losses.mce(right, wrong, beta),
    }
    return pairs[name]()


class ClassLoss:
    r"""What a classifier's training minimises, as the trainer asks for it.

    Of an image mixed with another, :math:`w x + (1 - w) x'`, the loss is :math:`w\, \ell(y) + (1 - w)\, \ell(y')`
    (Zhang et al., 2018).

    Args:
        config: names the loss and its settings.

    >>> from types import SimpleNamespace
    >>> batch = SimpleNamespace(images=torch.zeros(2, 3), labels=torch.tensor([0, 2]), mixed=None)
    >>> loss, terms = ClassLoss(ClassTraining(label_smoothing=0.0))(lambda images: images, batch)
    >>> round(float(loss), 4), terms
    (2.1972, 2)
    """

    def __init__(self, config: ClassTraining):
        self.config = config

    def __call__(
        self, model: Callable[[Tensor], Tensor], batch: LabelledImages, moment: object = None
    ) -> tuple[Tensor, int]:
        """Sum of the losses and their number, the same at every moment of a training."""
        energies = model(batch.images)
        loss = self.per_image(energies, batch.labels)
        if batch.mixed is not None:
            others, weight = batch.mixed
            loss = torch.lerp(self.per_image(energies, others), loss, weight.to(loss.dtype))
        return loss.sum(), energies.size(0)

    def per_image(self, energies: Tensor, gold: Tensor) -> Tensor:
        """``(B, C)`` and ``(B,)`` -> ``(B,)``.

        >>> ClassLoss(ClassTraining(loss="hinge")).per_image(torch.tensor([[0.0, 0.5]]), torch.tensor([0]))
        tensor([0.5000])
        """
        config = self.config
        return class_loss(
            config.loss,
            energies,
            gold,
            margin=config.loss_margin,
            beta=config.loss_beta,
            smoothing=config.label_smoothing,
        )
