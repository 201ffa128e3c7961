"""Building blocks of energies: recurrent and Transformer stacks, attention, dropout, padding, random fields."""

from thalweg.layers.attention import Attention, AttentionScore, Memory
from thalweg.layers.crf import CRF, KBest
from thalweg.layers.dropout import Dropout
from thalweg.layers.multihead import Attended, CrossAttention, SelfAttention, mean_weights
from thalweg.layers.padded import Padded
from thalweg.layers.pointer import Pointer
from thalweg.layers.positions import feature_positions, rotary_table, rotate, sinusoidal_table
from thalweg.layers.recurrent import Cell, Recurrent, ResetBeforeGRU
from thalweg.layers.reduced import Precision, ReducedLinear, reduce_precision
from thalweg.layers.transformer import Activation, FeedForward, NormPlace, Stacked, TransformerLayer, TransformerStack

__all__ = [
    "CRF",
    "Activation",
    "Attended",
    "Attention",
    "AttentionScore",
    "Cell",
    "CrossAttention",
    "Dropout",
    "FeedForward",
    "KBest",
    "Memory",
    "NormPlace",
    "Padded",
    "Pointer",
    "Precision",
    "Recurrent",
    "ReducedLinear",
    "ResetBeforeGRU",
    "SelfAttention",
    "Stacked",
    "TransformerLayer",
    "TransformerStack",
    "feature_positions",
    "mean_weights",
    "reduce_precision",
    "rotary_table",
    "rotate",
    "sinusoidal_table",
]
