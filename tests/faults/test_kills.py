"""kill -9 at random moments, and the bytes of a run that was never killed; for longer: `samerun soak`."""

import json
import shutil
import signal
import sys
from functools import partial

import launchers
import psutil
import pytest
from launchers import tool, training
from run_folders import read_json

from samerun.task_scripts import read_command, run_tool
from samerun.tools import soak as soak_tool
from samerun.tools.soak import differences

pytestmark = pytest.mark.slow

# Dropout, accumulation, evaluations and checkpoints that do not come together, an end in the midst of an
# epoch.
SETTINGS = {
    "per_device_train_batch_size": 4, "global_batch_size": 32, "max_steps": 8, "save_steps": 2,
    "eval_steps": 3, "early_stopping_patience": 3,
}  # fmt: skip


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(home, tmp_path):
    words = [*tool("soak"), "--output_dir", str(tmp_path / "soak"), "--kills", "2"]
    launchers.run([*words, *training(tmp_path / "never", **SETTINGS)], home, real=True).check()
    report = read_json(tmp_path / "soak" / "soak.json")
    assert (report["kills"], report["wrong"]) == (2, [])
    # By the clock, and at calls that flush or rename; the machine's pace decides.
    assert sum(report["where"].values()) == 2


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


def test_a_run_that_something_else_kills_is_a_problem(tmp_path, capsys):
    """As the kernel does without memory. It may be the run that the test lets end."""
    job = "import os, sys\nif 'straight' not in sys.argv[2]: os.kill(os.getpid(), 9)"
    (tmp_path / "job.py").write_text(job)
    words = ["--kills", "1", "--output_dir", str(tmp_path / "soak"), str(tmp_path / "job.py")]
    assert soak_tool.main(words) == 1
    assert "run_0: ended with exit code -9 after 1 kill(s)" in capsys.readouterr().out


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

    def last_byte(data):
        return data[:-1] + b"\1"

    for name, spoil, message in [
        ("best/model.safetensors", last_byte, "best/model.safetensors differs"),
        ("checkpoints/step_6/optimizer.safetensors", last_byte, "optimizer.safetensors differs"),
        ("history.jsonl", lambda data: data + data.splitlines(keepends=True)[-1], "history.jsonl differs"),
        ("predictions.jsonl", None, "predictions.jsonl is missing"),
        ("metrics.json", lambda data: data.replace(b'_steps": 6', b'_steps": 7'), "train_steps 6 and 7"),
    ]:
        other = shutil.copytree(straight, tmp_path / name.replace("/", "_"))
        content = (other / name).read_bytes()
        (other / name).unlink()
        if spoil is not None:
            (other / name).write_bytes(spoil(content))
        (found,) = differences(straight, other)
        assert message in found


def test_a_baseline_that_one_run_alone_had_time_for_is_no_difference(tmp_path):
    runs = [tmp_path / name for name in ("short", "long", "other")]
    scores = {}, {"eval_baseline_f1": 0.5}, {"eval_baseline_f1": 0.6}
    for folder, baseline in zip(runs, scores, strict=True):
        folder.mkdir()
        (folder / "metrics.json").write_text(json.dumps({"eval_f1": 0.7, **baseline}))
    short, long, other = runs
    assert differences(short, long) == differences(long, short) == []
    assert differences(long, other) == ["metrics.json: eval_baseline_f1 0.5 and 0.6"]
