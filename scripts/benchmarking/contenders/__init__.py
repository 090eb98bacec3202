"""Contenders, which run in child processes. Each module's CONTENDERS maps names to functions: settings ->
measurements."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarking.processes import REPOSITORY


def run_contender(settings: dict[str, Any]) -> None:
    """Runs the contender of settings["contender"] (MODULE.NAME), writes its result and ends the process."""
    sys.path.insert(0, str(REPOSITORY / "app"))
    module, _, name = settings["contender"].partition(".")
    if name == "ours":
        from samerun.cli import set_up_host

        psutil.cpu_percent = lambda seconds: 0.0  # contenders take turns, so each computes alone
        set_up_host()  # before torch is imported, as in the scripts of app/
    contender = importlib.import_module(f"benchmarking.contenders.{module}").CONTENDERS[name]
    answer = contender(settings | {"contender": name})
    Path(settings["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # without exit handlers
