"""Heartbeats find the process that a failed collective waited for.

Once a second, a thread of every process increments a counter in the process group's store and publishes the
number of collectives that the process has entered. If a counter stands still, its process was killed or
suspended, or lost its network. A process with a heartbeat but fewer collectives than the others hangs. The
backends do not name the process: gloo reports "timed out" or "closed by peer", and NCCL's watchdog aborts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
