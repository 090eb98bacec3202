"""Requests to stop, sent to subprocesses because they end them, and the end of a job."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from in_process import ProcessExit
from launchers import APP

from samerun import machines, signals
from samerun.errors import InputError, StopRequested, TrainingError, process_name
from samerun.run_folder import status
from samerun.signals import failures_end_the_job

pytestmark = pytest.mark.slow

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


AT_ONCE = "stopped: SIGTERM: ended at once, nothing to save\n"
SECOND = "stopped: SIGTERM came after SIGTERM: ended at once, nothing was saved since the last checkpoint\n"
# What is tried: (what the process does, its exit code, output and errors)
REQUESTS = {
    "a deferred request waits to be looked at": (
        "signals.defer(); request(signal.SIGUSR1); print(received())",
        (0, "SIGUSR1\n", ""),
    ),
    "one request comes twice: from the terminal or Slurm, and then from the launcher": (
        "signals.defer(); request(signal.SIGINT); request(); received(); time.sleep(0.2); print(received())",
        (0, "SIGINT\n", ""),
    ),
    "a second request ends the process": (
        """
signals.SAME_REQUEST_SECONDS = 0.0
signals.on_immediate_stop(lambda: print("uploads"))
signals.defer()
request()
print(received(), flush=True)
request()
time.sleep(60)
""",
        (128 + signal.SIGTERM, "SIGTERM\n", SECOND),
    ),
    "the main thread is in a library: a handler in Python would wait for its return": (
        """
import ctypes, threading
signals.SAME_REQUEST_SECONDS = 0.0
signals.defer()
threading.Timer(0.2, request).start()
threading.Timer(0.6, request).start()
ours, others = os.pipe()
ctypes.CDLL(None).read(ours, ctypes.create_string_buffer(1), 1)
""",
        (128 + signal.SIGTERM, "", SECOND),
    ),
    "a library that a signal interrupts goes on": (
        """
import ctypes, threading
signals.defer()
ours, others = os.pipe()
threading.Timer(0.2, request).start()
threading.Timer(0.5, lambda: os.write(others, b"x")).start()
print(ctypes.CDLL(None).read(ours, ctypes.create_string_buffer(1), 1))
""",
        (0, "1\n", ""),
    ),
    "a reported end is not reported again": (
        "signals.exit_with(3, reported=True); request(); time.sleep(60)",
        (3, "", ""),
    ),
    "a process that is done does not overtake its stop": (
        "signals.on_immediate_stop(lambda: time.sleep(0.5))\nrequest(); time.sleep(0.2); signals.exit_done()",
        (75, "", AT_ONCE),
    ),
    "a request between the last look of a training loop and its end": (
        "signals.defer(); request(); print(received(), flush=True); signals.exit_with(75); print('there')",
        (75, "SIGTERM\n", AT_ONCE),
    ),
    "an end that is no stop": (
        "signals.defer(); request(); received(); signals.exit_with(3); print('still there', flush=True)",
        (0, "still there\n", ""),
    ),
    "a worker is ended without a request to its parent, as when a pool's work is done": (
        """
signals.defer()
worker = os.fork()
if worker == 0:
    time.sleep(60)
    os._exit(0)
os.kill(worker, signal.SIGTERM)
print(os.waitpid(worker, 0)[1] == signal.SIGTERM)
time.sleep(0.3)
print(signals.requested())
""",
        (0, "True\nNone\n", ""),
    ),
    # Returns when the worker has closed its end of the output, too.
    "workers that ignore signals end with the process": (
        """
worker = os.fork()
if worker == 0:
    signals.ignore_signals()
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
    print("still there", flush=True)
    os._exit(0)
time.sleep(0.5)
signals.exit_now(7)
""",
        (7, "ready\n", ""),
    ),
}


@pytest.mark.parametrize("tried", REQUESTS)
def test_requests(tried):
    body, expected = REQUESTS[tried]
    assert ends(body) == expected


@pytest.mark.parametrize(
    ("name", "rank"), [("SIGTERM", "0"), ("SIGUSR1", "0"), ("SIGINT", "0"), ("SIGHUP", "0"), ("SIGTERM", "1")]
)
def test_with_nothing_to_save_a_request_ends_the_process_and_rank_0_says_so(name, rank):
    said = f"stopped: {name}: ended at once, nothing to save\n" if rank == "0" else ""
    assert ends(f"request(signal.{name}); time.sleep(60)", rank) == (75, "", said)


def test_under_nohup_a_closed_terminal_is_no_request():
    body = "request(signal.SIGHUP); time.sleep(0.3); print(signals.requested())"
    code = BEGIN.replace("with signals", "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nwith signals")
    assert ends(body, begin=code) == (0, "None\n", "")


@pytest.mark.parametrize(("watched", "gone"), [(0, 1), (1, 1), (1, 2), (2, 2)])
def test_a_launcher_that_is_gone(watched, gone):
    """Below this test's process: the command that users know, what it starts, and the worker. One of the
    first two ends while the worker imports libraries."""
    body = f"""
(result, write_result), (go_on, goes), (end, ends) = os.pipe(), os.pipe(), os.pipe()
for generation in (3, 2, 1):
    if os.fork():
        break
else:
    os.close(ends)
    signals.POLL_SECONDS = 0.01
    with signals.listen():
        signals.defer()
        os.write(goes, b"!")
        time.sleep(0.5)
        signals.watch_launcher({watched})
        time.sleep(0.2)
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


# The end of a job


@pytest.fixture
def ended(monkeypatch, environment, capsys):
    """Raises an error inside the guard; returns (exit code, stderr, seconds slept)."""
    slept = []

    def leave(code):
        raise ProcessExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(time, "sleep", slept.append)

    def work(error):
        with pytest.raises(ProcessExit) as caught, failures_end_the_job(False):
            raise error
        return caught.value.args[0], capsys.readouterr().err, sum(slept)

    return work


LOST = "rank 1 (beta) no longer answers: killed, suspended, or cut off from the network"
FAILED = "train.csv:3: bad [rank 2 of 3 (beta)]"
TIMED_OUT = RuntimeError("Timed out waiting 10000ms for recv operation to complete")
ECHO = RuntimeError("Connection closed by peer")
FULL = OSError(errno.ENOSPC, "No space left on device")
# (the error; who caused a failed collective; exit code, standard error as a pattern, reason of the end)
ENDS = [
    (InputError("a"), None, 2, "error: a\n", "a"),
    (InputError("a", "b"), None, 2, "2 errors:\n  - a\n  - b\n", "a"),
    (TrainingError("a"), None, 3, "error: a\n", "a"),
    (StopRequested("a"), None, 75, "", None),  # has been reported already
    (ZeroDivisionError("b"), None, 3, r"Traceback.*\nerror on rank 3 of 4 \(.*\): ZeroDivisionError: b\n",
     "ZeroDivisionError: b"),
    (FULL, None, 3, r"error: the disk is full \([^\n]*--resume_from_checkpoint auto[^\n]*\n", "the disk is"),
    (ValueError("I/O error: No space left on device (os error 28)"), None, 3,
     r"error: the disk is full \([^\n]*--resume_from_checkpoint auto[^\n]*\n", "the disk is full"),
    # Nobody is missing: whatever it is, here is where.
    (ECHO, "nobody", 3, r"Traceback.*error on rank 3 of 4 \(.*: Connection closed by peer\n",
     "RuntimeError: Conn"),
    (TIMED_OUT, ([LOST], 69), 69,
     rf"error on rank 3 of 4 \(.*{re.escape(LOST)}\. The same command with.*\(RuntimeError: Timed out "
     r"waiting 10000ms for recv operation to complete\)\n", LOST),
    (ECHO, (["SIGTERM; rank 1"], 75), 75, "", "SIGTERM; rank 1"),  # left on request
    (ECHO, ([FAILED], 2), 2, rf"error: {re.escape(FAILED)}\n", FAILED),
]  # fmt: skip


@pytest.mark.parametrize(("error", "cause", "code", "said", "reason"), ENDS)
def test_the_end_of_a_job(ended, environment, monkeypatch, tmp_path, error, cause, code, said, reason):
    environment.update({"RANK": "3", "WORLD_SIZE": "4"})
    status.begin(tmp_path, 3)
    notices = []
    known = None if cause == "nobody" else cause
    monkeypatch.setattr(machines, "cause_of_failure", lambda: known if cause else pytest.fail("asked"))
    monkeypatch.setattr(machines, "send_notice", lambda *notice: notices.append(notice))
    found, text, slept = ended(error)
    assert (found, slept) == (code, 0)
    assert re.fullmatch(said, text, re.DOTALL), text
    if code in (2, 3):  # machines that wait learn of it
        ((told, its_code),) = notices
        assert its_code == code
        assert told[0].startswith(reason)
        assert told[-1].endswith(f" [{process_name()}]")
    else:
        assert notices == []
    found = json.loads((tmp_path / "status.json").read_text())
    if reason is None:
        assert found["state"] == "running"  # `stop_run` writes it
    else:
        assert (found["state"], found["step"]) == ("stopped" if code == 75 else "failed", 3)
        assert found["reason"].startswith(reason)


def test_the_cause_is_printed_before_its_echoes(ended, environment, monkeypatch):
    environment["LOCAL_RANK"] = "1"
    assert ended(InputError("a"))[2] >= 3
    monkeypatch.setattr(machines, "cause_of_failure", lambda: None)
    assert ended(ECHO)[2] >= 3


def test_the_heartbeat_ends_a_process_that_waits_in_vain(ended, monkeypatch, tmp_path, capsys):
    status.begin(tmp_path, 3)
    with pytest.raises(ProcessExit) as caught, failures_end_the_job(False):
        signals.end_after_lost_peer("rank 1 (beta) did not enter")
    assert caught.value.args == (69,)
    assert "): rank 1 (beta) did not enter. The same command with" in capsys.readouterr().err
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


def test_a_process_that_goes_on_after_its_job_is_not_ended_over_it(ended, capsys):
    ended(InputError("a"))
    signals.end_after_lost_peer("rank 1 (beta) did not enter")
    assert capsys.readouterr().err == ""


def test_a_launcher_that_ends_the_job_has_said_why(ended, monkeypatch, tmp_path):
    status.begin(tmp_path, 3)
    monkeypatch.setattr(signals, "requested", lambda: "SIGTERM")
    monkeypatch.setattr(machines, "cause_of_failure", pytest.fail)
    assert ended(RuntimeError("Connection reset by peer")) == (3, "", 0)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes.\nmore"),
         "DefaultCPUAlloc"),
        (MemoryError(), "out of memory (MemoryError). Free memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory ([Errno 12]"),
        (OSError(errno.EFBIG, "File too large", "o/x"),
         "'o/x'). Files that were complete before still are. Make room, or raise"),
        (OSError(errno.ENOSPC, "No space left on device", "o/x"),
         "full ([Errno 28] No space left on device: 'o/x')"),
    ],
)  # fmt: skip
def test_a_shortage_is_one_message_and_a_run_that_does_not_train_is_not_told_to_resume(ended, error, said):
    code, text, _ = ended(error)
    assert (code, text.count("\n")) == (3, 1)
    assert text.startswith("error: ")
    assert said in text
    assert "--resume" not in text
    assert text.endswith("Then run the same command again\n")


def test_in_a_training_every_process_says_how_to_resume(monkeypatch):
    monkeypatch.setattr(signals._requests, "exit_code", None)
    assert signals._explain_shortage(MemoryError()).endswith(signals.RESUME)


def test_a_good_end_and_help_are_no_failures(monkeypatch):
    monkeypatch.setattr(os, "_exit", pytest.fail)
    with failures_end_the_job(False):
        pass
    with pytest.raises(SystemExit), failures_end_the_job(False):
        raise SystemExit(0)


def test_only_a_command_closes_the_process_group(monkeypatch):
    calls, accelerator = [], SimpleNamespace(trackers=[])
    # A request ends a run with 0 only when its status is written.
    monkeypatch.setattr(status, "end", lambda state: calls.append((state, signals._requests.exit_code)))
    run = SimpleNamespace(
        accelerator=accelerator, wait=lambda: None, close_process_group=lambda: calls.append("closed")
    )
    signals.finish(run)  # `samerun.train`, perhaps in Ray's group
    signals.forget()
    assert calls == [("done", 75)]
    with signals.listen():
        signals.finish(run)
    assert calls == [("done", 75), ("done", 75), "closed"]
