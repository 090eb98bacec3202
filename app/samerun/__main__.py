"""Commands of the installed package.

    samerun-classify --train_file train.csv ...
    python -m samerun classify --train_file train.csv ...
    accelerate launch -m samerun classify ...      torchrun --nproc_per_node 2 -m samerun classify ...
    deepspeed --module samerun classify ...

Each runs a script as `python app/classify.py` does.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# An installation has the scripts in samerun/tasks/, a checkout beside the package.
FOLDERS = (PACKAGE / "tasks", PACKAGE.parent)


def installed_command() -> None:
    """Entry point of every `samerun-NAME` command: runs the script NAME."""
    run_script(Path(sys.argv[0]).stem.removeprefix("samerun-"))


def run_script(name: str) -> None:
    """Runs a script as the main module, with this process's arguments."""
    sys.argv[0] = str(scripts()[name])
    runpy.run_path(sys.argv[0], run_name="__main__")


def scripts() -> dict[str, Path]:
    """The files of all scripts by name."""
    folder = next(folder for folder in FOLDERS if (folder / "predict.py").is_file())
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


if __name__ == "__main__":
    names = scripts()
    # deepspeed inserts --local_rank before the name
    name = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    if name not in names:
        sys.exit(
            f"usage: python -m samerun {{{','.join(names)}}} ...\n\narguments: python -m samerun "
            "classify --help"
        )
    sys.argv.remove(name)
    run_script(name)
