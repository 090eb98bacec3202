import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from classify import Arguments, TextClassification
from tables import contents

from samerun.data.splits import LIMIT_ARGUMENTS, read_needed, read_split
from samerun.errors import InputError


def test_a_split_from_its_file(arguments, tmp_path):
    path = tmp_path / "valid.csv"
    path.write_text("text,labels\n猫,x\nb,y\nc,z\n", encoding="gb18030")
    given = {"validation_file": str(path), "encoding": "gb18030"}
    asked = arguments(**given, max_eval_samples=2, max_train_samples=1)
    table = read_split(asked, "validation", ("text",), ("labels", "id"))
    assert contents(table) == {"text": ["猫", "b"], "labels": ["x", "y"]}
    assert read_split(asked, "train") is None
    assert len(read_split(arguments(**given, max_eval_samples=9), "validation")) == 3
    with pytest.raises(InputError, match="column 'title' not found"):
        read_split(asked, "validation", ("title",))


def test_only_the_columns_in_use_are_read(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,labels,id,note\na,x,1,y\n")
    for given, ids in (({}, {"id": ["1"]}), ({"id_column": "note"}, {"note": ["y"]})):
        task = TextClassification(Arguments(output_dir="a", test_file=str(path), **given))
        found = contents(task.read_rows("test").table)
        assert found == {"text": ["a"], "labels": ["x"], **ids}


@pytest.mark.parametrize(
    ("given", "modes", "unread"),
    [
        ({"test_file": "b"}, (False, False, True), ["--train_file a is not read: --do_train is not given"]),
        ({"test_file": "b", "validation_file": "c"}, (True, True, False),
         ["--test_file b is not read: --do_predict is not given"]),
        ({}, (False, True, False), []),  # a folder with validation rows
    ],
)  # fmt: skip
def test_files_that_are_named_and_not_read(given, modes, unread):
    notes, given = [], {name: [path] for name, path in given.items()}
    asked = Arguments(output_dir="runs", train_file=["a"], **given)
    found = read_needed(asked, modes, lambda split: [split], notes, unit="rows", elsewhere="")
    assert list(found) == [split for split, needed in zip(LIMIT_ARGUMENTS, modes, strict=True) if needed]
    assert notes == unread


def test_a_dataset_that_was_saved_alone_is_training_rows(arguments, tmp_path, token_cache):
    datasets.Dataset.from_dict({"text": ["a", "b"], "labels": ["x", "y"]}).save_to_disk(tmp_path / "saved")
    asked = arguments(dataset_name=str(tmp_path / "saved"))
    found = read_split(asked, "train", ("text",), ("labels",))
    assert contents(found) == {"text": ["a", "b"], "labels": ["x", "y"]}
    assert read_split(asked, "validation", ("text",)) is None


def test_a_split_of_a_dataset(arguments, tmp_path, token_cache, capfd):
    datasets.enable_progress_bars()  # as in a new process
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": t, "labels": [t]}) + "\n" for t in "abc"))
    asked = arguments(dataset_name=str(folder), max_train_samples=2)
    found = read_split(asked, "train", ("text", "labels"))
    assert contents(found) == {"text": ["a", "b"], "labels": [["a"], ["b"]]}
    assert found.where(1) == f"{folder} (train) row 2"
    assert read_split(asked, "test") is None
    with pytest.raises(InputError, match="split train: has no column 'title'; it has text, labels"):
        read_split(asked, "train", ("title",))
    assert capfd.readouterr().err == ""


def test_classes_of_a_dataset_have_their_names(arguments, tmp_path, monkeypatch):
    kind = datasets.ClassLabel(names=["10", "pear, ripe", "a"])
    features = datasets.Features(
        text=datasets.Value("string"), one=kind, many=datasets.List(kind), unknown=kind
    )
    rows = {"text": ["x", "y", "z"], "one": [2, 0, 1], "many": [[1, 0], [], [2]], "unknown": [-1, -1, -1]}
    made = datasets.DatasetDict(train=datasets.Dataset.from_dict(rows, features))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    found = read_split(arguments(dataset_name="a"), "train", ("text", "one", "many"), ("unknown",))
    assert contents(found) == {
        "text": ["x", "y", "z"],
        "one": ["a", "10", "pear, ripe"],
        "many": [["pear, ripe", "10"], [], ["a"]],
    }
    assert list(found.columns["many"].take(np.array([2, 0]))) == [["a"], ["pear, ripe", "10"]]


def test_a_part_of_a_split_or_another_one(arguments, tmp_path, token_cache):
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        rows = [json.dumps({"text": f"{split} {row}"}) for row in range(10)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    named = arguments(dataset_name=str(folder), dataset_split="train[:80%],validation=train[80%:]")
    assert list(read_split(named, "train", ("text",)).columns["text"]) == [f"train {row}" for row in range(8)]
    held = read_split(named, "validation", ("text",))
    assert (list(held.columns["text"]), held.path) == (["train 8", "train 9"], f"{folder} (train[80%:])")
    other = read_split(arguments(dataset_name=str(folder), dataset_split="test"), "train", ("text",))
    assert other.columns["text"][0] == "test 0"
    with pytest.raises(InputError, match=r"--dataset_split .*corresponds to no data"):
        read_split(arguments(dataset_name=str(folder), dataset_split="train[:0]"), "train", ("text",))


def test_configuration_and_revision_are_asked_of_the_hub(arguments, monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **given: asked.append((names, given)) or {})
    for name in ("a/b", "a/b:c", "a/b@v1", "a/b:c@v1"):
        assert read_split(arguments(dataset_name=name, cache_dir="d"), "train") is None
    assert [(*names[1:], given["revision"]) for names, given in asked] == [
        (None, None), ("c", None), (None, "v1"), ("c", "v1")
    ]  # fmt: skip
    assert asked[3] == (("a/b", "c"), {"split": None, "revision": "v1", "cache_dir": "d"})


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Three files of two rows each, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("part-2", "part-10", "first"):
        (tmp_path / f"{name}.csv").write_text(f'text,labels\n{name} a,x\n"{name}\nb",y\n')
    return tmp_path


def read(*patterns, optional=()):
    asked = SimpleNamespace(train_file=patterns, encoding="utf-8", max_train_samples=None)
    return read_split(asked, "train", ("text", "labels"), optional)


def test_files_stand_in_the_order_given_and_those_of_a_pattern_by_name(parts):
    found = read("first.csv", "part-*.csv")
    names = ("first", "part-10", "part-2")
    assert list(found.columns["text"]) == [f"{name}{text}" for name in names for text in (" a", "\nb")]
    assert [found.where(row) for row in (1, 2, 5)] == ["first.csv:3", "part-10.csv:2", "part-2.csv:3"]
    assert (len(found), found.path) == (6, "first.csv and 2 more")
    assert [found.sources[number].argument for number in found.source] == [0, 0, 1, 1, 1, 1]


def test_a_name_that_exists_is_no_pattern(parts):
    (parts / "part-[2].csv").write_text("text,labels\nbrackets,x\n")
    assert list(read("part-[2].csv").columns["text"]) == ["brackets"]
