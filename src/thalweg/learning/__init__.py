"""What teaches: losses, optimisers and schedules, the trainer, checkpoints."""

from thalweg.learning import losses
from thalweg.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from thalweg.learning.optimisers import build_optimiser
from thalweg.learning.settings import TrainingConfig
from thalweg.learning.trainer import Trainer

__all__ = [
    "Checkpoint",
    "Trainer",
    "TrainingConfig",
    "build_optimiser",
    "load_checkpoint",
    "losses",
    "save_checkpoint",
]
