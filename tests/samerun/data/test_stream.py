import json
import multiprocessing
import os
import time
from dataclasses import replace
from itertools import chain

import datasets
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linear_task import make_plan, points, split_of
from refusals import problems_of

from samerun.data.batches import TrainBatches
from samerun.data.splits import read_split
from samerun.data.stream import SHARDS, START, Buffers, Stream
from samerun.errors import InputError
from samerun.text.arguments import TextArguments


class Counted(Stream):
    """Buffers of other points each; writes down who read which, and what is kept."""

    def __init__(self, folder):
        super().__init__("start of 1")
        self.folder = folder

    def read(self, epoch, start):
        assert start == f"start of {epoch}"
        (self.folder / f"{epoch}-{os.getpid()}").touch()
        return split_of(*points(22, seed=epoch), np.arange(22) % (epoch + 2)), f"start of {epoch + 1}"

    def remove(self, keeps):
        (self.folder / "kept").write_text(json.dumps([epoch for epoch in range(6) if keeps(epoch)]))

    def read_by(self, me=True):
        found = [path.name.split("-") for path in self.folder.glob("*-*")]
        return sorted(int(epoch) for epoch, process in found if (process == str(os.getpid())) == me)


@pytest.fixture
def stream(tmp_path):
    return Counted(tmp_path)


def steps_of(stream):
    split = replace(split_of(*points(22), np.arange(22) % 3), stream=stream)
    return TrainBatches(split, make_plan(22, epochs=4), 0, 1, True)


def test_every_epoch_has_the_rows_of_its_own_buffer(stream):
    steps = steps_of(stream)
    for epoch in range(4):
        x, _ = points(22, seed=epoch)
        rows = np.concatenate([steps.rows(3 * epoch + step) for step in range(3)])
        assert sorted(rows) == list(range(22))
        found = np.concatenate([batch.inputs["x"] for step in range(3) for batch in steps[3 * epoch + step]])
        assert sorted(map(tuple, found)) == sorted(map(tuple, x.numpy()))
        lengths = np.arange(22) % (epoch + 2 if epoch else 3)
        assert steps.tokens(3 * epoch)[0] == lengths[steps.rows(3 * epoch)].sum()
    assert stream.read_by() == [1, 2, 3]


def test_a_resumed_run_reads_nothing_of_earlier_epochs(stream):
    whole = steps_of(stream)
    expected = whole.rows(7)
    start = json.loads(json.dumps(whole.start_at(7)))
    assert (whole.start_at(0), start) == (None, "start of 2")
    (stream.folder / f"1-{os.getpid()}").unlink()
    steps = steps_of(Counted(stream.folder))
    steps.begin(7, start)
    np.testing.assert_array_equal(steps.rows(7), expected)
    assert stream.read_by() == [2]


@pytest.mark.slow
def test_the_next_buffer_is_read_by_another_process_and_earlier_ones_are_removed(stream):
    stream.start_reading_ahead()
    steps = steps_of(stream)

    def kept():
        return json.loads((stream.folder / "kept").read_text())

    steps.begin(0, None)
    assert kept() == [0, 1]
    for epoch in range(4):
        steps.enter(3 * epoch)
        assert kept() == [0, *range(max(1, epoch), 6)]
        deadline = time.monotonic() + 60
        while epoch < 3 and epoch + 1 not in stream.read_by(me=False):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert stream.read_by(me=False) == [1, 2, 3]  # none behind the last
    (reader,) = [process for process in multiprocessing.active_children() if process.name == "read-ahead"]
    steps.close()
    reader.join(60)
    assert (reader.exitcode, kept()) == (0, [])


# Buffers of rows


def buffers(folder, size=4, columns=("text", "labels"), **given):
    return Buffers(TextArguments(output_dir=folder, streaming=size, report_to=("none",), **given), columns)


@pytest.fixture
def files(tmp_path, token_cache):
    """Three files of 5, 3 and 2 rows, and one row more that has no text."""
    for name, numbers in (("a", [0, 1, None, 2, 3, 4]), ("b", [5, 6, 7]), ("c", [8, 9])):
        lines = [f"{'' if number is None else f't{number}'},x" for number in numbers]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,labels", *lines, ""]))
    return (str(tmp_path / "?.csv"),)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.integers(1, 12), st.integers(0, 9))
def test_buffers_are_consecutive_pieces_of_shuffled_passes(tmp_path_factory, token_cache, sizes, size, seed):
    folder, texts = tmp_path_factory.mktemp("rows"), []
    for number, rows in enumerate(sizes):
        texts.append([f"猫{number}-{row}" for row in range(rows)])
        lines = ["text,labels", *(f"{text},x" for text in (" ", *texts[-1]))]
        (folder / f"{number}.csv").write_text("\n".join(lines), encoding="gb18030")
    given = {"size": size, "seed": seed, "encoding": "gb18030"}
    given["train_file"] = tuple(map(str, sorted(folder.iterdir())))
    read, starts, found = buffers(folder, **given), [START], []
    for number in range(4):
        table, start, _ = read.read(number, starts[number])
        assert len(table) == min(size, sum(sizes))
        starts.append(start)
        found.append(list(table.columns["text"]))
    orders = [np.random.default_rng([seed, number, SHARDS]).permutation(len(sizes)) for number in range(48)]
    expected = [text for order in orders for number in order for text in texts[number]]
    assert list(chain(*found)) == expected[: 4 * len(found[0])]
    read.remove(lambda _: False)
    resumed = buffers(folder, **given)  # in a process that begins there, from a checkpoint, which is JSON
    resumed.read(0)
    again, following, _ = resumed.read(3, json.loads(json.dumps(starts[3])))
    assert (list(again.columns["text"]), following) == (found[3], starts[4])


def test_sentences_without_words_are_skipped(tmp_path, token_cache):
    cells = [["a"], [], ["\u200b"], ["b"], ["c"]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"tokens": words}) + "\n" for words in cells))
    given = {"columns": ("tokens",), "text_column": "tokens", "train_file": [str(tmp_path / "a.jsonl")]}
    table, _, blank = buffers(tmp_path, size=2, **given).read(0)
    assert (list(table.columns["tokens"]), blank) == ([["a"], ["b"]], 2)


def test_a_row_is_named_by_its_file_and_line_and_empty_texts_are_counted(files, tmp_path):
    table, _, blank = buffers(tmp_path, size=10, train_file=files).read(0)
    assert blank == 1
    texts, places = list(table.columns["text"]), [table.where(number) for number in range(10)]
    assert places[texts.index("t2")] == f"{tmp_path / 'a.csv'}:5"
    assert places[texts.index("t9")] == f"{tmp_path / 'c.csv'}:3"
    assert table.path.endswith(".csv and 2 more, buffer 1")


def test_a_buffer_is_kept_until_it_is_removed_and_read_anew_when_a_file_changed(files, tmp_path, token_cache):
    def there():
        return sorted(path.name.partition("-")[0] for path in token_cache.glob("buffers/*/*-*"))

    read = buffers(tmp_path, train_file=files)
    _, second, _ = read.read(0)
    read.read(1, second)
    assert there() == ["0", "1"]
    read.remove(lambda number: number > 0)
    assert there() == ["1"]
    (tmp_path / "c.csv").write_text("text,labels\nt8,x\nother,x\n")
    after = buffers(tmp_path, train_file=files)
    tables = [after.read(0)[0], after.read(1, second)[0]]
    assert "other" in [text for table in tables for text in table.columns["text"]]
    after.remove(lambda number: True)
    assert there() == ["0", "1"]
    for name in "abc":
        (tmp_path / f"{name}.csv").write_text("text,labels\n ,x\n")
    with pytest.raises(InputError, match="--streaming: no row has a text; nothing to train on"):
        buffers(tmp_path, train_file=files).read(0)


def test_a_file_that_changes_during_the_run_or_lost_rows_is_named(files, tmp_path, token_cache):
    read = buffers(tmp_path, size=4, train_file=files)
    _, second, _ = read.read(0)
    other = buffers(tmp_path, size=4, train_file=files)
    for name in "abc":  # changes of no row
        os.link(tmp_path / f"{name}.csv", tmp_path / f"copy of {name}.csv")
        (tmp_path / f"{name}.csv").chmod(0o600)
    assert len(other.read(1, second)[0]) == 4
    other.remove(lambda number: False)
    names = np.random.default_rng([read.seed, 0, SHARDS]).permutation(3)
    for name in "abc":
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(path.read_text().splitlines()[:2]) + "\n")
    with pytest.raises(InputError, match=r"\w\.csv: was changed during the run; start it again"):
        read.read(1, second)
    first = tmp_path / f"{'abc'[names[0]]}.csv"
    again = buffers(tmp_path, size=4, train_file=files)
    with pytest.raises(InputError, match=rf"{first}: has 1 rows, but this run has already read 2 of it"):
        again.read(1, (0, 0, 2))


def test_what_is_missing_is_told_at_once_and_what_is_wrong_where_it_is_read(files, tmp_path):
    with pytest.raises(InputError, match="no train rows: give --train_file or --dataset_name"):
        buffers(tmp_path)
    wrong = (*files, str(tmp_path / "d.csv"), str(tmp_path / "e.txt"))
    assert len(problems_of(buffers, tmp_path, train_file=wrong)) == 2
    for name in "abc":
        (tmp_path / f"{name}.csv").write_text((tmp_path / f"{name}.csv").read_text() + "late,x,y\n")
    read = buffers(tmp_path, size=1, train_file=files)
    starts = [START]
    with pytest.raises(InputError, match=r"\.csv:\d+: 3 cells, expected 2"):
        starts += (read.read(number, starts[-1])[1] for number in range(9))
    assert len(starts) > 2


def test_the_shards_of_a_data_set_with_names_of_classes(tmp_path, token_cache, arguments, monkeypatch):
    kinds = {"text": datasets.Value("string"), "labels": datasets.ClassLabel(names=["no", "yes"])}
    data = tmp_path / "hub" / "data"
    data.mkdir(parents=True)
    for number in range(3):
        rows = {"text": [f"t{number}{row}" for row in range(4)], "labels": [0, 1, 1, -1]}
        shard = datasets.Dataset.from_dict(rows, datasets.Features(kinds))
        shard.to_parquet(data / f"train-{number}-of-3.parquet")
    read = buffers(tmp_path / "run", size=6, dataset_name=str(tmp_path / "hub"))
    table, start, _ = read.read(0)
    assert len(read.shards) == 3
    assert table.classes == {"labels": ["no", "yes"]}
    assert list(table.columns["labels"]) == ["no", "yes", "yes", None, "no", "yes"]
    rest, _, _ = read.read(1, start)
    assert sorted([*table.columns["text"], *rest.columns["text"]]) == [
        f"t{number}{row}" for number in range(3) for row in range(4)
    ]
    files = sorted(map(str, data.iterdir()))
    of_files, _, _ = buffers(tmp_path / "other", size=6, train_file=files).read(0)
    assert of_files.classes == table.classes
    assert set(of_files.columns["labels"]) == {"no", "yes", None}
    monkeypatch.delattr(datasets, "load_dataset")  # it would bring all splits to the disk
    (data / "train-2-of-3.parquet").rename(data / "validation-0-of-1.parquet")
    given = arguments(dataset_name=str(tmp_path / "hub"), streaming=True, max_eval_samples=3)
    assert list(read_split(given, "validation", ("text", "labels")).columns["labels"]) == ["no", "yes", "yes"]
    with pytest.raises(InputError, match=r"--dataset_name .*: cannot be loaded \(Bad split: test"):
        read_split(given, "test", ("text",))
    with pytest.raises(InputError, match="has no column 'title'; it has text, labels"):
        buffers(tmp_path / "run", dataset_name=str(tmp_path / "hub"), columns=("text", "title"))
    for shard in data.glob("train-*"):
        datasets.Dataset.from_dict({"text": [], "labels": []}, datasets.Features(kinds)).to_parquet(shard)
    with pytest.raises(InputError, match="--streaming: no row has a text"):
        buffers(tmp_path / "run", dataset_name=str(tmp_path / "hub")).read(0)
