"""Learning curve of a text task: what more training rows bring, beside the baseline.

    samerun learning-curve --rows 100,300,1000,all classify --train_file train.csv \\
        --output_dir runs/curve ARGS

ARGS are the training command's own. Each number is a run on so many training rows, drawn by the seed, in
--output_dir/rows_100_seed_0 and so on; fewer rows are a part of more. Without --validation_file the best
model is chosen on a part of them. The table and learning_curve.png have --metric_for_best_model on the
test rows, or without --do_predict on the validation rows. The same command continues a stopped one.

    --rows A,B,...   numbers of training rows; all: every one (default 100,300,1000,all)
    --repeats N      runs of each number, with other seeds; the mean, the lowest and the highest score are
                     shown, and the mean of the baseline's (default 1)
    --seed N         the first seed, in place of the training command's (default 0)
    --processes N    runs at a time (default 1)
    --launch "..."   a launcher with its options, such as "torchrun --nproc_per_node 2" (default: this Python)

Exit codes: 0 done; 2 bad input; 3 a run failed; 75 stopped.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from samerun import task_scripts
from samerun.errors import InputError, TrainingError
from samerun.files import write_json
from samerun.parsing import is_given
from samerun.reports.figures import BLUE, GREY, new_figure
from samerun.tools.trials import Command, files_of, open_rows, print_table, run_all, run_script, write_lines

ALL = "all"


def read_numbers(text: str) -> list[int | str]:
    """The numbers of --rows, without repetitions. Raises `InputError`."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(word == ALL or (word.isdecimal() and int(word) > 0) for word in words):
        raise InputError(f"--rows {text}: expected numbers and all, such as 100,300,1000,all")
    return [word if word == ALL else int(word) for word in words]


def train(
    command: Command, folder: Path, rows: list[dict[str, Any]], number: int, seed: int
) -> dict[str, Any]:
    """The metrics of a run on `number` of the rows. Raises `TrainingError` if it fails."""
    place = folder / f"rows_{number}_seed_{seed}"
    chosen = sorted(np.random.default_rng(seed).permutation(len(rows))[:number].tolist())
    write_lines(folder / f"{place.name}.jsonl", [rows[row] for row in chosen])
    changes = files_of(folder, train_file=folder / f"{place.name}.jsonl")
    metrics = command.run(place, changes | {"seed": seed, "do_train": "true"})
    if metrics is None:
        raise TrainingError(f"{place.name} failed: {place}.log")
    print(f"{place.name} is done", flush=True)
    return metrics


def learning_curve(options: argparse.Namespace, command: Command, folder: Path) -> None:
    """Runs all numbers of rows and writes the table and the plot. Raises `InputError`, `TrainingError`,
    `StopRequested`."""
    given, repeats = read_numbers(options.rows), range(options.seed, options.seed + options.repeats)
    settings = {"--rows": given, "--seed": options.seed, "--repeats": options.repeats}
    task, rows, _ = open_rows(command, folder, **settings)
    if is_given(task.arguments, "seed"):
        print("note           the training command's --seed is not used: see this tool's --seed", flush=True)
    if task.arguments.validation_file is None and not task.arguments.do_predict:
        print("note           no --validation_file: each run is scored on rows of its own", flush=True)
    numbers = sorted({len(rows) if number == ALL else min(number, len(rows)) for number in given})
    metric = f"{'test' if task.arguments.do_predict else 'eval'}_{task.best_metric}"
    jobs = [partial(train, command, folder, rows, number, seed) for number in numbers for seed in repeats]
    metrics, curve = run_all(jobs, options.processes), []
    for place, number in enumerate(numbers):
        of_rows = metrics[place * len(repeats) : (place + 1) * len(repeats)]
        scored = [each for each in of_rows if each.get(metric) is not None]
        if missing := len(of_rows) - len(scored):
            print(f"note           {metric} is undefined in {missing} run(s) with {number} rows")
        if not scored:
            continue
        scores = [each[metric] for each in scored]
        simple = [each.get(metric.replace("_", "_baseline_", 1)) for each in scored]
        curve.append(
            {
                "rows": number,
                "mean": statistics.mean(scores),
                "lowest": min(scores),
                "highest": max(scores),
                "baseline": None if None in simple else statistics.mean(simple),
            }
        )
    if not curve:
        raise InputError(f"--metric_for_best_model {task.best_metric}: undefined in all runs")
    write_json(folder / "learning_curve.json", {"metric": metric, "curve": curve})
    plot(folder / "learning_curve.png", curve, metric, task.baseline_name)
    print_table(list(curve[0]), [list(point.values()) for point in curve])
    print(f"\n{metric}; plot: {folder / 'learning_curve.png'}")


def plot(path: Path, curve: list[dict[str, Any]], metric: str, baseline: str) -> None:
    figure, axes = new_figure("Learning curve", "training rows", metric)
    rows = [point["rows"] for point in curve]
    axes.plot(rows, [point["mean"] for point in curve], "o-", color=BLUE, label="model")
    ends = ([point[end] for point in curve] for end in ("lowest", "highest"))
    axes.fill_between(rows, *ends, color=BLUE, alpha=0.2)
    if all(point["baseline"] is not None for point in curve):
        axes.plot(rows, [point["baseline"] for point in curve], "o--", color=GREY, label=baseline)
    axes.set_xscale("log")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> int:
    parser = task_scripts.tool_parser(__doc__)
    parser.add_argument("--rows", default=f"100,300,1000,{ALL}")
    parser.add_argument("--repeats", type=task_scripts.at_least(1), default=1)
    return run_script(parser, argv, learning_curve)
