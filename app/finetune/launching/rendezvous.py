"""Rendezvous of a job's machines before any work: finds missing machines, differences between them, and early failures.

It uses the store of the future process group (the launcher's own, or one that rank 0 opens at MASTER_ADDR:MASTER_PORT), so it
needs no further port. A process that fails before the group exists leaves a failure notice there, and the other machines end
with it instead of waiting for a peer that will not come.
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

from finetune.errors import InputError, in_short, process_name
from finetune.launching import network

POLL_SECONDS = 0.1
NOTICE_SECONDS = 10  # how long a failing process keeps the store open for those who have not read its failure notice
MACHINE_NAMES = "FINETUNE_MACHINES"  # names in the order of ranks, set by our own launching scripts
MAX_DIFFERENCES = 20  # that are printed
PORT_OPTIONS = "(--master_port of deepspeed and torchrun, --main_process_port of accelerate, MASTER_PORT)"

RankInfo = dict[str, Any]  # "rank", "host", "address", "compared" (see `wait_for_all_ranks`)


class RemoteError(InputError):
    """Another process's failure, read from its failure notice."""

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
        """A machine's number, and its name if our launching scripts have set it."""
        return f"{number}, {self.machine_names[number]}" if number < len(self.machine_names) else str(number)

    def open(self, timeout: float) -> None:
        """Connects to the store. Raises `InputError` if rank 0 is not there within `timeout` seconds or its port is taken."""
        import torch.distributed as dist  # torch is not imported before the arguments are parsed

        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not is_host:
            self._wait_for_port(timeout)
        try:
            # Shared with the process group, which opens the same port in this process later on.
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
                    f"port {self.port} of {socket.gethostname()} is in use, so the machines cannot meet at {self.address}; "
                    f"choose another on every machine {PORT_OPTIONS}"
                ) from error
            raise InputError(f"{process_name()}: cannot talk to rank 0 at {self.address} ({in_short(error)})") from error
        # A launcher that restarts its workers keeps its store.
        self.store = dist.PrefixStore(f"finetune/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def gather(self, phase: str, info: RankInfo, timeout: int, argument: str) -> list[RankInfo]:
        """Every rank's info, in the order of ranks, once all are there and rank 0 finds no difference between them.

        Raises `InputError` with the differences or, after `timeout` seconds (which `argument` sets), the missing ranks; on the
        other ranks `RemoteError`.
        """
        self.store.set(f"{phase}/{self.rank}", json.dumps(info, default=str))
        result, missing = f"{phase}/result", range(self.world_size)
        # The others wait longer than rank 0, which can say more.
        until = time.monotonic() + timeout + (0 if self.rank == 0 else NOTICE_SECONDS)
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
            if time.monotonic() > until:
                raise InputError(self._missing(missing, timeout, argument))
            time.sleep(POLL_SECONDS)

    def send_failure_notice(self, problems: list[str], code: int, patience: float) -> None:
        """Leaves the notice; on the machine that hosts the store, waits up to `patience` seconds until all have sent or read
        one."""
        self.store.compare_set("failed", "", json.dumps({"process": process_name(), "problems": problems, "code": code}))
        self.store.add("notified", 1)
        until = time.monotonic() + (patience if self.rank < self.local_world_size else 0)
        while time.monotonic() < until and self.store.add("notified", 0) < self.world_size:
            time.sleep(POLL_SECONDS)

    def _wait_for_port(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=max(1, min(5, timeout))).close()
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise InputError(
                        f"{process_name()}: machine {self.machine(0)} did not answer at {self.address} within {timeout:.0f} s "
                        f"({error.strerror or error}); start the same command there, check the address and that no firewall "
                        "closes the port, or wait longer with --start_timeout"
                    ) from None
            time.sleep(POLL_SECONDS)

    def _has(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError as error:
            raise InputError(
                f"{process_name()}: rank 0's machine ended before the job began; its own message says why ({in_short(error)})"
            ) from None

    def _missing(self, ranks: list[int], timeout: float, argument: str) -> str:
        if self.rank != 0:
            return f"{process_name()}: rank 0 said nothing for {timeout + NOTICE_SECONDS:.0f} s ({argument})"
        named = ", ".join(f"rank {rank} (machine {self.machine(rank // self.local_world_size)})" for rank in ranks)
        return (
            f"{len(ranks)} of {self.world_size} processes did not come to {self.address} within {timeout:.0f} s: {named}. "
            f"Start the same command on every machine, with its own rank; {argument} waits longer"
        )


_rendezvous: Rendezvous | None = None
_completed = False


def from_environment() -> Rendezvous | None:
    """This process's place according to the launcher; None for a job of one machine, which needs no rendezvous."""
    env = os.environ
    world_size = int(env.get("WORLD_SIZE", 1))
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", 1)))
    if world_size == local_world_size or not env.get("MASTER_ADDR") or not env.get("MASTER_PORT", "").isdecimal():
        return None
    names = tuple(filter(None, env.get(MACHINE_NAMES, "").split(",")))
    return Rendezvous(int(env.get("RANK", 0)), world_size, local_world_size, env["MASTER_ADDR"], int(env["MASTER_PORT"]), names)


def wait_for_all_ranks(compared: dict[str, Any], timeout: int) -> None:
    """Waits until every process of the job is there and compares what they are about to do.

    `compared`: what must be equal on every machine, by name; a process may leave names out. Does nothing on one machine.
    Raises `InputError` naming the machines that did not come within `timeout` seconds, or every difference.
    """
    global _rendezvous
    _rendezvous = from_environment()
    if _rendezvous is not None:
        network.check_variables()
        _rendezvous.open(timeout)
        _rendezvous.gather("start", _rank_info(_rendezvous, compared), timeout, "--start_timeout")


def wait_until_ready(timeout: int) -> None:
    """Waits until every process has read its data, so that the process group's own wait is short, and chooses the network
    interface for gloo. Raises `InputError` as `wait_for_all_ranks`."""
    if _rendezvous is not None:
        infos = _rendezvous.gather("ready", _rank_info(_rendezvous, {}), timeout, "--ddp_timeout")
        _choose_interface(_rendezvous.rank, [other["address"] for other in infos])


def complete() -> None:
    """The process group exists: from now on it reports failures."""
    global _completed
    _completed = True


def send_failure_notice(problems: list[str], code: int, patience: float = NOTICE_SECONDS) -> None:
    """Tells the processes that wait in the rendezvous why this one will not come. Never raises; `patience` bounds, in seconds,
    the wait for the store and the wait for the others."""
    with contextlib.suppress(Exception):
        rendezvous = _rendezvous or from_environment()
        if rendezvous is not None and not _completed:
            if rendezvous.store is None:
                rendezvous.open(patience)
            rendezvous.send_failure_notice(problems, code, patience)


def _rank_info(rendezvous: Rendezvous, compared: dict[str, Any]) -> RankInfo:
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = dict(network.addresses()).get(chosen) or network.own_address(rendezvous.host)
    return {"rank": rendezvous.rank, "host": socket.gethostname(), "address": address, "compared": compared}


def differences(infos: list[RankInfo]) -> list[str]:
    """What the ranks have that rank 0 has not, each once per machine."""
    first, lines = infos[0], {}
    for info in infos[1:]:
        for section in info["compared"].keys() & first["compared"].keys():
            here, there = info["compared"][section], first["compared"][section]
            for name in sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)):
                is_here, is_there = ("absent" if x.get(name) is None else f"{x[name]!s:.80}" for x in (here, there))
                line = f"{name} is {is_here}, but {is_there}"
                message = f"rank {info['rank']} ({info['host']}): {line} on rank 0 ({first['host']})"
                lines.setdefault((info["host"], line), message)
    found = sorted(lines.values())
    if len(found) > MAX_DIFFERENCES:
        found[MAX_DIFFERENCES:] = [f"... and {len(found) - MAX_DIFFERENCES} more"]
    return [*found, "every machine needs the same code, libraries, files and arguments"] if found else []


def _choose_interface(rank: int, addresses: list[str | None]) -> None:
    """Names the network interface for gloo, which would otherwise take the one of the host name: often loopback."""
    own = addresses[rank]
    others = [address for address in addresses if address and not network.is_loopback(address)]
    if network.is_loopback(own) and others:
        own = network.own_address(others[0])
    for interface, address in network.addresses():
        if address == own:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
