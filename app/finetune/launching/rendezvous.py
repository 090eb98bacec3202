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
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from finetune.errors import InputError
from finetune.launching import network

POLL_SECONDS = 0.1
NOTICE_SECONDS = 10  # how long a failing process keeps the store open for those who have not read its failure notice
MACHINE_NAMES = "FINETUNE_MACHINES"  # names in the order of ranks, set by our own launching scripts
MAX_DIFFERENCES = 20  # that are printed

# "rank", "host", "address", "chosen" (whether the user named its interface), "compared" (see `wait_for_all_ranks`)
RankInfo = dict[str, Any]


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
    has_process_group: bool = field(default=False, init=False)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def process(self) -> str:
        """This process, in words."""
        return f"rank {self.rank} on {socket.gethostname()}"

    def machine(self, number: int) -> str:
        """A machine, in words."""
        return f"{number} ({self.machine_names[number]})" if number < len(self.machine_names) else str(number)

    def open(self, timeout: float) -> None:
        """Connects to the store. Raises `InputError` if rank 0 is not there within `timeout` seconds or its port is taken."""
        import torch.distributed as dist  # torch is not imported before the arguments are parsed

        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not is_host:
            self._wait_for_port(timeout)
        try:
            # Shared with the process group, which opens the same port in this process later on.
            self.store = dist.TCPStore(
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
                    "choose another on every machine (--master_port of deepspeed and torchrun, --main_process_port of "
                    "accelerate, MASTER_PORT)"
                ) from error
            raise InputError(f"{self.process}: cannot talk to rank 0 at {self.address} ({_first_line(error)})") from error

    def gather(
        self, phase: str, info: RankInfo, timeout: int, argument: str, check: Callable[[list[RankInfo]], list[str]]
    ) -> list[RankInfo]:
        """Every rank's info, in the order of ranks, once all are there and `check` finds no problem on rank 0.

        Raises `InputError` with the problems or, after `timeout` seconds (which `argument` sets), the missing ranks; on the
        other ranks `RemoteError`.
        """
        self.store.set(self._key(f"{phase}/{self.rank}"), json.dumps(info, default=str))
        result, missing = self._key(f"{phase}/result"), range(self.world_size)
        # The others wait longer than rank 0, which can say more.
        until = time.monotonic() + timeout + (0 if self.rank == 0 else NOTICE_SECONDS)
        while True:
            if self.rank == 0:
                missing = [rank for rank in missing if not self._has(self._key(f"{phase}/{rank}"))]
                if not missing:
                    infos = [json.loads(self.store.get(self._key(f"{phase}/{rank}"))) for rank in range(self.world_size)]
                    problems = check(infos)
                    if problems:
                        raise InputError(*problems)
                    self.store.set(result, json.dumps([{**info, "compared": {}} for info in infos]))
                    return infos
            elif self._has(result):
                return json.loads(self.store.get(result))
            if self._has(self._key("failed")):
                notice = json.loads(self.store.get(self._key("failed")))
                raise RemoteError(notice["process"], notice["problems"], notice["code"])
            if time.monotonic() > until:
                raise InputError(self._missing(missing, timeout, argument))
            time.sleep(POLL_SECONDS)

    def send_failure_notice(self, problems: list[str], code: int, patience: float) -> None:
        """Leaves the notice; on the machine that hosts the store, waits up to `patience` seconds until all have sent or read
        one."""
        notice = json.dumps({"process": self.process, "problems": problems, "code": code})
        self.store.compare_set(self._key("failed"), "", notice)
        self.store.add(self._key("notified"), 1)
        until = time.monotonic() + patience
        on_hosting_machine = self.rank < self.local_world_size
        while on_hosting_machine and time.monotonic() < until and self.store.add(self._key("notified"), 0) < self.world_size:
            time.sleep(POLL_SECONDS)

    def _key(self, name: str) -> str:
        # A launcher that restarts its workers keeps its store.
        return f"finetune/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"

    def _wait_for_port(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=max(1, min(5, timeout))).close()
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise InputError(
                        f"{self.process}: machine {self.machine(0)} did not answer at {self.address} within {timeout:.0f} s "
                        f"({error.strerror or error}); start the same command there, check the address and that no firewall "
                        "closes the port, or wait longer with --start_timeout"
                    ) from None
            time.sleep(POLL_SECONDS)

    def _has(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError as error:
            raise InputError(
                f"{self.process}: rank 0's machine ended before the job began; its own message says why ({_first_line(error)})"
            ) from None

    def _missing(self, ranks: list[int], timeout: float, argument: str) -> str:
        if self.rank != 0:
            return f"{self.process}: rank 0 said nothing for {timeout + NOTICE_SECONDS:.0f} s ({argument})"
        machines: dict[int, list[int]] = {}
        for rank in ranks:
            machines.setdefault(rank // self.local_world_size, []).append(rank)
        named = "; ".join(f"machine {self.machine(number)}: rank {_span(ranks)}" for number, ranks in machines.items())
        return (
            f"{len(ranks)} of {self.world_size} processes did not come to {self.address} within {timeout:.0f} s: {named}. "
            f"Start the same command on every machine, with its own rank; {argument} waits longer"
        )


_rendezvous: Rendezvous | None = None


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
    if _rendezvous is None:
        return
    problems = network.problems()
    if problems:
        raise InputError(*problems)
    _rendezvous.open(timeout)
    _rendezvous.gather("start", _rank_info(_rendezvous, compared), timeout, "--start_timeout", _check)


def wait_until_ready(timeout: int) -> None:
    """Waits until every process has read its data, so that the process group's own wait is short, and chooses the network
    interface for gloo. Raises `InputError` as `wait_for_all_ranks`."""
    if _rendezvous is not None:
        info = _rank_info(_rendezvous, {})
        infos = _rendezvous.gather("ready", info, timeout, "--ddp_timeout", _no_problems)
        _choose_interface(_rendezvous.rank, [other["address"] for other in infos])


def complete() -> None:
    """The process group exists: from now on it reports failures."""
    if _rendezvous is not None:
        _rendezvous.has_process_group = True


def send_failure_notice(problems: list[str], code: int, patience: float = NOTICE_SECONDS) -> None:
    """Tells the processes that wait in the rendezvous why this one will not come. Never raises; `patience` bounds, in seconds,
    the wait for the store and the wait for the others."""
    with contextlib.suppress(Exception):
        rendezvous = _rendezvous or from_environment()
        if rendezvous is None or rendezvous.has_process_group:
            return
        if rendezvous.store is None:
            rendezvous.open(patience)
        rendezvous.send_failure_notice(problems, code, patience)


def _rank_info(rendezvous: Rendezvous, compared: dict[str, Any]) -> RankInfo:
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = network.addresses()[chosen][0] if chosen else network.own_address(rendezvous.host)
    host = socket.gethostname()
    return {"rank": rendezvous.rank, "host": host, "address": address, "chosen": bool(chosen), "compared": compared}


def _no_problems(_infos: list[RankInfo]) -> list[str]:
    return []


def _check(infos: list[RankInfo]) -> list[str]:
    """Differences between the ranks, each once per machine, and interfaces that other machines cannot reach."""
    first, lines = infos[0], {}
    for info in infos[1:]:
        for name in info["compared"].keys() & first["compared"].keys():
            for line in _differences(name, info["compared"][name], first["compared"][name]):
                message = f"rank {info['rank']} ({info['host']}): {line} on rank 0 ({first['host']})"
                lines.setdefault((info["host"], line), message)
    differences = sorted(lines.values())
    if len(differences) > MAX_DIFFERENCES:
        differences[MAX_DIFFERENCES:] = [f"... and {len(differences) - MAX_DIFFERENCES} more"]
    if differences:
        differences.append("every machine needs the same code, libraries, files and arguments")
    return [*differences, *_unreachable(infos)]


def _differences(name: str, here: Any, there: Any) -> list[str]:
    if isinstance(here, dict) and isinstance(there, dict):
        parts = sorted(part for part in here.keys() | there.keys() if here.get(part) != there.get(part))
        return [_difference(part, here.get(part), there.get(part)) for part in parts]
    return [] if here == there else [_difference(name, here, there)]


def _difference(name: str, here: Any, there: Any) -> str:
    here, there = ("absent" if value is None else f"{value!s:.80}" for value in (here, there))
    return f"{name} is {here}, but {there}"


def _unreachable(infos: list[RankInfo]) -> list[str]:
    """Processes whose chosen network interface only their own machine can reach, though others come from elsewhere."""
    if all(network.is_loopback(info["address"]) for info in infos):
        return []
    return [
        f"rank {info['rank']} ({info['host']}) would be reached at {info['address']}, which leads nowhere from other machines; "
        "set GLOO_SOCKET_IFNAME to the network interface that they share, or leave it unset"
        for info in infos
        if info["chosen"] and network.is_loopback(info["address"])
    ]


def _choose_interface(rank: int, addresses: list[str | None]) -> None:
    """Names the network interface for gloo, which would otherwise take the one of the host name: often loopback."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    own = addresses[rank]
    others = [address for address in addresses if address and not network.is_loopback(address)]
    if network.is_loopback(own) and others:
        own = network.own_address(others[0])
    interface = network.interface_of(own)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
