"""Prediction of whole volumes: batches, packed masks, mask files in the input's grid, example slices.

The engine gathers arrays of equal shape and keeps those of all rows in rank 0's memory. So masks are packed:
flattened, ceil(log2(classes)) bits per voxel, padded to the largest volume. A CT scan of 512x512x300 voxels
with one class takes 10 MB, a hundred of them 1 GB. Validation keeps one slice of each volume in place of its
mask.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from samerun.data.cache import content_key
from samerun.files import replace_listed
from samerun.images.segmentation import file_names, pack, unpack
from samerun.reports.figures import with_legend
from samerun.task import Batch, Split
from samerun.volumes.data import Prepared
from samerun.volumes.nifti import IGNORED, write_like
from samerun.volumes.patches import crop

NANOMETRES = 1e6  # per millimetre. Spacing as integers is not rounded when inputs are cast to half precision.
# Okabe and Ito's colour-blind safe palette, for classes 1, 2, ...; repeats.
COLOURS = np.array([
    *((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66)),
    *((0, 114, 178), (213, 94, 0), (204, 121, 167)),
])  # fmt: skip
MAX_SHOWN, WIDTH = 8, 160  # volumes shown; pixels that small slices are enlarged to


@dataclass(frozen=True)
class WholeVolumes:
    """A split whose rows are whole volumes. `keeps_masks`: predictions hold masks (test), not slices
    (validation)."""

    volumes: Sequence[Prepared]
    labelled: bool
    keeps_masks: bool
    num_classes: int

    def split(self, path: str) -> Split:
        ids = [volume.file.id for volume in self.volumes]
        return Split(path, self.batch, len(ids), labelled=self.labelled, ids=ids, content=self.content)

    def batch(self, rows: np.ndarray) -> Batch:
        """Inputs: `image` (b, 1, x, y, z) float32, padded to the largest of the batch; `shape` (b, 3), the
        size of each without padding; `size` (b, 3) and `spacing` (b, 3), grid and voxel size in nanometres of
        the file; if masks are kept, `keeps_mask` (b,). Labels: (b, x, y, z) uint8 in the file's grid, or
        None."""
        volumes = [self.volumes[row] for row in rows]
        facts = {name: [volume.facts[name] for volume in volumes] for name in ("shape", "size", "spacing")}
        inputs = {
            "image": torch.from_numpy(_pad_and_stack([volume.image for volume in volumes], 0))[:, None],
            "shape": torch.tensor(facts["shape"]),
            "size": torch.tensor(facts["size"]),
            "spacing": (torch.tensor(facts["spacing"], dtype=torch.float64) * NANOMETRES).round().long(),
        }
        if self.keeps_masks:
            inputs["keeps_mask"] = torch.ones(len(rows), dtype=torch.bool)
        labels = None
        if self.labelled:
            labels = torch.from_numpy(_pad_and_stack([volume.label for volume in volumes], IGNORED))
        return Batch(torch.as_tensor(rows, dtype=torch.int64), inputs, labels)

    def mask_output(self, batch: Batch, row: int, mask: np.ndarray) -> dict[str, torch.Tensor]:
        """Converts a predicted mask, (x, y, z) uint8, for gathering: `mask`, packed, or `slice`, padded to
        the largest."""
        if self.keeps_masks:
            return {"mask": torch.from_numpy(pack(mask, self.num_classes)).to(batch.rows.device)}
        number = int(batch.rows[row])
        height = self.slice_of(number) if number >= 0 else 0
        shown = torch.from_numpy(crop(mask[:, :, height], (0, 0), self.slice_size, 0))
        return {"slice": shown.to(batch.rows.device)}

    def content(self) -> str:
        return content_key(volume.content for volume in self.volumes)

    @property
    def slice_size(self) -> tuple[int, int]:
        """x and y of the largest volume."""
        return tuple(np.max([volume.facts["size"][:2] for volume in self.volumes], axis=0).tolist())

    def slice_of(self, row: int) -> int:
        """The z index of a row's example slice: the slice with the most labelled voxels, or the middle
        one."""
        if not self.labelled:
            return self.volumes[row].facts["size"][2] // 2
        label = self.volumes[row].label
        return int(((label > 0) & (label != IGNORED)).sum(axis=(0, 1)).argmax())


def volume_facts(batch: Batch, row: int) -> tuple[torch.Tensor, list[int], list[float]]:
    """(image (x, y, z) without padding, grid of the file, voxel size of the file in mm) of a row."""
    x, y, z = batch.inputs["shape"][row].tolist()
    spacing = [length / NANOMETRES for length in batch.inputs["spacing"][row].tolist()]
    return batch.inputs["image"][row, 0, :x, :y, :z], batch.inputs["size"][row].tolist(), spacing


def _pad_and_stack(arrays: list[np.ndarray], fill: int) -> np.ndarray:
    size = np.max([array.shape for array in arrays], axis=0)
    return np.stack([crop(array, (0, 0, 0), size, fill) for array in arrays])


def write_masks(
    split: WholeVolumes, packed: np.ndarray, folder: Path, earlier: Iterable[str] = ()
) -> Iterator[tuple[str, np.ndarray]]:
    """Writes each mask, in its file's own grid, to `folder`, in place of the `earlier` ones. Yields (path
    from the folder above, mask in canonical orientation)."""
    files = file_names([volume.file.id for volume in split.volumes], ".nii.gz")
    replace_listed(folder, files, earlier)
    for volume, name, row in zip(split.volumes, files, packed, strict=True):
        mask = unpack(row, volume.facts["size"], split.num_classes)
        write_like(folder / name, mask, volume.file.image)
        yield f"{folder.name}/{name}", mask


def overlays(split: WholeVolumes, slices: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """(height, width, 3) uint8: one line per volume with image, truth and prediction side by side, above a
    legend. The patient's left is on the right, the front on top.

    `slices`: (rows, x, y) uint8, the predicted slice of each row; `names`: of classes 1, 2, ...
    """
    lines = []
    for row in range(min(len(slices), MAX_SHOWN)):
        volume, height = split.volumes[row], split.slice_of(row)
        grey = crop(_grey_slice(volume, height), (0, 0, 0), (*split.slice_size, 3), 0)
        truth = crop(volume.label[:, :, height], (0, 0), split.slice_size, 0)
        panels = [grey, *(_overlay(grey, mask) for mask in (truth, slices[row]))]
        # Rows from front to back, columns from the patient's right to left.
        upright = [np.flip(panel, (0, 1)).swapaxes(0, 1) for panel in panels]
        lines.append(np.concatenate(upright, axis=1))
    scale = max(1, WIDTH // split.slice_size[0])
    pixels = np.concatenate(lines).repeat(scale, axis=0).repeat(scale, axis=1)
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    return with_legend(pixels, "image, truth, prediction", colours)


def _grey_slice(volume: Prepared, height: int) -> np.ndarray:
    """(x, y, 3) uint8: a slice of the image in the file's grid, from the 1st percentile (black) to the 99th
    (white)."""
    shape, size = volume.facts["shape"], volume.facts["size"]
    x, y, z = (((np.arange(n) + 0.5) * old / n).astype(int) for old, n in zip(shape, size, strict=True))
    values = volume.image[:, :, z[height]][np.ix_(x, y)]
    low, high = np.percentile(values, (1, 99))
    grey = np.clip((values - low) / max(high - low, 1e-6), 0, 1) * 255
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)


def _overlay(grey: np.ndarray, mask: np.ndarray) -> np.ndarray:
    colour = COLOURS[(mask.astype(int) - 1) % len(COLOURS)]
    has_class = ((mask > 0) & (mask != IGNORED))[..., None]
    return np.where(has_class, grey // 2 + (colour // 2).astype(np.uint8), grey)
