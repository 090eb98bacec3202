"""Processes are threads here, which talk over a real store on this machine."""

import itertools
import json
import queue
import socket
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from launchers import free_port

from samerun import machines
from samerun.errors import InputError, process_name
from samerun.machines import cause_of_failure, differences, meet, open_store

pytestmark = pytest.mark.slow


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def job(environment, port):
    """The variables of a job whose rank 0 is on this machine."""
    environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        environment.pop(name, None)
    return environment


def launch(rank, size=2, local=1, timeout=60):
    return SimpleNamespace(rank=rank, world_size=size, local_world_size=local, timeout_seconds=timeout)


def together(compared, *, timeout=60, local=1):
    """What came of the meeting of these ranks, None for one that stays away: None, or the problems."""
    outcome, kept = {}, []

    def come(rank):  # rank 0's store goes away when it fails
        try:
            store = open_store(launch(rank, len(compared), local), timeout)
            meet(store, launch(rank, len(compared), local), compared[rank], timeout)
            kept.append(store)  # as the process group does
            outcome[rank] = None
        except InputError as error:
            outcome[rank] = error.problems

    ranks = [rank for rank, one in enumerate(compared) if one is not None]
    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return outcome


def test_all_who_agree_go_on(job):
    assert together([{"arguments": {"--seed": 1}}] * 3) == {0: None, 1: None, 2: None}
    assert "GLOO_SOCKET_IFNAME" in job


def test_every_difference_is_reported_to_every_rank(job, monkeypatch):
    slept, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    first = {"arguments": {"--seed": 1, "--rate": 0.1}, "code": {"a.py": "x"}}
    other = {"arguments": {"--seed": 2, "--rate": 0.1}, "code": {"a.py": "y", "b.py": "z"}}
    outcome = together([first, other])
    host = socket.gethostname()
    assert machines.READING_SECONDS in slept  # rank 0, which holds the store
    assert outcome[0] == outcome[1]
    assert outcome[0] == [
        f"rank 1 ({host}): --seed is 2, but 1 on rank 0 ({host})",
        f"rank 1 ({host}): a.py is y, but x on rank 0 ({host})",
        f"rank 1 ({host}): b.py is z, but absent on rank 0 ({host})",
        "every machine needs the same code, libraries, files and arguments",
    ]


def test_a_difference_is_told_once_per_machine():
    infos = [
        {"rank": rank, "host": host, "compared": {"arguments": {"--seed": seed}}}
        for rank, host, seed in ((0, "m0", 1), (1, "m1", 2), (2, "m1", 2), (3, "m2", 1))
    ]
    assert [line for line in differences(infos) if "--seed" in line] == [
        "rank 1 (m1): --seed is 2, but 1 on rank 0 (m0)"
    ]
    assert differences(infos[:1]) == []


def test_the_place_is_shown_where_long_values_differ():
    labels = [f"label {number}" for number in range(30)]
    values = enumerate((labels, [*labels[:-1], "other"]))
    infos = [{"rank": rank, "host": "m", "compared": {"data": {"labels": value}}} for rank, value in values]
    assert "'label 28', 'other'], but " in differences(infos)[0]


def test_a_machine_that_does_not_come_is_named(job, port):
    job[machines.MACHINE_NAMES] = "node7,node9"
    ((problem,), other) = together([{}, {}, None, None], timeout=1, local=2).values()
    assert other == [problem]
    expected = f"2 of 4 processes did not connect to 127.0.0.1:{port} within 1 s: rank 2 (machine 1, node9), "
    assert expected in problem
    assert "wait longer with --start_timeout" in problem


def test_a_machine_whose_rank_0_does_not_come_says_so(job, port):
    (problem,) = together([None, {}], timeout=1)[1]
    assert f"{process_name()}: machine 0 did not answer at 127.0.0.1:{port} within 1 s" in problem


def test_a_port_that_is_taken_is_named(job, port):
    with socket.create_server(("", port)), pytest.raises(InputError, match=f"port {port} of .* is in use"):
        open_store(launch(0), timeout=1)


def test_a_store_of_many_processes_may_open_more_files_than_a_shell_allows(job, monkeypatch):
    limits = [(1024, 4096)]
    monkeypatch.setattr(machines.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(machines.resource, "setrlimit", lambda _, limit: limits.append(limit))
    open_store(launch(0, 64), 60)
    assert limits == [(1024, 4096)]
    open_store(launch(0, 512), 60)
    assert limits[1:] == [(512 + 4 * 512, 4096)]
    open_store(launch(0, 1024), 60)
    assert limits[2:] == [(4096, 4096)]


def test_processes_do_not_read_what_was_stored_before_a_restart(job, port):
    """The launcher keeps its store over restarts."""
    launchers_store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
    job["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    open_store(launch(0), 60).set("address", "of a dead process")
    assert open_store(launch(1), 60).check(["address"])
    job["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert not open_store(launch(1), 60).check(["address"])
    del launchers_store


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_variables_are_compared_with_the_interfaces(job, variable):
    interfaces = [("lo", "127.0.0.1")]
    for accepted in ("", "lo", "l", "=lo", "nowhere,lo", "^docker"):  # NCCL's syntax
        job[variable] = accepted
        assert machines._unknown_interfaces(interfaces) == []
    job[variable] = "nowhere7"
    told = f"{variable}=nowhere7: {socket.gethostname()} has no such network interface; it has lo (127.0.0.1)"
    assert machines._unknown_interfaces(interfaces) == [told]
    for problems in together([{}, {}]).values():  # it ends all processes
        assert problems[0].startswith(f"{variable}=nowhere7: ")


def test_the_interface_that_leads_to_the_others_is_chosen(job, monkeypatch):
    interfaces = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("ib0", "10.9.0.1")]
    monkeypatch.setattr(machines, "_own_address", lambda host: {"10.9.0.2": "10.9.0.1"}[host])

    def choose(own, others):
        job.pop("GLOO_SOCKET_IFNAME", None)
        machines._choose_interface(own, others, interfaces)
        return job.get("GLOO_SOCKET_IFNAME")

    assert choose("10.9.0.1", ["10.9.0.1", "10.9.0.2"]) == "ib0"
    assert choose("127.0.1.1", ["10.9.0.2"]) == "ib0"  # machine 0's own name stands for loopback
    assert choose("127.0.0.1", []) == "lo"
    assert choose(None, ["10.9.0.2"]) is None
    job["GLOO_SOCKET_IFNAME"] = "eth0"
    machines._choose_interface("10.9.0.1", ["10.9.0.1", "10.9.0.2"], interfaces)
    assert job["GLOO_SOCKET_IFNAME"] == "eth0"


# Heartbeats

SILENT = "no longer answers: killed, suspended, or cut off from the network"


@pytest.fixture
def reports():
    return queue.Queue()


@pytest.fixture
def peers(monkeypatch, reports):
    """Three processes on two machines: this one's record, the store, a function by which others publish."""
    store, own = dist.HashStore(), machines._Heartbeat()
    monkeypatch.setattr(machines, "_heartbeat", own)
    monkeypatch.setattr(machines, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(machines, "READING_SECONDS", 0.1)
    monkeypatch.setattr(machines, "GRACE_SECONDS", 0.5)
    beats = itertools.count()

    def publish(*ranks, **more):
        for rank in ranks:
            record = {"beat": next(beats), "collectives": 0, "host": f"machine{rank}", **more}
            store.set(f"heartbeat/{rank}", json.dumps(record))

    def begin(timeout=3600.0):
        machines.start(store, launch(0, 3, 2, timeout), reports.put)
        while not machines._heartbeat.records:
            time.sleep(0.01)

    publish(1, 2)
    yield SimpleNamespace(store=store, publish=publish, begin=begin)
    machines.stop()


def cause_while(peers, *living):
    """`cause_of_failure` while these ranks go on publishing."""
    ended = threading.Event()

    def live():
        while not ended.wait(0.02):
            peers.publish(*living)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        return cause_of_failure()
    finally:
        ended.set()
        thread.join()


def test_a_silent_or_hanging_process_is_named(peers):
    peers.begin()
    assert cause_while(peers, 1, 2) is None
    assert cause_while(peers, 2) == ([f"rank 1 (machine1) {SILENT}"], 69)
    machines.progress()
    told = "rank 1 (machine1), rank 2 (machine2) did not enter a collective that others wait in"
    ((lost,), code) = cause_while(peers, 1, 2)
    assert (lost.startswith(told), code) == (True, 69)


def test_a_silent_process_is_reported_before_the_backends_timeout(peers, reports):
    peers.begin(timeout=machines.HEAD_START_SECONDS + 0.2)
    assert reports.get(timeout=60).startswith("rank 1 (machine1), rank 2 (machine2) no longer answers")


@pytest.mark.parametrize(("grace", "what"), [(60, "did not enter"), (0.5, "no longer answers")])
def test_a_process_that_waits_too_long_reports_who_hangs_or_is_lost(peers, reports, monkeypatch, grace, what):
    monkeypatch.setattr(machines, "GRACE_SECONDS", grace)
    peers.begin()
    machines.progress()
    assert reports.empty()
    while grace < 1 and machines._heartbeat.summary["silence"] < grace:
        time.sleep(0.01)
    machines._heartbeat.entered -= 7200
    assert reports.get(timeout=60).startswith(f"rank 1 (machine1), rank 2 (machine2) {what}")


def test_a_suspended_process_does_not_blame_others(peers, reports, monkeypatch):
    peers.begin(timeout=13.0)
    seconds = itertools.count(time.monotonic(), 20.0)
    monkeypatch.setattr(machines.time, "monotonic", lambda: next(seconds))  # each beat comes late
    threading.Event().wait(0.3)
    assert reports.empty()


def test_the_end_of_a_process_is_published_and_is_that_of_the_others(peers, job):
    peers.begin()
    machines.send_notice(["a.csv: gone"], 2)
    assert json.loads(peers.store.get("heartbeat/0"))["notice"] == [["a.csv: gone"], 2]
    assert cause_of_failure() == (["a.csv: gone"], 2)


def test_what_another_process_has_said_is_not_repeated(peers, job):
    peers.begin()
    peers.publish(2, notice=[["train.csv:3: bad"], 2])
    assert cause_of_failure() == (["train.csv:3: bad"], 2)
    machines.send_notice(["train.csv:3: bad [rank 0]"], 2)
    assert machines._heartbeat.notice is None


@pytest.mark.parametrize(("code", "told"), [(2, False), (75, True)])
def test_a_failure_is_not_told_on_one_machine_a_stop_is(peers, monkeypatch, job, code, told):
    peers.begin()
    monkeypatch.setattr(machines._heartbeat, "launch", launch(0, 3, 3))
    machines.send_notice(["SIGTERM; rank 0"], code)
    assert (machines._heartbeat.notice is not None) == told


@pytest.fixture
def rank_1(peers, reports):
    """This process is rank 1, and reads what rank 0's thread makes of the records of `size` processes."""
    ended = []

    def begin(size=3, timeout=3600.0, living=True, store=peers.store):
        peers.publish(*range(1, size))
        now = time.monotonic()
        rank_0 = machines._Heartbeat(peers.store, launch(0, size), pytest.fail, entered=now, answered=now)
        thread = threading.Thread(target=machines._beat, args=(rank_0,), daemon=True)
        thread.start()
        machines.start(store, launch(1, size, timeout=timeout), reports.put)
        ended.append(rank_0)
        while not machines._heartbeat.summary:
            time.sleep(0.01)
        if not living:
            rank_0.finished.set()
            thread.join()  # it must not count a collective that rank 1 enters from now on

    yield begin
    for rank_0 in ended:
        rank_0.finished.set()


@pytest.mark.parametrize("size", [3, 300])
def test_a_process_reads_one_key_a_beat_whatever_their_number(rank_1, peers, monkeypatch, size):
    beats, read = [], machines._read_summary
    monkeypatch.setattr(machines, "_read_summary", lambda own: (beats.append(1), read(own)))
    store = Mock(wraps=peers.store)
    rank_1(size, store=store)
    while len(beats) < 5:
        time.sleep(0.01)
    assert len(beats) - 1 <= store.get.call_count <= len(beats)
    assert not store.multi_get.called


def test_other_processes_learn_from_rank_0_who_is_silent_behind_or_ends(rank_1, peers):
    rank_1()
    machines.progress()
    assert cause_while(peers, 2)[0][0].startswith("rank 0 (")  # it entered none
    assert cause_while(peers) == ([f"rank 2 (machine2) {SILENT}"], 69)
    peers.publish(2, notice=[["SIGTERM; rank 2"], 75])
    assert cause_of_failure() == (["SIGTERM; rank 2"], 75)


def test_a_silent_rank_0_is_reported_by_the_others(rank_1, reports):
    rank_1(size=2, timeout=machines.HEAD_START_SECONDS + 0.3, living=False)
    machines.progress()
    assert reports.get(timeout=60).startswith(f"rank 0 ({socket.gethostname()}) no longer answers")


def test_a_message_names_a_few_of_many_processes():
    records = [{"beat": 1, "collectives": rank // 100, "host": "m"} for rank in range(300)]
    summary = machines._summary(records, [5.0 * (rank > 250) for rank in range(300)])
    own = machines._Heartbeat(launch=launch(1, 300), summary=summary, seen=10.0, answered=10.0)
    assert machines._lost(own, 10.0, 4.5).startswith("rank 251 (m), rank 252 (m),")
    assert "rank 258 (m) and others no longer answers" in machines._lost(own, 10.0, 4.5)
    assert machines._lost(own, 10.0, 5.5) is None
    assert "rank 7 (m) and others did not enter a collective" in machines._hanging(own)
    own.entered = 9.5
    assert machines._hanging(own) is None  # the summary may be older than what this process waits for


def test_who_fell_silent_first_is_named():
    records = [{"beat": 1, "collectives": 0, "host": "m"}] * 4
    assert machines._summary(records, [0.5, 9.0, 20.0, 19.0])["silent"] == "rank 2 (m), rank 3 (m)"


def test_a_store_that_does_not_answer_is_rank_0s(peers, job, monkeypatch):
    peers.begin()
    # The thread ends, as with a store that is gone.
    monkeypatch.setattr(machines._heartbeat, "store", object())
    job["MASTER_ADDR"] = "alpha"
    ((lost,), _) = cause_while(peers, 1, 2)
    assert lost.startswith("rank 0, which holds the rendezvous store (alpha), no longer answers")


def test_one_process_has_no_peers(monkeypatch):
    monkeypatch.setattr(machines, "_heartbeat", machines._Heartbeat())
    machines.send_notice(["SIGTERM; rank 0"], 75)
    assert cause_of_failure() is None


def test_network_errors():
    for message in (
        "[gloo] Timed out waiting 10000ms for recv operation to complete",
        "Connection closed by peer [127.0.0.1]:1",
        "NCCL error in: ..., remote process exited or there was a network error",
    ):
        assert machines.is_network_error(RuntimeError(message))
    assert not machines.is_network_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not machines.is_network_error(ValueError("timed out"))
