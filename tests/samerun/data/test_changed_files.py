"""A file that is replaced by one of the same name, size and time of modification is read again."""

import os
import time
from types import SimpleNamespace

import datasets
import pytest
from PIL import Image

from samerun.data import cache
from samerun.data.cache import content_hash
from samerun.data.splits import read_split
from samerun.data.stream import Buffers
from samerun.images.data import from_table

COLUMNS = ("text", "labels")


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


def write_rows(path, label):
    path.write_text(f'{{"text": "a b", "labels": "{label}"}}\n')


def write_parquet(path, label):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    rows = {"image": [Image.new("L", (4, 4))], "label": [label]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)


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


def of_images(asked, path):
    given = {"encoding": "utf-8", "id_column": "id", "image_column": "image", "label_column": "label"}
    return list(from_table(SimpleNamespace(**given), "train", path, masks=False).labels)


def of_a_folder(asked, path):
    return list(read_split(asked(dataset_name=str(path.parent)), "train", COLUMNS).columns["labels"])


def of_streamed_files(asked, path):
    return list(Buffers(asked(train_file=str(path), streaming=1), COLUMNS).read(0)[0].columns["labels"])


def of_a_streamed_folder(asked, path):
    given = {"dataset_name": str(path.parent), "streaming": 1}
    return list(Buffers(asked(**given), COLUMNS).read(0)[0].columns["labels"])


@pytest.mark.parametrize("labels", [of_images, of_a_folder, of_streamed_files, of_a_streamed_folder])
def test_labels(labels, tmp_path, arguments):
    path, write = tmp_path / "data" / "train.jsonl", write_rows
    path.parent.mkdir()
    if labels is of_images:
        path, write = path.with_suffix(".parquet"), write_parquet
    write(path, "x")
    assert labels(arguments, path) == ["x"]
    replace(path, lambda path: write(path, "y"))
    assert labels(arguments, path) == ["y"]
