"""Contenders in processes of their own, which take turns.

The parent imports no torch, because a child's peak memory starts from that of the process it was forked from.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_POLICY = "PASSIVE"  # on a shared machine a thread that waits by spinning holds the core that the awaited one needs
GO, STOP = b"\n", b"q"


def run_group(
    command: list[str],
    names: list[str],
    settings: dict[str, Any],
    folder: Path,
    threads: int,
    in_turns: bool,
    seconds: float | None = None,
    least_turns: int = 0,
    all_gpus: bool = False,
    until_first: bool = False,
) -> list[dict[str, Any]]:
    """Starts `command` with --child and the settings for each contender, one after the other, and lets them work in turns.

    One GPU is to be seen, unless `all_gpus`. After `seconds`, starting included, they are told to stop, but not before each has
    had `least_turns` turns; `until_first`: when the first of them is done. Returns their results, with the share of the CPU
    that other processes took meanwhile.
    """
    cpu, own, started = cpu_seconds(), os.times(), time.time()
    children: list[Child] = []
    try:
        for name in names:
            children.append(Child(command, name, settings, folder, threads, in_turns, all_gpus))
        _take_turns(children, None if seconds is None else started + seconds, least_turns, until_first)
        results = [child.result() for child in children]
    finally:
        for child in children:
            child.end()
    after, used = cpu_seconds(), os.times()
    share = None
    if cpu is not None and after is not None:
        mine = sum(used[:4]) - sum(own[:4])
        share = max(0.0, (after - cpu - mine) / ((time.time() - started) * os.cpu_count()))
    return [result | {"others_cpu_share": share} for result in results]


def _take_turns(children: list[Child], end: float | None, least_turns: int, until_first: bool) -> None:
    turn_took, waiting = 0.0, children
    for turn in itertools.count():
        if not waiting:
            return
        began = time.time()
        late = end is not None and turn >= least_turns and began + turn_took > end
        if late or (until_first and not children[0].alive):
            for child in waiting:
                child.stop()
            return
        first = turn % len(waiting)  # so that nobody always comes after the same one
        waiting = [child for child in waiting[first:] + waiting[:first] if child.go_on()]
        turn_took = time.time() - began


class Child:
    """A contender in a process of its own, which stops before its first step and after each turn until `go_on`."""

    def __init__(
        self, command: list[str], name: str, settings: dict[str, Any], folder: Path, threads: int, in_turns: bool,
        all_gpus: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.answer, self.log = name, folder / f"{name}.json", folder / f"{name}.log"
        self.answer.unlink(missing_ok=True)
        environment = {
            "OMP_WAIT_POLICY": WAIT_POLICY,
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "RAYON_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "true",
            "HF_DATASETS_CACHE": str(folder / "cache"),  # so that the first start finds no tokens of an earlier run
        }
        if not all_gpus:  # a Trainer that sees several shares its batch out over all of them
            environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        self.signals, signals = os.pipe()
        told = {**settings, "contender": name, "answer": str(self.answer), "folder": str(folder / name), "signals": signals}
        told |= {"in_turns": in_turns, "spawned": time.time()}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--child", json.dumps(told)], env=environment, stdin=subprocess.PIPE, stdout=output,
                stderr=subprocess.STDOUT, pass_fds=[signals],
            )  # fmt: skip
        os.close(signals)
        self.alive = self._is_waiting()

    def go_on(self) -> bool:
        """Lets it do the steps of a turn, or what comes after the last; returns whether it will do another."""
        return self._tell(GO)

    def stop(self) -> None:
        """Tells it that the step it has done was the last."""
        self._tell(STOP)

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

    def _tell(self, word: bytes) -> bool:
        if self.alive:
            self.process.stdin.write(word)
            self.process.stdin.flush()
            self.alive = self._is_waiting()
        return self.alive

    def _is_waiting(self) -> bool:
        return os.read(self.signals, 1) != b""  # blocks until it has done its turn; empty when it has ended


def run_child(contender: Callable[[dict[str, Any]], dict[str, Any]], settings: dict[str, Any]) -> None:
    """In the child: runs a contender, hands its result over and ends the process."""
    sys.path.insert(0, str(REPOSITORY / "app"))
    answer = contender(settings)
    if os.environ.get("RANK", "0") == "0":
        Path(settings["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the result is written; nothing of what exit handlers do belongs to the measurement


def cpu_seconds() -> float | None:
    """CPU time that all processes of this machine have used so far; None where the system does not say (not Linux)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    return sum(int(fields[place]) for place in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")
