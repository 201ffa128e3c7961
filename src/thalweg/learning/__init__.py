"""What teaches: losses, optimisers and schedules, the trainer, checkpoints."""

from thalweg.learning import losses
from thalweg.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from thalweg.learning.losses import contrasts, densities
from thalweg.learning.losses import structured as structured_losses
from thalweg.learning.losses.classes import ClassLoss, class_loss
from thalweg.learning.losses.sequences import SequenceLoss
from thalweg.learning.optimisers import Decayed, build_optimiser, decay_groups
from thalweg.learning.settings import ClassTraining, Moment, TrainerConfig, TrainingConfig
from thalweg.learning.structural_svm.solver import DualState, GapPoint, StructuralSVM
from thalweg.learning.trainer import Trainer

__all__ = [
    "Checkpoint",
    "ClassLoss",
    "ClassTraining",
    "Decayed",
    "DualState",
    "GapPoint",
    "Moment",
    "SequenceLoss",
    "StructuralSVM",
    "Trainer",
    "TrainerConfig",
    "TrainingConfig",
    "build_optimiser",
    "class_loss",
    "contrasts",
    "decay_groups",
    "densities",
    "load_checkpoint",
    "losses",
    "save_checkpoint",
    "structured_losses",
]
