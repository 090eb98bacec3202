"""K-fold cross-validation of a text task: mean and standard deviation of the metrics, and a held-out
prediction for every row.

    samerun cross-validate --folds 5 classify --train_file train.csv \\
        --output_dir runs/folds ARGS

ARGS are the training command's own. --seed decides the folds; rows with the same rarest label are spread
evenly over them. Equal texts are in one fold, and so are the rows of a group (--group_column). Each fold is
one run in --output_dir/fold_0, fold_1, ...: it trains on the other folds' rows and tests on its own. The best
model is chosen on a part of the training rows (--validation_split) or on --validation_file, never on the
fold. Results in --output_dir: predictions.jsonl, in the order of the training rows, and
cross_validation.json. The same command continues a stopped one.

    --folds N            number of folds (default 5)
    --group_column NAME  a column of the training rows, such as the patient of a report: no group is in two
                         folds, nor in the training and the validation rows of --validation_split
    --seed N             seed of the folds (default 0)
    --processes N        runs at a time (default 1)
    --launch "..."       a launcher with its options, such as "torchrun --nproc_per_node 2" (default: this
                         Python)

Exit codes: 0 done; 2 bad input; 3 a run failed; 75 stopped.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from samerun import task_scripts
from samerun.errors import InputError, TrainingError
from samerun.files import read_lines, write_json
from samerun.run_folder import PREDICTIONS
from samerun.tools.trials import (
    Command,
    files_of,
    open_rows,
    print_table,
    run_all,
    run_script,
    text_of,
    write_lines,
)

NO_SCORES = ("test_samples_per_second", "test_rows")


def groups_of(*keys: Sequence[Hashable]) -> np.ndarray:
    """(rows,) the number of each row's group. Rows with the same value of any of the `keys`, each (rows,),
    are in one group."""
    rows, edges, size = np.arange(len(keys[0])), [], len(keys[0])
    for key in keys:
        numbers = {value: number for number, value in enumerate(dict.fromkeys(key))}
        edges.append((rows, [size + numbers[value] for value in key]))
        size += len(numbers)
    ends = np.hstack(edges)
    graph = coo_array((np.ones(ends.shape[1]), ends), shape=(size, size))
    return connected_components(graph, directed=False)[1][rows]


def assign_folds(
    group: np.ndarray, labels: Sequence[tuple[str, ...]], folds: int, seed: int, by_first_row: bool = True
) -> np.ndarray:
    """(rows,) the fold of each row. Groups with the same rarest label are shuffled by `seed` and assigned in
    turn, each with all its rows. A group has the labels of its first row, or of all."""
    count = Counter(label for row in labels for label in row)
    of_group: dict[int, set[str]] = {}
    for number, row in zip(group.tolist(), labels, strict=True):
        if number not in of_group or not by_first_row:
            of_group.setdefault(number, set()).update(row)
    rarest = [
        min(of_group[number], key=lambda label: (count[label], label), default="")
        for number in range(len(of_group))
    ]
    place = {label: place for place, label in enumerate(sorted(set(rarest)))}
    order = np.lexsort([np.random.default_rng(seed).random(len(rarest)), [place[label] for label in rarest]])
    fold = np.empty(len(rarest), dtype=np.int64)
    fold[order] = np.arange(len(rarest)) % folds
    return fold[group]


def held_out(group: np.ndarray, share: float, seed: int) -> np.ndarray:
    """(rows,) bool: about a `share` of the rows, at random, as whole groups; not all."""
    names, number = np.unique(group, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    ends = np.cumsum(np.bincount(number)[order])
    chosen = int(np.abs(ends - share * len(group)).argmin()) + 1
    return np.isin(number, order[: min(chosen, len(names) - 1)])


def run_fold(
    command: Command, folder: Path, rows: list[dict[str, Any]], part: np.ndarray, number: int
) -> dict[str, Any]:
    """Writes a fold's files, runs it and returns its metrics. `part`: (rows,) the split of each row, such as
    "test". Raises `TrainingError` if the run fails."""
    files = {f"{split}_file": folder / f"fold_{number}_{split}.jsonl" for split in np.unique(part).tolist()}
    for argument, path in files.items():
        write_lines(path, [rows[row] for row in np.flatnonzero(part == argument.removesuffix("_file"))])
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
    column = options.group_column
    settings = {"--folds": options.folds, "--seed": options.seed, "--group_column": column}
    task, rows, labels = open_rows(command, folder, **settings)
    keys: list[list[Hashable]] = [[text_of(task, row) for row in rows]]
    if column is not None:
        keys.append([str(row[column]) for row in rows])
        if without := [number for number, row in enumerate(rows) if row[column] in (None, "")]:
            raise InputError(
                f"--group_column {column}: empty in {len(without)} training rows, such as row {without[0]} "
                "(0-based)"
            )
    group = groups_of(*keys)
    most = len(set(group.tolist())) // 2
    if not 2 <= options.folds <= most:
        units = "texts" if column is None else "groups"
        raise InputError(f"--folds {options.folds}: expected from 2 to {most}, half of the different {units}")
    if task.arguments.test_file is not None:
        print("note           --test_file is not read: each fold is tested on its own rows", flush=True)
    if task.arguments.predictions_file is not None:
        print(f"note           --predictions_file is not used: see {folder / PREDICTIONS}", flush=True)
    fold = assign_folds(group, labels, options.folds, options.seed, by_first_row=column is None)
    parts = [np.where(fold == number, "test", "train").astype("<U10") for number in range(options.folds)]
    if column is not None and not (folder / "validation.jsonl").exists():
        for part in parts:  # the run itself would draw validation rows from all groups
            rest = np.flatnonzero(part == "train")
            part[rest[held_out(group[rest], task.arguments.validation_split, options.seed)]] = "validation"
    jobs = [partial(run_fold, command, folder, rows, part, number) for number, part in enumerate(parts)]
    metrics = run_all(jobs, options.processes)
    summary = summarise(metrics)
    # In the order of the rows.
    found = [read_lines(folder / f"fold_{number}" / PREDICTIONS) for number in range(options.folds)]
    write_lines(folder / PREDICTIONS, ({**next(found[number]), "fold": int(number)} for number in fold))
    write_json(folder / "cross_validation.json", {"metrics": summary, "folds": metrics})
    shown = [name for name in (f"test_{metric}" for metric in task.headline_metrics) if name in summary]
    print_table(["metric", "mean", "std", "folds"], [[name, *summary[name].values()] for name in shown])
    print(f"\nall metrics: {folder / 'cross_validation.json'}; predictions: {folder / PREDICTIONS}")


def main(argv: list[str]) -> int:
    parser = task_scripts.tool_parser(__doc__)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--group_column", "--group-column", metavar="NAME")
    return run_script(parser, argv, cross_validate)
