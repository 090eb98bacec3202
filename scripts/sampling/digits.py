"""Pictures of digits, drawn with Pillow's own font: turned, shifted, of varied size and brightness, over noise."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIZE = 28
ROWS = {"train": 3000, "validation": 500, "test": 500}
MADE = "sample_images.json"  # written last: what it stands beside is whole
FORM = 1  # of the pictures; another one draws them anew


def draw_digits(folder: Path, force: bool = False) -> dict[str, int]:
    """Writes `folder`/SPLIT/DIGIT/NUMBER.png, unless that was done before; returns the pictures per split.

    The same numbers give the same pixels with the same Pillow. Raises FileExistsError for a folder that holds other files.
    """
    made = {"form": FORM, "rows": ROWS}
    note = folder / MADE
    if not force and note.is_file() and note.read_text(encoding="utf-8") == json.dumps(made):
        return ROWS
    if folder.exists() and any(folder.iterdir()) and not note.is_file():
        raise FileExistsError(f"it holds {min(os.listdir(folder))} from elsewhere")
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text("{}", encoding="utf-8")  # vouches for nothing until all is there
    for number, (split, rows) in enumerate(ROWS.items()):
        shutil.rmtree(folder / split, ignore_errors=True)
        for digit in range(10):
            (folder / split / str(digit)).mkdir(parents=True)
        for row in range(rows):
            digit = row % 10
            picture = draw_digit(digit, np.random.default_rng([number, row]))
            picture.save(folder / split / str(digit) / f"{row:05}.png")
    note.write_text(json.dumps(made), encoding="utf-8")
    return ROWS


def draw_digit(digit: int, generator: np.random.Generator) -> Image.Image:
    """One grey picture of SIZE x SIZE pixels, a light digit on a dark ground."""
    picture = Image.new("L", (SIZE, SIZE))
    place = SIZE / 2 + generator.uniform(-3, 3, 2)
    font = ImageFont.load_default(size=float(generator.uniform(15, 24)))
    ImageDraw.Draw(picture).text(tuple(place), str(digit), fill=int(generator.integers(140, 256)), font=font, anchor="mm")
    turned = picture.rotate(generator.uniform(-25, 25), Image.Resampling.BILINEAR)
    noise = generator.normal(0, 12, (SIZE, SIZE))
    return Image.fromarray((np.asarray(turned) + noise).clip(0, 255).astype(np.uint8))
