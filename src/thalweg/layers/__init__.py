"""Building blocks of energies: recurrent stacks, attention, padded sequences."""

from thalweg.layers.attention import Attention, AttentionScore
from thalweg.layers.padded import Padded
from thalweg.layers.recurrent import Cell, Recurrent, ResetBeforeGRU

__all__ = ["Attention", "AttentionScore", "Cell", "Padded", "Recurrent", "ResetBeforeGRU"]
