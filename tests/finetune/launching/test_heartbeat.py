import itertools
import queue
import threading
import time

import pytest
import torch.distributed as dist

from finetune.launching import heartbeat
from finetune.launching.heartbeat import Heard


@pytest.fixture
def job(monkeypatch):
    """Three processes as threads of this one, over a store: a function that lets some of them beat."""
    store, threads = dist.HashStore(), []
    ended = threading.Event()
    monkeypatch.setattr(heartbeat, "_store", store)
    monkeypatch.setattr(heartbeat, "_world_size", 3)
    monkeypatch.setattr(heartbeat, "_ended", ended)
    monkeypatch.setattr(heartbeat, "_tell", None)
    monkeypatch.setattr(heartbeat, "_exchanges", 0)  # whatever other tests have come to
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "LISTEN_SECONDS", 1.0)
    monkeypatch.setattr(heartbeat, "_limit", 3600.0)
    for rank in range(3):
        store.set(f"at/{rank}", "0")
        store.set(f"host/{rank}", f"machine{rank}")

    def beat(*ranks):
        for rank in ranks:
            threads.append(threading.Thread(target=heartbeat._beat, args=(rank,)))
            threads[-1].start()

    def end():
        heartbeat.stop()
        for thread in threads:
            thread.join()
        threads.clear()
        heartbeat._ended = threading.Event()

    beat.end = end
    yield beat
    end()


@pytest.fixture
def told(monkeypatch):
    """What the pulse tells by itself: a queue."""
    said = queue.Queue()
    monkeypatch.setattr(heartbeat, "_tell", said.put)
    return said


def only_rank_1_stands_still(job):
    job(0, 1, 2)
    job.end()
    job(0, 2)


def test_who_stands_still_is_named(job):
    job(0, 1, 2)
    assert heartbeat.listen() == Heard()
    only_rank_1_stands_still(job)
    assert heartbeat.listen() == Heard(lost="rank 1 (machine1) no longer answers: killed, stopped, or cut off from the network")


def test_who_beats_but_does_not_get_on_is_named(job):
    job(0, 1, 2)
    job.end()  # all are this process, so what they have come to is the same
    heartbeat._store.set("at/0", "7")
    heartbeat._store.set("at/1", "6")
    heartbeat._store.set("at/2", "6")
    assert heartbeat._hanging().startswith(
        "rank 1 (machine1), rank 2 (machine2) did not come to an exchange that others wait in"
    )
    heartbeat._store.set("at/0", "6")
    assert heartbeat._hanging() is None


def test_the_neighbour_of_a_silent_process_tells_of_it_by_itself(job, told, monkeypatch):
    monkeypatch.setattr(heartbeat, "_moved", time.monotonic() + 3600)  # nobody waits in an exchange
    only_rank_1_stands_still(job)
    assert told.empty()
    heartbeat._limit = 0.5  # rank 0 hears rank 1
    assert told.get(timeout=60).startswith("rank 1 (machine1) no longer answers")


def test_who_waits_too_long_looks_for_who_hangs(job, told, monkeypatch):
    monkeypatch.setattr(heartbeat, "_hanging", lambda: "rank 2 hangs")
    monkeypatch.setattr(heartbeat, "_moved", time.monotonic() + 3600)
    job(0, 1, 2)
    assert told.empty()
    heartbeat._moved = time.monotonic() - 7200
    assert told.get(timeout=60) == "rank 2 hangs"


def test_who_was_stopped_itself_does_not_blame_others(job, told, monkeypatch):
    monkeypatch.setattr(heartbeat, "_moved", -1000.0)
    monkeypatch.setattr(heartbeat, "_limit", 10.0)
    monkeypatch.setattr(
        heartbeat, "_hanging", lambda: "rank 1 hangs"
    )  # as of before: the others said nothing to a stopped store
    seconds = itertools.count()
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: 20.0 * next(seconds))  # each beat comes late
    job(0)
    until = threading.Event()
    until.wait(0.3)
    assert told.empty()


def test_who_was_stopped_itself_says_so(job, monkeypatch):
    monkeypatch.setattr(heartbeat, "_slept", 0.0)
    monkeypatch.setattr(heartbeat, "_limit", 10.0)
    only_rank_1_stands_still(job)
    assert heartbeat.listen().lost.startswith("rank 1")
    job.end()
    with monkeypatch.context() as clock:
        seconds = itertools.count()
        clock.setattr(heartbeat.time, "monotonic", lambda: 14.0 * next(seconds))
        watcher = threading.Thread(target=heartbeat._watch_store, args=(0,))
        watcher.start()
        for _ in range(6000):  # a minute; there is no clock here
            if heartbeat._slept:
                break
            threading.Event().wait(0.01)
        heartbeat.stop()
        watcher.join()
    assert heartbeat.listen().lost.startswith("it did not run for 14 seconds itself")


def test_a_request_to_one_process_is_no_failure_of_the_others(job, environment):
    job(0, 1, 2)
    environment["RANK"] = "2"
    heartbeat.farewell("SIGTERM")
    assert heartbeat.listen() == Heard(stopped="SIGTERM; rank 2")


def test_a_store_that_does_not_answer_is_rank_0s(job, monkeypatch, environment, told):
    monkeypatch.setattr(heartbeat, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(heartbeat, "_counts", threading.Event().wait)  # for ever, as with a process that was stopped
    environment["MASTER_ADDR"] = "alpha"
    assert heartbeat.listen().lost.startswith(
        "rank 0, which holds the store that the others meet at (alpha), no longer answers"
    )
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert heartbeat.listen().lost.startswith("the launcher of rank 0, which holds the store that the others meet at (alpha),")
    monkeypatch.setattr(heartbeat, "_limit", 0.0)
    monkeypatch.setattr(heartbeat, "_answered", time.monotonic())
    watcher = threading.Thread(target=heartbeat._watch_store, args=(1,))
    watcher.start()
    assert told.get(timeout=60).startswith("the launcher of rank 0, which holds the store")
    watcher.join()


def test_a_store_that_is_gone(job, monkeypatch, environment):
    monkeypatch.setattr(heartbeat, "_counts", lambda: 1 / 0)
    monkeypatch.setattr(heartbeat, "ANSWER_SECONDS", 0.1)
    assert heartbeat.listen().lost.startswith("rank 0, which holds the store")


def test_one_process_has_nobody_to_ask(monkeypatch):
    monkeypatch.setattr(heartbeat, "_store", None)
    heartbeat.farewell("SIGTERM")
    assert heartbeat.listen() == Heard()


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (RuntimeError("[gloo] Timed out waiting 10000ms for recv operation to complete"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("NCCL error in: ..., remote process exited or there was a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("timed out"), False),
    ],
)
def test_what_looks_like_a_lost_process(error, loss):
    assert heartbeat.is_loss(error) == loss
