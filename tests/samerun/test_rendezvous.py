"""Processes are threads here: each has its own `Rendezvous`, and they talk over a real store on this
machine."""

import socket
import threading
import time
from contextlib import suppress

import pytest

from samerun import machines
from samerun.errors import InputError, process_name
from samerun.machines import (
    RemoteError,
    Rendezvous,
    from_environment,
    send_failure_notice,
    wait_for_all_ranks,
)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def job(environment, port, monkeypatch):
    """The variables of rank 0 of a job of two machines with one process each."""
    environment.update(
        RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    environment.pop("GLOO_SOCKET_IFNAME", None)
    environment.pop("NCCL_SOCKET_IFNAME", None)
    monkeypatch.setattr(machines, "_rendezvous", None)
    monkeypatch.setattr(machines, "_completed", False)
    return environment


def info(rank, compared=None, host=None):
    return {"rank": rank, "host": host or f"m{rank}", "address": "127.0.0.1", "compared": compared or {}}


def together(port, infos, *, timeout=60, local=1, names=(), act=None):
    """What came of the rendezvous of these ranks: every rank's info, or the exception."""
    outcome, places = {}, []

    def come(rank):
        place = Rendezvous(rank, len(infos), local, "127.0.0.1", port, names)
        places.append(place)  # rank 0's holds the store, for as long as the others read it
        try:
            place.connect(timeout)
            if act and act(rank, place):
                return
            outcome[rank] = place.gather("start", infos[rank], timeout, "--start_timeout")
        except InputError as error:
            outcome[rank] = error
            with suppress(Exception):
                place.send_failure_notice(error.problems, error.exit_code, timeout=1)

    threads = [
        threading.Thread(target=come, args=(rank,)) for rank, one in enumerate(infos) if one is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return outcome


def test_one_machine_needs_no_rendezvous(environment):
    environment.update(
        RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    wait_for_all_ranks({"a": 1}, timeout=1)
    send_failure_notice(["bad"], 2)
    assert from_environment() is None


def test_the_launchers_variables_say_where_to_meet(job):
    job[machines.MACHINE_NAMES] = "one,two"
    found = from_environment()
    assert (found.rank, found.world_size, found.local_world_size, found.machine_names) == (
        0,
        2,
        1,
        ("one", "two"),
    )
    del job["LOCAL_WORLD_SIZE"]
    job["LOCAL_SIZE"] = "2"  # deepspeed's name for it
    assert from_environment() is None


def test_all_who_agree_go_on(port):
    outcome = together(port, [info(rank, {"arguments": {"--seed": 1}}) for rank in range(3)])
    assert [found["rank"] for found in outcome[0]] == [0, 1, 2]
    assert outcome[1] == outcome[2] == [info(rank) for rank in range(3)]


def test_every_difference_is_reported_to_every_rank_once_per_machine(port):
    first = {"arguments": {"--seed": 1, "--rate": 0.1}, "code": {"a.py": "x"}}
    other = {"arguments": {"--seed": 2, "--rate": 0.1}, "code": {"a.py": "y", "b.py": "z"}}
    third = {
        "arguments": other["arguments"]
    }  # a second process of the machine, which leaves the code to the first
    outcome = together(port, [info(0, first), info(1, other, "m1"), info(2, third, "m1")])
    lines = [
        "rank 1 (m1): --seed is 2, but 1 on rank 0 (m0)",
        "rank 1 (m1): a.py is y, but x on rank 0 (m0)",
        "rank 1 (m1): b.py is z, but absent on rank 0 (m0)",
        "every machine needs the same code, libraries, files and arguments",
    ]
    assert outcome[0].problems == lines
    for rank in (1, 2):
        assert isinstance(outcome[rank], RemoteError)
        assert outcome[rank].problems == [*lines[:-1], f"{lines[-1]} [{process_name()}]"]


@pytest.mark.slow
def test_a_machine_that_does_not_come_is_named(port):
    infos = [info(0), info(1), None, None]
    found = together(port, infos, timeout=1, local=2, names=("node7", "node9"))[0].problems
    assert len(found) == 1
    assert (
        f"2 of 4 processes did not connect to 127.0.0.1:{port} within 1 s: rank 2 (machine 1, node9), "
        in found[0]
    )
    assert "wait longer with --start_timeout" in found[0]


def test_a_machine_whose_rank_0_does_not_come_says_so(port):
    found = together(port, [None, info(1)], timeout=1)[1].problems
    assert f"{process_name()}: machine 0 did not answer at 127.0.0.1:{port} within 1 s" in found[0]


def test_a_failure_before_the_rendezvous_reaches_the_other_machines(port):
    def act(rank, place):
        if rank == 1:
            place.send_failure_notice(["train.csv:3: bad"], 2, timeout=1)
        return rank == 1

    started = time.monotonic()
    outcome = together(port, [info(0), info(1), info(2)], timeout=60, act=act)
    assert outcome[0].problems == outcome[2].problems == [f"train.csv:3: bad [{process_name()}]"]
    assert outcome[0].exit_code == 2
    assert time.monotonic() - started < 30


def test_a_port_that_is_taken_is_named(job, port):
    with socket.create_server(("", port)), pytest.raises(InputError, match=f"port {port} of .* is in use"):
        wait_for_all_ranks({}, timeout=1)


def test_a_failure_notice_that_nobody_reads_is_soon_over(job, port):
    job["RANK"] = "1"
    started = time.monotonic()
    send_failure_notice(["bad"], 2, timeout=1)
    assert time.monotonic() - started < 10


def test_a_wrong_interface_is_refused_before_anyone_waits(job):
    job["GLOO_SOCKET_IFNAME"] = "nowhere7"
    with pytest.raises(
        InputError, match=r"GLOO_SOCKET_IFNAME=nowhere7: .* has no such network interface; it has"
    ):
        wait_for_all_ranks({}, timeout=60)


def test_the_interface_that_leads_to_the_others_is_chosen(job, monkeypatch):
    monkeypatch.setattr(
        machines, "addresses", lambda: [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("ib0", "10.9.0.1")]
    )
    monkeypatch.setattr(machines, "own_address", lambda host: {"10.9.0.2": "10.9.0.1"}[host])

    def choose(rank, addresses):
        job.pop("GLOO_SOCKET_IFNAME", None)
        machines._choose_interface(rank, addresses)
        return job.get("GLOO_SOCKET_IFNAME")

    assert choose(0, ["10.9.0.1", "10.9.0.2"]) == "ib0"
    assert choose(0, ["127.0.1.1", "10.9.0.2"]) == "ib0"  # machine 0's own name stands for loopback
    assert choose(0, ["127.0.0.1", "127.0.0.1"]) == "lo"
    assert choose(0, [None, "10.9.0.2"]) is None
    job["GLOO_SOCKET_IFNAME"] = "eth0"
    machines._choose_interface(0, ["10.9.0.1", "10.9.0.2"])
    assert job["GLOO_SOCKET_IFNAME"] == "eth0"
