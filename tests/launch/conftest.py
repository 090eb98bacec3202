"""One folder and one run of each job for all tests of real launchers: a launch costs seconds, and proves several things."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import launchers
import pytest
from launchers import JOBS, Launched


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that commands are run in: data, configurations, and runs/ with a folder per job."""
    launchers.remove_stale_locks()
    folder = tmp_path_factory.mktemp("launch")
    launchers.write_corpus(folder)
    launchers.write_partitioned(folder)
    return folder


@pytest.fixture(scope="session")
def launched(home: Path) -> Callable[[str], Launched]:
    """A function from a job's name to what it left; started when first asked for, then kept. Fails if the job failed."""

    @functools.cache
    def launch(name: str) -> Launched:
        earlier = JOBS[name].goes_on_from
        if earlier:
            launch(earlier[0]).check()
        return launchers.launch(name, home)

    return lambda name: launch(name).check()
