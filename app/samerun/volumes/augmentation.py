"""Random augmentation of patches: rotation, scale, intensity, noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import affine_transform
from scipy.spatial.transform import Rotation

from samerun.volumes.nifti import IGNORED


@dataclass(frozen=True)
class Augmentation:
    """`rotation`: the largest angle about each axis in degrees. `scales`: (low, high) of the scale factor.
    `intensity`: a value v becomes v * a + b, where |a - 1| and |b| are at most this; volumes have mean 0 and
    deviation 1. `noise`: the largest standard deviation of Gaussian noise. `spacing`: voxel size in mm."""

    rotation: float = 0.0
    scales: tuple[float, ...] | None = None
    intensity: float = 0.0
    noise: float = 0.0
    spacing: tuple[float, ...] = (1.0, 1.0, 1.0)

    def matrix(self, generator: np.random.Generator) -> np.ndarray | None:
        """A random (3, 3) matrix that maps voxel offsets from the centre of the new patch to offsets in the
        volume. None without rotation and scale."""
        if not self.rotation and self.scales is None:
            return None
        rotation = Rotation.from_euler(
            "xyz", generator.uniform(-self.rotation, self.rotation, 3), degrees=True
        ).as_matrix()
        factor = np.exp(generator.uniform(*np.log(self.scales or (1.0, 1.0))))
        spacing = np.array(self.spacing)
        return rotation * spacing / spacing[:, None] / factor

    def change_intensity(self, image: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Changes contrast and brightness of a patch, float32, and adds noise."""
        if self.intensity:
            image = image * np.float32(1 + generator.uniform(-self.intensity, self.intensity))
            image = image + np.float32(generator.uniform(-self.intensity, self.intensity))
        if self.noise:
            deviation = np.float32(generator.uniform(0, self.noise))
            image = image + deviation * generator.standard_normal(image.shape, dtype=np.float32)
        return image


def crop(values: np.ndarray, start: Sequence[int], size: Sequence[int], fill: int) -> np.ndarray:
    """The crop of `size` at `start`, padded with `fill` beyond the array's borders."""
    ends = [first + length for first, length in zip(start, size, strict=True)]
    inside = tuple(slice(max(0, first), end) for first, end in zip(start, ends, strict=True))
    margins = [
        (max(0, -first), max(0, end - length))
        for first, end, length in zip(start, ends, values.shape, strict=True)
    ]
    return np.pad(values[inside], margins, constant_values=fill)


def crop_transformed(
    image: np.ndarray, label: np.ndarray, start: Sequence[int], size: Sequence[int], matrix: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(image, label): crops as by `crop`, rotated and scaled by `matrix` about their centre. Linear
    interpolation of the image, nearest neighbour of the label. Outside of the volume the image is 0, its
    mean, and the label `IGNORED`."""
    centre = (np.array(size) - 1) / 2
    offset = np.array(start) + centre - matrix @ centre
    # Only a box around the transformed corners is read, not the whole volume.
    corners = np.array(np.meshgrid(*([0, length - 1] for length in size))).reshape(3, -1)
    transformed = matrix @ corners + offset[:, None]
    first, last = np.floor(transformed.min(1)).astype(int), np.ceil(transformed.max(1)).astype(int)
    box = first.tolist(), (last - first + 1).tolist()
    image, label = (
        affine_transform(
            crop(values, *box, fill), matrix, offset - first, tuple(size), order=order, mode="nearest"
        )
        for values, fill, order in ((image, 0, 1), (label, IGNORED, 0))
    )
    return image, label
