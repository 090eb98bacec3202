"""The process that a task's script runs in."""

import subprocess
import sys

from launchers import CLASSIFY


def test_the_listening_to_signals_ends_before_the_interpreter_is_torn_down():
    """Python 3.13 waits for ever for a thread that is still to be joined then."""
    script = "from samerun import command_line; command_line._exit_stack.callback(print, 'closed')"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=CLASSIFY.parent, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "closed\n"
