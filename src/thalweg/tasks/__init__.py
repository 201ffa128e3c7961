"""Whole jobs, composed from the other rooms by one config."""

from thalweg.tasks.base import Evaluation, Task
from thalweg.tasks.classify.classifier import Classifier
from thalweg.tasks.classify.config import ClassifyConfig
from thalweg.tasks.comparison import Comparison, compare
from thalweg.tasks.registry import (
    apply_overrides,
    build_config,
    evaluate,
    list_tasks,
    load,
    register,
    task_named,
    task_of,
    train,
)
from thalweg.tasks.report import write_report
from thalweg.tasks.runs import TrainResult
from thalweg.tasks.sweeping import plan_sweep, run_sweep
from thalweg.tasks.transduce.answers import Answer, Prediction, Source
from thalweg.tasks.transduce.config import DataConfig, TransduceConfig
from thalweg.tasks.transduce.ensembles import open_runs
from thalweg.tasks.transduce.search_settings import SearchConfig
from thalweg.tasks.transduce.transducer import Transducer

__all__ = [
    "Answer",
    "Classifier",
    "ClassifyConfig",
    "Comparison",
    "DataConfig",
    "Evaluation",
    "Prediction",
    "SearchConfig",
    "Source",
    "Task",
    "TrainResult",
    "TransduceConfig",
    "Transducer",
    "apply_overrides",
    "build_config",
    "compare",
    "evaluate",
    "list_tasks",
    "load",
    "open_runs",
    "plan_sweep",
    "register",
    "run_sweep",
    "task_named",
    "task_of",
    "train",
    "write_report",
]
