import io
import math
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from linear_task import LinearTask, points, split_of

from samerun import predictions
from samerun.files import as_line, read_lines
from samerun.plan import Modes

LINES = [
    {"id": "a,b", "labels": ["x", "y"], "probabilities": {"x": 0.5, "y": 1.0}},
    {"id": 2, "labels": [], "probabilities": {"x": 0.0, "y": 0.25}},
]


def write(path, folder):
    return predictions.write(path, folder, LINES, "|")


def test_the_suffix_decides_the_format(tmp_path):
    assert write(tmp_path / "p.CSV", tmp_path).read_text().startswith("id,labels,probabilities.x")
    assert write(tmp_path / "p.tsv", tmp_path).read_text().startswith("id\tlabels\tprobabilities.x")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (LINES, 'id,labels,probabilities.x,probabilities.y\n"a,b",x|y,0.5,1.0\n2,,0.0,0.25\n'),
        ([{"id": 0, "p": {"a": 0.5}}, {"id": 1, "p": {"b": 0.25}}], "id,p.a,p.b\n0,0.5,\n1,,0.25\n"),
        ([{"id": 0, "c": [{"t": 1.0}], "d": None}], 'id,c,d\n0,"[{""t"": 1.0}]",\n'),
        ([], ""),
    ],
)
def test_columns_of_a_table(lines, expected):
    file = io.StringIO()
    predictions.write_table(file, lines, ",", "|")
    assert file.getvalue() == expected


def test_predictions_of_ours_are_replaced_and_nothing_else(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for path in (tmp_path / "p.jsonl", folder / "predictions.jsonl"):
        write(path, folder)
        before = path.read_bytes()
        assert predictions.problem(path, folder, False) is None
        path.write_text("mine")
        assert "does not hold predictions of a run" in predictions.problem(path, folder, False)
        assert write(path, folder) == path.with_name(f"{path.stem}_2.jsonl")  # it came in mid-run
        assert path.read_text() == "mine"
        path.write_bytes(before)
    moved = folder.rename(tmp_path / "moved")
    assert predictions.problem(moved / "predictions.jsonl", moved, False) is None
    assert predictions.problem(tmp_path / "p.jsonl", tmp_path / "other", False) is not None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dangling", "is a link"),
        ("p.parquet", "is no csv, tsv or jsonl file"),
        ("run/../run/run.json", "is reserved for other files"),
        ("run/.predictions", "is reserved for other files"),
    ],
)
def test_places_that_are_refused(tmp_path, name, said):
    (tmp_path / "run").mkdir()
    (tmp_path / "dangling").symlink_to("gone")
    assert re.match(said, predictions.problem(tmp_path / name, tmp_path / "run", False))


def test_standard_output_pipes_and_devices_are_written_to(tmp_path, capfd):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    places = (pipe, Path("/dev/null"), Path("-"))
    assert [predictions.problem(place, tmp_path, False) for place in places] == [None] * 3
    for place in places:
        assert write(place, tmp_path) == place
    reader.join()
    assert read[0] == capfd.readouterr().out == "".join(map(as_line, LINES))
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize(("train", "trained", "expected"), [
    (True, True, "predictions.jsonl"), (False, False, "predictions.jsonl"),
    (False, True, "predictions_new.v1.jsonl"),
])  # fmt: skip
def test_a_finished_runs_predictions_and_metrics_are_kept(tmp_path, train, trained, expected):
    if trained:
        (tmp_path / "best").mkdir()
    given = {"test_file": "data/new.v1.csv.gz", "predictions_file": None, "modes": Modes(train, False, True)}
    asked = SimpleNamespace(output_dir=str(tmp_path), **given)
    assert predictions.path_of(asked).name == expected
    assert predictions.folder_of(asked) == tmp_path / expected.removesuffix(".jsonl")
    metrics = expected.replace("predictions", "metrics").replace("jsonl", "json")
    assert predictions.metrics_name(asked) == metrics
    several = [("a.csv", "b.csv"), ("data/part-*.csv.gz",), ("*.csv", "b.csv", "c.csv")]
    for files, stem in zip(several, ["a_and_1_more", "part", "test_and_2_more"], strict=True):
        asked.test_file = files
        named = predictions.path_of(asked).stem.removeprefix("predictions")
        assert named in ("", f"_{stem}")
        assert bool(named) == ("new" in expected)


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
    assert predictions.problem(path, tmp_path, False) is None
