"""Random patches of volumes and their augmentation, as a function of (seed, epoch, row).

Patches are cut from memory-mapped arrays. MONAI's cropping and caching transforms read the whole volume for
every patch: for volumes of 192x192x160 voxels they took nine times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.ndimage import affine_transform
from scipy.spatial.transform import Rotation

from samerun.task import Batch
from samerun.volumes.data import Prepared
from samerun.volumes.nifti import IGNORED

AXES = "xyz"


@dataclass(frozen=True)
class Patches:
    """The training patches. Row r is a patch of volume r // `per_volume`.

    With probability `foreground_share` a patch is centred on a voxel of a class, as far as the borders allow.
    The class is drawn first, then the voxel, so rare classes are as frequent as others. Other patches are
    placed at random. Volumes smaller than a patch are padded on both sides: the image with 0, its mean, the
    label with `IGNORED`.
    """

    volumes: Sequence[Prepared]
    size: tuple[int, int, int]
    per_volume: int
    foreground_share: float
    flip_axes: tuple[str, ...]
    seed: int
    augmentation: Augmentation

    def __len__(self) -> int:
        return len(self.volumes) * self.per_volume

    def batch(self, rows: np.ndarray, epoch: int = 0) -> Batch:
        """Draws the patches of a batch: inputs["image"] (b, 1, *size) float32, labels (b, *size) uint8."""
        images, labels = zip(*(self._draw(int(row), epoch) for row in rows), strict=True)
        inputs = {"image": torch.from_numpy(np.stack(images))[:, None]}
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, torch.from_numpy(np.stack(labels)))

    def _draw(self, row: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng([self.seed, epoch, row])
        volume = self.volumes[row // self.per_volume]
        start = self._start(volume, generator)
        flipped = [
            axis for axis, name in enumerate(AXES) if generator.random() < 0.5 and name in self.flip_axes
        ]
        matrix = self.augmentation.matrix(generator)
        if matrix is None:
            image = crop(volume.image, start, self.size, 0)
            label = crop(volume.patch_label, start, self.size, IGNORED)
        else:
            image, label = crop_transformed(volume.image, volume.patch_label, start, self.size, matrix)
        image = self.augmentation.change_intensity(np.flip(image, flipped), generator)
        return np.ascontiguousarray(image), np.ascontiguousarray(np.flip(label, flipped))

    def _start(self, volume: Prepared, generator: np.random.Generator) -> list[int]:
        """The first voxel of the patch; negative where the volume is padded."""
        # The largest start; negative: the volume is smaller than the patch.
        last = np.array(volume.image.shape) - self.size
        start = generator.integers(0, np.maximum(last, 0) + 1)
        on_foreground = generator.random() < self.foreground_share
        positions = volume.positions
        if on_foreground and len(positions):
            number = generator.choice(np.unique(positions[:, 0]))
            centre = generator.choice(positions[positions[:, 0] == number, 1:])
            start = np.clip(centre - np.array(self.size) // 2, 0, np.maximum(last, 0))
        return np.where(last < 0, -(-last // 2), start).tolist()


# Augmentation


@dataclass(frozen=True)
class Augmentation:
    """Random changes of a patch."""

    rotation: float = 0.0  # the largest angle about each axis in degrees
    scales: tuple[float, ...] | None = None  # (low, high) of the scale factor
    # A value v becomes v * a + b, where |a - 1| and |b| are at most this; volumes have deviation 1.
    intensity: float = 0.0
    noise: float = 0.0  # the largest standard deviation of Gaussian noise
    spacing: tuple[float, ...] = (1.0, 1.0, 1.0)  # voxel size in mm

    def matrix(self, generator: np.random.Generator) -> np.ndarray | None:
        """A random (3, 3) matrix that maps voxel offsets from the centre of the new patch to offsets in the
        volume. None without rotation and scale."""
        if not self.rotation and self.scales is None:
            return None
        angles = generator.uniform(-self.rotation, self.rotation, 3)
        rotation = Rotation.from_euler("xyz", angles, degrees=True).as_matrix()
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
    start, end = np.asarray(start), np.add(start, size)
    inside = tuple(map(slice, np.maximum(start, 0), end))
    margins = np.maximum([-start, end - values.shape], 0).T
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
