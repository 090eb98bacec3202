"""Requests to stop, sent to subprocesses because they end them, and the end of a job."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samerun import machines, signals
from samerun.errors import InputError, StopRequested, TrainingError
from samerun.machines import PeerStatus
from samerun.run_folder import status
from samerun.signals import failures_end_the_job

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
    time.sleep(5)
    print("still there", flush=True)
    os._exit(0)
time.sleep(0.5)
signals.exit_now(7)
"""
    # Returns when the worker has closed its end of the output, too.
    assert ends(body) == (7, "ready\n", "")


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


@pytest.mark.parametrize(("watched", "gone"), [(0, 1), (1, 1), (1, 2), (2, 2)])
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


# The end of a job


class Exit(BaseException):
    pass


@pytest.fixture
def ended(monkeypatch, environment, capsys):
    """Raises an error inside the guard; returns (exit code, stderr, seconds slept)."""
    slept = []

    def leave(code):
        raise Exit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(status, "path", None)  # another test may have opened a run in this process

    def work(error, debug=False):
        with pytest.raises(Exit) as caught, failures_end_the_job(debug):
            raise error
        return caught.value.args[0], capsys.readouterr().err, sum(slept)

    return work


@pytest.mark.parametrize(("error", "code"), [(InputError("a"), 2), (TrainingError("a"), 3)])
def test_a_known_failure_is_one_message_and_its_exit_code(ended, error, code):
    assert ended(error) == (code, "error: a\n", 0)


def test_a_stop_has_been_reported_already(ended):
    assert ended(StopRequested("a")) == (75, "", 0)


def test_several_problems_are_one_list(ended):
    assert ended(InputError("a", "b"))[1] == "2 errors:\n  - a\n  - b\n"


def test_a_stack_trace_on_request(ended):
    _, text, _ = ended(InputError("a"), debug=True)
    assert text.startswith("Traceback")
    assert text.endswith("\nerror: a\n")


def test_an_unknown_failure_keeps_its_stack_trace_and_names_the_rank(ended, environment):
    environment.update({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"})
    code, text, slept = ended(ZeroDivisionError("b"))
    assert (code, slept) == (3, 0)
    assert "Traceback" in text
    assert "error on rank 3 of 4 (" in text
    assert text.endswith("): ZeroDivisionError: b\n")


def test_the_cause_is_printed_before_its_echoes(ended, environment, monkeypatch):
    environment["LOCAL_RANK"] = "1"
    assert ended(InputError("a"))[2] >= 3
    monkeypatch.setattr(machines, "peer_status", PeerStatus)
    _, text, slept = ended(RuntimeError("Connection closed by peer"))
    assert slept >= 3
    assert "Traceback" in text  # nobody is missing: whatever it is, here is where


def test_who_no_longer_answers_is_named(ended, monkeypatch, tmp_path):
    status.begin(tmp_path, 3)
    lost = "rank 1 (beta) no longer answers: killed, suspended, or cut off from the network"
    monkeypatch.setattr(machines, "peer_status", lambda: PeerStatus(lost=lost))
    code, text, _ = ended(RuntimeError("Timed out waiting 10000ms for recv operation to complete"))
    assert code == 69
    assert text.startswith("error on rank 0 of 1 (")
    assert (
        "rank 1 (beta) no longer answers: killed, suspended, or cut off from the network. The same "
        "command with" in text
    )
    assert text.endswith("(RuntimeError: Timed out waiting 10000ms for recv operation to complete)\n")
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["state"], found["step"], found["reason"][:13]) == ("failed", 3, "rank 1 (beta)")


def test_the_heartbeat_ends_a_process_that_waits_in_vain(ended, monkeypatch, tmp_path, capsys):
    status.begin(tmp_path, 3)
    with pytest.raises(Exit) as caught, failures_end_the_job(False):
        machines._on_lost_peer("rank 1 (beta) did not enter")
    assert caught.value.args == (69,)
    assert "): rank 1 (beta) did not enter. The same command with" in capsys.readouterr().err
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


def test_a_process_that_goes_on_after_its_job_is_not_ended_over_it(ended):
    for error in (InputError("a"), RuntimeError("Connection closed by peer")):
        ended(error)
        assert machines._on_lost_peer is None
    with failures_end_the_job(False):
        assert machines._on_lost_peer is not None
    assert machines._on_lost_peer is None


def test_a_process_that_left_on_request_is_no_failure(ended, monkeypatch, tmp_path):
    status.begin(tmp_path, 3)
    monkeypatch.setattr(machines, "peer_status", lambda: PeerStatus(stopped="SIGTERM; rank 1"))
    assert ended(RuntimeError("Connection closed by peer")) == (75, "", 0)
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["state"], found["reason"]) == ("stopped", "SIGTERM; rank 1")


def test_a_launcher_that_ends_the_job_has_said_why(ended, monkeypatch, tmp_path):
    status.begin(tmp_path, 3)
    monkeypatch.setattr(signals, "requested", lambda: "SIGTERM")
    monkeypatch.setattr(machines, "peer_status", pytest.fail)
    assert ended(RuntimeError("Connection reset by peer")) == (3, "", 0)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


def test_the_failure_of_another_machine_is_this_ones(ended, monkeypatch):
    failed = InputError("train.csv:3: bad [rank 2 of 3 (beta)]")
    monkeypatch.setattr(machines, "peer_status", lambda: PeerStatus(failed=failed))
    code, text, _ = ended(RuntimeError("Connection closed by peer"))
    assert (code, text) == (2, "error: train.csv:3: bad [rank 2 of 3 (beta)]\n")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_no_stack_trace(ended, error, tmp_path):
    status.begin(tmp_path, 3)
    code, text, _ = ended(error)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"
    assert code == 3
    assert text.count("\n") == 1
    assert "the disk is full (" in text
    assert "--resume_from_checkpoint auto" in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes.\nmore"),
         "DefaultCPUAlloc"),
        (MemoryError(), "out of memory (MemoryError). Free memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory ([Errno 12]"),
        (OSError(errno.EFBIG, "File too large", "o/x"),
         "'o/x'). Files that were complete before still are. Raise"),
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


def test_a_good_end_and_help_are_no_failures(monkeypatch):
    monkeypatch.setattr(os, "_exit", pytest.fail)
    with failures_end_the_job(False):
        pass
    with pytest.raises(SystemExit), failures_end_the_job(False):
        raise SystemExit(0)
