"""Shared by `samerun sweep`, `cross-validate` and `learning-curve`: many runs of one command, each in its own
folder, with different arguments or on a part of a text task's rows."""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from samerun import task_scripts
from samerun.cli import SPINS
from samerun.console import number_text, plain_table
from samerun.data.cache import content_hash, content_key
from samerun.data.files import matching
from samerun.data.splits import read_split
from samerun.errors import (
    EXIT_BAD_INPUT,
    EXIT_STOPPED,
    InputError,
    StopRequested,
    TrainingError,
    collecting,
    raise_problems,
)
from samerun.files import as_json, lock, write_json, write_text
from samerun.parsing import as_dict, names_of
from samerun.run_folder import CHECKPOINTS, METRICS, STATUS, read_metrics
from samerun.tools.moving.setups import APART, signals_unwind

LOG_LINES = 5  # of a rejected run, shown in the error message
# Arguments that files of some rows replace.
REPLACED = ("dataset_name", "dataset_split", "max_train_samples", "max_eval_samples")
# In the output of torchrun and accelerate, which end with 1 for every code of a process but 0.
REFUSED = re.compile(rf"^ *exitcode +: {EXIT_BAD_INPUT} ", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A command line: `launcher`, `script`, `words`."""

    launcher: list[str]
    script: Path
    words: list[str]
    task_class: type
    beside_others: bool = False  # of these commands

    def with_changes(self, changes: dict[str, Any]) -> list[str]:
        return [*self.launcher, str(self.script), *task_scripts.with_changes(self.words, changes)]

    def arguments(self, changes: dict[str, Any]) -> Any:
        """The validated arguments of a run. Raises `InputError`."""
        first = len(self.launcher) + 1
        return task_scripts.read_command(self.script, self.with_changes(changes)[first:])[0]

    def run(self, folder: Path, changes: dict[str, Any]) -> dict[str, Any] | None:
        """Runs the command in `folder` without uploads, or resumes it, unless it is already done. Writes its
        output to FOLDER.log. Returns the metrics, or None if the training failed.

        Raises `InputError` if the command rejects its input, `StopRequested` if it was stopped,
        `TrainingError` if a process of an earlier start still runs in `folder`.
        """
        before = _status(folder)
        if before[0] != "done":
            if folder.is_dir():
                try:
                    lock(folder).close()
                except InputError as error:
                    raise TrainingError(f"{error}; when it has ended, the same command goes on") from None
            # A trial that ended without a checkpoint, as with --save_strategy no, starts again.
            resumes = any((folder / CHECKPOINTS).glob("step_*"))
            start = {
                "resume_from_checkpoint": "auto" if resumes else None,
                "overwrite_output_dir": None if resumes else "true",
            }
            words = self.with_changes({**start, **changes, **APART, "output_dir": folder})
            log = folder.with_name(f"{folder.name}.log")
            with log.open("ab") as file:
                begin = file.tell()
                streams = {"stdout": file, "stderr": subprocess.STDOUT}
                environment = {"GOMP_SPINCOUNT": SPINS, **os.environ} if self.beside_others else None
                code = subprocess.run(words, **streams, env=environment, check=False).returncode
            said = log.read_bytes()[begin:].decode(errors="replace")
            if code == EXIT_BAD_INPUT or (code and REFUSED.search(said)):
                lines = said.splitlines()
                errors = [line for line in lines if line.lstrip().startswith(("error", "- "))]
                raise InputError(
                    f"{shlex.join(words)} failed ({log}): {' '.join((errors or lines)[-LOG_LINES:])}"
                )
            after = _status(folder)
            # By the signal: before it handles signals.
            if code in (EXIT_STOPPED, -signal.SIGTERM) or (after != before and after[0] == "stopped"):
                raise StopRequested(f"{folder}; the same command resumes it")
            if code:
                return None
        return read_metrics(folder / METRICS)


def run_script(parser: argparse.ArgumentParser, argv: list[str], work: Callable[..., None]) -> int:
    """Adds the options that the scripts share, parses them, locks --output_dir and calls `work`(options,
    command, folder), which calls `claim`. Raises as `work` does, and `InputError`."""
    parser.add_argument("--processes", type=task_scripts.at_least(1), default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launch", metavar='"..."')
    options = parser.parse_args(argv)
    launcher = shlex.split(options.launch) if options.launch else [sys.executable]
    if shutil.which(launcher[0]) is None:
        raise InputError(
            f"--launch {options.launch}: {launcher[0]} is no program here; correct its name, or install it"
        )
    task_class = task_scripts.load(options.script)[1]
    command = Command(launcher, options.script, options.arguments, task_class, options.processes > 1)
    folder = Path(command.arguments({}).output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        work(options, command, folder)
    return 0


def claim(folder: Path, command: Command, **settings: Any) -> None:
    """Records the command and the `settings` that decide its runs. Raises `InputError` if the folder has runs
    of others."""
    arguments = command.arguments({})  # also those in the file of --config, which may have changed
    values = as_dict(arguments)
    given = {
        "command": [str(command.script), *command.words],
        **settings,
        "arguments": json.loads(as_json(values)),
        "files": {name: _content_of(values[name]) for name in names_of(arguments, path=True)},
    }
    file = folder / "command.json"
    if has_runs(folder) and file.exists():
        known = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(known, dict):  # a version before recorded the command alone
            known = {"command": known}
        if known["command"] != given["command"]:
            raise InputError(
                f"--output_dir {folder} has runs of another command ({shlex.join(known['command'])}); "
                "name another folder"
            )
        changed = [name for name, value in settings.items() if known.get(name) != value]
        for kind, words in (("arguments", "--{}"), ("files", "content of --{}")):
            before = known.get(kind, {})  # a version before may lack it, or a part
            changed += [words.format(name) for name in before if before[name] != given[kind].get(name)]
        if changed:
            raise InputError(
                f"--output_dir {folder} has runs with other {', '.join(changed)}; name another folder"
            )
    write_json(file, given)


def _content_of(value: Any) -> str | None:
    """A hash of the content of the files that an argument names; None if it names none."""
    parts = value if isinstance(value, list | tuple) else [value]
    paths = [path for part in parts if isinstance(part, str) for path in matching(part)]
    files = [path for path in paths if os.path.isfile(path)]  # of any length, unlike `Path.is_file`
    return content_key(map(content_hash, files)) if files else None


def has_runs(folder: Path) -> bool:
    """Whether any run in `folder` has begun. One whose input was rejected has not: its command may be
    corrected."""
    return any(folder.glob(f"*/{STATUS}"))


def run_all(jobs: list[Callable[[], Any]], processes: int) -> list[Any]:
    """Runs the jobs, `processes` at a time, and returns their results. After an error no further job starts;
    the error is raised when the running ones have ended. Raises `StopRequested` after SIGTERM or SIGHUP, by
    which it stops their processes too: unlike Ctrl-C, these may reach this process alone."""
    stop, own = threading.Event(), psutil.Process()
    told = {*own.children()}  # others' processes, then also runs that were asked to stop
    with ThreadPoolExecutor(processes) as pool:
        futures = [pool.submit(_run_unless, stop, job) for job in jobs]
        try:
            with signals_unwind():
                wait(futures)
        except SystemExit:
            stop.set()
            while wait(futures, timeout=1).not_done:
                for process in {*own.children()} - told:  # a second signal would end a run at once
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.terminate()
                    told.add(process)
            raise StopRequested("by a signal; the same command resumes") from None
        finally:
            stop.set()  # also after Ctrl-C
    return [future.result() for future in futures]


def _run_unless(stop: threading.Event, job: Callable[[], Any]) -> Any:
    if stop.is_set():
        return None
    try:
        return job()
    except BaseException:
        stop.set()
        raise


def _status(folder: Path) -> tuple[str | None, int]:
    """(the state of a run, when it was written). Launchers have exit codes of their own for a run that was
    stopped."""
    path = folder / STATUS
    try:
        return json.loads(path.read_text(encoding="utf-8"))["state"], path.stat().st_mtime_ns
    except (OSError, ValueError, KeyError):
        return None, 0


def print_table(header: list[str], rows: list[list[Any]]) -> None:
    """Prints a table."""
    print("", *plain_table(header, [list(map(number_text, row)) for row in rows]), sep="\n")


# The rows of a text task


def open_rows(
    command: Command, folder: Path, **settings: Any
) -> tuple[Any, list[dict[str, Any]], list[tuple[str, ...]]]:
    """(the task, training rows with ids, the labels of each). Claims the folder for the command, `settings`
    and the rows, and writes the files that all runs share. Raises `InputError`."""
    arguments = command.arguments({})
    if not hasattr(arguments, "text_column"):
        raise InputError(f"{command.script}: only text tasks are supported, such as app/classify.py")
    if arguments.mixing_weights:
        raise InputError(
            "--mixing_weights is not supported, because every run has rows of all files; leave it out"
        )
    if arguments.streaming:
        raise InputError("--streaming is not supported, because all rows are read at once; leave it out")
    task = command.task_class(arguments)
    splits, labels, names = read_rows(task, settings.get("--group_column"))
    claim(folder, command, **settings, rows=hash_of_rows(splits, labels, names))
    if names and not arguments.label_file and not getattr(arguments, "label_columns", None):
        numbers = list(map(str, range(len(names))))  # of a head without names (`in_order_of_head`)
        names = numbers if set(numbers) == set(names) else names
        write_text(folder / "labels.txt", "".join(f"{name}\n" for name in names))  # a part may lack one
    if "validation" in splits:
        write_lines(folder / "validation.jsonl", splits["validation"])
        texts = [{text_of(task, row) for row in splits[name]} for name in ("train", "validation")]
        if shared := len(set.intersection(*texts)):
            print(
                f"note           {shared} of {len(texts[1])} validation texts are in the training rows too: "
                "scores of the models that they choose are optimistic",
                flush=True,
            )
    return task, splits["train"], labels


def text_of(task: Any, row: dict[str, Any]) -> tuple[str, ...]:
    """The text of a row, or its pair of texts."""
    return tuple(str(row[name]) for name in task.text_columns)


def hash_of_rows(*rows: Any) -> str:
    """`rows`: what `read_rows` returns."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


def files_of(folder: Path, **files: Path) -> dict[str, Any]:
    """Arguments of a run on these files and those that all runs share."""
    shared = {"label_file": folder / "labels.txt", "validation_file": folder / "validation.jsonl"}
    files = {name: path for name, path in shared.items() if path.exists()} | files
    return {**dict.fromkeys(REPLACED, "none"), **files, "encoding": "utf-8"}


def task_of_run(run: dict[str, Any], **changes: Any) -> Any:
    """The task of a run with changed arguments. `run`: its run.json. Raises `InputError`."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.json"
        task_scripts.write_settings(settings, {**run["arguments"], **changes})
        script = task_scripts.path_of(run["fingerprint"]["task"])
        arguments, task_class = task_scripts.read_command(script, ["--config", str(settings)])
    return task_class(arguments)


def read_rows(
    task: Any, group_column: str | None = None
) -> tuple[dict[str, list[dict[str, Any]]], list[tuple[str, ...]], list[str]]:
    """(rows with ids by split: "train", and "validation" if the arguments name it; labels of each training
    row, () for tasks without labels; label list). Training rows have the column `group_column`, too. Raises
    `InputError`."""
    arguments = task.arguments
    columns = (*task.text_columns, *task.target_columns)
    tables, rows, problems = {}, {}, []
    groups = () if group_column is None else (group_column,)
    for split in ("train", "validation"):
        with collecting(problems):
            needed = (*columns, *groups) if split == "train" else columns
            # Targets before ids, as in other runs: a CoNLL file has words and tags alone.
            table = read_split(arguments, split, needed, (*task.target_columns, arguments.id_column))
            if table is not None:
                tables[split] = table
            elif split == "train":
                problems.append("no train rows: give --train_file or --dataset_name")
    raise_problems(problems)
    for split, table in tables.items():
        cells = {arguments.id_column: range(len(table)), **table.columns}
        for name in cells.keys() & table.classes.keys():  # a class is one label
            cells[name] = [[cell] if isinstance(cell, str) else cell for cell in cells[name]]
        rows[split] = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    targets = task.read_targets(task.as_texts(tables["train"], "train"), "train")
    return rows, getattr(targets, "rows", [()] * len(rows["train"])), getattr(targets, "names", [])


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes a jsonl file."""
    write_text(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
