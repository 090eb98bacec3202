"""Cells of a column: they come back with their types, alone, in part and in order."""

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import cells_of, contents, table

from samerun.data import tables
from samerun.data.cache import GROUP, content_key
from samerun.data.splits import read_split
from samerun.data.tables import (
    JSON_MARK,
    Cells,
    dataset_table,
    drop_blank,
    is_blank,
    note_repeated_texts,
    open_rows,
    read_table,
    split_off,
    write_rows,
)
from samerun.errors import InputError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
CELLS = st.one_of(
    TEXTS,
    TEXTS.map(JSON_MARK.__add__),
    *(st.none(), st.booleans(), st.integers(), st.lists(TEXTS, max_size=2), st.floats(allow_nan=False)),
)


def written(folder, rows, names):
    """The columns of these rows, and the lines, written and opened."""
    write_rows(Path(folder) / "rows.arrow", rows, names, lambda line: f"a.jsonl:{line}")
    return open_rows(folder)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=st.lists(CELLS, min_size=1, max_size=12), data=st.data())
def test_cells_come_back_with_their_types(tmp_path_factory, monkeypatch, cells, data):
    monkeypatch.setattr(tables, "BATCH_ROWS", 3)
    rows = written(tmp_path_factory.mktemp("rows"), [(7, {"text": cell}) for cell in cells], ["text"])
    column = Cells(rows.select_columns(["text"]))
    assert repr(list(column)) == repr(cells)  # which tells 1 from 1.0 and from True
    chosen = data.draw(st.lists(st.integers(0, len(cells) - 1), max_size=6))
    taken = column.take(np.array(chosen, dtype=int))
    assert repr(list(taken)) == repr([cells[row] for row in chosen])
    either_end = [taken[place] for place in range(-len(chosen), len(chosen))]
    assert repr(either_end) == repr([cells[row] for row in chosen * 2])
    assert repr(list(column[1:3])) == repr(cells[1:3])
    with pytest.raises(IndexError):
        column[len(cells)]


@pytest.mark.parametrize("rows", [None, [1], [4, 0, 4], list(range(0, 3 * GROUP, 2))])
def test_the_hash_of_a_column_is_that_of_its_texts(rows):
    cells = [f"текст {i}" * (i % 3) for i in range(3 * GROUP + 3)]
    column = cells_of(cells)
    if rows is not None:
        column, cells = column.take(np.array(rows)), [cells[row] for row in rows]
    assert column.content_key == content_key(cells)


def test_texts_are_mapped_and_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "BATCH_ROWS", 1000)
    rows = [(row, {"text": "a text of some length" * 40}) for row in range(8000)]
    column = Cells(written(tmp_path, rows, ["text"]).select_columns(["text"]))
    before = pa.total_allocated_bytes()
    assert sum(map(len, column)) == 8000 * 21 * 40
    assert column.take(np.arange(5000))[4999].startswith("a text")
    assert pa.total_allocated_bytes() - before < 2**20


def test_columns_of_a_dataset_have_types_of_their_own():
    rows = Dataset.from_dict({"text": ["a", "b", "a"], "labels": [["x"], [], ["x"]], "n": [1, None, 2]})
    found = dataset_table(rows, "hub", rows.column_names, ())
    assert contents(found) == rows.to_dict()
    assert found.columns["text"].content_key == content_key(["a", "b", "a"])
    assert found.take(np.array([2])).where(0) == "hub row 3"
    assert (len(dataset_table(rows, "hub", (), ())), len(dataset_table(rows, "hub", (), ("no",)))) == (3, 3)


def test_a_parquet_file_of_datasets_has_the_names_of_its_classes(tmp_path, arguments, token_cache):
    kinds = {
        "text": datasets.Value("string"),
        "labels": datasets.List(datasets.ClassLabel(names=["a", "b", "c"])),
        "kind": datasets.ClassLabel(names=["x", "y"]),
    }
    rows = {"text": ["1", "2", "3"], "labels": [[2, 0], [], [1]], "kind": [-1, 1, None]}
    Dataset.from_dict(rows, datasets.Features(kinds)).to_parquet(tmp_path / "1.parquet")
    kinds["labels"] = datasets.List(datasets.ClassLabel(names=["d", "a"]))
    rows = {"text": ["4"], "labels": [[0, 1]], "kind": [0]}
    Dataset.from_dict(rows, datasets.Features(kinds)).to_parquet(tmp_path / "2.parquet")
    named = {"text": ["1", "2", "3"], "labels": [["c", "a"], [], ["b"]], "kind": [None, "y", None]}
    one = read_table(tmp_path / "1.parquet", required=["text"], optional=["labels", "kind", "id"])
    assert contents(one) == named
    assert one.classes == {"labels": ["a", "b", "c"], "kind": ["x", "y"]}
    stored = pyarrow.parquet.read_table(tmp_path / "1.parquet")
    replaced = stored.set_column(2, "kind", pa.array(["x", "y", "x"]))  # which keeps the metadata
    pyarrow.parquet.write_table(replaced, tmp_path / "names.parquet")
    names = read_table(tmp_path / "names.parquet", required=["text"], optional=["labels", "kind"])
    assert contents(names) == {**named, "kind": ["x", "y", "x"]}
    assert names.classes == {"labels": ["a", "b", "c"]}
    both = read_split(arguments(train_file=[str(tmp_path / "[12].parquet")]), "train", ("text", "labels"))
    assert list(both.columns["labels"]) == [*named["labels"], ["d", "a"]]
    assert both.classes == {"labels": ["a", "b", "c", "d"]}


def test_a_cell_that_is_nested_too_deeply_is_named_by_its_line(tmp_path):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InputError, match=r"a\.jsonl:6: a is nested too deeply"):
        written(tmp_path, [(4, {"a": ["x"]}), (6, {"a": deep})], ["a"])
    while deep:  # or its end would be as deep
        deep = deep[0]


def test_the_hash_of_texts_knows_where_each_ends():
    few = [["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["c", "ab"]]
    many = [str(number) for number in range(GROUP + 2)]
    assert len(set(map(content_key, [*few, many, many[:-1], many[:-2]]))) == 8
    assert content_key(["ä"]) == content_key(["ä".encode()])


# Columns


def text_table(*texts, **columns):
    return table({"text": texts, **columns}, lines=range(2, 2 * len(texts) + 2, 2))


@given(st.integers(2, 200), st.floats(0.001, 0.999), st.integers(0, 3))
def test_a_split_is_a_share_of_the_rows_in_file_order(rows, share, seed):
    several = text_table(*map(str, range(rows)))
    train, validation = map(list, split_off(several, share, seed))
    assert sorted([*train, *validation]) == list(range(rows))
    assert (train, validation) == (sorted(train), sorted(validation))
    assert len(train) >= 1
    assert len(validation) == min(max(1, round(rows * share)), rows - 1)
    assert split_off(several, share, seed)[1].tolist() == validation
    assert rows < 50 or not 0.1 < share < 0.9 or list(split_off(several, share, seed + 1)[1]) != validation


def test_the_rows_that_show_nothing():
    # Every character that python takes for white space, and every kind that shows something.
    nothing = ["", "\ufeff \u2060", " \u200d \u200b ", "\x00"]
    nothing += [character for character in map(chr, range(0x110000)) if character.isspace()]
    shown = ["x", "\u3164", "\u2800", "0", "\n.", "\u0301", "好", "\U0001f600", " \u200dx", "\ue000"]
    assert list(map(is_blank, [*nothing, *shown])) == [True] * len(nothing) + [False] * len(shown)


def test_rows_without_a_text_are_left_out_and_named():
    notes = []
    kept = drop_blank(text_table("a", " ", "b", "\u200b"), "text", notes)
    assert (list(kept.columns["text"]), list(kept.lines)) == (["a", "b"], [2, 6])
    drop_blank(table({"text": ["a", ""]}, "a.json", "json", [1, 2]), "text", notes)
    assert notes == [
        "train.csv: 2 row(s) without a text left out (train.csv:4, train.csv:8)",
        "a.json: 1 row(s) without a text left out (a.json element 2)",
    ]


def test_repeated_texts_are_counted():
    notes = []
    note_repeated_texts({"train": "abaa", "validation": "bbc", "test": "d"}, notes)
    assert notes == [
        "2 training row(s) repeat the text of an earlier row",
        "2 of 3 validation texts are in the training rows too",
    ]
    note_repeated_texts({"train": "ab", "test": ["c", "d", ""]}, notes)
    assert len(notes) == 2
    note_repeated_texts({"train": "ab", "validation": "cd", "test": "dad"}, notes)
    assert notes[2:] == [
        "1 of 3 test texts are in the training rows too",
        "2 of 3 test texts are in the validation rows too",
    ]
