"""Threads that act as processes, with the interface of `runtime.Run`."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from samerun.runtime import Run


class Exchange:
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
        gathered = self.exchange.all_gather(self.launch.rank, records)
        return [record for records in gathered for record in records]

    def broadcast(self, value):
        return self.gather([value])[0]

    def wait(self):
        self.gather([])

    from_rank0 = Run.from_rank0


def run_with_collectives(work, members, monkeypatch):
    """`run_concurrently` of `work`(gather, *member), with torch's all_reduce between the threads. `gather`: a
    model that gathers its weights calls it. Fails where the calls of the threads differ."""
    exchange, own = Exchange(len(members)), threading.local()

    def meet(kind, value=0):
        met = exchange.all_gather(own.rank, (kind, value))
        assert {other for other, _ in met} == {kind}
        return max(value for _, value in met)

    def start(rank, *member):
        own.rank = rank
        return work(lambda: meet("gather"), *member)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda x, op: x.fill_(meet("all_reduce", x.item())))
    return run_concurrently(start, [(rank, *member) for rank, member in enumerate(members)])


def run_concurrently(work, members):
    """Calls `work`(*member) for all members at the same time. Returns the results or exceptions."""
    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(work, *member) for member in members]
        return [future.exception() or future.result() for future in futures]
