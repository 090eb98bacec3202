import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, jaccard_score

from samerun.metrics.segmentation import (
    count_classes,
    count_confusion,
    dice,
    iou,
    mean_of_defined,
    pixel_accuracy,
    segmentation_scores,
)

NAMES = ["background", "road", "sky", "bus"]


@pytest.fixture(autouse=True)
def _no_warning_is_tolerated():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def masks(space=(5, 6), count=4):
    generator = np.random.default_rng(len(space))
    return generator.integers(0, 3, (count, *space)), generator.integers(0, 3, (count, *space))  # no bus


@pytest.mark.parametrize("space", [(20,), (5, 6), (3, 4, 5)])
def test_scores_equal_scikit_learns_over_all_elements(space):
    predicted, truth = masks(space)
    truth[0, 0] = 255
    counts = count_classes(torch.as_tensor(predicted), torch.as_tensor(truth), 4, ignore_index=255)
    assert counts.shape == (4, 4, 3)
    scores = segmentation_scores(counts.sum(0).numpy(), NAMES)
    flat = predicted[truth != 255], truth[truth != 255]
    for metric, function in (("iou", jaccard_score), ("dice", f1_score)):
        expected = function(flat[1], flat[0], average=None, labels=[0, 1, 2])
        assert [scores[f"{metric}_{name}"] for name in NAMES] == pytest.approx([*expected, None])
        assert scores[f"mean_{metric}"] == pytest.approx(expected.mean())
    assert scores["pixel_accuracy"] == pytest.approx(accuracy_score(*flat))


def test_confusions_are_scikit_learns_and_give_the_counts():
    predicted, truth = masks()
    truth[0, 0] = 255
    tensors = torch.as_tensor(predicted), torch.as_tensor(truth)
    found = count_confusion(*tensors, 4, ignore_index=255)
    assert torch.equal(found["counts"], count_classes(*tensors, 4, ignore_index=255))
    for row in range(4):
        counted = truth[row] != 255
        expected = confusion_matrix(truth[row][counted], predicted[row][counted], labels=range(4))
        assert np.array_equal(found["confusion"][row].numpy(), expected)
    assert set(count_confusion(*tensors, 300, ignore_index=255)) == {"counts"}  # too many classes


def test_each_image_has_its_own_counts():
    predicted, truth = masks()
    counts = count_classes(torch.as_tensor(predicted), torch.as_tensor(truth, dtype=torch.uint8), 4).numpy()
    for row in range(4):
        alone = count_classes(
            torch.as_tensor(predicted[row : row + 1]), torch.as_tensor(truth[row : row + 1]), 4
        )
        assert np.array_equal(counts[row], alone[0].numpy())
    assert iou(counts).shape == dice(counts).shape == (4, 4)
    assert np.isnan(iou(counts)[:, 3]).all()
    assert pixel_accuracy(counts) == pytest.approx(
        [(p == t).mean() for p, t in zip(predicted, truth, strict=True)]
    )


def test_nothing_counted_is_undefined():
    assert set(segmentation_scores(np.zeros((2, 3), dtype=np.int64), ["a", "b"]).values()) == {None}
    assert mean_of_defined(np.array([np.nan, 0.5])) == 0.5
