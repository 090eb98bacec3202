"""NIfTI files: read into one orientation, checked, brought to a spacing, written in the grid of another. The only module that
imports nibabel."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nibabel
import numpy as np
import torch
from nibabel.orientations import apply_orientation, axcodes2ornt, io_orientation, ornt_transform
from torch.nn import functional

from finetune.errors import InputError
from finetune.output.files import path_in_errors

IGNORED = 255  # what voxels that count nowhere are in labels
UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    zlib.error,
    nibabel.filebasedimages.ImageFileError,
    nibabel.spatialimages.HeaderDataError,
)


@dataclass(frozen=True)
class Header:
    """A volume's grid in canonical orientation: its first axis goes right, the second to the front, the third up (RAS)."""

    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]  # voxel size in mm
    codes: str  # the file's own orientation, such as LPS
    origin: tuple[float, ...]  # of the file's own grid, in mm


def read_header(path: Path) -> Header:
    """Reads a file's header alone. Raises `InputError` for a file that holds no single volume of numbers."""
    image = _open(path)
    shape = _shape(image)
    if len(shape) != 3:
        raise InputError(
            f"{path}: has {len(shape)} dimensions ({'x'.join(map(str, shape))}); expected one volume of 3 dimensions"
        )
    if image.get_data_dtype().kind not in "iufb":
        raise InputError(f"{path}: voxels are of type {image.get_data_dtype()}, expected one number each")
    if not np.isfinite(image.affine).all() or np.linalg.det(image.affine[:3, :3]) == 0:
        raise InputError(f"{path}: its affine says nothing of orientation and voxel size")
    orientation = io_orientation(image.affine)
    sizes = nibabel.affines.voxel_sizes(image.affine)
    axes = np.argsort(orientation[:, 0])
    return Header(
        shape=tuple(int(shape[axis]) for axis in axes),
        spacing=tuple(float(sizes[axis]) for axis in axes),
        codes="".join(nibabel.aff2axcodes(image.affine)),
        origin=tuple(float(x) for x in image.affine[:3, 3]),
    )


def check_pair(image: Path, label: Path, notes: list[str]) -> None:
    """Raises `InputError` for a label in another grid than its image's."""
    of_image, of_label = read_header(image), read_header(label)
    for what, ours, theirs in (
        ("size", of_image.shape, of_label.shape),
        ("voxel size", of_image.spacing, of_label.spacing),
    ):
        if not np.allclose(ours, theirs, rtol=1e-2):
            shown = ["x".join(f"{x:g}" for x in grid) for grid in (theirs, ours)]
            raise InputError(f"{label}: {what} {shown[0]}, but {shown[1]} in its image {image}; a label needs the image's grid")
    if of_image.codes != of_label.codes:
        raise InputError(f"{label}: orientation {of_label.codes}, but {of_image.codes} in its image {image}")
    if not np.allclose(of_image.origin, of_label.origin, atol=min(of_image.spacing)):
        notes.append(f"{label}: another origin than its image's; voxels are taken to lie upon each other")


def read_image(path: Path) -> np.ndarray:
    """(x, y, z) float32 in canonical orientation, normalised: mean 0 and standard deviation 1 over all voxels of the volume.

    Raises `InputError` for a file that is cut short, and for voxels that are no numbers.
    """
    voxels = _voxels(path)
    wrong = int((~np.isfinite(voxels)).sum())
    if wrong:
        raise InputError(f"{path}: {wrong} of {voxels.size} voxels are NaN or infinite; replace them, or leave the volume out")
    mean, deviation = voxels.mean(dtype=np.float64), voxels.std(dtype=np.float64)
    return ((voxels - mean) / (deviation or 1.0)).astype(np.float32)


def read_label(path: Path, ignore_index: int | None) -> np.ndarray:
    """(x, y, z) uint8 class numbers in canonical orientation, `IGNORED` where voxels do not count.

    Raises `InputError` for values that are no class numbers.
    """
    voxels = _voxels(path)
    ignored = np.zeros(voxels.shape, dtype=bool) if ignore_index is None else voxels == ignore_index
    wrong = ~ignored & ~(np.isfinite(voxels) & (voxels == np.round(voxels)) & (voxels >= 0) & (voxels < IGNORED))
    if wrong.any():
        value = voxels[wrong][0]
        advice = f"; if it marks voxels that do not count: --ignore_index {value:g}" if value >= IGNORED else ""
        raise InputError(
            f"{path}: {int(wrong.sum())} voxels have no class number, the first {value:g}; expected 0 to {IGNORED - 1}{advice}"
        )
    return np.where(ignored, IGNORED, voxels).astype(np.uint8)


def resampled_shape(shape: Sequence[int], spacing: Sequence[float], wanted: Sequence[float]) -> tuple[int, ...]:
    """The size of a volume whose voxels have (nearly) the wanted size: the volume's extent is kept."""
    return tuple(max(1, round(n * old / new)) for n, old, new in zip(shape, spacing, wanted, strict=True))


def resample(values: torch.Tensor, shape: Sequence[int], mode: str = "trilinear") -> torch.Tensor:
    """(channels, *shape) of (channels, x, y, z), over the same extent; `mode`: trilinear or nearest-exact."""
    if tuple(values.shape[1:]) == tuple(shape):
        return values
    aligned = {"align_corners": False} if mode == "trilinear" else {}
    return functional.interpolate(values[None], size=tuple(shape), mode=mode, **aligned)[0]


def write_like(path: Path, mask: np.ndarray, image: Path) -> None:
    """Writes class numbers, (x, y, z) uint8 in canonical orientation, in the grid, orientation and affine of a file."""
    original = _open(image)
    back = ornt_transform(axcodes2ornt("RAS"), io_orientation(original.affine))
    header = original.header.copy()
    header.set_data_dtype(np.uint8)
    header.set_slope_inter(1, 0)
    header["cal_min"] = header["cal_max"] = 0  # the display window of the image's intensities
    unfinished = path.with_name(f".unfinished_{path.name}")
    with path_in_errors(path):
        nibabel.save(type(original)(apply_orientation(mask, back).astype(np.uint8), original.affine, header), unfinished)
        unfinished.replace(path)


def _open(path: Path) -> nibabel.Nifti1Image:
    try:
        image = nibabel.load(path)
    except UNREADABLE as error:
        raise InputError(f"{path}: no readable NIfTI file ({_first_line(error)})") from None
    if not isinstance(image, nibabel.Nifti1Image):  # also the base of version 2
        raise InputError(f"{path}: is {type(image).__name__}, expected NIfTI")
    return image


def _shape(image: nibabel.Nifti1Image) -> tuple[int, ...]:
    shape = image.shape
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _voxels(path: Path) -> np.ndarray:
    """(x, y, z) float32 in canonical orientation."""
    image = _open(path)
    try:
        voxels = image.get_fdata(dtype=np.float32, caching="unchanged").reshape(_shape(image))
    except UNREADABLE as error:
        raise InputError(f"{path}: is damaged or cut short ({_first_line(error)}); copy it again") from None
    return apply_orientation(voxels, io_orientation(image.affine))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
