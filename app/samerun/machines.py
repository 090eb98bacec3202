"""The processes and machines of a job find each other, compare their inputs, and notice who is lost.

Rendezvous: before any work it finds missing machines, differences between them, and early failures. It uses
the store of the future process group (the launcher's own, or one that rank 0 opens at
MASTER_ADDR:MASTER_PORT), so it needs no other port. A process that fails before the group exists leaves a
failure notice in the store. The other processes read the notice and end too, instead of waiting until the
timeout.

Heartbeats find the process that a failed collective waited for. Once a second, a thread of every process
increments a counter in the process group's store and publishes the number of collectives that the process has
entered. If a counter stands still, its process was killed or suspended, or lost its network. A process with a
heartbeat but fewer collectives than the others hangs. The backends do not name the process: gloo reports
"timed out" or "closed by peer", and NCCL's watchdog aborts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import psutil

from samerun.errors import InputError, in_short, process_name


def addresses() -> list[tuple[str, str]]:
    """(network interface, IPv4 address) of every address of this machine."""
    interfaces = psutil.net_if_addrs().items()
    return [
        (name, entry.address)
        for name, entries in interfaces
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def own_address(host: str) -> str | None:
    """This machine's address on the route to `host`; None without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def is_loopback(address: str | None) -> bool:
    return address is not None and ipaddress.ip_address(address).is_loopback


def check_variables() -> None:
    """Raises `InputError` if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface of this machine."""
    known, host = addresses(), socket.gethostname()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL's syntax: prefixes, "=" before exact names, "^" before excluded names.
        setting = os.environ.get(variable, "")
        names = tuple(setting.removeprefix("=").split(","))
        if not setting.startswith("^") and not any(name.startswith(names) for name, _ in known):
            usable = ", ".join(f"{name} ({address})" for name, address in known)
            raise InputError(f"{variable}={setting}: {host} has no such network interface; it has {usable}")


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
        check_variables()
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
    address = dict(addresses()).get(chosen) or own_address(rendezvous.host)
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


def _choose_interface(rank: int, published: list[str | None]) -> None:
    """Sets gloo's network interface. Gloo's default is the interface of the host name, which is often
    loopback."""
    own = published[rank]
    others = [address for address in published if address and not is_loopback(address)]
    if is_loopback(own) and others:
        own = own_address(others[0])
    for interface, address in addresses():
        if address == own:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


INTERVAL_SECONDS = 1.0
GRACE_SECONDS = 4.0  # the longest pause between two heartbeats of a healthy process on a busy machine
ANSWER_SECONDS = 5.0  # the longest time in which the store answers all queries
HEAD_START_SECONDS = 3.0  # reports come this long before the backend's own timeout
NETWORK_WORDS = (
    "timed out",
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "nccl",
    "socket",
)

_store: Any = None
_world_size = 1
_finished = threading.Event()
_limit = 0.0  # seconds without a heartbeat after which a process is lost
_collectives = 0  # entered by this process
_entered = 0.0  # time of entering the last collective
_answered = 0.0  # time of the store's last answer
_on_lost_peer: Callable[[str], None] | None = None


class PeerStatus(NamedTuple):
    """Why a collective failed, according to the other processes' notices and heartbeats."""

    stopped: str | None = None  # the shutdown notice of a process that stopped on request
    lost: str | None = None  # names the processes without heartbeat, or those that hang


def start(store: Any, rank: int, world_size: int, timeout: float) -> None:
    """Starts the heartbeat and watches the next rank. Every process of the group must call this.

    `store`: a connection of its own, because a pending answer blocks it. `timeout`: the process group's, in
    seconds.
    """
    global _store, _world_size, _limit, _entered, _answered
    _store, _world_size = store, world_size
    _store.set(f"host/{rank}", socket.gethostname())
    _store.set(f"collectives/{rank}", "0")
    _limit = timeout - HEAD_START_SECONDS
    _entered = _answered = time.monotonic()
    _finished.clear()
    threading.Thread(target=_beat, args=(rank,), name="heartbeat", daemon=True).start()
    threading.Thread(target=_watch_store, name="heartbeat store", daemon=True).start()


def stop() -> None:
    """Stops the heartbeat, before the store goes away."""
    _finished.set()


def progress() -> None:
    """Records that this process enters a collective."""
    global _collectives, _entered
    _collectives += 1
    _entered = time.monotonic()


@contextlib.contextmanager
def report_lost_peers(report: Callable[[str], None]) -> Iterator[None]:
    """Calls `report` from a thread shortly before the backend's timeout if another process has no heartbeat
    or hangs."""
    global _on_lost_peer
    _on_lost_peer = report
    try:
        yield
    finally:
        _on_lost_peer = None  # a lost peer must not end a process whose job is over


def send_shutdown_notice(reason: str) -> None:
    """Tells the other processes that this one stops on request, so that they do not report a failure."""
    if _store is not None:
        # In a thread: the store may no longer answer.
        sender = threading.Thread(target=_set_shutdown_notice, args=(reason,), daemon=True)
        sender.start()
        sender.join(INTERVAL_SECONDS)


def is_network_error(error: Exception) -> bool:
    """Whether an error of a collective comes from another process or the network."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in NETWORK_WORDS)


def peer_status() -> PeerStatus:
    """Checks the other processes for some seconds. The status is empty if all are alive and none hangs."""
    if _store is None:
        return PeerStatus()
    statuses: list[PeerStatus] = []
    # In a thread: calls to the store block forever if its process is suspended.
    listener = threading.Thread(target=_listen, args=(statuses,), daemon=True)
    listener.start()
    listener.join(GRACE_SECONDS + ANSWER_SECONDS)
    return statuses[0] if statuses else PeerStatus(lost=_silent([_store_host()]))


def _set_shutdown_notice(reason: str) -> None:
    with contextlib.suppress(Exception):
        _store.set("shutdown", f"{reason}; rank {os.environ.get('RANK', '0')}")


def _listen(statuses: list[PeerStatus]) -> None:
    """Appends the peers' status; nothing if the store does not answer."""
    with contextlib.suppress(Exception):
        before = _counts()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if _store.check(["shutdown"]):
                statuses.append(PeerStatus(stopped=_store.get("shutdown").decode()))
                return
            time.sleep(INTERVAL_SECONDS / 4)
        after = _counts()
        silent = [_name(rank) for rank in range(_world_size) if after[rank] == before[rank]]
        statuses.append(PeerStatus(lost=_silent(silent) if silent else _hanging()))


def _beat(rank: int) -> None:
    """Sends heartbeats and watches those of the next rank, so that the load per process does not grow with
    their number."""
    global _answered, _entered
    neighbour = (rank + 1) % _world_size
    seen = -1
    since = last = time.monotonic()
    with contextlib.suppress(Exception):  # the store is gone, so the job ends
        while not _finished.wait(INTERVAL_SECONDS):
            _store.add(str(rank), 1)
            _store.set(f"collectives/{rank}", str(_collectives))
            count, now = _store.add(str(neighbour), 0), time.monotonic()
            if now - last > GRACE_SECONDS:  # this process was suspended and may have missed heartbeats
                seen, since, _entered = count, now, now
            elif count != seen:
                seen, since = count, now
            _answered = last = now
            lost = _silent([_name(neighbour)]) if now - since > _limit else None
            if now - _entered > _limit:
                lost = lost or _hanging()
            if lost is not None and _on_lost_peer is not None:
                _on_lost_peer(lost)
                return


def _watch_store() -> None:
    """Reports a store that no longer answers, on which `_beat` blocks forever."""
    global _answered
    last = time.monotonic()
    while not _finished.wait(INTERVAL_SECONDS):
        now = time.monotonic()
        if now - last > GRACE_SECONDS:  # this process was suspended
            _answered = now
        last = now
        if now - _answered > _limit + GRACE_SECONDS and _on_lost_peer is not None:
            _on_lost_peer(_silent([_store_host()]))
            return


def _counts() -> list[int]:
    return [_store.add(str(rank), 0) for rank in range(_world_size)]


def _hanging() -> str | None:
    """Names the processes that have entered fewer collectives than others; None without any."""
    counts = [int(_store.get(f"collectives/{rank}")) for rank in range(_world_size)]
    if min(counts) == max(counts):
        return None
    names = ", ".join(_name(rank) for rank in range(_world_size) if counts[rank] == min(counts))
    return (
        f"{names} did not enter a collective that others wait in: it hangs, or computes for longer than "
        "--ddp_timeout"
    )


def _silent(names: list[str]) -> str:
    return f"{', '.join(names)} no longer answers: killed, suspended, or cut off from the network"


def _store_host() -> str:
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    process = "the launcher of rank 0" if is_launchers else "rank 0"
    return (
        f"{process}, which holds the rendezvous store ({os.environ.get('MASTER_ADDR', 'unknown address')}),"
    )


def _name(rank: int) -> str:
    with contextlib.suppress(Exception):
        return f"rank {rank} ({_store.get(f'host/{rank}').decode()})"
    return f"rank {rank}"
