import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from linear_task import LinearTask, points, split_of

from samerun import predictions
from samerun.errors import TrainingError
from samerun.files import as_line, read_lines
from samerun.plan import Modes

LINES = [
    {"id": "a,b", "labels": ["x", "y"], "probabilities": {"x": 0.5, "y": 1.0}},
    {"id": 2, "labels": [], "probabilities": {"x": 0.0, "y": 0.25}},
]


def write(path, folder):
    predictions.write(path, folder, LINES, "|")


OF_LABELS = [{"id": 1, "p": {"b": 0.75, "a": 0.25}, "c": 1}, {"id": 2, "p": {"a": 1.0, "b": 0.0}, "c": 2}]
LIKELIEST = [{"id": 1, "p": predictions.Likeliest(a=0.5)}, {"id": 2, "p": predictions.Likeliest(b=0.25)}]


@pytest.mark.parametrize(
    ("lines", "labels", "expected"),
    [
        (LINES, (), 'id,labels,probabilities.x,probabilities.y\n"a,b",x|y,0.5,1.0\n2,,0.0,0.25\n'),
        ([{"id": 0, "p": {"a": 0.5}}, {"id": 1, "p": {"b": 0.25}}], (), "id,p.a,p.b\n0,0.5,\n1,,0.25\n"),
        ([{"id": 0, "c": [{"t": 1.0}], "d": None}], (), 'id,c,d\n0,"[{""t"": 1.0}]",\n'),
        (OF_LABELS, ["a", "b"], "id,p.a,p.b,c\n1,0.25,0.75,1\n2,1.0,0.0,2\n"),  # in the order of the labels
        (LIKELIEST, (), 'id,p\n1,"{""a"": 0.5}"\n2,"{""b"": 0.25}"\n'),  # of many, in one cell
        ([], (), ""),
    ],
)
def test_columns_of_a_table(lines, labels, expected, tmp_path):
    predictions.write(tmp_path / "p.CSV", tmp_path, lines, "|", labels)
    assert (tmp_path / "p.CSV").read_text() == expected
    predictions.write(tmp_path / "p.tsv", tmp_path, lines, "|", labels)
    assert (tmp_path / "p.tsv").read_text().splitlines()[:1] == [
        line.replace(",", "\t") for line in expected.splitlines()[:1]
    ]


def test_another_separator_of_a_table_is_noted(arguments, tmp_path, capsys):
    task, split, errors = LinearTask(), split_of(*points(2)), {"error": np.array([0.5, 1.0])}
    asked = arguments(output_dir=str(tmp_path), predictions_file=str(tmp_path / "p.csv"))
    object.__setattr__(asked, "label_separator", "|")
    predictions.write_split(asked, task, split, errors)
    assert capsys.readouterr().out == ""
    task.list_separator = ";"
    predictions.write_split(asked, task, split, errors)
    assert "p.csv: a label has '|' in it, so ';' separates labels" in capsys.readouterr().out


def test_small_probabilities_stay_apart():
    values = predictions.by_name(["x", "y"], np.array([1.23456789e-9, 1.23456e-9]))
    assert values == {"x": 1.234568e-9, "y": 1.23456e-9}


def test_predictions_of_ours_are_replaced_and_nothing_else(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for path in (tmp_path / "p.jsonl", folder / "predictions.jsonl"):
        write(path, folder)
        before = path.read_bytes()
        assert predictions.problem(path, folder) is None
        path.write_text("mine")
        assert "does not hold predictions of a run" in predictions.problem(path, folder)
        with pytest.raises(TrainingError, match="does not hold predictions of a run"):  # it came in mid-run
            write(path, folder)
        assert path.read_text() == "mine"
        path.write_bytes(before)
    moved = folder.rename(tmp_path / "moved")
    assert predictions.problem(moved / "predictions.jsonl", moved) is None
    assert predictions.problem(tmp_path / "p.jsonl", tmp_path / "other") is not None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *[(name, "exists and does not hold predictions of a run") for name in ("run", "link", "pipe")],
        ("p" * 300, "cannot be written \\(File name too long\\)"),
        ("run/.predictions", "is reserved for other files"),
        ("run/../run/metrics.json", "is reserved for other files"),
        ("p.parquet", "is no csv, tsv or jsonl file"),
        ("no/p.csv", "folder .*no does not exist or cannot be written"),
    ],
)
def test_places_that_are_refused(tmp_path, name, said):
    (tmp_path / "run").mkdir()
    write(tmp_path / "p.jsonl", tmp_path / "run")
    (tmp_path / "link").symlink_to("p.jsonl")
    os.mkfifo(tmp_path / "pipe")
    assert re.match(said, predictions.problem(tmp_path / name, tmp_path / "run"))


def test_predictions_go_to_standard_output(tmp_path, capfd):
    assert predictions.problem(Path("-"), tmp_path) is None
    write(Path("-"), tmp_path)
    assert capfd.readouterr().out == "".join(map(as_line, LINES))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("train", "trained", "expected"), [
    (True, True, "predictions.jsonl"), (False, False, "predictions.jsonl"),
    (False, True, "predictions_new.v1.jsonl"),
])  # fmt: skip
def test_a_finished_runs_predictions_and_metrics_are_kept(tmp_path, train, trained, expected):
    if trained:
        (tmp_path / "best").mkdir()
    asked = SimpleNamespace(output_dir=str(tmp_path), predictions_file=None, modes=Modes(train, False, True))
    asked.test_file = ("data/new.v1.csv.gz",)
    assert predictions.path_of(asked).name == expected
    assert predictions.folder_of(asked) == tmp_path / expected.removesuffix(".jsonl")
    metrics = expected.replace("predictions", "metrics").replace("jsonl", "json")
    assert predictions.metrics_name(asked) == metrics
    asked.modes = Modes(train, True, False)  # only evaluates
    asked.test_file, asked.validation_file = None, asked.test_file
    assert predictions.metrics_name(asked) == metrics


def test_test_files_of_one_name_do_not_replace_each_others_predictions(tmp_path):
    (tmp_path / "best").mkdir()
    asked = SimpleNamespace(output_dir=str(tmp_path), predictions_file=None, modes=Modes(False, False, True))
    for files, name in [
        (["2025/test.csv"], "test"),
        (["2026/test.csv"], "test_2"),
        (["2026/test.csv", "more.csv"], "test_and_1_more"),
        (["2026/test.conll"], "test_3"),
        (["2026/test.csv"], "test_2"),
        (["./2025/test.csv"], "test"),
        (["data/part-*.csv.gz"], "part"),
        (["*.csv", "b.csv", "c.csv"], "test_and_2_more"),
        (["acsv"], "acsv"),
    ]:
        asked.test_file = files
        assert predictions.path_of(asked).name == f"predictions_{name}.jsonl"
        predictions.write_metrics(asked, {"test_rows": 1})


def test_predictions_have_the_ids_of_their_rows_and_are_whole_or_absent(arguments, tmp_path):
    task, split, errors = LinearTask(), split_of(*points(2)), {"error": np.array([0.5, 1.0])}
    asked = arguments(output_dir=str(tmp_path))
    path = predictions.write_split(asked, task, split, errors)
    assert list(read_lines(path)) == [{"id": 0, "error": 0.5}, {"id": 1, "error": 1.0}]
    object.__setattr__(split, "ids", ["一", 2])
    predictions.write_split(asked, task, split, errors)
    before = path.read_bytes()
    assert "一" in before.decode()
    with pytest.raises(ValueError, match="JSON compliant"):
        predictions.write_split(asked, task, split, {"error": np.array([0.5, math.nan])})
    assert path.read_bytes() == before


def test_a_file_that_a_crash_left_without_a_further_step_is_known(tmp_path, monkeypatch):
    replace, path = os.replace, tmp_path / "p.jsonl"

    def replace_and_crash(old, new):
        replace(old, new)
        if new == path:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace_and_crash)
    with pytest.raises(KeyboardInterrupt):
        write(path, tmp_path)
    assert path.exists()
    assert predictions.problem(path, tmp_path) is None


def test_masks_of_the_replaced_predictions_are_known(tmp_path):
    asked = SimpleNamespace(output_dir=str(tmp_path), predictions_file=str(tmp_path / "a.jsonl"))
    assert predictions.earlier_masks(asked) == set()
    (tmp_path / "a.jsonl").write_text('{"id": 1, "mask": "predictions/1.png"}\n')
    assert predictions.earlier_masks(asked) == {"1.png"}
    (tmp_path / "a.jsonl").write_text("id,mask\n1,predictions/1.png\n")  # a table
    assert predictions.earlier_masks(asked) == set()
