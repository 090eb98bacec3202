"""Threads that stand for processes: what `processes.Run` offers, without a launcher."""

import threading
from concurrent.futures import ThreadPoolExecutor

from finetune.launching.processes import Run


class Together:
    """What the threads exchange."""

    def __init__(self, count):
        self.barrier, self.said = threading.Barrier(count, timeout=120), [None] * count

    def exchange(self, rank, value):
        self.said[rank] = value
        self.barrier.wait()
        found = list(self.said)
        self.barrier.wait()
        return found


class Process:
    """As far as checkpoints need it, a `Run` under ZeRO."""

    deepspeed_config = {"zero_optimization": {"stage": 2}}  # noqa: RUF012 - of a stand-in
    fsdp = None

    def __init__(self, launch, together):
        self.launch, self.together, self.is_main = launch, together, launch.rank == 0

    def gather(self, records):
        return [record for records in self.together.exchange(self.launch.rank, records) for record in records]

    def broadcast(self, value):
        return self.gather([value])[0]

    def wait(self):
        self.gather([])

    on_main = Run.on_main


def outcomes(work, members):
    """What `work` returns, or raises, for each member's arguments, all at the same time."""
    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(work, *member) for member in members]
        return [future.exception() or future.result() for future in futures]
