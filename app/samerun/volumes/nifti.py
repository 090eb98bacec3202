"""Reads NIfTI files in canonical orientation, checks and resamples them, and writes masks in a file's own
grid. The only module that imports nibabel."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nibabel
import numpy as np
import torch
from nibabel.filebasedimages import ImageFileError
from nibabel.orientations import apply_orientation, axcodes2ornt, io_orientation, ornt_transform
from nibabel.spatialimages import HeaderDataError
from torch.nn import functional

from samerun.errors import InputError, in_short
from samerun.files import path_in_errors
from samerun.images.segmentation import IGNORED

UNREADABLE = (OSError, EOFError, ValueError, zlib.error, ImageFileError, HeaderDataError)


@dataclass(frozen=True)
class Header:
    """The grid of a volume in canonical orientation: right, anterior, superior (RAS)."""

    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]  # voxel size in mm
    codes: str  # the file's own orientation, such as LPS
    corners: tuple[tuple[float, ...], ...]  # of the file's own grid, the first and three others, in mm


def read_header(path: Path) -> Header:
    """Reads the header of a file. Raises `InputError` unless it holds a single volume of numbers."""
    image = _open(path)
    shape = _shape(image)
    if len(shape) != 3:
        raise InputError(
            f"{path}: has {len(shape)} dimensions ({'x'.join(map(str, shape))}); expected one "
            "volume of 3 dimensions"
        )
    if image.get_data_dtype().kind not in "iufb":
        raise InputError(f"{path}: voxels are of type {image.get_data_dtype()}, expected one number each")
    if not np.isfinite(image.affine).all() or np.linalg.det(image.affine[:3, :3]) == 0:
        raise InputError(
            f"{path}: its affine is singular or not finite, so orientation and voxel size are unknown"
        )
    orientation = io_orientation(image.affine)
    sizes = nibabel.affines.voxel_sizes(image.affine)
    axes = np.argsort(orientation[:, 0])
    corners = np.vstack([np.zeros(3), np.diag(shape) - np.eye(3)])
    return Header(
        shape=tuple(int(shape[axis]) for axis in axes),
        spacing=tuple(float(sizes[axis]) for axis in axes),
        codes="".join(nibabel.aff2axcodes(image.affine)),
        corners=tuple(map(tuple, nibabel.affines.apply_affine(image.affine, corners).tolist())),
    )


def voxel_volume(path: Path) -> float:
    """The volume of a voxel in mm3, also of a sheared grid, whose voxels are no boxes."""
    return float(abs(np.linalg.det(_open(path).affine[:3, :3])))


def check_pair(image: Path, label: Path, notes: list[str]) -> None:
    """Raises `InputError` if an image and its label differ in size, voxel size or orientation. Notes another
    origin or rotation."""
    image_header, label_header = read_header(image), read_header(label)
    for name, expected, found, tolerance in (
        ("size", image_header.shape, label_header.shape, 0),
        ("voxel size", image_header.spacing, label_header.spacing, 1e-2),
    ):
        if not np.allclose(expected, found, rtol=tolerance):
            found, expected = ("x".join(f"{x:g}" for x in lengths) for lengths in (found, expected))
            raise InputError(
                f"{label}: {name} {found}, but {expected} in its image {image}; a label needs the "
                "image's grid"
            )
    if image_header.codes != label_header.codes:
        raise InputError(
            f"{label}: orientation {label_header.codes}, but {image_header.codes} in its image {image}"
        )
    if not np.allclose(image_header.corners, label_header.corners, atol=min(image_header.spacing)):
        notes.append(
            f"{label}: another origin or rotation than its image's, which is ignored: voxels are matched by "
            "their index"
        )


def read_image(path: Path) -> np.ndarray:
    """(x, y, z) float32 in canonical orientation, normalised to mean 0 and standard deviation 1 over the
    volume.

    Raises `InputError` for a truncated file, and for NaN or infinite voxels.
    """
    voxels = _voxels(path)
    if wrong := int((~np.isfinite(voxels)).sum()):
        raise InputError(
            f"{path}: {wrong} of {voxels.size} voxels are NaN or infinite; replace them, or leave "
            "the volume out"
        )
    mean, deviation = voxels.mean(dtype=np.float64), voxels.std(dtype=np.float64)
    return ((voxels - mean) / (deviation or 1.0)).astype(np.float32)


def read_label(path: Path, ignore_index: int | None) -> np.ndarray:
    """(x, y, z) uint8 class numbers in canonical orientation, `IGNORED` in place of `ignore_index`.

    Raises `InputError` for values that are no class numbers.
    """
    voxels = _voxels(path)
    ignored = np.zeros(voxels.shape, dtype=bool) if ignore_index is None else voxels == ignore_index
    are_numbers = np.isfinite(voxels) & (voxels == np.round(voxels)) & (voxels >= 0) & (voxels < IGNORED)
    wrong = ~(ignored | are_numbers)
    if wrong.any():
        value = voxels[wrong][0]
        advice = f"; if it marks voxels to be ignored: --ignore_index {value:g}" if value >= IGNORED else ""
        raise InputError(
            f"{path}: {int(wrong.sum())} voxels have no class number, the first {value:g}; expected "
            f"0 to {IGNORED - 1}{advice}"
        )
    return np.where(ignored, IGNORED, voxels).astype(np.uint8)


def resampled_shape(
    shape: Sequence[int], spacing: Sequence[float], new_spacing: Sequence[float]
) -> tuple[int, ...]:
    """The shape of a volume of the same extent with voxels of (nearly) `new_spacing`."""
    axes = zip(shape, spacing, new_spacing, strict=True)
    return tuple(max(1, round(n * old / new)) for n, old, new in axes)


def resample(values: torch.Tensor, shape: Sequence[int], mode: str = "trilinear") -> torch.Tensor:
    """Resamples (channels, x, y, z) to (channels, *shape) over the same extent. `mode`: trilinear or
    nearest-exact."""
    if tuple(values.shape[1:]) == tuple(shape):
        return values
    aligned = {"align_corners": False} if mode == "trilinear" else {}
    return functional.interpolate(values[None], size=tuple(shape), mode=mode, **aligned)[0]


def write_like(path: Path, mask: np.ndarray, image: Path) -> None:
    """Writes class numbers, (x, y, z) uint8 in canonical orientation, with the orientation and affine of the
    file `image`."""
    original = _open(image)
    back = ornt_transform(axcodes2ornt("RAS"), io_orientation(original.affine))
    voxels = apply_orientation(mask, back).astype(np.uint8)
    header = original.header.copy()
    header.set_data_dtype(np.uint8)
    header.set_slope_inter(1, 0)
    # Resets the display window, which was for the image's intensities.
    header["cal_min"] = header["cal_max"] = 0
    unfinished = path.with_name(f".unfinished_{path.name}")
    with path_in_errors(path):
        nibabel.save(type(original)(voxels, original.affine, header), unfinished)
        unfinished.replace(path)


def _open(path: Path) -> nibabel.Nifti1Image:
    try:
        image = nibabel.load(path)
    except UNREADABLE as error:
        raise InputError(f"{path}: no readable NIfTI file ({in_short(error)})") from None
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
        raise InputError(f"{path}: is damaged or cut short ({in_short(error)}); copy it again") from None
    return apply_orientation(voxels, io_orientation(image.affine))
