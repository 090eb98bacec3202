"""A training command whose data a tool reads without training."""

from __future__ import annotations

from pathlib import Path

from samerun import task_scripts
from samerun.parsing import parse, validate
from samerun.plan import Modes
from samerun.task import Task

NO_OUTPUT_DIR = "no_output"  # a value for --output_dir; nothing is written there


def task_of(script: Path, words: list[str]) -> tuple[Task, Modes]:
    """(the command's task, modes that read all its files). Raises `InputError`."""
    arguments_class, task_class = task_scripts.load(script)
    arguments = parse(arguments_class, ["--output_dir", NO_OUTPUT_DIR, *words])
    validate(arguments)
    sources = (getattr(arguments, name, None) for name in ("test_file", "dataset_test_split"))
    has_test = any(source is not None for source in sources)
    return task_class(arguments), Modes(train=True, evaluate=True, predict=has_test)
