"""The process that a task's script runs in, and standard input as a data file."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from launchers import CLASSIFY

from samerun import cli, kernels
from samerun.cli import shows_traces, with_standard_input
from samerun.console import say
from samerun.data.files import read_rows
from samerun.errors import SHOWN_AS, InputError
from samerun.images.arguments import ImageArguments
from samerun.parsing import SpaceSeparated
from samerun.text.arguments import TextArguments


@dataclass
class Files:
    train_file: str | None = None
    test_file: str | None = None


@dataclass
class TextFiles(Files):
    encoding: str = "utf-8"
    text_column: str = "text"
    label_column: str = "labels"
    text_pair_column: str | None = None


def read(monkeypatch, content, *files, cls=Files, **more):
    content = content if isinstance(content, bytes) else content.encode()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    return with_standard_input(cls(*files, **more), ["train_file", "test_file"])


def texts(monkeypatch, content, **more):
    path = read(monkeypatch, content, None, "-", cls=TextFiles, **more).test_file
    column = more.get("text_column", "text")
    return [row[column] for _, row in read_rows(path, more.get("encoding", "utf-8"), [column], [column])[1]]


@pytest.mark.parametrize(
    ("content", "ending"), [('\ufeff {"text": "a"}\n', ".jsonl"), ("[]", ".json"), ("text\na\n", ".csv")]
)
def test_standard_input_becomes_a_file_of_its_kind(monkeypatch, content, ending):
    for name in ("-", "/dev/stdin", SpaceSeparated(["a.csv", "-"])):
        found = read(monkeypatch, content, "train.csv", name)
        path = Path(found.test_file[1] if isinstance(name, tuple) else found.test_file)
        assert (found.train_file, path.suffix, path.read_bytes()) == ("train.csv", ending, content.encode())
    assert read(monkeypatch, content, "train.csv") == Files("train.csv")


def test_lines_without_a_header_are_texts(monkeypatch):
    lines = '\ufeffwon, at last\r\n\n"Go" away\n'
    for column in ("text", "tokens"):
        assert texts(monkeypatch, lines, text_column=column) == ["won, at last", "", '"Go" away']
    assert texts(monkeypatch, "\u3000\n") == ["\u3000"]
    assert texts(monkeypatch, "caf\xe9\nb".encode("utf-16"), encoding="utf-16") == ["caf\xe9", "b"]
    for table in ("text\na\n", '"id","text"\n1,a\n', '{"text": "a"}', '[{"text": "a"}]'):
        assert texts(monkeypatch, table) == ["a"]
    # Rows to train on need labels, and images are no texts.
    for found in (read(monkeypatch, "a\n", "-", cls=TextFiles).train_file,
                  read(monkeypatch, "a\n", None, "-").test_file):  # fmt: skip
        assert Path(found).read_text() == "a\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "standard input: no rows: the file is empty"),
        (b"a\nb\xff\n", r"standard input: not UTF-8 at byte 3 \(0xff\), line 2"),
        ("Text,n\na,1\n", r"standard input:1: column 'text' not found; .*did you mean 'Text'"),
        ("note,labels\na,b\n", "standard input:1: column 'text' not found"),
        ('{"text": "a"}\n{', "standard input:2: an object over several lines"),
    ],
)
def test_messages_name_standard_input_instead_of_its_copy(monkeypatch, capsys, content, message):
    with pytest.raises(InputError, match=f"^{message}"):
        texts(monkeypatch, content)
    say(f"note           {list(SHOWN_AS)[-1]}: 1 row(s)")
    assert capsys.readouterr().out == "note           standard input: 1 row(s)\n"


def test_what_cannot_share_it_is_refused(monkeypatch):
    for files in [("-", "/dev/stdin"), (SpaceSeparated(["-", "-"]),)]:
        with pytest.raises(InputError, match=r"--train_file and --.* are standard input; only one can be"):
            read(monkeypatch, "", *files)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--test_file -: only one process gets standard input"):
        read(monkeypatch, "", None, "-")


def test_a_request_for_stack_traces_is_seen_before_arguments_are_read():
    for asked in ("a --log_level debug b", "--log-level=debug"):
        assert shows_traces(asked.split())
    assert not shows_traces(["--log_level", "info"])


def run(*command, **environment):
    own = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    own |= {"PYTHONPATH": str(CLASSIFY.parent)} | environment
    return subprocess.run([sys.executable, *command], env=own, capture_output=True, text=True)


def test_the_listening_to_signals_ends_before_the_interpreter_is_torn_down():
    """Python 3.13 waits for ever for a thread that is still to be joined then."""
    ended = run("-c", "from samerun import cli; cli._exit_stack.callback(print, 'closed')")
    assert (ended.returncode, ended.stdout) == (0, "closed\n")


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--lerning_rate=1", 2)])
def test_help_and_wrong_arguments_answer_before_torch_is_imported_also_without_a_console(argument, code):
    script = (
        f"import runpy, sys; sys.argv[1:] = [{argument!r}]\n"
        f"try: runpy.run_path({str(CLASSIFY)!r}, run_name='__main__')\n"
        "finally: assert not {'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)"
    )
    command = ["bash", "-c", '"$@" >&- 2>&-', "bash", sys.executable, "-c", script]
    assert subprocess.run(command, timeout=300, check=False).returncode == code  # 1 if it was imported


SHOW = """
import resource
from samerun import cli
cli.set_up_host()
blocks = bytearray(200_000_000)
del blocks
with open("/proc/self/statm") as pages:
    print(int(pages.read().split()[1]) * resource.getpagesize() > 200_000_000)
"""
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc and OpenMP of Linux")


@linux
def test_freed_memory_stays():
    assert run("-c", SHOW).stdout.strip() == "True"


@linux
@pytest.mark.parametrize(
    ("machine", "given", "spins", "timeout", "keeps"),
    [
        ("5 alone", {}, None, "6", True),
        ("50 alone", {}, "2000", "6", True),  # beside other programs threads sleep soon
        ("5 zen5", {}, "2000", "6", True),
        ("5 alone", {"LOCAL_WORLD_SIZE": "2"}, "2000", "6", True),
        ("50 alone", {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, None, "6", True),
        ("50 alone", {"GOMP_SPINCOUNT": "7", "MALLOC_TRIM_THRESHOLD_": "100000"}, "7", "6", False),
        ("50 alone", {"OMP_WAIT_POLICY": "active", "OPENBLAS_THREAD_TIMEOUT": "9"}, None, "9", True),
    ],
)
def test_of_malloc_and_openmp_only_what_the_user_did_not_set_is_set(
    machine, given, spins, timeout, keeps, monkeypatch
):
    """`machine`: percent of its CPUs that other programs use, and a reason to sleep soon."""
    percent, kind = machine.split()
    options = []
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(cli.psutil, "cpu_percent", lambda seconds: float(percent))
    monkeypatch.setattr(cli, "is_zen5", lambda: kind == "zen5")
    libc = SimpleNamespace(mallopt=lambda option, number: options.append(option))
    monkeypatch.setattr(cli.ctypes, "CDLL", lambda name: libc)
    cli.set_up_host()
    found = os.environ.get("GOMP_SPINCOUNT"), os.environ["OPENBLAS_THREAD_TIMEOUT"], bool(options)
    assert found == (spins, timeout, keeps)


@pytest.mark.parametrize("family", [None, 25, 26])
def test_the_family_of_the_cpu(family, monkeypatch):
    lines = "processor\t: 26\n" + (f"cpu family\t: {family}\nmodel\t\t: 2\n" if family else "")
    monkeypatch.setattr(kernels, "open", lambda *_, **__: io.StringIO(lines), raising=False)
    assert kernels.is_zen5() == (family == 26)


@pytest.mark.parametrize(
    ("group", "given", "kept"),
    [
        (TextArguments, {"LRU_CACHE_CAPACITY": "9"}, ("9", "64")),
        (ImageArguments, {}, (None, None)),  # all batches have one shape, large networks many layers
    ],
)
def test_few_kernels_are_kept_for_batches_of_ever_new_shapes(group, given, kept, monkeypatch):
    words = ["--train_file", "a.csv", "--output_dir", "b", "--model_name_or_path", "c"]
    monkeypatch.setattr(sys, "argv", ["task.py", *words])
    monkeypatch.setattr(os, "environ", given)
    for name in ("survive_a_lost_console", "set_up_host"):
        monkeypatch.setattr(cli, name, lambda: None)
    with contextlib.ExitStack() as listening:
        monkeypatch.setattr(cli, "_exit_stack", listening)
        cli.read_arguments(group, "")
    assert tuple(map(given.get, cli.KEPT_KERNELS)) == kept
