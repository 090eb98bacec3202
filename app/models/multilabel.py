"""Multi-label classification as a task: binary cross-entropy, one logit per label."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from finetune.errors import InputError, TrainingError
from finetune.kernels.transfer import send
from finetune.reading.json_files import read_object
from finetune.reading.ragged import Ragged
from finetune.task import Batch, Record, check_figure
from finetune.training.batches import one_hot
from metrics.multilabel import multilabel_scores

ENOUGH_ROWS = 1000  # to see in a moment, mostly, that a figure is defined
MOST_WEIGHT = 1e6  # of a positive target: beyond it fp32 losses would soon be infinite


@dataclass(frozen=True)
class MultiLabelTask:
    """The four verbs (see `finetune.task.Task`). Every label of every row is one target.

    `pos_weight`: (labels,) weight of a label's positive targets, or None. `label_smoothing` moves targets from 0 and 1 to
    s/2 and 1 - s/2. `thresholds`: (labels,) for the tuned_* figures, or None: tuned on the rows that are scored.
    """

    headline: str
    num_labels: int
    pos_weight: np.ndarray | None = None
    label_smoothing: float = 0.0
    thresholds: np.ndarray | None = None

    def num_targets(self, batch: Batch) -> torch.Tensor:
        return batch.is_real.sum() * self.num_labels

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        logits = model(**batch.inputs).logits.float()
        targets = batch.labels.float() * (1 - self.label_smoothing) + self.label_smoothing / 2
        weight = None
        if self.pos_weight is not None:
            weight = send(torch.as_tensor(self.pos_weight, dtype=torch.float32), logits.device)
        loss = binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction="none")
        return (loss * batch.is_real[:, None]).sum()

    def predict(self, model: Any, batch: Batch) -> list[Record]:
        logits = model(**batch.inputs).logits.float().cpu().numpy()
        labels = batch.labels.to(torch.uint8).cpu().numpy() if batch.labels is not None else None
        return [
            {"row": row, "logits": logits[i], "labels": None if labels is None else labels[i]}
            for i, row in enumerate(batch.rows.tolist())
            if row >= 0
        ]

    def score(self, records: list[Record]) -> dict[str, float | None]:
        # evaluate takes up to a second to import: at the first score, not at the start
        from metrics.multilabel_metric import MultiLabelMetric

        logits, labels = np.stack([r["logits"] for r in records]), np.stack([r["labels"] for r in records])
        if not np.isfinite(logits).all():
            raise TrainingError("the model's logits are not finite: it diverged. Try a smaller --learning_rate")
        return MultiLabelMetric().compute(
            predictions=logits,
            references=labels,
            from_logits=True,
            pos_weight=self.pos_weight,
            label_smoothing=self.label_smoothing,
            tuned_thresholds="tune" if self.thresholds is None else self.thresholds,
        )


def check_headline(task: MultiLabelTask, labels: Ragged) -> None:
    """Raises `InputError` for a headline that does not exist or that these validation rows leave undefined.

    `labels`: the rows' label numbers.
    """

    def score(count: int) -> dict[str, float | None]:
        targets = one_hot(labels, np.arange(count), task.num_labels).numpy().astype(np.uint8)
        return multilabel_scores(np.zeros(targets.shape, np.float32), targets, from_logits=True, tuned_thresholds="tune")

    # What some rows define, more rows do too.
    figures = score(min(ENOUGH_ROWS, len(labels)))
    if figures.get(task.headline, 0) is None:
        figures = score(len(labels))
    check_figure(task.headline, figures)
    if figures[task.headline] is None:
        raise InputError(
            f"--metric_for_best_model {task.headline} is undefined on these validation rows (every label has one class "
            "only); choose another, such as f1_micro or loss"
        )


def balanced_pos_weight(positive: np.ndarray, rows: int, cap: float) -> np.ndarray:
    """(labels,) negatives / positives of each label in training, at least 1 and at most `cap`; 1 for a label without rows.

    `positive`: (labels,) how many of the `rows` have each label.
    """
    ratio = np.divide(rows - positive, positive, out=np.ones(len(positive)), where=positive > 0)
    return np.clip(ratio, 1.0, cap)


def prior_bias(positive: np.ndarray, rows: int, pos_weight: np.ndarray | None, smoothing: float) -> np.ndarray:
    """(labels,) the logits that have the least loss of all that do not look at the text: each label's log-odds in training.

    `positive`: (labels,) how many of the `rows` have each label. With targets that sum to t over n rows and weights w these
    are log(w t / (n - t)); half a row is added on both sides for labels that no row, or every row, has. A head that starts
    there (as in Lin et al., arXiv:1708.02002, section 3.3) need not spend its first steps on learning that labels are rare.
    """
    targets = positive * (1 - smoothing) + rows * smoothing / 2
    weight = 1.0 if pos_weight is None else pos_weight
    return np.log(weight * (targets + 0.5) / (rows - targets + 0.5))


def positive_weights(choice: str, cap: float, positive: np.ndarray, rows: int, labels: list[str]) -> np.ndarray | None:
    """--pos_weight as numbers, (labels,): None for "none", computed for "balanced", read from a json object otherwise.

    `positive`: (labels,) how many of the training `rows` have each label.

    Raises `InputError` for a file that cannot be read or does not give every label a positive number.
    """
    if choice == "none":
        return None
    if choice == "balanced":
        return balanced_pos_weight(positive, rows, cap)
    try:
        given = read_object(choice)
    except InputError as error:
        hint = "" if Path(choice).is_file() else "; none, balanced or a json file"
        raise InputError(*(f"--pos_weight {problem}{hint}" for problem in error.problems)) from None
    wrong = [x for x in labels if type(given.get(x)) not in (int, float) or not 0 < given[x] <= MOST_WEIGHT]
    if wrong:
        raise InputError(
            f"--pos_weight {choice}: no positive weight for {', '.join(map(repr, wrong[:20]))}; expected a number above 0 and "
            f"at most {MOST_WEIGHT:g} for every label"
        )
    return np.array([float(given[label]) for label in labels])
