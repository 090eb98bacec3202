"""A small convolutional network for small images, as a model of transformers."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

CHANNELS = (16, 32, 64, 128)
GRID, HIDDEN = 4, (1024, 128)
LEAST_SIZE = 16  # one pixel is left after the convolutions and max-pools


class SmallCNNConfig(PreTrainedConfig):
    """The content of best/config.json. `image_size`: (height, width); `label_smoothing_factor`: of the
    training loss."""

    model_type = "small_cnn"

    def __init__(
        self,
        num_channels: int = 1,
        image_size: tuple[int, int] | None = None,
        image_mean: float = 0.5,
        image_std: float = 0.5,
        label_smoothing_factor: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.num_channels, self.image_size = num_channels, tuple(image_size or ())
        self.image_mean, self.image_std = image_mean, image_std
        self.label_smoothing_factor = label_smoothing_factor


class SmallCNN(PreTrainedModel):
    """Four 3x3 convolutions without padding, each with batch norm and ReLU, a max-pool after the second and
    the fourth, and three linear layers. The convolutions have no bias, since batch norm would cancel it.
    Images of 28x28 pixels become 4x4 before the first linear layer; other sizes are average-pooled to 4x4."""

    config_class = SmallCNNConfig
    base_model_prefix = "body"  # with "" transformers would cut the names of weights

    def __init__(self, config: SmallCNNConfig) -> None:
        super().__init__(config)
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
        for number, layer in enumerate([*layers, nn.Linear(before, config.num_labels)]):
            self.add_module(str(number), layer)
        self.post_init()

    def init_weights(self) -> None:
        """Keeps the weights that torch's modules have drawn."""

    def _init_weights(self, module: nn.Module) -> None:
        """Draws the weights of a layer that a file does not have."""
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        """`pixel_values`: (b, channels, height, width), values v of 0..255 as (v / 255 - mean) / std."""
        # The channels_last format saves a fifth of a step on a CPU; GPUs have faster convolutions for it.
        first, *others = self.children()
        hidden = first(pixel_values).contiguous(memory_format=torch.channels_last)
        for layer in others:
            # Pooling to the same size changes nothing, and has no deterministic gradient on a GPU.
            if not isinstance(layer, nn.AdaptiveAvgPool2d) or hidden.shape[2:] != (GRID, GRID):
                hidden = layer(hidden)
        return ImageClassifierOutput(logits=hidden)


AutoConfig.register(SmallCNNConfig.model_type, SmallCNNConfig)
AutoModelForImageClassification.register(SmallCNNConfig, SmallCNN)
