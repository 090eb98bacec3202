"""Losses of multi-label classification, per row and label, and weights of labels and classes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus

from samerun.data.files import object_in, read_object
from samerun.errors import InputError, listed, nearest
from samerun.kernels.common import constants

DB_ALPHA, DB_BETA = 0.1, 10.0  # of distribution_balanced's weight, the same for all data sets of its paper
MIN_PROBABILITY = 1e-12  # of one that is raised to a power, to keep its gradient finite
MAX_POS_WEIGHT = 1e6  # larger weights would soon overflow fp32 losses


@dataclass(frozen=True)
class MultiLabelLoss:
    """--loss with its settings, per row and label: the sum does not depend on micro-batches."""

    kind: str = "bce"
    label_smoothing: float = 0.0  # of bce: targets 0 and 1 become s/2 and 1 - s/2
    pos_weight: np.ndarray | None = None  # of bce, (labels,)
    settings: dict[str, Any] = field(default_factory=dict)  # of the other losses, by argument name
    prior: np.ndarray | None = None  # of distribution_balanced: (labels,) share of rows with each label

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(b, labels) losses. `logits`, `targets` (0 or 1): (b, labels), of the same floating-point dtype."""
        own = {"label_smoothing": self.label_smoothing} if self.kind == "bce" else {**self.settings}
        for name in ("pos_weight", "prior"):
            if (values := getattr(self, name)) is not None:
                own[name] = constants(values, logits)
        return FUNCTIONS[self.kind](logits, targets, **own)

    def mean(self, logits: np.ndarray, targets: np.ndarray) -> float | None:
        """The mean loss of a file in float64; None without rows. `logits`, `targets`: (rows, labels)."""
        matrices = (torch.as_tensor(matrix, dtype=torch.float64) for matrix in (logits, targets))
        return float(self(*matrices).mean()) if len(logits) else None

    def as_settings(self) -> dict[str, Any]:
        """What the scale of the loss depends on, as JSON values."""
        weight = None if self.pos_weight is None else self.pos_weight.tolist()
        prior = {} if self.prior is None else {"prior": self.prior.tolist()}
        of_bce = {"label_smoothing": self.label_smoothing, "pos_weight": weight}
        return {"kind": self.kind, **of_bce, **self.settings, **prior}


def loss_of_arguments(
    arguments: Any, positive: np.ndarray, rows: int, labels: list[str], notes: list[str]
) -> MultiLabelLoss:
    """The loss of --loss. `positive`: (labels,) number of the training `rows` with each label. Raises
    `InputError`."""
    if arguments.loss_name == "bce":
        weight = positive_weights(arguments, positive, rows, labels)
        if weight is not None:
            least, most = weight.min(), weight.max()
            notes.append(f"weights of positive targets: {least:.2f} to {most:.2f} (--pos_weight)")
        return MultiLabelLoss("bce", arguments.label_smoothing_factor, weight)
    # Half a row is added on both sides, as in `prior_bias`.
    prior = (positive + 0.5) / (rows + 1) if arguments.loss_name == "distribution_balanced" else None
    return MultiLabelLoss(arguments.loss_name, settings=arguments.loss_arguments, prior=prior)


def loss_of_config(config: Any) -> MultiLabelLoss | None:
    """The loss stored in the configuration of an exported model; None if there is none."""
    stored = dict(getattr(config, "multilabel_loss", None) or {})
    weight, smoothing = (getattr(config, name, None) for name in ("pos_weight", "label_smoothing_factor"))
    if stored:
        kind, prior = stored.pop("kind"), stored.pop("prior", None)
        prior = None if prior is None else np.asarray(prior, dtype=np.float64)
        return MultiLabelLoss(kind, settings=stored, prior=prior)
    if weight is None and smoothing is None:
        return None
    weight = None if weight is None else np.asarray(weight, dtype=np.float64)
    return MultiLabelLoss("bce", smoothing or 0.0, weight)


def positive_weights(arguments: Any, positive: np.ndarray, rows: int, labels: list[str]) -> np.ndarray | None:
    """The weights of positive targets that --pos_weight asks for. Balanced: negatives / positives, at least
    1; 1 for a label without rows. `positive`: (labels,) number of the training `rows` with each label."""
    ratio = np.divide(rows - positive, positive, out=np.ones(len(positive)), where=positive > 0)
    return given_weights(arguments, np.maximum(ratio, 1.0), labels)


def class_weights(arguments: Any, count: np.ndarray, labels: list[str]) -> np.ndarray | None:
    """The weights of the rows' cross-entropy that --pos_weight asks for. Balanced: rows / (classes * rows of
    the class), as scikit-learn's; 1 for a class without rows. `count`: (classes,) training rows."""
    even = count.sum() / np.count_nonzero(count)
    return given_weights(arguments, np.divide(even, count, out=np.ones(len(count)), where=count > 0), labels)


def given_weights(arguments: Any, balanced: np.ndarray, labels: list[str]) -> np.ndarray | None:
    """(labels,) the weights of --pos_weight: None for none; `balanced`, at most 20 or LIMIT (balanced:LIMIT);
    or those of a json object {"LABEL": WEIGHT} or a file with one. Raises `InputError` for one that cannot be
    read or lacks a positive number for a label."""
    choice = arguments.pos_weight
    if choice == "none":
        return None
    if choice.partition(":")[0] == "balanced":
        return np.minimum(balanced, arguments.pos_weight_cap)
    try:
        weights = object_in("the object", choice) if choice.startswith("{") else read_object(choice)
    except InputError as error:
        hint = "" if Path(choice).is_file() else "; expected none, balanced or a json file"
        raise InputError(*(f"--pos_weight {problem}{hint}" for problem in error.problems)) from None
    if unknown := [label for label in weights if label not in labels]:
        near = nearest(unknown[0], labels)
        hint = f"; did you mean {near!r}?" if near else ""
        raise InputError(f"--pos_weight {choice}: no label is {listed(unknown)}{hint}")
    wrong = [
        x for x in labels if type(weights.get(x)) not in (int, float) or not 0 < weights[x] <= MAX_POS_WEIGHT
    ]
    if wrong:
        raise InputError(
            f"--pos_weight {choice}: no positive weight for {', '.join(map(repr, wrong[:20]))}; expected a "
            f"number above 0 and at most {MAX_POS_WEIGHT:g} for every label"
        )
    return np.array([float(weights[label]) for label in labels])


def bce(logits: Tensor, targets: Tensor, label_smoothing: float, pos_weight: Tensor | None = None) -> Tensor:
    """Binary cross-entropy, of positive targets times `pos_weight`, (labels,)."""
    # By the true value: torch's `pos_weight` would weight the smoothed share of negatives, too.
    weight = None if pos_weight is None else torch.where(targets > 0, pos_weight, 1.0)
    soft = targets * (1 - label_smoothing) + label_smoothing / 2
    return binary_cross_entropy_with_logits(logits, soft, weight, reduction="none")


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
        shifted = (torch.sigmoid(logits) - asl_margin).clamp(min=MIN_PROBABILITY)
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


FUNCTIONS = {
    "bce": bce,
    "focal": focal,
    "asymmetric": asymmetric,
    "distribution_balanced": distribution_balanced,
}
