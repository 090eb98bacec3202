"""Simulates two machines by namespaces for network, host name and mounts, joined by a virtual cable.

Each machine has one network interface, `eth0`, reaches only the other one, by its name, and has its own
folder for data and caches, which the other cannot see. Needs root or user namespaces.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("unshare", "nsenter", "ip", "hostname", "mount")
INTERFACE = "eth0"
KINDS = ("--net", "--uts", "--mount")


@dataclass(frozen=True)
class Machine:
    """The namespaces of one machine. `holder`: id of the process that keeps them alive."""

    name: str
    address: str
    holder: int
    home: Path

    def inside(self, command: list[str], **environment: object) -> list[str]:
        """The command line that runs `command` on this machine, in its folder and with its caches."""
        own = {"HF_DATASETS_CACHE": self.home / "cache", **environment}
        assigned = [f"{name}={value}" for name, value in own.items()]
        return [*_enter(self.holder), "env", "--chdir", str(self.home), *assigned, *command]


def missing_for_machines() -> str | None:
    """The reason why machines cannot be simulated here, or None."""
    if os.uname().sysname != "Linux":
        return "network namespaces need Linux"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (util-linux, iproute2, hostname)"
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("a", "b"):
                (Path(folder) / name).mkdir()
            with machines([Path(folder) / "a", Path(folder) / "b"]):
                return None
    except RuntimeError as error:
        return f"network namespaces are not allowed here: {error}"


@contextmanager
def machines(homes: list[Path]) -> Iterator[list[Machine]]:
    """Two machines, `alpha` (10.77.0.1) and `beta` (10.77.0.2), removed with their processes at the end."""
    assert len(homes) == 2
    # Without root: in a new user namespace, which the second machine shares.
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    started = []
    try:
        first = _hold(["unshare", *user, *KINDS], started)
        second = _hold([*_enter(first, ()), "unshare", *KINDS], started)
        made = [
            Machine(name, f"10.77.0.{number}", holder, home)
            for number, (name, holder, home) in enumerate(
                zip(("alpha", "beta"), (first, second), homes, strict=True), 1
            )
        ]
        _do(first, *f"ip link add {INTERFACE} type veth peer name {INTERFACE} netns {second}".split())
        for machine in made:
            _do(machine.holder, "hostname", machine.name)
            _do(machine.holder, "ip", "address", "add", f"{machine.address}/24", "dev", INTERFACE)
            _do(machine.holder, "ip", "link", "set", INTERFACE, "up")
            _do(machine.holder, "ip", "link", "set", "lo", "up")
        for machine, other in zip(made, reversed(made), strict=True):
            hosts = machine.home / "hosts"
            hosts.write_text(
                "127.0.0.1 localhost\n" + "".join(f"{m.address} {m.name}\n" for m in made), encoding="utf-8"
            )
            _do(machine.holder, "mount", "--bind", str(hosts), "/etc/hosts")
            _do(machine.holder, "mount", "-t", "tmpfs", "tmpfs", str(other.home))
        yield made
    finally:
        for process in started:
            process.kill()
            process.wait()


def _hold(command: list[str], started: list[subprocess.Popen]) -> int:
    """Starts a process that keeps new namespaces alive. Returns its id once it runs in them."""
    ready = "echo ready; exec cat"  # ends together with this process
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*command, "sh", "-c", ready], stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    started.append(process)
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(process.stderr.read().strip() or f"{' '.join(command)} failed")
    return process.pid


def _enter(holder: int, kinds: tuple[str, ...] = KINDS) -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", "--target", str(holder), *user, *kinds]


def _do(holder: int, *command: str) -> None:
    result = subprocess.run([*_enter(holder), *command], capture_output=True, text=True, timeout=120)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
