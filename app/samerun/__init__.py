"""The engine runs any task from its arguments to its output files, under any launcher. `main.py` is its
table of contents. The packages `text`, `images`, `volumes` and `models` stand beside the engine: it does not
import them.

A task of your own imports from here: `from samerun import Batch, Data, Split, Task, run`. Python programs and
notebooks call `train`, `load` and `predict`.
"""

import importlib
from typing import Any

__version__ = "0.9.0"
# Name -> module. Imported lazily: a script reads its arguments before it imports torch.
_MODULES = {
    "option": "samerun.parsing",
    "read_arguments": "samerun.cli",
    "run": "samerun.main",
    "InputError": "samerun.errors",
    "TrainingError": "samerun.errors",
    "StopRequested": "samerun.errors",
    **dict.fromkeys(
        ("Batch", "ModelCard", "Data", "Predictions", "ReportContent", "Section", "Split", "Task"),
        "samerun.task",
    ),
    "replace_folder": "samerun.files",
    **dict.fromkeys(("train", "load", "predict"), "samerun.api"),
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
