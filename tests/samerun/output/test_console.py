"""A lost console is no reason to end: tried in processes of their own, which lose theirs."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from samerun.output import console

APP = Path(__file__).parents[3] / "app"
BODY = f"""
import os, sys
sys.path.insert(0, {str(APP)!r})
from samerun.output.console import survive_a_lost_console
survive_a_lost_console()
sys.stdin.read() if sys.stdin else None
for _ in range(10_000):
    print("a line", flush=True)
print("a line", file=sys.stderr)
with open(sys.argv[1], "w") as file:
    file.write(str(file.fileno() > 2))
"""


def after(tmp_path, redirection, text=BODY):
    """(exit code, what the process left in its file, standard error) of a process with its streams redirected
    by a shell."""
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


def test_long_lines_are_wrapped_on_a_terminal_only(monkeypatch):
    monkeypatch.setattr(console, "_quiet", False)
    monkeypatch.setenv("COLUMNS", "60")
    path = "/" + "long_name/" * 7
    for is_terminal in (True, False):
        out = io.StringIO()
        out.isatty = lambda: is_terminal  # noqa: B023
        monkeypatch.setattr(sys, "stdout", out)
        console.say(f"note           {'word ' * 12}end", f"done           {path}", f"{'':<15}in line")
        said = out.getvalue().splitlines()
        assert said[-1] == f"{'':<15}in line"
        if is_terminal:
            assert said[:2] == [f"note           {'word ' * 8}word", f"{'':<15}word word word end"]
            assert said[2:4] == ["done", f"{'':<15}{path}"]
        else:
            assert len(said) == 3


@pytest.mark.parametrize("words", ["--help", "--learning_rate=x"])
def test_the_scripts_answer_into_a_lost_console(tmp_path, words):
    command = ["bash", "-c", '"$@" >&- 2>&-', "bash", sys.executable, str(APP / "classify.py"), words]
    assert subprocess.run(command, timeout=300, check=False).returncode == (0 if words == "--help" else 2)
