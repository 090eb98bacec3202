"""Image classification: class names, model configuration, the check of the export, predictions and tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samerun.errors import InputError, TrainingError, described, listed, nearest, raise_problems
from samerun.images.examples import Examples
from samerun.images.processing import Processing
from samerun.images.sources import Inspection
from samerun.models.pretrained import labels_of, set_labels
from samerun.models.small_cnn import LEAST_SIZE, SmallCNNConfig
from samerun.reports.card import markdown_table

MOST_CLASSES = 20  # of a confusion matrix in the report; metrics.json has the whole matrix
CHECKED_ROWS = 4
SHOWN_CLASSES = 10  # of a prediction
# Of probabilities, by the run's precision: the exported model computes in fp32.
TOLERANCE = {"no": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
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


def class_names(examples: Examples) -> list[str]:
    """The class name of each row. Raises `InputError` naming rows without a class."""
    if examples.classes is None:
        raise InputError(
            f"{examples.path}: has no classes; expected a folder for each class, a column "
            "(--label_column) or, beside MNIST's "
            "images-idx3 file, its labels-idx1 file"
        )
    wrong = [row for row, value in enumerate(examples.classes) if not _is_class(value)]
    raise_problems(
        [
            f"{examples.where(row)}: the class is {described(examples.classes[row])}, expected a "
            "text or a whole number"
            for row in wrong
        ]
    )
    return [str(value) for value in examples.classes]


def _is_class(value: Any) -> bool:
    return (isinstance(value, str) and bool(value.strip())) or (
        isinstance(value, int) and not isinstance(value, bool)
    )


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
    numbers = {label: number for number, label in enumerate(labels)}
    wrong = [row for row, name in enumerate(names) if name not in numbers]
    raise_problems(
        [
            f"{examples.where(row)}: unknown class {names[row]!r}{_suggestion(names[row], labels)}"
            for row in wrong
        ],
        f"the model's classes are {listed(labels)}",
    )
    return np.array([numbers[name] for name in names], dtype=np.int64)


def _suggestion(name: str, labels: list[str]) -> str:
    near = nearest(name, labels)
    return f"; did you mean {near!r}?" if near else ""


def note_classes(numbers: np.ndarray, labels: list[str], notes: list[str]) -> None:
    """Notes the number and sizes of the classes, and classes without a training image."""
    counts = np.bincount(numbers, minlength=len(labels))
    missing = [label for label, count in zip(labels, counts, strict=True) if not count]
    fewest, most = counts[counts > 0].min(), counts.max()
    number = fewest if fewest == most else f"{fewest} to {most}"
    notes.append(f"{len(labels)} classes, of {number} training images each")
    if missing:
        notes.append(f"no training image has the class {listed(missing)}")


def choose_labels(own: list[str] | None, training: list[str] | None, config: Any) -> list[str]:
    """The class list. `own`: the model's classes; `training`: those of the training images, None without
    training. Keeps the model's order if both have the same classes."""
    if training is None:
        return labels_of(config)
    return own if own is not None and sorted(own) == sorted(training) else training


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
            f"{arguments.model_name_or_path}: has the classes {listed(labels_of(config))}, but the "
            "training images have "
            f"{listed(labels)}; add --from_scratch to start anew"
        )
    smoothing = arguments.label_smoothing_factor if arguments.modes.train else config.label_smoothing_factor
    return replace(config, id2label=dict(enumerate(labels)), label_smoothing_factor=smoothing)


def new_small_cnn(
    arguments: Any, examples: Examples, inspected: Inspection, labels: list[str]
) -> SmallCNNConfig:
    """A small CNN for training images: of their size, with one channel if all are grey. Raises `InputError`
    for images of several sizes without --image_size, and for images that are too small."""
    image_mode, image_size = arguments.image_mode, arguments.image_size
    grey = image_mode == "L" or (image_mode == "auto" and all(header.is_grey for header in inspected.headers))
    size = (image_size, image_size) if image_size else next(iter(inspected.sizes))
    if image_size is None and len(inspected.sizes) > 1:
        first = inspected.headers[0]
        row = next(row for row, header in enumerate(inspected.headers) if header[:2] != first[:2])
        other = inspected.headers[row]
        raise InputError(
            f"{examples.path}: images of {len(inspected.sizes)} sizes: {examples.images.name(0)} has "
            f"{first.width}x{first.height} pixels, {examples.images.name(row)} "
            f"{other.width}x{other.height}; give "
            "--image_size N to have all resized to NxN"
        )
    if min(size) < LEAST_SIZE:
        raise InputError(
            f"{examples.path}: images of {size[1]}x{size[0]} pixels; the small CNN needs "
            f"{LEAST_SIZE} each way: give "
            f"--image_size {LEAST_SIZE} or more"
        )
    return SmallCNNConfig(1 if grey else 3, size, dict(enumerate(labels)))


def small_cnn_processing(config: SmallCNNConfig) -> Processing:
    mode = {1: "L", 3: "RGB"}[config.num_channels]
    mean, std = ((value,) * config.num_channels for value in (config.image_mean, config.image_std))
    return Processing(config.image_size, mode, mean, std)


def configure(config: Any, labels: list[str], label_smoothing_factor: float) -> None:
    """Sets classes and loss in a configuration. It keeps the label smoothing, so that later evaluations have
    the same loss."""
    config.label_smoothing_factor = label_smoothing_factor
    set_labels(config, labels)
    config.problem_type = "single_label_classification"


def renew_head(model: Any) -> None:
    """Re-initialises the head, which was trained for other classes."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.startswith(f"{model.base_model_prefix}."):
            model._init_weights(module)


def rows_to_check(num_rows: int) -> np.ndarray:
    """A few evenly spaced rows of a file."""
    return np.linspace(0, num_rows - 1, min(CHECKED_ROWS, num_rows)).astype(int)


def check_export(
    load: Callable[[Path], torch.nn.Module],
    inputs: torch.Tensor,
    logits: np.ndarray,
    precision: str,
    folder: Path,
) -> None:
    """Loads an exported folder and compares its probabilities with the run's. `inputs`: pixel values of some
    images; `logits`: (images, classes) of the run for them.

    Raises `TrainingError` if they differ by more than the rounding of `precision`.
    """
    model = load(folder).eval()
    with torch.no_grad():
        probabilities = model(pixel_values=inputs).logits.double().softmax(-1)
    difference = float((probabilities - torch.as_tensor(logits).double().softmax(-1)).abs().max())
    if not difference <= TOLERANCE[precision]:
        raise TrainingError(
            "the exported model does not give the run's probabilities (difference "
            f"{difference:.1e}); nothing was replaced. "
            "Please report this with run.json"
        )


def prediction_lines(
    logits: np.ndarray, labels: list[str], references: np.ndarray | None
) -> Iterator[dict[str, Any]]:
    """Yields the predicted class of each row and the highest probabilities, best first. `logits`: (rows,
    classes). `references`: (rows,) the true classes, if they are known."""
    probabilities = torch.as_tensor(logits).double().softmax(-1).numpy()
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :SHOWN_CLASSES]
    for number, (row, order) in enumerate(zip(probabilities, best, strict=True)):
        yield {
            "label": labels[order[0]],
            "probabilities": {labels[chosen]: round(float(row[chosen]), 6) for chosen in order},
            **({} if references is None else {"reference": labels[references[number]]}),
        }


def confusion_table(confusion: list[list[int]], labels: list[str]) -> list[str]:
    """A confusion matrix as Markdown, one row per class; for many classes, a list of the most confused
    pairs."""
    counts = np.array(confusion)
    if len(labels) <= MOST_CLASSES:
        rows = [[f"**{label}**", *row] for label, row in zip(labels, counts.tolist(), strict=True)]
        return markdown_table(["is \\ predicted", *labels], rows)
    wrong = counts - np.diag(np.diag(counts))
    worst = [
        divmod(index, len(labels))
        for index in np.argsort(-wrong, axis=None, kind="stable")[:MOST_CLASSES].tolist()
    ]
    rows = [[labels[i], labels[j], int(wrong[i, j])] for i, j in worst if wrong[i, j]]
    return markdown_table(["is", "predicted", "images"], rows)


def card_sections(folder: Path, labels: list[str]) -> list[str]:
    """Confusion matrix and per-class metrics from metrics.json as Markdown; [] without an evaluation."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    table = metrics.get("eval_per_class")
    if not table:
        return []
    columns = list(table[0])
    rows = [[row[column] for column in columns] for row in table]
    matrix = confusion_table(metrics["eval_confusion_matrix"], labels)
    return [
        "## Confusion matrix (validation)",
        "",
        *matrix,
        "",
        "## Classes (validation)",
        "",
        *markdown_table(columns, rows),
    ]
