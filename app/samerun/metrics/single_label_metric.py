"""Single-label classification metrics as an `evaluate.Metric`."""

from typing import Any

import datasets
import evaluate
import numpy as np

from samerun.metrics.in_memory import InMemoryMetric
from samerun.metrics.single_label import single_label_scores


class SingleLabelMetric(InMemoryMetric):
    """`compute(predictions=logits, references=class numbers, label_smoothing=0.0)` -> the dict of
    `single_label_scores`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Accuracy, top-5 accuracy, macro-F1 and cross-entropy of single-label classification.",
            citation="",
            inputs_description="predictions: logits (rows, classes). references: class numbers (rows,).",
            features=datasets.Features(
                predictions=datasets.List(datasets.Value("float64")), references=datasets.Value("int64")
            ),
        )

    def _compute(self, predictions: Any, references: Any, **settings: Any) -> dict[str, float | None]:
        if not len(predictions):  # the number of classes is unknown
            predictions = np.empty((0, 0))
        return single_label_scores(
            np.asarray(predictions), np.asarray(references, dtype=np.int64), **settings
        )
