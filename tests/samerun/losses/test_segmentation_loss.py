import numpy as np
import pytest
import torch
from torch.nn import functional

from samerun.losses.segmentation import SegmentationLoss, balanced_class_weights

SPACES = [(11,), (5, 6), (4, 3, 5)]


def images(space, classes=3, count=4, channels=None):
    generator = torch.Generator().manual_seed(len(space))
    logits = torch.randn(count, channels or classes, *space, generator=generator, requires_grad=True)
    return logits, torch.randint(0, classes, (count, *space), generator=generator)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    "settings", [{}, {"class_weights": (0.5, 2.0, 1.0)}, {"label_smoothing": 0.1}, {"ignore_index": 1}]
)
def test_cross_entropy_is_torchs_mean_over_each_image(space, settings):
    logits, labels = images(space)
    loss = SegmentationLoss(dice_weight=0, **settings)(logits, labels)
    weight = torch.tensor(settings["class_weights"]) if "class_weights" in settings else None
    for row in range(4):
        expected = functional.cross_entropy(
            logits[row][None],
            labels[row][None],
            weight,
            ignore_index=settings.get("ignore_index", -100),
            label_smoothing=settings.get("label_smoothing", 0),
        )
        torch.testing.assert_close(loss[row], expected)


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
        dice = [
            2 * (shares[row, c] * masks[c]).sum() / (shares[row, c].sum() + masks[c].sum()) for c in classes
        ]
        torch.testing.assert_close(loss[row], 1 - torch.stack(dice).mean())


def test_one_channel_is_binary():
    logits, labels = images((4, 5), classes=2, channels=1)
    loss = SegmentationLoss(class_weights=(1.0, 3.0), label_smoothing=0.2)(logits, labels)
    targets = labels.float()
    weights = 1 + 2 * targets
    entropy = functional.binary_cross_entropy_with_logits(
        logits[:, 0], targets * 0.8 + 0.1, weights, reduction="none"
    )
    shares = torch.sigmoid(logits[:, 0])
    dice = 2 * (shares * targets).sum((1, 2)) / (shares + targets).sum((1, 2))
    torch.testing.assert_close(loss, entropy.sum((1, 2)) / weights.sum((1, 2)) + 1 - dice)


def test_micro_batches_do_not_change_the_loss():
    logits, labels = images((3, 4, 5), count=6)
    loss = SegmentationLoss(class_weights=(0.2, 1.0, 5.0), ignore_index=255)
    labels[0, :2] = 255
    whole = loss(logits, labels).sum() / 6
    parts = (
        sum(loss(logits[rows], labels[rows]).sum() for rows in (slice(0, 1), slice(1, 4), slice(4, 6))) / 6
    )
    torch.testing.assert_close(parts, whole)
    gradients = [torch.autograd.grad(total, logits, retain_graph=True)[0] for total in (whole, parts)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("channels", [1, 2])
def test_ignored_elements_and_images_without_the_class_are_harmless(channels):
    logits, labels = images((4, 4), classes=2, channels=channels)
    loss = SegmentationLoss(ignore_index=255, include_background=False)
    labels[0] = 255  # nothing to learn from
    labels[1] = 0  # no class: cross-entropy alone
    labels[2, 0] = 255
    values = loss(logits, labels)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert values[0] == 0
    assert gradient.isfinite().all()
    assert not gradient[0].any()
    assert not gradient[2, :, 0].any()
    assert gradient[1].any()
    torch.testing.assert_close(values[1], SegmentationLoss(dice_weight=0)(logits, labels.clamp(max=1))[1])


def test_half_precision_logits_and_small_label_types():
    logits, labels = images((4, 4))
    exact = SegmentationLoss()(logits.bfloat16().float(), labels)
    torch.testing.assert_close(SegmentationLoss()(logits.bfloat16(), labels.to(torch.uint8)), exact)


def test_balanced_weights_are_median_frequency():
    assert balanced_class_weights(np.array([100, 10, 0, 1])) == (0.1, 1.0, 1.0, 10.0)
