"""The folder of a run is moved or removed: the run ends, says so, and writes nothing into another one."""

import shutil

import pytest
from launchers import forked, python, torchrun, training
from running import ENDLESS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("command", "vanish", "code"),
    [
        (torchrun(2), lambda folder: (folder.rename(folder.with_name("moved")), folder.mkdir()), 1),
        (python(), shutil.rmtree, 3),
    ],
    ids=["replaced", "removed"],
)
def test_a_folder_that_goes_away_ends_the_run(command, vanish, code, start, tmp_path):
    folder = tmp_path / "run"
    job = start([*forked(command), *training(folder, **ENDLESS | {"save_steps": 50})], folder)
    vanish(folder)
    assert job.wait() == code
    said = job.text()
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert f"--output_dir {folder} was moved or removed while the run was writing to it" in line
    assert "Traceback (most recent call last)" not in said.partition("error: ")[0]
    assert not folder.exists() or list(folder.iterdir()) == []
