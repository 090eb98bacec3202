import io
import os
import pty
import re
import subprocess
import sys

import pytest

from samerun.output import console, progress
from samerun.output.progress import Phase, counted


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "_lines_printed", 0)
    return clock


def run(phase, clock, steps, seconds):
    with phase:
        for _ in range(steps):
            clock.now += seconds
            phase.update()


def test_a_log_gets_a_line_per_tenth_of_a_phase(clock, capsys):
    run(Phase("training", "steps", 1900), clock, 1900, 0.2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[0] == "training       190 of 1,900 steps, 5.00 steps/s, 5:42 left"
    assert lines[-1] == "training       1,900 of 1,900 steps, 5.00 steps/s, 0:00 left"


def test_a_pipe_gets_lines_and_its_terminal_no_bars(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(Phase("training", "steps", 10), clock, 10, 20)
    said = capsys.readouterr()
    assert (len(said.out.splitlines()), said.err) == (10, "")


def test_a_log_of_a_long_phase_gets_at_most_a_hundred_lines(clock, capsys):
    run(Phase("training", "steps", 100_000), clock, 100_000, 6.0)
    assert len(capsys.readouterr().out.splitlines()) == 100


def test_a_log_of_many_phases_gets_at_most_200_lines(clock, capsys):
    for _ in range(500):
        run(Phase("evaluating", "rows", 10), clock, 10, 12.0)
    assert 100 < len(capsys.readouterr().out.splitlines()) <= 200


def test_a_log_of_a_phase_without_an_end_gets_fewer_and_fewer_lines(clock, capsys):
    run(Phase("reading a.csv", "rows"), clock, 10_000, 6.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "reading a.csv  10 rows, 0.17 rows/s"
    assert len(lines) == 9


def test_a_long_name_keeps_its_distance_in_a_log_and_its_ends_on_a_terminal(clock, capsys):
    run(Phase("training a tokenizer", "texts", 10), clock, 10, 20)
    assert capsys.readouterr().out.startswith("training a tokenizer 1 of 10 texts, ")
    assert progress._shortened("reading /data/2026/november/train.jsonl", 20) == "reading /d…ain.jsonl"
    assert progress._shortened("reading train.jsonl", 21) == "reading train.jsonl"


def test_a_short_phase_says_nothing(clock, capsys):
    run(Phase("training", "steps", 20), clock, 20, 0.2)
    assert list(counted("ab", "reading", "rows")) == ["a", "b"]
    assert capsys.readouterr() == ("", "")


def test_a_rate_counts_neither_earlier_steps_nor_phases_inside(clock):
    training = Phase("training", "steps", 200, done=100).start()
    assert training.rate == 0
    clock.now += 10
    training.update(10)
    with Phase("evaluating", "rows", 5):
        clock.now += 1000
    assert training.rate == 1
    assert training.describe() == "110 of 200 steps, 1.00 steps/s, 1:30 left"
    training.update(0, "loss 0.1234, 32.0 samples/s")
    assert training.describe() == "110 of 200 steps, loss 0.1234, 32.0 samples/s, 1:30 left"
    training.stop()
    training.stop()


def test_a_quiet_run_says_nothing(clock, capsys, monkeypatch):
    monkeypatch.setattr(console, "_quiet", False)
    console.be_quiet()
    run(Phase("training", "steps", 1900), clock, 1900, 0.2)
    console.say("note")
    assert capsys.readouterr() == ("", "")


ON_A_TERMINAL = """
import time
from samerun.output import progress
progress.BAR_DELAY = progress.REFRESH_INTERVAL = 0
with progress.Phase("training", "steps", 4) as training:
    for step in range(4):
        training.update(1, "loss 0.1234, 45.2 samples/s")
        with progress.Phase("evaluating", "rows", 2) as inner:
            inner.update(2)
        print("step", step)
    with progress.Phase("exporting"):
        pass
"""


@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_shows_bars_that_fit_and_vanish(columns):
    main, terminal = pty.openpty()
    environment = {
        **os.environ,
        "COLUMNS": str(columns),
        "TERM": "xterm",
        "NO_COLOR": "1",
        "PYTHONPATH": "app",
    }
    run = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    shown = io.BytesIO()
    try:
        while piece := os.read(main, 65536):
            shown.write(piece)
    except OSError:  # the other end is closed
        pass
    assert run.wait() == 0
    text = shown.getvalue().decode()
    assert "\x1b[3" not in text  # no colour
    lines = [
        line.split("\x1b[2K")[-1].removeprefix("\x1b[1A") for line in text.replace("\r", "\n").splitlines()
    ]
    bars = [line for line in lines if line.startswith("training ")]
    assert re.search(r"1/4  loss 0\.1234, 45\.2 samples/s  0:\d\d$", bars[0].rstrip())
    assert {len(line) for line in bars} == {columns}
    assert [line for line in lines if line.startswith("step")] == [f"step {number}" for number in range(4)]
    assert (
        text.rstrip().endswith("\x1b[?25h") or "\x1b[?25l" not in text.rpartition("\x1b[?25h")[2]
    )  # the cursor is back
