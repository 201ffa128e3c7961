"""Building blocks of energies: recurrent and Transformer stacks, attention, dropout, padding, random fields."""

from thalweg.layers.attention import ATTENTION_MAPS, Attention, AttentionScore, Memory, attention_map
from thalweg.layers.blocks import Chained, Connection, Highway, Residual, connected
from thalweg.layers.convolution import (
    ConvHighway,
    Dense,
    DropPath,
    Separable,
    SqueezeExcite,
    connected_maps,
    image_norm,
)
from thalweg.layers.crf import CRF, KBest
from thalweg.layers.dropout import Dropout
from thalweg.layers.hopfield.convert import from_attention, from_hflayers
from thalweg.layers.hopfield.layer import Hopfield, HopfieldOptions
from thalweg.layers.hopfield.learned import HopfieldLookup, HopfieldPooling
from thalweg.layers.hopfield.separation_maps import (
    SEPARATIONS,
    ChainMarginals,
    ChainSparseMAP,
    Entmax,
    KSubsets,
    NormMax,
    Separation,
    Softmax,
    separation,
)
from thalweg.layers.low_precision import Precision, ReducedLinear, reduce_precision
from thalweg.layers.multihead import Attended, CrossAttention, SelfAttention, mean_weights
from thalweg.layers.norms import (
    POSITIONWISE,
    BatchNorm,
    InstanceNorm,
    Norm,
    Normalisation,
    normalisation,
    normalise_weights,
)
from thalweg.layers.padded import Padded
from thalweg.layers.plain_recurrence import ActivationPlace, Initialisation, PlainRecurrence, initialise
from thalweg.layers.pointer import Pointer
from thalweg.layers.positions import feature_positions, rotate
from thalweg.layers.recurrent import Cell, Recurrent, ResetBeforeGRU
from thalweg.layers.recurrent_blocks import RecurrentBlock, RecurrentBlocks
from thalweg.layers.semi_crf import BestSegments, SemiCRF
from thalweg.layers.sparse import (
    entmax,
    entmax15,
    entmax15_loss,
    entmax_loss,
    k_subsets,
    k_subsets_loss,
    normmax,
    sparsemax,
    sparsemax_loss,
)
from thalweg.layers.transformer import Activation, FeedForward, NormPlace, Stacked, TransformerLayer, TransformerStack

__all__ = [
    "ATTENTION_MAPS",
    "CRF",
    "POSITIONWISE",
    "SEPARATIONS",
    "Activation",
    "ActivationPlace",
    "Attended",
    "Attention",
    "AttentionScore",
    "BatchNorm",
    "BestSegments",
    "Cell",
    "ChainMarginals",
    "ChainSparseMAP",
    "Chained",
    "Connection",
    "ConvHighway",
    "CrossAttention",
    "Dense",
    "DropPath",
    "Dropout",
    "Entmax",
    "FeedForward",
    "Highway",
    "Hopfield",
    "HopfieldLookup",
    "HopfieldOptions",
    "HopfieldPooling",
    "Initialisation",
    "InstanceNorm",
    "KBest",
    "KSubsets",
    "Memory",
    "Norm",
    "NormMax",
    "NormPlace",
    "Normalisation",
    "Padded",
    "PlainRecurrence",
    "Pointer",
    "Precision",
    "Recurrent",
    "RecurrentBlock",
    "RecurrentBlocks",
    "ReducedLinear",
    "ResetBeforeGRU",
    "Residual",
    "SelfAttention",
    "SemiCRF",
    "Separable",
    "Separation",
    "Softmax",
    "SqueezeExcite",
    "Stacked",
    "TransformerLayer",
    "TransformerStack",
    "attention_map",
    "connected",
    "connected_maps",
    "entmax",
    "entmax15",
    "entmax15_loss",
    "entmax_loss",
    "feature_positions",
    "from_attention",
    "from_hflayers",
    "image_norm",
    "initialise",
    "k_subsets",
    "k_subsets_loss",
    "mean_weights",
    "normalisation",
    "normalise_weights",
    "normmax",
    "reduce_precision",
    "rotate",
    "separation",
    "sparsemax",
    "sparsemax_loss",
]
