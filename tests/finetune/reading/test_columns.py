import json

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.errors import InputError
from finetune.reading.columns import (
    SHOWN,
    blank_rows,
    drop_blank,
    ids_of,
    more,
    note_repeated_texts,
    read_split,
    read_splits,
    split_off,
    take,
    texts_of,
)
from finetune.reading.stored_rows import Column
from finetune.reading.tables import Table


def table(*texts, **columns):
    cells = {name: Column.of(list(cells)) for name, cells in {"text": texts, **columns}.items()}
    return Table("train.csv", "csv", cells, Column.of([2 * row + 2 for row in range(len(texts))]))


def test_taken_rows_know_their_lines():
    some = take(table("a", "b", "c", id=[7, 8, 9]), np.array([2, 0]))
    assert (some.columns, some.lines) == ({"text": ["c", "a"], "id": [9, 7]}, [6, 2])
    assert some.where(0) == "train.csv:6"


@given(st.integers(2, 200), st.floats(0.001, 0.999), st.integers(0, 3))
def test_a_split_is_a_share_of_the_rows_in_file_order(rows, share, seed):
    train, validation = map(list, split_off(table(*map(str, range(rows))), share, seed))
    assert sorted([*train, *validation]) == list(range(rows))
    assert (train, validation) == (sorted(train), sorted(validation))
    assert len(train) >= 1
    assert len(validation) == min(max(1, round(rows * share)), rows - 1)
    assert split_off(table(*map(str, range(rows))), share, seed)[1].tolist() == validation


def test_a_split_depends_on_the_seed_and_needs_two_rows():
    many = table(*map(str, range(50)))
    assert split_off(many, 0.2, 0)[1].tolist() != split_off(many, 0.2, 1)[1].tolist()
    with pytest.raises(InputError, match=r"train.csv: has 1 row\(s\), too few .* --validation_file"):
        split_off(table("a"), 0.5, 0)


def test_cells_that_are_no_text_are_listed_with_their_lines():
    with pytest.raises(InputError) as caught:
        texts_of(table("a", None, 3, ["b"], *[1.5] * 30), "text")
    assert caught.value.problems[:3] == [
        "train.csv:4: text is missing, expected a text",
        "train.csv:6: text is 3 (int), expected a text",
        "train.csv:8: text is ['b'] (list), expected a text",
    ]
    assert caught.value.problems[SHOWN:] == ["... and 13 more"]
    assert texts_of(table("a", ""), "text") == ["a", ""]


def test_the_rows_that_show_nothing():
    # Every character that python takes for white space, and every kind that shows something.
    nothing = ["", *(c for c in map(chr, range(0x110000)) if c.isspace()), "\ufeff \u2060", " \u200d \u200b ", "\x00"]
    shown = ["x", "\u3164", "\u2800", "0", "\n.", "\u0301", "好", "\U0001f600", " \u200dx", "\ue000"]
    texts = Column.of([*nothing, *shown])
    assert blank_rows(texts).tolist() == list(range(len(nothing)))
    assert blank_rows(texts.take(np.array([0, len(nothing), 1]))).tolist() == [0, 2]
    assert blank_rows(Column.of([])).tolist() == []


def test_rows_without_a_text_are_left_out_and_named():
    notes = []
    kept = drop_blank(table("a", " ", "b", "\u200b"), "text", notes)
    assert (kept.columns["text"], kept.lines) == (["a", "b"], [2, 6])
    assert notes == ["train.csv: 2 row(s) without a text left out (line 4, 8)"]


def test_nothing_is_said_when_every_row_has_a_text():
    notes, whole = [], table("a", "b")
    assert drop_blank(whole, "text", notes) is whole
    assert notes == []
    with pytest.raises(InputError, match=r"train\.csv: every text is empty"):
        drop_blank(table("", " "), "text", notes)


def test_what_names_a_row():
    assert ids_of(table("a", "b", id=["x", "y"]), "id") == ["x", "y"]
    assert list(ids_of(table("a", "b"), "id")) == [0, 1]


def test_more_problems_than_are_shown():
    assert more(SHOWN) == []
    assert more(SHOWN + 2) == ["... and 2 more"]


def test_a_split_from_its_file(arguments, tmp_path):
    path = tmp_path / "valid.csv"
    path.write_text("text,labels\na,x\nb,y\nc,z\n")
    asked = arguments(validation_file=str(path), max_eval_samples=2, max_train_samples=1)
    assert read_split(asked, "validation", ("text",), ("labels", "id")).columns == {"text": ["a", "b"], "labels": ["x", "y"]}
    assert read_split(asked, "train") is None
    assert len(read_split(arguments(validation_file=str(path), max_eval_samples=9), "validation")) == 3
    with pytest.raises(InputError, match="column 'title' not found"):
        read_split(asked, "validation", ("title",))


def test_all_missing_or_wrong_files_come_together(arguments, tmp_path):
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("text,labels\na,x\n")
    bad.write_text("text\na\n")
    both = ("text", "labels")
    asked = arguments(train_file=str(good), validation_file=str(bad))
    with pytest.raises(InputError) as caught:
        read_splits(asked, {"train": both, "validation": both, "test": ("text",)}, train=True, optional=())
    assert len(caught.value.problems) == 2
    assert "column 'labels' not found" in caught.value.problems[0]
    assert caught.value.problems[1] == "no test rows: give --test_file or --dataset_name"
    assert read_splits(asked, {"train": both, "validation": ("text",)}, train=True, optional=()).keys() == {
        "train",
        "validation",
    }


def test_validation_rows_may_be_kept_back_from_training(arguments, tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("text\na\n")
    asked = arguments(train_file=str(path))
    assert read_splits(asked, {"train": ("text",), "validation": ("text",)}, train=True, optional=()).keys() == {"train"}
    with pytest.raises(InputError, match="no validation rows"):
        read_splits(asked, {"validation": ("text",)}, train=False, optional=())


def test_only_the_columns_in_use_are_read(arguments, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,labels,id,note\na,x,1,y\n")
    asked = arguments(train_file=str(path), test_file=str(path))
    tables = read_splits(asked, {"train": ("text", "labels"), "test": ("text",)}, train=True, optional=("labels", "title"))
    assert tables["train"].columns == {"text": ["a"], "labels": ["x"]}
    assert tables["test"].columns == {"text": ["a"], "labels": ["x"], "id": ["1"]}
    named = arguments(test_file=str(path), id_column="note")
    assert read_splits(named, {"test": ("text",)}, train=False, optional=())["test"].columns == {"text": ["a"], "note": ["y"]}


def test_a_split_of_a_dataset(arguments, tmp_path, token_cache):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": t, "labels": [t]}) + "\n" for t in "abc"))
    asked = arguments(dataset_name=str(folder), max_train_samples=2)
    found = read_split(asked, "train", ("text", "labels"))
    assert found.columns == {"text": ["a", "b"], "labels": [["a"], ["b"]]}
    assert found.where(1) == f"{folder} (train) row 2"
    assert read_split(asked, "test") is None
    with pytest.raises(InputError, match="split train: has no column 'title'; it has text, labels"):
        read_split(asked, "train", ("title",))


def test_classes_of_a_dataset_have_their_names(arguments, tmp_path, monkeypatch):
    kind = datasets.ClassLabel(names=["10", "pear, ripe", "a"])
    features = datasets.Features(text=datasets.Value("string"), one=kind, many=datasets.List(kind), unknown=kind)
    rows = {"text": ["x", "y", "z"], "one": [2, 0, 1], "many": [[1, 0], [], [2]], "unknown": [-1, -1, -1]}
    made = datasets.DatasetDict(train=datasets.Dataset.from_dict(rows, features))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    found = read_split(arguments(dataset_name="a"), "train", ("text", "one", "many"), ("unknown",))
    assert found.columns == {
        "text": ["x", "y", "z"],
        "one": ["a", "10", "pear, ripe"],
        "many": [["pear, ripe", "10"], [], ["a"]],
    }
    assert found.columns["many"].take(np.array([2, 0])) == [["a"], ["pear, ripe", "10"]]


def test_a_dataset_that_is_not_there(arguments, tmp_path):
    with pytest.raises(InputError, match=r"--dataset_name .*nowhere: cannot be loaded"):
        read_split(arguments(dataset_name=str(tmp_path / "nowhere")), "train")


def test_repeated_texts_are_counted():
    def column(*texts):
        return Column.of(list(texts))

    notes = []
    note_repeated_texts({"train": column("a", "b", "a", "a"), "validation": column("b", "b", "c"), "test": column("d")}, notes)
    assert notes == [
        "2 training row(s) repeat the text of an earlier row",
        "2 of 3 validation texts are in the training rows too",
    ]
    note_repeated_texts({"train": column("a", "b"), "test": column("c", "d", "")}, notes)
    assert len(notes) == 2
