"""Which processes of a job still live and get on, to say whose fault it is when the others wait in vain. Level 1.

Every process counts up a number of its own in the process group's store, once a second, from a thread, and tells there how many
exchanges it has come to. One whose number stands still was killed, was stopped, or has lost its network; one that beats but has
come to fewer exchanges than the others hangs. The backends name none of this: gloo says "timed out" or "closed by peer", NCCL's
watchdog ends the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

BEAT_SECONDS = 1.0
LISTEN_SECONDS = 4.0  # what a lively process may take for a beat on a busy machine
ANSWER_SECONDS = 5.0  # what the store may take for all its answers
HEAD_START_SECONDS = 3.0  # before the backend's own timeout, whose message names nobody
LOST = ("timed out", "closed by peer", "reset by peer", "broken pipe", "connection refused", "nccl", "socket")

_store: Any = None
_world_size = 1
_ended = threading.Event()
_limit = 0.0  # seconds of silence after which a process is lost
_exchanges = 0  # that this process has come to
_moved = 0.0  # when it came to the last one
_answered = 0.0  # when the store last answered
_slept = 0.0  # the longest that this process did not run itself, in seconds
_tell: Callable[[str], None] | None = None


class Heard(NamedTuple):
    """What a process whose exchange with the others failed hears of them, in words."""

    stopped: str | None = None  # why a process that was asked to stop has left
    lost: str | None = None  # which processes are silent, or hang


def start(timeout: float) -> None:
    """Begins to beat, and to listen to one other process; every process of a started process group must call this. `timeout`:
    the group's, in seconds."""
    import torch.distributed as dist

    global _store, _world_size, _limit, _moved, _answered
    rank, _world_size = dist.get_rank(), dist.get_world_size()
    if _world_size == 1:
        return
    # A connection of its own: a thread that waits for an answer would keep the group's from everybody else.
    _store = dist.PrefixStore("pulse", dist.distributed_c10d._get_default_store().clone())
    _store.set(f"host/{rank}", socket.gethostname())
    _store.set(f"at/{rank}", "0")
    _limit = timeout - HEAD_START_SECONDS
    _moved = _answered = time.monotonic()
    _ended.clear()
    for work in (_beat, _watch_store):
        threading.Thread(target=work, args=(rank,), name=f"pulse {work.__name__}", daemon=True).start()


def stop() -> None:
    """Ends the beating: the store is about to go."""
    _ended.set()


def mark() -> None:
    """This process comes to an exchange with the others."""
    global _exchanges, _moved
    _exchanges += 1
    _moved = time.monotonic()


def on_loss(tell: Callable[[str], None] | None) -> None:
    """Has `tell` called, from a thread, when another process has been silent, or has kept this one waiting, for almost as long
    as the backend waits."""
    global _tell
    _tell = tell


def farewell(why: str) -> None:
    """Tells the others that this process was asked to stop and leaves at once: what they miss then is no failure."""
    if _store is None:
        return

    def tell() -> None:
        with contextlib.suppress(Exception):
            _store.set("farewell", f"{why}; rank {os.environ.get('RANK', '0')}")

    teller = threading.Thread(target=tell, daemon=True)  # the store may not answer any more
    teller.start()
    teller.join(BEAT_SECONDS)


def is_loss(error: Exception) -> bool:
    """Whether an exchange with other processes failed with this, rather than something here."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in LOST)


def listen() -> Heard:
    """What became of the others; takes a few seconds. Nothing if all of them beat and get on, or if there is nobody to ask."""
    if _store is None:
        return Heard()
    heard: list[Heard] = []
    # In a thread: the store waits without end for an answer of a process that was stopped.
    listener = threading.Thread(target=_listen, args=(heard,), daemon=True)
    listener.start()
    listener.join(LISTEN_SECONDS + ANSWER_SECONDS)
    said = heard[0] if heard else Heard(lost=_silent([_holder()]))
    if said.stopped is None and _slept > _limit:
        return Heard(lost=f"it did not run for {_slept:.0f} seconds itself, stopped or asleep: longer than --ddp_timeout")
    return said


def _listen(heard: list[Heard]) -> None:
    with contextlib.suppress(Exception):  # the store is gone, or has lost its process
        before = _counts()
        until = time.monotonic() + LISTEN_SECONDS
        while time.monotonic() < until:
            if _store.check(["farewell"]):
                heard.append(Heard(stopped=_store.get("farewell").decode()))
                return
            time.sleep(BEAT_SECONDS / 4)
        after = _counts()
        still = [_name(rank) for rank in range(_world_size) if after[rank] == before[rank]]
        heard.append(Heard(lost=_silent(still) if still else _hanging()))


def _beat(rank: int) -> None:
    """Beats, and listens to the next rank: each is heard by one, however many there are."""
    global _answered, _moved
    neighbour = (rank + 1) % _world_size
    heard, since = -1, time.monotonic()
    woken = since
    with contextlib.suppress(Exception):  # the store is gone, and with it the job
        while not _ended.wait(BEAT_SECONDS):
            _store.add(str(rank), 1)
            _store.set(f"at/{rank}", str(_exchanges))
            count, now = _store.add(str(neighbour), 0), time.monotonic()
            if now - woken > LISTEN_SECONDS:  # what it missed while it was stopped itself, it cannot know
                heard, since, _moved = count, now, now
            elif count != heard:
                heard, since = count, now
            _answered = woken = now
            lost = _silent([_name(neighbour)]) if now - since > _limit else None
            if now - _moved > _limit:
                lost = lost or _hanging()
            if lost is not None and _tell is not None:
                _tell(lost)
                return


def _watch_store(_rank: int) -> None:
    """Looks whether the store answers: a beat waits for it without end."""
    global _answered, _slept
    woken = time.monotonic()
    while not _ended.wait(BEAT_SECONDS):
        now = time.monotonic()
        if now - woken > LISTEN_SECONDS:  # stopped itself for a while: the store had nobody to answer to
            _answered = now
            _slept = max(_slept, now - woken)
        woken = now
        if now - _answered > _limit + LISTEN_SECONDS and _tell is not None:
            _tell(_silent([_holder()]))
            return


def _counts() -> list[int]:
    return [_store.add(str(rank), 0) for rank in range(_world_size)]


def _hanging() -> str | None:
    """Which processes have come to fewer exchanges than others, in words."""
    come = [int(_store.get(f"at/{rank}")) for rank in range(_world_size)]
    if min(come) == max(come):
        return None
    names = ", ".join(_name(rank) for rank in range(_world_size) if come[rank] == min(come))
    return f"{names} did not come to an exchange that others wait in: it hangs, or computes for longer than --ddp_timeout"


def _silent(names: list[str]) -> str:
    return f"{', '.join(names)} no longer answers: killed, stopped, or cut off from the network"


def _holder() -> str:
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holder = "the launcher of rank 0" if agents else "rank 0"
    return f"{holder}, which holds the store that the others meet at ({os.environ.get('MASTER_ADDR', 'unknown address')}),"


def _name(rank: int) -> str:
    with contextlib.suppress(Exception):
        return f"rank {rank} ({_store.get(f'host/{rank}').decode()})"
    return f"rank {rank}"
