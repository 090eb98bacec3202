"""Fixtures for comparing runs of the text tasks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import launchers
import pytest
import title_job

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


@pytest.fixture(scope="session")
def title_table(title_home: Path) -> dict:
    """The parity.json of `samerun parity` for the title job, with a model that has dropout."""
    options = ["--setups", "fsdp", "--steps", str(title_job.STEPS), "--output_dir", "table"]
    job = title_job.arguments(per_device_train_batch_size=15, output_dir=title_home / "runs" / "never")
    command = [*launchers.tool("parity"), *options, str(title_job.SCRIPT), "--from_scratch", *job]
    launchers.run(command, title_home, timeout=1800).check()
    return json.loads((title_home / "table" / "parity.json").read_text(encoding="utf-8"))
