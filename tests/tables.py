"""Tables in memory."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from datasets import Dataset

from samerun.data.tables import LINE, Cells, Table, _to_stored


def table(
    columns: dict[str, Sequence[Any]],
    path: str = "train.csv",
    kind: str = "csv",
    lines: Sequence[int] | None = None,
    **more: Any,
) -> Table:
    """A table of these cells. `lines`: by default those of a csv file."""
    rows = len(next(iter(columns.values()))) if lines is None else len(lines)
    stored = {
        name: pa.array(list(map(_to_stored, cells)), pa.large_string()) for name, cells in columns.items()
    }
    stored[LINE] = pa.array(range(2, rows + 2) if lines is None else lines, pa.int64())
    return Table(path, kind, Dataset(pa.table(stored)), **more)


def cells_of(cells: Sequence[Any]) -> Cells:
    return table({"text": cells}).columns["text"]


def contents(table: Table) -> dict[str, list[Any]]:
    return {name: list(cells) for name, cells in table.columns.items()}
