"""Requests to stop are sent to subprocesses: they end them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samerun import signals

APP = Path(__file__).parents[2] / "app"
BEGIN = """
import os, signal, sys, time
sys.path.insert(0, {app!r})
from samerun import signals
def request(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
def received():
    while signals.requested() is None:
        time.sleep(0.01)
    return signals.requested()
with signals.listen():
"""


def ends(body, rank="0", begin=BEGIN):
    """(exit code, output, errors) of a process that runs `body` while it listens."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    code = begin.format(app=str(APP)) + lines
    # Python 3.12 warns of every fork beside a thread: what is tested forks and listens.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "RANK": rank}, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_with_nothing_to_save_a_request_ends_the_process(name):
    found = ends(f"request(signal.{name}); time.sleep(60)")
    assert found == (75, "", f"stopped: {name}: ended at once, nothing to save\n")


def test_under_nohup_a_closed_terminal_is_no_request():
    body = "request(signal.SIGHUP); time.sleep(0.3); print(signals.requested())"
    code = BEGIN.replace("with signals", "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nwith signals")
    assert ends(body, begin=code) == (0, "None\n", "")


def test_only_rank_0_says_so():
    assert ends("request(); time.sleep(60)", rank="1") == (75, "", "")


def test_a_deferred_request_waits_to_be_looked_at():
    assert ends("signals.defer(); request(signal.SIGUSR1); print(received())") == (0, "SIGUSR1\n", "")


def test_one_request_may_come_twice():
    """From the terminal or Slurm, and then from the launcher."""
    body = (
        "signals.defer(); request(signal.SIGINT); request(); print(received()); time.sleep(0.2); "
        "print(received())"
    )
    assert ends(body) == (0, "SIGINT\nSIGINT\n", "")


def test_a_second_request_ends_the_process():
    body = """
signals.SAME_REQUEST_SECONDS = 0.0
signals.defer()
request()
print(received(), flush=True)
request()
time.sleep(60)
"""
    code, out, said = ends(body)
    assert (code, out) == (128 + signal.SIGTERM, "SIGTERM\n")
    assert (
        said
        == "stopped: SIGTERM came after SIGTERM: ended at once, nothing was saved since the last checkpoint\n"
    )


def test_a_request_is_received_while_the_main_thread_is_in_a_library():
    """A handler in Python would wait for its return."""
    body = """
import ctypes, threading
signals.SAME_REQUEST_SECONDS = 0.0
signals.defer()
threading.Timer(0.2, request).start()
threading.Timer(0.6, request).start()
ours, others = os.pipe()
ctypes.CDLL(None).read(ours, ctypes.create_string_buffer(1), 1)
"""
    assert ends(body)[0] == 128 + signal.SIGTERM


def test_a_reported_end_is_not_reported_again():
    assert ends("signals.exit_with(3, reported=True); request(); time.sleep(60)") == (3, "", "")


def test_callbacks_get_the_reason_in_order():
    say = "".join(
        f"signals.on_immediate_stop(lambda why: print({number}, why, flush=True)); " for number in (1, 2)
    )
    code, out, _ = ends(f"{say}request(); time.sleep(60)")
    reason = "SIGTERM: ended at once, nothing to save\n"
    assert (code, out) == (75, f"1 {reason}2 {reason}")


def test_a_request_after_the_last_look():
    """Between the last look of a training loop and its end."""
    body = (
        "signals.defer(); request(); print(received(), flush=True); signals.exit_with(75); print('still "
        "there', flush=True)"
    )
    code, out, said = ends(body)
    assert (code, out) == (75, "SIGTERM\n")
    assert said == "stopped: SIGTERM: ended at once, nothing to save\n"
    body = "signals.defer(); request(); received(); signals.exit_with(3); print('still there', flush=True)"
    assert ends(body)[1] == "still there\n"


def test_a_worker_is_ended_without_a_request_to_its_parent():
    """As a pool of workers is ended when its work is done."""
    body = """
signals.defer()
worker = os.fork()
if worker == 0:
    time.sleep(60)
    os._exit(0)
os.kill(worker, signal.SIGTERM)
print(os.waitpid(worker, 0)[1] == signal.SIGTERM)
time.sleep(0.3)
print(signals.requested())
"""
    assert ends(body) == (0, "True\nNone\n", "")


def test_workers_that_ignore_signals_end_with_the_process():
    body = """
worker = os.fork()
if worker == 0:
    signals.ignore_signals()
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
    os._exit(0)
time.sleep(0.5)
print(worker, flush=True)
signals.exit_now(7)
"""
    code, out, _ = ends(body)  # returns only when the worker has closed its end of the output
    assert code == 7
    assert out.startswith("ready\n")


def test_a_library_that_a_signal_interrupts_goes_on():
    body = """
import ctypes, threading
signals.defer()
ours, others = os.pipe()
threading.Timer(0.2, request).start()
threading.Timer(0.5, lambda: os.write(others, b"x")).start()
print(ctypes.CDLL(None).read(ours, ctypes.create_string_buffer(1), 1))
"""
    assert ends(body) == (0, "1\n", "")


@pytest.mark.parametrize("watched", [0, 1, 2])
@pytest.mark.parametrize("gone", [1, 2])
def test_a_launcher_that_is_gone(watched, gone):
    """Below this test's process: the command that users know, what it starts, and the worker. One of the
    first two ends."""
    body = f"""
(result, write_result), (go_on, goes), (end, ends) = os.pipe(), os.pipe(), os.pipe()
for generation in (3, 2, 1):
    if os.fork():
        break
else:
    os.close(ends)
    signals.POLL_SECONDS = 0.01
    with signals.listen():
        signals.watch_launcher({watched})
        signals.defer()
        os.write(goes, b"!")
        time.sleep(0.7)
        os.write(write_result, str(signals.requested()).encode())
    os._exit(0)
if generation == 3:
    print(os.read(result, 64).decode(), flush=True)
else:
    os.close(ends)
    os.read(go_on if generation == {gone} else end, 1)
    os._exit(0)
"""
    expected = "the launcher is gone" if watched >= gone else "None"
    assert ends(body)[1].strip() == expected


def test_time_that_is_over(monkeypatch):
    with signals.listen():
        signals.set_time_limit(1000.0)
        assert signals.requested() is None
        later = time.monotonic() + 1000
        monkeypatch.setattr(time, "monotonic", lambda: later)
        assert signals.requested() == "--max_train_time 1000 is over"
        signals.set_time_limit(None)
        assert signals.requested() is None


def test_listening_leaves_everything_as_it_was():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with signals.listen():
        signals.set_time_limit(0.001)
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert signals.requested() is None
