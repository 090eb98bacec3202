"""Exclusive classes: their order, scores, predictions, tables and the confusion matrix's figure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch.nn.functional import cross_entropy

from samerun.errors import InputError
from samerun.predictions import Likeliest, by_name
from samerun.reports.card import markdown_table, section, table_of
from samerun.reports.figures import confusion as confusion_figure
from samerun.run_folder import METRICS, read_metrics
from samerun.task import Predictions, ReportContent

TOP = 5  # of top5_accuracy
# Classes of a confusion matrix in metrics.json, tables and figures; MAX_TABLE: also errors that are listed.
MAX_MATRIX, MAX_TABLE, MAX_FIGURE = 100, 20, 30
ALL_PREDICTED, MAX_PREDICTED = 100, 10  # classes of a prediction: all of up to 100, otherwise ten
SORTED_CELLS = 1 << 22  # of predictions, at once


def sorted_classes(names: Sequence[str], declared: Sequence[str] = (), unit: str = "images") -> list[str]:
    """The distinct classes: in the declared order, else as `in_order`. `unit`: what has a class, in the
    plural. Raises `InputError` for fewer than two."""
    distinct = in_order(names)
    if len(distinct) < 2:
        raise InputError(
            f"the training {unit} have one class only ({distinct[0]!r}); a classifier needs two or more"
        )
    return list(declared) if declared else distinct


def in_order(names: Iterable[str]) -> list[str]:
    """The distinct names, sorted, as numbers if all are finite numbers."""
    distinct = sorted(set(names))
    try:
        numbers = {name: float(name) for name in distinct}
    except ValueError:
        return distinct
    return sorted(distinct, key=numbers.get) if all(map(math.isfinite, numbers.values())) else distinct


def confusion_of(predictions: Predictions) -> csr_array:
    """`confusion_matrix` of `logits`, (rows, classes), and `labels`, (rows,) class numbers."""
    logits = predictions["logits"]
    return confusion_matrix(logits.argmax(axis=1), predictions["labels"], logits.shape[1])


def confusion_matrix(predicted: np.ndarray, references: np.ndarray, num_classes: int) -> csr_array:
    """(classes, classes) int64: number of rows by true and predicted class. Sparse, because of 10,000 classes
    it would take 800 MB."""
    ones = np.ones(len(references), dtype=np.int64)
    return csr_array((ones, (references, predicted)), shape=(num_classes, num_classes))


def per_class(confusion: csr_array) -> dict[str, np.ndarray]:
    """(classes,) precision, recall, f1 and support; undefined ratios are 0."""
    right, predicted, support = confusion.diagonal(), confusion.sum(axis=0), confusion.sum(axis=1)
    return {
        "precision": right / np.maximum(predicted, 1),
        "recall": right / np.maximum(support, 1),
        "f1": 2 * right / np.maximum(predicted + support, 1),
        "support": support,
    }


def decision_scores(confusion: csr_array) -> dict[str, float]:
    """accuracy and f1_macro from a confusion matrix of at least one row. f1_macro is over classes that occur
    or were predicted, as in scikit-learn."""
    seen = (confusion.sum(axis=0) + confusion.sum(axis=1)) > 0
    return {
        "accuracy": float(confusion.trace() / confusion.sum()),
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
    losses = cross_entropy(values, targets, reduction="none", label_smoothing=label_smoothing)
    weight = 1.0 if class_weight is None else torch.as_tensor(class_weight).double()[targets]
    scores = {"loss": float((weight * losses).mean())}
    scores |= decision_scores(confusion_matrix(logits.argmax(axis=1), references, classes))
    if classes > TOP:
        own, column = logits[np.arange(len(references)), references][:, None], references[:, None]
        # Of equal logits the first class ranks highest, as in `argmax`.
        above = (logits > own) | ((logits == own) & (np.arange(classes) < column))
        scores[f"top{TOP}_accuracy"] = float((above.sum(axis=1) < TOP).mean())
    return scores


def weighted_scores(confusion: csr_array) -> dict[str, float]:
    """f1_weighted, by the classes' rows, and Matthews' correlation (Gorodkin, "Comparing two K-category
    assignments by a K-category correlation coefficient", 2004; 0 where it is undefined) from a confusion
    matrix of at least one row."""
    columns, total = per_class(confusion), confusion.sum()
    true, predicted = (confusion.sum(axis=axis).astype(float) for axis in (1, 0))
    covariance = confusion.trace() * total - true @ predicted
    norm = np.sqrt((total**2 - predicted @ predicted) * (total**2 - true @ true))
    return {
        "f1_weighted": float(columns["f1"] @ columns["support"] / total),
        "matthews_correlation": float(covariance / norm) if norm else 0.0,
    }


def per_class_table(confusion: csr_array, labels: list[str]) -> list[dict[str, Any]]:
    """`per_class` as rows of a table."""
    columns = per_class(confusion)
    return [
        {"label": label, **{name: values[number].item() for name, values in columns.items()}}
        for number, label in enumerate(labels)
    ]


def evaluation(confusion: csr_array, labels: list[str]) -> dict[str, Any]:
    """Entries of metrics.json: `per_class_table`, and the confusion matrix or, of many classes, the most
    frequent errors."""
    table = {"eval_per_class": per_class_table(confusion, labels)}
    if len(labels) <= MAX_MATRIX:
        return {**table, "eval_confusion_matrix": confusion.toarray().tolist()}
    return {**table, "eval_confused_pairs": confused_pairs(confusion, labels)}


def confused_pairs(confusion: csr_array, labels: list[str]) -> list[dict[str, Any]]:
    """The MAX_TABLE most frequent errors: true class, predicted class, number of rows."""
    cells = confusion.tocoo()
    wrong = np.flatnonzero(cells.row != cells.col)
    chosen = wrong[np.argsort(-cells.data[wrong], kind="stable")[:MAX_TABLE]]
    found = zip(cells.row[chosen], cells.col[chosen], cells.data[chosen].tolist(), strict=True)
    return [{"is": labels[row], "predicted": labels[column], "rows": count} for row, column, count in found]


def prediction_lines(
    logits: np.ndarray, labels: list[str], references: np.ndarray | None
) -> Iterator[dict[str, Any]]:
    """Yields the predicted class of each row and the probabilities, highest first; of many classes the
    highest ones and the true one. `logits`: (rows, classes). `references`: (rows,) the true classes, if they
    are known."""
    shown, kind = (MAX_PREDICTED, Likeliest) if len(labels) > ALL_PREDICTED else (len(labels), dict)
    step = max(1, SORTED_CELLS // len(labels))
    for start in range(0, len(logits), step):
        probabilities = torch.as_tensor(logits[start : start + step]).double().softmax(-1).numpy()
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, :shown]
        for number, (row, order) in enumerate(zip(probabilities, best, strict=True), start):
            if references is not None and references[number] not in order:
                order = [*order, references[number]]
            yield {
                "label": labels[order[0]],
                "probabilities": kind(by_name([labels[chosen] for chosen in order], row[order])),
                **({} if references is None else {"reference": labels[references[number]]}),
            }


def confusion_table(confusion: csr_array, labels: list[str]) -> list[str]:
    """A confusion matrix as Markdown, one row per class; for many classes, a list of the most confused
    pairs."""
    if len(labels) <= MAX_TABLE:
        rows = [[f"**{x}**", *row] for x, row in zip(labels, confusion.toarray().tolist(), strict=True)]
        return markdown_table(["is \\ predicted", *labels], rows)
    return table_of(confused_pairs(confusion, labels))


def card_sections(folder: Path, labels: list[str]) -> list[str]:
    """Confusion matrix and per-class metrics from metrics.json as Markdown; [] without an evaluation."""
    metrics = read_metrics(folder / METRICS)
    table = metrics.get("eval_per_class")
    if not table:
        return []
    if matrix := metrics.get("eval_confusion_matrix"):
        matrix_lines = confusion_table(csr_array(matrix), labels)
    else:
        matrix_lines = table_of(metrics["eval_confused_pairs"])
    return [
        "## Confusion matrix (validation)",
        "",
        *matrix_lines,
        "",
        *section("Classes (validation)", table),
    ]


def figures(confusion: csr_array, labels: list[str]) -> ReportContent:
    """The confusion matrix, for the classes with the most errors."""
    title = "Confusion matrix: rows are true classes"
    return ReportContent({"confusion_matrix": confusion_figure(title, confusion, labels, MAX_FIGURE)}, [])
