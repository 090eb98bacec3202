"""What a case of the catalogue is, and the good files that each spoils in its own way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

TARGETS = {"classify": "labels", "titlegen": "title"}  # the column that a task learns to predict
BOTH = tuple(TARGETS)
Content = str | bytes | Callable[[str], bytes]

GOOD = "text,TARGET\nred apple pie,fruit|red\ngreen grass grows,green\nred brick wall,red\nplain water,green\n"
VALID = "text,TARGET\nred wine,red\ngreen pear,fruit|green\nblue sky,green\nred pear,fruit|red\n"


@dataclass(frozen=True)
class Case:
    """A command that must be refused, or with `code` 0 must work.

    `said`: patterns that the message (or the output) must have. `tasks`: those it is tried with. `arguments`: changes of the
    good command, None takes one away. `files`: by name, in place of the good ones or beside them; TARGET stands for the
    task's column in texts and patterns. `make`: what is more than a file, such as a link; called in the case's folder.
    """

    name: str
    said: list[str]
    tasks: tuple[str, ...] = BOTH
    arguments: dict[str, object] = field(default_factory=dict)
    files: dict[str, Content] = field(default_factory=dict)
    make: Callable[[Path], object] | None = None
    code: int = 2
    late: bool = False  # found when the run has told what it will do


def train(content: Content, name: str = "train.csv", **arguments: object) -> dict[str, dict]:
    """The fields of a case whose training file is `content`."""
    return {"files": {name: content}, "arguments": {"train_file": name, **arguments}}


def by_turns(cases: list[Case]) -> list[Case]:
    """Each with one task: arguments, files and rows of both are read by the same code."""
    return [replace(case, tasks=(case.tasks[number % len(case.tasks)],)) for number, case in enumerate(cases)]


def encoded(text: str, encoding: str) -> Callable[[str], bytes]:
    """A file in another encoding."""
    return lambda target: text.replace("TARGET", target).encode(encoding)


def lines(*rows: object) -> str:
    """A jsonl file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def parquet(**columns: list) -> Callable[[str], bytes]:
    """A parquet file; the column TARGET gets the task's name."""

    def write(target: str) -> bytes:
        import io

        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({name.replace("TARGET", target): cells for name, cells in columns.items()})
        file = io.BytesIO()
        pyarrow.parquet.write_table(table, file)
        return file.getvalue()

    return write


def as_bytes(content: Content, target: str) -> bytes:
    if callable(content):
        return content(target)
    return content.replace("TARGET", target).encode() if isinstance(content, str) else content


def lay_out(case: Case, task: str, folder: Path) -> None:
    """Good data, an earlier run's folder, and what the case puts in their place."""
    earlier = {
        "train.csv": GOOD,
        "valid.csv": VALID,
        "run/run.json": "{}",
        "run/best/model.safetensors": "weights of an earlier run",
        "run/checkpoints/step_1/manifest.json": "{}",
        "run/history.jsonl": "{}\n",
        "run/notes.txt": "mine",
    }
    ours = [name.removeprefix("run/") for name in earlier if name.startswith("run/") and name != "run/notes.txt"]
    earlier["run/.written.json"] = json.dumps({"files": ours, "patterns": [], "predictions": []})
    for name, content in (earlier | case.files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_bytes(content, TARGETS[task]))
    if case.make is not None:
        case.make(folder)


def command_line(case: Case, task: str) -> list[str]:
    """The arguments of the good command as the case changes them: one epoch on four rows, replacing an earlier run."""
    given: dict[str, object] = {
        "from_scratch": "true",
        "config_name": "models/config",
        "tokenizer_type": "train",
        "vocab_size": 128,
        "train_file": "train.csv",
        "validation_file": "valid.csv",
        "global_batch_size": 2,
        "num_train_epochs": 1,
        "report_to": "none",
        "output_dir": "run",
        "overwrite_output_dir": "true",
    }
    if task == "titlegen":
        given |= {"decoder_layers": 1, "max_title_length": 8, "num_beams": 1}
    given |= case.arguments
    return [part for name, value in given.items() if value is not None for part in written(name, value)]


def written(name: str, value: object) -> list[str]:
    """An argument as it stands on a command line; without a name, a value alone; a list as several; ... is a name alone."""
    values = [] if value is ... else value if isinstance(value, list) else [value]
    return [*([f"--{name}"] if name else []), *map(str, values)]


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, but for Python's own, and a hash of what it holds."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.parent.name != "__pycache__"
    }


def check_one_message(ended) -> None:
    """One problem on one line, or a count and a line for each problem."""
    first, *others = ended.err.splitlines()
    if others:
        assert first == f"{len(others)} errors:", ended.err
        assert all(line.startswith("  - ") for line in others), ended.err
    else:
        assert first.startswith("error: "), ended.err
    assert "Traceback" not in ended.err
