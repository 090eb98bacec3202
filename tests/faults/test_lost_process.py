"""A process of a job dies or falls silent: the job ends, names the process, and leaves nobody behind."""

import signal

import pytest
from launchers import TIMEOUT, deepspeed, forked, torchrun, training
from run_folders import read_json
from running import ENDLESS, wait_for

from samerun.checkpoint import list_checkpoints
from samerun.reports.tracker import read_history

pytestmark = pytest.mark.slow

# --ddp_timeout: 10 is the least, and too little for the start of a job on a machine that is very busy.
LOST = ENDLESS | {"ddp_timeout": 20}
ZERO2 = {"deepspeed": "ds_configs/zero2.json"}

HANGS_IN_STEP_5 = """
import os, threading
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch.optim.lr_scheduler
from torch.optim import AdamW
steps, ended = 0, threading.Event()
step = AdamW.step
def counted(*given, **named):
    global steps
    steps += 1
    if steps == 5 and os.environ.get("RANK") == "1":
        ended.wait()
    return step(*given, **named)
AdamW.step = counted
"""


def test_a_process_that_stops_ends_the_job_and_is_named(start, tmp_path):
    job = start([*deepspeed(2), *training(tmp_path, **LOST, **ZERO2)], tmp_path)
    stopped, other = job.worker(0), job.worker(1)
    stopped.send_signal(signal.SIGSTOP)
    other.wait(TIMEOUT)
    # The launcher asks it to end, and kills it 30 seconds later if it cannot hear.
    stopped.send_signal(signal.SIGCONT)
    assert job.wait() != 0
    (line,) = [line for line in job.text().splitlines() if line.startswith("error on rank")]
    assert line.startswith("error on rank 1 of 2 (")
    assert "rank 0, which holds the rendezvous store" in line
    assert "no longer answers: killed, suspended, or cut off from the network" in line
    assert 'classify.py", line' not in job.text()


def test_a_process_that_hangs_ends_the_job_and_is_named(start, home, tmp_path):
    """Its heartbeat goes on, its main thread waits for something that never comes."""
    hang = tmp_path / "hang"
    hang.mkdir()
    (hang / "sitecustomize.py").write_text(HANGS_IN_STEP_5)
    path = f"{hang}:{home / 'no_gpu'}"
    quick = ["env", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3", f"PYTHONPATH={path}"]
    job = start([*quick, *forked(torchrun(2)), *training(tmp_path / "run", **LOST)], tmp_path / "run")
    assert job.wait() != 0
    (line,) = [line for line in job.text().splitlines() if line.startswith("error on rank 0")]
    assert "rank 1 (" in line
    assert "did not enter a collective that others wait in: it hangs, or computes for longer" in line
    assert read_json(tmp_path / "run" / "status.json")["state"] == "failed"


def test_a_process_that_is_killed_ends_the_job_at_once(start, tmp_path):
    job = start([*deepspeed(2), *training(tmp_path, **ENDLESS, **ZERO2)], tmp_path)
    job.worker(1).kill()
    assert job.wait() != 0
    said = job.text()
    assert "--local_rank=1" in next(line for line in said.splitlines() if "return code = -9" in line)
    assert read_json(tmp_path / "status.json")["state"] == "failed"


def test_torchruns_restart_goes_on_from_the_newest_checkpoint(start, tmp_path):
    """That two processes go on to the same bytes is what test_exact_resume.py shows."""
    settings = {"max_steps": 60, "eval_steps": 20, "save_steps": 10, "global_batch_size": 7}
    command = [*torchrun(2), "--max_restarts", "2"]
    job = start([*command, *training(tmp_path, **settings), "--overwrite_output_dir"], tmp_path)
    wait_for(lambda: bool(list_checkpoints(tmp_path / "checkpoints")), job)
    job.worker(1).kill()
    job.descendants = []  # the next ones are others
    assert job.wait() == 0, job.text()
    assert f"resume         {tmp_path / 'checkpoints'}" in job.text()
    assert [event["step"] for event in read_history(tmp_path) if "loss" in event] == list(range(1, 61))
    assert read_json(tmp_path / "status.json")["state"] == "done"
