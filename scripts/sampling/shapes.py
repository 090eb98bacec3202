"""Masks: coloured shapes on a noisy background, SPLIT/images/NUMBER.png, with their segmentation,
SPLIT/masks/NUMBER.png, and classes.txt."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIZE = (80, 64)  # width, height
ROWS = {"train": 320, "validation": 48, "test": 48}
CLASSES = ("ground", "disc", "square", "triangle")
OUTLINE = 255  # mask value of a border of one pixel around each shape, which losses and metrics ignore
ORIGIN = {"version": 2}  # of the images; another version draws them again


def write(folder: Path) -> dict[str, int]:
    """Draws the images and masks. Returns their number by split."""
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES), encoding="utf-8")
    for number, (split, rows) in enumerate(ROWS.items()):
        for part in ("images", "masks"):
            (folder / split / part).mkdir(parents=True, exist_ok=True)
        for row in range(rows):
            image, mask = draw_image(np.random.default_rng([number, row]))
            image.save(folder / split / "images" / f"{row:04}.png")
            mask.save(folder / split / "masks" / f"{row:04}.png")
    return ROWS


def draw_image(generator: np.random.Generator) -> tuple[Image.Image, Image.Image]:
    """(image, mask) of SIZE with one to four shapes, which may overlap, on a grey background.

    Discs are reddish, squares greenish and triangles bluish, so that a small model learns quickly.
    """
    width, height = SIZE
    grey = int(generator.integers(60, 196))
    image, mask = Image.new("RGB", SIZE, (grey, grey, grey)), Image.new("L", SIZE)
    for _ in range(generator.integers(1, 5)):
        number, radius = int(generator.integers(1, len(CLASSES))), int(generator.integers(8, 17))
        x, y = (int(generator.integers(radius, length - radius)) for length in SIZE)
        channels = generator.integers(0, 140, 3)
        channels[number - 1] = generator.integers(140, 256)
        fill_colour = tuple(channels.tolist())
        for canvas, inside, outside in ((image, fill_colour, fill_colour), (mask, number, OUTLINE)):
            _shape(ImageDraw.Draw(canvas), number, (x, y, radius), inside, outside)
    noise = generator.normal(0, 14, (height, width, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8)), mask


def _shape(
    draw: ImageDraw.ImageDraw, number: int, circle: tuple[int, int, int], inside: object, outline: object
) -> None:
    x, y, radius = circle
    box = (x - radius, y - radius, x + radius, y + radius)
    if CLASSES[number] == "disc":
        draw.ellipse(box, fill=inside, outline=outline)
    elif CLASSES[number] == "square":
        draw.rectangle(box, fill=inside, outline=outline)
    else:
        corners = [(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)]
        draw.polygon(corners, fill=inside, outline=outline)
