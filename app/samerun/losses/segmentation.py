"""Cross-entropy + Dice for images and volumes, in any number of spatial dimensions.

The loss of image i with elements e (pixels or voxels) that are not ignored, logits z and true classes y:

    CE_i   = sum_e w[y_e] * cross_entropy(z_e, y_e) / sum_e w[y_e]
    Dice_i = mean over the classes c that occur in y of
             1 - 2 sum_e p_ec [y_e = c] / (sum_e p_ec + sum_e [y_e = c])
    L_i    = cross_entropy_weight * CE_i + dice_weight * Dice_i

with p = softmax(z) and class weights w. The loss of a batch is the mean of L_i, a sum and a count, so it does
not depend on micro-batches and processes. Dice skips absent classes: its loss for them is 1 for any
prediction, with a gradient of almost 0. Therefore it needs no smoothing constant (Milletari et al.,
arXiv:1606.04797, with sums in place of sums of squares).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

IGNORE = -100  # torch's default
SETTINGS = ("cross_entropy_weight", "dice_weight", "class_weights", "label_smoothing")


@dataclass(frozen=True)
class SegmentationLoss:
    """`loss(logits, labels)` -> (b,) float32, the loss of each image.

    logits: (b, classes, *space), any floating-point dtype; computed in fp32. With a single channel, one class
    against a background: sigmoid, binary cross-entropy + Dice. labels: (b, *space), integers. An image of
    ignored elements has loss 0.
    """

    cross_entropy_weight: float = 1.0
    dice_weight: float = 1.0
    class_weights: tuple[float, ...] | None = (
        None  # of the cross-entropy; with a single channel (background, class)
    )
    ignore_index: int | None = None  # label of ignored elements
    include_background: bool = True  # whether Dice includes class 0
    label_smoothing: float = 0.0  # of the cross-entropy, as in torch

    def settings(self) -> dict[str, Any]:
        """The settings that an exported model's configuration stores, so that later evaluations use the same
        loss."""
        return {name: value for name, value in asdict(self).items() if name in SETTINGS}

    def with_settings(self, settings: dict[str, Any] | None) -> SegmentationLoss:
        """This loss with the settings of an exported model's configuration, if it has any."""
        return self if settings is None else replace(self, **settings)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, labels = logits.float().flatten(2), labels.long().flatten(1)
        if self.ignore_index is not None:
            labels = labels.masked_fill(labels == self.ignore_index, IGNORE)
        loss = torch.zeros(len(labels), device=logits.device)
        if self.cross_entropy_weight:
            loss = loss + self.cross_entropy_weight * self._cross_entropy(logits, labels)
        if self.dice_weight:
            loss = loss + self.dice_weight * self._dice(logits, labels)
        return loss

    def _cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(b,) CE_i. logits: (b, channels, n), labels: (b, n)."""
        valid, known = labels != IGNORE, labels.clamp(min=0)
        weights = valid.float()
        if self.class_weights is not None:
            weights = weights * torch.tensor(self.class_weights, device=logits.device)[known]
        if logits.shape[1] > 1:
            by_class = (
                None if self.class_weights is None else torch.tensor(self.class_weights, device=logits.device)
            )
            losses = functional.cross_entropy(
                logits,
                labels,
                by_class,
                ignore_index=IGNORE,
                reduction="none",
                label_smoothing=self.label_smoothing,
            )
        else:
            targets = known * (1 - self.label_smoothing) + self.label_smoothing / 2
            losses = weights * functional.binary_cross_entropy_with_logits(
                logits[:, 0], targets, reduction="none"
            )
        return _ratio(losses.sum(1), weights.sum(1))

    def _dice(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(b,) Dice_i. logits: (b, channels, n), labels: (b, n)."""
        binary = logits.shape[1] == 1
        probabilities = torch.sigmoid(logits) if binary else torch.softmax(logits, dim=1)
        classes = torch.arange(logits.shape[1], device=logits.device) + int(binary)
        if not (binary or self.include_background):
            probabilities, classes = probabilities[:, 1:], classes[1:]
        truth = (labels[:, None] == classes[:, None]).float()
        probabilities = probabilities * (labels != IGNORE)[:, None]
        sizes = truth.sum(2)
        present = (sizes > 0).float()
        dice = _ratio(2 * (probabilities * truth).sum(2), probabilities.sum(2) + sizes)
        return _ratio(((1 - dice) * present).sum(1), present.sum(1))


def balanced_class_weights(counts: np.ndarray) -> tuple[float, ...]:
    """Median frequency balancing: the median class frequency divided by each class's own (Eigen and Fergus,
    arXiv:1411.4734, section 6.1, with frequencies over all images). `counts`: (classes,) elements; an empty
    class has weight 1."""
    counts = np.asarray(counts, dtype=np.float64)
    median = np.median(counts[counts > 0]) if (counts > 0).any() else 1.0
    return tuple(float(median / count) if count > 0 else 1.0 for count in counts)


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """`numerator / denominator`, 0 where the denominator is not positive."""
    valid = denominator > 0
    return torch.where(valid, numerator / torch.where(valid, denominator, 1.0), 0.0)
