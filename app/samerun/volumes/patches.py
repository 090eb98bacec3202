"""Random patches of volumes, as a function of (seed, epoch, row)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from samerun.task import Batch
from samerun.volumes.augmentation import Augmentation, crop, crop_transformed
from samerun.volumes.nifti import IGNORED
from samerun.volumes.prepared import Prepared

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
            image, label = (
                crop(volume.image, start, self.size, 0),
                crop(volume.patch_label, start, self.size, IGNORED),
            )
        else:
            image, label = crop_transformed(volume.image, volume.patch_label, start, self.size, matrix)
        image = self.augmentation.change_intensity(np.flip(image, flipped), generator)
        return np.ascontiguousarray(image), np.ascontiguousarray(np.flip(label, flipped))

    def _start(self, volume: Prepared, generator: np.random.Generator) -> list[int]:
        """The first voxel of the patch; negative where the volume is padded."""
        last = (
            np.array(volume.image.shape) - self.size
        )  # the largest start; negative: the volume is smaller than the patch
        start = generator.integers(0, np.maximum(last, 0) + 1)
        on_foreground = generator.random() < self.foreground_share
        positions = volume.positions
        if on_foreground and len(positions):
            number = generator.choice(np.unique(positions[:, 0]))
            centre = generator.choice(positions[positions[:, 0] == number, 1:])
            start = np.clip(centre - np.array(self.size) // 2, 0, np.maximum(last, 0))
        return [
            int(first) if limit >= 0 else -int(-limit // 2) for first, limit in zip(start, last, strict=True)
        ]
