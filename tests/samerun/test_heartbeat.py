import itertools
import queue
import threading
import time

import pytest
import torch.distributed as dist

from samerun import machines
from samerun.machines import PeerStatus


@pytest.fixture
def job(monkeypatch):
    """Three processes as threads of this one, over a store: a function that starts the heartbeats of some of
    them."""
    store, threads = dist.HashStore(), []
    ended = threading.Event()
    monkeypatch.setattr(machines, "_store", store)
    monkeypatch.setattr(machines, "_world_size", 3)
    monkeypatch.setattr(machines, "_finished", ended)
    monkeypatch.setattr(machines, "_on_lost_peer", None)
    monkeypatch.setattr(machines, "_collectives", 0)  # whatever other tests have entered
    monkeypatch.setattr(machines, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(machines, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(machines, "_limit", 3600.0)
    for rank in range(3):
        store.set(f"collectives/{rank}", "0")
        store.set(f"host/{rank}", f"machine{rank}")

    def beat(*ranks):
        for rank in ranks:
            threads.append(threading.Thread(target=machines._beat, args=(rank,)))
            threads[-1].start()

    def end():
        machines.stop()
        for thread in threads:
            thread.join()
        threads.clear()
        machines._finished = threading.Event()

    beat.end = end
    yield beat
    end()


@pytest.fixture
def reports(monkeypatch):
    """What the heartbeat reports by itself: a queue."""
    queued = queue.Queue()
    monkeypatch.setattr(machines, "_on_lost_peer", queued.put)
    return queued


def only_rank_1_is_silent(job):
    job(0, 1, 2)
    job.end()
    job(0, 2)


@pytest.mark.slow
def test_a_silent_process_is_named(job):
    job(0, 1, 2)
    assert machines.peer_status() == PeerStatus()
    only_rank_1_is_silent(job)
    lost = "rank 1 (machine1) no longer answers: killed, suspended, or cut off from the network"
    assert machines.peer_status() == PeerStatus(lost=lost)


def test_a_hanging_process_is_named(job):
    job(0, 1, 2)
    job.end()  # all are this process, so their numbers of collectives are the same
    machines._store.set("collectives/0", "7")
    machines._store.set("collectives/1", "6")
    machines._store.set("collectives/2", "6")
    assert machines._hanging().startswith(
        "rank 1 (machine1), rank 2 (machine2) did not enter a collective that others wait in"
    )
    machines._store.set("collectives/0", "6")
    assert machines._hanging() is None


def test_the_neighbour_of_a_silent_process_reports_it(job, reports, monkeypatch):
    monkeypatch.setattr(machines, "_entered", time.monotonic() + 3600)  # nobody waits in a collective
    only_rank_1_is_silent(job)
    assert reports.empty()
    machines._limit = 0.5  # rank 0 hears rank 1
    assert reports.get(timeout=60).startswith("rank 1 (machine1) no longer answers")


def test_a_process_that_waits_too_long_reports_who_hangs(job, reports, monkeypatch):
    monkeypatch.setattr(machines, "_hanging", lambda: "rank 2 hangs")
    monkeypatch.setattr(machines, "_entered", time.monotonic() + 3600)
    job(0, 1, 2)
    assert reports.empty()
    machines._entered = time.monotonic() - 7200
    assert reports.get(timeout=60) == "rank 2 hangs"


def test_a_suspended_process_does_not_blame_others(job, reports, monkeypatch):
    monkeypatch.setattr(machines, "_entered", -1000.0)
    monkeypatch.setattr(machines, "_limit", 10.0)
    monkeypatch.setattr(
        machines, "_hanging", lambda: "rank 1 hangs"
    )  # as of before: the others said nothing to a stopped store
    seconds = itertools.count()
    monkeypatch.setattr(machines.time, "monotonic", lambda: 20.0 * next(seconds))  # each beat comes late
    job(0)
    until = threading.Event()
    until.wait(0.3)
    assert reports.empty()


def test_a_request_to_one_process_is_no_failure_of_the_others(job, environment):
    job(0, 1, 2)
    environment["RANK"] = "2"
    machines.send_shutdown_notice("SIGTERM")
    assert machines.peer_status() == PeerStatus(stopped="SIGTERM; rank 2")


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_rank_0s(job, monkeypatch, environment, reports):
    monkeypatch.setattr(machines, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(
        machines, "_counts", threading.Event().wait
    )  # for ever, as with a process that was stopped
    environment["MASTER_ADDR"] = "alpha"
    assert machines.peer_status().lost.startswith(
        "rank 0, which holds the rendezvous store (alpha), no longer answers"
    )
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert machines.peer_status().lost.startswith(
        "the launcher of rank 0, which holds the rendezvous store (alpha),"
    )
    monkeypatch.setattr(machines, "_limit", 0.0)
    monkeypatch.setattr(machines, "_answered", time.monotonic())
    watcher = threading.Thread(target=machines._watch_store)
    watcher.start()
    assert reports.get(timeout=60).startswith("the launcher of rank 0, which holds the rendezvous store")
    watcher.join()


def test_a_store_that_is_gone(job, monkeypatch, environment):
    monkeypatch.setattr(machines, "_counts", lambda: 1 / 0)
    monkeypatch.setattr(machines, "ANSWER_SECONDS", 0.1)
    assert machines.peer_status().lost.startswith("rank 0, which holds the rendezvous store")


def test_one_process_has_no_peers(monkeypatch):
    monkeypatch.setattr(machines, "_store", None)
    machines.send_shutdown_notice("SIGTERM")
    assert machines.peer_status() == PeerStatus()


@pytest.mark.parametrize(
    ("error", "of_network"),
    [
        (RuntimeError("[gloo] Timed out waiting 10000ms for recv operation to complete"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("NCCL error in: ..., remote process exited or there was a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("timed out"), False),
    ],
)
def test_network_errors(error, of_network):
    assert machines.is_network_error(error) == of_network
