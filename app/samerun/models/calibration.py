"""Temperature scaling: logits are divided by a number, so that probabilities agree with frequencies."""

from __future__ import annotations

import numpy as np
import torch

from samerun.metrics.multilabel import sigmoid

LEAST, MOST = 0.05, 20.0  # bounds of temperatures: perfectly separated labels would have none
LEAST_ROWS = 10  # with a label, and without it, for a temperature of its own
HALVINGS = 30  # of the range of temperatures: a relative precision of 6e-9


def fit_temperatures(logits: np.ndarray, labels: np.ndarray, per_label: bool) -> np.ndarray:
    """(labels,) the temperatures T with the lowest binary cross-entropy of sigmoid(logits / T) (Guo et al.,
    arXiv:1706.04599, section 4.2, with a sigmoid in place of the softmax).

    `logits` and `labels`: (rows, labels), labels of 0 and 1. All labels share one temperature. With
    `per_label` labels with at least LEAST_ROWS positive and negative rows have their own.
    """
    logits, labels = np.asarray(logits, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    shared = _fit(logits.reshape(-1, 1), labels.reshape(-1, 1))
    temperatures = np.full(logits.shape[1], shared[0])
    if per_label:
        support = labels.sum(axis=0)
        enough = np.minimum(support, len(labels) - support) >= LEAST_ROWS
        temperatures[enough] = _fit(logits[:, enough], labels[:, enough])
    return temperatures


def _fit(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(m,) temperatures of the columns of (rows, m), by bisection: cross-entropy is convex in 1 / T, so its
    slope changes its sign at most once."""
    low, high = np.full(logits.shape[1], LEAST), np.full(logits.shape[1], MOST)
    for _ in range(HALVINGS):
        middle = np.sqrt(low * high)
        slope = (logits * (sigmoid(logits / middle) - labels)).sum(axis=0)  # with respect to 1 / T
        low, high = np.where(slope > 0, middle, low), np.where(slope > 0, high, middle)
    return np.sqrt(low * high)


def divide_outputs(
    weights: dict[str, torch.Tensor], layer: str, temperatures: np.ndarray
) -> dict[str, torch.Tensor]:
    """Copy of the weights with the output layer `layer` divided by the temperatures, so that plain
    transformers gives calibrated probabilities."""
    divisor = torch.as_tensor(temperatures, dtype=torch.float64)
    scaled = {}
    for name in (f"{layer}.weight", f"{layer}.bias"):
        if name in weights:
            wide = weights[name].double()
            scaled[name] = (wide / divisor.view(-1, *[1] * (wide.ndim - 1))).to(weights[name].dtype)
    return {**weights, **scaled}
