"""K-fold cross-validation of a text task: mean and standard deviation of the metrics, and a held-out
prediction for every row.

    samerun cross-validate --folds 5 classify --train_file train.csv \\
        --output_dir runs/folds ARGS

ARGS are the training command's own. --seed decides the folds; rows with the same rarest label are spread
evenly over them, and equal texts are in one. Each fold is one run in --output_dir/fold_0, fold_1, ...: it
trains on the other folds' rows and tests on its own. The best model is chosen on a part of the training rows
(--validation_split) or on --validation_file, never on the fold. Results in --output_dir: predictions.jsonl,
in the order of the training rows, and cross_validation.json. The same command continues a stopped one.

    --folds N        number of folds (default 5)
    --seed N         seed of the folds (default 0)
    --processes N    runs at a time (default 1)
    --launch "..."   a launcher with its options, such as "torchrun --nproc_per_node 2" (default: this Python)

Exit codes: 0 done; 2 bad input; 3 a run failed; 75 stopped.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Hashable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from samerun import task_scripts
from samerun.errors import InputError, TrainingError
from samerun.files import read_lines, write_json
from samerun.run_folder import PREDICTIONS
from samerun.tools.trials import Command, files_of, open_rows, print_table, run_all, run_script, write_lines

NO_SCORES = ("test_samples_per_second", "test_rows")


def assign_folds(texts: list[Hashable], labels: list[tuple[str, ...]], folds: int, seed: int) -> np.ndarray:
    """(rows,) the fold of each row. Texts whose first rows have the same rarest label are shuffled by `seed`
    and assigned in turn, with all rows that repeat them."""
    first: dict[Hashable, int] = {}
    for row, text in enumerate(texts):
        first.setdefault(text, row)
    count = Counter(label for row in labels for label in row)
    rarest = [min(labels[row], key=lambda label: (count[label], label), default="") for row in first.values()]
    number = {label: place for place, label in enumerate(sorted(set(rarest)))}
    order = np.lexsort([np.random.default_rng(seed).random(len(rarest)), [number[label] for label in rarest]])
    fold = np.empty(len(rarest), dtype=np.int64)
    fold[order] = np.arange(len(rarest)) % folds
    of_text = dict(zip(first, fold, strict=True))
    return np.array([of_text[text] for text in texts])


def run_fold(
    command: Command, folder: Path, rows: list[dict[str, Any]], fold: np.ndarray, number: int
) -> dict[str, Any]:
    """Writes a fold's files, runs it and returns its metrics. Raises `TrainingError` if the run fails."""
    files = {f"{split}_file": folder / f"fold_{number}_{split}.jsonl" for split in ("train", "test")}
    for path, chosen in zip(files.values(), (fold != number, fold == number), strict=True):
        write_lines(path, [rows[row] for row in np.flatnonzero(chosen)])
    changes = files_of(folder, **files) | {"do_train": "true", "do_predict": "true"}
    changes["max_predict_samples"] = "none"
    metrics = command.run(folder / f"fold_{number}", changes)
    if metrics is None:
        raise TrainingError(f"fold {number} failed: {folder / f'fold_{number}.log'}")
    print(f"fold {number} is done: {folder / f'fold_{number}'}", flush=True)
    return metrics


def summarise(metrics: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation of each test metric that at least two folds have, and their number."""
    of_all = dict.fromkeys(chain.from_iterable(metrics))
    names = [name for name in of_all if name.startswith("test_") and name not in NO_SCORES]
    columns = {name: [each[name] for each in metrics if each.get(name) is not None] for name in names}
    return {
        name: {"mean": statistics.mean(values), "std": statistics.stdev(values), "folds": len(values)}
        for name, values in columns.items()
        if len(values) > 1 and all(isinstance(value, int | float) for value in values)
    }


def cross_validate(options: argparse.Namespace, command: Command, folder: Path) -> None:
    """Runs all folds and writes the results. Raises `InputError`, `TrainingError`, `StopRequested`."""
    settings = {"--folds": options.folds, "--seed": options.seed}
    task, rows, labels = open_rows(command, folder, **settings)
    texts = [tuple(str(row[name]) for name in task.text_columns) for row in rows]
    most = len(set(texts)) // 2
    if not 2 <= options.folds <= most:
        raise InputError(f"--folds {options.folds}: expected from 2 to {most}, half of the different texts")
    if task.arguments.test_file is not None:
        print("note           --test_file is not read: each fold is tested on its own rows", flush=True)
    if task.arguments.predictions_file is not None:
        print(f"note           --predictions_file is not used: see {folder / PREDICTIONS}", flush=True)
    fold = assign_folds(texts, labels, options.folds, options.seed)
    jobs = [partial(run_fold, command, folder, rows, fold, number) for number in range(options.folds)]
    metrics = run_all(jobs, options.processes)
    summary = summarise(metrics)
    # In the order of the rows.
    parts = [read_lines(folder / f"fold_{number}" / PREDICTIONS) for number in range(options.folds)]
    write_lines(folder / PREDICTIONS, ({**next(parts[number]), "fold": int(number)} for number in fold))
    write_json(folder / "cross_validation.json", {"metrics": summary, "folds": metrics})
    shown = [name for name in (f"test_{metric}" for metric in task.headline_metrics) if name in summary]
    print_table(["metric", "mean", "std", "folds"], [[name, *summary[name].values()] for name in shown])
    print(f"\nall metrics: {folder / 'cross_validation.json'}; predictions: {folder / PREDICTIONS}")


def main(argv: list[str]) -> int:
    parser = task_scripts.tool_parser(__doc__)
    parser.add_argument("--folds", type=int, default=5)
    return run_script(parser, argv, cross_validate)
