import itertools

import nibabel
import numpy as np
import pytest
import torch

from samerun.images.segmentation import IGNORED
from samerun.volumes.nifti import (
    read_header,
    read_image,
    read_label,
    resample,
    resampled_shape,
    voxel_volume,
    write_like,
)

SHAPE = (4, 5, 6)


@pytest.mark.parametrize("codes", ["RAS", "LPS", "PIR", "SAL", "IPR"])
def test_every_orientation_is_read_as_ras_and_written_back(tmp_path, write, codes):
    """Voxels are numbered by where they lie in the patient: the number grows to the right, front and top."""
    spacing = (1.0, 2.0, 3.0)
    path = write(tmp_path / "a.nii.gz", np.zeros(SHAPE, dtype=np.int16), spacing, codes, origin=(5, -6, 7))
    image = nibabel.load(path)
    places = np.array([image.affine[:3, :3] @ index for index in itertools.product(*map(range, SHAPE))])
    ranks = np.lexsort(places.T[::-1]).argsort().reshape(SHAPE)  # right first, then front, then top
    path = write(tmp_path / "a.nii.gz", ranks.astype(np.uint8), spacing, codes, origin=(5, -6, 7))
    label, header = read_label(path, None), read_header(path)
    assert np.array_equal(label.ravel(), np.arange(label.size))
    axes = ["RLAPSI".index(code) // 2 for code in codes]
    assert header.spacing == tuple(spacing[axes.index(axis)] for axis in range(3))
    assert header.shape == label.shape
    write_like(tmp_path / "b.nii.gz", label, path)
    back, first = nibabel.load(tmp_path / "b.nii.gz"), nibabel.load(path)
    assert np.array_equal(np.asarray(back.dataobj), ranks)
    assert np.array_equal(back.affine, first.affine)
    for name in ("sform_code", "qform_code"):
        assert int(back.header[name]) == int(first.header[name])


def test_voxels_of_a_sheared_grid_are_smaller_than_their_edges(tmp_path, write):
    path = write(tmp_path / "a.nii", np.zeros(SHAPE, dtype=np.int16), (1.5, 2.0, 3.0), "LPS")
    assert voxel_volume(path) == pytest.approx(9)
    image = nibabel.load(path)
    image.affine[0, 1] = 0.5
    nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj), image.affine), tmp_path / "b.nii")
    assert np.prod(read_header(tmp_path / "b.nii").spacing) > 9.2
    assert voxel_volume(tmp_path / "b.nii") == pytest.approx(9)


def test_a_mask_like_a_scaled_image_holds_class_numbers(tmp_path, write):
    image = nibabel.load(write(tmp_path / "a.nii", np.arange(120, dtype=np.float32).reshape(SHAPE)))
    image.header.set_slope_inter(0.5, 1000)
    image.set_data_dtype(np.int16)
    nibabel.save(image, tmp_path / "b.nii")
    write_like(tmp_path / "mask.nii.gz", np.full(SHAPE, 3, dtype=np.uint8), tmp_path / "b.nii")
    mask = nibabel.load(tmp_path / "mask.nii.gz")
    assert mask.get_data_dtype() == np.uint8
    assert (mask.get_fdata() == 3).all()


def test_images_have_mean_0_and_deviation_1(tmp_path, write):
    voxels = np.random.default_rng(0).normal(1000, 300, SHAPE).astype(np.float32)
    found = read_image(write(tmp_path / "a.nii", voxels))
    assert found.dtype == np.float32
    assert found.mean() == pytest.approx(0, abs=1e-6)
    assert found.std() == pytest.approx(1, abs=1e-6)
    constant = write(tmp_path / "b.nii", np.full(SHAPE, 7, dtype=np.int16))
    assert not read_image(constant).any()  # nothing to divide by


def test_voxels_that_do_not_count(tmp_path, write):
    label = np.zeros(SHAPE, dtype=np.int16)
    label[0], label[1] = 2, 300
    found = read_label(write(tmp_path / "a.nii", label), 300)
    assert (found[0] == 2).all()
    assert (found[1] == IGNORED).all()
    assert not found[2:].any()


def test_resampling_keeps_the_extent():
    assert resampled_shape((10, 20, 3), (2.0, 0.5, 4.0), (1.0, 1.0, 1.0)) == (20, 10, 12)
    assert resampled_shape((1, 1, 1), (0.1, 0.1, 0.1), (1.0, 1.0, 1.0)) == (1, 1, 1)
    # A function that is linear in space is the same at every voxel's middle, whatever the size of voxels.
    coarse, fine = ((torch.arange(n) + 0.5) / n for n in (8, 24))
    found = resample(coarse.expand(1, 5, 5, 8).contiguous(), (5, 5, 24))
    torch.testing.assert_close(found[0, 2, 2, 2:-2], fine[2:-2])
    label = torch.tensor([0, 7], dtype=torch.uint8).repeat_interleave(4).expand(1, 2, 2, 8).contiguous()
    assert resample(label, (2, 2, 4), "nearest-exact")[0, 0, 0].tolist() == [0, 0, 7, 7]
