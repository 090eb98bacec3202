"""The multi-label figures as an `evaluate.Metric`; a file of its own because importing `evaluate` takes seconds."""

import datasets
import evaluate
import numpy as np

from metrics.multilabel import multilabel_scores


class MultiLabelScores(evaluate.Metric):
    """`compute(predictions=probabilities, references=targets, thresholds=0.5)` -> the dict of `multilabel_scores`.

    Nothing is downloaded and nothing is written to any disk, so any number of processes may hold one. `evaluate`'s own
    gathering over processes locks files on a shared disk: gather the rows first, then compute in one process.
    """

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True)

    def _build_data_dir(self) -> str:
        # The base class makes a folder in the user's cache, which nothing would use and which may not be writable.
        return ""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Multi-label classification figures at given thresholds; undefined figures are None.",
            citation="",
            inputs_description=(
                "predictions: probabilities (rows, labels). references: 0 or 1 (rows, labels). thresholds: one number "
                "(default 0.5) or one per label; a label is predicted at probability >= threshold."
            ),
            features=datasets.Features(
                predictions=datasets.List(datasets.Value("float64")),
                references=datasets.List(datasets.Value("float64")),
            ),
        )

    def _compute(
        self, predictions: list[list[float]], references: list[list[float]], thresholds: float | np.ndarray = 0.5
    ) -> dict[str, float | None]:
        if not predictions:  # without rows nothing says how many labels there are
            return multilabel_scores(np.empty((0, 0)), np.empty((0, 0)))
        return multilabel_scores(np.array(predictions), np.array(references), thresholds)
