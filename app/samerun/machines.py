"""The processes of a job meet, compare what they were started with, and notice who is lost.

They meet in the store of the future process group: the launcher's own, or one that rank 0 opens at
MASTER_ADDR:MASTER_PORT, so that no other port is needed. Later a thread of every process publishes there,
once a second, that it lives and how many collectives it has entered. Rank 0 reads these records and publishes
a summary, which the others read. A process whose record stands still was killed or suspended, or lost its
network; one with fewer collectives than the others hangs. The backends do not name the process: gloo reports
"timed out" or "closed by peer", and NCCL's watchdog aborts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from samerun.errors import EXIT_LOST, EXIT_STOPPED, InputError, in_short, process_name, where_different

if TYPE_CHECKING:  # imports torch
    from samerun.launch import Launch

MACHINE_NAMES = "SAMERUN_MACHINES"  # variable with the machines' names by rank, set by our launching scripts
MAX_DIFFERENCES = 20  # printed
PORT_OPTIONS = "(--master_port of deepspeed and torchrun, --main_process_port of accelerate, MASTER_PORT)"
# Two connections of each process to the store, which rank 0 may hold, and gloo's, one for each group.
FILES_PER_PROCESS, OTHER_FILES = 4, 512
LATER_SECONDS = 10.0  # at which rank 0 may begin to wait; torchrun's store is there before it
READING_SECONDS = 2.0  # for the others to read the store before the process that holds it may end
VERDICT = "verdict"  # key of what rank 0 found
SUMMARY = "summary"  # key of what rank 0 finds in all heartbeats
MAX_NAMED = 8  # processes in a message
INTERVAL_SECONDS = 1.0  # between two heartbeats
GRACE_SECONDS = 4.0  # the longest pause between two heartbeats of a healthy process on a busy machine
HEAD_START_SECONDS = 3.0  # reports come this long before the backend's own timeout
# In errors of collectives that another process or the network has caused.
NETWORK_WORDS = ("timed out", "by peer", "broken pipe", "connection refused", "nccl", "socket")


# Meeting


def open_store(launch: Launch, timeout: float) -> Any:
    """The store that all processes of a job share. Raises `InputError` if rank 0 does not answer in `timeout`
    seconds or its port is in use."""
    import torch.distributed as dist  # torch is not imported before the arguments are parsed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = launch.rank == 0 and not _is_launchers_store()
    _allow_open_files(OTHER_FILES + FILES_PER_PROCESS * launch.world_size)
    if not is_host:
        _wait_for_port(host, port, timeout)
    try:
        store = dist.TCPStore(
            host,
            port,
            launch.world_size,
            is_master=is_host,
            timeout=timedelta(seconds=max(1, timeout)),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError) as error:
        if not is_host:
            raise InputError(
                f"{process_name()}: cannot connect to rank 0 at {host}:{port} ({in_short(error)})"
            ) from error
        raise InputError(
            f"port {port} of {socket.gethostname()} is in use, perhaps by another run; choose another on "
            f"every machine {PORT_OPTIONS}"
        ) from error
    # A new prefix for each restart: with a static rendezvous (--master_port, accelerate launch) the launcher
    # keeps its store over restarts (torch 2.13), and new processes would read the addresses of dead ones.
    return dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _is_launchers_store() -> bool:
    """Whether torchrun on rank 0's machine holds the store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _allow_open_files(number: int) -> None:
    """Raises the limit of open files to `number`, as far as the system allows: a shell's is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number if hard == unlimited else min(number, hard), hard))


def _wait_for_port(host: str, port: int, timeout: float) -> None:
    """Torch's own waiting prints a C++ stack."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1, min(5, timeout))).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise InputError(
                    f"{process_name()}: machine {_machine(0)} did not answer at {host}:{port} within "
                    f"{timeout:.0f} s ({error.strerror or error}); start the same command there, check the "
                    "address and the firewall, or wait longer with --start_timeout"
                ) from None
        time.sleep(0.1)


def meet(store: Any, launch: Launch, compared: dict[str, Any], timeout: float) -> None:
    """Waits until every process of the job has started, compares their inputs, and chooses gloo's network
    interface.

    `compared`: {section: {name: value}} that must be equal on all machines; a process may leave sections out.
    Raises `InputError` naming the machines that did not come within `timeout` seconds, or every difference.
    """
    entries = [(name, entry) for name, found in psutil.net_if_addrs().items() for entry in found]
    interfaces = [(name, entry.address) for name, entry in entries if entry.family == socket.AF_INET]
    address = _own_address(os.environ["MASTER_ADDR"])
    own = {"rank": launch.rank, "host": socket.gethostname(), "address": address, "compared": compared}
    own["problems"] = _unknown_interfaces(interfaces)
    try:
        store.set(f"met/{launch.rank}", json.dumps(own, default=str))
        # Rank 0 alone reads what all have set: with a thousand processes this would be a million answers.
        if launch.rank == 0:
            store.set(VERDICT, json.dumps(_verdict(store, launch, timeout)))
        store.wait([VERDICT], timedelta(seconds=timeout + LATER_SECONDS))
        verdict = json.loads(store.get(VERDICT))
    except RuntimeError as error:
        raise InputError(
            f"{process_name()}: rank 0 (machine {_machine(0)}) ended before the job began, or did not start "
            f"within {timeout:.0f} s; see the message there ({in_short(error)})"
        ) from None
    if verdict["problems"]:
        if launch.rank == 0:
            time.sleep(READING_SECONDS)
        raise InputError(*verdict["problems"])
    _choose_interface(address, verdict["addresses"], interfaces)


def _verdict(store: Any, launch: Launch, timeout: float) -> dict[str, Any]:
    """Waits for all processes and compares what they have set. Returns "problems", and "addresses" of
    machines that others can reach."""
    keys = [f"met/{rank}" for rank in range(launch.world_size)]
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=timeout))
    present = [key for key in keys if store.check([key])]
    infos = [json.loads(value) for value in store.multi_get(present)]
    absent = [rank for rank, key in enumerate(keys) if key not in present]
    missing = [f"rank {rank} (machine {_machine(rank // launch.local_world_size)})" for rank in absent]
    problems = [problem for info in infos for problem in info["problems"]]
    if missing:
        problems.append(
            f"{len(missing)} of {launch.world_size} processes did not connect to "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout:.0f} s: "
            f"{', '.join(missing)}. Start the same command on every machine, with its own rank, or wait "
            "longer with --start_timeout"
        )
    else:
        problems += differences(infos)
    addresses = dict.fromkeys(info["address"] for info in infos if info["address"])
    reachable = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return {"problems": problems, "addresses": reachable}


def differences(infos: list[dict[str, Any]]) -> list[str]:
    """Describes every difference between a rank and rank 0, once per machine. Each of `infos` has "rank",
    "host" and "compared" (see `meet`)."""
    first, lines = infos[0], {}
    for info in infos[1:]:
        for section in info["compared"].keys() & first["compared"].keys():
            own, expected = info["compared"][section], first["compared"][section]
            for name in sorted(own.keys() | expected.keys()):
                if own.get(name) == expected.get(name):
                    continue
                texts = ["absent" if x.get(name) is None else str(x[name]) for x in (own, expected)]
                value, other = where_different(*texts)
                line = f"{name} is {value}, but {other}"
                message = f"rank {info['rank']} ({info['host']}): {line} on rank 0 ({first['host']})"
                lines.setdefault((info["host"], line), message)
    messages = sorted(lines.values())
    if len(messages) > MAX_DIFFERENCES:
        messages[MAX_DIFFERENCES:] = [f"... and {len(messages) - MAX_DIFFERENCES} more"]
    return messages and [*messages, "every machine needs the same code, libraries, files and arguments"]


def _machine(number: int) -> str:
    """A machine's number, with its name if that is known."""
    names = os.environ.get(MACHINE_NAMES, "").split(",")
    return f"{number}, {names[number]}" if number < len(names) and names[number] else str(number)


def _own_address(host: str) -> str | None:
    """This machine's address on the route to `host`; None without a route. Sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
    return None


def _unknown_interfaces(interfaces: list[tuple[str, str]]) -> list[str]:
    """What is wrong with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."""
    problems = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL's syntax: prefixes, "=" before exact names, "^" before excluded names.
        setting = os.environ.get(variable, "")
        names = tuple(setting.removeprefix("=").split(","))
        if not setting.startswith("^") and not any(name.startswith(names) for name, _ in interfaces):
            usable = ", ".join(f"{name} ({address})" for name, address in interfaces)
            problems.append(
                f"{variable}={setting}: {socket.gethostname()} has no such network interface; it has {usable}"
            )
    return problems


def _choose_interface(own: str | None, others: list[str], interfaces: list[tuple[str, str]]) -> None:
    """Sets gloo's network interface. Gloo's default is the interface of the host name, which is often
    loopback. `own`: this machine's address; `others`: of all machines, without loopback."""
    if own and ipaddress.ip_address(own).is_loopback and others:
        own = _own_address(others[0])
    for interface, address in interfaces:
        if address == own:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


# Heartbeats


@dataclass
class _Heartbeat:
    """What this process publishes, and what it knows of the others."""

    store: Any = None
    launch: Launch | None = None
    report: Callable[[str], None] | None = None
    collectives: int = 0  # entered by this process
    entered: float = 0.0  # time of entering the last collective
    notice: tuple[list[str], int] | None = None  # why this process ends, and its exit code
    records: list[dict[str, Any]] = field(default_factory=list)  # by rank; on rank 0 only
    changed: list[float] = field(default_factory=list)  # when rank 0 first saw each record
    summary: dict[str, Any] = field(default_factory=dict)  # see `_summary`
    seen: float = 0.0  # when this process first saw the summary
    answered: float = 0.0  # time of the store's last answer
    sent: threading.Event = field(default_factory=threading.Event)  # the notice is published
    finished: threading.Event = field(default_factory=threading.Event)


_heartbeat = _Heartbeat()


def start(store: Any, launch: Launch, report: Callable[[str], None]) -> None:
    """Starts the heartbeat. Every process of the group must call this. `store`: a connection of its own,
    because a pending answer blocks it. `report`: called from a thread shortly before the backend's timeout
    if another process has no heartbeat or hangs."""
    global _heartbeat
    now = time.monotonic()
    _heartbeat = _Heartbeat(store, launch, report, entered=now, seen=now, answered=now)
    threading.Thread(target=_beat, args=(_heartbeat,), name="heartbeat", daemon=True).start()


def stop() -> None:
    """Stops the heartbeat, before the store goes away."""
    _heartbeat.finished.set()


def progress() -> None:
    """Records that this process enters a collective."""
    _heartbeat.collectives += 1
    _heartbeat.entered = time.monotonic()


def send_notice(why: list[str], code: int) -> None:
    """Tells the other processes that this one ends, why, and with which exit code. Failures are told to other
    machines only: the processes of one machine fail alike, and their launcher knows."""
    own = _heartbeat
    if own.store is None or own.finished.is_set():
        return
    if code != EXIT_STOPPED and own.launch.world_size == own.launch.local_world_size:
        return
    if own.summary.get("notice") is None:  # no other process has said why
        own.notice = why, code
        own.sent.wait(2 * INTERVAL_SECONDS)
    if own.launch.rank == 0 and not _is_launchers_store():
        time.sleep(READING_SECONDS)  # the others read at their next heartbeat


def is_network_error(error: Exception) -> bool:
    """Whether an error of a collective comes from another process or the network."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in NETWORK_WORDS)


def cause_of_failure() -> tuple[list[str], int] | None:
    """Watches the other processes for some seconds after a collective has failed. Returns the notice of the
    one that ended, or who is lost or hangs, with the exit code; None if all are alive and none hangs."""
    own, until = _heartbeat, time.monotonic() + GRACE_SECONDS + INTERVAL_SECONDS
    if own.store is None:
        return None
    while (now := time.monotonic()) < until:
        if notice := own.summary.get("notice"):
            return tuple(notice)
        time.sleep(INTERVAL_SECONDS / 4)
    # Rank 0 may have seen the record of a process that just died an interval later, and this process the
    # summary another one later.
    lost = _lost(own, now, GRACE_SECONDS - INTERVAL_SECONDS) or _hanging(own)
    return None if lost is None else ([lost], EXIT_LOST)


def _beat(own: _Heartbeat) -> None:
    """Publishes this process's record, brings the summary up to date, and reports who is lost.

    One write and one read a second, whatever the number of processes; rank 0 reads all records instead.
    """
    rank, beat = own.launch.rank, 0
    limit = own.launch.timeout_seconds - HEAD_START_SECONDS  # seconds without a heartbeat
    with contextlib.suppress(Exception):  # the store is gone, so the job ends
        while not own.finished.is_set():
            beat += 1
            notice = own.notice
            record = {"beat": beat, "collectives": own.collectives, "host": socket.gethostname()}
            if notice:
                record["notice"] = notice
            own.store.set(f"heartbeat/{rank}", json.dumps(record))
            if rank == 0:
                _read_records(own)
                own.store.set(SUMMARY, json.dumps(own.summary))
            else:
                _read_summary(own)
            if notice:
                own.sent.set()
            lost = _lost(own, own.answered, limit)
            if own.answered - own.entered > limit and (hanging := _hanging(own)):
                # Who was lost at the same moment is silent for a little less than the limit.
                lost = lost or _lost(own, own.answered, GRACE_SECONDS) or hanging
            if lost is not None:
                own.report(lost)
            own.finished.wait(INTERVAL_SECONDS)


def _read_records(own: _Heartbeat) -> None:
    """Reads the records of all processes, and makes the summary of them; rank 0 only."""
    values = own.store.multi_get([f"heartbeat/{rank}" for rank in range(own.launch.world_size)])
    records, suspended = [json.loads(value) for value in values], _answered(own)
    own.changed = [
        own.answered if suspended or not own.records or record != own.records[rank] else own.changed[rank]
        for rank, record in enumerate(records)
    ]
    own.records, own.seen = records, own.answered
    own.summary = _summary(records, [own.answered - changed for changed in own.changed])


def _read_summary(own: _Heartbeat) -> None:
    summary = json.loads(own.store.get(SUMMARY))
    if _answered(own) or summary != own.summary:
        own.summary, own.seen = summary, own.answered


def _answered(own: _Heartbeat) -> bool:
    """Notes that the store has answered. Returns whether this process was suspended meanwhile, and may have
    missed heartbeats."""
    now = time.monotonic()
    suspended = now - own.answered > GRACE_SECONDS
    own.answered = now
    if suspended:
        own.entered = now
    return suspended


def _summary(records: list[dict[str, Any]], ages: list[float]) -> dict[str, Any]:
    """What rank 0 tells the others: its beat and host; "silence", the longest time since a record changed,
    and "silent", the processes that are silent for half as long or longer; "behind", those that entered the
    fewest collectives, empty if all entered as many; "notice" of the first process that ends, or None.

    `ages`: seconds since each record changed.
    """
    counts, silence = [record["collectives"] for record in records], max(ages)
    fewest, most = min(counts), max(counts)
    silent = [rank for rank, age in enumerate(ages) if age >= silence / 2]
    behind = [rank for rank, count in enumerate(counts) if count == fewest < most]
    return {
        "beat": records[0]["beat"],
        "host": records[0]["host"],
        "silence": silence,
        "silent": _names(silent, records),
        "behind": _names(behind, records),
        "notice": next((record["notice"] for record in records if "notice" in record), None),
    }


def _names(ranks: list[int], records: list[dict[str, Any]]) -> str:
    more = " and others" if len(ranks) > MAX_NAMED else ""
    return ", ".join(f"rank {rank} ({records[rank]['host']})" for rank in ranks[:MAX_NAMED]) + more


def _lost(own: _Heartbeat, now: float, seconds: float) -> str | None:
    """Names the processes that have been silent for longer than this; None without any."""
    if now - own.answered > seconds:
        process = "the launcher of rank 0" if _is_launchers_store() else "rank 0"
        names = f"{process}, which holds the rendezvous store ({os.environ.get('MASTER_ADDR')}),"
    elif now - own.seen > seconds:  # then rank 0 tells nothing of the others
        names = f"rank 0 ({own.summary['host']})" if own.summary else "rank 0"
    elif own.summary.get("silence", 0.0) + now - own.seen > seconds:
        names = own.summary["silent"]
    else:
        return None
    return f"{names} no longer answers: killed, suspended, or cut off from the network"


def _hanging(own: _Heartbeat) -> str | None:
    """Names the processes that have entered fewer collectives than others; None without any, or if rank 0
    has told nothing since this process entered its last one."""
    behind = own.summary.get("behind")
    if not behind or own.seen < own.entered + 2 * INTERVAL_SECONDS:
        return None
    return (
        f"{behind} did not enter a collective that others wait in: it hangs, or computes for longer than "
        "--ddp_timeout"
    )
