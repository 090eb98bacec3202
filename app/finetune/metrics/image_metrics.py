"""Single-label classification and segmentation metrics as `evaluate.Metric`."""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np
import torch

from finetune.metrics.in_memory import InMemoryMetric
from finetune.metrics.segmentation import count_classes, segmentation_scores
from finetune.metrics.single_label import single_label_scores


class SingleLabelMetric(InMemoryMetric):
    """`compute(predictions=logits, references=class numbers, label_smoothing=0.0)` -> the dict of `single_label_scores`."""

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
        return single_label_scores(np.asarray(predictions), np.asarray(references, dtype=np.int64), **settings)


class SegmentationMetric(InMemoryMetric):
    """`compute(predictions=masks, references=masks, names=[...])` -> the dict of `segmentation_scores`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Mean IoU, mean Dice and pixel accuracy over all images, and per class; an undefined metric is None.",
            citation="",
            inputs_description=(
                "predictions, references: class numbers of each image; images may differ in size; add_batch flattens them. "
                "names: of the classes. ignore_index: class number of elements that do not count. include_background: whether "
                "class 0 is in the means (default: yes)."
            ),
            features=datasets.Features(
                predictions=datasets.List(datasets.Value("int32")), references=datasets.List(datasets.Value("int32"))
            ),
        )

    def _compute(
        self,
        predictions: Sequence[Any],
        references: Sequence[Any],
        *,
        names: Sequence[str],
        ignore_index: int | None = None,
        include_background: bool = True,
    ) -> dict[str, float | None]:
        counts = np.zeros((len(names), 3), dtype=np.int64)
        for predicted, truth in zip(predictions, references, strict=True):
            pair = [torch.as_tensor(np.asarray(mask, dtype=np.int64)) for mask in (predicted, truth)]
            if pair[0].shape != pair[1].shape:
                raise ValueError(f"a prediction of shape {tuple(pair[0].shape)} for a mask of {tuple(pair[1].shape)}")
            valid = pair[1] if ignore_index is None else pair[1][pair[1] != ignore_index]
            for what, mask in (("prediction", pair[0]), ("mask", valid)):
                if mask.numel() and not 0 <= mask.min() <= mask.max() < len(names):
                    raise ValueError(f"a {what} has classes {mask.min()} to {mask.max()}, expected 0 to {len(names) - 1}")
            counts += count_classes(pair[0][None], pair[1][None], len(names), ignore_index)[0].numpy()
        return segmentation_scores(counts, names, include_background)
