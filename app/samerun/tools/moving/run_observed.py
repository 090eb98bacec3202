"""Runs a task's script and records its training steps in FOLDER (see `observer.py`).

    run_observed.py DEVICE FOLDER STEPS app/TASK.py ARGS

`samerun parity` and `samerun verify` pass it to the launchers in place of the script. DEVICE: cpu hides the
GPUs; any. STEPS: after how many the run is to stop; 0: at its end.
"""

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    words = sys.argv[1:]
    # DeepSpeed's launcher inserts --local_rank first.
    first = next(index for index, word in enumerate(words) if not word.startswith("--"))
    device, folder, steps, script = words[first : first + 4]
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # launchers set it for their workers
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # of the package `samerun`
    from samerun.tools.moving import observer

    observer.observe_steps(Path(folder), int(steps))
    sys.path[0] = str(Path(script).resolve().parent)
    sys.argv = [script, *words[:first], *words[first + 4 :]]
    runpy.run_path(script, run_name="__main__")


main()
