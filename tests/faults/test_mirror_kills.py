"""kill -9 while a checkpoint is uploaded; then the disk is lost. The mirror always has a whole run to go on
from, and the end has the bytes of the run that was never killed."""

import json
import random
import shutil
import signal
import subprocess
import tempfile
import time

import pytest
import slow_mirror_job
import vector_task
from launchers import as_words, environment, forked, machines, python, run, run_together

from samerun.files import file_record
from samerun.tools.soak import differences

pytestmark = pytest.mark.slow

KILLS = 4
UPLOAD_SECONDS = 1.0  # about what one takes
JOB = {
    "learning_rate": 1e-2, "global_batch_size": 15, "eval_strategy": "steps", "eval_steps": 6,
    "save_steps": 4, "logging_steps": 1, "report_to": "none",
}  # fmt: skip


def command(folder, steps, mirror=None):
    words = as_words(**JOB, max_steps=steps, output_dir=folder, mirror_to=mirror and mirror.as_uri())
    return [*python(), slow_mirror_job.__file__, "--do_train", "--do_predict", *words]


def newest_whole(mirror):
    """The number of the newest complete snapshot, all of whose files are as its manifest says; 0 for none."""
    complete = sorted(path.parent for path in mirror.glob("*_step_*/manifest.json") if is_json(path))
    if not complete:
        return 0
    manifest = json.loads((complete[-1] / "manifest.json").read_text())
    for name, record in manifest["files"].items():
        assert file_record(complete[-1] / name) == record, (complete[-1], name)
    return int(complete[-1].name.split("_")[0])


def is_json(path):
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def kill_while_it_uploads(home, arguments, folder, chance):
    """Returns (the output, whether an upload was under way)."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            forked(arguments), cwd=home, env=environment(home), stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
        uploads = folder / "checkpoints"
        while process.poll() is None and not list(uploads.glob(".step_*.mirror_*.unfinished")):
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 2 * UPLOAD_SECONDS))
        process.send_signal(signal.SIGKILL)  # the fork ends with it
        process.wait()
        time.sleep(0.2)
        output.seek(0)
        return output.read(), bool(list(uploads.glob(".step_*.mirror_*.unfinished")))


def soak(home, tmp_path, kills, seed=0):
    """Kills the job so many times. Returns how many kills hit an upload."""
    steps, chance, hits = 8 * kills, random.Random(seed), 0
    mirror, folder = tmp_path / "mirror", tmp_path / "run"
    run(command(tmp_path / "straight", steps), home).check()
    resumed = [*command(folder, steps, mirror), "--resume_from_checkpoint", "auto"]
    for _ in range(kills):
        before = newest_whole(mirror)
        shutil.rmtree(folder, ignore_errors=True)
        text, was_uploading = kill_while_it_uploads(home, resumed, folder, chance)
        assert ("was fetched from the mirror" in text) == (before > 0), text
        assert newest_whole(mirror) >= before
        hits += was_uploading
    shutil.rmtree(folder)
    run(resumed, home).check()
    assert differences(tmp_path / "straight", folder) == []
    newest = max(mirror.glob("*_step_*"), key=lambda path: int(path.name.split("_")[0]))
    assert differences(tmp_path / "straight", newest) == []
    assert len(list(mirror.glob("*_step_*"))) == 2  # nothing of half an upload is left
    return hits


def test_after_kills_during_uploads_the_mirror_always_resumes(home, tmp_path):
    assert soak(home, tmp_path, KILLS) > 0


def test_two_machines_without_a_shared_disk_go_on_from_the_mirror(home, tmp_path):
    """Rank 0 fetches, and sends the checkpoint to the other machine as if it had been on its disk."""

    def train(steps, *folders):
        words = as_words(**JOB, max_steps=steps, mirror_to=(tmp_path / "mirror").as_uri())
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
