from __future__ import annotations

import numpy as np
import pytest

from samerun.volumes.augmentation import Augmentation, crop, crop_transformed
from samerun.volumes.nifti import IGNORED


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
    image, found = np.array([-1.0, 0.0, 1.0], dtype=np.float32), []
    for seed in range(200):
        low, middle, high = Augmentation(intensity=0.2).change_intensity(image, np.random.default_rng(seed))
        found.append(((high - low) / 2, middle))
    assert 0.8 <= min(f for f, _ in found) < 0.82
    assert 1.18 < max(f for f, _ in found) <= 1.2
    assert -0.2 <= min(b for _, b in found) < -0.18
    noisy = [
        Augmentation(noise=0.5)
        .change_intensity(np.zeros(2000, np.float32), np.random.default_rng(seed))
        .std()
        for seed in range(50)
    ]
    assert max(noisy) < 0.55
    assert min(noisy) < 0.1
    assert Augmentation().change_intensity(image, np.random.default_rng(0)) is image
    assert Augmentation().matrix(np.random.default_rng(0)) is None
