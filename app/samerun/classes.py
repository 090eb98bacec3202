"""Exclusive classes: their order, scores, predictions, tables and the confusion matrix's figure."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from samerun.errors import InputError
from samerun.reports.card import markdown_table
from samerun.reports.figures import confusion as confusion_figure
from samerun.task import ReportContent

TOP = 5  # of top5_accuracy
MAX_TABLE, MAX_FIGURE = 20, 30  # classes of a confusion matrix; metrics.json has the whole matrix
MAX_PREDICTED = 10  # classes of a prediction


def sorted_classes(names: Sequence[str], declared: Sequence[str] = (), unit: str = "images") -> list[str]:
    """The distinct classes: in the declared order, else sorted, as numbers if all are numbers. `unit`: what
    has a class, in the plural. Raises `InputError` for fewer than two."""
    distinct = sorted(set(names))
    if len(distinct) < 2:
        raise InputError(
            f"the training {unit} have one class only ({distinct[0]!r}); a classifier needs two or more"
        )
    if declared:
        return list(declared)
    return sorted(distinct, key=int) if all(name.isdecimal() for name in distinct) else distinct


def confusion_matrix(predicted: np.ndarray, references: np.ndarray, num_classes: int) -> np.ndarray:
    """(classes, classes) int64: number of rows by true and predicted class."""
    counts = np.bincount(references * num_classes + predicted, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def per_class(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """(classes,) precision, recall, f1 and support; undefined ratios are 0."""
    right, predicted, support = np.diag(confusion), confusion.sum(axis=0), confusion.sum(axis=1)
    return {
        "precision": right / np.maximum(predicted, 1),
        "recall": right / np.maximum(support, 1),
        "f1": 2 * right / np.maximum(predicted + support, 1),
        "support": support,
    }


def decision_scores(confusion: np.ndarray) -> dict[str, float]:
    """accuracy and f1_macro from a confusion matrix of at least one row. f1_macro is over classes that occur
    or were predicted, as in scikit-learn."""
    seen = (confusion.sum(axis=0) + confusion.sum(axis=1)) > 0
    return {
        "accuracy": float(np.diag(confusion).sum() / confusion.sum()),
        "f1_macro": float(per_class(confusion)["f1"][seen].mean()),
    }


def single_label_scores(
    logits: np.ndarray,
    references: np.ndarray,
    label_smoothing: float = 0.0,
    class_weight: np.ndarray | None = None,
) -> dict[str, float | None]:
    """loss, accuracy, f1_macro, and for more than five classes top5_accuracy. All None without rows.

    `logits`: (rows, classes); `references`: (rows,) class numbers; `class_weight`: (classes,) weights of the
    rows' losses, whose sum is divided by the number of rows. Raises ValueError for numbers out of range.
    """
    classes = logits.shape[1]
    if not len(references):
        return dict.fromkeys(["loss", "accuracy", "f1_macro", *([f"top{TOP}_accuracy"] * (classes > TOP))])
    if references.min() < 0 or references.max() >= classes:
        raise ValueError(
            f"references must be class numbers below {classes}, found {references.min()} to "
            f"{references.max()}"
        )
    values, targets = torch.as_tensor(logits).double(), torch.as_tensor(references)
    weight = None if class_weight is None else torch.as_tensor(class_weight).double()
    reduction = "mean" if weight is None else "none"  # torch's weighted mean divides by the weights
    losses = cross_entropy(values, targets, weight, reduction=reduction, label_smoothing=label_smoothing)
    scores = {"loss": float(losses.mean())}
    scores |= decision_scores(confusion_matrix(logits.argmax(axis=1), references, classes))
    if classes > TOP:
        own, column = logits[np.arange(len(references)), references][:, None], references[:, None]
        # Of equal logits the first class ranks highest, as in `argmax`.
        above = (logits > own) | ((logits == own) & (np.arange(classes) < column))
        scores[f"top{TOP}_accuracy"] = float((above.sum(axis=1) < TOP).mean())
    return scores


def weighted_scores(confusion: np.ndarray) -> dict[str, float]:
    """f1_weighted, by the classes' rows, and Matthews' correlation (Gorodkin, "Comparing two K-category
    assignments by a K-category correlation coefficient", 2004; 0 where it is undefined) from a confusion
    matrix of at least one row."""
    columns, total = per_class(confusion), confusion.sum()
    true, predicted = (confusion.sum(axis=axis).astype(float) for axis in (1, 0))
    covariance = np.diag(confusion).sum() * total - true @ predicted
    norm = np.sqrt((total**2 - predicted @ predicted) * (total**2 - true @ true))
    return {
        "f1_weighted": float(columns["f1"] @ columns["support"] / total),
        "matthews_correlation": float(covariance / norm) if norm else 0.0,
    }


def per_class_table(confusion: np.ndarray, labels: list[str]) -> list[dict[str, Any]]:
    """`per_class` as rows of a table."""
    columns = per_class(confusion)
    return [
        {"label": label, **{name: values[number].item() for name, values in columns.items()}}
        for number, label in enumerate(labels)
    ]


def prediction_lines(
    logits: np.ndarray, labels: list[str], references: np.ndarray | None
) -> Iterator[dict[str, Any]]:
    """Yields the predicted class of each row and the highest probabilities, best first. `logits`: (rows,
    classes). `references`: (rows,) the true classes, if they are known."""
    probabilities = torch.as_tensor(logits).double().softmax(-1).numpy()
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :MAX_PREDICTED]
    for number, (row, order) in enumerate(zip(probabilities, best, strict=True)):
        yield {
            "label": labels[order[0]],
            "probabilities": {labels[chosen]: round(float(row[chosen]), 6) for chosen in order},
            **({} if references is None else {"reference": labels[references[number]]}),
        }


def confusion_table(confusion: Sequence[Sequence[int]], labels: list[str], unit: str = "images") -> list[str]:
    """A confusion matrix as Markdown, one row per class; for many classes, a list of the most confused
    pairs."""
    counts = np.array(confusion)
    if len(labels) <= MAX_TABLE:
        rows = [[f"**{label}**", *row] for label, row in zip(labels, counts.tolist(), strict=True)]
        return markdown_table(["is \\ predicted", *labels], rows)
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_TABLE]
    pairs = [divmod(index, len(labels)) for index in order.tolist()]
    rows = [[labels[i], labels[j], int(wrong[i, j])] for i, j in pairs if wrong[i, j]]
    return markdown_table(["is", "predicted", unit], rows)


def card_sections(folder: Path, labels: list[str], unit: str = "images") -> list[str]:
    """Confusion matrix and per-class metrics from metrics.json as Markdown; [] without an evaluation."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    table = metrics.get("eval_per_class")
    if not table:
        return []
    matrix_lines = confusion_table(metrics["eval_confusion_matrix"], labels, unit)
    class_lines = markdown_table(list(table[0]), [list(row.values()) for row in table])
    return [
        *("## Confusion matrix (validation)", "", *matrix_lines, ""),
        *("## Classes (validation)", "", *class_lines),
    ]


def figures(confusion: np.ndarray, labels: list[str]) -> ReportContent:
    """The confusion matrix, for the classes with the most errors."""
    title = "Confusion matrix: rows are true classes"
    return ReportContent({"confusion_matrix": confusion_figure(title, confusion, labels, MAX_FIGURE)}, [])
