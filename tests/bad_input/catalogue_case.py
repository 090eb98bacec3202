"""The cases of the catalogue of bad input, and the valid files that they change."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow
import pyarrow.parquet

TARGETS = {"classify": "labels", "titlegen": "title"}  # task -> target column
COLUMNS = TARGETS | {"tag": "tags"}
Content = str | bytes | Callable[[str], bytes]

GOOD = (
    "text,TARGET\nred apple pie,fruit|red\ngreen grass grows,green\nred brick wall,red\nplain water,green\n"
)
VALID = "text,TARGET\nred wine,red\ngreen pear,fruit|green\nblue sky,green\nred pear,fruit|red\n"


@dataclass(frozen=True)
class Case:
    """A command that must be rejected or must work.

    `said`: patterns that the message (or the output) must match. `task`: None for either text task.
    `arguments`: changes of the valid command; None removes an argument. `files`: by name, replacing or adding
    to the valid ones; TARGET stands for the task's column in texts and patterns. `make`: is called with the
    case's folder, for links and the like.
    """

    name: str
    said: list[str]
    task: str | None = None
    arguments: dict[str, object] = field(default_factory=dict)
    files: dict[str, Content] = field(default_factory=dict)
    make: Callable[[Path], object] | None = None
    late: bool = False  # is rejected after the run has printed its plan

    def __str__(self) -> str:
        return f"{self.name}-{self.task}"


def train(content: Content, name: str = "train.csv", **arguments: object) -> dict[str, dict]:
    """The fields of a case with the training file `content`."""
    return {"files": {name: content}, "arguments": {"train_file": name, **arguments}}


def by_turns(cases: list[Case]) -> list[Case]:
    """Each with one task: arguments, files and rows of both text tasks are read by the same code."""
    both = list(TARGETS)
    return [replace(case, task=case.task or both[number % 2]) for number, case in enumerate(cases)]


def encoded(text: str, encoding: str) -> Callable[[str], bytes]:
    return lambda target: text.replace("TARGET", target).encode(encoding)


def lines(*rows: object) -> str:
    """A jsonl file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def parquet(**columns: list) -> Callable[[str], bytes]:
    """A parquet file; the column TARGET gets the task's name."""

    def write(target: str) -> bytes:
        table = pyarrow.table({name.replace("TARGET", target): cells for name, cells in columns.items()})
        file = io.BytesIO()
        pyarrow.parquet.write_table(table, file)
        return file.getvalue()

    return write


def as_bytes(content: Content, target: str) -> bytes:
    if callable(content):
        return content(target)
    return content.replace("TARGET", target).encode() if isinstance(content, str) else content


SENTENCES = lines(
    {"tokens": ["Anna", "lives", "in", "New", "York"], "tags": ["B-PER", "O", "O", "B-LOC", "I-LOC"]},
    {"tokens": ["Ben", "sleeps"], "tags": ["B-PER", "O"]},
    {"tokens": ["It", "rains"], "tags": ["O", "O"]},
)


def lay_out(case: Case, folder: Path) -> None:
    """Writes valid data, an earlier run's folder, and the case's files."""
    earlier = {
        "train.csv": GOOD,
        "valid.csv": VALID,
        "run/run.json": '{"fingerprint": {}}',
        "run/best/model.safetensors": "weights of an earlier run",
        "run/best/.files.json": '["model.safetensors"]',
        "run/checkpoints/step_1/manifest.json": "{}",
        "run/checkpoints/step_1/.files.json": '["manifest.json"]',
        "run/history.jsonl": "{}\n",
        "run/notes.txt": "mine",
    }
    if case.task == "tag":
        earlier |= {"train.jsonl": SENTENCES, "valid.jsonl": SENTENCES}
    for name, content in (earlier | case.files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_bytes(content, COLUMNS.get(case.task, "labels")))
    if case.make is not None:
        case.make(folder)


def command_line(case: Case) -> list[str]:
    """The valid command (one epoch on four rows, or one step; replaces an earlier run) with these changes."""
    values: dict[str, object] = {
        "train_file": "train.csv", "validation_file": "valid.csv", "global_batch_size": 2,
        "report_to": "none", "output_dir": "run", "overwrite_output_dir": "true",
    }  # fmt: skip
    if case.task == "segment":
        values |= {"train_file": "data", "validation_file": "data", "max_steps": 1, "image_size": "32,48"}
        values |= {"config_name": "model", "from_scratch": "true"}
    elif case.task == "segment3d":
        values |= {"train_file": "data", "validation_file": None, "max_steps": 1, "class_names": "red,blue"}
        values |= {"channels": "4,8", "strides": "2", "patch_size": "8,8,8", "patches_per_volume": 1}
    else:
        values |= {"config_name": "models/config", "from_scratch": "true", "num_train_epochs": 1}
        values |= {"tokenizer_type": "train", "vocab_size": 128}
    if case.task == "titlegen":
        values |= {"decoder_layers": 1, "max_title_length": 8, "num_beams": 1}
    if case.task == "tag":
        values |= {"train_file": "train.jsonl", "validation_file": "valid.jsonl"}
    values |= case.arguments
    return [part for name, value in values.items() if value is not None for part in words(name, value)]


def words(name: str, value: object) -> list[str]:
    """An argument on the command line. name "": only the value; a list: several values."""
    values = value if isinstance(value, list) else [value]
    return [*([f"--{name}"] if name else []), *map(str, values)]
