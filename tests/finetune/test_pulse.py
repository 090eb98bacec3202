import threading

import pytest
import torch.distributed as dist

from finetune import pulse


@pytest.fixture
def job(monkeypatch):
    """Three processes as threads of this one, over a store: a function that lets some of them beat."""
    store, threads = dist.HashStore(), []
    ended = threading.Event()
    monkeypatch.setattr(pulse, "_store", store)
    monkeypatch.setattr(pulse, "_world_size", 3)
    monkeypatch.setattr(pulse, "_ended", ended)
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(pulse, "LISTEN_SECONDS", 1.0)

    def beat(*ranks):
        for rank in ranks:
            store.set(f"host/{rank}", f"machine{rank}")
            threads.append(threading.Thread(target=pulse._beat, args=(rank,)))
            threads[-1].start()

    yield beat
    pulse.stop()
    for thread in threads:
        thread.join()


def test_who_stands_still_is_named(job):
    job(0, 1, 2)
    assert pulse.silent() == []
    pulse.stop()
    pulse._ended = threading.Event()
    job(0, 2)
    assert pulse.silent() == ["rank 1 (machine1)"]


def test_a_store_that_does_not_answer_is_rank_0s(job, monkeypatch, environment):
    monkeypatch.setattr(pulse, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(pulse, "_counts", threading.Event().wait)  # for ever, as with a process that was stopped
    environment["MASTER_ADDR"] = "alpha"
    assert pulse.silent() == ["rank 0, which holds the store that the others meet at (alpha),"]
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert pulse.silent() == ["the launcher of rank 0, which holds the store that the others meet at (alpha),"]


def test_a_store_that_is_gone(job, monkeypatch, environment):
    monkeypatch.setattr(pulse, "_counts", lambda: 1 / 0)
    monkeypatch.setattr(pulse, "ANSWER_SECONDS", 0.1)
    assert pulse.silent()[0].startswith("rank 0, which holds the store")


def test_one_process_has_nobody_to_ask(monkeypatch):
    monkeypatch.setattr(pulse, "_store", None)
    assert pulse.silent() == []


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
    assert pulse.is_loss(error) == loss
