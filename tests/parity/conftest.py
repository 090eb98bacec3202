"""The fixture that reads runs to compare them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from samerun.tools.moving.outcome import Outcome, read_outcome


@pytest.fixture(scope="session")
def outcome(home, launched) -> Callable[[str], Outcome]:
    """A function (name of a job) -> `Outcome`."""
    return functools.cache(lambda name: read_outcome(launched(name).folder, home / "observed"))
