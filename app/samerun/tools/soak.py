"""Soak test: kills and resumes a training command many times and compares the results with an uninterrupted
run.

    samerun soak [--kills N] [--launch "LAUNCHER ..."] [--output_dir FOLDER] classify ARGS

ARGS are the training command's own; only --output_dir is replaced, and nothing is uploaded (--mirror_to,
--push_to_hub). The command first runs without interruption. Then it is killed by SIGKILL and restarted with
`--resume_from_checkpoint auto` until it is done, in as many runs as N kills take. Half of the kills come at a
random time, half at a random call that flushes or renames a file: within a checkpoint, the export of the best
model, the predictions, the metrics. Every finished run must be equal to the uninterrupted one, byte by byte:
best model, last checkpoint (weights, moments, state), history.jsonl, predictions, and metrics except times
and memory.

    --kills N           number of kills (default 25)
    --seed N            seed of the random kills (default 0)
    --launch "..."      a launcher with its options, such as "torchrun --nproc_per_node 2". Kills then come at
                        random times and hit the whole job or, in half of the cases, one rank, after which
                        the others must end by themselves. Default: runs are forked from a process that has
                        imported the libraries, which saves the start-up
    --timeout SECONDS   time limit of a run (default 600)
    --output_dir FOLDER runs with their logs, and soak.json (default runs/soak)

Exit codes: 0 all runs are equal; 1 a run differs, failed or hung; 2 bad input.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import psutil

from samerun import task_scripts
from samerun.errors import InputError
from samerun.files import write_json
from samerun.run_folder import STATUS, read_metrics
from samerun.tools.moving.setups import APART, signals_unwind

KILLED = -signal.SIGKILL
DISK_CALLS = ("fsync", "rename", "replace")
TIME_OR_MEMORY = re.compile("runtime|per_second|step_time|stall|memory|train_seconds")


@dataclass(frozen=True)
class Kill:
    """When to kill a run: `seconds` after its start, or at its `disk_call`-th call that flushes or renames a
    file."""

    seconds: float | None = None
    disk_call: int | None = None
    one_rank: bool = False  # only one process of the job


class Soak:
    """The runs of one command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.output_dir
        self.random = random.Random(options.seed)
        self.kill_points: Counter[str] = Counter()
        self.problems: list[str] = []
        self.kills = self.runs = 0

    def run(self) -> None:
        """Makes the uninterrupted run, then killed runs until there were enough kills or a problem."""
        started = time.monotonic()
        code, self.disk_calls = self._start(self.folder / "straight", None)
        self.seconds = time.monotonic() - started
        if code:
            raise SystemExit(
                f"error: the command fails without being killed; see {self.folder / 'straight.log'}"
            )
        print(f"straight       {self.seconds:.1f} s, {len(self.disk_calls) or 'unknown'} call(s) to disk")
        while self.kills < self.options.kills and not self.problems:
            self._killed_run(self.folder / f"run_{self.runs}")

    def _killed_run(self, folder: Path) -> None:
        """Kills and resumes one run until it is done and compares it. Deletes the folder of an equal run."""
        before = self.kills
        while True:
            kill = self._next_kill() if self.kills < self.options.kills else None
            code, calls = self._start(folder, kill)
            if code == 0:
                break
            if code != KILLED or kill is None:  # which the kernel does without memory
                kills = self.kills - before
                self.problems.append(f"{folder.name}: ended with exit code {code} after {kills} kill(s)")
                return
            self.kills += 1
            if kill.disk_call is not None:
                call, _, file = calls[-1].partition(" ")
                where = f"{call} in {Path(file).parts[0].strip('.').removesuffix('.unfinished')}"
            else:
                state = read_metrics(folder / STATUS).get("state", "before the run began")
                where = f"{'one rank, ' if kill.one_rank else ''}by the clock: {state}"
            self.kill_points[where] += 1
        self.runs += 1
        different = differences(self.folder / "straight", folder)
        self.problems += [f"{folder.name}: {difference}" for difference in different]
        found = ", ".join(different) or "the same"
        print(f"{folder.name:<15}{self.kills - before} kill(s), {found}", flush=True)
        if not different:
            shutil.rmtree(folder)

    def _next_kill(self) -> Kill:
        if self.options.launch:  # launchers start slowly
            seconds = self.random.uniform(0.25, 1) * self.seconds
            return Kill(seconds, one_rank=self.random.random() < 0.5)
        if self.random.random() < 0.5:
            return Kill(disk_call=self.random.randrange(len(self.disk_calls)))
        return Kill(self.random.uniform(0, 1) * self.seconds)

    def _start(self, folder: Path, kill: Kill | None) -> tuple[int, list[str]]:
        """Starts a run in a folder and waits until it ends or is killed. Returns (exit code, or minus the
        signal; in a fork, the calls of `DISK_CALLS`, each with its file, relative to the run's folder)."""
        until = time.monotonic() + self.options.timeout
        was_killed = False
        with folder.with_suffix(".log").open("ab") as log, tempfile.TemporaryFile() as report:
            process = start(self.options, folder, log, report, kill and kill.disk_call)
            try:
                if kill is not None and kill.seconds is not None:
                    try:
                        process.wait(kill.seconds)
                    except psutil.TimeoutExpired:
                        was_killed = True
                        family = [*process.children(recursive=True), process]
                        ranks = [member for member in family if _is_rank(member, self.options.script)]
                        _kill([self.random.choice(ranks)] if kill.one_rank and ranks else family)
                code = _wait(process, until)
            except BaseException:  # such as Ctrl-C, which the run does not get
                if process.is_running():
                    _kill([*process.children(recursive=True), process])
                    process.wait()
                raise
            report.seek(0)
            calls = report.read().decode(errors="replace")
        for place in (folder.resolve(), folder):
            calls = calls.replace(f"{place}/", "")
        return KILLED if was_killed else code, calls.splitlines()


def main(argv: list[str]) -> int:
    options = read_options(argv)
    folder = options.output_dir
    if folder.exists():
        if any(folder.iterdir()) and not (folder / "soak.json").exists():
            raise InputError(
                f"--output_dir {folder} is not empty and not of an earlier soak test; name another folder"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_json(folder / "soak.json", {})
    if not options.launch:
        for library in ("accelerate", "datasets", "torch", "transformers"):
            importlib.import_module(library)  # once, for all forked runs
    soak = Soak(options)
    with signals_unwind():
        soak.run()
    found = {"where": dict(soak.kill_points.most_common()), "wrong": soak.problems}
    given = {"launch": options.launch, "seed": options.seed}
    write_json(folder / "soak.json", {"kills": soak.kills, "runs": soak.runs, **found, **given})
    print(*(f"{count:>5} x {point}" for point, count in soak.kill_points.most_common()), sep="\n")
    done = f"{soak.kills} kill(s) over {soak.runs} run(s)"
    print(f"{done}: {len(soak.problems)} problem(s)", *soak.problems, sep="\n")
    return 1 if soak.problems else 0


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = task_scripts.tool_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=task_scripts.at_least(1), default=25, metavar="N")
    add("--seed", type=int, default=0, metavar="N")
    add("--launch", type=shlex.split, metavar="LAUNCHER ...")
    add("--timeout", type=float, default=600, metavar="SECONDS")
    add("--output_dir", type=lambda p: Path(p).expanduser(), default=Path("runs/soak"), metavar="FOLDER")
    options = parser.parse_args(argv)
    if not options.script.is_file():
        parser.error(f"{options.script}: no such file; name a task's script, such as app/classify.py")
    options.script = options.script.resolve()
    return options


def arguments_for(options: argparse.Namespace, folder: Path) -> list[str]:
    """The command's arguments with another output folder, from which it resumes, and without uploads."""
    changed = {"output_dir": folder, "resume_from_checkpoint": "auto", **APART}
    return task_scripts.with_changes(options.arguments, changed)


def start(
    options: argparse.Namespace, folder: Path, log: BinaryIO, report: BinaryIO, kill_at: int | None
) -> psutil.Process:
    """Starts the script in a session of its own: under the launcher of --launch, or as a fork of this
    process, for which `report` and `kill_at` are those of `_watch_disk`."""
    arguments = arguments_for(options, folder)
    if options.launch:
        command = [*options.launch, str(options.script), *arguments]
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return psutil.Popen(command, start_new_session=True, **streams)
    process = os.fork()
    if process == 0:
        _run_script(options.script, arguments, log.fileno(), report.fileno(), kill_at)
    return psutil.Process(process)


def _run_script(script: Path, arguments: list[str], log: int, report: int, kill_at: int | None) -> NoReturn:
    """Runs the script as Python does, with `log` as stdout and stderr, and ends the process."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # that of `signals_unwind` is the parent's
            signal.signal(number, signal.SIG_DFL)
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 3
    try:
        _watch_disk(report, kill_at)
        sys.path.insert(0, str(script.parent))
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch_disk(report: int, kill_at: int | None) -> None:
    """Writes a line "CALL FILE" to `report` for each of the `DISK_CALLS`. Call number `kill_at` (from 0)
    kills this process and its workers by SIGKILL instead."""
    count, lock = 0, threading.Lock()

    def counted(name: str, call: Callable, target: Any, *rest: Any, **named: Any) -> Any:
        nonlocal count
        with lock:  # checkpoints are written by a thread
            file = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
            os.write(report, f"{name} {file}\n".encode())
            if count == kill_at:
                os.killpg(0, signal.SIGKILL)
            count += 1
        return call(target, *rest, **named)

    for name in DISK_CALLS:
        setattr(os, name, partial(counted, name, getattr(os, name)))


def _is_rank(process: psutil.Process, script: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        return str(script) in process.cmdline() and "RANK" in process.environ()
    return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _wait(process: psutil.Popen, until: float) -> int:
    """The launcher's exit code after it and all its descendants have ended. Raises `SystemExit`, after
    killing them, if they do not end."""
    family = process.children(recursive=True) if process.is_running() else []
    try:
        code = process.wait(max(1.0, until - time.monotonic()))
    except psutil.TimeoutExpired:
        left = [process, *process.children(recursive=True), *family]
    else:
        _, left = psutil.wait_procs(family, timeout=60)
    if left:
        _kill(left)
        raise SystemExit(f"error: a run hung: {len(left)} process(es) had to be killed")
    return code


# The comparison of two runs


def differences(straight: Path, other: Path) -> list[str]:
    """How the files of the run `other` differ from those of the run `straight`, one text per file; [] for
    equal runs."""
    different = []
    for name in sorted(_compared_files(straight) | _compared_files(other)):
        one, two = straight / name, other / name
        if not one.exists() or not two.exists():
            different.append(f"{name} is {'missing' if one.exists() else 'unexpected'}")
        elif one.suffix == ".json":
            different += _json_differences(name, one, two)
        elif one.read_bytes() != two.read_bytes():
            different.append(f"{name} differs")
    return different


def _compared_files(folder: Path) -> set[str]:
    """Names of the files to compare. Leaves out the model card and TensorBoard's events (they contain times),
    older checkpoints (their rotation depends on interruptions) and manifests (hashes of files that are
    compared)."""
    from samerun.checkpoint import list_checkpoints  # imports torch

    names = ("best/*", "history.jsonl", "metrics.json", "predictions.jsonl")
    files = [path for name in names for path in folder.glob(name)]
    for newest in list_checkpoints(folder / "checkpoints")[-1:]:
        files += [path for path in newest.iterdir() if path.name != "manifest.json"]
    return {str(path.relative_to(folder)) for path in files}


def _json_differences(name: str, one: Path, two: Path) -> list[str]:
    """Leaves out times and memory, and a baseline that one run alone has: the training's time decides on it
    (--baseline auto)."""
    ours, theirs = (json.loads(path.read_text(encoding="utf-8")) for path in (one, two))
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return [] if ours == theirs else [f"{name} differs"]
    keys = [key for key in sorted(ours.keys() | theirs.keys()) if not TIME_OR_MEMORY.search(key)]
    pairs = ((key, ours.get(key), theirs.get(key)) for key in keys)
    different = [
        f"{key} {own!r:.40} and {other!r:.40}"
        for key, own, other in pairs
        if own != other and not ("baseline" in key and None in (own, other))
    ]
    return [f"{name}: {', '.join(different)}"] if different else []
