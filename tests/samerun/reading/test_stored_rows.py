import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samerun.errors import InputError
from samerun.reading import stored_rows
from samerun.reading.fingerprint import GROUP, fingerprint
from samerun.reading.stored_rows import Column, open_dataset, open_rows, write_rows

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4)
CELLS = st.one_of(
    TEXTS, st.none(), st.booleans(), st.integers(), st.lists(TEXTS, max_size=2), st.floats(allow_nan=False)
)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(stored_rows, "BATCH_ROWS", 3)


def stored(folder, cells):
    """A column of cells, written and opened."""
    write_rows(
        folder, "a.jsonl", "jsonl", ((line, {"text": cell}) for line, cell in enumerate(cells, 1)), ["text"]
    )
    kind, columns, lines = open_rows(folder, ["text"])
    assert (kind, list(columns), lines) == ("jsonl", ["text"], list(range(1, len(cells) + 1)))
    return columns["text"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=st.lists(CELLS, min_size=1, max_size=12), data=st.data())
def test_cells_come_back_with_their_types(tmp_path_factory, cells, data):
    column = stored(tmp_path_factory.mktemp("rows"), cells)
    assert repr(list(column)) == repr(cells)  # which tells 1 from 1.0 and from True
    assert column.is_text == all(isinstance(cell, str) for cell in cells)
    rows = data.draw(st.lists(st.integers(0, len(cells) - 1), max_size=6))
    taken = column.take(np.array(rows))
    assert repr(list(taken)) == repr([cells[row] for row in rows])
    assert taken.is_text == all(isinstance(cells[row], str) for row in rows)
    assert repr([taken[i] for i in range(-len(rows), len(rows))]) == repr([cells[row] for row in rows * 2])


def test_columns_that_some_rows_lack(tmp_path):
    rows = [(1, {"a": "x"}), (2, {"a": "y", "unused": 1}), (3, {"b": 7}), (5, {"b": None, "a": ["z"]})]
    write_rows(tmp_path, "a.jsonl", "jsonl", rows, ["a", "line", "b"])
    _, columns, lines = open_rows(tmp_path, ["a", "line", "b"])
    assert columns == {"a": ["x", "y", None, ["z"]], "line": [None] * 4, "b": [None, None, 7, None]}
    assert lines == [1, 2, 3, 5]
    assert [column.is_empty for column in columns.values()] == [False, True, False]


@pytest.mark.parametrize("rows", [None, [1], [4, 0, 4], list(range(0, 3 * GROUP, 2))])
def test_the_hash_of_a_column_is_that_of_its_texts(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(stored_rows, "BATCH_ROWS", 1500)
    cells = [f"текст {i}" * (i % 3) for i in range(3 * GROUP + 3)]
    column = stored(tmp_path, cells)
    if rows is not None:
        column, cells = column.take(np.array(rows)), [cells[row] for row in rows]
    assert column.fingerprint == fingerprint(cells)
    assert Column.of([]).fingerprint == fingerprint([])


def test_texts_are_mapped_and_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_rows, "BATCH_ROWS", 1000)
    column = stored(tmp_path, ["a text of some length" * 40] * 8000)
    before = pa.total_allocated_bytes()
    assert sum(map(len, column)) == 8000 * 21 * 40
    assert column.take(np.arange(5000))[4999].startswith("a text")
    assert pa.total_allocated_bytes() - before < 2**20


def test_long_cells_make_small_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_rows, "BATCH_CHARACTERS", 100)
    texts = ["a" * 60, "b" * 60, "c" * 60]
    assert stored(tmp_path, texts) == texts
    assert open_dataset(tmp_path).data.column(0).num_chunks == 2


def test_columns_of_a_dataset_have_types_of_their_own():
    rows = Dataset.from_dict({"text": ["a", "b", "a"], "labels": [["x"], [], ["x"]], "n": [1, None, 2]})
    text, labels, numbers = (Column(rows, name) for name in rows.column_names)
    assert (text, labels, numbers) == (["a", "b", "a"], [["x"], [], ["x"]], [1, None, 2])
    assert (text.is_text, labels.is_text, numbers.is_text) == (True, False, False)
    assert text.fingerprint == fingerprint(["a", "b", "a"])


def test_a_column_is_a_sequence():
    column = Column.of(["a", "b", "c", "d"])
    assert (column[1], column[-1], column[1:3], len(column)) == ("b", "d", ["b", "c"], 4)
    assert column != ["a", "b", "c"]
    assert column != ["a", "b", "c", "e"]
    assert column != "abcd"[:3]
    for row in (4, -5):
        with pytest.raises(IndexError):
            column[row]


def test_a_cell_that_is_nested_too_deeply_is_named_by_its_line(tmp_path):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InputError, match=r"a\.jsonl:6: a is nested too deeply"):
        write_rows(tmp_path, "a.jsonl", "jsonl", [(4, {"a": ["x"]}), (6, {"a": deep})], ["a"])
    while deep:  # or its end would be as deep
        deep = deep[0]


def test_a_cell_that_json_does_not_have(tmp_path):
    with pytest.raises(
        InputError, match=r"a.parquet row 1: a is b'x' \(bytes\), expected a text, a number or a list"
    ):
        write_rows(tmp_path, "a.parquet", "parquet", [(1, {"a": b"x"})], ["a"])
