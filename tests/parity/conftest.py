"""Fixtures for comparing runs of the text tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from samerun.tools.moving.outcome import Outcome, read_outcome


@pytest.fixture(scope="session")
def outcome(home, launched, title_home, titled) -> Callable[[str, str], Outcome]:
    """A function (task, name of a job) -> `Outcome`."""

    @functools.cache
    def read(task: str, name: str) -> Outcome:
        if task == "classify":
            return read_outcome(launched(name).folder, home / "observed")
        return read_outcome(titled(name), title_home / "observed")

    return read
