from dataclasses import replace

import numpy as np
import pytest
import torch

from samerun.images.segmentation import pack, unpack
from samerun.reports.figures import LINE
from samerun.volumes.nifti import IGNORED
from samerun.volumes.output import WholeVolumes, overlays, volume_facts, write_masks


@pytest.fixture
def volumes(prepared):
    """Two volumes of different sizes, in voxels of 2 mm along the first axis."""
    pairs = []
    for number, shape in enumerate([(6, 7, 8), (4, 9, 5)]):
        label = np.zeros(shape, dtype=np.uint8)
        label[1:3, 2:5, 3 + number] = 1
        pairs.append((np.random.default_rng(number).random(shape), label))
    return prepared(*pairs, spacing=(2.0, 1.0, 1.0))


@pytest.mark.parametrize("keeps_masks", [True, False])
def test_rows_of_different_sizes_meet_in_a_batch(volumes, keeps_masks):
    split = WholeVolumes(volumes, True, keeps_masks, 2)
    batch = split.batch(np.array([1, 0])).to(torch.device("cpu"), torch.bfloat16)  # as DeepSpeed takes inputs
    assert batch.inputs["image"].shape == (2, 1, 12, 9, 8)
    assert batch.labels.shape == (2, 6, 9, 8)
    assert (batch.labels[0, 4:] == IGNORED).all()
    for row, number in enumerate((1, 0)):
        image, size, spacing = volume_facts(batch, row)
        assert image.shape == volumes[number].image.shape
        assert (tuple(size), spacing) == (volumes[number].label.shape, [2.0, 1.0, 1.0])
        mask = np.asarray(volumes[number].label)
        kept = split.mask_output(batch, row, mask)
        if keeps_masks:
            assert np.array_equal(unpack(kept["mask"].numpy(), size, 2), mask)
        else:
            assert split.slice_of(number) == 3 + number
            assert kept["slice"].shape == (6, 9)
            assert kept["slice"].sum() == 6


def test_volumes_with_similar_ids_have_masks_of_their_own(volumes, tmp_path):
    ids = ["p/1", "p_1"]
    volumes = [replace(each, file=replace(each.file, id=id_)) for each, id_ in zip(volumes, ids, strict=True)]
    split = WholeVolumes(volumes, False, True, 2)
    packed = [pack(np.zeros(each.facts["size"], np.uint8), 2) for each in volumes]
    paths = [path for path, _ in write_masks(split, packed, tmp_path / "predictions")]
    assert paths == ["predictions/p_1.nii.gz", "predictions/p_1_1.nii.gz"]
    assert all((tmp_path / path).is_file() for path in paths)


def test_an_image_shows_image_truth_and_prediction(volumes):
    split = WholeVolumes(volumes, True, False, 2)
    slices = np.zeros((2, 6, 9), dtype=np.uint8)
    shown = overlays(split, slices, ["one", "two"])[LINE:-LINE]
    height, width = (side * (160 // 6) for side in (2 * 9, 3 * 6))
    assert (shown.shape, shown.dtype) == ((height, width, 3), np.uint8)
    image, truth, prediction = np.split(shown, 3, axis=1)
    assert np.array_equal(image, prediction)  # nothing predicted
    coloured = (truth != truth[..., :1]).any(axis=2)[:: 160 // 6, :: 160 // 6][:9]
    # The front is on top, the left on the right.
    assert [rows.tolist() for rows in np.nonzero(coloured)] == [[4, 4, 5, 5, 6, 6], [3, 4] * 3]
