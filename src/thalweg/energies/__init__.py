"""Models that give an energy E(x, y): low for good answers."""

from thalweg.energies.hmm import HMM, Prediction
from thalweg.energies.huggingface import ConvertedTransformer, GenerationRules, from_huggingface
from thalweg.energies.seq2seq import Seq2Seq, Seq2SeqConfig
from thalweg.energies.transformer import Transformer, TransformerConfig

__all__ = [
    "HMM",
    "ConvertedTransformer",
    "GenerationRules",
    "Prediction",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Transformer",
    "TransformerConfig",
    "from_huggingface",
]
