"""Why an image network trains or does not: all that can be measured on a batch."""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thalweg.data.image_batches import ImageBatch
from thalweg.diagnostics.gradient_flow import gradient_flow
from thalweg.diagnostics.map_use import channel_use, layer_stretches, norm_use, run_layers
from thalweg.diagnostics.normalisation import NormalisationReport, compare_normalisations
from thalweg.diagnostics.places import map_layers
from thalweg.diagnostics.saturation import saturation
from thalweg.energies.convnet import ConvNet
from thalweg.errors import DataError
from thalweg.learning.class_losses import ClassLoss
from thalweg.tasks.diagnosing import Diagnosis, ImageLook, Reading, train_a_little
from thalweg.tasks.image_subjects import ImageSubject

__all__ = ["diagnose_images"]

# Images on which dead units, channels and losses are counted, since a unit that rests on a few may work on others; and
# how many pixels they may have together.
LOOKED, PIXELS = 256, 1 << 18
# Images of a step of training on a copy: decay and the length of steps need no more.
STEP = 64
# Images whose Jacobians are taken.
ROWS = 2


def diagnose_images(subject: ImageSubject, *, rows: int = 32, steps: int = 8) -> Diagnosis:
    """Measure all that applies to an image network.

    Gradients are those of training, with the statistics of the batch in batch norms, without dropout. All else is
    measured of the network as it predicts: a trained one has its running statistics, a fresh one, which has none yet,
    those of the batch. Dead units, channels and the loss are counted on up to 256 images.

    Args:
        rows: images of the batch, at least 2.
        steps: of training on a copy, at the config's learning rate, for updates and decay.

    >>> diagnose_images.__name__
    'diagnose_images'
    """
    if len(subject.split) < 2:
        raise DataError(f"{subject.data}: expected at least 2 images to look at, got {len(subject.split)}; give more")
    few = PIXELS // subject.split.images[0, 0].numel()
    wide = next(subject.batches(max(rows, min(LOOKED, few))).iterate(0))
    batch = ImageBatch(wide.images[:rows], wide.labels[:rows], wide.rows[:rows])
    loss = ClassLoss(subject.config.training)

    def mean_loss(model: nn.Module, images: ImageBatch) -> Tensor:
        whole, count = loss(lambda x: -run_layers(cast(ConvNet, model), x)[-1], images)
        return whole / count

    flow = gradient_flow(_learning(subject.model), lambda m: mean_loss(m, batch))
    model = copy.deepcopy(subject.model).eval() if subject.trained else _settled(subject.model, wide.images)
    gates = saturation(model, lambda _: run_layers(model, wide.images))
    reading, accuracy = _reading(model, wide)
    look = ImageLook(
        channel_use(model, wide.images),
        layer_stretches(model, batch.images[:ROWS]),
        norm_use(model, lambda _: run_layers(model, wide.images)),
        accuracy,
    )
    norms = _norms(model, batch.images)
    training = subject.config.training
    batches = subject.batches(min(STEP, training.batch_size), training.seed)
    decay, flow = train_a_little(subject, flow, batches, mean_loss, steps)
    sizes = (batch.size, batch.images.shape[2], batch.images.shape[3])
    return Diagnosis(subject, sizes, flow, (), (), gates, decay, norms, reading, flow.norm, look)


def _learning(model: ConvNet) -> ConvNet:
    """A copy whose batch norms take the statistics of the batch; nothing is dropped."""
    model = copy.deepcopy(model).eval()
    for part in model.modules():
        if isinstance(part, _BatchNorm):
            part.train()
    return model


def _settled(model: ConvNet, images: Tensor) -> ConvNet:
    """A copy whose running statistics are those of these images."""
    model = _learning(model)
    for part in model.modules():
        if isinstance(part, _BatchNorm):
            part.momentum = 1.0
    with torch.no_grad():
        run_layers(model, images)
    return model.eval()


def _reading(model: ConvNet, batch: ImageBatch) -> tuple[Reading, float]:
    """Losses with each image's own class and with another's, and the share of images that are right."""
    with torch.no_grad():
        logits = run_layers(model, batch.images)[-1].double()
        log_probs = torch.log_softmax(logits, 1)
        own, other = (
            -float(log_probs.gather(1, labels.unsqueeze(1)).mean()) for labels in (batch.labels, batch.labels.roll(1))
        )
    accuracy = float((log_probs.argmax(1) == batch.labels).double().mean())
    counts = torch.bincount(batch.labels).double()
    shares = counts[counts > 0] / counts.sum()
    return Reading(own, other, float(-(shares * shares.log()).sum())), accuracy


def _norms(model: ConvNet, images: Tensor) -> dict[str, NormalisationReport]:
    """What norms would measure on the last layer of each stack, the logits left out."""
    with torch.no_grad():
        outputs = run_layers(model, images)
    last = {layer.stack: x for layer, x in zip(map_layers(model)[:-1], outputs, strict=False)}
    reports = {}
    for stack, x in last.items():
        rows = compare_normalisations(
            x.flatten(2).transpose(1, 2) if x.dim() == 4 else x, schemes=("batch", "instance")
        )
        # Layer norm of maps is over all channels and positions of an image, not over those of a position.
        whole = compare_normalisations(x.flatten(1), schemes=("layer",))
        reports[stack] = NormalisationReport((rows.rows[0], whole.rows[0], *(rows.rows[1:] if x.dim() == 4 else ())))
    return reports
