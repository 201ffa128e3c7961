"""What teaches: losses, optimisers and schedules, the trainer, checkpoints."""

from thalweg.learning import contrasts, densities, losses, structured_losses
from thalweg.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from thalweg.learning.class_losses import ClassLoss, class_loss
from thalweg.learning.optimisers import Decayed, build_optimiser, decay_groups
from thalweg.learning.sequence_losses import SequenceLoss
from thalweg.learning.settings import ClassTraining, TrainerConfig, TrainingConfig
from thalweg.learning.trainer import Trainer

__all__ = [
    "Checkpoint",
    "ClassLoss",
    "ClassTraining",
    "Decayed",
    "SequenceLoss",
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
