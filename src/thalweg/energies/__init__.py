"""Models that give an energy E(x, y): low for good answers."""

from thalweg.energies.convnet.model import ConvNet, ConvNetConfig
from thalweg.energies.densities import (
    GaussianEnergy,
    MLPEnergy,
    draw_points,
    grid_log_partition,
    grid_points,
)
from thalweg.energies.estimator import Estimator
from thalweg.energies.hmm.emissions import CategoricalEmission, Emission, Trouble
from thalweg.energies.hmm.gaussian import GaussianEmission
from thalweg.energies.hmm.inference import Prediction
from thalweg.energies.hmm.mixture import MixtureEmission
from thalweg.energies.hmm.model import HMM
from thalweg.energies.hmm.states import left_to_right
from thalweg.energies.hopfield.analysis import (
    ExactRetrieval,
    MemoryReport,
    analyse_memory,
    exact_retrieval,
    margin,
    pattern_separation,
)
from thalweg.energies.hopfield.fixed_points import FixedPoints, classify_states, fixed_points
from thalweg.energies.hopfield.memory import HopfieldMemory, Retrieval
from thalweg.energies.hopfield.post import PostTransform, post_transform
from thalweg.energies.hopfield.storage import Nearest, PatternStore
from thalweg.energies.latent import Answers, BranchEnergy, CircleEnergy, LatentEnergy, free_energy
from thalweg.energies.mixture.model import DegenerateComponentWarning, GaussianMixture
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.model import Pretrained
from thalweg.energies.score_space import ScoreSpace, fisher_kernel, fisher_vector
from thalweg.energies.selection import Choice, choose_size
from thalweg.energies.seq2seq.model import Seq2Seq, Seq2SeqConfig
from thalweg.energies.transformer.generation import GenerationRules
from thalweg.energies.transformer.huggingface import ConvertedTransformer, from_huggingface
from thalweg.energies.transformer.model import Transformer, TransformerConfig
from thalweg.energies.variational.config import VAEConfig, VAETraining
from thalweg.energies.variational.model import VAE

__all__ = [
    "HMM",
    "VAE",
    "Answers",
    "BranchEnergy",
    "CategoricalEmission",
    "Choice",
    "CircleEnergy",
    "ConvNet",
    "ConvNetConfig",
    "ConvertedTransformer",
    "DegenerateComponentWarning",
    "Emission",
    "Estimator",
    "ExactRetrieval",
    "FixedPoints",
    "GaussianEmission",
    "GaussianEnergy",
    "GaussianMixture",
    "GenerationRules",
    "HopfieldMemory",
    "LatentEnergy",
    "MLPEnergy",
    "MemoryReport",
    "MixtureEmission",
    "Nearest",
    "PatternStore",
    "PostTransform",
    "Prediction",
    "Pretrained",
    "PretrainedConfig",
    "Retrieval",
    "ScoreSpace",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Transformer",
    "TransformerConfig",
    "Trouble",
    "VAEConfig",
    "VAETraining",
    "analyse_memory",
    "choose_size",
    "classify_states",
    "draw_points",
    "exact_retrieval",
    "fisher_kernel",
    "fisher_vector",
    "fixed_points",
    "free_energy",
    "from_huggingface",
    "grid_log_partition",
    "grid_points",
    "left_to_right",
    "margin",
    "pattern_separation",
    "post_transform",
]
