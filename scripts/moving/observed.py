"""What scripts/parity.py has a launcher start instead of a task's script:

    observed.py DEVICE FOLDER app/TASK.py ARGS

runs the script with ARGS as if it had been started itself, without dropout, and writes what its steps trained on into FOLDER
(see `observer.py`). DEVICE is cpu, to leave GPUs alone, or any.
"""

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    here = Path(sys.path[0])
    words = sys.argv[1:]
    # DeepSpeed's launcher puts the rank before what it was given.
    first = next(place for place, word in enumerate(words) if not word.startswith("--"))
    device, folder, script = words[first : first + 3]
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # launchers set it for their workers
    sys.path[0] = str(here.parent)
    from moving import observer

    observer.observe_steps(Path(folder))
    observer.switch_dropout_off()
    sys.path[0] = str(Path(script).resolve().parent)
    sys.argv = [script, *words[:first], *words[first + 3 :]]
    runpy.run_path(script, run_name="__main__")


main()
