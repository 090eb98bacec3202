"""Small NIfTI files."""

import nibabel
import numpy as np
import pytest

from samerun.volumes.data import VolumeFile, Volumes, prepare


@pytest.fixture
def write():
    """A function (path, array, voxel size, orientation of the array's axes) -> path of a NIfTI file."""

    def make(path, values, spacing=(1.0, 1.0, 1.0), codes="RAS", origin=(0, 0, 0)):
        affine = np.eye(4)
        turned = nibabel.orientations.axcodes2ornt(codes)
        for axis, (to, sign) in enumerate(turned):
            affine[:3, axis] = 0
            affine[int(to), axis] = sign * spacing[axis]
        affine[:3, 3] = origin
        path.parent.mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(np.asarray(values), affine), path)
        return path

    return make


@pytest.fixture
def prepared(tmp_path, write, token_cache):
    """A function ((image, label) of each volume, voxel size) -> the volumes, in voxels of 1 mm."""

    def make(*pairs, spacing=(1.0, 1.0, 1.0)):
        files = []
        for number, pair in enumerate(pairs):
            paths = [tmp_path / kind / f"{number}.nii.gz" for kind in ("images", "labels")]
            files.append(VolumeFile(str(number), *map(write, paths, pair, [spacing] * 2)))
        return prepare(Volumes("data", files), (1.0, 1.0, 1.0), None)

    return make


@pytest.fixture
def folder(tmp_path, write, token_cache):
    """A folder with three volumes in images/ and labels/; uses an empty cache."""
    generator = np.random.default_rng(0)
    for number in range(3):
        label = np.zeros((7, 8, 9), dtype=np.uint8)
        label[1:4, 2:5, 3:6], label[4:6, 2:5, 3:6] = 1, 2
        image = (generator.normal(100, 10, label.shape) + 50 * label).astype(np.float32)
        write(tmp_path / "data" / "images" / f"v{number}.nii.gz", image)
        write(tmp_path / "data" / "labels" / f"v{number}.nii.gz", label)
    return tmp_path / "data"
