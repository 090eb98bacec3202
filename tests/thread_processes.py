"""Threads that act as processes, with the interface of `runtime.Run`."""

import threading
from concurrent.futures import ThreadPoolExecutor

from samerun.runtime import Run


class Exchange:
    """Exchanges values between the threads."""

    def __init__(self, count):
        self.barrier, self.values = threading.Barrier(count, timeout=120), [None] * count

    def all_gather(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class Process:
    """A `Run` under ZeRO with the attributes that checkpoints use."""

    deepspeed_config = {"zero_optimization": {"stage": 2}}  # noqa: RUF012 - of a stand-in
    fsdp = None

    def __init__(self, launch, exchange):
        self.launch, self.exchange, self.is_main = launch, exchange, launch.rank == 0

    def gather(self, records):
        return [
            record for records in self.exchange.all_gather(self.launch.rank, records) for record in records
        ]

    def broadcast(self, value):
        return self.gather([value])[0]

    def wait(self):
        self.gather([])

    from_rank0 = Run.from_rank0


def run_concurrently(work, members):
    """Calls `work`(*member) for all members at the same time. Returns the results or exceptions."""
    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(work, *member) for member in members]
        return [future.exception() or future.result() for future in futures]
