"""Random augmentation of images and their masks, as a function of (seed, epoch, row)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance

ASPECT_RATIOS = (3 / 4, 4 / 3)  # of crops: width / height
# Seeds numpy apart from the data order: it treats [seed, epoch] and [seed, epoch, 0] alike.
STREAM = 1


def row_generator(seed: int, epoch: int, row: int) -> np.random.Generator:
    """The generator for a row's augmentation: the same under any launch, in any worker, and after a
    resume."""
    return np.random.default_rng([seed, epoch, row, STREAM])


@dataclass(frozen=True)
class Augmentation:
    """Random changes of an image and its mask.

    `size`: (height, width) of crops. `crop`: the least share of the area that a random resized crop keeps;
    None: no such crop. `flip`: flip left to right with probability 0.5. `rotation`: the largest angle in
    degrees. `jitter`: the largest relative change of brightness, contrast and saturation. `scales`: (low,
    high) of a random scale, at which a crop of `size` is taken; scale 1 is `size` or, with `native`, the
    image's own size. `fill`, `colour`: values of mask and image outside of it.
    """

    size: tuple[int, int]
    crop: float | None = None
    flip: bool = False
    rotation: float = 0.0
    jitter: float = 0.0
    fill: int = 0
    scales: tuple[float, float] | None = None
    native: bool = False
    colour: int | tuple[int, ...] = 0

    @property
    def is_off(self) -> bool:
        return not (self.has_fixed_size or self.flip or self.rotation or self.jitter)

    @property
    def has_fixed_size(self) -> bool:
        """Whether results have `size`, not the size of the image."""
        return self.crop is not None or self.scales is not None

    def __call__(
        self, image: Image.Image, mask: Image.Image | None, generator: np.random.Generator
    ) -> tuple[Image.Image, Image.Image | None]:
        """A randomly changed copy of an image and its mask."""
        if self.jitter:
            image = _jittered(image, self.jitter, generator)
        if self.rotation:
            angle = generator.uniform(-self.rotation, self.rotation)
            image = image.rotate(angle, Image.Resampling.BILINEAR)
            mask = mask and mask.rotate(angle, Image.Resampling.NEAREST, fillcolor=self.fill)
        if self.flip and generator.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            mask = mask and mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.crop is not None:
            box, size = crop_box(image.size, self.crop, generator), self.size[::-1]
            image = image.resize(size, Image.Resampling.BILINEAR, box)
            mask = mask and mask.resize(size, Image.Resampling.NEAREST, box)
        if self.scales is not None:
            factor, size = math.exp(generator.uniform(*np.log(self.scales))), self.size[::-1]
            scaled = tuple(max(1, round(length * factor)) for length in (image.size if self.native else size))
            margins = [length - crop for length, crop in zip(scaled, size, strict=True)]
            start = tuple(int(generator.integers(min(0, margin), max(0, margin) + 1)) for margin in margins)
            image = scaled_crop(
                image, scaled, start, size, fill=self.colour, resample=Image.Resampling.BILINEAR
            )
            mask = mask and scaled_crop(
                mask, scaled, start, size, fill=self.fill, resample=Image.Resampling.NEAREST
            )
        return image, mask


def crop_box(
    size: tuple[int, int], min_area: float, generator: np.random.Generator
) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a random crop within an image of `size` (width, height). It has a share
    of the area between `min_area` and 1, and a log-uniform aspect ratio from 3/4 to 4/3, as in Szegedy et
    al., arXiv:1409.4842."""
    width, height = size
    area = width * height * generator.uniform(min_area, 1.0)
    ratio = math.exp(generator.uniform(*map(math.log, ASPECT_RATIOS)))
    crop_width = min(width, max(1, round(math.sqrt(area * ratio))))
    crop_height = min(height, max(1, round(math.sqrt(area / ratio))))
    left, top = (
        int(generator.integers(width - crop_width + 1)),
        int(generator.integers(height - crop_height + 1)),
    )
    return left, top, left + crop_width, top + crop_height


def scaled_crop(
    image: Image.Image,
    scaled: tuple[int, int],
    start: tuple[int, int],
    size: tuple[int, int],
    *,
    fill: int | tuple[int, ...],
    resample: Image.Resampling,
) -> Image.Image:
    """The crop of `size` at `start` of an image that is resized to `scaled`, with `fill` beyond its borders.
    All are (width, height)."""
    inside = [
        (max(0, first), min(limit, first + length))
        for first, limit, length in zip(start, scaled, size, strict=True)
    ]
    (left, right), (top, bottom) = inside
    x_step, y_step = image.width / scaled[0], image.height / scaled[1]
    box = (left * x_step, top * y_step, min(image.width, right * x_step), min(image.height, bottom * y_step))
    crop = image.resize((right - left, bottom - top), resample, box)
    if crop.size == size:
        return crop
    padded = Image.new(image.mode, size, fill)
    padded.paste(crop, (left - start[0], top - start[1]))
    return padded


def _jittered(image: Image.Image, amount: float, generator: np.random.Generator) -> Image.Image:
    enhancers = [
        ImageEnhance.Brightness,
        ImageEnhance.Contrast,
        *([ImageEnhance.Color] if image.mode == "RGB" else []),
    ]
    for enhancer in enhancers:
        image = enhancer(image).enhance(generator.uniform(1 - amount, 1 + amount))
    return image
