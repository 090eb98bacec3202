"""A run's folder is removed while it runs: the run ends with its next checkpoint, and makes no new one."""

import shutil

import pytest
from launchers import forked, python, training
from running import ENDLESS

pytestmark = pytest.mark.slow


def test_a_folder_that_goes_away_ends_the_run(start, tmp_path):
    folder = tmp_path / "run"
    job = start([*forked(python()), *training(folder, **ENDLESS | {"save_steps": 50})], folder)
    shutil.rmtree(folder)
    assert job.wait() == 3
    said = job.text()
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert f"error: checkpoint {folder / 'checkpoints' / 'step_'}" in line
    assert f"could not be written ([Errno 2] No such file or directory: '{folder / 'checkpoints'}')" in line
    assert "Traceback (most recent call last)" not in said.partition("error: ")[0]
    assert not folder.exists()
