"""What a text classifier predicts: the base class of the kinds of --problem_type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from samerun.data.tables import Table
from samerun.data.tokens import Ragged
from samerun.plan import ENOUGH_UPDATES
from samerun.task import Predictions, ReportContent
from samerun.text.text import TextSplit


class Problem(ABC):
    """The targets of a classifier's rows, their loss and scores, and what an export needs of them.

    Predictions hold `logits`, (rows, outputs) float32, and for labelled rows `labels`.
    """

    name: str  # of --problem_type
    unit: np.ndarray | float = 1.0  # of exported outputs: differences of 1 matter like those of probabilities
    default_metric: str
    shown_metrics: tuple[str, ...]
    metric_names: tuple[str, ...]
    title: str  # of the model card
    usage: str  # of the model card, for models that do not cut texts in their own way
    card_metrics: tuple[str, ...]  # of the model card
    loss_settings: dict[str, Any] | None = None
    enough_updates = ENOUGH_UPDATES  # of a training whose number of epochs is chosen

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.notes: list[str] = []  # for the console
        self.columns: tuple[str, ...] = arguments.label_columns or (arguments.label_column,)  # of the targets
        self.labels: list[str] = []  # the names of the outputs
        self.details: dict[str, Any] = {}  # entries of run.json

    # Targets

    @abstractmethod
    def read(self, table: Table) -> Any | None:
        """The targets of a file, with a method `take(rows)`; None for a file without them. Raises
        `InputError`."""

    @abstractmethod
    def choose(self, config: Any, train: Any | None) -> None:
        """Sets `labels`: the model's, or for training those of the targets `train`. Raises `InputError`."""

    @abstractmethod
    def ids(self, table: Table, targets: Any) -> Ragged:
        """The targets of each row as numbers. Raises `InputError`."""

    @abstractmethod
    def tensor(self, ids: Ragged, rows: np.ndarray) -> Tensor:
        """(b, ...) targets of these rows, also the `labels` of predictions."""

    @abstractmethod
    def prepare(self, ids: dict[str, Ragged]) -> None:
        """Before training: sets the loss and notes what is remarkable. `ids`: by split."""

    def check_best_metric(self, name: str, ids: Ragged) -> None:
        """Raises `InputError` if the metric is undefined on the validation rows with these `ids`."""
        return

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Entries of the run's fingerprint."""

    # Training

    @abstractmethod
    def initial_bias(self) -> np.ndarray:
        """(outputs,) bias of a new head by --head_bias prior."""

    def adopt_head(self, model: Any, trained: np.ndarray) -> None:
        """Prepares the output layer of a model of this problem type. `trained`: (outputs,) bool, those with
        trained weights. Raises `InputError`."""
        return

    @abstractmethod
    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(b, ...) the losses of the targets."""

    def outputs(self, logits: Tensor) -> Tensor:
        """`logits` of predictions."""
        return logits

    # Scores and predictions

    @abstractmethod
    def score(self, predictions: Predictions, split: TextSplit) -> dict[str, float | None]:
        """The metrics of a labelled file."""

    def of_model(self, predict: Callable[[TextSplit], Predictions], validation: TextSplit | None) -> Problem:
        """The same problem for another model, such as the baseline, whose thresholds are tuned on that
        model's own predictions of the validation rows."""
        return self

    @abstractmethod
    def for_evaluate(self, predictions: Predictions, split: TextSplit) -> tuple[Any, Any]:
        """(predictions, references) for the metrics of `evaluate`."""

    @abstractmethod
    def lines(self, predictions: Predictions, split: TextSplit) -> Iterator[dict[str, Any]]:
        """Lines of predictions.jsonl."""

    def explained(self) -> dict[str, Any]:
        """What the web page shows beside an explanation."""
        return {}

    @abstractmethod
    def figures(self, best: Predictions, split: TextSplit) -> ReportContent:
        """Figures and tables of report.html."""

    def card_sections(self, folder: Path) -> list[str]:
        """`ModelCard.sections` of the run in `folder`."""
        return []

    # The exported model, in this order

    @abstractmethod
    def fit(self, best: Predictions | None, split: TextSplit | None) -> dict[str, Any]:
        """Fits what the export needs on the best model's predictions of the validation rows. Returns entries
        of metrics.json."""

    @abstractmethod
    def exported_outputs(self, logits: np.ndarray) -> np.ndarray:
        """(outputs,) what transformers' pipeline gives for a row with these logits, (outputs,)."""

    @abstractmethod
    def config_entries(self) -> dict[str, Any]:
        """Entries of the exported configuration; None removes one."""

    @property
    @abstractmethod
    def export_scale(self) -> tuple[np.ndarray, np.ndarray | None]:
        """(divisor, shift), (outputs,) each, of the exported model's outputs; no shift: None."""

    @abstractmethod
    def use_exported(self, model: Any) -> None:
        """Takes thresholds, loss and the like from an exported model."""
