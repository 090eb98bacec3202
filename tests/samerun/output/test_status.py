import datetime
import json

import pytest

from samerun.output import status


@pytest.fixture
def stored(tmp_path):
    """Reads status.json; None before there is one. No other test's run is left to write it."""
    status.end("done")
    yield (
        lambda: (
            json.loads((tmp_path / "status.json").read_text())
            if (tmp_path / "status.json").exists()
            else None
        )
    )
    status.end("done")


def test_how_a_run_stands_and_how_it_ended(stored, tmp_path):
    status.begin(tmp_path, 4)
    running = {"state": "running", "step": 4, "time": None, "reason": None, "micro_batch_parts": 1}
    assert {**stored(), "time": None} == running
    status.cut_micro_batches(4)
    assert {**stored(), "time": None} == running | {"micro_batch_parts": 4}
    datetime.datetime.fromisoformat(stored()["time"])
    status.saved(6)
    assert (stored()["state"], stored()["step"]) == ("running", 6)
    status.end("failed", "the loss is nan")
    assert (stored()["state"], stored()["step"], stored()["reason"]) == ("failed", 6, "the loss is nan")


def test_an_end_is_the_last_word(stored, tmp_path):
    status.begin(tmp_path, 0)
    status.end("stopped", "SIGTERM")
    status.saved(3)
    status.end("done")
    assert (stored()["state"], stored()["step"]) == ("stopped", 0)


def test_a_disk_that_is_full_does_not_change_how_a_run_ends(stored, tmp_path, monkeypatch):
    status.begin(tmp_path, 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status, "write_json", full)
    status.saved(3)
    assert stored()["state"] == "running"
    status.end("failed", "the disk is full")
    assert (stored()["state"], stored()["step"]) == ("failed", 3)


def test_a_run_that_has_no_folder_says_nothing(stored, tmp_path):
    status.end("failed", "bad input")
    status.saved(2)
    assert stored() is None
