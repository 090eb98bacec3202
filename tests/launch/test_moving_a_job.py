"""The example of docs/moving.md, every command of it: one job goes from a laptop to two machines and ends
where it would have.

What is put in place of the page's: the job itself (a small one), and what a machine without GPUs and a busy
port ask for.
"""

import functools
import shutil
import subprocess

import launchers
import pytest
import yaml
from in_process import check_weights
from launchers import REPOSITORY, run, run_together, training
from namespaces import machines, missing_for_machines
from pages import run_by

REASON = missing_for_machines()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

STEPS, EVERY = 8, 2
IN_PLACE = {
    "--num_processes 4": "--num_processes 2",  # one on each machine
    "29500": str(launchers.free_port()),
    "--num_gpus 2": f"--num_gpus 2 --master_port {launchers.free_port()}",
}


def commands():
    """The block's lines without comments: one process, two GPUs, DeepSpeed, machine 0, machine 1."""
    return run_by("docs/moving.md", "tests/launch/test_moving_a_job.py")


def ready(line, config, on_two_machines=False):
    """A command as it is run here, in the repository."""
    assert "--config job.yaml" in line
    for theirs, ours in IN_PLACE.items():
        line = line.replace(theirs, ours)
    line = line.replace("job.yaml", str(config))
    if line.startswith("accelerate launch") and "--main_process_port" not in line:
        line = line.replace("--num_processes", f"--main_process_port {launchers.free_port()} --num_processes")
    tool, rest = line.split(" ", 1)
    program = launchers.python()[0] if tool == "python" else launchers._tool(tool)
    return [
        "bash",
        "-c",
        f"cd {REPOSITORY} && exec {program if on_two_machines else launchers.forked([program])[0]} {rest}",
    ]


def write_job(place, folder, name):
    """`place`/`name`.yaml: the common job, with its files in `folder`."""
    changed = {"max_steps": STEPS, "save_steps": EVERY, "save_total_limit": 9, "eval_steps": 4}
    job = training("", global_batch_size=14, **changed)[3:]
    job = job[job.index("--config_name") :]
    settings = {key.removeprefix("--"): value for key, value in zip(job[::2], job[1::2], strict=True)}
    settings |= {
        key: str(folder / settings[key])
        for key in ("config_name", "train_file", "validation_file", "test_file")
    }
    settings |= {
        "output_dir": str(folder / "runs" / name),
        "from_scratch": "true",
        "do_train": "true",
        "do_eval": "true",
    }
    del settings["test_file"]
    (place / f"{name}.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")


def keep_until(folder, step):
    """As if the command had been stopped after `step`."""
    for path in (folder / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)


@pytest.fixture
def pair(tmp_path):
    """A function that copies a folder for each of the two machines. The first one's is `site`, where both
    will see theirs."""

    def make(source):
        homes = [tmp_path / "alpha", tmp_path / "beta"]
        for folder in homes:
            shutil.copytree(
                source, folder, ignore=shutil.ignore_patterns("runs", "cache", "observed", "table")
            )
        (tmp_path / "site").symlink_to(homes[0])
        return homes

    return make


def on_two_machines(homes, lines):
    """The job of alpha/runs/job, in a folder that both machines see at the same place, each its own."""
    site = homes[0].parent / "site"
    site.unlink()
    site.mkdir()
    with machines(homes) as pair:
        both = []
        for machine, line in zip(pair, lines, strict=True):
            write_job(machine.home, site, "job")
            subprocess.run(machine.inside(["mount", "--bind", str(machine.home), str(site)]), check=True)
            both.append(machine.inside(ready(line, site / "job.yaml", on_two_machines=True)))
        for finished in run_together(both, homes[0]):
            finished.check()


def test_one_job_from_a_laptop_to_two_machines(home, pair):
    homes, (laptop, two_gpus, deepspeed, *two_machines) = pair(home), commands()
    alpha = homes[0]
    write_job(alpha, alpha.parent / "site", "job")
    start = functools.partial(run, home=alpha)
    for number, line in enumerate([laptop, two_gpus, deepspeed]):
        said = start(ready(line, alpha / "job.yaml")).check().out
        assert (
            number == 0
            or "resume         "
            f"{alpha.parent / 'site' / 'runs' / 'job' / 'checkpoints' / f'step_{number * EVERY}'}"
            in said
        )
        if number == 0:  # it went to the end: the job that never moved
            shutil.copytree(alpha / "runs" / "job", alpha / "runs" / "never_moved")
        keep_until(alpha / "runs" / "job", (number + 1) * EVERY)
    on_two_machines(homes, two_machines)
    last = f"checkpoints/step_{STEPS}/model.safetensors"
    check_weights(alpha / "runs" / "job" / last, alpha / "runs" / "never_moved" / last)
    assert not (homes[1] / "runs" / "job").exists()  # machine 0 writes
