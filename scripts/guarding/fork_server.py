"""Runs commands in forks of a process that has imported the libraries: saves their start-up.

Reads a JSON line {"arguments", "output", "errors", "ended"} per command from standard input. Writes the exit
code (negative: a signal) to the file `ended`, and the process's number at once to `ended`.pid.
"""

import contextlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import accelerate  # noqa: F401
import datasets  # noqa: F401
import transformers.models.bert.modeling_bert
import transformers.trainer_pt_utils  # noqa: F401

with contextlib.suppress(ImportError):
    import evaluate  # noqa: F401
    import sklearn.metrics  # noqa: F401

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for the watchers
for line in sys.stdin:
    request = json.loads(line)
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    child = os.fork()
    if child:
        Path(request["ended"] + ".pid").write_text(str(child))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        Path(request["ended"] + ".part").write_text(str(code))
        os.rename(request["ended"] + ".part", request["ended"])
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    sys.argv = request["arguments"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()
