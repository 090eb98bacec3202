"""Losses for multi-label classification, per row and label: their sum does not depend on micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus

from samerun.kernels.common import send

DB_ALPHA, DB_BETA = (
    0.1,
    10.0,
)  # constants of distribution_balanced's weight, the same for all data sets of its paper
LEAST = 1e-12  # minimum of a probability that is raised to a power, to keep its gradient finite


@dataclass(frozen=True)
class MultiLabelLoss:
    """--loss with its settings."""

    kind: str = "bce"
    label_smoothing: float = 0.0  # of bce
    pos_weight: np.ndarray | None = None  # of bce, (labels,)
    settings: dict[str, Any] = field(default_factory=dict)  # of the other losses, by argument name
    prior: np.ndarray | None = (
        None  # of distribution_balanced: (labels,) share of training rows with each label
    )

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(b, labels) losses. `logits`, `targets` (0 or 1): (b, labels), of the same floating-point dtype."""
        if self.kind == "focal":
            return focal(logits, targets, **self.settings)
        if self.kind == "asymmetric":
            return asymmetric(logits, targets, **self.settings)
        if self.kind == "distribution_balanced":
            prior = send(torch.as_tensor(self.prior, dtype=logits.dtype), logits.device)
            return distribution_balanced(logits, targets, prior, **self.settings)
        weight, smoothing = None, self.label_smoothing
        if self.pos_weight is not None:
            weight = send(torch.as_tensor(self.pos_weight, dtype=logits.dtype), logits.device)
        soft = targets * (1 - smoothing) + smoothing / 2
        return binary_cross_entropy_with_logits(logits, soft, pos_weight=weight, reduction="none")

    def mean(self, logits: np.ndarray, targets: np.ndarray) -> float | None:
        """The mean loss of a file in float64; None without rows. `logits`, `targets`: (rows, labels)."""
        matrices = (torch.as_tensor(matrix, dtype=torch.float64) for matrix in (logits, targets))
        return float(self(*matrices).mean()) if len(logits) else None

    def scale(self) -> dict[str, Any]:
        """The settings that the scale of the loss depends on, apart from the data, as JSON values."""
        weight = None if self.pos_weight is None else self.pos_weight.tolist()
        return {
            "kind": self.kind,
            "label_smoothing": self.label_smoothing,
            "pos_weight": weight,
            **self.settings,
        }

    def as_config(self) -> dict[str, Any] | None:
        """The entry `multilabel_loss` of an exported model's configuration; None for bce."""
        if self.kind == "bce":
            return None
        prior = {} if self.prior is None else {"prior": [float(share) for share in self.prior]}
        return {"kind": self.kind, **self.settings, **prior}


def from_config(config: Any) -> MultiLabelLoss | None:
    """The loss stored in the configuration of an exported model; None if there is none."""
    stored = dict(getattr(config, "multilabel_loss", None) or {})
    weight, smoothing = (getattr(config, name, None) for name in ("pos_weight", "label_smoothing_factor"))
    if stored:
        kind, prior = stored.pop("kind"), stored.pop("prior", None)
        return MultiLabelLoss(
            kind, settings=stored, prior=None if prior is None else np.asarray(prior, dtype=np.float64)
        )
    if weight is None and smoothing is None:
        return None
    return MultiLabelLoss(
        "bce", smoothing or 0.0, None if weight is None else np.asarray(weight, dtype=np.float64)
    )


def focal(logits: Tensor, targets: Tensor, focal_gamma: float, focal_alpha: float | None) -> Tensor:
    """-alpha_t (1 - p_t)^gamma log(p_t), where p_t is the probability of the true value, and alpha_t is alpha
    for positive labels, 1 - alpha for negative ones (Lin et al., arXiv:1708.02002, equation 5); without
    alpha, equation 4."""
    wrong = (1 - 2 * targets) * logits  # logit of the false value
    loss = torch.exp(focal_gamma * logsigmoid(wrong)) * softplus(wrong)
    return loss if focal_alpha is None else (focal_alpha * targets + (1 - focal_alpha) * (1 - targets)) * loss


def asymmetric(
    logits: Tensor, targets: Tensor, asl_gamma_neg: float, asl_gamma_pos: float, asl_margin: float
) -> Tensor:
    """-(1 - p)^gamma_pos log(p) for positive labels; -p_m^gamma_neg log(1 - p_m), p_m = max(p - margin, 0),
    for negative ones (Ridnik, Ben-Baruch et al., arXiv:2009.14119, equations 4 to 7)."""
    positive = torch.exp(asl_gamma_pos * logsigmoid(-logits)) * -logsigmoid(logits)
    if asl_margin == 0:
        negative = torch.exp(asl_gamma_neg * logsigmoid(logits)) * softplus(logits)
    else:
        shifted = (torch.sigmoid(logits) - asl_margin).clamp(min=LEAST)
        negative = shifted**asl_gamma_neg * -torch.log1p(-shifted)
    return targets * positive + (1 - targets) * negative


def distribution_balanced(
    logits: Tensor, targets: Tensor, prior: Tensor, db_mu: float, db_lambda: float, db_kappa: float
) -> Tensor:
    """The loss of Wu et al. (arXiv:2007.09654, equations 3 to 9). Their code,
    github.com/wutong16/DistributionBalancedLoss, also has a focal factor and divides kappa by lambda. The
    arguments' defaults are its settings for COCO.

    The weight of a label is alpha + sigmoid(beta (r - mu)). The rebalancing ratio r = (1 / prior) / (sum of 1
    / prior over the row's positive labels) is the label's share of the row's sampling frequency when labels
    are sampled uniformly; rows without labels, which the paper lacks, have r = 1. Logits are shifted by nu =
    kappa log(1 / prior - 1). The loss is -log sigmoid(x - nu) for positive labels and softplus(lambda (x -
    nu)) / lambda for negative ones. `prior`: (labels,), between 0 and 1, both excluded.
    """
    frequency = (targets / prior).sum(dim=1, keepdim=True)
    share = torch.where(frequency > 0, 1 / prior / frequency.clamp(min=1.0), torch.ones_like(targets))
    weight = DB_ALPHA + torch.sigmoid(DB_BETA * (share - db_mu))
    shifted = logits - db_kappa * torch.log(1 / prior - 1)
    return weight * (targets * softplus(-shifted) + (1 - targets) * softplus(db_lambda * shifted) / db_lambda)
