import errno
import json
import os
import threading
import time

import pytest

from samerun import machines, signals
from samerun.errors import InputError, StopRequested, TrainingError
from samerun.machines import PeerStatus
from samerun.output import status
from samerun.signals import failures_end_the_job


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
    monkeypatch.setattr(signals, "_reporting", threading.Lock())
    monkeypatch.setattr(status, "_path", None)  # another test may have opened a run in this process

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
    assert code == 3
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
    assert caught.value.args == (3,)
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
