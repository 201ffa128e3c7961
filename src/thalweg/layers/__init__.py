"""Building blocks of energies: recurrent stacks, attention, dropout, padded sequences."""

from thalweg.layers.attention import Attention, AttentionScore, Memory
from thalweg.layers.dropout import Dropout
from thalweg.layers.padded import Padded
from thalweg.layers.recurrent import Cell, Recurrent, ResetBeforeGRU

__all__ = ["Attention", "AttentionScore", "Cell", "Dropout", "Memory", "Padded", "Recurrent", "ResetBeforeGRU"]
