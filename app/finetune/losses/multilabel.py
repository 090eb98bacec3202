"""Losses of multi-label classification, element by element: their sum over rows and labels does not depend on micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus

from finetune.kernels.transfer import send

DB_ALPHA, DB_BETA = 0.1, 10.0  # of the weight of distribution_balanced, the same for all data sets of its paper
LEAST = 1e-12  # of a probability that is raised to a power: its gradient stays finite


@dataclass(frozen=True)
class MultiLabelLoss:
    """--loss with its settings.

    `pos_weight`, `label_smoothing`: of "bce". `settings`: of the others, by the arguments' names. `prior`: (labels,) the share
    of the training rows that has each label, for "distribution_balanced".
    """

    kind: str = "bce"
    label_smoothing: float = 0.0
    pos_weight: np.ndarray | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    prior: np.ndarray | None = None

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(b, labels) of logits and targets of 0 and 1, (b, labels) both and of one floating-point type."""
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
        """The mean over all rows and labels of a file, (rows, labels), in float64; None without rows."""
        matrices = (torch.as_tensor(matrix, dtype=torch.float64) for matrix in (logits, targets))
        return float(self(*matrices).mean()) if len(logits) else None

    def as_config(self) -> dict[str, Any] | None:
        """What an exported model's configuration says of it beside pos_weight and label_smoothing_factor."""
        if self.kind == "bce":
            return None
        prior = {} if self.prior is None else {"prior": [float(share) for share in self.prior]}
        return {"kind": self.kind, **self.settings, **prior}


def from_config(config: Any) -> MultiLabelLoss | None:
    """The loss that a model of ours was trained with, as its configuration has it; None where that says nothing."""
    stored = dict(getattr(config, "multilabel_loss", None) or {})
    weight, smoothing = (getattr(config, name, None) for name in ("pos_weight", "label_smoothing_factor"))
    if stored:
        kind, prior = stored.pop("kind"), stored.pop("prior", None)
        return MultiLabelLoss(kind, settings=stored, prior=None if prior is None else np.asarray(prior, dtype=np.float64))
    if weight is None and smoothing is None:
        return None
    return MultiLabelLoss("bce", smoothing or 0.0, None if weight is None else np.asarray(weight, dtype=np.float64))


def focal(logits: Tensor, targets: Tensor, focal_gamma: float, focal_alpha: float | None) -> Tensor:
    """-alpha_t (1 - p_t)^gamma log(p_t), where p_t is the probability of what is true, and alpha_t is alpha for a label that a
    row has and 1 - alpha for others (Lin et al., arXiv:1708.02002, equation 5); without alpha equation 4."""
    wrong = (1 - 2 * targets) * logits  # the logit of what is not true
    loss = torch.exp(focal_gamma * logsigmoid(wrong)) * softplus(wrong)
    return loss if focal_alpha is None else (focal_alpha * targets + (1 - focal_alpha) * (1 - targets)) * loss


def asymmetric(logits: Tensor, targets: Tensor, asl_gamma_neg: float, asl_gamma_pos: float, asl_margin: float) -> Tensor:
    """-(1 - p)^gamma_pos log(p) for a label that a row has; -p_m^gamma_neg log(1 - p_m), p_m = max(p - margin, 0), for others
    (Ridnik, Ben-Baruch et al., arXiv:2009.14119, equations 4 to 7)."""
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
    """The loss of Wu et al. (arXiv:2007.09654, equations 3 to 9). Their code, github.com/wutong16/DistributionBalancedLoss,
    also has a focal factor and divides kappa by lambda; the defaults of the arguments are its settings for COCO.

    A label's share in how often a row would be drawn by drawing labels, r = (1 / prior) / (sum of 1 / prior over the row's
    labels), gives its weight alpha + sigmoid(beta (r - mu)). Logits are shifted by nu = kappa log(1 / prior - 1), and those of
    labels that a row does not have are scaled by lambda: -log sigmoid(x - nu), and softplus(lambda (x - nu)) / lambda. `prior`:
    (labels,), above 0 and below 1. A row without labels, of which the paper has none, has r = 1.
    """
    of_labels = (targets / prior).sum(dim=1, keepdim=True)
    share = torch.where(of_labels > 0, 1 / prior / of_labels.clamp(min=1.0), torch.ones_like(targets))
    weight = DB_ALPHA + torch.sigmoid(DB_BETA * (share - db_mu))
    shifted = logits - db_kappa * torch.log(1 / prior - 1)
    return weight * (targets * softplus(-shifted) + (1 - targets) * softplus(db_lambda * shifted) / db_lambda)
