"""A fork of the tests' server ends and says as the command that it stands for (see `forks`)."""

import signal
import subprocess
import sys

import forks
import pytest
from launchers import environment, run

pytestmark = pytest.mark.slow
SAYS = "import os, sys; print(sys.argv, os.getcwd(), os.environ['WHO']); "


@pytest.mark.parametrize("end", ["", "sys.exit(7)", "os.kill(os.getpid(), 9)", "1 / 0"])
def test_a_fork_ends_as_the_command_does(end, tmp_path, monkeypatch):
    monkeypatch.setenv("WHO", "a b")
    command = [sys.executable, "-c", SAYS + end, "--one", "two words", ""]
    fork, real = run(command, tmp_path), run(command, tmp_path, real=True)
    assert (fork.code, fork.out) == (real.code, real.out)
    assert fork.err.splitlines()[-1:] == real.err.splitlines()[-1:]


HEARS = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
print("ready", flush=True)
time.sleep(99)
"""


def test_a_signal_reaches_the_fork_and_a_kill_ends_it(tmp_path):
    command = [str(forks.commands() / "python"), "-c", HEARS]
    process = subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "heard\n"
    process.kill()
    assert process.stdout.read() == ""  # the fork, too, has closed its end
