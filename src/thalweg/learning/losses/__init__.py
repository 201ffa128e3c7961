"""What teaches: functions of energies, each returning (B,); lower energy is better everywhere."""

from thalweg.learning.losses.energies import (
    Over,
    fenchel_young,
    gibbs,
    hinge,
    label_smoothing,
    log,
    mce,
    nll,
    perceptron,
    risk,
    sequence_nll,
    simple,
    softmax_margin,
    square_exponential,
    square_square,
    structured_hinge,
)

__all__ = [
    "Over",
    "fenchel_young",
    "gibbs",
    "hinge",
    "label_smoothing",
    "log",
    "mce",
    "nll",
    "perceptron",
    "risk",
    "sequence_nll",
    "simple",
    "softmax_margin",
    "square_exponential",
    "square_square",
    "structured_hinge",
]
