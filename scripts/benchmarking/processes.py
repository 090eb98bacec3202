"""Runs each contender in its own process; the processes take turns.

The parent never imports torch: a child's peak memory starts at the memory of the process that forked it.
"""

import itertools
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
REST = 0.02  # seconds before a turn, in which the threads of the process before stop spinning and sleep
GO = b"\n"


class Child:
    """A contender's process. It waits for a signal before its first step and after each turn."""

    def __init__(
        self, command: list[str], settings: dict[str, Any], path: Path, environment: dict[str, str]
    ) -> None:
        """`path`: of the result and the log, without suffix."""
        self.name, self.answer, self.log = path.name, Path(f"{path}.json"), Path(f"{path}.log")
        self.answer.unlink(missing_ok=True)
        self.signals, signals = os.pipe()
        settings = settings | {"answer": str(self.answer), "signals": signals}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--child", json.dumps(settings)], env=environment, stdin=subprocess.PIPE,
                stdout=output, stderr=subprocess.STDOUT, pass_fds=[signals],
            )  # fmt: skip
        os.close(signals)

    def is_waiting(self) -> bool:
        """Whether the contender waits for a turn, as soon as it does, or else has ended."""
        return os.read(self.signals, 1) != b""  # blocks until the turn ends; empty once the process has ended

    def take_turn(self) -> bool:
        """Lets the contender go on. Returns whether it waits for another turn."""
        time.sleep(REST)
        self.process.stdin.write(GO)
        self.process.stdin.flush()
        return self.is_waiting()

    def result(self, may_fail: bool) -> dict[str, Any] | None:
        """The measurements. If the contender failed: None, after the end of its log was printed, or without
        `may_fail` `SystemExit`."""
        code = self.process.wait()
        if not code and self.answer.exists():
            return json.loads(self.answer.read_text())
        failure = f"{self.name} failed ({code}):\n{self.log.read_text()[-4000:]}"
        if not may_fail:
            raise SystemExit(failure)
        print(failure, flush=True)
        return None

    def end(self) -> None:
        os.close(self.signals)
        self.process.kill()  # does nothing if it has ended
        self.process.wait()


def run_group(
    command: list[str],
    jobs: list[tuple[str, dict[str, Any]]],
    folder: Path,
    threads: int,
    may_fail: bool = False,
) -> list[Any]:
    """Starts `command --child SETTINGS` for each job, a contender's name and settings, and lets the jobs take
    turns. Returns their results (`Child.result`), each with the CPU share of other processes meanwhile."""
    cpu, own_cpu, started = cpu_seconds(), sum(os.times()[:4]), time.time()
    children: list[Child] = []
    try:
        for number, (name, settings) in enumerate(jobs):
            path = folder / f"{name}_{number}"
            own = settings | {"contender": name, "folder": str(path)}
            children.append(Child(command, own, path, environment(threads, folder)))
        take_turns(children)
        results = [child.result(may_fail) for child in children]
    finally:
        for child in children:
            child.end()
    others = cpu_seconds() - cpu - (sum(os.times()[:4]) - own_cpu)
    share = max(0.0, others / ((time.time() - started) * os.cpu_count()))
    return [result and result | {"others_cpu_share": share} for result in results]


def cpu_seconds() -> float:
    """CPU time of all processes of this machine so far."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def environment(threads: int, folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        # One GPU: a Trainer would split its batch over all that it sees.
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        "OMP_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true",
        "HF_DATASETS_CACHE": str(folder / "cache"),  # without tokens of an earlier run
    }


def take_turns(children: list[Child]) -> None:
    """Lets all of them run to their ends, after all have started."""
    waiting = [child for child in children if child.is_waiting()]
    for turn in itertools.count():
        if not waiting:
            return
        first = turn % len(waiting)  # the order changes from turn to turn
        waiting = [child for child in waiting[first:] + waiting[:first] if child.take_turn()]
