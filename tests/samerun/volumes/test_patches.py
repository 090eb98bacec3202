from dataclasses import replace

import numpy as np
import pytest

from samerun.volumes.nifti import IGNORED
from samerun.volumes.patches import Augmentation, Patches, crop, crop_transformed

SIZE = (4, 4, 4)


@pytest.fixture
def patches(prepared):
    """Of two volumes of numbered voxels, one smaller than a patch; the first has one voxel of class 2."""
    pairs = []
    for shape in (12, 13, 14), (12, 3, 14):
        label = np.zeros(shape, dtype=np.uint8)
        label[:6], label[9, 1, 3] = 1, 2
        pairs.append((np.arange(label.size, dtype=np.float32).reshape(shape), label))
    settings = {"foreground_share": 0.5, "flip_axes": ("x", "y", "z"), "seed": 1}
    return Patches(prepared(*pairs), SIZE, 3, **settings, augmentation=Augmentation())


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
            seen.add(
                tuple(bool(image[place] > image[0, 0, 0]) for place in [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
            )
    assert len(seen) == 8  # every combination of flips
    unflipped = replace(patches, flip_axes=("none",)).batch(np.arange(3)).inputs["image"]
    assert (unflipped.diff(dim=2) > 0).all()


def test_classes_are_drawn_alike_however_rare(patches):
    """One voxel of class 2 in 2184, half of the volume of class 1."""
    for share, low, high in ((1.0, 0.4, 0.65), (0.0, 0.0, 0.15)):
        drawn = replace(patches, foreground_share=share)
        labels = [drawn.batch(np.array([0]), epoch).labels for epoch in range(200)]
        assert low <= np.mean([bool((label == 2).any()) for label in labels]) < high


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


@pytest.fixture
def volume():
    """A smooth image, and its label: where it is above 0."""
    axes = np.meshgrid(*(np.linspace(-3, 3, length) for length in (20, 24, 22)), indexing="ij")
    image = np.sin(axes[0] + 0.5 * axes[1]).astype(np.float32) + np.cos(axes[2]).astype(np.float32)
    return image, (image > 0).astype(np.uint8)


def test_without_a_turn_a_part_is_what_cut_gives(volume):
    for start in ([3, 4, 5], [-2, 18, 0]):
        image, label = crop_transformed(*volume, start, (8, 9, 10), np.eye(3))
        assert np.array_equal(label, crop(volume[1], start, (8, 9, 10), IGNORED))
        np.testing.assert_allclose(image, crop(volume[0], start, (8, 9, 10), 0), atol=1e-6)


def test_a_quarter_turn_is_that_of_numpy_and_a_scale_enlarges_about_the_middle(volume):
    quarter = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    plain = crop(volume[0], [4, 6, 5], (9, 9, 9), 0)
    image, label = crop_transformed(*volume, [4, 6, 5], (9, 9, 9), quarter)
    np.testing.assert_allclose(image, np.rot90(plain, -1), atol=1e-5)
    assert np.array_equal(label, np.rot90(crop(volume[1], [4, 6, 5], (9, 9, 9), 0), -1))
    enlarged, _ = crop_transformed(*volume, [4, 6, 5], (9, 9, 9), np.eye(3) / 2)
    np.testing.assert_allclose(enlarged[::2, ::2, ::2], plain[2:7, 2:7, 2:7], atol=1e-5)


def test_image_and_label_are_turned_alike_and_outside_nothing_counts(volume):
    matrix = Augmentation(rotation=40, scales=(0.8, 1.25)).matrix(np.random.default_rng(0))
    image, label = crop_transformed(*volume, [2, 3, 2], (16, 17, 18), matrix)
    sure = (label != IGNORED) & (np.abs(image) > 0.3)  # away from the surface, where interpolation decides
    assert sure.mean() > 0.5
    assert ((image > 0) == label)[sure].all()
    assert (crop_transformed(*volume, [-8, 0, 0], (16, 16, 16), matrix)[1] == IGNORED).mean() > 0.3


def test_a_turn_is_one_in_millimetres(volume):
    """Voxels three times as high as wide: a turned vector keeps its length in mm."""
    spacing = np.array([1.0, 1.0, 3.0])
    matrix = Augmentation(rotation=90, spacing=tuple(spacing)).matrix(np.random.default_rng(1))
    for voxel in np.eye(3):
        assert np.linalg.norm(matrix @ voxel * spacing) == pytest.approx(np.linalg.norm(voxel * spacing))
    scaled = Augmentation(scales=(2.0, 2.0)).matrix(np.random.default_rng(1))
    np.testing.assert_allclose(scaled, np.eye(3) / 2, atol=1e-12)


def test_values_change_within_their_limits():
    image, changes = np.array([-1.0, 0.0, 1.0], dtype=np.float32), Augmentation(intensity=0.2)
    found = np.array([changes.change_intensity(image, np.random.default_rng(seed)) for seed in range(200)])
    factors, offsets = (found[:, 2] - found[:, 0]) / 2, found[:, 1]
    assert 0.8 <= factors.min() < 0.82
    assert 1.18 < factors.max() <= 1.2
    assert -0.2 <= offsets.min() < -0.18
    zeros, noise = np.zeros(2000, np.float32), Augmentation(noise=0.5)
    noisy = [noise.change_intensity(zeros, np.random.default_rng(seed)).std() for seed in range(50)]
    assert max(noisy) < 0.55
    assert min(noisy) < 0.1
    assert Augmentation().change_intensity(image, np.random.default_rng(0)) is image
    assert Augmentation().matrix(np.random.default_rng(0)) is None
