"""A small convolutional network for small images, in plain PyTorch."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput

from samerun.data.files import read_object
from samerun.errors import InputError
from samerun.files import write_json
from samerun.models.pretrained import check_finite_weights, in_one_line

MODEL_TYPE = "small_cnn"
CHANNELS = (16, 32, 64, 128)
GRID, HIDDEN = 4, (1024, 128)
LEAST_SIZE = 16  # one pixel is left after the convolutions and max-pools


@dataclass(frozen=True)
class SmallCNNConfig:
    """The content of best/config.json. `image_size`: (height, width); `id2label`: class names by number."""

    num_channels: int
    image_size: tuple[int, int]
    id2label: dict[int, str]
    image_mean: float = 0.5
    image_std: float = 0.5
    label_smoothing_factor: float = 0.0  # of the training loss
    model_type: str = MODEL_TYPE

    @property
    def num_labels(self) -> int:
        return len(self.id2label)


class SmallCNN(nn.Sequential):
    """Four 3x3 convolutions without padding, each with batch norm and ReLU, a max-pool after the second and
    the fourth, and three linear layers. The convolutions have no bias, since batch norm would cancel it.
    Images of 28x28 pixels become 4x4 before the first linear layer; other sizes are average-pooled to 4x4."""

    def __init__(self, config: SmallCNNConfig) -> None:
        layers: list[nn.Module] = []
        before = config.num_channels
        for number, channels in enumerate(CHANNELS):
            layers += [nn.Conv2d(before, channels, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if number % 2 else []
            before = channels
        layers += [nn.AdaptiveAvgPool2d(GRID), nn.Flatten()]
        before *= GRID * GRID
        for width in HIDDEN:
            layers += [nn.Linear(before, width), nn.ReLU()]
            before = width
        super().__init__(*layers, nn.Linear(before, config.num_labels))
        self.config = config

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        """`pixel_values`: (b, channels, height, width), values v of 0..255 as (v / 255 - mean) / std."""
        # The channels_last format saves a fifth of a step on a CPU; GPUs have faster convolutions for it.
        hidden = self[0](pixel_values).contiguous(memory_format=torch.channels_last)
        for layer in islice(self, 1, None):
            # Pooling to the same size changes nothing, and has no deterministic gradient on a GPU.
            if not isinstance(layer, nn.AdaptiveAvgPool2d) or hidden.shape[2:] != (GRID, GRID):
                hidden = layer(hidden)
        return ImageClassifierOutput(logits=hidden)


def read_config(folder: str | Path | None) -> SmallCNNConfig | None:
    """The configuration of an exported SmallCNN; None for a folder of another model or a hub id. Raises
    `InputError` for a damaged configuration."""
    file = Path(folder or "") / "config.json"
    if folder is None or not file.is_file():
        return None
    try:
        config = read_object(file)
    except InputError:
        return None  # `pretrained.load_config` reports the problem
    if config.get("model_type") != MODEL_TYPE:
        return None
    try:
        height, width = map(int, config["image_size"])
        labels = {int(number): str(label) for number, label in config["id2label"].items()}
        if sorted(labels) != list(range(len(labels))) or len(labels) < 2:
            raise ValueError("id2label does not number two or more classes from 0")
        channels, mean, std = config["num_channels"], float(config["image_mean"]), float(config["image_std"])
        smoothing = float(config.get("label_smoothing_factor", 0.0))
        if channels not in (1, 3) or min(height, width) < LEAST_SIZE or not std > 0:
            raise ValueError(f"num_channels is 1 or 3, image_size at least {LEAST_SIZE}, image_std above 0")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{file}: damaged configuration of a {MODEL_TYPE} ({in_one_line(error)}); export the model again"
        ) from None
    return SmallCNNConfig(channels, (height, width), labels, mean, std, smoothing)


def load_small_cnn(folder: str | Path, config: SmallCNNConfig) -> SmallCNN:
    """An exported model. Raises `InputError` for missing weights and for those of another model."""
    file, model = Path(folder) / "model.safetensors", SmallCNN(config)
    try:
        model.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(
            f"{file}: not the weights of this {MODEL_TYPE} ({in_one_line(error)}); export the model again"
        ) from None
    check_finite_weights(folder, model)
    return model


def save_small_cnn(
    config: SmallCNNConfig, weights: dict[str, torch.Tensor], check: Callable[[Path], Any], folder: Path
) -> None:
    """Writes config.json and model.safetensors, and calls `check` with the folder."""
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    write_json(folder / "config.json", asdict(config))
    check(folder)
