"""Image classification: class names, model configurations, scores, predictions, tables and the figure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from samerun.errors import InputError, described, listed, nearest, raise_problems
from samerun.images.data import Examples, Inspection
from samerun.images.transforms import Processing
from samerun.models.pretrained import labels_of, set_labels
from samerun.models.small_cnn import LEAST_SIZE, SmallCNNConfig
from samerun.reports.card import markdown_table
from samerun.reports.figures import matrix
from samerun.task import ReportContent

TOP = 5  # of top5_accuracy
MAX_TABLE, MAX_FIGURE = 20, 30  # classes of a confusion matrix; metrics.json has the whole matrix
MAX_PREDICTED = 10  # classes of a prediction
CARD_METRICS = ["loss", "accuracy", "top5_accuracy", "f1_macro"]
USAGE = """from transformers import pipeline
classify = pipeline("image-classification", model="best")
classify("image.png")  # classes and their probabilities"""
# Needs no code of this repository.
SMALL_CNN_USAGE = """import json, numpy, torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
config, layers, mode = json.load(open("best/config.json")), [], {1: "L", 3: "RGB"}
for i, (a, b) in enumerate([(config["num_channels"], 16), (16, 32), (32, 64), (64, 128)]):
    layers += [nn.Conv2d(a, b, 3, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    layers += [nn.MaxPool2d(2)] if i % 2 else []
layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(2048, 1024), nn.ReLU()]
layers += [nn.Linear(1024, 128), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(128, len(config["id2label"]))).eval()
model.load_state_dict(load_file("best/model.safetensors"))
image = Image.open("image.png").convert(mode[config["num_channels"]]).resize(config["image_size"][::-1])
pixels = (torch.tensor(numpy.array(image)) / 255 - config["image_mean"]) / config["image_std"]
pixels = pixels.reshape(1, *config["image_size"], -1).permute(0, 3, 1, 2)
print(config["id2label"][str(model(pixels).argmax().item())])"""


# Classes


def class_names(examples: Examples) -> list[str]:
    """The class name of each row. Raises `InputError` naming rows without a class."""
    if examples.labels is None:
        raise InputError(
            f"{examples.path}: has no classes; expected a folder for each class, a column "
            "(--label_column) or, beside MNIST's images-idx3 file, its labels-idx1 file"
        )
    problems = []
    for row, value in enumerate(examples.labels):
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number and not (isinstance(value, str) and value.strip()):
            place = examples.images.where(row)
            problems.append(f"{place}: the class is {described(value)}, expected a text or a whole number")
    raise_problems(problems)
    return [str(value) for value in examples.labels]


def sorted_classes(names: list[str], declared: Sequence[str] = ()) -> list[str]:
    """The distinct classes: in the declared order, else sorted, as numbers if all are numbers. Raises
    `InputError` for fewer than two."""
    distinct = sorted(set(names))
    if len(distinct) < 2:
        raise InputError(
            f"the training images have one class only ({distinct[0]!r}); a classifier needs two or more"
        )
    if declared:
        return list(declared)
    return sorted(distinct, key=int) if all(name.isdecimal() for name in distinct) else distinct


def class_numbers(examples: Examples, names: list[str], labels: list[str]) -> np.ndarray:
    """(rows,) int64: the class number of each row. Raises `InputError` naming rows whose class is not among
    `labels`."""
    numbers, problems = {label: number for number, label in enumerate(labels)}, []
    for row, name in enumerate(names):
        if name not in numbers:
            near = nearest(name, labels)
            hint = f"; did you mean {near!r}?" if near else ""
            problems.append(f"{examples.images.where(row)}: unknown class {name!r}{hint}")
    raise_problems(problems, f"the model's classes are {listed(labels)}")
    return np.array([numbers[name] for name in names], dtype=np.int64)


def note_classes(numbers: np.ndarray, labels: list[str], notes: list[str]) -> None:
    """Notes the number and sizes of the classes, and classes without a training image."""
    counts = np.bincount(numbers, minlength=len(labels))
    fewest, most = counts[counts > 0].min(), counts.max()
    number = fewest if fewest == most else f"{fewest} to {most}"
    notes.append(f"{len(labels)} classes, of {number} training images each")
    if missing := [label for label, count in zip(labels, counts, strict=True) if not count]:
        notes.append(f"no training image has the class {listed(missing)}")


# Models


def new_small_cnn(
    arguments: Any, examples: Examples, inspected: Inspection, labels: list[str]
) -> SmallCNNConfig:
    """A small CNN for training images: of their size, with one channel if all are grey. Raises `InputError`
    for images of several sizes without --image_size, and for images that are too small."""
    image_mode, image_size, headers = arguments.image_mode, arguments.image_size, inspected.headers
    grey = image_mode == "L" or (image_mode == "auto" and all(header.is_grey for header in headers))
    size = (image_size, image_size) if image_size else next(iter(inspected.sizes))
    if image_size is None and len(inspected.sizes) > 1:
        first = headers[0]
        row = next(row for row, header in enumerate(headers) if header[:2] != first[:2])
        raise InputError(
            f"{examples.path}: images of {len(inspected.sizes)} sizes: {examples.images.name(0)} has "
            f"{first.width}x{first.height} pixels, {examples.images.name(row)} "
            f"{headers[row].width}x{headers[row].height}; give --image_size N to have all resized to NxN"
        )
    if min(size) < LEAST_SIZE:
        raise InputError(
            f"{examples.path}: images of {size[1]}x{size[0]} pixels; the small CNN needs {LEAST_SIZE} each "
            f"way: give --image_size {LEAST_SIZE} or more"
        )
    return SmallCNNConfig(1 if grey else 3, size, dict(enumerate(labels)))


def with_labels(config: SmallCNNConfig, labels: list[str], arguments: Any) -> SmallCNNConfig:
    """The configuration of a small CNN with these classes. Raises `InputError` if it was trained for other
    classes or another --image_size."""
    if arguments.image_size is not None and config.image_size != (arguments.image_size,) * 2:
        height, width = config.image_size
        raise InputError(
            f"--image_size {arguments.image_size}: this model sees images of {width}x{height} "
            "pixels; leave it out"
        )
    if labels != labels_of(config) and not arguments.from_scratch:
        raise InputError(
            f"{arguments.model_name_or_path}: has the classes {listed(labels_of(config))}, but the training "
            f"images have {listed(labels)}; add --from_scratch to start anew"
        )
    smoothing = arguments.label_smoothing_factor if arguments.modes.train else config.label_smoothing_factor
    return replace(config, id2label=dict(enumerate(labels)), label_smoothing_factor=smoothing)


def small_cnn_processing(config: SmallCNNConfig) -> Processing:
    mode = {1: "L", 3: "RGB"}[config.num_channels]
    mean, std = ((value,) * config.num_channels for value in (config.image_mean, config.image_std))
    return Processing(config.image_size, mode, mean, std)


def configure(config: Any, labels: list[str], label_smoothing_factor: float) -> None:
    """Sets classes and loss in a configuration of transformers. It keeps the label smoothing, so that later
    evaluations have the same loss."""
    config.label_smoothing_factor = label_smoothing_factor
    set_labels(config, labels)
    config.problem_type = "single_label_classification"


# Scores


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
    logits: np.ndarray, references: np.ndarray, label_smoothing: float = 0.0
) -> dict[str, float | None]:
    """loss, accuracy, f1_macro, and for more than five classes top5_accuracy. All None without rows.

    `logits`: (rows, classes); `references`: (rows,) class numbers. Raises ValueError for numbers out of
    range.
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
    loss = functional.cross_entropy(values, targets, label_smoothing=label_smoothing)
    scores = {"loss": float(loss)}
    scores |= decision_scores(confusion_matrix(logits.argmax(axis=1), references, classes))
    if classes > TOP:
        own = logits[np.arange(len(references)), references]
        scores[f"top{TOP}_accuracy"] = float(((logits > own[:, None]).sum(axis=1) < TOP).mean())
    return scores


def per_class_table(confusion: np.ndarray, labels: list[str]) -> list[dict[str, Any]]:
    """`per_class` as rows of a table."""
    columns = per_class(confusion)
    return [
        {"label": label, **{name: values[number].item() for name, values in columns.items()}}
        for number, label in enumerate(labels)
    ]


# Predictions and reports


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


def confusion_table(confusion: Sequence[Sequence[int]], labels: list[str]) -> list[str]:
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
    return markdown_table(["is", "predicted", "images"], rows)


def card_sections(folder: Path, labels: list[str]) -> list[str]:
    """Confusion matrix and per-class metrics from metrics.json as Markdown; [] without an evaluation."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    table = metrics.get("eval_per_class")
    if not table:
        return []
    matrix_lines = confusion_table(metrics["eval_confusion_matrix"], labels)
    class_lines = markdown_table(list(table[0]), [list(row.values()) for row in table])
    return [
        *("## Confusion matrix (validation)", "", *matrix_lines, ""),
        *("## Classes (validation)", "", *class_lines),
    ]


def figures(confusion: np.ndarray, labels: list[str]) -> ReportContent:
    """The confusion matrix, for the classes with the most errors."""
    errors = confusion.sum(axis=0) + confusion.sum(axis=1) - 2 * confusion.diagonal()
    chosen = np.sort(np.argsort(-errors, kind="stable")[:MAX_FIGURE])
    counts = confusion[np.ix_(chosen, chosen)]
    shares = counts / np.maximum(confusion.sum(axis=1)[chosen, None], 1)
    title, ticks = "Confusion matrix: rows are true classes", [labels[number] for number in chosen]
    figure = matrix(title, counts, ticks, x="predicted", y="true", shares=shares)
    return ReportContent({"confusion_matrix": figure}, [])
