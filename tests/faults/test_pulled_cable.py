"""The cable between two machines is pulled while they train: both ends of the job end, each says whom it
lost."""

import shutil
import subprocess

import launchers
import pytest
from launchers import UNEVEN, training
from namespaces import INTERFACE, machines, missing_for_machines
from running import running
from test_lost_process import ENDLESS

REASON = missing_for_machines()


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_pulled_cable_ends_the_job_on_both_machines(home, tmp_path):
    homes = [tmp_path / "alpha", tmp_path / "beta"]
    for folder in homes:
        shutil.copytree(home, folder, ignore=shutil.ignore_patterns("runs", "cache", "observed"))
    job = training("runs/cable", **ENDLESS | {"global_batch_size": UNEVEN})
    port = str(launchers.free_port())
    with machines(homes) as (alpha, beta), running() as begin:

        def command(machine, number):
            place = ["--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(number)]
            rendezvous = ["--master_addr", "alpha", "--master_port", port]
            # What torchrun gives workers to end in is 30 s.
            return machine.inside(
                [launchers.torchrun(1)[0], *place, *rendezvous, *job], TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3
            )

        second = begin(beta.home, command(beta, 1), None)
        first = begin(alpha.home, command(alpha, 0), alpha.home / "runs" / "cable")
        subprocess.run(beta.inside(["ip", "link", "set", INTERFACE, "down"]), check=True)
        for ended, message in (
            (first, "error on rank 0 of 2 (alpha): rank 1 (beta) no longer answers"),
            (second, "error on rank 1 of 2 (beta): the launcher of rank 0, which holds the rendezvous store"),
        ):
            assert ended.wait() != 0
            (line,) = [line for line in ended.text().splitlines() if line.startswith("error on rank")]
            assert line.startswith(message)
            assert 'classify.py", line' not in ended.text()
