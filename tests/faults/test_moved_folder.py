"""The folder of a run is moved, or removed, while it runs: the run ends and says so, and writes nothing into
another one."""

import shutil

import pytest
from launchers import python, torchrun, training
from running import running

pytestmark = pytest.mark.slow

ENDLESS = {"max_steps": 100_000, "warmup_steps": 0, "save_steps": 50, "eval_strategy": "no",
           "eval_steps": None, "global_batch_size": 8, "metric_for_best_model": None}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "vanish", "code"),
    [
        (torchrun(2), lambda folder: (folder.rename(folder.with_name("moved")), folder.mkdir()), 1),
        (python(), shutil.rmtree, 3),
    ],
    ids=["replaced", "removed"],
)
def test_a_folder_that_goes_away_ends_the_run(command, vanish, code, home, tmp_path):
    folder = tmp_path / "run"
    with running() as start:
        job = start(home, [*command, *training(folder, **ENDLESS)], folder)
        vanish(folder)
        assert job.wait() == code
        said = job.text()
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert f"--output_dir {folder} was moved or removed while the run was writing to it" in line
    assert "Traceback (most recent call last)" not in said.partition("error: ")[0]
    assert not folder.exists() or list(folder.iterdir()) == []
