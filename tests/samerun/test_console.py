"""A lost console is no reason to end: tried in processes of their own, which lose theirs."""

import io
import os
import pty
import subprocess
import sys

import pytest
from launchers import APP

from samerun import console
from samerun.console import Phase

BODY = f"""
import os, sys
sys.path.insert(0, {str(APP)!r})
from samerun.console import survive_a_lost_console
survive_a_lost_console()
sys.stdin.read()
for _ in range(10_000):
    print("a line", flush=True)
print("a line", file=sys.stderr)
with open(sys.argv[1], "w") as file:
    file.write(str(file.fileno() > 2))
"""


def after(tmp_path, redirection, text=BODY):
    """(exit code, the process's file, standard error) of a process with streams redirected by a shell."""
    left = tmp_path / "left"
    command = [sys.executable, "-c", text, str(left)]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}', "bash", *command],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        check=False,
    )
    return done.returncode, left.read_text(), done.stderr


@pytest.mark.parametrize("redirection", ["| head -1", ">&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>&1"])
def test_printing_into_a_lost_console_does_nothing(tmp_path, redirection):
    code, left, said = after(tmp_path, redirection)
    assert (code, left) == (0, "True")
    assert said in ("", "a line\n")


def test_what_is_said_comes_out(tmp_path):
    text = BODY.replace("10_000", "1").replace('"a line"', '"ü \\ud800 a line"')
    assert after(tmp_path, "2>&1 | grep -c 'a line' >&2", text)[2] == "2\n"


# Progress


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    monkeypatch.setattr(Phase, "first_began", clock.now)
    monkeypatch.setattr(Phase, "last_line", 0.0)
    return clock


def run(phase, clock, steps, seconds):
    with phase:
        for _ in range(steps):
            clock.now += seconds
            phase.update()


def test_a_log_gets_lines_that_become_rarer(clock, capsys):
    run(Phase("training", "steps", 400_000), clock, 1900, 0.2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training       50 of 400,000 steps, 5.00 steps/s, 22:13:10 left"
    assert 25 <= len(lines) <= 35
    run(Phase("training", "steps", 40_000), clock, 40_000, 2.0)
    for _ in range(500):
        run(Phase("evaluating", "rows", 10), clock, 10, 12.0)
    assert 90 < len(capsys.readouterr().out.splitlines()) < 130


def test_a_pipe_gets_lines_and_its_terminal_no_bars(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(Phase("reading a.csv", "rows"), clock, 10, 12)
    run(Phase("training a tokenizer", "texts", 10), clock, 1, 20)
    said = capsys.readouterr()
    assert said.out.startswith("reading a.csv  1 rows, 0.08 rows/s\n")
    assert said.out.endswith("\ntraining a tokenizer 1 of 10 texts, 0.05 texts/s, 0:03:00 left\n")
    assert (len(said.out.splitlines()), said.err) == (11, "")


def test_a_long_phase_that_counts_nothing_has_a_line(monkeypatch, capsys):
    monkeypatch.setattr(console, "LINE_INTERVAL", 0.01)
    with Phase("scoring") as phase:
        phase.timer.join()
    monkeypatch.setattr(console, "LINE_INTERVAL", 99.0)
    with Phase("saving") as phase:
        pass
    assert phase.timer.finished.is_set()
    assert capsys.readouterr().out == "scoring        still running after 0.01 seconds\n"


def test_a_short_phase_and_a_quiet_run_say_nothing(clock, capsys, monkeypatch):
    run(Phase("training", "steps", 20), clock, 20, 0.2)
    assert list(console.counted("ab", "reading", "rows")) == ["a", "b"]
    monkeypatch.setattr(Phase, "quiet", True)
    run(Phase("training", "steps", 1900), clock, 1900, 0.2)
    console.say("note           1 row is cut")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(Phase, "notes_on_stderr", True)  # predictions go to stdout
    console.say("time           2 seconds", "note           1 row is cut")
    assert capsys.readouterr() == ("", "note           1 row is cut\n")


def test_a_rate_counts_neither_earlier_steps_nor_phases_inside(clock):
    training = Phase("training", "steps", 200, done=100).start()
    assert training.rate == 0
    clock.now += 10
    training.update(10)
    with Phase("evaluating", "rows", 5):
        clock.now += 1000
    assert training.rate == 1
    assert training.describe() == "110 of 200 steps, 1.00 steps/s, 0:01:30 left"
    training.update(0, "loss 0.1234, 32.0 samples/s")
    assert training.describe() == "110 of 200 steps, loss 0.1234, 32.0 samples/s, 0:01:30 left"
    training.stop()
    training.stop()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (12, "12"),
        (0.0, "0.0000"),
        (-0.51236, "-0.5124"),
        (0.000012345, "1.234e-05"),
        (12345678.9, "1.235e+07"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_of_any_size_are_shown(value, text):
    assert console.number_text(value) == text


ON_A_TERMINAL = """
from samerun import console
from samerun.console import Phase
console.REFRESH_INTERVAL = 0
with console.Phase("training", "steps", 4) as training:
    for step in range(4):
        training.update(1, "loss 0.1234, 45.2 samples/s")
        with console.Phase("evaluating", "rows", 2) as inner:
            inner.update(2)
        print("step", step)
    with console.Phase("exporting"):
        pass
"""


@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_shows_bars_that_fit_and_vanish(columns):
    main, terminal = pty.openpty()
    own = {"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1", "PYTHONPATH": str(APP)}
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], stdout=terminal, stderr=terminal, env={**os.environ, **own}
    )
    os.close(terminal)
    shown = io.BytesIO()
    try:
        while piece := os.read(main, 65536):
            shown.write(piece)
    except OSError:  # the other end is closed
        pass
    assert process.wait() == 0
    text = shown.getvalue().decode()
    assert "\x1b[3" not in text  # no colour
    lines = [
        line.split("\x1b[2K")[-1].removeprefix("\x1b[1A") for line in text.replace("\r", "\n").splitlines()
    ]
    assert [line for line in lines if "training 1 of 4 steps, loss 0.1234, 45.2 samples/s" in line]
    assert max(map(len, lines)) <= columns
    assert [line for line in lines if line.startswith("step")] == [f"step {number}" for number in range(4)]
    shows_cursor = text.rstrip().endswith("\x1b[?25h") or "\x1b[?25l" not in text.rpartition("\x1b[?25h")[2]
    assert shows_cursor
