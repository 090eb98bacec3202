"""kill -9 while a checkpoint is uploaded; then the disk is lost. The mirror always has a whole run to go on
from, and the end has the bytes of the run that was never killed."""

import random
import shutil
import time

import pytest
import slow_mirror_job
import vector_task
from launchers import as_words, forked, machines, python, run, run_together
from run_folders import read_json

from samerun.files import file_record
from samerun.tools.soak import differences

pytestmark = pytest.mark.slow

KILLS = 4
UPLOAD_SECONDS = 1.0  # about what one takes
JOB = vector_task.JOB | {"eval_steps": 6, "save_steps": 4}


def command(folder, steps, mirror=None):
    words = as_words(**JOB | {"max_steps": steps}, output_dir=folder, mirror_to=mirror and mirror.as_uri())
    return [*python(), slow_mirror_job.__file__, "--do_train", "--do_predict", *words]


def newest_whole(mirror):
    """The number of the newest complete snapshot, all of whose files are as its manifest says; 0 for none."""
    complete = sorted(path.parent for path in mirror.glob("*_step_*/manifest.json") if is_json(path))
    if not complete:
        return 0
    for name, record in read_json(complete[-1] / "manifest.json")["files"].items():
        assert file_record(complete[-1] / name) == record, (complete[-1], name)
    return int(complete[-1].name.split("_")[0])


def is_json(path):
    try:
        read_json(path)
    except ValueError:
        return False
    return True


def test_after_kills_during_uploads_the_mirror_always_resumes(start, home, tmp_path):
    steps, chance, hits = 8 * KILLS, random.Random(0), 0
    mirror, folder = tmp_path / "mirror", tmp_path / "run"
    run(command(tmp_path / "straight", steps), home).check()
    resumed = [*command(folder, steps, mirror), "--resume_from_checkpoint", "auto"]

    def uploads():
        return list(folder.glob("checkpoints/.step_*.mirror_*.unfinished"))

    for _ in range(KILLS):
        before = newest_whole(mirror)
        shutil.rmtree(folder, ignore_errors=True)
        job = start(forked(resumed), None)
        while job.process.poll() is None and not uploads():
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 2 * UPLOAD_SECONDS))
        job.process.kill()  # the fork ends with it
        job.process.wait()
        time.sleep(0.2)
        hits += bool(uploads())
        assert ("was fetched from the mirror" in job.text()) == (before > 0), job.text()
        assert newest_whole(mirror) >= before
    assert hits > 0
    shutil.rmtree(folder)
    run(resumed, home).check()
    assert differences(tmp_path / "straight", folder) == []
    newest = max(mirror.glob("*_step_*"), key=lambda path: int(path.name.split("_")[0]))
    assert differences(tmp_path / "straight", newest) == []
    assert len(list(mirror.glob("*_step_*"))) == 2  # nothing of half an upload is left


def test_two_machines_without_a_shared_disk_go_on_from_the_mirror(home, tmp_path):
    """Rank 0 fetches, and sends the checkpoint to the other machine as if it had been on its disk."""

    def train(steps, *folders):
        words = as_words(**JOB | {"max_steps": steps}, mirror_to=(tmp_path / "mirror").as_uri())
        script = [vector_task.__file__, "--do_train", *words, "--resume_from_checkpoint", "auto"]
        launchers = machines("multi_node_ddp.yaml", 2, 2)
        each = [
            [*launcher, *script, "--output_dir", str(tmp_path / folder)]
            for launcher, folder in zip(launchers, folders, strict=True)
        ]
        first, second = run_together(each, home)
        second.check()
        return first.check().out

    train(6, "a", "b")
    shutil.copytree(tmp_path / "a", tmp_path / "stayed")
    shutil.copytree(tmp_path / "mirror", tmp_path / "mirror then")
    train(9, "stayed", "b")
    shutil.rmtree(tmp_path / "mirror")
    (tmp_path / "mirror then").rename(tmp_path / "mirror")
    shutil.rmtree(tmp_path / "a")
    assert not (tmp_path / "b").exists()  # results are on rank 0's machine only
    assert "note           step 6 was fetched from the mirror file:///" in train(9, "a", "b")
    assert differences(tmp_path / "stayed", tmp_path / "a") == []
