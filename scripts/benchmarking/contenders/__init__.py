"""What runs in the children: each module's CONTENDERS are functions from the settings to what was measured."""

from __future__ import annotations

import importlib
from typing import Any


def contend(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs the contender that settings["contender"] names as MODULE-NAME."""
    part, _, name = settings["contender"].partition("-")
    module = importlib.import_module(f"benchmarking.contenders.{part}")
    return module.CONTENDERS[name](settings | {"contender": name})
