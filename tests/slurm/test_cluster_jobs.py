"""scripts/slurm on a real Slurm (see `cluster`): a job that is stopped, preempted, killed or moved ends with
the bytes of one that was never stopped.

The cases run side by side, because their jobs mostly wait. The processes begin with the libraries imported
(see `forks`); the steps of a job that is to be interrupted take longer.
"""

import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import cluster
import forks
import launchers
import pytest
from cluster import wait_for
from run_folders import read_json
from running import lines_of
from safetensors.torch import load_file

from samerun.tools.soak import differences

REASON = cluster.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(REASON is not None, reason=f"Slurm {REASON}"),
]
STEPS = {"max_steps": 40, "eval_steps": 20, "save_steps": 10, "global_batch_size": 12}
SIDE_BY_SIDE = 6
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
# Appended to sitecustomize.py.
CHANGED_STEPS = """
def change_steps():
    import time
    from torch.optim import AdamW
    step, taken = AdamW.step, []
    def changed(*given, **named):
        taken.append(None)
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
        if len(taken) == 5 and os.environ["RANK"] == os.environ.get("FAILS"):
            raise MemoryError
        return step(*given, **named)
    AdamW.step = changed

if "RANK" in os.environ:
    change_steps()
"""
ZERO2 = {"deepspeed": "ds_configs/zero2.json"}
ONE_PROCESS = ("--nodes=1", "--ntasks-per-node=1")


class Job:
    """Two nodes with one process each by default. `variables`: the user's; `changed`: arguments."""

    def __init__(self, slurm, name, *options, seconds=0.25, folder=None, variables=None, **changed):
        self.slurm, self.name, self.folder = slurm, name, slurm.home / "runs" / (folder or name)
        self.arguments = launchers.training(f"runs/{folder or name}", **STEPS | changed)
        self.variables = {"STEP_SECONDS": str(seconds)} | (variables or {})
        self.options = [
            f"--job-name={name}", "--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1", *options
        ]  # fmt: skip

    def submit(self):
        script = "scripts/slurm/many_nodes.sbatch"
        command = ["sbatch", "--parsable", *self.options, script, *self.arguments]
        self.id = self.slurm.ask(*command, **self.variables).strip()
        return self

    def facts(self):
        return dict(re.findall(r"(\w+)=(\S*)", self.slurm.ask("scontrol", "show", "job", self.id)))

    def wait(self, *states):
        """Waits for one of these states; returns the job's facts. Fails if the job ends otherwise."""
        facts = {}

        def is_reached():
            facts.update(self.facts())
            return facts["JobState"] in (*states, *ENDS)

        wait_for(is_reached, self.said)
        assert facts["JobState"] in states, (facts, self.said())
        return facts

    def train(self, steps):
        wait_for(lambda: lines_of(self.folder / "history.jsonl") >= steps, self.said)

    def stop(self):
        """Does what Slurm does before the time limit."""
        self.slurm.ask("scancel", "--signal=USR1", self.id)

    def go_on(self, **changes):
        """Changes a requeued job, and spares the two minutes that Slurm waits. (In less than two seconds a
        node takes the new start for the old one, which has ended.)"""
        self.wait("PENDING")
        given = [f"{name}={value}" for name, value in {**changes, "StartTime": "now+3"}.items()]
        self.slurm.ask("scontrol", "update", f"jobid={self.id}", *given)

    def ended(self, state, code):
        """Waits for the end, which must be this one; returns the output."""
        facts = self.wait(*ENDS)
        assert (facts["JobState"], facts["ExitCode"]) == (state, f"{code}:0"), (facts, self.said())
        assert not (self.slurm.home / f"slurm-{self.id}.losses").exists()
        return self.said()

    def kill(self, rank):
        processes = wait_for(lambda: self.slurm.processes(SLURM_JOB_ID=self.id, RANK=str(rank)), self.said)
        processes[0].kill()

    def said(self):
        return "".join(path.read_text() for path in sorted(self.slurm.home.glob(f"slurm-{self.name}-*.out")))

    def status(self):
        found = read_json(self.folder / "status.json")
        return found["state"], found["reason"]


# The cases. Each gets the cluster and `unbroken`, a function that gives the folder of a run that was never
# stopped.


def a_time_limit(slurm, unbroken):
    """Slurm itself sends the signals. It looks every 30 seconds, and up to 30 seconds too early."""
    limit = ("--nodes=1", "--ntasks-per-node=2", "--time=1", "--signal=USR1@25")
    job = Job(slurm, "limit", *limit, seconds=1.0).submit()
    job.train(1)  # it is pending at first, too
    while job.wait("PENDING", "COMPLETED", "FAILED")["JobState"] == "PENDING":
        job.go_on()
        wait_for(lambda: job.facts()["JobState"] != "PENDING", job.said)
    assert "stopped with a checkpoint; requeued" in job.ended("COMPLETED", 0)
    assert "stopped on request (SIGUSR1; rank 0, 1)" in job.said()
    assert differences(unbroken(), job.folder) == []


def a_signal_on_two_nodes_and_the_limit_of_requeues(slurm, unbroken):
    job = Job(slurm, "requeues", variables={"REQUEUE_LIMIT": "1"}).submit()
    job.train(5)
    job.stop()
    job.go_on()
    job.train(20)
    job.stop()
    said = job.ended("FAILED", 75)
    assert "stopped with a checkpoint; not requeued again after 1 times (REQUEUE_LIMIT)" in said
    job.submit().ended("COMPLETED", 0)
    assert differences(unbroken(), job.folder) == []


def zero2(slurm, unbroken):
    job = Job(slurm, "zero2", **ZERO2).submit()
    job.train(15)
    job.stop()
    job.go_on()
    assert "ZeRO-2" in job.ended("COMPLETED", 0)
    assert differences(unbroken("unbroken-zero2", **ZERO2), job.folder) == []


def a_job_of_higher_priority(slurm, unbroken):
    one_node = ("--nodes=1", "--ntasks-per-node=2")  # a busy Slurm looks for jobs to preempt every 30 seconds
    job = Job(slurm, "preempted", "--partition=patient", "--gres=seat:1", *one_node, seconds=1).submit()
    job.train(5)
    other = ["--partition=urgent", "--gres=seat:1", "--output=/dev/null", "--wait", "--wrap=true"]
    slurm.ask("sbatch", *other)
    assert job.wait("PENDING")["Restarts"] == "1"
    assert job.status() == ("stopped", "SIGTERM")
    job.go_on()
    job.ended("COMPLETED", 0)
    assert differences(unbroken(), job.folder) == []


def scancel(slurm, unbroken):
    job = Job(slurm, "cancelled").submit()
    job.train(5)
    slurm.ask("scancel", job.id)
    assert job.wait("CANCELLED")["Restarts"] == "0"
    wait_for(lambda: job.status()[0] != "running", job.said)
    assert job.status() == ("stopped", "SIGTERM")
    job.submit().ended("COMPLETED", 0)
    assert differences(unbroken(), job.folder) == []


def a_killed_process(slurm, unbroken):
    job = Job(slurm, "killed").submit()
    job.train(15)
    job.kill(1)
    job.wait("PENDING")
    assert job.status()[0] == "failed"
    job.go_on()
    said = job.ended("COMPLETED", 0)
    assert "rank 1 (" in said
    assert "no longer answers: killed, suspended, or cut off from the network" in said
    assert "a process was lost (1 of at most 3 times without a new checkpoint); requeued" in said
    assert re.search(r"resume +runs/killed/checkpoints/step_10", said)
    assert differences(unbroken(), job.folder) == []


def a_process_that_is_lost_again_and_again(slurm, unbroken):
    job = Job(slurm, "again", *ONE_PROCESS, save_steps=100_000).submit()
    for _ in range(3):
        job.kill(0)
        job.go_on()
    job.kill(0)
    said = job.ended("FAILED", 137)
    assert "error: a process was lost 4 times without a new checkpoint; not requeued again" in said


def a_lost_node(slurm, unbroken):
    """It falls silent, as a machine without power: nobody closes its connections. Slurm notices."""
    job = Job(slurm, "node", "--exclude=n2", variables={"PYTHON": sys.executable}).submit()
    job.train(15)
    assert job.facts()["NodeList"] == "n[1,3]"
    silent = slurm.processes(SLURM_JOB_ID=job.id, SLURMD_NODENAME="n3")
    for process in [*silent, *slurm.step_daemons("n3")]:
        process.send_signal(signal.SIGSTOP)
    slurm.nodes["n3"].kill()
    job.go_on(ExcNodeList="")
    said = job.ended("COMPLETED", 0)
    assert job.facts()["NodeList"] == "n[1-2]"
    assert "Node failure on n3" in said
    assert re.search(r"resume +runs/node/checkpoints/step_[123]0", said)
    assert differences(unbroken(), job.folder) == []


def as_many_nodes_as_there_are(slurm, unbroken):
    """Two, then one, then two."""
    job = Job(slurm, "elastic", "--nodes=1-2", "--ntasks-per-node=2", "--exclude=n3").submit()
    job.train(5)
    job.stop()
    wait_for(lambda: job.facts()["NumTasks"] == "2", job.said)
    job.go_on(ExcNodeList="n2,n3")
    job.train(15)
    assert job.facts()["NodeList"] == "n1"
    job.stop()
    job.go_on(ExcNodeList="n3")
    said = job.ended("COMPLETED", 0)
    assert re.findall(r"launcher +python: (\d) process", said) == ["4", "2", "4"]
    ours, theirs = (load_file(run / "best" / "model.safetensors") for run in (job.folder, unbroken()))
    # Other numbers of processes round differently, and the gradient of a key's bias is rounding alone.
    for name, tensor in theirs.items():
        if not name.endswith("key.bias"):
            assert (ours[name] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), name


def an_array(slurm, unbroken):
    job = Job(slurm, "array", "--array=0-1", *ONE_PROCESS, folder="array_%a", seed="%a").submit()
    first, second = (Job(slurm, "array", folder=f"array_{number}") for number in (0, 1))
    first.id, second.id = f"{job.id}_0", f"{job.id}_1"
    second.train(5)
    second.stop()
    second.go_on()
    for number, task in enumerate((first, second)):
        task.ended("COMPLETED", 0)
        assert differences(unbroken(f"seed{number}", *ONE_PROCESS, seed=number), task.folder) == []


def salloc(slurm, unbroken):
    job = Job(slurm, "allocated", "--nodes=2")
    command = ["salloc", *job.options, "bash", "scripts/slurm/job.sh", *job.arguments]
    log = slurm.home / "slurm-allocated-0.out"

    def begin():
        return subprocess.Popen(
            command, cwd=slurm.home, env=slurm.environment | job.variables, stdin=subprocess.DEVNULL,
            stdout=log.open("a"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    process = begin()
    job.train(5)
    job.id = re.search(r"Granted job allocation (\d+)", job.said())[1]
    job.stop()
    assert process.wait(launchers.TIMEOUT) == 75
    assert "stopped with a checkpoint; the same command resumes" in job.said()
    assert begin().wait(launchers.TIMEOUT) == 0
    assert differences(unbroken(), job.folder) == []


def a_failed_training(slurm, unbroken):
    """The other process is only the victim."""
    said = Job(slurm, "memory", variables={"FAILS": "1"}).submit().ended("FAILED", 3)
    assert "error: step 5: out of memory" in said
    assert "requeue" not in said


def a_wrong_argument(slurm, unbroken):
    said = Job(slurm, "argument", learning_rat=1).submit().ended("FAILED", 2)
    assert "--learning_rat" in said
    assert "requeue" not in said


def tasks_that_do_not_divide(slurm, unbroken):
    job = Job(slurm, "tasks", "--ntasks=3", "--ntasks-per-node=2").submit()
    assert "error: 3 tasks on 2 nodes" in job.ended("FAILED", 2)


CASES = [
    a_time_limit, a_lost_node, a_job_of_higher_priority, as_many_nodes_as_there_are,
    an_array, zero2, a_killed_process, a_process_that_is_lost_again_and_again, scancel,
    a_signal_on_two_nodes_and_the_limit_of_requeues, salloc, a_failed_training, a_wrong_argument,
    tasks_that_do_not_divide,
]  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory, request):
    """{case: its future}, of the cases that are selected."""
    home = tmp_path_factory.mktemp("home")
    launchers.write_corpus(home)
    with (home / "no_gpu" / "sitecustomize.py").open("a", encoding="utf-8") as file:
        file.write(CHANGED_STEPS)
    for name in ("scripts", "ds_configs"):
        (home / name).symlink_to(launchers.REPOSITORY / name)
    selected = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    with cluster.running(tmp_path_factory.mktemp("slurm"), home) as slurm:
        slurm.environment["PYTHON"] = str(forks.commands() / "python")
        runs, once = {}, threading.Lock()

        def unbroken(name="unbroken", *options, **changed):
            with once:
                if name not in runs:
                    runs[name] = Job(slurm, name, *options, seconds=0, **changed).submit()
            runs[name].ended("COMPLETED", 0)
            return runs[name].folder

        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            yield {case: pool.submit(case, slurm, unbroken) for case in selected}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_a_real_cluster(begun, case):
    begun[case].result()
