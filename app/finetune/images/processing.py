"""From a decoded picture to a model's input: one size, and numbers around zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from finetune.errors import InputError

CHANNELS = {"L": 1, "RGB": 3}


@dataclass(frozen=True)
class Processing:
    """`size`: (height, width) of the input. `mode`: Pillow's, "L" or "RGB". A value v of 0..255 becomes
    (v * scale - mean) / std of its channel. `processor`: transformers' image processor, which resizes and crops in its way;
    without one pictures are resized to `size`."""

    size: tuple[int, int]
    mode: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255
    processor: Any = None

    @property
    def channels(self) -> int:
        return CHANNELS[self.mode]

    @property
    def middle(self) -> int | tuple[int, ...]:
        """The colour that becomes 0."""
        values = tuple(min(255, max(0, round(mean / self.scale))) for mean in self.mean)
        return values if self.mode == "RGB" else values[0]

    def fit(self, image: Image.Image) -> np.ndarray:
        """(height, width) or (height, width, 3) uint8: a picture in the input's size."""
        if self.processor is None:
            return np.asarray(self.resize(image))
        # Each processor has its own way to resize and crop; the numbers are left to `normalize`, many pictures at a time.
        pixels = self.processor(image.convert("RGB"), do_rescale=False, do_normalize=False)["pixel_values"][0]
        pixels = np.asarray(pixels).round().clip(0, 255).astype(np.uint8)
        return pixels[0] if self.mode == "L" else pixels.transpose(1, 2, 0)

    def resize(self, image: Image.Image) -> Image.Image:
        """A picture resized to the input's size, bilinear with antialiasing."""
        size = self.size[::-1]
        return image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)

    def resize_mask(self, mask: Image.Image) -> Image.Image:
        """A mask in the input's size; its values stay class numbers."""
        size = self.size[::-1]
        return mask if mask.size == size else mask.resize(size, Image.Resampling.NEAREST)

    def normalize(self, pixels: np.ndarray) -> torch.Tensor:
        """(b, channels, height, width) float32 of pictures as `fit` gives them, (b, height, width[, 3]) uint8.

        A pixel's channels stay side by side (torch's channels_last): on a CPU steps of small ResNets and MobileNets take 0.7 to
        0.9 times as long then, those of a small ViT 1.0 to 1.03 times.
        """
        values = torch.from_numpy(np.ascontiguousarray(pixels))
        values = values[:, None] if pixels.ndim == 3 else values.permute(0, 3, 1, 2)
        mean, std = (torch.tensor(each, dtype=torch.float32).view(-1, 1, 1) for each in (self.mean, self.std))
        return (values.to(torch.float32) * self.scale - mean) / std


def processing_of(processor: Any, channels: int) -> Processing:
    """What an image processor of transformers does, as `Processing`. Its size is found by trying. Raises `InputError` for one
    whose size depends on the picture."""
    mode = {1: "L", 3: "RGB"}[channels]
    pictures = [Image.new("RGB", shape) for shape in ((96, 64), (64, 96))]
    tried = [processor(picture, do_rescale=False, do_normalize=False)["pixel_values"][0] for picture in pictures]
    size, other = (tuple(np.asarray(each).shape[-2:]) for each in tried)
    if size != other:
        raise InputError(
            f"the image processor {type(processor).__name__} gives pictures of several sizes, which a batch cannot hold; "
            "give it a fixed size, or a centre crop, in its preprocessor_config.json"
        )
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0] * channels, [1.0] * channels)
    scale = processor.rescale_factor if processor.do_rescale else 1.0
    return Processing(size, mode, tuple(mean[:channels]), tuple(std[:channels]), scale, processor)
