"""Losses of class energies: each name against its formula, gradients, mixed images, edges."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from oracles import losses as oracle
from thalweg.errors import ConfigError
from thalweg.learning import losses
from thalweg.learning.losses.classes import ClassLoss, class_loss, split_energies
from thalweg.learning.settings import CLASS_METRICS, ClassLossName, ClassTraining

NAMES = get_args(ClassLossName)
MARGIN, BETA, SMOOTHING = 0.7, 1.3, 0.2


def expected(name, row, y):
    """The loss of one image by its formula; pair losses see the lowest wrong class."""
    g = min((f for k, f in enumerate(row) if k != y), default=math.inf)
    costs = [0.0 if k == y else MARGIN for k in range(len(row))]
    pairs = {
        "hinge": lambda: oracle.hinge(row[y], g, MARGIN),
        "log": lambda: oracle.log(row[y], g),
        "simple": lambda: oracle.simple(row[y], g, MARGIN),
        "square_square": lambda: oracle.square_square(row[y], g, MARGIN),
        "square_exponential": lambda: oracle.square_exponential(row[y], g, 1.0),
        "mce": lambda: oracle.mce(row[y], g, BETA),
    }
    whole = {
        "nll": lambda: oracle.label_smoothing(row, y, SMOOTHING, BETA),
        "perceptron": lambda: oracle.perceptron(row, y),
        "softmax_margin": lambda: oracle.softmax_margin(row, y, costs, BETA),
        "sparsemax": lambda: oracle.sparsemax_loss(row, y),
    }
    found = (pairs | whole)[name]()
    return found[0] if isinstance(found, tuple) else found


def batch_of(seed=0, B=7, C=4):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(B, C, generator=generator, dtype=torch.float64), torch.arange(B) % C


@pytest.mark.parametrize("name", [name for name in NAMES if name != "entmax15"])
def test_every_loss_is_its_formula(name):
    energies, gold = batch_of()
    found = class_loss(name, energies, gold, margin=MARGIN, beta=BETA, smoothing=SMOOTHING)
    wanted = [expected(name, row, y) for row, y in zip(energies.tolist(), gold.tolist(), strict=True)]
    assert found.shape == (7,)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    # The oracle can fail: another class is another loss.
    other = [expected(name, row, (y + 1) % 4) for row, y in zip(energies.tolist(), gold.tolist(), strict=True)]
    assert not torch.allclose(found, torch.tensor(other, dtype=torch.float64))


def test_entmax_is_fenchel_young():
    energies, gold = batch_of()
    assert torch.equal(class_loss("entmax15", energies, gold), losses.fenchel_young(energies, gold, "entmax15"))


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name):
    energies, gold = batch_of(3, B=3)
    energies.requires_grad_()
    options = {"margin": MARGIN, "beta": BETA, "smoothing": SMOOTHING}
    assert torch.autograd.gradcheck(lambda e: class_loss(name, e, gold, **options), (energies,))


@pytest.mark.parametrize("name", NAMES)
def test_a_single_class_and_no_images(name):
    one = torch.tensor([[0.5], [-0.5]], requires_grad=True)
    loss = class_loss(name, one, torch.zeros(2, dtype=torch.long))
    assert torch.isfinite(loss).all()
    loss.sum().backward()
    assert torch.isfinite(one.grad).all()
    assert class_loss(name, torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_the_right_class_is_no_contrast():
    right, wrong = split_energies(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1]))
    assert right.tolist() == [2.0]
    assert wrong.tolist() == [[1.0, math.inf, 3.0]]


@pytest.mark.parametrize("name", NAMES)
def test_mixed_images_have_mixed_losses(name):
    energies, gold = batch_of(1)
    others, weight = gold.flip(0), torch.linspace(0, 1, 7, dtype=torch.float64)
    config = ClassTraining(loss=name, loss_margin=MARGIN, loss_beta=BETA, label_smoothing=SMOOTHING)
    objective = ClassLoss(config)
    batch = SimpleNamespace(images=energies, labels=gold, mixed=(others, weight))
    total, terms = objective(lambda images: images, batch, 1.0)
    one, two = objective.per_image(energies, gold), objective.per_image(energies, others)
    assert terms == 7
    torch.testing.assert_close(total, (weight * one + (1 - weight) * two).sum())
    plain, _ = objective(lambda images: images, SimpleNamespace(images=energies, labels=gold, mixed=None))
    torch.testing.assert_close(plain, one.sum())


def test_half_precision_is_computed_in_single():
    energies, gold = batch_of()
    assert class_loss("nll", energies.bfloat16(), gold).dtype == torch.float32


def test_unknown_names_are_told():
    with pytest.raises(ConfigError, match="did you mean `hinge`"):
        class_loss("hing", torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
    for settings, said in (
        ({"loss": "hing"}, "training.loss `hing` is not known; did you mean `hinge`"),
        ({"metric": "cer"}, "training.metric `cer` is not known"),
        ({"mixup": -1.0}, "training.mixup must be 0 or more"),
        ({"loss_beta": 0.0}, "training.loss_beta must be above 0"),
        ({"loss_margin": math.nan}, "training.loss_margin must be 0 or more"),
        ({"checkpoint_seconds": -1.0}, "training.checkpoint_seconds must be 0 or more"),
    ):
        with pytest.raises(ConfigError, match=said.replace("`", "`")):
            ClassTraining(**settings)
    for metric in CLASS_METRICS:
        assert ClassTraining(metric=metric).metric == metric
