"""The base class of our `evaluate` metrics. Importing `evaluate` takes up to a second: import the classes
where they are used."""

from typing import Any

import evaluate


class InMemoryMetric(evaluate.Metric):
    """A metric that writes nothing to disk, so any number of processes may create one.

    `compute(predictions=..., references=...)` passes arrays and lists to `_compute` without a copy. `add` and
    `add_batch` go through Arrow and lists, which is slow for large matrices (10,000 rows x 1,000 labels).
    """

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True)

    def _build_data_dir(self) -> str:
        # The base class would make an unused folder in the user's cache, which may not be writable.
        return ""

    def compute(
        self, *, predictions: Any = None, references: Any = None, **settings: Any
    ) -> dict[str, float | None]:
        """The scores of these rows, or of those added before. Raises ValueError without rows and if only one
        of predictions and references is given."""
        if (predictions is None) != (references is None):
            raise ValueError(
                "predictions and references belong together: give both, or neither after add_batch"
            )
        if self.writer is not None:
            return super().compute(predictions=predictions, references=references, **settings)
        if predictions is None:
            raise ValueError("nothing to compute: give predictions and references, or call add_batch before")
        return self._compute(predictions=predictions, references=references, **settings)
