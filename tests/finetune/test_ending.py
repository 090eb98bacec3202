import os
import time

import pytest

from finetune.ending import failures_end_the_job
from finetune.failure import InputError, StopRequested, TrainingError


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

    def work(error, debug=False):
        with pytest.raises(Exit) as caught, failures_end_the_job(debug):
            raise error
        return caught.value.args[0], capsys.readouterr().err, sum(slept)

    return work


@pytest.mark.parametrize(("error", "code"), [(InputError("a"), 2), (TrainingError("a"), 3)])
def test_a_known_failure_is_one_message_and_its_exit_code(ended, error, code):
    assert ended(error) == (code, "error: a\n", 0)


def test_a_stop_has_been_told_of_already(ended):
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


def test_the_cause_is_printed_before_its_echoes(ended, environment):
    assert ended(RuntimeError("Connection closed by peer"))[2] > 0
    environment["LOCAL_RANK"] = "1"
    assert ended(InputError("a"))[2] > 3


def test_a_good_end_and_help_are_no_failures(monkeypatch):
    monkeypatch.setattr(os, "_exit", pytest.fail)
    with failures_end_the_job(False):
        pass
    with pytest.raises(SystemExit), failures_end_the_job(False):
        raise SystemExit(0)
