from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from classify import Arguments, TextClassification
from tables import table
from transformers import BertConfig, BertForSequenceClassification

from samerun.data.tables import FILE, Source
from samerun.errors import InputError
from samerun.export import export_model
from samerun.parsing import SpaceSeparated
from samerun.plan import Modes
from samerun.text.text import mixture_of, pad_rows


def test_rows_are_padded_on_either_side():
    rows = [np.array([1, 2, 3]), np.array([4])]
    assert pad_rows(rows, 9).tolist() == [[1, 2, 3], [4, 9, 9]]
    assert pad_rows(rows, 9, "left").tolist() == [[1, 2, 3], [9, 9, 4]]
    assert pad_rows(rows, 0, "right", 4).tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert pad_rows(rows, 0, "left", 3).shape == (2, 3)
    assert pad_rows([rows[1][:0]], 0, multiple=4).shape == (1, 4)
    assert pad_rows(rows, 0).dtype == torch.int64


@pytest.fixture
def mixed():
    """A table of rows of three files, the last two of one pattern."""
    files = [("a.csv", 0), ("b-1.csv", 1), ("b-2.csv", 1)]
    sources = tuple(Source(path, "csv", number) for path, number in files)
    made = table({}, "a.csv and 2 more", lines=range(2, 12), sources=sources)
    return replace(made, rows=made.rows.add_column(FILE, np.repeat([0, 1, 2], [6, 2, 2])))


def test_weights_belong_to_files_and_patterns(mixed):
    notes = []
    mixture = mixture_of(mixed, (1, 3), notes)
    assert (mixture.weights, mixture.source.tolist()) == ((0.25, 0.75), [0] * 6 + [1] * 4)
    assert mixture.counts.tolist() == [3, 7]  # exactly 2.5 and 7.5: the earlier one gets the row that is left
    assert notes == ["rows of an epoch: 3 from the 6 of a.csv, 7 from the 4 of b-1.csv (--mixing_weights)"]
    assert mixture_of(mixed, None, notes) is None
    with pytest.raises(InputError, match=r"b-1\.csv \(0 training rows, weight 1\) gives no row"):
        mixture_of(mixed.take(np.arange(6)), (1, 1), [])


TRAIN = Modes(True, False, False)


def loaded(model, *files, modes=TRAIN, **given):
    """(a task after `load`, its data)"""
    given |= {"model_name_or_path": str(model), "train_file": SpaceSeparated(map(str, files))}
    task = TextClassification(Arguments(output_dir="a", **given))
    return task, task.load(SimpleNamespace(device_type="cpu"), modes)


def test_several_labels_a_row_need_more_updates_and_a_higher_rate(bert_folder, tmp_path):
    file, enough, rates = tmp_path / "a.csv", [], []
    names = tmp_path / "labels.txt"
    names.write_text("\n".join(map(str, range(200))))  # more than the rows have
    for kind, labels in (("multi_label", 40), ("multi_label", 200), ("single_label", 40)):
        file.write_text("text,labels\n" + "".join(f"sort {number},{number}\n" for number in range(labels)))
        task, data = loaded(bert_folder, file, problem_type=kind, label_file=str(names))
        enough.append(data.splits["train"].enough_updates)
        rates.append(task.arguments.learning_rate)
    assert enough == [600, 1500, 400]
    assert rates == [2e-4, 2e-4, 1e-4]
    assert data.splits["train"].collate(np.arange(2)).shape == (2, 4)
    data = task.load(SimpleNamespace(device_type="cuda"), TRAIN)
    assert data.splits["train"].collate(np.arange(2)).shape == (2, 8)


def test_an_exported_model_reads_as_much_of_a_text_as_in_its_training(bert_folder, tmp_path):
    folder, file = tmp_path / "best", tmp_path / "a.csv"
    file.write_text("text,labels\na,x\nb,y\n")
    config = BertConfig.from_pretrained(bert_folder, max_position_embeddings=1024)
    model = BertForSequenceClassification(config)
    tokenizer = loaded(bert_folder, file, truncation_side="left")[0].tokenizer
    export_model(folder, model, model.state_dict(), lambda _: None, tokenizer, 1000)
    read = []
    for given in ({"do_predict": True}, {"do_predict": True, "max_length": 99}, {}):
        task, _ = loaded(folder, file, modes=Modes(not given, False, False), **given)
        read.append((task.max_length, task.tokenizer.truncation_side))
    assert read == [(1000, "left"), (99, "left"), (512, "right")]


def test_the_fingerprint_knows_the_rows_and_how_they_are_mixed_but_not_the_files(bert_folder, tmp_path):
    rows = ["sort the values,x", "cut the text,y", "a b c,x|y", "return it,y"]
    for name, part in {"whole": rows, "first": rows[:1], "rest-1": rows[1:3], "rest-2": rows[3:]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,labels", *part]) + "\n")

    def load(*names, **given):
        return loaded(bert_folder, *(tmp_path / name for name in names), **given)[1]

    whole, parts = load("whole.csv"), load("first.csv", "rest-*.csv")
    assert whole.fingerprint == parts.fingerprint
    mixed = [load("first.csv", "rest-*.csv", mixing_weights=weights) for weights in ((1, 1), (2, 2), (1, 3))]
    assert [data.splits["train"].mixture.counts.tolist() for data in mixed] == [[2, 2], [2, 2], [1, 3]]
    mixtures = [data.splits["train"].mixture.weights for data in mixed]
    assert mixtures[0] == mixtures[1] != mixtures[2]
