"""A file that is replaced by one of the same name, size and time of modification is read again."""

import os
import time
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from PIL import Image

from samerun.data import cache
from samerun.data.cache import content_hash
from samerun.data.splits import read_split
from samerun.data.stream import Buffers
from samerun.images.data import from_table


@pytest.fixture(autouse=True)
def settled(monkeypatch, token_cache):
    """Files count as unchanged at once, not after two seconds: a test cannot set the time of a change."""
    monkeypatch.setattr(cache, "SETTLED", -1.0)


def replace(path, write):
    """Writes a file again, with the size and the time of modification that it had."""
    before = path.stat()
    time.sleep(0.05)  # the clock of the file system
    write(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def write_image(path, value):
    Image.fromarray(np.full((4, 4), value, dtype=np.uint8)).save(path)


def write_rows(path, label):
    path.write_text(f'{{"text": "a b", "labels": "{label}"}}\n')


def write_parquet(path, label, folder):
    image = {"bytes": (folder / "a.bmp").read_bytes(), "path": None}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    datasets.Dataset.from_dict({"image": [image], "label": [label]}, features=features).to_parquet(path)


def arguments(folder, **given):
    common = {"encoding": "utf-8", "id_column": "id", "image_column": "image", "label_column": "label"}
    common |= {"train_file": None, "dataset_split": None, "dataset_splits": {}}
    common |= {"max_train_samples": None, "cache_dir": None, "streaming": False}
    stream = {"text_column": "text", "seed": 0, "output_dir": folder / "run"}
    return SimpleNamespace(**(common | stream | {"dataset_name": str(folder)} | given))


def test_the_hash_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("1")
    first = content_hash(path)
    replace(path, lambda path: path.write_text("2"))
    assert content_hash(path) != first
    replace(path, lambda path: path.write_text("1"))
    assert content_hash(path) == first
    monkeypatch.setattr(cache, "file_record", None)  # an unchanged file is not read again
    assert content_hash(path) == first


def test_labels_of_images_in_parquet(tmp_path):
    write_image(tmp_path / "a.bmp", 1)
    path = tmp_path / "rows.parquet"
    write_parquet(path, "a", tmp_path)
    assert list(from_table(arguments(tmp_path), "train", path, masks=False).labels) == ["a"]
    replace(path, lambda path: write_parquet(path, "b", tmp_path))
    assert list(from_table(arguments(tmp_path), "train", path, masks=False).labels) == ["b"]


def test_labels_of_a_folder_that_datasets_reads(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "train.jsonl", "x")
    asked = arguments(folder)
    assert list(read_split(asked, "train", ("text", "labels")).columns["labels"]) == ["x"]
    replace(folder / "train.jsonl", lambda path: write_rows(path, "y"))
    assert list(read_split(asked, "train", ("text", "labels")).columns["labels"]) == ["y"]


@pytest.mark.parametrize("kind", ["files", "data set"])
def test_streamed_labels(tmp_path, kind):
    path = tmp_path / "data" / "train.jsonl"
    path.parent.mkdir()
    write_rows(path, "x")
    files = {"train_file": [str(path)]} if kind == "files" else {}

    def labels():
        table, _, _ = Buffers(arguments(path.parent, streaming=1, **files), ("text", "labels")).read(0)
        return list(table.columns["labels"])

    assert labels() == ["x"]
    replace(path, lambda path: write_rows(path, "y"))
    assert labels() == ["y"]
