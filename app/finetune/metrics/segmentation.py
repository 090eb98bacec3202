"""Segmentation metrics from counts: IoU and Dice per class, their means, pixel accuracy. In any number of dimensions.

Three counts of elements (pixels, voxels) per class say everything: those that prediction and truth share, those predicted,
and those of the truth; they are the confusion matrix's diagonal, column sums and row sums. Counts of images are added before a
ratio is taken, so a metric does not depend on batches or processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

SHARED, PREDICTED, TRUE = range(3)  # places in the last axis of counts
MOST_CONFUSED = 32  # classes whose confusions are counted: every row of a file has classes x classes of them


def count_classes(
    predicted: torch.Tensor, truth: torch.Tensor, num_classes: int, ignore_index: int | None = None
) -> torch.Tensor:
    """(b, classes, 3) int64 counts of each image: shared, predicted, true.

    `predicted`, `truth`: (b, ...) class numbers of the same shape, of any integer type. Elements whose truth is `ignore_index`
    count nowhere.
    """
    shape = (len(truth), num_classes)
    counted = torch.ones_like(truth, dtype=torch.bool) if ignore_index is None else truth != ignore_index
    image = torch.arange(len(truth), device=truth.device).view(-1, *[1] * (truth.dim() - 1)) * num_classes
    found = [
        torch.bincount((image + classes.long())[chosen], minlength=shape[0] * shape[1]).view(shape)
        for classes, chosen in ((truth, counted & (predicted == truth)), (predicted, counted), (truth, counted))
    ]
    return torch.stack(found, dim=-1)


def count_confusion(
    predicted: torch.Tensor, truth: torch.Tensor, num_classes: int, ignore_index: int | None = None
) -> dict[str, torch.Tensor]:
    """`counts` as `count_classes` gives them and, for at most MOST_CONFUSED classes, `confusion`: (b, classes, classes) int64
    elements by true and predicted class."""
    if num_classes > MOST_CONFUSED:
        return {"counts": count_classes(predicted, truth, num_classes, ignore_index)}
    counted = torch.ones_like(truth, dtype=torch.bool) if ignore_index is None else truth != ignore_index
    image = torch.arange(len(truth), device=truth.device).view(-1, *[1] * (truth.dim() - 1)) * num_classes
    cells = ((image + truth.long()) * num_classes + predicted.long())[counted]
    confusion = torch.bincount(cells, minlength=len(truth) * num_classes**2).view(len(truth), num_classes, num_classes)
    counts = torch.stack([confusion.diagonal(dim1=1, dim2=2), confusion.sum(1), confusion.sum(2)], dim=-1)
    return {"counts": counts, "confusion": confusion}


def iou(counts: np.ndarray) -> np.ndarray:
    """(..., classes) intersection over union (Jaccard); NaN for a class that is in neither. `counts`: (..., classes, 3)."""
    shared = counts[..., SHARED]
    return _ratio(shared, counts[..., PREDICTED] + counts[..., TRUE] - shared)


def dice(counts: np.ndarray) -> np.ndarray:
    """(..., classes) Dice coefficient (F1); NaN for a class that is in neither. `counts`: (..., classes, 3)."""
    return _ratio(2 * counts[..., SHARED], counts[..., PREDICTED] + counts[..., TRUE])


def pixel_accuracy(counts: np.ndarray) -> np.ndarray:
    """(...) share of elements with the right class; NaN without elements. `counts`: (..., classes, 3), of all classes."""
    return _ratio(counts[..., SHARED].sum(-1), counts[..., TRUE].sum(-1))


def mean_of_defined(values: np.ndarray) -> float | None:
    """The mean of the values that are not NaN; None if all are."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def by_class(values: np.ndarray, names: Sequence[str]) -> dict[str, float | None]:
    """(classes,) values by name; None where one is undefined."""
    return {name: mean_of_defined(value[None]) for name, value in zip(names, values, strict=True)}


def segmentation_scores(counts: np.ndarray, names: Sequence[str], include_background: bool = True) -> dict[str, float | None]:
    """`mean_iou`, `mean_dice`, `pixel_accuracy`, and `iou_NAME` and `dice_NAME` of each class; None where one is undefined.

    `counts`: (classes, 3) summed over images; `names`: of all classes. Means are over the classes that occur in truth or
    prediction; without `include_background` class 0 has no metrics of its own and is in no mean.
    """
    first = 0 if include_background else 1
    ious, dices = iou(counts)[first:], dice(counts)[first:]
    scores = {
        "mean_iou": mean_of_defined(ious),
        "mean_dice": mean_of_defined(dices),
        "pixel_accuracy": mean_of_defined(pixel_accuracy(counts)[None]),
    }
    for metric, values in (("iou", ious), ("dice", dices)):
        scores |= {f"{metric}_{name}": value for name, value in by_class(values, names[first:]).items()}
    return scores


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(numerator, denominator, out=np.full(np.shape(numerator), np.nan), where=denominator > 0)
