"""Contenders in processes of their own, which take turns.

The parent imports no torch, because a child's peak memory starts from that of the process it was forked from.
"""

import itertools
import json
import math
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_POLICY = "PASSIVE"  # on a shared machine a thread that waits by spinning holds the core that the awaited one needs
GO, STOP = b"\n", b"q"


@dataclass(frozen=True)
class Turns:
    """Contenders work in turns until all are done. After `seconds`, starting included, they are told to stop, but not before
    each has had `least` turns."""

    seconds: float = math.inf
    least: int = 0


UNTIL_DONE = Turns()


class Child:
    """A contender in a process of its own, which stops before its first step and after each turn until it is told to go on."""

    def __init__(self, command: list[str], settings: dict[str, Any], path: Path, environment: dict[str, str]) -> None:
        """`path`: of its answer and its log, without an ending."""
        self.name, self.answer, self.log = path.name, Path(f"{path}.json"), Path(f"{path}.log")
        self.answer.unlink(missing_ok=True)
        self.signals, signals = os.pipe()
        given = settings | {"answer": str(self.answer), "signals": signals, "spawned": time.time()}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--child", json.dumps(given)], env=environment, stdin=subprocess.PIPE, stdout=output,
                stderr=subprocess.STDOUT, pass_fds=[signals],
            )  # fmt: skip
        os.close(signals)
        self.alive = self._is_waiting()

    def tell(self, word: bytes) -> bool:
        """GO: it does the steps of a turn, or what comes after the last. STOP: the step it has done was the last. Returns
        whether it waits for another turn."""
        if self.alive:
            self.process.stdin.write(word)
            self.process.stdin.flush()
            self.alive = self._is_waiting()
        return self.alive

    def result(self) -> dict[str, Any]:
        """What it has measured. Raises `SystemExit` with the end of its output if it failed."""
        code = self.process.wait()
        if code or not self.answer.exists():
            raise SystemExit(f"{self.name} failed ({code}):\n{self.log.read_text()[-4000:]}")
        return json.loads(self.answer.read_text())

    def end(self) -> None:
        os.close(self.signals)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _is_waiting(self) -> bool:
        return os.read(self.signals, 1) != b""  # blocks until it has done its turn; empty when it has ended


def run_group(
    command: list[str], names: list[str], settings: dict[str, Any], folder: Path, threads: int, turns: Turns = UNTIL_DONE
) -> list[dict[str, Any]]:
    """Starts `command` with --child and the settings for each contender; then they take turns. Returns their results, with the
    share of the CPU that other processes took meanwhile."""
    cpu, own, started = cpu_seconds(), sum(os.times()[:4]), time.time()
    children: list[Child] = []
    try:
        for name in names:
            given = settings | {"contender": name, "folder": str(folder / name)}
            children.append(Child(command, given, folder / name, environment(threads, folder)))
        take_turns(children, turns, started)
        results = [child.result() for child in children]
    finally:
        for child in children:
            child.end()
    others = cpu_seconds() - cpu - (sum(os.times()[:4]) - own)
    share = max(0.0, others / ((time.time() - started) * os.cpu_count()))
    return [result | {"others_cpu_share": share} for result in results]


def cpu_seconds() -> float:
    """CPU time that all processes of this machine have used so far."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def environment(threads: int, folder: Path) -> dict[str, str]:
    return {
        "OMP_WAIT_POLICY": WAIT_POLICY,
        **os.environ,
        # A Trainer that sees several GPUs shares its batch out over all of them.
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        "OMP_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true",
        "HF_DATASETS_CACHE": str(folder / "cache"),  # so that the first start finds no tokens of an earlier run
    }


def take_turns(children: list[Child], turns: Turns, started: float) -> None:
    turn_took, waiting, end = 0.0, children, started + turns.seconds
    for turn in itertools.count():
        began = time.time()
        if not waiting or (turn >= turns.least and began + turn_took > end):
            break
        first = turn % len(waiting)  # so that nobody always comes after the same one
        waiting = [child for child in waiting[first:] + waiting[:first] if child.tell(GO)]
        turn_took = time.time() - began
    for child in waiting:
        child.tell(STOP)
