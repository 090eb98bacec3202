"""Segmentation metrics: IoU and Dice per class, their means, and pixel accuracy, in any number of dimensions.

All follow from three counts of elements (pixels, voxels) per class: shared by prediction and truth,
predicted, and true. These are the diagonal, the column sums and the row sums of the confusion matrix. Counts
are summed over images before division, so metrics do not depend on batches or processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

SHARED, PREDICTED, TRUE = range(3)  # places in the last axis of counts
MOST_CONFUSED = 32  # classes up to which a confusion matrix is kept for every image


def count_classes(
    predicted: torch.Tensor, truth: torch.Tensor, num_classes: int, ignore_index: int | None = None
) -> torch.Tensor:
    """(b, classes, 3) int64 counts of each image: shared, predicted, true.

    `predicted`, `truth`: (b, ...) class numbers of any integer type. Elements whose truth is `ignore_index`
    do not count.
    """
    shape = (len(truth), num_classes)
    counted = torch.ones_like(truth, dtype=torch.bool) if ignore_index is None else truth != ignore_index
    image = torch.arange(len(truth), device=truth.device).view(-1, *[1] * (truth.dim() - 1)) * num_classes
    counts = [
        torch.bincount((image + classes.long())[mask], minlength=shape[0] * shape[1]).view(shape)
        for classes, mask in ((truth, counted & (predicted == truth)), (predicted, counted), (truth, counted))
    ]
    return torch.stack(counts, dim=-1)


def count_confusion(
    predicted: torch.Tensor, truth: torch.Tensor, num_classes: int, ignore_index: int | None = None
) -> dict[str, torch.Tensor]:
    """`counts` of `count_classes` and, for at most MOST_CONFUSED classes, `confusion`: (b, classes, classes)
    int64 number of elements by true and predicted class."""
    if num_classes > MOST_CONFUSED:
        return {"counts": count_classes(predicted, truth, num_classes, ignore_index)}
    counted = torch.ones_like(truth, dtype=torch.bool) if ignore_index is None else truth != ignore_index
    image = torch.arange(len(truth), device=truth.device).view(-1, *[1] * (truth.dim() - 1)) * num_classes
    cells = ((image + truth.long()) * num_classes + predicted.long())[counted]
    confusion = torch.bincount(cells, minlength=len(truth) * num_classes**2).view(
        len(truth), num_classes, num_classes
    )
    counts = torch.stack([confusion.diagonal(dim1=1, dim2=2), confusion.sum(1), confusion.sum(2)], dim=-1)
    return {"counts": counts, "confusion": confusion}


def iou(counts: np.ndarray) -> np.ndarray:
    """(..., classes) intersection over union (Jaccard); NaN for a class in neither prediction nor truth.
    `counts`: (..., classes, 3)."""
    shared = counts[..., SHARED]
    return _ratio(shared, counts[..., PREDICTED] + counts[..., TRUE] - shared)


def dice(counts: np.ndarray) -> np.ndarray:
    """(..., classes) Dice coefficient (F1); NaN for a class in neither prediction nor truth. `counts`: (...,
    classes, 3)."""
    return _ratio(2 * counts[..., SHARED], counts[..., PREDICTED] + counts[..., TRUE])


def pixel_accuracy(counts: np.ndarray) -> np.ndarray:
    """(...) share of elements with the right class; NaN without elements. `counts`: (..., classes, 3), of all
    classes."""
    return _ratio(counts[..., SHARED].sum(-1), counts[..., TRUE].sum(-1))


def mean_of_defined(values: np.ndarray) -> float | None:
    """The mean of the values that are not NaN; None if all are."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def by_class(values: np.ndarray, names: Sequence[str]) -> dict[str, float | None]:
    """(classes,) values by name; None for undefined ones."""
    return {name: mean_of_defined(value[None]) for name, value in zip(names, values, strict=True)}


def segmentation_scores(counts: np.ndarray, names: Sequence[str]) -> dict[str, float | None]:
    """`mean_iou`, `mean_dice`, `pixel_accuracy`, and `iou_NAME` and `dice_NAME` of each class; None if
    undefined.

    `counts`: (classes, 3) summed over images; `names`: of all classes. Means are over the classes that occur
    in truth or prediction.
    """
    ious, dices = iou(counts), dice(counts)
    scores = {
        "mean_iou": mean_of_defined(ious),
        "mean_dice": mean_of_defined(dices),
        "pixel_accuracy": mean_of_defined(pixel_accuracy(counts)[None]),
    }
    for metric, values in (("iou", ious), ("dice", dices)):
        scores |= {f"{metric}_{name}": value for name, value in by_class(values, names).items()}
    return scores


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(numerator, denominator, out=np.full(np.shape(numerator), np.nan), where=denominator > 0)
