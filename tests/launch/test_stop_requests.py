"""Requests to stop, under every launcher: whoever is asked, all stop at one step, which is saved."""

import os
import signal

import pytest
from launchers import accelerate, deepspeed, python, torchrun, training
from run_folders import read_json
from running import ENDLESS

from samerun.checkpoint import damage, list_checkpoints
from samerun.reports.tracker import read_history
from samerun.tools.soak import differences

pytestmark = pytest.mark.slow

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
DS_FILE = {"deepspeed": "ds_configs/zero1.json"}


def launcher(number):
    return lambda job: job.process.send_signal(number)


def rank(place, number):
    return lambda job: job.worker(place).send_signal(number)


def everyone(number):
    """What a terminal does with Ctrl-C."""
    return lambda job: os.killpg(job.process.pid, number)


ASKED = {
    "accelerate one Ctrl-C": (lambda: accelerate("cpu.yaml", 1), {}, everyone(INT), None, "SIGINT"),
    "torchrun TERM": (lambda: torchrun(2), {"dataloader_num_workers": 1}, launcher(TERM), 1, "SIGTERM"),
    "torchrun rank 1 USR1": (lambda: torchrun(2), {}, rank(1, USR1), 1, "SIGUSR1"),
    "deepspeed TERM": (lambda: deepspeed(2), DS_FILE, launcher(TERM), -TERM, "the launcher is gone"),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_a_request_stops_every_process_at_one_step_which_is_saved(name, start, tmp_path):
    command, changed, ask, code, reason = ASKED[name]
    job = start([*command(), *training(tmp_path, **ENDLESS, **changed)], tmp_path)
    ask(job)
    ended = job.wait()
    assert code is None or ended == code, job.text()
    check_stopped(tmp_path, job.text(), reason, ENDLESS["max_steps"])


def check_stopped(folder, said, reason, steps):
    found = read_json(folder / "status.json")
    assert found["state"] == "stopped", said
    assert reason in found["reason"].split(", "), said  # a launcher may add the signal that it passes on
    (path,) = list_checkpoints(folder / "checkpoints")
    assert (path.name, damage(path)) == (f"step_{found['step']}", None)
    assert read_history(folder)[-1]["step"] == found["step"] < steps
    (line,) = [line for line in said.splitlines() if line.startswith("stopped on request")]
    assert f"step {found['step']} of {steps} is saved in {path}; the same command with" in line
    assert 'classify.py", line' not in said  # launchers show how they ended, the script does not


def test_a_run_that_was_stopped_ends_with_the_bytes_of_one_that_was_not(
    start, home, tmp_path, script, monkeypatch
):
    settings = {
        "max_steps": 60, "eval_steps": 20, "save_steps": 20, "early_stopping_patience": 9,
        "global_batch_size": 7, "per_device_train_batch_size": 3, "dataloader_num_workers": 1,
    }  # fmt: skip
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    job = start([*python(), *training(stopped, **settings)], stopped, steps=5)
    everyone(INT)(job)
    assert job.wait() == 75
    check_stopped(stopped, job.text(), "SIGINT", settings["max_steps"])
    monkeypatch.chdir(home)
    for folder, more in ((stopped, ["--resume_from_checkpoint", "auto"]), (whole, [])):
        ended = script("classify", [*training(folder, **settings)[1:], *more]).check()
        assert ("resume  " in ended.out) == bool(more)
    assert read_json(stopped / "status.json")["state"] == "done"
    assert differences(whole, stopped) == []
