"""A Slurm cluster on this machine: munged, slurmctld and three slurmd, with own keys, ports and folders.

The nodes are n1 and n2, and n3 for jobs that ask for it. Their processes see an /etc/hosts of their own, in
which these names lead here. Needs root and Debian's packages slurm-wlm and munge.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launchers
import psutil
import pytest

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "setpriv")
WITH_ADMINISTRATION = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
START_LIMIT = 120  # seconds
LIMIT = 600  # seconds for whatever is waited for; all cases together take four minutes
SIZE = "CPUs=64 Gres=seat:1"
NODES = {"n1": 1, "n2": 1, "n3": 9}  # with their weights
# A node has more CPUs than this machine, so that jobs run side by side. A job of the partition `urgent` can
# preempt one of `patient`, if both need the only seat.
CONFIGURATION = """
ClusterName=samerun
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
MinJobAge=600
KillWait=30
SlurmdTimeout=15
MailProg=/bin/true
GresTypes=seat
{nodes}
PartitionName=main Nodes=ALL Default=YES PreemptMode=OFF
PartitionName=patient Nodes=n1 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n1 PriorityTier=2
"""


def missing() -> str | None:
    """The reason why no cluster can be started here, or None."""
    lacking = [tool for tool in TOOLS if shutil.which(tool, path=WITH_ADMINISTRATION["PATH"]) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (apt install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "needs root"
    own_names = ["unshare", "--mount", "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    done = subprocess.run(own_names, capture_output=True, text=True)
    return f"needs a mount of its own: {done.stderr.strip()}" if done.returncode else None


@dataclass
class Cluster:
    """A running cluster. `home`: the folder from which jobs are submitted."""

    folder: Path
    home: Path
    environment: dict[str, str]
    nodes: dict[str, subprocess.Popen] = field(default_factory=dict)

    def within(self) -> list[str]:
        """What to write before a command that must resolve the nodes' names."""
        bind = f"mount --bind {self.folder / 'hosts'} /etc/hosts"
        return ["unshare", "--mount", "sh", "-c", f'{bind} && exec "$@"', "sh"]

    def start(self, *command: str) -> subprocess.Popen:
        """Starts a daemon that stays in the foreground."""
        log = (self.folder / f"{command[0]}.out").open("ab")
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *self.within(), *command], env=self.environment,
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip

    def ask(self, *command: str, **variables: str) -> str:
        """The output of a command of Slurm. Fails if it fails."""
        done = subprocess.run(
            command, env=self.environment | variables, cwd=self.home, capture_output=True, text=True,
            timeout=launchers.TIMEOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def is_idle(self) -> bool:
        """Whether all nodes are up and have no job."""
        with contextlib.suppress(AssertionError):  # the controller does not answer yet
            return f"{len(NODES)} idle" in self.ask("sinfo", "-h", "-p", "main", "-o", "%D %t")
        return False

    def processes(self, **variables: str) -> list[psutil.Process]:
        """The processes of jobs that have these variables."""
        return _all_processes(lambda process: variables.items() <= process.environ().items())

    def step_daemons(self, *nodes: str) -> list[psutil.Process]:
        """The slurmstepd of some nodes. They have no variables."""
        logs = {str(self.folder / f"slurmd-{node}.log") for node in nodes}
        return _all_processes(
            lambda process: (
                process.name() == "slurmstepd" and logs & {file.path for file in process.open_files()}
            )
        )


def _all_processes(wanted: Callable[[psutil.Process], Any]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if wanted(process):
                found.append(process)
    return found


@contextlib.contextmanager
def running(folder: Path, home: Path) -> Iterator[Cluster]:
    """A cluster whose jobs start in `home`. At the end all of its processes are killed."""
    host = socket.gethostname().partition(".")[0]
    ports = [launchers.free_port() for _ in range(1 + len(NODES))]
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} Weight={weight} {SIZE}"
        for (name, weight), port in zip(NODES.items(), ports[1:], strict=True)
    ]
    text = CONFIGURATION.format(host=host, folder=folder, controller_port=ports[0], nodes="\n".join(nodes))
    for name in ("state", *(f"spool-{name}" for name in NODES)):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    (folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n", encoding="utf-8")
    (folder / "gres.conf").write_text("Name=seat Count=1\n", encoding="utf-8")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    environment = launchers.environment(home) | WITH_ADMINISTRATION
    cluster = Cluster(folder, home, environment | {"SLURM_CONF": str(folder / "slurm.conf")})
    options = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
    options |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    munge = [f"--{name}={folder / file}" for name, file in options.items()]
    daemons = []
    try:
        daemons.append(cluster.start("munged", "--foreground", "--force", *munge))
        _wait_for_start((folder / "munge.socket").exists, folder / "munged.out")
        daemons.append(cluster.start("slurmctld", "-D"))
        for name in NODES:
            cluster.nodes[name] = cluster.start("slurmd", "-D", "-N", name)
        _wait_for_start(cluster.is_idle, folder / "slurmctld.log")
        yield cluster
    finally:
        for process in [*daemons, *cluster.nodes.values()]:
            process.kill()
            process.wait()
        configuration = cluster.environment["SLURM_CONF"]
        for process in [*cluster.step_daemons(*NODES), *cluster.processes(SLURM_CONF=configuration)]:
            process.kill()


def _wait_for_start(condition: Callable[[], bool], log: Path) -> None:
    """Skips the tests where Slurm does not start, such as in a container without what it needs."""
    until = time.monotonic() + START_LIMIT
    while not condition():
        if time.monotonic() > until:
            said = log.read_text(errors="replace")[-500:] if log.exists() else "it said nothing"
            pytest.skip(f"Slurm does not start here: {said}")
        time.sleep(0.2)


def wait_for(condition: Callable[[], Any], explain: Callable[[], str]) -> Any:
    """Waits until the condition holds; returns what it gives. Fails with an explanation."""
    until = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < until, explain()
        time.sleep(0.2)
    return found
