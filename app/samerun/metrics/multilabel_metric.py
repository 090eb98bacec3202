"""Multi-label metrics as an `evaluate.Metric`."""

from typing import Any

import datasets
import evaluate
import numpy as np

from samerun.metrics.in_memory import InMemoryMetric
from samerun.metrics.multilabel import multilabel_scores


class MultiLabelMetric(InMemoryMetric):
    """`compute(predictions=probabilities, references=targets, thresholds=0.5, ...)` -> the dict of
    `multilabel_scores`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Multi-label classification metrics at given thresholds; an undefined metric is None.",
            citation="",
            inputs_description=(
                "predictions: probabilities (rows, labels). references: 0 or 1 (rows, labels). "
                "thresholds: one number "
                "(default 0.5) or one per label; a label is predicted at probability >= threshold. "
                "tuned_thresholds: "
                "one per label, or 'tune' to choose them on these rows; adds tuned_* metrics. "
                "from_logits: predictions "
                "are logits; adds the loss, with pos_weight and label_smoothing."
            ),
            features=datasets.Features(
                predictions=datasets.List(datasets.Value("float64")),
                references=datasets.List(datasets.Value("float64")),
            ),
        )

    def _compute(
        self,
        predictions: np.ndarray | list[list[float]],
        references: np.ndarray | list[list[float]],
        **settings: Any,
    ) -> dict[str, float | None]:
        if not len(predictions) and not len(references):  # the number of labels is unknown
            predictions = references = np.empty((0, 0))
        return multilabel_scores(np.asarray(predictions), np.asarray(references), **settings)
