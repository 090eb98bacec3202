"""Runs a task's script and records the rows and learning rates of each training step, the predictions of each
evaluation, and random numbers that are not by row.

    observer.py DEVICE FOLDER STEPS app/TASK.py ARGS

`samerun parity` and `samerun verify` pass it to the launchers in place of the script. DEVICE: cpu hides the
GPUs; any. STEPS: after how many the run is to stop; 0: at its end; -1: `samerun plan` measures times instead
(see `meter.py`). Each process writes its own files in FOLDER (see `recorder.py`), without communication.
"""

import importlib.abc
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

MEASURE = -1
TIMES = "times.json"  # of `meter`


def observe_steps(folder: Path, stop_after: int = 0) -> None:
    """Records this process's training steps in FOLDER/NAME.rank_R.jsonl, where NAME is the name of the output
    folder. A line: {"step": from 0, "rows": of this process, in the order of its forward passes,
    "learning_rates": by parameter group}. `stop_after`: the process asks the run to stop after so many steps,
    and records what the modules compute in the first one; 0: never."""
    sys.meta_path.insert(0, _Finder(folder, stop_after))


class _Finder(importlib.abc.MetaPathFinder):
    """Begins to record right after the regular import of `samerun.training`."""

    def __init__(self, folder: Path, stop_after: int) -> None:
        self.folder, self.stop_after = folder, stop_after

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "samerun.training":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_record(module: ModuleType) -> None:
            from samerun.tools.moving import meter, recorder  # import torch

            execute(module)
            if self.stop_after == MEASURE:
                meter.measure(module, self.folder)
            else:
                recorder.record(module, self.folder, self.stop_after)

        spec.loader.exec_module = execute_and_record
        return spec


def read_steps(folder: Path, name: str, processes: int) -> dict[int, dict[str, Any]]:
    """Reads the files of a run: step -> {"rows": sorted rows of all processes, "learning_rates"}.

    Raises `ValueError` for a missing file and for learning rates that differ from rank 0.
    """
    steps: dict[int, dict[str, Any]] = {}
    for rank in range(processes):
        path = folder / f"{name}.rank_{rank}.jsonl"
        if not path.exists():
            raise ValueError(f"{path}: rank {rank} wrote nothing")
        # A resumed run may repeat steps; the last line of a step counts.
        with path.open(encoding="utf-8") as file:
            lines = {line["step"]: line for line in map(json.loads, file)}
        for number, line in lines.items():
            step = steps.setdefault(number, {"rows": [], "learning_rates": line["learning_rates"]})
            step["rows"] = sorted([*step["rows"], *line["rows"]])
            if step["learning_rates"] != line["learning_rates"]:
                raise ValueError(f"{path}: step {number} has other learning rates than on rank 0")
    return steps


def main() -> None:
    words = sys.argv[1:]
    # DeepSpeed's launcher inserts --local_rank first.
    first = next(index for index, word in enumerate(words) if not word.startswith("--"))
    device, folder, steps, script = words[first : first + 4]
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # launchers set it for their workers
    observe_steps(Path(folder), int(steps))
    sys.path[0] = str(Path(script).resolve().parent)
    sys.argv = [script, *words[:first], *words[first + 4 :]]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
