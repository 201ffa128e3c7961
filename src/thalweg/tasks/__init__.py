"""Whole jobs, composed from the other rooms by one config."""

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
from thalweg.tasks.report import write_report
from thalweg.tasks.sweeping import SweepPlan, SweepResult, plan_sweep, run_sweep
from thalweg.tasks.transduce import TrainResult, train
from thalweg.tasks.transducer import Answer, Prediction, Source, Transducer, load

__all__ = [
    "Answer",
    "DataConfig",
    "Evaluation",
    "ExactReport",
    "Prediction",
    "SearchConfig",
    "Source",
    "SweepPlan",
    "SweepResult",
    "TrainResult",
    "TransduceConfig",
    "Transducer",
    "apply_overrides",
    "build_config",
    "evaluate",
    "load",
    "open_runs",
    "plan_sweep",
    "read_config",
    "run_sweep",
    "train",
    "write_report",
]
