"""Building blocks of energies: recurrent stacks, attention, dropout, padded sequences, conditional random fields."""

from thalweg.layers.attention import Attention, AttentionScore, Memory
from thalweg.layers.crf import CRF, KBest
from thalweg.layers.dropout import Dropout
from thalweg.layers.padded import Padded
from thalweg.layers.recurrent import Cell, Recurrent, ResetBeforeGRU

__all__ = [
    "CRF",
    "Attention",
    "AttentionScore",
    "Cell",
    "Dropout",
    "KBest",
    "Memory",
    "Padded",
    "Recurrent",
    "ResetBeforeGRU",
]
