"""Patches of volumes varied at random: turned, scaled, made brighter or darker, with noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import affine_transform
from scipy.spatial.transform import Rotation

from finetune.volumes.nifti import IGNORED


@dataclass(frozen=True)
class Augmentation:
    """`rotation`: degrees at most about each axis, to either side; `scales`: a patch is enlarged by a factor between these two;
    `intensity`: a value v becomes v * a + b with a within this of 1 and b of 0; `noise`: the largest standard deviation of
    Gaussian noise. Values have mean 0 and deviation 1 in a volume. `spacing`: voxel size in mm, in which patches are turned."""

    rotation: float = 0.0
    scales: tuple[float, ...] | None = None
    intensity: float = 0.0
    noise: float = 0.0
    spacing: tuple[float, ...] = (1.0, 1.0, 1.0)

    def matrix(self, generator: np.random.Generator) -> np.ndarray | None:
        """(3, 3): voxels from the middle of a varied patch -> voxels from the same point in the volume. None where nothing is
        turned or scaled."""
        if not self.rotation and self.scales is None:
            return None
        turn = Rotation.from_euler("xyz", generator.uniform(-self.rotation, self.rotation, 3), degrees=True).as_matrix()
        factor = np.exp(generator.uniform(*np.log(self.scales or (1.0, 1.0))))
        spacing = np.array(self.spacing)
        return turn * spacing / spacing[:, None] / factor

    def colour(self, image: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Values of a patch, float32, in the same shape."""
        if self.intensity:
            image = image * np.float32(1 + generator.uniform(-self.intensity, self.intensity))
            image = image + np.float32(generator.uniform(-self.intensity, self.intensity))
        if self.noise:
            deviation = np.float32(generator.uniform(0, self.noise))
            image = image + deviation * generator.standard_normal(image.shape, dtype=np.float32)
        return image


def cut(values: np.ndarray, start: Sequence[int], size: Sequence[int], fill: int) -> np.ndarray:
    """The part of an array that begins at `start`, filled up where it reaches beyond the array's borders."""
    ends = [begin + length for begin, length in zip(start, size, strict=True)]
    inside = tuple(slice(max(0, begin), end) for begin, end in zip(start, ends, strict=True))
    margins = [(max(0, -begin), max(0, end - there)) for begin, end, there in zip(start, ends, values.shape, strict=True)]
    return np.pad(values[inside], margins, constant_values=fill)


def cut_turned(
    image: np.ndarray, label: np.ndarray, start: Sequence[int], size: Sequence[int], matrix: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As `cut` of an image and its label, turned and scaled by `matrix` about the middle of the part: linear between the voxels
    of the image, the nearest of the label. What lies outside of the volume is 0, its mean, and does not count."""
    middle = (np.array(size) - 1) / 2
    offset = np.array(start) + middle - matrix @ middle
    # What the part needs is a box around its turned corners; a whole volume need not be read.
    corners = np.array(np.meshgrid(*([0, length - 1] for length in size))).reshape(3, -1)
    reached = matrix @ corners + offset[:, None]
    first, last = np.floor(reached.min(1)).astype(int), np.ceil(reached.max(1)).astype(int)
    box = first.tolist(), (last - first + 1).tolist()
    found = [
        affine_transform(cut(values, *box, fill), matrix, offset - first, tuple(size), order=order, mode="nearest")
        for values, fill, order in ((image, 0, 1), (label, IGNORED, 0))
    ]
    return found[0], found[1]
