"""Which rows are wrong? Likely wrong labels, repeated, leaked, empty and cut texts, as a page and a csv file.

    samerun rows FOLDER [--output rows.html] [--csv rows.csv]

FOLDER is the output folder of `samerun cross-validate`, for all training rows, or of a training, for its
validation rows (one with --report_to html). Tasks: text classification with one or several labels. A row is
likely wrong if a model that has not seen it gives its label a lower probability than to the mean of the rows
without that label, and another label a higher one than to the mean of the rows with it (the thresholds of
confident learning: Northcutt, Jiang and Chuang, "Confident Learning", JAIR 70, 2021, section 3.1). The most
doubtful rows come first.

The csv file has all these rows with three columns at its end: problem, suggestion, doubt. Correct it and
train with it: columns other than those of texts and labels are ignored.

    --output FILE    page (default: FOLDER/rows.html)
    --csv FILE       file to correct (default: FOLDER/rows.csv)
    --listed N       rows of each kind on the page (default 200)

Exit codes: 0 done; 2 bad input.
"""

import csv
import json
import shlex
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samerun import task_scripts
from samerun.classes import MAX_PREDICTED
from samerun.console import plain_table
from samerun.data.splits import read_split
from samerun.data.tables import Table
from samerun.errors import InputError
from samerun.files import ROWS, atomic_file, read_lines, write_text
from samerun.launch import Launch
from samerun.plan import Modes
from samerun.reports.page import render
from samerun.run_folder import BEST_PREDICTIONS, PREDICTIONS, RUN_FILE
from samerun.task import Section
from samerun.text.labels import separator_of
from samerun.text.multi_label_scores import sigmoid
from samerun.text.single_label import softmax
from samerun.tools.data_report import Rows, joined, of_text_split, of_texts
from samerun.tools.trials import hash_of_rows, read_rows, task_of_run

MAX_TEXT = 300
SHOWN = 10  # rows on the console
ADDED = ("problem", "suggestion", "doubt")
KINDS = {  # the beginning of a problem -> the title of the rows with it
    "label": "Likely wrong labels",
    "text as": "Texts that occur before",
    "empty": "Empty texts",
    "cut": "Cut texts",
}


@dataclass(frozen=True)
class HeldOut:
    """Rows with predictions of models that have not seen them. `given`, `probabilities`: (rows, labels)."""

    task: Any
    split: str
    labels: Sequence[str]
    given: np.ndarray
    probabilities: np.ndarray
    tables: dict[str, Table]  # of all splits
    rows: dict[str, Rows]

    @property
    def table(self) -> Table:
        return self.tables[self.split]

    @property
    def separator(self) -> str:
        return separator_of(self.labels, self.task.arguments.label_separator)

    def cells(self, chosen: np.ndarray) -> list[str]:
        """The labels of each row of a (rows, labels) bool array, as cells of --label_column."""
        separator = self.separator
        return [separator.join(self.labels[label] for label in np.flatnonzero(row)) for row in chosen]


def read_held_out(folder: Path) -> HeldOut:
    """Reads a folder of a cross-validation or of a training. Raises `InputError`."""
    try:
        if (folder / "cross_validation.json").exists():
            script, *words = json.loads((folder / "command.json").read_text(encoding="utf-8"))["command"]
            arguments, task_class = task_scripts.read_command(task_scripts.path_of(script), words)
            task, read = task_class(arguments), _of_folds
        else:
            run = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
            given = run["arguments"]
            files = map(Path, [*(given["train_file"] or ()), *(given["validation_file"] or ())])
            if any(path.parent.name.startswith(ROWS) and not path.exists() for path in files):
                raise InputError(f"{folder}: was trained on rows from Python, which are gone; use a file")
            task, read = task_of_run(run, test_file=None), _of_training
        if (getattr(task.arguments, "problem_type", "regression") or "").startswith("regression"):
            raise InputError("only rows of text classification with one or several labels are supported")
        return read(folder, task)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{folder}: holds no predictions of rows that a model has not seen ({error}); name the "
            "--output_dir of a finished training or of samerun cross-validate"
        ) from None


def _of_folds(folder: Path, task: Any) -> HeldOut:
    arguments, columns = task.arguments, (*task.text_columns, *task.target_columns)
    read = {name: read_split(arguments, name, columns, (arguments.id_column,)) for name in ("train", "test")}
    tables = {name: table for name, table in read.items() if table is not None}
    lines = list(read_lines(folder / PREDICTIONS))
    references = [line["reference"] for line in lines]
    given_names = [[names] if isinstance(names, str) else names for names in references]
    named = ([*line["probabilities"], *names] for line, names in zip(lines, given_names, strict=True))
    labels = list(dict.fromkeys(name for names in named for name in names))
    given = np.array([[name in names for name in labels] for names in given_names])
    chances = [line["probabilities"] for line in lines]
    if any(len(of_row) < len(labels) for of_row in chances):
        # Of many labels a line has the likeliest, and its own: these would look likelier than in other rows.
        chances = [dict(list(of_row.items())[:MAX_PREDICTED]) for of_row in chances]
    probabilities = np.array([[of_row.get(name, 0.0) for name in labels] for of_row in chances])
    command = json.loads((folder / "command.json").read_text(encoding="utf-8"))
    rows = read_rows(task, command.get("--group_column"))
    if len(lines) != len(tables["train"]) or hash_of_rows(*rows) != command["rows"]:
        raise InputError(f"{folder}: the training file has changed since; cross-validate it again")
    rows = {name: of_texts(_texts(task, table), None, None) for name, table in tables.items()}
    return HeldOut(task, "train", labels, given, probabilities, tables, rows)


def _of_training(folder: Path, task: Any) -> HeldOut:
    path = folder / BEST_PREDICTIONS
    if not path.exists():
        raise InputError(
            f"{folder}: has no {path.name}; train with --report_to html (a page without figures had "
            "predictions that are too large), or use cross-validate"
        )
    modes = Modes(train=True, evaluate=True, predict=False)
    data = task.load(Launch(), modes)
    tables, _ = task.read(task.launch, modes)
    rows = {name: of_text_split(task, split) for name, split in data.splits.items()}
    with np.load(path) as stored:
        logits, targets = stored["logits"].astype(np.float64), stored["labels"]
    known = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["fingerprint"]
    if data.fingerprint["validation_content"] != known["validation_content"]:
        raise InputError(f"{folder}: the validation rows have changed since; train again")
    probabilities = sigmoid(logits) if targets.ndim == 2 else softmax(logits)
    if targets.ndim == 1:
        targets = np.eye(logits.shape[1])[targets]
    return HeldOut(task, "validation", task.labels, targets > 0, probabilities, tables, rows)


def _texts(task: Any, table: Table) -> list[str]:
    """The texts of each row as one; a missing one is empty."""
    columns = [[cell or "" for cell in table.columns[name]] for name in task.text_columns]
    return list(joined(*columns))


def doubts(probabilities: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(doubt, suggested): (rows,) float, and (rows, labels) bool, the given labels but for the rows that are
    likely wrong.

    A given label is doubtful as far as the row's probability of it is below the mean of the rows without it;
    another label is likely as far as its probability is above the mean of the rows with it. Both are
    logarithms of ratios, so that rare labels, whose probabilities are low, count as much as common ones. A
    label of every row is never doubtful, one of no row never likely. The doubt is that of the most doubtful
    given label and of the likeliest other one together; the row is likely wrong if both are above 0, and the
    other label then takes the place of the doubtful ones.
    """
    chances = probabilities.clip(min=1e-6)
    without = np.log(_means(chances, ~given, empty=1e-6) / chances)
    other = np.where(given, -np.inf, np.log(chances / _means(chances, given, empty=1.0)))
    worst = np.where(given, without, -np.inf).max(axis=1)
    worst = np.where(given.any(axis=1), worst, 0.0)
    best = other.max(axis=1)
    likely = np.eye(given.shape[1], dtype=bool)[other.argmax(axis=1)]
    wrong = (best >= 0) & ((worst > 0) | ~given.any(axis=1))
    suggested = np.where(wrong[:, None], (given & (without <= 0)) | likely, given)
    return worst + best, suggested


def _means(values: np.ndarray, chosen: np.ndarray, empty: float) -> np.ndarray:
    """(labels,) the mean of each column over its chosen rows; `empty` without any."""
    count = chosen.sum(axis=0)
    return np.where(count > 0, (values * chosen).sum(axis=0) / np.maximum(count, 1), empty)


def problems_of(held_out: HeldOut, suggested: np.ndarray) -> list[list[str]]:
    """What is wrong with each row of the held-out split, in words."""
    own = held_out.rows[held_out.split]
    differs = (suggested != held_out.given).any(axis=1)
    found = [["label"] if wrong else [] for wrong in differs]
    first_with: dict[Hashable, str] = {}
    # Last the held-out rows, so that they are compared with all others.
    for name, rows in sorted(held_out.rows.items(), key=lambda item: item[0] == held_out.split):
        for row, key in enumerate(rows.similar):
            place = held_out.tables[name].where(row)
            known = first_with.setdefault(key, place)
            if name == held_out.split and known != place:
                found[row].append(f"text as {known}")
    for row in np.flatnonzero(own.blank):
        found[row].append("empty")
    if own.limit is not None:
        for row in np.flatnonzero(own.lengths >= own.limit):
            found[row].append(f"cut: reaches the limit of {own.limit} tokens")
    return found


def write_csv(path: Path, held_out: HeldOut, order: Sequence[int], added: Sequence[Sequence[str]]) -> None:
    """Writes the held-out rows in this order, with the columns that a training reads and those of `ADDED`."""
    table, given = held_out.table, held_out.cells(held_out.given)
    # Those of --label_columns stay as they are.
    named = () if held_out.task.arguments.label_columns else held_out.task.target_columns
    columns = [name for name in table.columns if name not in named]
    with atomic_file(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, *named, *ADDED])
        for row in order:
            cells = [table.columns[name][row] for name in columns]
            writer.writerow([*cells, *(given[row] for _ in named), *added[row]])


def main(argv: list[str]) -> int:
    parser = task_scripts.parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--listed", type=int, default=200, metavar="N")
    options = parser.parse_args(argv)
    page, file = options.output or options.folder / "rows.html", options.csv or options.folder / "rows.csv"
    held_out = read_held_out(options.folder)
    doubt, suggested = doubts(held_out.probabilities, held_out.given)
    problems = problems_of(held_out, suggested)
    order = np.argsort(-doubt, kind="stable").tolist()
    texts, table = _texts(held_out.task, held_out.table), held_out.table
    given, better = held_out.cells(held_out.given), held_out.cells(suggested)
    suggestions = [new if new != old else "" for old, new in zip(given, better, strict=True)]
    added = [*zip(map("; ".join, problems), suggestions, (f"{value:.4f}" for value in doubt), strict=True)]
    listed = {
        title: [row for row in order if any(text.startswith(kind) for text in problems[row])]
        for kind, title in KINDS.items()
    }
    sections = []
    for title, rows in listed.items():
        shown = rows[: options.listed]
        cells = [[table.where(row), texts[row][:MAX_TEXT], given[row], *added[row]] for row in shown]
        if rows:
            sections.append(Section(f"{title}: {len(rows)}", "", ["row", "text", "given", *ADDED], cells))
    number = f"{len(texts)} {held_out.split} rows"
    summary = [f"{number}; each prediction is of a model that has not seen the row."]
    content = {"title": "Rows to check", "summary": summary, "sections": sections}
    write_text(page, render("layout.html.j2", plots={}, **content))
    write_csv(file, held_out, order, added)
    for title, rows in listed.items():
        print(f"{title.lower():<26}{len(rows)} of {number}")
    likely = listed[KINDS["label"]][:SHOWN]
    short = {row: " ".join(texts[row].split())[:60] for row in likely}
    first = [[table.where(row), short[row], given[row], suggestions[row]] for row in likely]
    if first:
        print("", *plain_table(["row", "text", "given", "suggestion"], first), sep="\n")
    print(f"\nlook through {page}; correct {file}, which has the {number}")
    several = (held_out.given.sum(axis=1) != 1).any() and not held_out.task.arguments.label_columns
    if several and held_out.separator != held_out.task.arguments.label_separator:
        print(f"its labels are separated otherwise: --label_separator {shlex.quote(held_out.separator)}")
    return 0
