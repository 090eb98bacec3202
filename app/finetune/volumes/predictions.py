"""Predictions of whole volumes: batches to predict, masks as a few bits a voxel, files in the input's grid, slices to look at.

The engine gathers arrays of equal shape for every row and keeps them all in rank 0's memory, so a mask is packed: flattened,
ceil(log2(classes)) bits a voxel, padded to the largest volume of the file. A CT scan of 512x512x300 voxels with one class takes
10 MB, a hundred of them 1 GB. Only rows of the test file are kept so; a validation needs counts and one slice of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from finetune.models.mask_bits import pack, packed_bytes, unpack
from finetune.output import written
from finetune.reading.fingerprint import fingerprint
from finetune.reports.figures import with_legend
from finetune.task import Batch
from finetune.volumes.nifti import IGNORED, write_like
from finetune.volumes.patches import cut
from finetune.volumes.prepared import Prepared

NANO = 1e6  # of a millimetre: spacing as a whole number, which no half precision rounds
# Of classes 1, 2, ... in pictures (Okabe and Ito's colours for all kinds of sight); they repeat.
COLOURS = np.array([(230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167)])
MOST_PICTURED, WIDTH = 8, 160  # volumes; pixels that a small slice is enlarged to


@dataclass(frozen=True)
class WholeVolumes:
    """Rows to be predicted, each a whole volume. `keeps_masks`: whether predictions hold masks, as a test file's do."""

    volumes: Sequence[Prepared]
    labelled: bool
    keeps_masks: bool
    num_classes: int

    def batch(self, rows: np.ndarray) -> Batch:
        """Inputs: `image` (b, 1, x, y, z) float32, filled up to the largest of the batch; `shape` (b, 3), what of it is the
        volume; `size` (b, 3), the file's own grid, and `spacing` (b, 3), its voxel size in nanometres; `mask`: the
        room for a packed mask, if masks are kept. Labels: (b, x, y, z) uint8 in the file's grid, or None."""
        chosen = [self.volumes[row] for row in rows]
        facts = {name: [volume.facts[name] for volume in chosen] for name in ("shape", "size", "spacing")}
        inputs = {
            "image": torch.from_numpy(_stacked([volume.image for volume in chosen], 0))[:, None],
            "shape": torch.tensor(facts["shape"]),
            "size": torch.tensor(facts["size"]),
            "spacing": (torch.tensor(facts["spacing"], dtype=torch.float64) * NANO).round().long(),
        }
        if self.keeps_masks:
            inputs["mask"] = torch.empty(len(rows), self.packed_bytes, dtype=torch.uint8)
        labels = torch.from_numpy(_stacked([volume.label for volume in chosen], IGNORED)) if self.labelled else None
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels)

    def kept(self, batch: Batch, row: int, mask: np.ndarray) -> dict[str, torch.Tensor]:
        """What predictions hold of a row's mask, (x, y, z) uint8: `mask`, packed, or `slice`, filled up to the largest."""
        if self.keeps_masks:
            room = batch.inputs["mask"]
            return {"mask": torch.from_numpy(pack(mask, self.num_classes, room.shape[1])).to(room.device)}
        number = int(batch.rows[row])
        height = self.slice_of(number) if number >= 0 else 0
        return {"slice": torch.from_numpy(cut(mask[:, :, height], (0, 0), self.slice_size, 0)).to(batch.rows.device)}

    def content(self) -> str:
        """A hash of the files."""
        return fingerprint(volume.content for volume in self.volumes)

    @property
    def packed_bytes(self) -> int:
        """Of a mask as `pack` makes it, for the largest volume."""
        return packed_bytes(max(int(np.prod(volume.facts["size"])) for volume in self.volumes), self.num_classes)

    @property
    def slice_size(self) -> tuple[int, int]:
        """x and y of the largest volume."""
        sizes = [volume.facts["size"] for volume in self.volumes]
        return max(size[0] for size in sizes), max(size[1] for size in sizes)

    def slice_of(self, row: int) -> int:
        """The height z of the slice to be looked at: with most of the classes, or in the middle."""
        if not self.labelled:
            return self.volumes[row].facts["size"][2] // 2
        label = self.volumes[row].label
        return int(((label > 0) & (label != IGNORED)).sum(axis=(0, 1)).argmax())


def volume_facts(batch: Batch, row: int) -> tuple[torch.Tensor, list[int], list[float]]:
    """(image (x, y, z) without filling, size of the file's grid, its voxel size in mm) of a row."""
    x, y, z = batch.inputs["shape"][row].tolist()
    spacing = [length / NANO for length in batch.inputs["spacing"][row].tolist()]
    return batch.inputs["image"][row, 0, :x, :y, :z], batch.inputs["size"][row].tolist(), spacing


def _stacked(arrays: list[np.ndarray], fill: int) -> np.ndarray:
    size = np.max([array.shape for array in arrays], axis=0)
    return np.stack([cut(array, (0, 0, 0), size, fill) for array in arrays])


def write_masks(split: WholeVolumes, packed: np.ndarray, folder: Path, output_dir: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Writes each mask, in the file's own grid, to `folder`; yields (its path in `output_dir`, the mask in canonical
    orientation)."""
    folder.mkdir(exist_ok=True)
    for volume, row in zip(split.volumes, packed, strict=True):
        mask = unpack(row, volume.facts["size"], split.num_classes)
        path = folder / f"{volume.file.id.replace('/', '_')}.nii.gz"
        written.add(output_dir, path)
        write_like(path, mask, volume.file.image)
        yield path.relative_to(output_dir).as_posix(), mask


def picture(split: WholeVolumes, slices: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """(height, width, 3) uint8: image, truth and prediction side by side, a line for each of the first volumes. The patient's
    left is on the right, the front on top.

    `slices`: (rows, x, y) uint8, the predicted slice of each row; `names`: of classes 1, 2, ...
    """
    lines = []
    for row in range(min(len(slices), MOST_PICTURED)):
        volume, height = split.volumes[row], split.slice_of(row)
        grey = cut(_grey(volume, height), (0, 0, 0), (*split.slice_size, 3), 0)
        truth = cut(volume.label[:, :, height], (0, 0), split.slice_size, 0)
        shown = [grey, *(_painted(grey, mask) for mask in (truth, slices[row]))]
        lines.append(np.concatenate([_upright(part) for part in shown], axis=1))
    enlarged = max(1, WIDTH // split.slice_size[0])
    shown = np.concatenate(lines).repeat(enlarged, axis=0).repeat(enlarged, axis=1)
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    return with_legend(shown, "image, truth, prediction", colours)


def _grey(volume: Prepared, height: int) -> np.ndarray:
    """(x, y, 3) uint8: a slice of the image in the file's grid, black and white its 1st and 99th percentile."""
    shape, size = volume.facts["shape"], volume.facts["size"]
    x, y, z = (((np.arange(n) + 0.5) * old / n).astype(int) for old, n in zip(shape, size, strict=True))
    values = volume.image[:, :, z[height]][np.ix_(x, y)]
    low, high = np.percentile(values, (1, 99))
    grey = np.clip((values - low) / max(high - low, 1e-6), 0, 1) * 255
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)


def _painted(grey: np.ndarray, mask: np.ndarray) -> np.ndarray:
    colour = COLOURS[(mask.astype(int) - 1) % len(COLOURS)]
    paint = ((mask > 0) & (mask != IGNORED))[..., None]
    return np.where(paint, grey // 2 + (colour // 2).astype(np.uint8), grey)


def _upright(values: np.ndarray) -> np.ndarray:
    """(x, y, 3) as rows from front to back, columns from the patient's right to left."""
    return np.flip(values, (0, 1)).swapaxes(0, 1)
