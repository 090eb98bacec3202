import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from finetune.launching import build_lock
from finetune.launching.build_lock import use_kernel_locks

APP = Path(__file__).parents[3] / "app"
HOLDER = """
import sys, time
from torch.utils.file_baton import FileBaton
from finetune.launching.build_lock import use_kernel_locks
use_kernel_locks()
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def baton(tmp_path, monkeypatch):
    for name in ("try_acquire", "wait", "release"):
        monkeypatch.setattr(FileBaton, name, getattr(FileBaton, name))  # put back in the end
    use_kernel_locks()
    return lambda: FileBaton(str(tmp_path / "lock"))


def test_one_holder_at_a_time(baton):
    first, second = baton(), baton()
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    second.wait()  # nothing to wait for
    assert second.try_acquire()
    second.release()
    assert not Path(second.lock_file_path).exists()


def test_a_waiting_process_goes_on_when_the_lock_is_released(baton):
    holder, waiting = baton(), baton()
    assert holder.try_acquire()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    holder.release()
    thread.join(60)
    assert not thread.is_alive()


def test_a_file_without_a_holder_locks_nothing(baton):
    stale = baton()
    Path(stale.lock_file_path).touch()
    assert stale.try_acquire()


def test_a_lock_does_not_outlive_its_holder(baton):
    mine = baton()
    environment = {**os.environ, "PYTHONPATH": str(APP)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, mine.lock_file_path], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert holder.stdout.readline() == "held\n"
    assert not mine.try_acquire()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert Path(mine.lock_file_path).exists()
    assert mine.try_acquire()


def test_a_file_that_its_holder_has_removed_meanwhile_is_not_taken(baton, monkeypatch):
    first, second, third = baton(), baton(), baton()
    assert first.try_acquire()
    opened, flock = [], build_lock.fcntl.flock

    def release_before(fd, operation):
        if not opened:
            opened.append(fd)
            first.release()
        flock(fd, operation)

    monkeypatch.setattr(build_lock.fcntl, "flock", release_before)
    assert second.try_acquire()
    assert opened
    assert not third.try_acquire()


def test_compiling_for_long_is_said_once(baton, monkeypatch, capsys):
    said = threading.Event()
    monkeypatch.setattr(build_lock, "PATIENCE", 0)
    monkeypatch.setattr(build_lock, "print", lambda *a, **k: (print(*a, **k), said.set()), raising=False)
    mine = baton()
    assert mine.try_acquire()
    assert said.wait(60)
    mine.release()
    folder = Path(mine.lock_file_path).parent
    assert capsys.readouterr().err == f"note           compiling {folder.name} for this machine, once, into {folder}\n"


def test_waiting_for_long_is_said(baton, monkeypatch, capsys):
    monkeypatch.setattr(build_lock, "WAITING_PATIENCE", 0)
    holder, waiting = baton(), baton()
    assert holder.try_acquire()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    until = time.monotonic() + 60
    while not (said := capsys.readouterr().err) and time.monotonic() < until:
        time.sleep(0.01)
    holder.release()
    thread.join(60)
    assert said.startswith("note           waiting for another process that compiles")


def test_what_is_quick_says_nothing(baton, monkeypatch, capsys):
    monkeypatch.setattr(build_lock, "PATIENCE", 600)
    monkeypatch.setattr(build_lock, "WAITING_PATIENCE", 600)
    words, timer = [], threading.Timer
    monkeypatch.setattr(threading, "Timer", lambda *given: words.append(timer(*given)) or words[-1])
    mine, other = baton(), baton()
    assert mine.try_acquire()
    mine.release()
    Path(other.lock_file_path).touch()
    other.wait()
    assert len(words) == 2
    assert all(word.finished.is_set() for word in words)  # neither lasts its time
    assert capsys.readouterr() == ("", "")
