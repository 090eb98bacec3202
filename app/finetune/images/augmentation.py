"""Pictures varied at random, masks together with them; what a row gets is a function of (seed, epoch, row)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance

RATIO = (3 / 4, 4 / 3)  # of a crop's width to its height
# numpy takes [seed, epoch] and [seed, epoch, 0] for the same: without this, row 0 would share the draws of the order.
STREAM = 1


def generator_of(seed: int, epoch: int, row: int) -> np.random.Generator:
    """What decides how a row is varied: the same under any launch, in any worker, and after a resume."""
    return np.random.default_rng([seed, epoch, row, STREAM])


@dataclass(frozen=True)
class Augmentation:
    """`size`: (height, width) of a crop. `crop`: the least share of the area that is kept, None for no crop; `flip`: left
    and right are swapped half of the time; `rotation`: degrees at most, to either side; `jitter`: by which share brightness,
    contrast and saturation change at most. `scales`: a crop of `size` from the picture enlarged by a factor between these two;
    1 is `size` itself or, with `native`, the picture's own. `fill`: a mask's value where it shows what is outside of the
    picture, `colour` the picture's there."""

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
        return not (self.gives_size or self.flip or self.rotation or self.jitter)

    @property
    def gives_size(self) -> bool:
        """Whether what it gives has `size`."""
        return self.crop is not None or self.scales is not None

    def __call__(
        self, image: Image.Image, mask: Image.Image | None, generator: np.random.Generator
    ) -> tuple[Image.Image, Image.Image | None]:
        """A variation of a picture and of its mask. With `crop` or `scales` they have `size`, without their own."""
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
            full = tuple(max(1, round(length * factor)) for length in (image.size if self.native else size))
            rooms = [there - wanted for there, wanted in zip(full, size, strict=True)]
            start = tuple(int(generator.integers(min(0, room), max(0, room) + 1)) for room in rooms)
            image = window(image, full, start, size, fill=self.colour, resample=Image.Resampling.BILINEAR)
            mask = mask and window(mask, full, start, size, fill=self.fill, resample=Image.Resampling.NEAREST)
        return image, mask


def crop_box(size: tuple[int, int], least: float, generator: np.random.Generator) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a crop of a picture of `size` (width, height): a share of its area between `least` and 1,
    width to height between 3/4 and 4/3 (on a logarithmic scale), within the picture. As in Szegedy et al., arXiv:1409.4842."""
    width, height = size
    area = width * height * generator.uniform(least, 1.0)
    ratio = math.exp(generator.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
    across = min(width, max(1, round(math.sqrt(area * ratio))))
    down = min(height, max(1, round(math.sqrt(area / ratio))))
    left, top = int(generator.integers(width - across + 1)), int(generator.integers(height - down + 1))
    return left, top, left + across, top + down


def window(
    image: Image.Image,
    full: tuple[int, int],
    start: tuple[int, int],
    size: tuple[int, int],
    *,
    fill: int | tuple[int, ...],
    resample: Image.Resampling,
) -> Image.Image:
    """What begins at `start` of a picture resized to `full`, and `fill` where that reaches beyond it; (width, height) all."""
    inside = [(max(0, begin), min(there, begin + length)) for begin, there, length in zip(start, full, size, strict=True)]
    (left, right), (top, bottom) = inside
    across, down = image.width / full[0], image.height / full[1]
    box = (left * across, top * down, min(image.width, right * across), min(image.height, bottom * down))
    part = image.resize((right - left, bottom - top), resample, box)
    if part.size == size:
        return part
    whole = Image.new(image.mode, size, fill)
    whole.paste(part, (left - start[0], top - start[1]))
    return whole


def _jittered(image: Image.Image, share: float, generator: np.random.Generator) -> Image.Image:
    enhancers = [ImageEnhance.Brightness, ImageEnhance.Contrast, *([ImageEnhance.Color] if image.mode == "RGB" else [])]
    for enhancer in enhancers:
        image = enhancer(image).enhance(generator.uniform(1 - share, 1 + share))
    return image
