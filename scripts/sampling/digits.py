"""Images of digits in Pillow's own font with random rotation, position, size, brightness and noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sampling.folders import fill

SIZE = 28
ROWS = {"train": 3000, "validation": 500, "test": 500}
VERSION = 1  # of the images; another version draws them again


def draw_digits(folder: Path, force: bool = False) -> dict[str, int]:
    """Writes `folder`/SPLIT/DIGIT/NUMBER.png, unless they exist. Returns the number of images per split.

    A Pillow version always draws the same pixels. Raises `FileExistsError` for a folder with other files.
    """
    return fill(folder, {"form": VERSION, "rows": ROWS}, force, _draw_split)


def _draw_split(folder: Path, split: str) -> None:
    for digit in range(10):
        (folder / str(digit)).mkdir(parents=True)
    for row in range(ROWS[split]):
        digit = row % 10
        image = draw_digit(digit, np.random.default_rng([list(ROWS).index(split), row]))
        image.save(folder / str(digit) / f"{row:05}.png")


def draw_digit(digit: int, generator: np.random.Generator) -> Image.Image:
    """A grey image of SIZE x SIZE pixels: a light digit on a dark background."""
    image = Image.new("L", (SIZE, SIZE))
    place = SIZE / 2 + generator.uniform(-3, 3, 2)
    font = ImageFont.load_default(size=float(generator.uniform(15, 24)))
    ImageDraw.Draw(image).text(
        tuple(place), str(digit), fill=int(generator.integers(140, 256)), font=font, anchor="mm"
    )
    rotated = image.rotate(generator.uniform(-25, 25), Image.Resampling.BILINEAR)
    noise = generator.normal(0, 12, (SIZE, SIZE))
    return Image.fromarray((np.asarray(rotated) + noise).clip(0, 255).astype(np.uint8))
