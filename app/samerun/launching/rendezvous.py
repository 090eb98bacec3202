"""Rendezvous of a job's machines before any work: finds missing machines, differences between them, and early
failures.

It uses the store of the future process group (the launcher's own, or one that rank 0 opens at
MASTER_ADDR:MASTER_PORT), so it needs no other port. A process that fails before the group exists leaves a
failure notice in the store. The other processes read the notice and end too, instead of waiting until the
timeout.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from samerun.errors import InputError, in_short, process_name
from samerun.launching import network

POLL_SECONDS = 0.1
NOTICE_SECONDS = (
    10  # time for the other processes to read a failure notice before its sender closes the store
)
MACHINE_NAMES = "SAMERUN_MACHINES"  # variable with the machines' names by rank, set by our launching scripts
MAX_DIFFERENCES = 20  # printed
PORT_OPTIONS = "(--master_port of deepspeed and torchrun, --main_process_port of accelerate, MASTER_PORT)"

RankInfo = dict[str, Any]  # "rank", "host", "address", "compared" (see `wait_for_all_ranks`)


class RemoteError(InputError):
    """The failure of another process, from its failure notice."""

    def __init__(self, process: str, problems: list[str], code: int):
        super().__init__(*problems[:-1], f"{problems[-1]} [{process}]")
        self.exit_code = code


@dataclass
class Rendezvous:
    """This process's place in the job, and the store that all processes share."""

    rank: int
    world_size: int
    local_world_size: int
    host: str
    port: int
    machine_names: tuple[str, ...] = ()
    store: Any = field(default=None, init=False)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def machine(self, number: int) -> str:
        """A machine's number, with its name if that is known."""
        return f"{number}, {self.machine_names[number]}" if number < len(self.machine_names) else str(number)

    def connect(self, timeout: float) -> None:
        """Connects to the store. Raises `InputError` if rank 0 does not answer in `timeout` seconds or its
        port is in use."""
        import torch.distributed as dist  # torch is not imported before the arguments are parsed

        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not is_host:
            self._wait_for_port(timeout)
        try:
            # multi_tenant: the process group later opens the same port in this process.
            store = dist.TCPStore(
                self.host,
                self.port,
                self.world_size,
                is_master=is_host,
                timeout=timedelta(seconds=max(1, timeout)),
                wait_for_workers=False,
                multi_tenant=is_host,
            )
        except (RuntimeError, OSError) as error:
            if is_host:
                raise InputError(
                    f"port {self.port} of {socket.gethostname()} is in use, so the machines cannot "
                    f"connect to {self.address}; "
                    f"choose another port on every machine {PORT_OPTIONS}"
                ) from error
            raise InputError(
                f"{process_name()}: cannot connect to rank 0 at {self.address} ({in_short(error)})"
            ) from error
        # A new prefix for each restart: a launcher that restarts its workers keeps its store.
        self.store = dist.PrefixStore(f"samerun/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def gather(self, phase: str, info: RankInfo, timeout: int, argument: str) -> list[RankInfo]:
        """Waits for all ranks and returns their infos by rank. Rank 0 compares the infos.

        Raises `InputError` on rank 0 with the differences, or with the missing ranks after `timeout` seconds;
        the other ranks raise it as a `RemoteError`. `argument`: the command-line argument that sets
        `timeout`.
        """
        self.store.set(f"{phase}/{self.rank}", json.dumps(info, default=str))
        result, missing = f"{phase}/result", range(self.world_size)
        # The other ranks wait longer than rank 0, whose message names the missing ranks.
        deadline = time.monotonic() + timeout + (0 if self.rank == 0 else NOTICE_SECONDS)
        while True:
            if self.rank == 0:
                missing = [rank for rank in missing if not self._has(f"{phase}/{rank}")]
                if not missing:
                    infos = [json.loads(self.store.get(f"{phase}/{rank}")) for rank in range(self.world_size)]
                    problems = differences(infos)
                    if problems:
                        raise InputError(*problems)
                    self.store.set(result, json.dumps([{**info, "compared": {}} for info in infos]))
                    return infos
            elif self._has(result):
                return json.loads(self.store.get(result))
            if self._has("failed"):
                notice = json.loads(self.store.get("failed"))
                raise RemoteError(notice["process"], notice["problems"], notice["code"])
            if time.monotonic() > deadline:
                raise InputError(self._timeout_message(missing, timeout, argument))
            time.sleep(POLL_SECONDS)

    def send_failure_notice(self, problems: list[str], code: int, timeout: float) -> None:
        """Leaves the notice in the store. On the store's machine, waits up to `timeout` seconds until every
        process has called this: processes that read the notice fail too, and then call it."""
        self.store.compare_set(
            "failed", "", json.dumps({"process": process_name(), "problems": problems, "code": code})
        )
        self.store.add("notified", 1)
        deadline = time.monotonic() + (timeout if self.rank < self.local_world_size else 0)
        while time.monotonic() < deadline and self.store.add("notified", 0) < self.world_size:
            time.sleep(POLL_SECONDS)

    def _wait_for_port(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=max(1, min(5, timeout))).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"{process_name()}: machine {self.machine(0)} did not answer at "
                        f"{self.address} within {timeout:.0f} s "
                        f"({error.strerror or error}); start the same command there, check the "
                        "address and the firewall, or "
                        "wait longer with --start_timeout"
                    ) from None
            time.sleep(POLL_SECONDS)

    def _has(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError as error:
            raise InputError(
                f"{process_name()}: rank 0's machine ended before the job began; see the message "
                f"there ({in_short(error)})"
            ) from None

    def _timeout_message(self, missing: list[int], timeout: float, argument: str) -> str:
        if self.rank != 0:
            return (
                f"{process_name()}: rank 0 did not answer for {timeout + NOTICE_SECONDS:.0f} s ({argument})"
            )
        names = ", ".join(
            f"rank {rank} (machine {self.machine(rank // self.local_world_size)})" for rank in missing
        )
        return (
            f"{len(missing)} of {self.world_size} processes did not connect to {self.address} "
            f"within {timeout:.0f} s: {names}. "
            f"Start the same command on every machine, with its own rank, or wait longer with {argument}"
        )


_rendezvous: Rendezvous | None = None
_completed = False


def from_environment() -> Rendezvous | None:
    """The rendezvous that the launcher's variables describe; None for a job on one machine."""
    env = os.environ
    world_size = int(env.get("WORLD_SIZE", 1))
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", 1)))
    if (
        world_size == local_world_size
        or not env.get("MASTER_ADDR")
        or not env.get("MASTER_PORT", "").isdecimal()
    ):
        return None
    names = tuple(filter(None, env.get(MACHINE_NAMES, "").split(",")))
    return Rendezvous(
        int(env.get("RANK", 0)),
        world_size,
        local_world_size,
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        names,
    )


def wait_for_all_ranks(compared: dict[str, Any], timeout: int) -> None:
    """Waits until every process of the job has started, and compares their inputs. Does nothing on one
    machine.

    `compared`: {section: {name: value}} that must be equal on all machines; a process may leave sections out.
    Raises `InputError` naming the machines that did not connect within `timeout` seconds, or every
    difference.
    """
    global _rendezvous
    _rendezvous = from_environment()
    if _rendezvous is not None:
        network.check_variables()
        _rendezvous.connect(timeout)
        _rendezvous.gather("start", _rank_info(_rendezvous, compared), timeout, "--start_timeout")


def wait_until_ready(timeout: int) -> None:
    """Waits until every process has read its data, so that all open the process group at the same time, and
    chooses gloo's network interface. Raises `InputError` as `wait_for_all_ranks`."""
    if _rendezvous is not None:
        infos = _rendezvous.gather("ready", _rank_info(_rendezvous, {}), timeout, "--ddp_timeout")
        _choose_interface(_rendezvous.rank, [other["address"] for other in infos])


def complete() -> None:
    """Ends the rendezvous: the process group exists, and failures reach the other processes through it."""
    global _completed
    _completed = True


def send_failure_notice(problems: list[str], code: int, timeout: float = NOTICE_SECONDS) -> None:
    """Tells the processes that wait in the rendezvous why this one failed. Never raises. `timeout`: seconds
    to wait for the store, and again for the other processes."""
    with contextlib.suppress(Exception):
        rendezvous = _rendezvous or from_environment()
        if rendezvous is not None and not _completed:
            if rendezvous.store is None:
                rendezvous.connect(timeout)
            rendezvous.send_failure_notice(problems, code, timeout)


def _rank_info(rendezvous: Rendezvous, compared: dict[str, Any]) -> RankInfo:
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = dict(network.addresses()).get(chosen) or network.own_address(rendezvous.host)
    return {"rank": rendezvous.rank, "host": socket.gethostname(), "address": address, "compared": compared}


def differences(infos: list[RankInfo]) -> list[str]:
    """Describes every difference between a rank and rank 0, once per machine."""
    first, lines = infos[0], {}
    for info in infos[1:]:
        for section in info["compared"].keys() & first["compared"].keys():
            own, expected = info["compared"][section], first["compared"][section]
            for name in sorted(
                name for name in own.keys() | expected.keys() if own.get(name) != expected.get(name)
            ):
                value, other = (
                    "absent" if x.get(name) is None else f"{x[name]!s:.80}" for x in (own, expected)
                )
                line = f"{name} is {value}, but {other}"
                message = f"rank {info['rank']} ({info['host']}): {line} on rank 0 ({first['host']})"
                lines.setdefault((info["host"], line), message)
    messages = sorted(lines.values())
    if len(messages) > MAX_DIFFERENCES:
        messages[MAX_DIFFERENCES:] = [f"... and {len(messages) - MAX_DIFFERENCES} more"]
    return (
        [*messages, "every machine needs the same code, libraries, files and arguments"] if messages else []
    )


def _choose_interface(rank: int, addresses: list[str | None]) -> None:
    """Sets gloo's network interface. Gloo's default is the interface of the host name, which is often
    loopback."""
    own = addresses[rank]
    others = [address for address in addresses if address and not network.is_loopback(address)]
    if network.is_loopback(own) and others:
        own = network.own_address(others[0])
    for interface, address in network.addresses():
        if address == own:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
