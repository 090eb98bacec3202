from dataclasses import replace

import numpy as np
import pytest

from samerun.volumes.augmentation import Augmentation, crop
from samerun.volumes.files import VolumeFile, Volumes
from samerun.volumes.nifti import IGNORED
from samerun.volumes.patches import Patches
from samerun.volumes.prepared import prepare

SIZE = (4, 4, 4)


@pytest.fixture
def patches(tmp_path, write, token_cache):
    """Of two volumes whose voxels are numbered, the second smaller than a patch along one axis. The first has
    one voxel of class 2 and many of class 1."""
    files = []
    for number, shape in enumerate([(12, 13, 14), (12, 3, 14)]):
        label = np.zeros(shape, dtype=np.uint8)
        label[:6], label[9, 1, 3] = 1, 2
        values = np.arange(label.size, dtype=np.float32).reshape(shape)
        paths = [tmp_path / kind / f"{number}.nii.gz" for kind in ("images", "labels")]
        for path, voxels in zip(paths, (values, label), strict=True):
            write(path, voxels)
        files.append(VolumeFile(str(number), *paths))
    volumes = prepare(Volumes("data", files), (1.0, 1.0, 1.0), None)
    return Patches(
        volumes, SIZE, 3, foreground_share=0.5, flip_axes=("x", "y", "z"), seed=1, augmentation=Augmentation()
    )


@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(30, (0.8, 1.2), 0.1, 0.1)])
def test_a_patch_is_a_function_of_seed_epoch_and_row(patches, augmentation):
    patches = replace(patches, augmentation=augmentation)
    together = patches.batch(np.arange(6), epoch=2)
    assert together.inputs["image"].shape == (6, 1, *SIZE)
    for row in (4, 0, 3):  # in any order and company
        alone = patches.batch(np.array([row]), epoch=2)
        assert alone.inputs["image"][0].equal(together.inputs["image"][row])
        assert alone.labels[0].equal(together.labels[row])
    first = together.inputs["image"]
    assert len({tuple(patch.ravel()) for patch in first.numpy()}) == 6
    assert not patches.batch(np.arange(6), epoch=3).inputs["image"].equal(first)
    assert not replace(patches, seed=2).batch(np.arange(6), epoch=2).inputs["image"].equal(first)


def test_image_and_label_are_cut_and_flipped_alike(patches):
    volume = patches.volumes[0]
    of_value = dict(zip(volume.image.ravel().tolist(), volume.patch_label.ravel().tolist(), strict=True))
    seen = set()
    for epoch in range(20):
        batch = patches.batch(np.array([0, 1, 2]), epoch)
        for image, label in zip(batch.inputs["image"][:, 0], batch.labels, strict=True):
            assert label.ravel().tolist() == [of_value[value] for value in image.ravel().tolist()]
            steps = [
                (image[1, 0, 0] - image[0, 0, 0]),
                (image[0, 1, 0] - image[0, 0, 0]),
                (image[0, 0, 1] - image[0, 0, 0]),
            ]
            seen.add(tuple(float(step) > 0 for step in steps))
    assert len(seen) == 8  # every combination of flips
    unflipped = replace(patches, flip_axes=("none",)).batch(np.arange(3)).inputs["image"]
    assert (unflipped.diff(dim=2) > 0).all()


def test_classes_are_drawn_alike_however_rare(patches):
    """One voxel of class 2 in 2184, half of the volume of class 1."""
    all_foreground = replace(patches, foreground_share=1.0)
    has_rare = [bool((all_foreground.batch(np.array([0]), epoch).labels == 2).any()) for epoch in range(200)]
    assert 0.4 < np.mean(has_rare) < 0.65
    nowhere = replace(patches, foreground_share=0.0)
    assert (
        np.mean([bool((nowhere.batch(np.array([0]), epoch).labels == 2).any()) for epoch in range(200)])
        < 0.15
    )


def test_a_small_volume_is_padded_with_what_does_not_count(patches):
    batch = replace(patches, flip_axes=("none",)).batch(np.array([3, 4, 5]))
    padded = batch.labels == IGNORED
    assert padded.any(dim=(1, 3))[:, -1].all()
    assert padded.sum(dim=(1, 2, 3)).tolist() == [16] * 3
    assert not batch.inputs["image"][:, 0][padded].any()


def test_cut_reaches_beyond_both_borders():
    values = np.arange(1, 5)
    assert crop(values, [-2], [8], 0).tolist() == [0, 0, 1, 2, 3, 4, 0, 0]
    assert crop(values, [1], [2], 0).tolist() == [2, 3]
