"""Fixtures that several test files share. No test touches a hub, the user's caches or another test's environment.

Of real launchers there is one folder and one run of each job for all tests: a launch costs seconds, and proves several things.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read by the Hugging Face libraries when they are imported

import hypothesis
import launchers
import pytest
import title_job
from launchers import JOBS, Launched

from finetune.text.arguments import TextArguments

# The first example of a test may import for half a second, and a machine may be busy: no test looks at the clock.
hypothesis.settings.register_profile("without a clock", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("without a clock")

# A suite that is started with nohup ignores SIGHUP, and so would the jobs that it starts: one of them would never end.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "DS_ACCELERATOR",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps tests that read the same runs in one of the processes that pytest-xdist starts, so that each run is made once."""
    for item in items:
        asked, wants = getattr(item, "callspec", None), set(item.fixturenames)
        of_titles = asked is not None and any(text in asked.id for text in ("titles", "titlegen"))
        of_either = {"launched", "outcome", "finished_run"} & wants  # test_parity asks for titles' runs by name
        if "pair" in wants:
            item.add_marker(pytest.mark.xdist_group("two machines"))
        elif (of_titles and of_either) or (not of_either and {"titled", "title_table", "title_tokens"} & wants):
            item.add_marker(pytest.mark.xdist_group("runs of titlegen.py"))
        elif of_either:
            item.add_marker(pytest.mark.xdist_group("runs of classify.py"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Rows that are read, tokens and vocabularies are kept in a folder of the tests."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def arguments():
    """Makes the arguments that text tasks share: the defaults but for what is given."""

    def make(**given):
        return TextArguments(**{"output_dir": "runs/a", "report_to": ("none",), **given})

    return make


@pytest.fixture
def environment(monkeypatch):
    """The environment of a plain shell; what code sets in it is undone. Use like a dict."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("ACCELERATE_")
    }
    for name in set(os.environ) - set(clean):
        monkeypatch.delenv(name)
    before = dict(os.environ)
    yield os.environ
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def start_run(environment):
    """Starts the real thing with one process on the CPU: (batch shape, precision) -> `processes.Run`."""
    from accelerate.state import AcceleratorState, GradientState

    from finetune.launching.launch import Launch
    from finetune.launching.processes import start

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    def begin(batch=None, precision="no"):
        reset()
        launch = Launch(
            launcher="python", rank=0, local_rank=0, world_size=1, local_world_size=1, use_cpu=True, backend="gloo",
            precision=precision, timeout_seconds=60, deepspeed_file=None, deepspeed_config=None, max_grad_norm=1.0,
        )  # fmt: skip
        return start(launch, batch)

    yield begin
    reset()


@pytest.fixture
def token_cache(tmp_path, monkeypatch):
    """An empty folder in place of the user's cache of datasets."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder))
    return folder


TEXTS = ["sort the values of a matrix", "return the eigenvalues", "cut the text and return it", "a b c"]


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    """A tiny untrained BERT classifier of two labels with its tokenizer, as `save_pretrained` leaves them. Do not change it."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from finetune.text.vocabulary import train_tokenizer

    folder = tmp_path_factory.mktemp("bert")
    tokenizer = train_tokenizer(TEXTS, 100)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that commands are run in: data, configurations, and runs/ with a folder per job."""
    folder = tmp_path_factory.mktemp("launch")
    launchers.write_corpus(folder)
    launchers.write_partitioned(folder)
    launchers.observe_steps(folder)
    return folder


@pytest.fixture(scope="session")
def launched(home: Path) -> Callable[[str], Launched]:
    """A function from a job's name to what it left; started when first asked for, then kept. Fails if the job failed."""

    @functools.cache
    def launch(name: str) -> Launched:
        earlier = JOBS[name].resumes
        if earlier:
            launch(earlier[0]).check()
        return launchers.launch(name, home)

    return lambda name: launch(name).check()


@pytest.fixture(scope="session")
def title_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `home`, for titles."""
    folder = tmp_path_factory.mktemp("titles")
    title_job.write_corpus(folder)
    launchers.hide_gpus(folder)
    launchers.observe_steps(folder)
    return folder


@dataclass(frozen=True)
class TokenTable:
    """A run of scripts/parity.py: its end, its folder, and the folder that its command names and it must leave alone."""

    finished: launchers.Finished
    folder: Path
    never: Path


@pytest.fixture(scope="session")
def title_tokens(title_home: Path) -> TokenTable:
    """scripts/parity.py, run as a user does, on the job of titles in micro-batches of so many tokens, in two cells."""
    never, options = title_home / "runs" / "never_tokens", ["--cells", "zero2", "--steps", str(title_job.STEPS)]
    micro_batches = {"max_tokens_per_micro_batch": title_job.MICRO_BATCH_TOKENS, "adam_epsilon": title_job.TABLE_EPSILON}
    job = title_job.arguments(**micro_batches, output_dir=never)
    script = [str(launchers.SCRIPTS / "parity.py"), *options, "--output_dir", "tokens", str(title_job.SCRIPT)]
    finished = launchers.run([*launchers.python(), *script, "--from_scratch", *job], title_home, timeout=900)
    return TokenTable(finished, title_home / "tokens", never)


@pytest.fixture(scope="session")
def titled(title_home: Path) -> Callable[[str], Path]:
    """As `launched`, for the jobs of `title_job`; gives their folders."""

    @functools.cache
    def launch(name: str) -> Path:
        if title_job.JOBS[name].resumes:
            launch(title_job.JOBS[name].resumes[0])
        return title_job.launch(name, title_home)

    return launch


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many torch computes in."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
