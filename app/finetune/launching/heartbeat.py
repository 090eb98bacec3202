"""Heartbeats: which processes of a job are alive and make progress, so that a failure names the process that caused it.

Once a second, a thread of every process increments a counter in the process group's store and publishes how many collective
operations the process has entered. A counter that stands still belongs to a process that was killed, was stopped or lost its
network; a process whose heart beats but that has entered fewer collectives than the others hangs. The backends name nobody:
gloo says "timed out" or "closed by peer", NCCL's watchdog ends the process.
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
ANSWER_SECONDS = 5.0  # the longest time that the store takes for all its answers
HEAD_START_SECONDS = 3.0  # before the backend's own timeout, whose message names nobody
NETWORK_WORDS = ("timed out", "closed by peer", "reset by peer", "broken pipe", "connection refused", "nccl", "socket")

_store: Any = None
_world_size = 1
_finished = threading.Event()
_limit = 0.0  # seconds of silence after which a process is lost
_collectives = 0  # that this process has entered
_entered = 0.0  # when it entered the last one
_answered = 0.0  # when the store last answered
_on_lost_peer: Callable[[str], None] | None = None


class PeerStatus(NamedTuple):
    """What a process whose collective failed learns about the others, in words."""

    stopped: str | None = None  # the shutdown notice of a process that was requested to stop
    lost: str | None = None  # which processes are silent, or hang


def start(store: Any, rank: int, world_size: int, timeout: float) -> None:
    """Starts the heartbeat and watches one other process. Every process of the group must call this.

    `store`: a connection that nobody else uses, since a pending answer blocks it. `timeout`: the group's, in seconds.
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
    """Stops the heartbeat: the store is about to go."""
    _finished.set()


def progress() -> None:
    """This process enters a collective operation."""
    global _collectives, _entered
    _collectives += 1
    _entered = time.monotonic()


@contextlib.contextmanager
def report_lost_peers(report: Callable[[str], None]) -> Iterator[None]:
    """Calls `report`, from a thread, when another process was silent, or kept this one waiting, for almost as long as the
    backend waits."""
    global _on_lost_peer
    _on_lost_peer = report
    try:
        yield
    finally:
        _on_lost_peer = None  # a process that goes on after its job must not be ended over it


def send_shutdown_notice(reason: str) -> None:
    """Tells the others that this process leaves on request, so that they do not report a failure."""
    if _store is not None:
        # In a thread: the store may not answer any more.
        sender = threading.Thread(target=_set_shutdown_notice, args=(reason,), daemon=True)
        sender.start()
        sender.join(INTERVAL_SECONDS)


def is_network_error(error: Exception) -> bool:
    """Whether a collective failed because of another process or the network, rather than something in this process."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in NETWORK_WORDS)


def peer_status() -> PeerStatus:
    """What became of the other processes; takes a few seconds. Empty if all are alive and make progress, or there are none."""
    if _store is None:
        return PeerStatus()
    found: list[PeerStatus] = []
    # In a thread: the store waits without end for an answer of a process that was stopped.
    listener = threading.Thread(target=_listen, args=(found,), daemon=True)
    listener.start()
    listener.join(GRACE_SECONDS + ANSWER_SECONDS)
    return found[0] if found else PeerStatus(lost=_silent([_store_host()]))


def _set_shutdown_notice(reason: str) -> None:
    with contextlib.suppress(Exception):
        _store.set("shutdown", f"{reason}; rank {os.environ.get('RANK', '0')}")


def _listen(found: list[PeerStatus]) -> None:
    with contextlib.suppress(Exception):  # the store is gone, or has lost its process
        before = _counts()
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            if _store.check(["shutdown"]):
                found.append(PeerStatus(stopped=_store.get("shutdown").decode()))
                return
            time.sleep(INTERVAL_SECONDS / 4)
        after = _counts()
        silent = [_name(rank) for rank in range(_world_size) if after[rank] == before[rank]]
        found.append(PeerStatus(lost=_silent(silent) if silent else _hanging()))


def _beat(rank: int) -> None:
    """Beats, and watches the next rank, so that each process is watched by one, however many there are."""
    global _answered, _entered
    neighbour = (rank + 1) % _world_size
    seen = -1
    since = last = time.monotonic()
    with contextlib.suppress(Exception):  # the store is gone, and with it the job
        while not _finished.wait(INTERVAL_SECONDS):
            _store.add(str(rank), 1)
            _store.set(f"collectives/{rank}", str(_collectives))
            count, now = _store.add(str(neighbour), 0), time.monotonic()
            if now - last > GRACE_SECONDS:  # this process was suspended itself, and cannot know what it missed
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
    """Notices a store that no longer answers: `_beat` waits for it without end."""
    global _answered
    last = time.monotonic()
    while not _finished.wait(INTERVAL_SECONDS):
        now = time.monotonic()
        if now - last > GRACE_SECONDS:  # suspended itself: there was nobody to answer to
            _answered = now
        last = now
        if now - _answered > _limit + GRACE_SECONDS and _on_lost_peer is not None:
            _on_lost_peer(_silent([_store_host()]))
            return


def _counts() -> list[int]:
    return [_store.add(str(rank), 0) for rank in range(_world_size)]


def _hanging() -> str | None:
    """Which processes have entered fewer collectives than others, in words."""
    counts = [int(_store.get(f"collectives/{rank}")) for rank in range(_world_size)]
    if min(counts) == max(counts):
        return None
    names = ", ".join(_name(rank) for rank in range(_world_size) if counts[rank] == min(counts))
    return f"{names} did not enter a collective that others wait in: it hangs, or computes for longer than --ddp_timeout"


def _silent(names: list[str]) -> str:
    return f"{', '.join(names)} no longer answers: killed, stopped, or cut off from the network"


def _store_host() -> str:
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    process = "the launcher of rank 0" if of_launcher else "rank 0"
    return f"{process}, which holds the rendezvous store ({os.environ.get('MASTER_ADDR', 'unknown address')}),"


def _name(rank: int) -> str:
    with contextlib.suppress(Exception):
        return f"rank {rank} ({_store.get(f'host/{rank}').decode()})"
    return f"rank {rank}"
