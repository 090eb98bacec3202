"""Metrics of single-label classification, from the logits of all rows."""

from __future__ import annotations

from typing import Any

import numpy as np

TOP = 5


def cross_entropy(logits: np.ndarray, references: np.ndarray, label_smoothing: float = 0.0) -> float:
    """Mean cross-entropy over rows, as torch's `cross_entropy` with `label_smoothing`.

    `logits`: (rows, classes); `references`: (rows,) class numbers.
    """
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    own = log_p[np.arange(len(references)), references]
    return float(-((1 - label_smoothing) * own + label_smoothing * log_p.mean(axis=1)).mean())


def confusion_matrix(predicted: np.ndarray, references: np.ndarray, num_classes: int) -> np.ndarray:
    """(classes, classes) int64: number of rows by true and predicted class."""
    counts = np.bincount(references * num_classes + predicted, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def top_accuracy(logits: np.ndarray, references: np.ndarray) -> float:
    """The share of rows with fewer than TOP logits above that of their class."""
    own = logits[np.arange(len(references)), references]
    return float(((logits > own[:, None]).sum(axis=1) < TOP).mean())


def per_class(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """(classes,) precision, recall, f1 and support; undefined ratios are 0."""
    right, predicted, support = np.diag(confusion), confusion.sum(axis=0), confusion.sum(axis=1)
    return {
        "precision": right / np.maximum(predicted, 1),
        "recall": right / np.maximum(support, 1),
        "f1": 2 * right / np.maximum(predicted + support, 1),
        "support": support,
    }


def single_label_scores(
    logits: np.ndarray, references: np.ndarray, label_smoothing: float = 0.0
) -> dict[str, float | None]:
    """loss, accuracy, f1_macro (over classes that occur or were predicted, as in scikit-learn), and
    top5_accuracy for more than five classes. All None without rows.

    `logits`: (rows, classes); `references`: (rows,) class numbers. Raises ValueError for numbers out of
    range.
    """
    classes = logits.shape[1]
    names = ["loss", "accuracy", "f1_macro", *([f"top{TOP}_accuracy"] if classes > TOP else [])]
    if not len(references):
        return dict.fromkeys(names)
    if references.min() < 0 or references.max() >= classes:
        raise ValueError(
            f"references must be class numbers below {classes}, found {references.min()} to "
            f"{references.max()}"
        )
    confusion = confusion_matrix(logits.argmax(axis=1), references, classes)
    top = {f"top{TOP}_accuracy": top_accuracy(logits, references)} if classes > TOP else {}
    return {"loss": cross_entropy(logits, references, label_smoothing), **decision_scores(confusion), **top}


def decision_scores(confusion: np.ndarray) -> dict[str, float]:
    """accuracy and f1_macro from a confusion matrix of at least one row."""
    seen = (confusion.sum(axis=0) + confusion.sum(axis=1)) > 0
    return {
        "accuracy": float(np.diag(confusion).sum() / confusion.sum()),
        "f1_macro": float(per_class(confusion)["f1"][seen].mean()),
    }


def per_class_table(confusion: np.ndarray, labels: list[str]) -> list[dict[str, Any]]:
    """`per_class` as rows of a table."""
    columns = per_class(confusion)
    return [
        {"label": label, **{name: values[number].item() for name, values in columns.items()}}
        for number, label in enumerate(labels)
    ]
