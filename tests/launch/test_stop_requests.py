"""Requests to stop, as they reach a job under every launcher: whoever is asked, all stop at one step, which
is saved."""

import functools
import hashlib
import json
import os
import signal

import pytest
from launchers import accelerate, deepspeed, python, torchrun, training
from running import running

from samerun.checkpoint import damage, list_checkpoints

pytestmark = pytest.mark.slow

TERM, USR1, INT, KILL = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL
# Long enough for any machine to be asked in the middle of it.
ENDLESS = {"max_steps": 100_000, "warmup_steps": 0, "save_steps": 0, "eval_strategy": "no",
           "eval_steps": None, "global_batch_size": 8, "metric_for_best_model": None}  # fmt: skip
DS_FILE = {"deepspeed": "ds_configs/zero1.json"}


@pytest.fixture
def start(home):
    """Starts a command and waits until it has trained for some steps; kills what is left of it in the end."""
    with running() as begin:
        yield functools.partial(begin, home)


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


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
    "torchrun KILL": (lambda: torchrun(2), {}, launcher(KILL), -KILL, "the launcher is gone"),
    "torchrun rank 1 USR1": (lambda: torchrun(2), {}, rank(1, USR1), 1, "SIGUSR1"),
    "deepspeed TERM": (lambda: deepspeed(2), DS_FILE, launcher(TERM), -TERM, "the launcher is gone"),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_a_request_stops_every_process_at_one_step_which_is_saved(name, start, tmp_path):
    command, changed, ask, code, reason = ASKED[name]
    job = start([*command(), *training(tmp_path, **ENDLESS, **changed)], tmp_path)
    ask(job)
    ended = job.wait()
    print(f"{name}: exit code {ended}")
    assert code is None or ended == code, job.text()
    check_stopped(tmp_path, job.text(), reason, ENDLESS["max_steps"])


def check_stopped(folder, said, reason, steps):
    found = read_json(folder / "status.json")
    assert found["state"] == "stopped", said
    assert reason in found["reason"].split(", "), said  # a launcher may add the signal that it passes on
    (path,) = list_checkpoints(folder / "checkpoints")
    assert (path.name, damage(path)) == (f"step_{found['step']}", None)
    last = json.loads((folder / "history.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["step"] == found["step"] < steps
    (line,) = [line for line in said.splitlines() if line.startswith("stopped on request")]
    assert f"step {found['step']} of {steps} is saved in {path}; the same command with" in line
    assert 'classify.py", line' not in said  # launchers show how they ended, the script does not


def contents(folder):
    """A hash per file of what two equal runs have in common: clocks, sizes of this machine and the lock are
    left out."""
    files = [
        *folder.glob("best/*"),
        *folder.glob("checkpoints/step_*/*.safetensors"),
        folder / "history.jsonl",
    ]
    files.append(folder / "predictions.jsonl")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_run_that_was_stopped_ends_with_the_bytes_of_one_that_was_not(
    start, home, tmp_path, script, monkeypatch
):
    settings = {"max_steps": 60, "eval_steps": 20, "save_steps": 20,
                "global_batch_size": 7,
                "early_stopping_patience": 9, "per_device_train_batch_size": 3,
                "dataloader_num_workers": 1}  # fmt: skip
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    job = start([*python(), *training(stopped, **settings)], stopped, steps=5)
    everyone(INT)(job)
    assert job.wait() == 75
    check_stopped(stopped, job.text(), "SIGINT", settings["max_steps"])
    monkeypatch.chdir(home)
    for folder, more in ((stopped, ["--resume_from_checkpoint", "auto"]), (whole, [])):
        ended = script("classify", [*training(folder, **settings)[1:], *more])
        assert ended.code == 0, ended.err
        assert ("resume  " in ended.out) == bool(more)
    assert read_json(stopped / "status.json")["state"] == "done"
    assert contents(stopped) == contents(whole)
