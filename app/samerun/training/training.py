"""The state and options of a training, shared by the modules of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samerun.batching.batches import EvalRows, TrainSteps
from samerun.output.writer_thread import Background
from samerun.plan import Plan
from samerun.reports.tracker import Tracker
from samerun.task import Predictions, Task
from samerun.training.average import WeightAverage
from samerun.training.best_models import BestModels
from samerun.training.splitting import Splitting


@dataclass(frozen=True)
class FitOptions:
    """The arguments of `fit`."""

    seed: int
    max_grad_norm: float
    best_metric: str
    greater_is_better: bool
    early_stopping_patience: int | None
    save_total_limit: int
    dataloader_num_workers: int
    profile: int | None = None  # number of steps to profile


@dataclass
class Training:
    """Everything that `fit` works on."""

    model: Any
    optimizer: Any
    task: Task
    plan: Plan
    options: FitOptions
    steps: TrainSteps
    validation: EvalRows | None
    tracker: Tracker
    output_dir: Path
    fingerprint: dict[str, Any]
    export: Callable[
        [Predictions | None], None
    ]  # writes best/, given the validation predictions; all processes call it
    best_models: BestModels | None = None
    average: WeightAverage | None = None
    writer: Background = field(default_factory=Background)  # of checkpoints
    splitting: Splitting = field(default_factory=Splitting)
    save_stalls: list[float] = field(
        default_factory=list
    )  # seconds for which each checkpoint blocked the training
