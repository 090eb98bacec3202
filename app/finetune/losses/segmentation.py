"""Cross-entropy + Dice for images and volumes, in any number of spatial dimensions.

The loss of image i with elements (pixels, voxels) e that are not ignored, logits z and true classes y:

    CE_i   = sum_e w[y_e] * cross_entropy(z_e, y_e) / sum_e w[y_e]
    Dice_i = mean over the classes c in the truth of  1 - 2 sum_e p_ec [y_e = c] / (sum_e p_ec + sum_e [y_e = c])
    L_i    = cross_entropy_weight * CE_i + dice_weight * Dice_i

with p = softmax(z) and class weights w. The loss of a batch is the mean of L_i over its images: a sum and a count, so it is the
same however images are shared out over micro-batches and processes. Dice is taken of each image and only over classes that are
there: it says nothing about an absent class (1 for any prediction, with a gradient of almost 0); cross-entropy does. Without a
smoothing constant, then (Milletari et al., arXiv:1606.04797, with sums in place of sums of squares).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

IGNORE = -100  # what ignored elements become; torch's own default
SETTINGS = ("cross_entropy_weight", "dice_weight", "class_weights", "label_smoothing")


@dataclass(frozen=True)
class SegmentationLoss:
    """`loss(logits, labels)` -> (b,) float32, the loss of each image.

    logits: (b, classes, *space), any floating-point type, computed on in fp32. With one channel it is one class against a
    background, by the sigmoid: binary cross-entropy + Dice. labels: (b, *space), integers of any type.

    `class_weights`: of the cross-entropy, one per class (two with one channel: background and class). `ignore_index`: the label
    of elements that count nowhere; an image of nothing else has loss 0. `include_background`: whether class 0 is one of
    Dice's.
    """

    cross_entropy_weight: float = 1.0
    dice_weight: float = 1.0
    class_weights: tuple[float, ...] | None = None
    ignore_index: int | None = None
    include_background: bool = True
    label_smoothing: float = 0.0  # of the cross-entropy, as torch's

    def settings(self) -> dict[str, Any]:
        """What the configuration of an exported model keeps, so that it has the same loss wherever it is evaluated."""
        return {name: value for name, value in asdict(self).items() if name in SETTINGS}

    def with_settings(self, kept: dict[str, Any] | None) -> SegmentationLoss:
        """This loss with what a configuration kept, if it did."""
        return self if kept is None else replace(self, **kept)

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
        """(b,) weighted mean over the elements of each image. logits: (b, channels, n), labels: (b, n)."""
        valid, known = labels != IGNORE, labels.clamp(min=0)
        weights = valid.float()
        if self.class_weights is not None:
            weights = weights * torch.tensor(self.class_weights, device=logits.device)[known]
        if logits.shape[1] > 1:
            by_class = None if self.class_weights is None else torch.tensor(self.class_weights, device=logits.device)
            losses = functional.cross_entropy(
                logits, labels, by_class, ignore_index=IGNORE, reduction="none", label_smoothing=self.label_smoothing
            )
        else:
            targets = known * (1 - self.label_smoothing) + self.label_smoothing / 2
            losses = weights * functional.binary_cross_entropy_with_logits(logits[:, 0], targets, reduction="none")
        return _ratio(losses.sum(1), weights.sum(1))

    def _dice(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(b,) one minus Dice, mean over the classes of each image's truth. logits: (b, channels, n), labels: (b, n)."""
        binary = logits.shape[1] == 1
        shares = torch.sigmoid(logits) if binary else torch.softmax(logits, dim=1)
        classes = torch.arange(logits.shape[1], device=logits.device) + int(binary)
        if not (binary or self.include_background):
            shares, classes = shares[:, 1:], classes[1:]
        truth = (labels[:, None] == classes[:, None]).float()
        shares = shares * (labels != IGNORE)[:, None]
        true = truth.sum(2)
        there = (true > 0).float()
        dice = _ratio(2 * (shares * truth).sum(2), shares.sum(2) + true)
        return _ratio(((1 - dice) * there).sum(1), there.sum(1))


def balanced_class_weights(counts: np.ndarray) -> tuple[float, ...]:
    """Weights by which rare classes count more: median frequency over a class's own (Eigen and Fergus, arXiv:1411.4734, section
    6.1, with frequencies over all images). `counts`: (classes,) elements of each; one without any gets weight 1."""
    counts = np.asarray(counts, dtype=np.float64)
    median = np.median(counts[counts > 0]) if (counts > 0).any() else 1.0
    return tuple(float(median / count) if count > 0 else 1.0 for count in counts)


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """0 where the denominator, a sum of weights or counts, is 0."""
    there = denominator > 0
    return torch.where(there, numerator / torch.where(there, denominator, 1.0), 0.0)
