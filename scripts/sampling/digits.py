"""Digits: SPLIT/DIGIT/NUMBER.png in Pillow's own font with random rotation, position, size, brightness and
noise. A Pillow version always draws the same pixels."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIZE = 28
ROWS = {"train": 3000, "validation": 500, "test": 500}
ORIGIN = {"version": 1}  # of the images; another version draws them again


def write(folder: Path) -> dict[str, int]:
    """Draws the images. Returns their number by split."""
    for number, (split, rows) in enumerate(ROWS.items()):
        for digit in range(10):
            (folder / split / str(digit)).mkdir(parents=True, exist_ok=True)
        for row in range(rows):
            image = draw_digit(row % 10, np.random.default_rng([number, row]))
            image.save(folder / split / str(row % 10) / f"{row:05}.png")
    return ROWS


def draw_digit(digit: int, generator: np.random.Generator) -> Image.Image:
    """A grey image of SIZE x SIZE pixels: a light digit on a dark background."""
    image = Image.new("L", (SIZE, SIZE))
    place = SIZE / 2 + generator.uniform(-3, 3, 2)
    font = ImageFont.load_default(size=float(generator.uniform(15, 24)))
    fill = int(generator.integers(140, 256))
    ImageDraw.Draw(image).text(tuple(place), str(digit), fill, font, "mm")
    rotated = image.rotate(generator.uniform(-25, 25), Image.Resampling.BILINEAR)
    noise = generator.normal(0, 12, (SIZE, SIZE))
    return Image.fromarray((np.asarray(rotated) + noise).clip(0, 255).astype(np.uint8))
