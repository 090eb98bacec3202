"""Runs a task's script and records its training steps in FOLDER (see `observer.py`).

    run_observed.py DEVICE FOLDER app/TASK.py ARGS

`samerun parity` passes it to the launchers in place of the script. DEVICE: cpu hides the GPUs; any.
"""

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    words = sys.argv[1:]
    # DeepSpeed's launcher inserts --local_rank first.
    first = next(index for index, word in enumerate(words) if not word.startswith("--"))
    device, folder, script = words[first : first + 3]
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # launchers set it for their workers
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # of the package `samerun`
    from samerun.tools.moving import observer

    observer.observe_steps(Path(folder))
    sys.path[0] = str(Path(script).resolve().parent)
    sys.argv = [script, *words[:first], *words[first + 3 :]]
    runpy.run_path(script, run_name="__main__")


main()
