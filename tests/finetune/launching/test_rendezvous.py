"""Processes are threads here: each has its own `Meeting`, and they talk over a real store on this machine."""

import json
import socket
import threading
import time
from contextlib import suppress

import pytest

from finetune.errors import InputError
from finetune.launching import network, rendezvous
from finetune.launching.rendezvous import ElsewhereError, Meeting, call_the_roll, leave_word, of_environment


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def job(environment, port, monkeypatch):
    """The variables of rank 0 of a job of two machines with one process each."""
    environment.update(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    environment.pop("GLOO_SOCKET_IFNAME", None)
    environment.pop("NCCL_SOCKET_IFNAME", None)
    monkeypatch.setattr(rendezvous, "_meeting", None)
    return environment


def card(rank, compared=None, host=None, address="127.0.0.1", hinted=False):
    return {"rank": rank, "host": host or f"m{rank}", "address": address, "hinted": hinted, "compared": compared or {}}


def together(port, cards, *, timeout=60, local=1, names=(), act=None):
    """What came of the roll call of these ranks: cards, or the exception."""
    outcome, places = {}, []

    def come(rank):
        place = Meeting(rank, len(cards), local, "127.0.0.1", port, names=names)
        places.append(place)  # rank 0's holds the store, for as long as the others ask
        try:
            rendezvous._open(place, timeout)
            if act and act(rank, place):
                return
            outcome[rank] = rendezvous._gather(place, "roll", cards[rank], timeout, rendezvous._differences, "--start_timeout")
        except InputError as error:
            outcome[rank] = error
            with suppress(Exception):  # what `leave_word` does for the process
                word = json.dumps({"where": f"rank {rank}", "problems": error.problems, "code": error.exit_code})
                place.store.compare_set(place.key("failed"), "", word)
                time.sleep(1)

    threads = [threading.Thread(target=come, args=(rank,)) for rank, one in enumerate(cards) if one is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return outcome


def test_one_machine_needs_no_meeting(environment):
    environment.update(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    call_the_roll({"a": 1}, timeout=1)
    leave_word(["bad"], 2)
    assert of_environment() is None


def test_the_launchers_variables_say_where_to_meet(job):
    job[rendezvous.MACHINE_NAMES] = "one,two"
    found = of_environment()
    assert (found.rank, found.world_size, found.local_world_size, found.names) == (0, 2, 1, ("one", "two"))
    del job["LOCAL_WORLD_SIZE"]
    job["LOCAL_SIZE"] = "2"  # deepspeed's name for it
    assert of_environment() is None


def test_all_who_agree_go_on(port):
    outcome = together(port, [card(rank, {"arguments": {"--seed": 1}}) for rank in range(3)])
    assert [found["rank"] for found in outcome[0]] == [0, 1, 2]
    assert outcome[1] == outcome[2] == []


def test_every_difference_is_told_to_everyone_once_per_machine(port):
    first = {"arguments": {"--seed": 1, "--rate": 0.1}, "code": {"a.py": "x"}, "precision": "no"}
    other = {"arguments": {"--seed": 2, "--rate": 0.1}, "code": {"a.py": "y", "b.py": "z"}, "precision": "bf16"}
    # The third is a second process of the machine, which leaves the code to the first.
    third = {name: other[name] for name in ("arguments", "precision")}
    outcome = together(port, [card(0, first), card(1, other, "m1"), card(2, third, "m1")])
    lines = [
        "rank 1 (m1): --seed is 2, but 1 on rank 0 (m0)",
        "rank 1 (m1): a.py is y, but x on rank 0 (m0)",
        "rank 1 (m1): b.py is z, but absent on rank 0 (m0)",
        "rank 1 (m1): precision is bf16, but no on rank 0 (m0)",
        "every machine needs the same code, libraries, files and arguments",
    ]
    assert outcome[0].problems == lines
    for rank in (1, 2):
        assert isinstance(outcome[rank], ElsewhereError)
        assert outcome[rank].problems == [*lines[:-1], f"{lines[-1]} [rank 0]"]


def test_a_machine_that_does_not_come_is_named(port):
    cards = [card(0), card(1), None, None]
    found = together(port, cards, timeout=1, local=2, names=("node7", "node9"))[0].problems
    assert len(found) == 1
    assert f"2 of 4 processes did not come to 127.0.0.1:{port} within 1 s: machine 1 (node9): rank 2 to 3." in found[0]
    assert "--start_timeout waits longer" in found[0]


def test_a_machine_whose_rank_0_does_not_come_says_so(port):
    found = together(port, [None, card(1)], timeout=1)[1].problems
    assert f"rank 1 on {socket.gethostname()}: machine 0 did not answer at 127.0.0.1:{port} within 1 s" in found[0]


def test_who_fails_before_the_meeting_leaves_word(port):
    def act(rank, place):
        if rank == 1:
            word = json.dumps({"where": "rank 1 on m1", "problems": ["train.csv:3: bad"], "code": 2})
            place.store.compare_set(place.key("failed"), "", word)
        return rank == 1

    started = time.monotonic()
    outcome = together(port, [card(0), card(1), card(2)], timeout=60, act=act)
    assert outcome[0].problems == outcome[2].problems == ["train.csv:3: bad [rank 1 on m1]"]
    assert outcome[0].exit_code == 2
    assert time.monotonic() - started < 30


def test_a_port_that_is_taken_is_named(job, port):
    with socket.create_server(("", port)), pytest.raises(InputError, match=f"port {port} of .* is in use"):
        call_the_roll({}, timeout=1)


def test_leaving_word_ends_soon_when_nobody_listens(job, port):
    job["RANK"] = "1"
    started = time.monotonic()
    leave_word(["bad"], 2, patience=1)
    assert time.monotonic() - started < 10


def test_a_wrong_card_is_refused_before_anyone_waits(job):
    job["GLOO_SOCKET_IFNAME"] = "nowhere7"
    with pytest.raises(InputError, match=r"GLOO_SOCKET_IFNAME=nowhere7: .* has no such network card; it has"):
        call_the_roll({}, timeout=60)


def test_a_card_that_leads_nowhere_is_named():
    cards = [card(0, address="10.0.0.1"), card(1, address="127.0.0.1", hinted=True)]
    assert "rank 1 (m1) would be reached at 127.0.0.1" in rendezvous._differences(cards)[0]
    assert rendezvous._differences([card(0), card(1, hinted=True)]) == []  # two "machines" that are one
    assert rendezvous._differences([card(0, address="10.0.0.1"), card(1)]) == []  # chosen for it, later


def test_the_card_that_leads_to_the_others_is_chosen(job, monkeypatch):
    monkeypatch.setattr(network, "cards", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.9.0.1"})
    monkeypatch.setattr(network, "own_address", lambda host: {"10.9.0.2": "10.9.0.1"}[host])

    def choose(rank, addresses):
        job.pop("GLOO_SOCKET_IFNAME", None)
        monkeypatch.setattr(rendezvous, "_meeting", Meeting(rank, 2, 1, "a", 1))
        rendezvous._choose_card(addresses)
        return job.get("GLOO_SOCKET_IFNAME")

    assert choose(0, ["10.9.0.1", "10.9.0.2"]) == "ib0"
    assert choose(0, ["127.0.1.1", "10.9.0.2"]) == "ib0"  # machine 0's own name stands for loopback
    assert choose(0, ["127.0.0.1", "127.0.0.1"]) == "lo"
    assert choose(0, [None, "10.9.0.2"]) is None
    job["GLOO_SOCKET_IFNAME"] = "eth0"
    rendezvous._choose_card(["10.9.0.1", "10.9.0.2"])
    assert job["GLOO_SOCKET_IFNAME"] == "eth0"
