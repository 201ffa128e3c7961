"""Whole jobs, composed from the other rooms by one config."""

from thalweg.tasks.class_evaluation import evaluate as evaluate_images
from thalweg.tasks.classifier import Classifier, load_classifier
from thalweg.tasks.classify_settings import ClassifyConfig
from thalweg.tasks.config import (
    DataConfig,
    SearchConfig,
    TransduceConfig,
    apply_overrides,
    build_config,
    read_config,
)
from thalweg.tasks.evaluation import Evaluation, ExactReport, evaluate
from thalweg.tasks.juries import open_runs
from thalweg.tasks.registry import Task, task_named, task_of, train_settings
from thalweg.tasks.report import write_report
from thalweg.tasks.sweeping import SweepPlan, SweepResult, plan_sweep, run_sweep
from thalweg.tasks.transduce import TrainResult, train
from thalweg.tasks.transducer import Answer, Prediction, Source, Transducer, load

__all__ = [
    "Answer",
    "Classifier",
    "ClassifyConfig",
    "DataConfig",
    "Evaluation",
    "ExactReport",
    "Prediction",
    "SearchConfig",
    "Source",
    "SweepPlan",
    "SweepResult",
    "Task",
    "TrainResult",
    "TransduceConfig",
    "Transducer",
    "apply_overrides",
    "build_config",
    "evaluate",
    "evaluate_images",
    "load",
    "load_classifier",
    "open_runs",
    "plan_sweep",
    "read_config",
    "run_sweep",
    "task_named",
    "task_of",
    "train",
    "train_settings",
    "write_report",
]
