from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tables
from hypothesis import given
from hypothesis import strategies as st

from samerun.data.tokens import Ragged
from samerun.errors import SHOWN, InputError
from samerun.text import classifier
from samerun.text.labels import label_ids, note_labels, read_label_file, read_labels


def table(cells, name="labels"):
    return tables.table({name: cells}, "train.jsonl", "jsonl", range(1, len(cells) + 1))


def read(cells, notes=None, **given):
    asked = SimpleNamespace(
        **{"label_columns": None, "label_column": "labels", "label_separator": "|", **given}
    )
    return read_labels(table(cells), asked, [] if notes is None else notes)


def written(found):
    return list(map(list, found.rows))


def names(cells, notes=None, **given):
    return written(read(cells, notes, **given))


def problems(cells, **given):
    with pytest.raises(InputError) as caught:
        names(cells, **given)
    return caught.value.problems


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["a|b", " a | c ", "", "  "], [["a", "b"], ["a", "c"], [], []]),
        ([["a", " b "], [], ["10", "2"]], [["a", "b"], [], ["10", "2"]]),
        ([[1, 2], [], [10]], [["1", "2"], [], ["10"]]),
        ([3, 4], [["3"], ["4"]]),
        ([["a"], "", []], [["a"], [], []]),  # a row without labels has no form of its own
    ],
)
def test_forms_of_a_cell(cells, expected):
    assert names(cells) == expected


def test_another_separator():
    assert names(["a|b;c"], label_separator=";") == [["a|b", "c"]]


def test_repeated_labels_count_once_and_are_noted():
    notes = []
    assert names(["a|b|a", "c"], notes) == [["a", "b"], ["c"]]
    assert notes == ["train.jsonl: 1 row(s) name a label twice; it counts once"]


def columns(*cells, names=("x", "y")):
    made = tables.table(dict(zip(names, zip(*cells, strict=True), strict=True)), "a.csv")
    return written(
        read_labels(
            made, SimpleNamespace(label_columns=names, label_column="labels", label_separator="|"), []
        )
    )


def test_columns_of_0_and_1():
    assert columns(("1", "0"), ("true", " 1 "), ("0.0", "False")) == [["x"], ["x", "y"], []]
    assert columns((1, 0), (True, 1.0)) == [["x"], ["x", "y"]]


def test_label_list_is_in_the_order_of_first_appearance():
    assert read([["10"], [], ["2", "10"], ["a"]]).names == ["10", "2", "a"]


def test_label_numbers_are_sorted_and_unknown_labels_are_named_once_each():
    known, notes = ["b", "a"], []
    rows = [["a", "b"], ["z", "a"], ["y"], ["z"]]
    made = table([""] * 4)

    def numbers(rows, ignore):
        found = label_ids(made, read(rows), known, ignore, notes)
        return [found[row].tolist() for row in range(len(found))]

    assert numbers(rows[:1], False) == [[0, 1]]
    with pytest.raises(InputError) as caught:
        numbers(rows, False)
    assert [problem.partition(";")[0] for problem in caught.value.problems] == [
        "train.jsonl:2: label 'z' is not in the training data (2 row(s))",
        "train.jsonl:3: label 'y' is not in the training data (1 row(s))",
    ]
    assert notes == []
    assert numbers(rows, True) == [[0, 1], [1], [], []]
    assert notes == ["train.jsonl: 3 label(s) of 2 kind(s) that the training data does not have are ignored"]


def test_a_label_column_without_a_1_is_no_unknown_label():
    made = tables.table({"x": ["1", "0"], "y": ["0", "0"]}, "a.csv")
    found = read_labels(made, SimpleNamespace(label_columns=("x", "y")), [])
    assert found.names == ["x", "y"]
    ids = label_ids(made, found, ["x"], False, [])
    assert [ids[row].tolist() for row in range(2)] == [[0], []]


@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=3), min_size=1, max_size=12), st.data())
def test_taken_rows_have_the_labels_that_they_have_alone(rows, data):
    taken = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True).map(sorted))
    found, alone = read(rows).take(np.array(taken, dtype=int)), read([rows[row] for row in taken])
    assert (found.names, written(found)) == (alone.names, written(alone))


def test_taken_rows_of_label_columns_keep_every_name():
    made = tables.table({"x": ["1", "0"], "y": ["1", "1"]}, "a.csv")
    found = read_labels(made, SimpleNamespace(label_columns=("x", "y")), []).take(np.array([1]))
    assert (found.names, written(found)) == (["x", "y"], [["y"]])


def test_label_file(tmp_path):
    path = tmp_path / "labels.txt"
    path.write_bytes("\ufeffb\r\n\n 标签 \na\u2028c\n".encode())
    assert read_label_file(str(path)) == ["b", "标签", "a\u2028c"]


def test_what_a_reader_of_the_figures_should_know_of_the_labels():
    notes = []
    train, validation = Ragged.of([[0], [], [0, 1]]), Ragged.of([[0, 1], [0], []])
    note_labels({"train": ("a.csv", train), "validation": ("b.csv", validation)}, ["x", "y", "z"], notes)
    assert notes[0] == "3 labels, 1.00 per training row"
    assert notes[1:4] == [
        "a.csv: 1 row(s) have no label",
        "no training row has z",
        "b.csv: 1 row(s) have no label",
    ]
    assert notes[4].startswith("ROC AUC is undefined for 1 label(s)")
    assert notes[4].endswith("average: z")
    notes.clear()
    everywhere = Ragged.of([[0], [0, 1]])
    note_labels({"train": ("a.csv", everywhere), "validation": ("b.csv", everywhere)}, ["x", "y"], notes)
    assert [note.rpartition(": ")[2] for note in notes[1:]] == ["x"]  # every validation row has it
    notes.clear()
    note_labels({"train": ("a.csv", everywhere)}, ["x", "y"], notes)
    assert notes == ["2 labels, 1.50 per training row"]
    notes.clear()
    many = [f"l{i}" for i in range(SHOWN + 1)]
    note_labels({"train": ("a.csv", Ragged.of([[], []]))}, many, notes)
    assert notes[1:] == [
        "a.csv: 2 row(s) have no label",
        f"no training row has {', '.join(many[:SHOWN])}, ...",
    ]


def test_a_class_is_one_label_and_all_names_of_its_column_are_labels():
    classes = {"labels": ["b|c", "never", "a"]}
    asked = SimpleNamespace(label_columns=None, label_column="labels", label_separator="|")
    notes = []
    for cells, expected in [(["a", "b|c"], [["a"], ["b|c"]]), ([["b|c", "a"], []], [["b|c", "a"], []])]:
        found = read_labels(replace(table(cells), classes=classes), asked, notes)
        assert (written(found), found.names) == (expected, ["b|c", "never", "a"])
    assert notes == []


def test_rows_of_each_label_are_equally_likely():
    targets = Ragged.of([[0], [0], [0, 1], [], [], [0]])
    weights = classifier.class_balanced(targets, 3)  # nobody has the third; having none is one more
    np.testing.assert_allclose(weights, np.array([1 / 4, 1 / 4, 1 / 4 + 1, 1 / 2, 1 / 2, 1 / 4]) / 3)
