"""Volumes with balls.

    images/ball_00.nii.gz    grey noise with bright and dark balls
    labels/ball_00.nii.gz    0 background, 1 bright, 2 dark
    split.csv                file,split: train, validation, test

Voxel sizes and orientations vary, as in clinical data.
"""

from pathlib import Path

import nibabel
import numpy as np

ROWS = {"train": 16, "validation": 4, "test": 4}
ORIGIN = {"version": 1}  # of the volumes; another version draws them again
ORIENTATIONS = ("RAS", "LPS", "LAS", "PIR")
EXTENT = 48.0  # mm of a volume along each axis
RADII = (5.0, 8.0)  # mm
BACKGROUND, BRIGHT, DARK, NOISE = 100.0, 160.0, 40.0, 15.0


def draw(seed: int) -> tuple[nibabel.Nifti1Image, nibabel.Nifti1Image]:
    """(image, label) of a seed."""
    generator = np.random.default_rng(seed)
    spacing = generator.choice([1.0, 1.25, 1.5], size=3)
    shape = tuple(int(n) for n in EXTENT // spacing)
    positions = np.moveaxis(np.indices(shape), 0, -1) * spacing
    image, label = np.full(shape, BACKGROUND), np.zeros(shape, dtype=np.uint8)
    for number, (value, intensity) in enumerate([(1, BRIGHT), (2, DARK)] * 2):
        radius = generator.uniform(*RADII)
        # One ball in each quarter of the plane: balls do not overlap.
        quarter = np.array([number // 2, number % 2, 0]) * EXTENT / 2
        room = np.array([EXTENT / 2, EXTENT / 2, EXTENT]) - 2 * radius
        centre = quarter + radius + generator.random(3) * room
        inside = ((positions - centre) ** 2).sum(-1) < radius**2
        image[inside], label[inside] = intensity, value
    image = image * generator.uniform(0.8, 1.2) + generator.normal(0, NOISE, shape)
    affine = np.diag([*spacing, 1.0])
    orientation = nibabel.orientations.axcodes2ornt(ORIENTATIONS[seed % len(ORIENTATIONS)])
    change = nibabel.orientations.ornt_transform(nibabel.orientations.axcodes2ornt("RAS"), orientation)
    volumes = (nibabel.Nifti1Image(voxels, affine) for voxels in (image.astype(np.float32), label))
    return tuple(volume.as_reoriented(change) for volume in volumes)


def write(folder: Path) -> dict[str, int]:
    """Draws the volumes. Returns their number by split."""
    splits = [split for split, count in ROWS.items() for _ in range(count)]
    names = [f"ball_{number:02}.nii.gz" for number in range(len(splits))]
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        image, label = draw(number)
        nibabel.save(image, folder / "images" / name)
        nibabel.save(label, folder / "labels" / name)
    lines = [f"{name},{split}\n" for name, split in zip(names, splits, strict=True)]
    (folder / "split.csv").write_text("".join(["file,split\n", *lines]), encoding="utf-8")
    return ROWS
