"""The process that a task's script runs in, and standard input as a data file."""

import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from launchers import CLASSIFY

from samerun.cli import with_standard_input
from samerun.errors import InputError
from samerun.parsing import SpaceSeparated


@dataclass
class Files:
    train_file: str | None = None
    test_file: str | None = None


def read(monkeypatch, content, *files):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content.encode())))
    return with_standard_input(Files(*files), ["train_file", "test_file"])


@pytest.mark.parametrize(
    ("content", "ending"), [('\ufeff {"text": "a"}\n', ".jsonl"), ("[]", ".json"), ("text\na\n", ".csv")]
)
def test_standard_input_becomes_a_file_of_its_kind(monkeypatch, content, ending):
    for name in ("-", "/dev/stdin", SpaceSeparated(["a.csv", "-"])):
        found = read(monkeypatch, content, "train.csv", name)
        path = Path(found.test_file[1] if isinstance(name, tuple) else found.test_file)
        assert (found.train_file, path.suffix, path.read_bytes()) == ("train.csv", ending, content.encode())
    assert read(monkeypatch, content, "train.csv") == Files("train.csv")


def test_what_cannot_share_it_is_refused(monkeypatch):
    for files in [("-", "/dev/stdin"), (SpaceSeparated(["-", "-"]),)]:
        with pytest.raises(InputError, match=r"--train_file and --.* are standard input; only one can be"):
            read(monkeypatch, "", *files)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--test_file -: only one process gets standard input"):
        read(monkeypatch, "", None, "-")


def test_the_listening_to_signals_ends_before_the_interpreter_is_torn_down():
    """Python 3.13 waits for ever for a thread that is still to be joined then."""
    script = "from samerun import cli; cli._exit_stack.callback(print, 'closed')"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=CLASSIFY.parent, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "closed\n"


def test_help_and_wrong_arguments_answer_before_torch_is_imported():
    for argv in (["--help"], ["--lerning_rate", "1"]):
        script = (
            f"import runpy, sys; sys.argv[1:] = {argv}\n"
            f"try: runpy.run_path({str(CLASSIFY)!r}, run_name='__main__')\n"
            "finally: assert not {'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)"
        )
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (ended.returncode, "AssertionError" in ended.stderr) == (0 if "--help" in argv else 2, False)


def test_an_import_without_memory_is_explained(tmp_path):
    # A file instead of a limit of memory, which libraries meet at another place in every version.
    (tmp_path / "torch.py").write_text(
        'raise ImportError("libtorch.so: failed to map segment from shared object")'
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(CLASSIFY), "--train_file", "a.csv", "--output_dir", "a"]
    done = subprocess.run(
        [*command, "--model_name_or_path", "b"], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(
        "error: out of memory while libraries are loaded (libtorch.so: failed to map"
    )
    assert "ulimit -v" in done.stderr
