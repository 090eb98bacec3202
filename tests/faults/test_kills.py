"""kill -9 at random moments, and the bytes of the run that was never killed. `samerun soak` does the same
for longer."""

import json
import shutil
import signal
import sys
from functools import partial

import launchers
import psutil
import pytest
from launchers import tool, training

from samerun.task_scripts import read_command, run_tool
from samerun.tools import soak as soak_tool
from samerun.tools.soak import differences

pytestmark = pytest.mark.slow

# Dropout, accumulation, evaluations and checkpoints that do not come together, an end in the midst of an
# epoch.
OF_A_RUN = {
    "per_device_train_batch_size": 4,
    "max_steps": 8,
    "save_steps": 2,
    "eval_steps": 3,
    "early_stopping_patience": 3,
}


def soak(home, folder, command, *options):
    words = [*tool("soak"), "--output_dir", str(folder), *options]
    finished = launchers.run([*words, *command], home, timeout=900, real=True).check()
    return finished, json.loads((folder / "soak.json").read_text(encoding="utf-8"))


def classify(folder):
    return training(folder, global_batch_size=32, **OF_A_RUN)


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(home, tmp_path):
    _, report = soak(home, tmp_path / "soak", classify(tmp_path / "never"), "--kills", "2")
    assert (report["kills"], report["wrong"]) == (2, [])
    assert sum(report["where"].values()) == 2
    print(report["where"])  # by the clock, and at calls that flush or rename; the machine's pace decides


@pytest.mark.parametrize("launch", [[], ["--launch", sys.executable]])
@pytest.mark.parametrize(("number", "raised"), [("SIGTERM", SystemExit), ("SIGINT", KeyboardInterrupt)])
def test_a_signal_ends_the_run_too(tmp_path, request, launch, number, raised):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    request.addfinalizer(partial(signal.signal, signal.SIGINT, before))
    # Not at once: Python ignores what a handler raises while `os.fork` returns.
    lines = ["time.sleep(0.3)", f"os.kill(os.getppid(), signal.{number})", "time.sleep(600)"]
    (tmp_path / "job.py").write_text("\n".join(["import os, signal, time", *lines]))
    children = psutil.Process().children()
    with pytest.raises(raised):
        soak_tool.main(["--output_dir", str(tmp_path / "soak"), *launch, str(tmp_path / "job.py")])
    assert psutil.Process().children() == children


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "mine").touch()
    words = ["--output_dir", str(tmp_path), str(launchers.CLASSIFY)]
    assert run_tool(soak_tool.main, words) == 2
    assert (tmp_path / "mine").exists()


def test_the_mirror_and_the_hub_are_left_alone(tmp_path):
    job = training(tmp_path, mirror_to="file:///mine", push_to_hub="true", hub_model_id="me/mine")
    options = soak_tool.read_options(job)
    found, _ = read_command(options.script, soak_tool.arguments_for(options, tmp_path / "a"))
    assert (found.output_dir, found.mirror_to, found.push_to_hub) == (str(tmp_path / "a"), None, False)


def test_what_a_kill_could_spoil_is_seen(launched, tmp_path):
    straight = launched("python").folder
    assert differences(straight, straight) == []
    for name, spoil, message in [
        ("best/model.safetensors", lambda data: data[:-1] + b"\1", "best/model.safetensors differs"),
        (
            "checkpoints/step_6/optimizer.safetensors",
            lambda data: data[:-1] + b"\1",
            "optimizer.safetensors differs",
        ),
        ("history.jsonl", lambda data: data + data.splitlines(keepends=True)[-1], "history.jsonl differs"),
        ("predictions.jsonl", None, "predictions.jsonl is missing"),
        (
            "metrics.json",
            lambda data: data.replace(b'"train_steps": 6', b'"train_steps": 7'),
            "train_steps 6 and 7",
        ),
    ]:
        other = tmp_path / name.replace("/", "_")
        shutil.copytree(straight, other)
        content = (other / name).read_bytes()
        (other / name).unlink()
        if spoil is not None:
            (other / name).write_bytes(spoil(content))
        found = differences(straight, other)
        assert len(found) == 1
        assert message in found[0]
