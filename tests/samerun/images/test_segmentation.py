import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, jaccard_score
from torch.nn import functional

from samerun.images import segmentation
from samerun.images.segmentation import (
    IGNORED,
    SegmentationLoss,
    balanced_class_weights,
    count_classes,
    mean_of_defined,
    pack,
    report_content,
    segmentation_scores,
    unpack,
)
from samerun.reports.figures import as_image

NAMES = ["background", "road", "sky", "bus"]
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.mark.parametrize("space", [(20,), (5, 6), (3, 4, 5)])
def test_scores_and_confusions_are_scikit_learns(space, monkeypatch):
    predicted, truth = np.random.default_rng(len(space)).integers(0, 3, (2, 4, *space))  # no bus
    truth[0, 0] = IGNORED
    rows = list(zip(torch.as_tensor(predicted), torch.as_tensor(truth), strict=True))
    found = [count_classes(*row, 4) for row in rows]
    scores = segmentation_scores(sum(counts["counts"] for counts in found).numpy(), NAMES)
    flat = truth[truth != IGNORED], predicted[truth != IGNORED]
    for metric, function in (("iou", jaccard_score), ("dice", f1_score)):
        expected = function(*flat, average=None, labels=[0, 1, 2])
        assert [scores[f"{metric}_{name}"] for name in NAMES] == pytest.approx([*expected, None])
        assert scores[f"mean_{metric}"] == pytest.approx(expected.mean())
    assert scores["pixel_accuracy"] == pytest.approx(accuracy_score(*flat))
    for row in range(4):
        flat = [numbers[row][truth[row] != IGNORED] for numbers in (truth, predicted)]
        assert np.array_equal(found[row]["confusion"], confusion_matrix(*flat, labels=range(4)))
        assert np.array_equal(found[row]["counts"][:, segmentation.TRUE], np.bincount(flat[0], minlength=4))
    monkeypatch.setattr(segmentation, "MAX_CONFUSION", 3)  # too many classes for a matrix
    assert set(count_classes(*rows[0], 4)) == {"counts"}
    counts = np.zeros((2, 4, 3), dtype=int)
    counts[0, 1, segmentation.TRUE] = 5
    assert segmentation.mean_loss({"loss": np.array([3.0, 0.0]), "counts": counts}) == 3.0
    assert segmentation.mean_loss({"loss": np.zeros(1), "counts": counts[1:]}) is None


def test_the_commonest_class_of_training_scores_its_share_of_the_truth():
    scores = segmentation.scores_of_commonest_class([{0: 1, 1: 2}, {0: 4, 255: 9}], [{0: 3, 1: 1}], "ab")
    assert (scores["pixel_accuracy"], scores["iou_a"], scores["iou_b"]) == (0.75, 0.75, 0)


def test_nothing_counted_is_undefined():
    assert set(segmentation_scores(np.zeros((2, 3), dtype=np.int64), ["a", "b"]).values()) == {None}
    assert mean_of_defined(np.array([np.nan, 0.5])) == 0.5


SPACES = [(11,), (5, 6), (4, 3, 5)]


def images(space, classes=3, count=4, channels=None):
    generator = torch.Generator().manual_seed(len(space))
    logits = torch.randn(count, channels or classes, *space, generator=generator, requires_grad=True)
    return logits, torch.randint(0, classes, (count, *space), generator=generator)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("settings", [{}, {"class_weights": (0.5, 2.0, 1.0)}, {"label_smoothing": 0.1}])
def test_cross_entropy_is_torchs_mean_over_each_image(space, settings):
    logits, labels = images(space)
    labels[0, 0] = IGNORED
    loss = SegmentationLoss(dice_weight=0, **settings)(logits, labels)
    weight = torch.tensor(settings["class_weights"]) if "class_weights" in settings else None
    given = {"ignore_index": IGNORED, "label_smoothing": settings.get("label_smoothing", 0)}
    for row in range(4):
        expected = functional.cross_entropy(logits[row][None], labels[row][None], weight, **given)
        torch.testing.assert_close(loss[row], expected)


def test_an_element_has_the_weight_of_its_class_also_with_smoothing():
    logits, labels = images((4, 5))
    weights = torch.tensor((0.5, 2.0, 1.0))[labels]
    loss = SegmentationLoss(dice_weight=0, class_weights=(0.5, 2.0, 1.0), label_smoothing=0.1)
    found = loss(logits, labels)
    losses = functional.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(found, (weights * losses).sum((1, 2)) / weights.sum((1, 2)))


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("include_background", [True, False])
def test_dice_of_each_image_over_the_classes_in_its_truth(space, include_background):
    logits, labels = images(space)
    labels[0][labels[0] == 2] = 0  # absent from an image: not in its mean
    loss = SegmentationLoss(cross_entropy_weight=0, include_background=include_background)(logits, labels)
    shares = torch.softmax(logits, dim=1)
    for row in range(4):
        classes = [c for c in labels[row].unique().tolist() if c > 0 or include_background]
        masks = {c: (labels[row] == c).float() for c in classes}
        dice = [2 * (shares[row, c] * m).sum() / (shares[row, c].sum() + m.sum()) for c, m in masks.items()]
        torch.testing.assert_close(loss[row], 1 - torch.stack(dice).mean())


def test_one_channel_is_binary():
    logits, labels = images((4, 5), classes=2, channels=1)
    loss = SegmentationLoss(class_weights=(1.0, 3.0), label_smoothing=0.2)(logits, labels)
    targets, entropy_of = labels.float(), functional.binary_cross_entropy_with_logits
    weights = 1 + 2 * targets
    entropy = entropy_of(logits[:, 0], targets * 0.8 + 0.1, weights, reduction="none")
    shares = torch.sigmoid(logits[:, 0])
    dice = 2 * (shares * targets).sum((1, 2)) / (shares + targets).sum((1, 2))
    torch.testing.assert_close(loss, entropy.sum((1, 2)) / weights.sum((1, 2)) + 1 - dice)


@pytest.mark.parametrize("channels", [1, 2])
def test_ignored_elements_and_images_without_the_class_are_harmless(channels):
    logits, labels = images((4, 4), classes=2, channels=channels)
    loss = SegmentationLoss(include_background=False)
    labels[0] = IGNORED  # nothing to learn from
    labels[1] = 0  # no class: cross-entropy alone
    labels[2, 0] = IGNORED
    values = loss(logits, labels)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert values[0] == 0
    assert gradient.isfinite().all()
    assert not gradient[0].any()
    assert not gradient[2, :, 0].any()
    assert gradient[1].any()
    torch.testing.assert_close(values[1], SegmentationLoss(dice_weight=0)(logits, labels)[1])


def test_half_precision_logits_and_small_label_types():
    logits, labels = images((4, 4))
    exact = SegmentationLoss()(logits.bfloat16().float(), labels)
    torch.testing.assert_close(SegmentationLoss()(logits.bfloat16(), labels.to(torch.uint8)), exact)


def test_balanced_weights_are_median_frequency():
    assert balanced_class_weights(np.array([100, 10, 0, 1])) == (0.1, 1.0, 1.0, 10.0)


@pytest.mark.parametrize("num_classes", [2, 3, 4, 5, 255])
def test_a_mask_packs_into_few_bits_and_back(num_classes):
    mask = np.random.default_rng(0).integers(0, num_classes, (3, 5, 7)).astype(np.uint8)
    mask.ravel()[:2] = 0, num_classes - 1
    packed = pack(mask, num_classes)
    bits = {2: 1, 3: 2, 4: 2, 5: 3, 255: 8}
    assert packed.shape == (-(-bits[num_classes] * mask.size // 8),)
    assert np.array_equal(unpack(np.pad(packed, (0, 2)), mask.shape, num_classes), mask)


def test_masks_have_figures_and_their_worst_rows():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, (6, 4, 5))
    found = np.where(rng.random(truth.shape) < 0.2, 0, truth)
    truth[5] = found[5] = 0  # no class that has metrics
    counted = [count_classes(*map(torch.as_tensor, row), 3) for row in zip(found, truth, strict=True)]
    predictions = {name: np.stack([row[name] for row in counted]) for name in counted[0]}
    predictions["loss"] = np.arange(6.0)
    classes = ["background", "a", "b"]

    shown = report_content(predictions, classes, list("uvwxyz"), first=1)
    assert set(shown.figures) == {"class_dice", "class_confusion"}
    for figure in shown.figures.values():
        assert as_image(figure).ndim == 3
    (section,) = shown.sections
    assert [row[0] for row in section.rows] == list("zyxwvu")
    assert (section.rows[0][-1], section.rows[1][-1][0]) == ("-", "b")
    assert section.rows[0][3] == "1.0000"
    del predictions["confusion"]  # too many classes
    assert set(report_content(predictions, classes, list("uvwxyz")).figures) == {"class_dice"}
