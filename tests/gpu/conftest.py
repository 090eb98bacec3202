"""Tests that need a GPU (`python -m pytest tests/gpu`); skipped without one."""

import functools

import pytest
import torch
from gpu_job import Runs


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="torch sees no GPU here")
        for item in items:
            if "tests/gpu/" in item.path.as_posix():
                item.add_marker(skip)


@pytest.fixture
def start_gpu_run(start_run):
    """Like `start_run`, on one GPU."""
    return functools.partial(start_run, use_cpu=False)


@pytest.fixture
def never_waiting():
    """A function after whose call torch raises an error if the host waits for the GPU."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="session")
def runs(tmp_path_factory, worker_id):
    """The runs that all test processes share."""
    base = tmp_path_factory.getbasetemp()
    home = (base if worker_id == "master" else base.parent) / "gpu"
    home.mkdir(exist_ok=True)
    return Runs(home)
