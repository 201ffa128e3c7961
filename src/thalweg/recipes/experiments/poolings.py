"""Ways to sum up a bag of instances in one vector, and the small network around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from thalweg.layers.hopfield.learned import HopfieldPooling
from thalweg.limits import check_choice


class MeanPooling(nn.Module):
    """The mean of the instances that are there: ``(B, M, D)``, absent ``(B, M)`` -> ``(B, D)``.

    >>> MeanPooling()(torch.ones(1, 3, 2), torch.tensor([[False, False, True]]))
    tensor([[1., 1.]])
    """

    def forward(self, instances: Tensor, absent: Tensor) -> Tensor:
        """The mean."""
        present = (~absent).unsqueeze(2).to(instances.dtype)
        return (instances * present).sum(1) / present.sum(1)


class MaxPooling(nn.Module):
    """The largest value of each feature over the instances that are there.

    >>> MaxPooling()(torch.tensor([[[1.0], [5.0]]]), torch.tensor([[False, True]]))
    tensor([[1.]])
    """

    def forward(self, instances: Tensor, absent: Tensor) -> Tensor:
        """The maximum."""
        return instances.masked_fill(absent.unsqueeze(2), -torch.inf).amax(1)


class GatedAttentionPooling(nn.Module):
    r"""Gated attention (Ilse, Tomczak and Welling, 2018), with one set of weights w or several, side by side.

    .. math:: a_i \propto \exp\big(w^\top (\tanh(V h_i) \odot \sigma(U h_i))\big), \qquad z = \sum_i a_i h_i

    >>> GatedAttentionPooling(4, 8)(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)).shape
    torch.Size([2, 4])
    """

    def __init__(self, size: int, hidden: int, sets: int = 1) -> None:
        super().__init__()
        self.tanh, self.gate, self.score = nn.Linear(size, hidden), nn.Linear(size, hidden), nn.Linear(hidden, sets)

    def forward(self, instances: Tensor, absent: Tensor) -> Tensor:
        """The weighted sums, one after the other."""
        scores = self.score(torch.tanh(self.tanh(instances)) * torch.sigmoid(self.gate(instances)))  # (B, M, H)
        weights = scores.masked_fill(absent.unsqueeze(2), -torch.inf).softmax(1)
        return (weights.mT @ instances).flatten(1)


class MemoryPooling(nn.Module):
    """The bag as a memory from which learned states read instances as they are.

    :class:`~thalweg.layers.HopfieldPooling` with a learned beta, without projections of values and output: like
    attention it gives sums of p_i h_i, and only how p is found differs.

    >>> pooling = MemoryPooling(4, states=2, separation="sparsemax", beta=0.1, steps=1)
    >>> pooling(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)).shape
    torch.Size([2, 8])
    """

    def __init__(self, size: int, *, states: int, separation: str, beta: float, steps: int) -> None:
        super().__init__()
        self.memory = HopfieldPooling(
            size,
            queries=states,
            separation=separation,
            beta=beta,
            learn_beta=True,
            steps=steps,
            static=("values", "output"),
            normalise=("stored", "state"),
        )

    def forward(self, instances: Tensor, absent: Tensor) -> Tensor:
        """What the states find, one after the other."""
        return self.memory(instances, key_padding_mask=absent)


def _memory(separation: str, steps: int) -> Callable[[int, int, float], nn.Module]:
    return lambda size, states, beta: MemoryPooling(size, states=states, separation=separation, beta=beta, steps=steps)


# By name: (width of an instance, number of states or sets of weights, first beta) -> module.
POOLINGS: dict[str, Callable[[int, int, float], nn.Module]] = {
    "mean": lambda size, states, beta: MeanPooling(),
    "max": lambda size, states, beta: MaxPooling(),
    "attention": lambda size, states, beta: GatedAttentionPooling(size, size),
    "attention, several sets": lambda size, states, beta: GatedAttentionPooling(size, size, states),
    "memory, softmax": _memory("softmax", 1),
    "memory, softmax, 3 steps": _memory("softmax", 3),
    "memory, entmax15": _memory("entmax15", 1),
    "memory, entmax15, 3 steps": _memory("entmax15", 3),
    "memory, sparsemax": _memory("sparsemax", 1),
    "memory, sparsemax, 3 steps": _memory("sparsemax", 3),
}


def make_pooling(name: str, size: int, states: int, beta: float) -> nn.Module:
    """One of ``POOLINGS``.

    >>> make_pooling("mean", 4, 1, 0.1)
    MeanPooling()
    """
    check_choice("pooling", name, POOLINGS)
    return POOLINGS[name](size, states, beta)


class BagClassifier(nn.Module):
    """Images are encoded one by one, pooled by bag, and the pooled vector is given a logit.

    >>> model = BagClassifier("mean", inputs=64, width=8, states=1, beta=0.1)
    >>> model(torch.randn(5, 64), torch.tensor([[0, 1, -1], [4, 4, 2]])).shape
    torch.Size([2])
    """

    def __init__(self, pooling: str, *, inputs: int, width: int, states: int, beta: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())
        self.pooling = make_pooling(pooling, width, states, beta)
        with torch.no_grad():
            pooled = self.pooling(torch.zeros(1, 1, width), torch.zeros(1, 1, dtype=torch.bool))
        self.logit = nn.Linear(pooled.size(1), 1)

    def forward(self, images: Tensor, bags: Tensor) -> Tensor:
        """``images (N, inputs)``, ``bags (B, M)`` of their indices with -1 past the end of a bag -> ``(B,)``.

        An image that is in several bags is encoded once.
        """
        absent = bags < 0
        instances = self.encoder(images)[bags.clamp(min=0)]  # (B, M, D)
        return self.logit(self.pooling(instances, absent)).squeeze(1)
