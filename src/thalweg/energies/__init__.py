"""Models that give an energy E(x, y): low for good answers."""

from thalweg.energies.convnet.model import ConvNet, ConvNetConfig
from thalweg.energies.densities import (
    GaussianEnergy,
    MixtureEnergy,
    MLPEnergy,
    draw_points,
    grid_log_partition,
    grid_points,
)
from thalweg.energies.hmm.emissions import CategoricalEmission, Emission, Trouble
from thalweg.energies.hmm.gaussian import GaussianEmission
from thalweg.energies.hmm.inference import Prediction
from thalweg.energies.hmm.mixture import MixtureEmission
from thalweg.energies.hmm.model import HMM
from thalweg.energies.hmm.selection import StateChoice, choose_states
from thalweg.energies.hmm.states import left_to_right
from thalweg.energies.hopfield.analysis import (
    ExactRetrieval,
    MemoryReport,
    analyse_memory,
    exact_retrieval,
    margin,
    pattern_separation,
    retrieval_bound,
)
from thalweg.energies.hopfield.fixed_points import FixedPoints, classify_states, fixed_points
from thalweg.energies.hopfield.memory import HopfieldMemory, Retrieval
from thalweg.energies.hopfield.post import PostTransform, post_transform
from thalweg.energies.hopfield.storage import Nearest, PatternStore
from thalweg.energies.latent import Answers, BranchEnergy, CircleEnergy, LatentEnergy, free_energy
from thalweg.energies.seq2seq.model import Seq2Seq, Seq2SeqConfig
from thalweg.energies.transformer.huggingface import ConvertedTransformer, GenerationRules, from_huggingface
from thalweg.energies.transformer.model import Transformer, TransformerConfig

__all__ = [
    "HMM",
    "Answers",
    "BranchEnergy",
    "CategoricalEmission",
    "CircleEnergy",
    "ConvNet",
    "ConvNetConfig",
    "ConvertedTransformer",
    "Emission",
    "ExactRetrieval",
    "FixedPoints",
    "GaussianEmission",
    "GaussianEnergy",
    "GenerationRules",
    "HopfieldMemory",
    "LatentEnergy",
    "MLPEnergy",
    "MemoryReport",
    "MixtureEmission",
    "MixtureEnergy",
    "Nearest",
    "PatternStore",
    "PostTransform",
    "Prediction",
    "Retrieval",
    "Seq2Seq",
    "Seq2SeqConfig",
    "StateChoice",
    "Transformer",
    "TransformerConfig",
    "Trouble",
    "analyse_memory",
    "choose_states",
    "classify_states",
    "draw_points",
    "exact_retrieval",
    "fixed_points",
    "free_energy",
    "from_huggingface",
    "grid_log_partition",
    "grid_points",
    "left_to_right",
    "margin",
    "pattern_separation",
    "post_transform",
    "retrieval_bound",
]
