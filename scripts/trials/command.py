"""A task's command, run again and again with changed arguments."""

from __future__ import annotations

import argparse
import fcntl
import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moving.task_script import load_task_script

from finetune.arguments.parsing import parse, validate
from finetune.errors import EXIT_BAD_INPUT, EXIT_STOPPED, InputError, StopRequested, TrainingError
from finetune.output.files import write_json
from finetune.output.run_folder import METRICS, STATUS, read_metrics
from finetune.reports.results import plain_table

LOG_LINES = 5  # of a run that was refused, in the message


@dataclass(frozen=True)
class Command:
    """`launcher`: the words before the script; `words`: those behind it, without what a run changes."""

    launcher: list[str]
    script: Path
    words: list[str]
    arguments_class: type
    task_class: type

    def with_changes(self, changes: dict[str, Any]) -> list[str]:
        """The whole command with other arguments: of an argument that is given twice the last counts."""
        changed = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
        return [*self.launcher, str(self.script), *self.words, *changed]

    def arguments(self, changes: dict[str, Any]) -> Any:
        """The arguments of a run, checked. Raises `InputError`."""
        first = len(self.launcher) + 1
        arguments = parse(self.arguments_class, self.with_changes(changes)[first:])
        validate(arguments)
        return arguments

    def run(self, folder: Path, changes: dict[str, Any]) -> dict[str, Any] | None:
        """The metrics of a run in `folder`, which goes on if it was stopped and is not run again if it is done; None if its
        training failed. Its output goes to FOLDER.log.

        Raises `InputError` for input that the command refuses, and `StopRequested` if it was asked to stop.
        """
        if not _is_done(folder):
            words = self.with_changes({"resume_from_checkpoint": "auto", **changes, "output_dir": folder})
            log = folder.with_name(f"{folder.name}.log")
            with log.open("a", encoding="utf-8") as file:
                code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
            if code == EXIT_BAD_INPUT:
                said = log.read_text(encoding="utf-8").splitlines()[-LOG_LINES:]
                raise InputError(f"{shlex.join(words)} was refused ({log}): {' '.join(said)}")
            if code == EXIT_STOPPED:
                raise StopRequested(f"{folder} was asked to stop; the same command goes on")
            if code:
                return None
        return read_metrics(folder / METRICS)


def run_script(
    parser: argparse.ArgumentParser, argv: list[str], work: Callable[[argparse.Namespace, Command, Path], None]
) -> int:
    """Adds the arguments of both scripts, and calls `work` with what is given, the command and its --output_dir, which is
    taken for this command alone. Returns the exit code."""
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launch", metavar='"..."')
    parser.add_argument("script", type=Path, metavar="app/TASK.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    given = parser.parse_args(argv)
    try:
        if not given.script.is_file():
            raise InputError(f"{given.script}: is no file; name a task's script, such as app/classify.py")
        launcher = shlex.split(given.launch) if given.launch else [sys.executable]
        command = Command(launcher, given.script, given.arguments, *load_task_script(given.script))
        folder = Path(command.arguments({}).output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".trials.lock").open("w") as lock:
            _take(folder, lock, command)
            work(given, command, folder)
    except (InputError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (StopRequested, KeyboardInterrupt) as error:
        print(f"stopped: {error}", file=sys.stderr)
        return EXIT_STOPPED
    return 0


def _take(folder: Path, lock: Any, command: Command) -> None:
    """Raises `InputError` for a folder that another process uses, or that has the runs of another command."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"--output_dir {folder} is in use by this script; --processes makes several runs at a time") from None
    file, words = folder / "command.json", [str(command.script), *command.words]
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else words
    if known != words:
        raise InputError(f"--output_dir {folder} has the runs of another command ({shlex.join(known)}); name another folder")
    write_json(file, words)


def run_all(jobs: list[Callable[[], Any]], processes: int) -> list[Any]:
    """The results of the jobs, `processes` at a time. Begins no other after one that raises; raises that when the rest ends."""
    ending = threading.Event()
    with ThreadPoolExecutor(processes) as pool:
        futures = [pool.submit(_run_unless, ending, job) for job in jobs]
        try:
            wait(futures)
        finally:
            ending.set()  # also where Ctrl-C ends the wait
    return [future.result() for future in futures]


def _run_unless(ending: threading.Event, job: Callable[[], Any]) -> Any:
    if ending.is_set():
        return None
    try:
        return job()
    except BaseException:
        ending.set()
        raise


def _is_done(folder: Path) -> bool:
    try:
        return json.loads((folder / STATUS).read_text(encoding="utf-8"))["state"] == "done"
    except (OSError, ValueError, KeyError):
        return False


def print_table(header: list[str], rows: list[list[Any]]) -> None:
    """Numbers have four decimals."""
    cells = [[f"{cell:.4f}" if isinstance(cell, float) else "-" if cell is None else str(cell) for cell in row] for row in rows]
    print("", *plain_table(header, cells), sep="\n")
