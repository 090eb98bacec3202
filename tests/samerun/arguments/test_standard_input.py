import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from samerun.arguments.parsing import SpaceSeparated
from samerun.arguments.standard_input import with_standard_input
from samerun.errors import InputError


@dataclass
class Files:
    train_file: str | None = None
    test_file: str | None = None


NAMES = ["train_file", "test_file"]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
@pytest.mark.parametrize(
    ("content", "ending"), [('\ufeff {"text": "a"}\n', ".jsonl"), ("[]", ".json"), ("text\na\n", ".csv")]
)
def test_standard_input_becomes_a_file_of_its_kind(monkeypatch, name, content, ending):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content.encode())))
    found = with_standard_input(Files("train.csv", name), NAMES)
    assert (found.train_file, Path(found.test_file).suffix) == ("train.csv", ending)
    assert Path(found.test_file).read_bytes() == content.encode()


def test_other_files_are_left_alone():
    assert with_standard_input(Files("train.csv"), NAMES) == Files("train.csv")


def test_what_cannot_share_it_is_refused(monkeypatch):
    with pytest.raises(InputError, match="--train_file and --test_file are standard input; only one can be"):
        with_standard_input(Files("-", "/dev/stdin"), NAMES)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--test_file -: only one process gets standard input"):
        with_standard_input(Files(test_file="-"), NAMES)


def test_it_may_be_one_of_several_files(monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"text\na\n")))
    found = with_standard_input(Files(SpaceSeparated(["a.csv", "-"])), NAMES).train_file
    assert (found[0], Path(found[1]).name) == ("a.csv", "rows.csv")
    with pytest.raises(InputError, match="--train_file and --train_file are standard input"):
        with_standard_input(Files(SpaceSeparated(["-", "-"])), NAMES)
