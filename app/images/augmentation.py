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
    contrast and saturation change at most. `fill`: a mask's value where a rotation shows what is outside of it."""

    size: tuple[int, int]
    crop: float | None = None
    flip: bool = False
    rotation: float = 0.0
    jitter: float = 0.0
    fill: int = 0

    @property
    def is_off(self) -> bool:
        return self.crop is None and not (self.flip or self.rotation or self.jitter)

    def __call__(
        self, image: Image.Image, mask: Image.Image | None, generator: np.random.Generator
    ) -> tuple[Image.Image, Image.Image | None]:
        """A variation of a picture and of its mask. With `crop` they have `size`, without their own."""
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


def _jittered(image: Image.Image, share: float, generator: np.random.Generator) -> Image.Image:
    enhancers = [ImageEnhance.Brightness, ImageEnhance.Contrast, *([ImageEnhance.Color] if image.mode == "RGB" else [])]
    for enhancer in enhancers:
        image = enhancer(image).enhance(generator.uniform(1 - share, 1 + share))
    return image
