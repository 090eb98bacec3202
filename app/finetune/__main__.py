"""The application as an installed command.

    finetune-classify --train_file train.csv ...
    python -m finetune classify --train_file train.csv ...
    accelerate launch -m finetune classify ...      torchrun --nproc_per_node 2 -m finetune classify ...
    deepspeed --module finetune classify ...

Each starts the script of a task as `python app/classify.py` does.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# In an installation scripts are in finetune/tasks/, in a checkout beside the package.
FOLDERS = (PACKAGE / "tasks", PACKAGE.parent)


def installed_command() -> None:
    """finetune-NAME runs the script NAME."""
    run_script(Path(sys.argv[0]).stem.removeprefix("finetune-"))


def run_script(name: str) -> None:
    """Runs a script with the arguments of this process, as its main module."""
    sys.argv[0] = str(scripts()[name])
    runpy.run_path(sys.argv[0], run_name="__main__")


def scripts() -> dict[str, Path]:
    """Names and files of all tasks, and of predict."""
    folder = next(folder for folder in FOLDERS if (folder / "predict.py").is_file())
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


if __name__ == "__main__":
    names = scripts()
    # deepspeed puts --local_rank in front of it
    asked = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    if asked not in names:
        sys.exit(f"usage: python -m finetune {{{','.join(names)}}} ...\n\narguments: python -m finetune classify --help")
    sys.argv.remove(asked)
    run_script(asked)
