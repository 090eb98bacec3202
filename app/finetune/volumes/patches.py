"""Random patches of volumes: a function of (seed, epoch, row), so every launch and a resumed run see the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from finetune.task import Batch
from finetune.volumes.augmentation import Augmentation, cut, cut_turned
from finetune.volumes.nifti import IGNORED
from finetune.volumes.prepared import Prepared

AXES = "xyz"


@dataclass(frozen=True)
class Patches:
    """The patches of prepared training volumes. Row r is a patch of volume r // `per_volume`.

    With probability `foreground_share` a patch has a voxel of a class in its middle, as far as the volume's border lets it:
    first a class of the volume is drawn, then one of its voxels, so rare classes are seen as often as others. Other patches lie
    anywhere. A volume that is smaller than a patch is padded on both sides: with 0, its mean, and voxels that do not count.
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
        """inputs["image"]: (b, 1, *size) float32; labels: (b, *size) uint8."""
        images, labels = zip(*(self._draw(int(row), epoch) for row in rows), strict=True)
        inputs = {"image": torch.from_numpy(np.stack(images))[:, None]}
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, torch.from_numpy(np.stack(labels)))

    def _draw(self, row: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng([self.seed, epoch, row])
        volume = self.volumes[row // self.per_volume]
        start = self._start(volume, generator)
        flipped = [axis for axis, name in enumerate(AXES) if generator.random() < 0.5 and name in self.flip_axes]
        matrix = self.augmentation.matrix(generator)
        if matrix is None:
            image, label = cut(volume.image, start, self.size, 0), cut(volume.patch_label, start, self.size, IGNORED)
        else:
            image, label = cut_turned(volume.image, volume.patch_label, start, self.size, matrix)
        image = self.augmentation.colour(np.flip(image, flipped), generator)
        return np.ascontiguousarray(image), np.ascontiguousarray(np.flip(label, flipped))

    def _start(self, volume: Prepared, generator: np.random.Generator) -> list[int]:
        """Where the patch begins; below 0 where the volume is padded."""
        room = np.array(volume.image.shape) - self.size  # negative: to be padded
        start = generator.integers(0, np.maximum(room, 0) + 1)
        wanted = generator.random() < self.foreground_share
        positions = volume.positions
        if wanted and len(positions):
            chosen = generator.choice(np.unique(positions[:, 0]))
            middle = generator.choice(positions[positions[:, 0] == chosen, 1:])
            start = np.clip(middle - np.array(self.size) // 2, 0, np.maximum(room, 0))
        return [int(begin) if space >= 0 else -int(-space // 2) for begin, space in zip(start, room, strict=True)]
