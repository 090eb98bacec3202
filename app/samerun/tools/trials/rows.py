"""The rows of a text task's files, for runs on a part of them; the task of an earlier run."""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from samerun import task_scripts
from samerun.data.splits import read_split
from samerun.errors import InputError, collecting, raise_problems
from samerun.files import write_text
from samerun.tools.trials.command import Command, claim

# Arguments that files of some rows replace.
REPLACED = ("dataset_name", "dataset_split", "max_train_samples", "max_eval_samples")


def open_rows(
    options: argparse.Namespace, command: Command, folder: Path, **settings: Any
) -> tuple[Any, list[dict[str, Any]], list[tuple[str, ...]]]:
    """(the task, training rows with ids, the labels of each). Claims the folder for the command, `settings`
    and the rows, and writes the files that all runs share. Raises `InputError`."""
    arguments = command.arguments({})
    if not hasattr(arguments, "text_column"):
        raise InputError(f"{options.script}: only text tasks are supported, such as app/classify.py")
    if arguments.mixing_weights:
        raise InputError(
            "--mixing_weights is not supported, because every run has rows of all files; leave it out"
        )
    if arguments.streaming:
        raise InputError("--streaming is not supported, because all rows are read at once; leave it out")
    task = command.task_class(arguments)
    splits, labels, names = read_rows(task)
    content = json.dumps([splits, labels, names], sort_keys=True, default=str).encode()
    claim(folder, command, **settings, rows=hashlib.sha256(content).hexdigest())
    if names and not arguments.label_file and not getattr(arguments, "label_columns", None):
        write_text(folder / "labels.txt", "".join(f"{name}\n" for name in names))  # a part may lack one
    if "validation" in splits:
        write_lines(folder / "validation.jsonl", splits["validation"])
    return task, splits["train"], labels


def files_of(folder: Path, **files: Path) -> dict[str, Any]:
    """Arguments of a run on these files and those that all runs share."""
    shared = {"label_file": folder / "labels.txt", "validation_file": folder / "validation.jsonl"}
    files |= {name: path for name, path in shared.items() if path.exists()}
    return {**dict.fromkeys(REPLACED, "none"), **files, "encoding": "utf-8"}


def task_of_run(run: dict[str, Any], **changes: Any) -> Any:
    """The task of a run with changed arguments. `run`: its run.json. Raises `InputError`."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.json"
        task_scripts.write_settings(settings, {**run["arguments"], **changes})
        script = task_scripts.path_of(run["fingerprint"]["task"])
        arguments, task_class = task_scripts.read_command(script, ["--config", str(settings)])
    return task_class(arguments)


def read_rows(task: Any) -> tuple[dict[str, list[dict[str, Any]]], list[tuple[str, ...]], list[str]]:
    """(rows with ids by split: "train", and "validation" if the arguments name it; labels of each training
    row, () for tasks without labels; label list). Raises `InputError`."""
    arguments = task.arguments
    columns = (*task.text_columns, *task.target_columns)
    tables, rows, problems = {}, {}, []
    for split in ("train", "validation"):
        with collecting(problems):
            # Targets before ids, as in other runs: a CoNLL file has words and tags alone.
            table = read_split(arguments, split, columns, (*task.target_columns, arguments.id_column))
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
    targets = task.read_targets(task.as_texts(tables["train"], "train"), "train", [])
    return rows, getattr(targets, "rows", [()] * len(rows["train"])), getattr(targets, "names", [])


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes a jsonl file."""
    write_text(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
