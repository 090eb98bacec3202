"""examples/ray_train.py on a Ray cluster of two nodes on this machine."""

import os
import signal
import sys
from pathlib import Path

import launchers
import psutil
import pytest
from running import lines_of, running, wait_for

from samerun.reports.tracker import read_history

pytest.importorskip("ray", reason="Ray is not installed (examples/requirements-ray.txt)")

# As a cluster of two machines with one core each. The script begins as that of a user on such a cluster.
CLUSTER = """
import runpy, sys
import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=True)
try:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    launchers.write_corpus(folder)
    (folder / "cluster.py").write_text(CLUSTER)
    return folder


JOB = {"max_steps": 40, "eval_steps": 10, "save_steps": 5, "save_total_limit": 2}


def weights_of(folder: Path) -> bytes:
    return (folder / "best" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("deepspeed", [None, str(launchers.DS_CONFIGS / "zero2.json")])
def test_after_the_loss_of_a_worker_the_run_goes_on(home, deepspeed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(launchers.REPOSITORY / "app"))
    name, folder = ("zero2", home / "runs" / "zero2") if deepspeed else ("ddp", home / "runs" / "ddp")
    script = str(launchers.REPOSITORY / "examples" / "ray_train.py")
    # Paths are absolute: workers do not start in the driver's folder.
    settings = launchers.training(folder, **JOB, deepspeed=deepspeed)[1:]
    config = launchers.write_settings(home / f"{name}.yaml", settings, home)
    words = [str(home / "cluster.py"), script, "classify", str(config), "--storage", str(home / "storage")]
    with running() as begin:
        job = begin(home, [sys.executable, *words], None)
        wait_for(lambda: lines_of(folder / "history.jsonl") >= 12, job)
        family = psutil.Process(job.process.pid).children(recursive=True)
        rank_0 = int((folder / ".lock").read_text().split()[1])
        (other,) = (
            member
            for member in family
            if "RayTrainWorker" in " ".join(member.cmdline()) and member.pid != rank_0
        )
        os.kill(other.pid, signal.SIGKILL)
        assert job.process.wait(launchers.TIMEOUT) == 0, job.text()
        shown = job.text()
    assert [event["step"] for event in read_history(folder) if "loss" in event] == list(range(1, 41))
    assert "'step': 40" in shown  # of the last evaluation that Ray was told of
    assert "eval_loss" in shown

    unbroken = home / "runs" / f"{name}_unbroken"
    words = launchers.training(unbroken, **JOB, deepspeed=deepspeed)
    launchers.run([*launchers.torchrun(2), *words], home).check()
    assert weights_of(folder) == weights_of(unbroken)
