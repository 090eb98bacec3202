"""The engine: it runs any task from its arguments to its output files, under any launch. `application.py` is its table of
contents; the modules beside it are used by it alone. Packages of kinds of data, models and metrics stand beside the engine's.

What a task of your own needs is here by its short name: `from finetune import Batch, Data, Split, Task, run`.

May import: nothing.
"""

import importlib
from typing import Any

__version__ = "1.0.0"
# Short name -> module. Imported when asked for: a script reads its arguments before it imports torch.
_MODULES = {
    "option": "finetune.arguments.parsing",
    "read_arguments": "finetune.command_line",
    "run": "finetune.application",
    "InputError": "finetune.errors",
    "TrainingError": "finetune.errors",
    **dict.fromkeys(("Batch", "Card", "Data", "Judgement", "Predictions", "Split", "Task"), "finetune.task"),
    "replace_folder": "finetune.output.run_folder",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
