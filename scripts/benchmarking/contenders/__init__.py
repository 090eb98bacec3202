"""What runs in the children: each module's CONTENDERS are functions from the settings to what was measured."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarking import application


def contend(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs the contender that settings["contender"] names as MODULE.NAME."""
    module, _, name = settings["contender"].partition(".")
    if name.startswith("ours"):
        application.begin()  # before torch is imported, as the scripts of app/ do
    return importlib.import_module(f"benchmarking.contenders.{module}").CONTENDERS[name](settings | {"contender": name})
