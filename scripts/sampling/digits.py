"""Pictures of digits, drawn with Pillow's own font: turned, shifted, of varied size and brightness, over noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sampling.folders import fill

SIZE = 28
ROWS = {"train": 3000, "validation": 500, "test": 500}
FORM = 1  # of the pictures; another one draws them anew


def draw_digits(folder: Path, force: bool = False) -> dict[str, int]:
    """Writes `folder`/SPLIT/DIGIT/NUMBER.png, unless that was done before; returns the pictures per split.

    The same numbers give the same pixels with the same Pillow. Raises FileExistsError for a folder that holds other files.
    """
    return fill(folder, {"form": FORM, "rows": ROWS}, force, _draw_split)


def _draw_split(folder: Path, split: str) -> None:
    for digit in range(10):
        (folder / str(digit)).mkdir(parents=True)
    for row in range(ROWS[split]):
        digit = row % 10
        picture = draw_digit(digit, np.random.default_rng([list(ROWS).index(split), row]))
        picture.save(folder / str(digit) / f"{row:05}.png")


def draw_digit(digit: int, generator: np.random.Generator) -> Image.Image:
    """One grey picture of SIZE x SIZE pixels, a light digit on a dark ground."""
    picture = Image.new("L", (SIZE, SIZE))
    place = SIZE / 2 + generator.uniform(-3, 3, 2)
    font = ImageFont.load_default(size=float(generator.uniform(15, 24)))
    ImageDraw.Draw(picture).text(tuple(place), str(digit), fill=int(generator.integers(140, 256)), font=font, anchor="mm")
    turned = picture.rotate(generator.uniform(-25, 25), Image.Resampling.BILINEAR)
    noise = generator.normal(0, 12, (SIZE, SIZE))
    return Image.fromarray((np.asarray(turned) + noise).clip(0, 255).astype(np.uint8))
