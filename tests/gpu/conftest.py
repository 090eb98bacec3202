"""Tests that need a GPU (`python -m pytest tests/gpu`); skipped without one."""

from __future__ import annotations

import functools

import pytest
import torch


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
