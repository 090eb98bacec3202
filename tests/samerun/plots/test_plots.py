import numpy as np
import pytest
import torch

from samerun.metrics.segmentation import count_confusion
from samerun.plots import classes, masks
from samerun.reports.figures import as_image


@pytest.mark.parametrize("number", [3, 50])
def test_a_confusion_matrix_shows_the_classes_with_most_errors(number):
    truth = np.repeat(np.arange(number), 9)
    found = np.append(truth, [number - 1] * 4)
    shown = classes.show(found, np.append(truth, [0] * 4), [f"c{label}" for label in range(number)])
    figure = shown.figures["confusion_matrix"]
    shown = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert len(shown) == min(number, classes.MOST_CLASSES)
    assert {"c0", f"c{number - 1}"} <= set(shown)


def test_masks_have_figures_and_their_worst_rows():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, (6, 4, 5))
    found = np.where(rng.random(truth.shape) < 0.2, 0, truth)
    truth[5] = found[5] = 0  # no class that has metrics
    counted = count_confusion(torch.as_tensor(found), torch.as_tensor(truth), 3)
    predictions = {"loss": np.arange(6.0), **{name: counts.numpy() for name, counts in counted.items()}}
    classes = ["background", "a", "b"]

    shown = masks.show(predictions, classes, list("uvwxyz"), first=1)
    assert set(shown.figures) == {"class_dice", "class_confusion"}
    for figure in shown.figures.values():
        assert as_image(figure).ndim == 3
    (section,) = shown.sections
    assert [row[0] for row in section.rows] == list("zyxwvu")
    assert (section.rows[0][-1], section.rows[1][-1][0]) == ("-", "b")
    assert section.rows[0][3] == "1.0000"
    del predictions["confusion"]  # too many classes
    assert set(masks.show(predictions, classes, list("uvwxyz")).figures) == {"class_dice"}
