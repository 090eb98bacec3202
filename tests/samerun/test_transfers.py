"""The process that uploads."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from samerun import mirror
from samerun.transfers import Transfers

PRIORITY = os.getpriority(os.PRIO_PROCESS, 0)
PARENT = """
import os, sys, time
from pathlib import Path
from samerun import transfers
process = transfers.Transfers()
process.call("connect", Path(sys.argv[1]).as_uri())
if os.fork() == 0:
    time.sleep(1000)  # a worker that outlives the training
process.pipe.send(("put", (Path(sys.argv[2]), "a/b")))
print(process.process.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def transfers(tmp_path):
    started = Transfers()
    started.call("connect", tmp_path.as_uri())
    yield started
    started.close()


def test_it_has_the_lowest_priority_and_no_torch(transfers):
    process = transfers.process.pid
    threads = [int(name) for name in os.listdir(f"/proc/{process}/task")]
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {19}
    assert os.getpriority(os.PRIO_PROCESS, 0) == PRIORITY
    assert "libtorch" not in Path(f"/proc/{process}/maps").read_text()
    assert os.getpgid(process) == process  # Ctrl-C is not for it
    assert os.getsid(process) == os.getsid(0)  # or, with autogroup, its priority would count for nothing


def test_requests_to_stop_are_not_for_it(transfers):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        transfers.process.send_signal(number)
    assert transfers.call("names") == []


def test_it_ends_with_a_training_that_is_killed_during_an_upload(tmp_path):
    os.mkfifo(tmp_path / "endless")  # reading it does not end
    command = [sys.executable, "-c", PARENT, tmp_path / "mirror", tmp_path / "endless"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        assert process.status() != psutil.STATUS_ZOMBIE
        parent.kill()
        try:
            process.wait(60)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)  # the worker


def test_one_that_has_ended_is_replaced(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(mirror, "RETRY_SECONDS", 0.01)
    folder, url = tmp_path / "run", (tmp_path / "mirror").as_uri()
    folder.mkdir()
    (folder / "metrics.json").write_text("{}")
    copy = mirror.Mirror(url)
    copy.begin(folder, {}, None, False)
    copy.transfers.process.kill()
    for step in (1, 2):
        copy.submit(copy.stage(folder, step), None)
        copy.wait(60)
        assert copy.transfers.process.poll() is not None  # nothing is left to do
    assert [each.step for each in copy.complete] == [1, 2]
    notes = [line for line in capfd.readouterr().out.splitlines() if line.startswith("note")]
    assert len(notes) == 2
    assert "step 1 is not uploaded (the process that uploads ended with code -9); file:///" in notes[0]
    assert notes[1].endswith(f"{url} has step 1 again")


def test_it_ends_with_the_next_run_of_a_program_if_its_own_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_mirror", None)
    mirror.connect((tmp_path / "mirror").as_uri())
    process = mirror._mirror.transfers.process
    mirror.connect(None)
    assert process.poll() is not None
