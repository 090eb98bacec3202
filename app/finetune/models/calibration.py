"""Temperatures: one number that logits are divided by, so that probabilities are as often right as they say."""

from __future__ import annotations

import numpy as np
import torch

from finetune.metrics.multilabel import sigmoid

LEAST, MOST = 0.05, 20.0  # of a temperature: labels that scores separate would have none
LEAST_ROWS = 10  # with a label, and without it, for a temperature of its own
HALVINGS = 30  # of the range of temperatures, to 6e-9 of each


def fit_temperatures(logits: np.ndarray, labels: np.ndarray, per_label: bool) -> np.ndarray:
    """(labels,) the temperatures T for which sigmoid(logits / T) has the least binary cross-entropy (Guo et al.,
    arXiv:1706.04599, section 4.2, with a sigmoid in place of the softmax).

    `logits` and `labels`: (rows, labels), labels of 0 and 1. All labels have one temperature, or `per_label` each its own, but
    for those with fewer than LEAST_ROWS rows of either kind, which keep that of all.
    """
    logits, labels = np.asarray(logits, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    common = _fit(logits.reshape(-1, 1), labels.reshape(-1, 1))
    temperatures = np.full(logits.shape[1], common[0])
    if per_label:
        support = labels.sum(axis=0)
        enough = np.minimum(support, len(labels) - support) >= LEAST_ROWS
        temperatures[enough] = _fit(logits[:, enough], labels[:, enough])
    return temperatures


def _fit(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(m,) of (rows, m), by bisection: cross-entropy is convex in 1 / T, so its slope changes its sign once, or nowhere between
    the bounds."""
    low, high = np.full(logits.shape[1], LEAST), np.full(logits.shape[1], MOST)
    for _ in range(HALVINGS):
        middle = np.sqrt(low * high)
        slope = (logits * (sigmoid(logits / middle) - labels)).sum(axis=0)  # by 1 / T
        low, high = np.where(slope > 0, middle, low), np.where(slope > 0, high, middle)
    return np.sqrt(low * high)


def divide_outputs(weights: dict[str, torch.Tensor], layer: str, temperatures: np.ndarray) -> dict[str, torch.Tensor]:
    """Weights whose linear layer of this name, the last one, gives the logits divided by the temperatures: plain transformers
    then gives calibrated probabilities. In fp32; the tensors given are not changed."""
    by = torch.as_tensor(temperatures, dtype=torch.float64)
    scaled = {}
    for name in (f"{layer}.weight", f"{layer}.bias"):
        if name in weights:
            wide = weights[name].double()
            scaled[name] = (wide / by.view(-1, *[1] * (wide.ndim - 1))).to(weights[name].dtype)
    return {**weights, **scaled}
