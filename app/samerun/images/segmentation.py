"""Segmentation of images and volumes, in any number of dimensions: loss, scores, packed masks, figures.

The loss of image i with elements e (pixels or voxels) that are not ignored, logits z and true classes y:

    CE_i   = sum_e w[y_e] * cross_entropy(z_e, y_e) / sum_e w[y_e]
    Dice_i = mean over the classes c that occur in y of
             1 - 2 sum_e p_ec [y_e = c] / (sum_e p_ec + sum_e [y_e = c])
    L_i    = cross_entropy_weight * CE_i + dice_weight * Dice_i

with p = softmax(z) and class weights w. The loss of a batch is the mean of L_i, a sum and a count, so it does
not depend on micro-batches and processes. Dice skips absent classes: its loss for them is 1 for any
prediction, with a gradient of almost 0. Therefore it needs no smoothing constant (Milletari et al.,
arXiv:1606.04797, with sums in place of sums of squares).

IoU, Dice and pixel accuracy follow from three counts of elements per class: shared by prediction and truth,
predicted, and true. Counts are summed over images before division, so metrics do not depend on batches or
processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from samerun.kernels.common import constants
from samerun.reports.figures import GREY, NAME, bars, confusion, legend_below
from samerun.task import Predictions, ReportContent, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IGNORED = 255  # label of pixels and voxels that are left out of loss and metrics
SETTINGS = ("cross_entropy_weight", "dice_weight", "class_weights", "label_smoothing")
SHARED, PREDICTED, TRUE = range(3)  # places in the last axis of counts
MAX_CONFUSION = 32  # classes up to which a confusion matrix is kept for every image
MAX_NAME = 200  # bytes of a file name without suffix; file systems allow 255
NOT_IN_NAMES = re.compile("[/\x00-\x1f\x7f\ud800-\udfff]")
MAX_ROWS, MAX_BARS, MAX_CONFUSED = 20, 30, 15  # of the report's table and figures


# Loss


@dataclass(frozen=True)
class SegmentationLoss:
    """`loss(logits, labels)` -> (b,) float32, the loss of each image.

    logits: (b, classes, *space), any floating-point dtype; computed in fp32. With a single channel, one class
    against a background: sigmoid, binary cross-entropy + Dice. labels: (b, *space), integers, or `IGNORED`.
    An image of ignored elements has loss 0.
    """

    cross_entropy_weight: float = 1.0
    dice_weight: float = 1.0
    class_weights: tuple[float, ...] | None = None  # of the cross-entropy; of a single channel: two
    include_background: bool = True  # whether Dice includes class 0
    label_smoothing: float = 0.0  # of the cross-entropy

    @classmethod
    def of(
        cls,
        arguments: Any,
        class_weights: tuple[float, ...] | None,
        exported: dict[str, Any] | None,
        include_background: bool = True,
    ) -> SegmentationLoss:
        """The loss of the arguments; without training, that of the model's training, if its `settings` are
        known: `exported`."""
        a = arguments
        weights = a.cross_entropy_weight, a.dice_weight, class_weights
        loss = cls(*weights, include_background, a.label_smoothing_factor)
        return loss if a.modes.train or exported is None else replace(loss, **exported)

    def settings(self) -> dict[str, Any]:
        """The settings that an exported model's configuration stores, so that later evaluations use the same
        loss."""
        return {name: getattr(self, name) for name in SETTINGS}

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits.float().flatten(2), labels.long().flatten(1)
        loss = torch.zeros(len(labels), device=logits.device)
        if self.cross_entropy_weight:
            loss = loss + self.cross_entropy_weight * self._cross_entropy(logits, labels)
        if self.dice_weight:
            loss = loss + self.dice_weight * self._dice(logits, labels)
        return loss

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(b,) CE_i. logits: (b, channels, n), labels: (b, n)."""
        weights, smoothing = (labels != IGNORED).float(), self.label_smoothing
        if self.class_weights is not None:
            by_class = constants(self.class_weights, logits)
            weights = weights * by_class[labels.clamp(max=len(by_class) - 1)]
        if logits.shape[1] > 1:
            given = {"ignore_index": IGNORED, "reduction": "none", "label_smoothing": smoothing}
            losses = functional.cross_entropy(logits, labels, **given)
        else:
            targets = labels.clamp(max=1) * (1 - smoothing) + smoothing / 2
            of_elements = functional.binary_cross_entropy_with_logits
            losses = of_elements(logits[:, 0], targets, reduction="none")
        # By the true class: torch's `weight` would weight the smoothed share of each class by its own.
        return _safe_ratio((weights * losses).sum(1), weights.sum(1))

    def _dice(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(b,) Dice_i. logits: (b, channels, n), labels: (b, n)."""
        binary = logits.shape[1] == 1
        probabilities = torch.sigmoid(logits) if binary else torch.softmax(logits, dim=1)
        classes = torch.arange(logits.shape[1], device=logits.device) + int(binary)
        if not (binary or self.include_background):
            probabilities, classes = probabilities[:, 1:], classes[1:]
        truth = (labels[:, None] == classes[:, None]).float()
        probabilities = probabilities * (labels != IGNORED)[:, None]
        sizes = truth.sum(2)
        present = (sizes > 0).float()
        dice = _safe_ratio(2 * (probabilities * truth).sum(2), probabilities.sum(2) + sizes)
        return _safe_ratio(((1 - dice) * present).sum(1), present.sum(1))


def balanced_class_weights(counts: np.ndarray) -> tuple[float, ...]:
    """Median frequency balancing: the median class frequency divided by each class's own (Eigen and Fergus,
    arXiv:1411.4734, section 6.1, with frequencies over all images). `counts`: (classes,) elements; an empty
    class has weight 1."""
    counts = np.asarray(counts, dtype=np.float64)
    median = np.median(counts[counts > 0]) if (counts > 0).any() else 1.0
    return tuple(float(median / count) if count > 0 else 1.0 for count in counts)


def _safe_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """`numerator / denominator`, 0 where the denominator is not positive."""
    valid = denominator > 0
    return torch.where(valid, numerator / torch.where(valid, denominator, 1.0), 0.0)


# Windows


class EqualPasses:
    """Calls `model`, if `equal` in every process as often as in the one with the most calls. ZeRO-3 and FSDP
    need this: they gather the weights in each forward pass, so it waits for one of every other process."""

    def __init__(self, model: Callable[..., Any], device: torch.device, equal: bool) -> None:
        self._model, self._device, self._equal = model, device, equal and dist.is_initialized()

    def __call__(self, *args: Tensor, **inputs: Tensor) -> Any:
        self._any_calls(True)
        return self._model(*args, **inputs)

    def fill_up(self, *args: Tensor, **inputs: Tensor) -> None:
        """Calls the model with these inputs until no process has a call of its own left."""
        while self._any_calls(False):
            self._model(*args, **inputs)

    def _any_calls(self, this_process: bool) -> bool | Tensor:
        """Whether any process calls the model next. A tensor: only who asks waits for a GPU."""
        if not self._equal:
            return this_process
        calls = torch.tensor(int(this_process), device=self._device)
        dist.all_reduce(calls, op=dist.ReduceOp.MAX)
        return calls


# Scores


def count_classes(predicted: Tensor, truth: Tensor, num_classes: int) -> dict[str, Tensor]:
    """`counts`, (classes, 3) int64 of an image or volume: shared, predicted, true. For at most MAX_CONFUSION
    classes also `confusion`: (classes, classes) int64 number of elements by true and predicted class.

    `predicted`, `truth`: (*space) class numbers of any integer type. Elements whose truth is `IGNORED` do not
    count.
    """
    counted = truth != IGNORED
    cells = truth[counted].long() * num_classes + predicted[counted].long()
    confusion = torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes)
    counts = torch.stack([confusion.diagonal(), confusion.sum(0), confusion.sum(1)], dim=-1)
    return {"counts": counts} | ({"confusion": confusion} if num_classes <= MAX_CONFUSION else {})


def scored_outputs(
    loss: SegmentationLoss, logits: Tensor, predicted: Tensor, truth: Tensor, num_classes: int
) -> dict[str, Tensor]:
    """`loss` and the outputs of `count_classes` of one image or volume. `logits`: (channels, *space);
    `predicted`, `truth`: (*space) class numbers."""
    return {"loss": loss(logits[None], truth[None])[0], **count_classes(predicted, truth, num_classes)}


def mean_loss(predictions: Predictions) -> float | None:
    """The mean of the images or volumes with an element that counts; None without one."""
    losses = predictions["loss"][predictions["counts"][..., TRUE].sum(axis=-1) > 0]
    return float(losses.mean(dtype=np.float64)) if len(losses) else None


def largest_logit(logits: Tensor) -> Tensor:
    """() the largest absolute value. It is NaN if any logit is, which a mask would not show."""
    return torch.stack(logits.aminmax()).abs().amax()


def iou(counts: np.ndarray) -> np.ndarray:
    """(..., classes) intersection over union (Jaccard); NaN for a class in neither prediction nor truth.
    `counts`: (..., classes, 3)."""
    shared = counts[..., SHARED]
    return _ratio(shared, counts[..., PREDICTED] + counts[..., TRUE] - shared)


def dice(counts: np.ndarray) -> np.ndarray:
    """(..., classes) Dice coefficient (F1); NaN for a class in neither prediction nor truth. `counts`: (...,
    classes, 3)."""
    return _ratio(2 * counts[..., SHARED], counts[..., PREDICTED] + counts[..., TRUE])


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
    accuracy = _ratio(counts[:, SHARED].sum(), counts[:, TRUE].sum())
    scores = {
        "mean_iou": mean_of_defined(ious),
        "mean_dice": mean_of_defined(dices),
        "pixel_accuracy": mean_of_defined(accuracy[None]),
    }
    for metric, values in (("iou", ious), ("dice", dices)):
        scores |= {f"{metric}_{name}": value for name, value in by_class(values, names).items()}
    return scores


def scores_of_commonest_class(
    train: Sequence[dict[int, int]], truth: Sequence[dict[int, int]], names: Sequence[str]
) -> dict[str, float | None]:
    """`segmentation_scores` if all elements get the commonest class of training. `train`, `truth`: for each
    mask, class -> number of elements; classes without a name are ignored."""
    in_training, in_truth = (
        np.array([sum(mask.get(number, 0) for mask in masks) for number in range(len(names))])
        for masks in (train, truth)
    )
    counts, commonest = np.zeros((len(names), 3), dtype=np.int64), int(in_training.argmax())
    counts[:, TRUE] = in_truth
    counts[commonest, [SHARED, PREDICTED]] = in_truth[commonest], in_truth.sum()
    return segmentation_scores(counts, names)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(numerator, denominator, out=np.full(np.shape(numerator), np.nan), where=denominator > 0)


# Masks


def file_names(ids: Sequence[str], suffix: str) -> list[str]:
    """A file name for each row, all different: its id, with _ for characters that file names cannot have, cut
    if it is very long. A row whose name an earlier row has gets its row number appended."""
    stems = [NOT_IN_NAMES.sub("_", name).encode()[:MAX_NAME].decode(errors="ignore") or "_" for name in ids]
    plain, names = set(stems), dict[str, None]()
    for row, stem in enumerate(stems):
        name = stem
        if stem in names:
            name = f"{stem}_{row}"
            while name in names or name in plain:
                name = f"{name}_{row}"
        names[name] = None
    return [f"{name}{suffix}" for name in names]


def pack(mask: np.ndarray, num_classes: int) -> np.ndarray:
    """(bytes,) uint8: the class numbers of a uint8 mask, each in as few bits as it needs."""
    size = (num_classes - 1).bit_length()
    return np.packbits(np.unpackbits(mask.reshape(-1, 1), axis=1, count=size, bitorder="little"))


def unpack(packed: np.ndarray, size: Sequence[int], num_classes: int) -> np.ndarray:
    """The inverse of `pack`, for a mask of this size. More bytes may follow those of the mask."""
    shape = int(np.prod(size)), (num_classes - 1).bit_length()
    values = np.unpackbits(packed, count=shape[0] * shape[1]).reshape(shape)
    return np.packbits(values, axis=1, bitorder="little").reshape(size)


# Figures and tables


def report_content(
    predictions: Predictions, classes: Sequence[str], ids: Sequence[str], first: int = 0
) -> ReportContent:
    """Dice by class, the confusion matrix, and the worst rows.

    `predictions`: `loss` (rows,), `counts` (rows, classes, 3) and, for few classes, `confusion` (rows, true
    classes, predicted classes). `first`: the first class to be scored; 1 leaves out the background.
    """
    counts, scores = predictions["counts"], {"loss": predictions["loss"]}
    for name, metric in (("iou", iou), ("dice", dice)):
        means = map(mean_of_defined, metric(counts)[:, first:])
        # A row without any class, in truth and prediction, is right.
        scores[name] = [1.0 if mean is None else mean for mean in means]
    total = counts.sum(axis=0)
    figures = {"class_dice": _dice_figure(total[first:], classes[first:])}
    if "confusion" in predictions:
        title, of_all = "Predicted class by true class, % of its area", predictions["confusion"].sum(axis=0)
        figures["class_confusion"] = confusion(title, of_all, classes, MAX_CONFUSED, percent=True)
    of_rows = iou(counts)[:, first:]
    rows = []
    for row in np.argsort(-scores["loss"], kind="stable")[:MAX_ROWS].tolist():
        known = np.flatnonzero(~np.isnan(of_rows[row]))
        worst = known[of_rows[row, known].argmin()] if len(known) else None
        worst_class = "-" if worst is None else f"{classes[first + worst]} ({of_rows[row, worst]:.2f})"
        rows.append([str(ids[row]), *(f"{scores[name][row]:.4f}" for name in scores), worst_class])
    header = ["row", *scores, "worst class (IoU)"]
    return ReportContent(figures, [Section("Worst validation rows", "By loss, worst first.", header, rows)])


def _dice_figure(total: np.ndarray, classes: Sequence[str]) -> Figure:
    """Dice, precision and recall of each class over all rows; `total`: (classes, 3)."""
    chosen = np.argsort(-total[:, TRUE], kind="stable")[:MAX_BARS]
    names, total = [classes[number][:NAME] for number in chosen], total[chosen]
    title = "Dice by class, over all validation rows"
    figure = bars(title, "", names, np.nan_to_num(dice(total)), label="Dice")
    for marker, label, denominator in (("<", "precision", PREDICTED), (">", "recall", TRUE)):
        share = total[:, SHARED] / np.maximum(total[:, denominator], 1)
        style = {"color": "black", "markerfacecolor": GREY, "markersize": 5}
        figure.axes[0].plot(share, np.arange(len(chosen)), marker, label=label, **style)
    legend_below(figure)
    return figure
