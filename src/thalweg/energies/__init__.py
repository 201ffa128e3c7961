"""Models that give an energy E(x, y): low for good answers."""

from thalweg.energies.aligner.model import AlignedPair, AlignerConfig, ChunkAligner
from thalweg.energies.convnet.config import ConvNetConfig
from thalweg.energies.convnet.model import ConvNet
from thalweg.energies.densities import (
    MLPEnergy,
    draw_points,
    grid_log_partition,
    grid_points,
)
from thalweg.energies.estimator import Estimator
from thalweg.energies.hmm.emissions import CategoricalEmission, Emission, Trouble
from thalweg.energies.hmm.gaussian import GaussianEmission
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
from thalweg.energies.kernel_machine.certificate import Condition, KKTReport, PairReport, certify, certify_regression
from thalweg.energies.kernel_machine.classification import KernelSVC
from thalweg.energies.kernel_machine.features import Features, Fisher
from thalweg.energies.kernel_machine.functions import Kernel, Normalised, Prepared, Product, Scaled, Sum
from thalweg.energies.kernel_machine.gram import check_gram, gram
from thalweg.energies.kernel_machine.machine import KernelMachine
from thalweg.energies.kernel_machine.regression import KernelSVR
from thalweg.energies.kernel_machine.solver import Dual, solve_dual
from thalweg.energies.kernel_machine.strings import Spectrum, Subsequence
from thalweg.energies.kernel_machine.vectors import RBF, Linear, Polynomial, kernel_named
from thalweg.energies.latent import Answers, BranchEnergy, LatentEnergy, free_energy
from thalweg.energies.mixture.model import DegenerateComponentWarning, GaussianMixture
from thalweg.energies.monotonic.model import Monotonic, MonotonicConfig
from thalweg.energies.pretrained.config import PretrainedConfig
from thalweg.energies.pretrained.model import Pretrained
from thalweg.energies.score_space import ScoreSpace, fisher_vector
from thalweg.energies.selection import Choice, choose_size
from thalweg.energies.seq2seq.model import Seq2Seq, Seq2SeqConfig
from thalweg.energies.tagger import LinearTagger
from thalweg.energies.transformer.config import TransformerConfig
from thalweg.energies.transformer.generation import GenerationRules
from thalweg.energies.transformer.huggingface import ConvertedTransformer, from_huggingface
from thalweg.energies.transformer.model import Transformer
from thalweg.energies.variational.config import VAEConfig, VAETraining
from thalweg.energies.variational.model import VAE

__all__ = [
    "HMM",
    "RBF",
    "VAE",
    "AlignedPair",
    "AlignerConfig",
    "Answers",
    "BranchEnergy",
    "CategoricalEmission",
    "Choice",
    "ChunkAligner",
    "Condition",
    "ConvNet",
    "ConvNetConfig",
    "ConvertedTransformer",
    "DegenerateComponentWarning",
    "Dual",
    "Emission",
    "Estimator",
    "ExactRetrieval",
    "Features",
    "Fisher",
    "FixedPoints",
    "GaussianEmission",
    "GaussianMixture",
    "GenerationRules",
    "HopfieldMemory",
    "KKTReport",
    "Kernel",
    "KernelMachine",
    "KernelSVC",
    "KernelSVR",
    "LatentEnergy",
    "Linear",
    "LinearTagger",
    "MLPEnergy",
    "MemoryReport",
    "MixtureEmission",
    "Monotonic",
    "MonotonicConfig",
    "Nearest",
    "Normalised",
    "PairReport",
    "PatternStore",
    "Polynomial",
    "PostTransform",
    "Prepared",
    "Pretrained",
    "PretrainedConfig",
    "Product",
    "Retrieval",
    "Scaled",
    "ScoreSpace",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Spectrum",
    "Subsequence",
    "Sum",
    "Transformer",
    "TransformerConfig",
    "Trouble",
    "VAEConfig",
    "VAETraining",
    "analyse_memory",
    "certify",
    "certify_regression",
    "check_gram",
    "choose_size",
    "classify_states",
    "draw_points",
    "exact_retrieval",
    "fisher_vector",
    "fixed_points",
    "free_energy",
    "from_huggingface",
    "gram",
    "grid_log_partition",
    "grid_points",
    "kernel_named",
    "left_to_right",
    "margin",
    "pattern_separation",
    "post_transform",
    "solve_dual",
]
