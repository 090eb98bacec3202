#!/usr/bin/env python3
"""K-fold cross-validation of a text task: mean and standard deviation of the metrics, and a held-out
prediction for every row.

    python scripts/cross_validate.py --folds 5 app/classify.py --train_file train.csv \\
        --output_dir runs/folds ARGS

ARGS are the training command's own. --seed decides the folds; rows with the same rarest label are spread
evenly over them. Each fold is one run in --output_dir/fold_0, fold_1, ...: it trains on the other folds' rows
and tests on its own. The best model is chosen on a part of the training rows (--validation_split) or on
--validation_file, never on the fold. Results in --output_dir: predictions.jsonl, in the order of the training
rows, and cross_validation.json. The same command continues a stopped one.

    --folds N        number of folds (default 5)
    --seed N         seed of the folds (default 0)
    --processes N    runs at a time (default 1)
    --launch "..."   a launcher with its options, such as "torchrun --nproc_per_node 2" (default: this Python)

Exit codes: 0 done; 2 bad input; 3 a run failed; 75 stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(REPOSITORY / "app")]

from trials.command import Command, claim, print_table, run_all, run_script  # noqa: E402

from samerun.data.splits import read_splits  # noqa: E402
from samerun.errors import InputError, TrainingError  # noqa: E402
from samerun.files import read_lines, write_json, write_text  # noqa: E402
from samerun.run_folder import PREDICTIONS  # noqa: E402

# Arguments that the folds' own files replace.
REPLACED = (
    *(
        f"dataset_{name}"
        for name in ("name", "config_name", "revision", "split", "validation_split", "test_split")
    ),
    *("max_train_samples", "max_eval_samples", "max_predict_samples", "predictions_file"),
)
NO_SCORES = ("test_samples_per_second", "test_rows")


def read_rows(task: Any) -> tuple[dict[str, list[dict[str, Any]]], list[tuple[str, ...]], list[str]]:
    """(rows with ids by split: "train", and "validation" if the arguments name it; labels of each training
    row, () for tasks without labels; label list). Raises `InputError`."""
    arguments = task.arguments
    columns = (*task.text_columns, *task.target_columns)
    required = {"train": columns, "validation": columns}
    tables, rows = read_splits(arguments, required, True, optional=(arguments.id_column,)), {}
    for split, table in tables.items():
        cells = {arguments.id_column: range(len(table)), **table.columns}
        for name in cells.keys() & table.classes.keys():
            cells[name] = [
                [cell] if isinstance(cell, str) else cell for cell in cells[name]
            ]  # a class is one label
        rows[split] = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    targets = task.read_targets(task.as_texts(tables["train"], "train"), "train", [])
    return rows, getattr(targets, "rows", [()] * len(rows["train"])), getattr(targets, "names", [])


def assign_folds(labels: list[tuple[str, ...]], folds: int, seed: int) -> np.ndarray:
    """(rows,) the fold of each row. Rows with the same rarest label are shuffled by `seed` and assigned in
    turn."""
    count = Counter(label for row in labels for label in row)
    rarest = [min(row, key=lambda label: (count[label], label), default="") for row in labels]
    number = {label: place for place, label in enumerate(sorted(set(rarest)))}
    order = np.lexsort([np.random.default_rng(seed).random(len(labels)), [number[label] for label in rarest]])
    fold = np.empty(len(labels), dtype=np.int64)
    fold[order] = np.arange(len(labels)) % folds
    return fold


def run_fold(
    command: Command, folder: Path, rows: list[dict[str, Any]], fold: np.ndarray, number: int
) -> dict[str, Any]:
    """Writes a fold's files, runs it and returns its metrics. Raises `TrainingError` if the run fails."""
    files = {
        "train_file": folder / f"fold_{number}_train.jsonl",
        "test_file": folder / f"fold_{number}_test.jsonl",
    }
    for path, chosen in zip(files.values(), (fold != number, fold == number), strict=True):
        write_lines(path, [rows[row] for row in np.flatnonzero(chosen)])
    others = {"label_file": folder / "labels.txt", "validation_file": folder / "validation.jsonl"}
    files |= {name: path for name, path in others.items() if path.exists()}
    changes = (
        dict.fromkeys(REPLACED, "none")
        | files
        | {"encoding": "utf-8", "do_train": "true", "do_predict": "true"}
    )
    metrics = command.run(folder / f"fold_{number}", changes)
    if metrics is None:
        raise TrainingError(f"fold {number} failed: {folder / f'fold_{number}.log'}")
    print(f"fold {number} is done: {folder / f'fold_{number}'}", flush=True)
    return metrics


def merge_predictions(folder: Path, fold: np.ndarray) -> list[dict[str, Any]]:
    """The folds' predictions in the order of the rows."""
    parts = [read_lines(folder / f"fold_{number}" / PREDICTIONS) for number in range(fold.max() + 1)]
    return [{**next(parts[number]), "fold": int(number)} for number in fold]


def summarise(metrics: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation of the test metrics that all folds have."""
    numbers = {
        name: [each.get(name) for each in metrics]
        for name in metrics[0]
        if name.startswith("test_")
        and name not in NO_SCORES
        and all(isinstance(each.get(name), float) for each in metrics)
    }
    return {
        name: {"mean": statistics.mean(each), "std": statistics.stdev(each)} for name, each in numbers.items()
    }


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes a jsonl file."""
    write_text(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def cross_validate(options: argparse.Namespace, command: Command, folder: Path) -> None:
    """Runs all folds and writes the results. Raises `InputError`, `TrainingError`, `StopRequested`."""
    arguments = command.arguments({})
    if not hasattr(arguments, "text_column"):
        raise InputError(
            f"{options.script}: cross-validation supports text tasks only, such as app/classify.py"
        )
    if arguments.mixing_weights:
        raise InputError(
            "--mixing_weights is not supported, because every fold has rows of all files; leave it out"
        )
    if arguments.streaming:
        raise InputError("--streaming is not supported, because folds need all rows; leave it out")
    task = command.task_class(arguments)
    splits, labels, names = read_rows(task)
    rows = splits["train"]
    if not 2 <= options.folds <= len(rows) // 2:
        raise InputError(
            f"--folds {options.folds}: expected from 2 to {len(rows) // 2}, half of the {len(rows)} rows"
        )
    content = json.dumps([splits, labels, names], sort_keys=True, default=str).encode()
    rows_hash = hashlib.sha256(content).hexdigest()
    claim(folder, command, **{"--folds": options.folds, "--seed": options.seed, "rows": rows_hash})
    if names and not arguments.label_file and not getattr(arguments, "label_columns", None):
        write_text(folder / "labels.txt", "".join(f"{name}\n" for name in names))  # a fold may lack one
    if "validation" in splits:
        write_lines(folder / "validation.jsonl", splits["validation"])
    fold = assign_folds(labels, options.folds, options.seed)
    jobs = [partial(run_fold, command, folder, rows, fold, number) for number in range(options.folds)]
    metrics = run_all(jobs, options.processes)
    summary = summarise(metrics)
    write_lines(folder / PREDICTIONS, merge_predictions(folder, fold))
    write_json(folder / "cross_validation.json", {"metrics": summary, "folds": metrics})
    shown = [name for name in (f"test_{metric}" for metric in task.shown_metrics) if name in summary]
    print_table(["metric", "mean", "std"], [[name, *summary[name].values()] for name in shown])
    print(f"\nall metrics: {folder / 'cross_validation.json'}; predictions: {folder / PREDICTIONS}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folds", type=int, default=5)
    return run_script(parser, argv, cross_validate)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
