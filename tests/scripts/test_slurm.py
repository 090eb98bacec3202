"""scripts/slurm against an srun that starts tasks here, and a scontrol that keeps what it was asked."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import launchers
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SLURM = REPOSITORY / "scripts" / "slurm"
BATCH = ("one_node.sbatch", "many_nodes.sbatch")
# What Slurm's own documentation says of srun: variables per task, options up to the command, the highest exit
# code; a signal for the step goes to every task.
SRUN = """#!{python}
import json, os, signal, subprocess, sys
from pathlib import Path

first = next(i for i, w in enumerate(sys.argv[1:]) if w[0] != "-")
options = [word for word in sys.argv[1:] if word.startswith("--")][:first]
command = sys.argv[1 + len(options):]
Path(os.environ["SEEN"], "srun.json").write_text(json.dumps({{"options": options, "command": command}}))
nodes, tasks = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS"])
started = []
for task in range(tasks):
    place = {{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % (tasks // nodes))}}
    started.append(subprocess.Popen(command, env={{**os.environ, **place}}))
def forward(number, frame):
    for task in started:
        task.send_signal(number)
signal.signal(signal.SIGUSR1, forward)
signal.signal(signal.SIGTERM, forward)
Path(os.environ["SEEN"], "srun.pid").write_text(str(os.getpid()))
codes = [task.wait() for task in started]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
"show hostnames") if [ "$3" = "node[1-2]" ]; then printf 'node1\\nnode2\\n'; else echo "$3"; fi ;;
requeue*) echo "$2" >>"$SEEN/requeued" ;;
*) exit 1 ;;
esac
"""
STUB = """
import json, os, sys
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "SAMERUN_MACHINES", "OMP_NUM_THREADS")
says = {"arguments": sys.argv[2:], **{name: os.environ.get(name) for name in names}}
Path(os.environ["SEEN"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(says))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def cluster(tmp_path):
    """Runs a file of scripts/slurm as a job of two nodes; returns the finished process. `tmp_path` keeps what
    was seen."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "stub.py").write_text(STUB)

    def begin(file, *arguments, submitted=tmp_path, tasks=4, nodes=2, **environment):
        (submitted / "scripts").exists() or (submitted / "scripts").symlink_to(REPOSITORY / "scripts")
        clean = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS" and not k.startswith("SLURM")}
        slurm = {
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[1-2]" if nodes == 2 else "localhost",
            "SLURM_NNODES": str(nodes),
            "SLURM_NTASKS": str(tasks),
            "SLURM_SUBMIT_DIR": str(submitted),
        }
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        variables = {
            **clean,
            **slurm,
            "PATH": path,
            "SEEN": str(tmp_path),
            "PYTHON": sys.executable,
            **environment,
        }
        spool = tmp_path / "spool"  # Slurm runs a copy of the batch script, elsewhere
        spool.mkdir(exist_ok=True)
        (spool / "slurm_script").write_text((SLURM / file).read_text())
        # Slurm's batch script starts in the user's folder; here it starts in another, to see that it moves.
        return subprocess.Popen(
            ["bash", str(spool / "slurm_script"), *arguments],
            cwd=spool,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


def finish(process, timeout=launchers.TIMEOUT):
    process.out, process.err = process.communicate(timeout=timeout)
    return process


def seen(folder):
    return {int(path.stem[4:]): json.loads(path.read_text()) for path in folder.glob("rank*.json")}


def test_every_task_has_its_place(cluster, tmp_path):
    done = finish(
        cluster(
            "many_nodes.sbatch",
            "stub.py",
            "0",
            "--text",
            "two words",
            SLURM_CPUS_PER_TASK="3",
            SLURM_GPUS_ON_NODE="2",
        )
    )

    assert (done.returncode, done.err) == (0, "")
    tasks = seen(tmp_path)
    assert sorted(tasks) == [0, 1, 2, 3]
    for rank, says in tasks.items():
        assert says["arguments"] == ["--text", "two words", "--resume_from_checkpoint", "auto"]
        assert (says["RANK"], says["LOCAL_RANK"]) == (str(rank), str(rank % 2))
        assert (says["WORLD_SIZE"], says["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (says["MASTER_ADDR"], says["MASTER_PORT"]) == ("node1", "14711")
        assert (says["SAMERUN_MACHINES"], says["OMP_NUM_THREADS"]) == ("node1,node2", "3")
    options = json.loads((tmp_path / "srun.json").read_text())["options"]
    assert set(options) == {"--kill-on-bad-exit=0", "--wait=120", "--cpus-per-task=3", "--gpu-bind=none"}
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    "given",
    [["--resume_from_checkpoint", "runs/a"], ["--resume_from_checkpoint=auto"], ["--overwrite_output_dir"]],
)
def test_what_the_user_says_of_resuming_counts(cluster, tmp_path, given):
    finish(cluster("one_node.sbatch", "stub.py", "0", *given, nodes=1, tasks=1))
    assert seen(tmp_path)[0]["arguments"] == given


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (2, False), (3, False), (75, True)])
def test_only_a_stop_with_a_checkpoint_goes_back_into_the_queue(cluster, tmp_path, code, requeued):
    done = finish(cluster("one_node.sbatch", "stub.py", str(code), nodes=1, tasks=2))
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == requeued
    assert not requeued or (tmp_path / "requeued").read_text() == "4711\n"


def test_a_job_that_never_gets_on_is_not_requeued_for_ever(cluster, tmp_path):
    done = finish(
        cluster(
            "one_node.sbatch", "stub.py", "75", nodes=1, tasks=1, SLURM_RESTART_COUNT="7", REQUEUE_LIMIT="7"
        )
    )
    assert done.returncode == 75
    assert "not requeued again" in done.err
    assert not (tmp_path / "requeued").exists()


def test_tasks_that_do_not_divide_are_refused(cluster, tmp_path):
    done = finish(cluster("many_nodes.sbatch", "stub.py", "0", tasks=3))
    assert done.returncode == 2
    assert "3 tasks on 2 nodes" in done.err
    assert seen(tmp_path) == {}


@pytest.mark.parametrize("name", BATCH)
def test_a_batch_script_asks_for_what_the_rest_relies_on(name):
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", (SLURM / name).read_text(), re.MULTILINE))
    assert asked["signal"] == "USR1@300"  # without "B:" it goes to the tasks
    assert {"requeue", "open-mode", "time"} <= set(asked)
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert asked["nodes"] == ("1" if name.startswith("one") else "2")


@pytest.mark.slow
def test_a_run_that_reaches_its_time_limit_goes_on_when_it_is_started_again(cluster, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    launchers.write_corpus(home)
    arguments = launchers.training(
        Path("runs/a"), max_steps=100, eval_strategy="no", eval_steps=None, save_steps=100000,
                                   metric_for_best_model=None)  # fmt: skip
    environment = {name: value for name, value in launchers.environment(home).items() if name != "PATH"}
    history, status = home / "runs" / "a" / "history.jsonl", home / "runs" / "a" / "status.json"

    process = cluster("one_node.sbatch", *arguments, submitted=home, nodes=1, tasks=2, **environment)
    until = time.monotonic() + launchers.TIMEOUT
    while not (history.exists() and len(history.read_text().splitlines()) > 5):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
    os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGUSR1)
    stopped = finish(process)
    assert stopped.returncode == 75, stopped.err
    assert (tmp_path / "requeued").read_text() == "4711\n"
    assert json.loads(status.read_text())["state"] == "stopped"
    step = json.loads(status.read_text())["step"]
    assert 5 < step < 100

    again = finish(cluster("one_node.sbatch", *arguments, submitted=home, nodes=1, tasks=2, **environment))
    assert again.returncode == 0, again.err
    assert f"checkpoints/step_{step}" in again.out
    events = map(json.loads, history.read_text().splitlines())
    assert [event["step"] for event in events if "loss" in event] == list(range(1, 101))
