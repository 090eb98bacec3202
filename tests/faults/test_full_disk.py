"""A disk that runs full: one message, what was whole stays; with room again the run ends with the bytes of one that had it."""

import functools
import os
import shutil
import subprocess

import pytest
from launchers import python, run, torchrun, training
from soaking.comparison import differences

from finetune.checkpoints.checkpoint import damage, list_checkpoints

SETTINGS = {"model": "bert_dropout", "max_steps": 12, "save_total_limit": 5}
# Its own mounts, in a user namespace of its own where one is not root.
ALONE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


def may_mount(folder):
    command = [*ALONE, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


LAUNCHERS = {"python": python, "torchrun": lambda: torchrun(2)}


@pytest.fixture(scope="module")
def wholes(home, tmp_path_factory):
    """A function from a launcher's name to the folder of the run that had room."""

    @functools.cache
    def start(name):
        folder = tmp_path_factory.mktemp("whole") / name
        run([*LAUNCHERS[name](), *training(folder, **SETTINGS)], home).check()
        return folder

    return start


@pytest.mark.slow
@pytest.mark.xdist_group("full disk")
@pytest.mark.parametrize(
    ("launcher", "kilobytes", "code", "message", "steps"),
    [
        ("torchrun", 1100, 1, "could not be written (the disk is full: a checkpoint takes", ["step_2", "step_4"]),
        ("python", 100, 3, "the disk is full (", []),  # not even the first model has room
    ],
    ids=["torchrun", "export"],
)
def test_a_full_disk_ends_the_run_and_harms_nothing(launcher, kilobytes, code, message, steps, home, wholes, tmp_path):
    disk, kept, command = tmp_path / "disk", tmp_path / "kept", LAUNCHERS[launcher]
    disk.mkdir()
    if not may_mount(disk):
        pytest.skip("a small disk needs mounts, which are not allowed here")
    script = f'mount -t tmpfs -o size={kilobytes}k tmpfs {disk} && "$@"; code=$?; cp -a {disk} {kept}; exit $code'
    finished = run([*ALONE, "bash", "-c", script, "bash", *command(), *training(disk, **SETTINGS)], home)
    assert finished.code == code, finished.err
    (line,) = [line for line in finished.err.splitlines() if line.startswith("error")]
    assert message in line
    assert "--resume_from_checkpoint auto" in line
    assert 'classify.py", line' not in finished.err
    found = list_checkpoints(kept / "checkpoints")
    assert [path.name for path in found] == steps
    assert [damage(path) for path in found] == [None] * len(steps)
    run([*command(), *training(kept, **SETTINGS), "--resume_from_checkpoint", "auto"], home).check()
    assert differences(wholes(launcher), kept) == []
