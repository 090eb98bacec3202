"""Which processes of a job still live, for the message of those whose exchange with the others failed. Level 1.

Every process counts up a number of its own in the process group's store, once a second, from a thread. One whose number stands
still was killed, was stopped, or has lost its network; the backends name none of this ("timed out", "closed by peer").
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any

BEAT_SECONDS = 1.0
LISTEN_SECONDS = 4.0  # what a lively process may take for a beat on a busy machine
ANSWER_SECONDS = 5.0  # what the store may take for all its answers
LOST = ("timed out", "closed by peer", "reset by peer", "broken pipe", "connection refused", "nccl", "socket")

_store: Any = None
_world_size = 1
_ended = threading.Event()


def start() -> None:
    """Begins to beat; every process of a started process group must call this."""
    import torch.distributed as dist

    global _store, _world_size
    rank, _world_size = dist.get_rank(), dist.get_world_size()
    if _world_size == 1:
        return
    # A connection of its own: a thread that waits for an answer would keep the group's from everybody else.
    _store = dist.PrefixStore("pulse", dist.distributed_c10d._get_default_store().clone())
    _store.set(f"host/{rank}", socket.gethostname())
    _ended.clear()
    threading.Thread(target=_beat, args=(rank,), name="pulse", daemon=True).start()


def stop() -> None:
    """Ends the beating: the store is about to go."""
    _ended.set()


def is_loss(error: Exception) -> bool:
    """Whether an exchange with other processes failed with this, rather than something here."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in LOST)


def silent() -> list[str]:
    """The processes that no longer beat, in words; takes a few seconds. [] if all do, or if there is nobody to ask."""
    if _store is None:
        return []
    heard: list[list[str]] = []
    # In a thread: the store waits without end for an answer of a process that was stopped.
    listener = threading.Thread(target=_listen, args=(heard,), daemon=True)
    listener.start()
    listener.join(LISTEN_SECONDS + ANSWER_SECONDS)
    if heard:
        return heard[0]
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holder = "the launcher of rank 0" if agents else "rank 0"
    return [f"{holder}, which holds the store that the others meet at ({os.environ.get('MASTER_ADDR', 'unknown address')}),"]


def _listen(heard: list[list[str]]) -> None:
    with contextlib.suppress(Exception):  # the store is gone, or has lost its process
        before = _counts()
        time.sleep(LISTEN_SECONDS)
        after = _counts()
        heard.append([_name(rank) for rank in range(_world_size) if after[rank] == before[rank]])


def _beat(rank: int) -> None:
    with contextlib.suppress(Exception):  # the store is gone, and with it the job
        while not _ended.wait(BEAT_SECONDS):
            _store.add(str(rank), 1)


def _counts() -> list[int]:
    return [_store.add(str(rank), 0) for rank in range(_world_size)]


def _name(rank: int) -> str:
    with contextlib.suppress(Exception):
        return f"rank {rank} ({_store.get(f'host/{rank}').decode()})"
    return f"rank {rank}"
