"""What runs in the children: each module's CONTENDERS are functions from the settings to what was measured."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarking import application
from benchmarking.processes import REPOSITORY


def contend(settings: dict[str, Any]) -> None:
    """Runs the contender that settings["contender"] names as MODULE.NAME, hands its result over and ends the process."""
    sys.path.insert(0, str(REPOSITORY / "app"))
    module, _, name = settings["contender"].partition(".")
    if name == "ours":
        application.begin()  # before torch is imported, as the scripts of app/ do
    answer = importlib.import_module(f"benchmarking.contenders.{module}").CONTENDERS[name](settings | {"contender": name})
    Path(settings["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the result is written; nothing of what exit handlers do belongs to the measurement
