"""The base of our `evaluate` metrics. Importing `evaluate` takes up to a second: import the classes where scores are needed."""

from typing import Any

import evaluate


class InMemoryMetric(evaluate.Metric):
    """A metric that writes nothing to any disk, so any number of processes may hold one.

    `compute(predictions=..., references=...)` hands arrays and lists to `_compute` as they are. Rows of `add` and
    `add_batch` go through Arrow and lists, which is slow for large matrices (10,000 rows x 1,000 labels).
    """

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True)

    def _build_data_dir(self) -> str:
        # The base class makes a folder in the user's cache, which nothing would use and which may not be writable.
        return ""

    def compute(self, *, predictions: Any = None, references: Any = None, **settings: Any) -> dict[str, float | None]:
        """The scores of these rows, or of those of `add` and `add_batch`.

        Raises ValueError without rows, and for predictions or references alone.
        """
        if (predictions is None) != (references is None):
            raise ValueError("predictions and references belong together: give both, or neither after add_batch")
        if self.writer is not None:
            return super().compute(predictions=predictions, references=references, **settings)
        if predictions is None:
            raise ValueError("nothing to compute: give predictions and references, or call add_batch before")
        return self._compute(predictions=predictions, references=references, **settings)
