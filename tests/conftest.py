"""Shared fixtures. Tests do not use a hub, the user's caches or another test's environment.

All tests share one folder and one run of each launched job, because a launch takes seconds.
"""

import atexit
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"  # read by the Hugging Face libraries when they are imported
# evaluate copies a metric's code there; two test processes must not make the folder at the same time.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modules_")
# Runs in this process and launched ones must add in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import forks
import hypothesis
import launchers
import pytest
import running
import title_job
from in_process import script  # noqa: F401 - a fixture
from launchers import Launched
from refusals import refusal  # noqa: F401 - a fixture
from title_job import ALL_JOBS

from samerun.run_folder import status
from samerun.text.arguments import TextArguments

atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

# No deadlines: the first example of a test may import for half a second, and the machine may be busy.
hypothesis.settings.register_profile("without a clock", hypothesis.settings(), deadline=None, max_examples=50)
hypothesis.settings.load_profile("without a clock")

# Under nohup the suite and its jobs would ignore SIGHUP, and a test that sends it would hang.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs from all tests but those of tests/gpu: before CUDA counts them, which it does once."""
    if not any("gpu" in Path(name).parts for name in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.disable()  # until the tests' modules are imported, which leaves no garbage


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups tests that use the same runs in one process of pytest-xdist, so that each run is made once."""
    for item in items:
        fixtures = set(item.fixturenames)
        if "pair" in fixtures:
            item.add_marker(pytest.mark.xdist_group("two machines"))
        elif "launched" in fixtures and "title" in item.nodeid:
            item.add_marker(pytest.mark.xdist_group("runs of titlegen.py"))
        elif {"launched", "finished_run"} & fixtures:
            item.add_marker(pytest.mark.xdist_group("runs of classify.py"))


def pytest_collection_finish() -> None:
    """Keeps what is imported by now out of garbage collections, which took a third of a second each."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Caches rows, tokens and vocabularies in a temporary folder."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _no_open_run(monkeypatch):
    """Forgets the runs of other tests, whose folders may be gone."""
    monkeypatch.setattr(status, "path", None)


@pytest.fixture
def arguments():
    """A function that makes the text tasks' shared arguments with changes of the defaults."""

    def make(**changes):
        return TextArguments(**{"output_dir": "runs/a", "report_to": ("none",), **changes})

    return make


@pytest.fixture
def environment():
    """`os.environ` without launcher variables; restored after the test."""
    with mock.patch.dict(os.environ):
        for name in set(os.environ) - set(launchers.without_launcher()):
            del os.environ[name]
        yield os.environ


@pytest.fixture
def start_run(environment):
    """A function (batch shape, precision, use_cpu) -> `runtime.Run` of one process."""
    from samerun.launch import Launch
    from samerun.runtime import forget_accelerator, start

    def begin(batch=None, precision="no", use_cpu=True):
        forget_accelerator()
        backend = "gloo" if use_cpu else "nccl"
        return start(Launch(use_cpu=use_cpu, backend=backend, precision=precision), batch)

    yield begin
    forget_accelerator()


@pytest.fixture
def token_cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder))
    return folder


TEXTS = ["sort the values of a matrix", "return the eigenvalues", "cut the text and return it", "a b c"]


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    """A folder with a tiny untrained BERT classifier of two labels and its tokenizer, not to be changed."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from samerun.text.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("bert")
    tokenizer = train_tokenizer(TEXTS, 100)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(bert_folder):
    """The tokenizer of `bert_folder`. Modules that need another one define it under this name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bert_folder)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of commands: data, configurations, and runs/ with a folder per job."""
    folder = tmp_path_factory.mktemp("launch")
    launchers.write_corpus(folder)
    title_job.write_corpus(folder)
    launchers.write_partitioned(folder)
    launchers.observe_steps(folder)
    return folder


@pytest.fixture(scope="session")
def launched(home: Path) -> Callable[[str], Launched]:
    """A function (job's name) -> `Launched`, which runs a job once. Fails if the job failed."""

    @functools.cache
    def launch(name: str) -> Launched:
        job = ALL_JOBS[name]
        if job.resumes:
            launch(job.resumes[0]).check()
        return launchers.launch(name, job, home)

    return lambda name: launch(name).check()


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., running.Job]]:
    """A function (command, folder, steps) that starts a command and waits until the run in `folder` has
    trained so many steps (see `running`). What is left of it is killed in the end."""
    with running.running() as begin:
        yield functools.partial(begin, home)


@pytest.fixture
def forked_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that are called in this process start Python and launchers with the libraries imported."""
    monkeypatch.setattr(sys, "executable", str(forks.commands() / "python"))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of torch threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
