"""Image classification: class names and model configurations."""

from typing import Any

import numpy as np

from samerun.errors import InputError, described, listed, nearest, raise_problems
from samerun.images.data import Examples, Inspection
from samerun.images.transforms import Processing
from samerun.models.small_cnn import LEAST_SIZE, SmallCNNConfig

USAGE = """from transformers import pipeline
classify = pipeline("image-classification", model="best")
classify("image.png")  # classes and their probabilities"""
# Needs no code of this repository.
SMALL_CNN_USAGE = """import json, numpy, torch
from PIL import Image, ImageOps
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
image = ImageOps.exif_transpose(Image.open("image.png")).convert(mode[config["num_channels"]])
image = image.resize(config["image_size"][::-1], Image.Resampling.BILINEAR)
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
    first, sizes = headers[0], {header[:2] for header in headers}
    size = (image_size, image_size) if image_size else (first.height, first.width)
    if image_size is None and len(sizes) > 1:
        row = next(row for row, header in enumerate(headers) if header[:2] != first[:2])
        raise InputError(
            f"{examples.path}: images of {len(sizes)} sizes: {examples.images.name(0)} has "
            f"{first.width}x{first.height} pixels, {examples.images.name(row)} "
            f"{headers[row].width}x{headers[row].height}; give --image_size N to have all resized to NxN"
        )
    if min(size) < LEAST_SIZE:
        raise InputError(
            f"{examples.path}: images of {size[1]}x{size[0]} pixels; the small CNN needs {LEAST_SIZE} each "
            f"way: give --image_size {LEAST_SIZE} or more"
        )
    return SmallCNNConfig(1 if grey else 3, size, id2label=dict(enumerate(labels)))


def check_small_cnn(config: SmallCNNConfig, arguments: Any) -> None:
    """Raises `InputError` for a damaged configuration, and for arguments that do not fit a small CNN."""
    numbers = all(isinstance(value, int | float) for value in (config.image_mean, config.image_std))
    sizes = [size for size in config.image_size if isinstance(size, int) and size >= LEAST_SIZE]
    if len(sizes) != 2 or not numbers or not config.image_std > 0:
        raise InputError(
            f"{arguments.model_name_or_path}: its config.json is damaged: expected image_size of two numbers "
            f"of at least {LEAST_SIZE}, image_mean, and image_std above 0; export the model again"
        )
    if arguments.image_size is not None and config.image_size != (arguments.image_size,) * 2:
        height, width = config.image_size
        raise InputError(
            f"--image_size {arguments.image_size}: this model sees images of {width}x{height} "
            "pixels; leave it out"
        )
    if arguments.lora_r or arguments.freeze or arguments.layerwise_lr_decay:
        raise InputError(
            "--lora_r, --freeze and --layerwise_lr_decay are for models of transformers, not for the small "
            "CNN"
        )


def small_cnn_processing(config: SmallCNNConfig) -> Processing:
    mode = "L" if config.num_channels == 1 else "RGB"
    mean, std = ((value,) * config.num_channels for value in (config.image_mean, config.image_std))
    return Processing(config.image_size, mode, mean, std)


def configure(config: Any, label_smoothing_factor: float) -> None:
    """Sets the loss in a configuration. It keeps the label smoothing, so that later
    evaluations have the same loss."""
    config.label_smoothing_factor = label_smoothing_factor
    config.problem_type = "single_label_classification"
