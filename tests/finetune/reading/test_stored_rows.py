import itertools
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.reading.blocks import Block
from finetune.reading.fingerprint import GROUP, fingerprint
from finetune.reading.stored_rows import Column, TooDeepError, open_rows, write_rows

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
CELLS = st.one_of(TEXTS, st.none(), st.booleans(), st.integers(), st.lists(TEXTS, max_size=2), st.floats(allow_nan=False))


def stored(path, *blocks):
    """The rows of blocks of cells of one column, written and opened."""
    lines = itertools.count(1)
    write_rows(path, "jsonl", (Block([next(lines) for _ in cells], {"text": cells}) for cells in blocks))
    return open_rows(path)


@settings(max_examples=60)
@given(blocks=st.lists(st.lists(CELLS, min_size=1, max_size=5), min_size=1, max_size=4), data=st.data())
def test_cells_come_back_with_their_types(tmp_path_factory, blocks, data):
    kind, columns, lines = stored(tmp_path_factory.mktemp("rows") / "a.arrow", *blocks)
    cells = [cell for block in blocks for cell in block]
    assert (kind, list(columns), lines) == ("jsonl", ["text"], list(range(1, len(cells) + 1)))
    column = columns["text"]
    assert repr(list(column)) == repr(cells)  # which tells 1 from 1.0 and from True
    assert column.is_text == all(isinstance(cell, str) for cell in cells)
    rows = data.draw(st.lists(st.integers(0, len(cells) - 1), max_size=6))
    assert repr(list(column.take(np.array(rows)))) == repr([cells[row] for row in rows])
    assert repr([column.take(np.array(rows))[i] for i in range(-len(rows), len(rows))]) == repr(
        [cells[row] for row in rows * 2]
    )


@settings(max_examples=60)
@given(blocks=st.lists(st.lists(CELLS, min_size=1, max_size=5), min_size=1, max_size=4))
def test_different_cells_in_the_order_of_their_first_appearance(tmp_path_factory, blocks):
    column = stored(tmp_path_factory.mktemp("rows") / "a.arrow", *blocks)[1]["text"]
    cells = [repr(cell) for block in blocks for cell in block]
    found, codes = column.distinct()
    assert list(map(repr, found)) == list(dict.fromkeys(cells))
    assert [repr(found[code]) for code in codes] == cells


def test_columns_that_some_blocks_lack(tmp_path):
    blocks = [Block([1, 2], {"a": ["x", "y"]}), Block([3], {"b": [7]}), Block([5], {"b": [None], "a": [["z"]]})]
    write_rows(tmp_path / "a.arrow", "jsonl", iter(blocks))
    _, columns, lines = open_rows(tmp_path / "a.arrow")
    assert columns == {"a": ["x", "y", None, ["z"]], "b": [None, None, 7, None]}
    assert lines == [1, 2, 3, 5]
    assert columns["b"].distinct()[0] == [None, 7]


@pytest.mark.parametrize("rows", [None, [1], [4, 0, 4], list(range(0, 3 * GROUP, 2))])
def test_the_hash_of_a_column_is_that_of_its_texts(tmp_path, rows):
    blocks = [[f"текст {i}" * (i % 3) for i in range(first, first + 1500)] for first in range(0, 3 * GROUP + 3, 1500)]
    column = stored(tmp_path / "a.arrow", *blocks)[1]["text"]
    cells = [cell for block in blocks for cell in block]
    if rows is not None:
        column, cells = column.take(np.array(rows)), [cells[row] for row in rows]
    assert column.fingerprint == fingerprint(cells)
    assert Column.of([]).fingerprint == fingerprint([])


def test_texts_are_mapped_and_not_held(tmp_path):
    column = stored(tmp_path / "a.arrow", *[["a text of some length" * 40] * 1000] * 8)[1]["text"]
    before = pa.total_allocated_bytes()
    assert sum(map(len, column)) == 8000 * 21 * 40
    assert column.take(np.arange(5000))[4999].startswith("a text")
    assert pa.total_allocated_bytes() - before < 2**20


def test_a_column_is_a_sequence():
    column = Column.of(["a", "b", "c", "d"])
    assert (column[1], column[-1], column[1:3], len(column)) == ("b", "d", ["b", "c"], 4)
    assert column != ["a", "b", "c"]
    assert column != ["a", "b", "c", "e"]
    assert column != "abcd"[:3]
    assert repr(column) == "Column(['a', 'b', 'c', ...], 4 cells)"
    for row in (4, -5):
        with pytest.raises(IndexError):
            column[row]


def test_a_cell_that_is_nested_too_deeply_is_named_by_its_line(tmp_path):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        json.dumps(deep)
    with pytest.raises(TooDeepError) as caught:
        write_rows(tmp_path / "a.arrow", "jsonl", iter([Block([4, 6], {"a": [["x"], deep]})]))
    assert caught.value.line == 6
    while deep:  # or its end would be as deep
        deep = deep[0]
