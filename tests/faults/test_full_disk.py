"""A disk that runs full: one message, what was whole stays; with room again the run ends with the bytes of
one that had it.

The last is shown of one process: that several go on exactly from a checkpoint is what test_exact_resume.py
shows.
"""

import os
import shutil
import subprocess

import pytest
from launchers import forked, python, run, torchrun, training

from samerun.checkpoint import damage, list_checkpoints
from samerun.tools.soak import differences

SETTINGS = {"max_steps": 12, "save_total_limit": 5}
# Its own mounts, in a user namespace of its own where one is not root.
ALONE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


def may_mount(folder):
    command = [*ALONE, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    return (
        shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "kilobytes", "code", "message", "steps"),
    [
        (python, 1100, 3, "could not be written (the disk is full: a checkpoint takes", ["step_2", "step_4"]),
        (lambda: torchrun(2), 100, 1, "the disk is full (", []),  # not even the first model has room
    ],
    ids=["checkpoint", "export under torchrun"],
)
def test_a_full_disk_ends_the_run_and_harms_nothing(
    launcher, kilobytes, code, message, steps, home, tmp_path, script, monkeypatch
):
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    if not may_mount(disk):
        pytest.skip("a small disk needs mounts, which are not allowed here")
    in_shell = (
        f'mount -t tmpfs -o size={kilobytes}k tmpfs {disk} && "$@"; code=$?; cp -a {disk} {kept}; exit $code'
    )
    command = [*forked(launcher()), *training(disk, **SETTINGS)]
    finished = run([*ALONE, "bash", "-c", in_shell, "bash", *command], home)
    assert finished.code == code, finished.err
    (line,) = [line for line in finished.err.splitlines() if line.startswith("error")]
    assert message in line
    assert "--resume_from_checkpoint auto" in line
    assert 'classify.py", line' not in finished.err
    found = list_checkpoints(kept / "checkpoints")
    assert [path.name for path in found] == steps
    assert [damage(path) for path in found] == [None] * len(steps)
    if launcher is not python:
        return
    monkeypatch.chdir(home)
    for folder, more in ((kept, ["--resume_from_checkpoint", "auto"]), (tmp_path / "whole", [])):
        script("classify", [*training(folder, **SETTINGS)[1:], *more]).check()
    assert differences(tmp_path / "whole", kept) == []
