import numpy as np

from samerun.plots import labels, titles
from samerun.reports.figures import as_image


def test_labels_have_figures_and_their_worst_rows():
    rng = np.random.default_rng(0)
    targets = (rng.random((40, 5)) < 0.3).astype(np.uint8)
    targets[:, 4] = 0  # nobody has it
    chances = np.clip(targets * 0.6 + rng.random((40, 5)) * 0.4, 0, 1)
    chances[7] = 1 - targets[7]  # all wrong
    texts = [f"text {row}" for row in range(40)]
    found = labels.show((chances, targets, np.full(5, 0.5), chances > 0.5), list("abcde"), texts)
    assert set(found.figures) == {
        "label_f1",
        "label_precision_recall",
        "label_calibration",
        "label_confusion",
    }
    for figure in found.figures.values():
        assert as_image(figure).ndim == 3
    assert (
        found.figures["label_f1"]
        .axes[0]
        .get_yticklabels()[0]
        .get_text()
        .endswith(f"({targets.sum(axis=0).max()})")
    )
    (section,) = found.sections
    assert len(section.rows) == labels.MOST_ROWS
    assert section.rows[0][3] == "text 7"


def test_rows_without_labels_have_no_figures():
    nothing = np.full((3, 2), 0.5), np.zeros((3, 2)), np.full(2, 0.5), np.full((3, 2), False)
    found = labels.show(nothing, ["a", "b"], ["x", "y", "z"])
    assert found.figures == {}


def test_the_calibration_error_is_the_weighted_distance_from_the_diagonal():
    chances = np.array([[0.25], [0.25], [0.95], [0.95]])
    figure = labels._calibration(chances, np.array([[0], [1], [1], [1]]))
    assert figure.axes[0].get_title(loc="left").endswith(f"{(0.25 * 2 + 0.05 * 2) / 4:.4f}")


def test_titles_have_figures_and_examples():
    lengths = np.array([3, 4, 5]), np.array([3, 3, 6]), np.array([10, 50, 90])
    found = titles.show(
        lengths, (["a b", "c", "x y"], ["a b", "d", "x z"]), ["one", "two", "three"], "default"
    )
    assert [as_image(figure).shape[2] for figure in found.figures.values()] == [3, 3]
    assert found.sections[0].rows[0] == ["0.000", "c", "d", "two", "0.000", "two"]
    assert found.sections[0].rows[-1] == ["1.000", "a b", "a b", "one", "0.000", "one"]
