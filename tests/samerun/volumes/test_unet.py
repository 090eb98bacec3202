import numpy as np
import pytest
import torch
from scipy.ndimage import binary_erosion
from scipy.spatial.distance import cdist

from samerun.volumes.network import Settings, classes_of, hausdorff95, volume_logits
from samerun.volumes.nifti import IGNORED


def both_signs(windows):
    assert windows.dtype == torch.bfloat16
    return torch.cat([windows, -windows], dim=1)


@pytest.mark.parametrize("shape", [(9, 10, 11), (3, 10, 4)])
def test_windows_put_a_volume_together_whatever_its_size(shape):
    image, larger = torch.randint(-9, 9, shape).bfloat16(), [2 * n for n in shape]
    settings = Settings(["background", "a"], (1.0, 1.0, 1.0), (4, 4, 8), {}, overlap=0.5)
    logits = volume_logits(both_signs, image, shape, settings, 3)
    torch.testing.assert_close(logits, torch.stack([image, -image]).float())
    assert volume_logits(both_signs, image, larger, settings, 3).shape == (2, *larger)


def test_classes_of_one_and_of_several_channels():
    logits = torch.tensor([[0.1, -0.1], [0.3, -0.2], [0.2, 0.0]])[:, :, None, None]
    assert classes_of(logits).flatten().tolist() == [1, 2]
    assert classes_of(logits[:1]).flatten().tolist() == [1, 0]


def surface(mask):
    """Indices of the mask's voxels that have a neighbour outside of it."""
    return np.argwhere(mask & ~binary_erosion(mask))


def test_hausdorff_is_what_all_pairs_of_surface_voxels_say():
    generator, spacing = np.random.default_rng(0), (1.0, 0.5, 2.5)
    truth, predicted = np.zeros((2, 9, 10, 8), dtype=np.uint8)
    truth[0:6, 2:8, 1:6], predicted[1:7, 1:6, 2:8] = 1, 1  # up to the array's border
    predicted[generator.random(predicted.shape) < 0.05] = 1
    found = hausdorff95(predicted, truth, spacing, 2)
    distances = cdist(surface(predicted == 1) * spacing, surface(truth == 1) * spacing)
    assert np.isnan(found[0])
    assert found[1] == pytest.approx(max(np.percentile(distances.min(axis), 95) for axis in (0, 1)), rel=1e-5)


def test_hausdorff_is_undefined_where_a_class_is_missing():
    truth, predicted = np.zeros((2, 4, 4, 4), dtype=np.uint8)
    truth[0], predicted[0], predicted[1], truth[2] = 1, 1, 2, IGNORED
    predicted[2] = 1  # does not count
    assert hausdorff95(predicted, truth, (1.0, 1.0, 1.0), 3)[1] == 0
    assert np.isnan(hausdorff95(predicted, truth, (1.0, 1.0, 1.0), 3)[2])
