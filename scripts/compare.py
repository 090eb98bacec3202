#!/usr/bin/env python3
"""Compares finished runs: metrics, differing arguments, and the significance of differences.

    python scripts/compare.py runs/a runs/b [runs/c ...] [--plot curves.png]

The others are compared with the first run. If two runs scored the same rows, a paired bootstrap over rows
yields the difference of each headline metric with its 95 % interval and a two-sided p value (Efron and
Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 16; Koehn, "Statistical Significance Tests for
Machine Translation Evaluation", EMNLP 2004). It reads `bootstrap_test.npz`, else `bootstrap_validation.npz`,
which `--report_to html` writes. Validation rows exaggerate a difference if they also selected the best model.

    --plot FILE      draw the loss curves of all runs

Exit codes: 0 done; 2 a folder holds no finished run.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

APP = Path(__file__).resolve().parents[1] / "app"
sys.path.insert(0, str(APP))

from samerun.errors import EXIT_BAD_INPUT, InputError  # noqa: E402
from samerun.metrics.bootstrap import paired_difference  # noqa: E402
from samerun.output.run_folder import BOOTSTRAP, METRICS, RUN_FILE  # noqa: E402
from samerun.reports.figures import COLORS, DPI, new_figure  # noqa: E402
from samerun.reports.tracker import read_history  # noqa: E402

IGNORED = (
    "output_dir",
    "config",
    "run_name",
    "predictions_file",
)  # arguments that differ between any two runs
PLOTS = (".png", ".svg", ".pdf")


def read_run(folder: Path) -> dict[str, Any]:
    """The arguments, metrics, history and metrics of resampled rows of a finished run. Raises
    `InputError`."""
    try:
        run = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        metrics = dict(json.loads((folder / METRICS).read_text(encoding="utf-8")))
        resampled = {}
        for split in ("test", "validation"):
            if (folder / BOOTSTRAP.format(split)).exists():
                with np.load(folder / BOOTSTRAP.format(split)) as arrays:
                    resampled[split] = dict(arrays)
        return {
            "name": str(folder),
            **run,
            "metrics": metrics,
            "history": read_history(folder),
            "resampled": resampled,
        }
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{folder}: holds no finished run ({error}); name a run's --output_dir") from None


def differing_arguments(runs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The arguments that differ between the runs: name -> the value in each run."""
    names = sorted({name for run in runs for name in run["arguments"]} - set(IGNORED))
    values = {name: [run["arguments"].get(name) for run in runs] for name in names}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def same_rows(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first of "test" and "validation" whose rows both runs have scored, or None."""
    for split in ("test", "validation"):
        sizes = [run["resampled"].get(split, {}).get("rows") for run in (one, other)]
        content = [
            run["fingerprint"].get(f"{split}_content", run["arguments"].get(f"{split}_file"))
            for run in (one, other)
        ]
        if sizes[0] is not None and sizes[0] == sizes[1] and content[0] == content[1]:
            return split
    return None


def report(runs: list[dict[str, Any]]) -> list[str]:
    """Lines of text: metrics, arguments, differences."""
    names = [f"[{number}]" for number in range(len(runs))]
    lines = [f"{name} {run['name']}" for name, run in zip(names, runs, strict=True)]
    metrics = [
        name
        for name in dict.fromkeys(name for run in runs for name in run["metrics"])
        if name.startswith(("eval_", "test_", "best_", "train_loss", "train_runtime", "peak_memory"))
        and all(isinstance(run["metrics"].get(name), int | float) for run in runs)
    ]
    lines += ["", f"{'metric':<36}{''.join(f'{name:>14}' for name in names)}"]
    for name in metrics:
        lines.append(f"{name:<36}" + "".join(f"{run['metrics'][name]:>14.4f}" for run in runs))
    lines += ["", "arguments that differ"]
    changed = differing_arguments(runs)
    lines += [f"  --{name}: {', '.join(map(str, values))}" for name, values in changed.items()] or ["  none"]
    for name, run in zip(names[1:], runs[1:], strict=True):
        split = same_rows(run, runs[0])
        if split is None:
            lines += [
                "",
                f"{name} and [0] scored different rows, or one has no scores by row (--report_to "
                "html writes them)",
            ]
            continue
        lines += ["", f"{name} minus [0], {split} rows, paired bootstrap"]
        ours, theirs = run["resampled"][split], runs[0]["resampled"][split]
        for metric in (name for name in theirs if name in ours and name != "rows"):
            difference, low, high, p = paired_difference(ours[metric], theirs[metric])
            lines.append(f"  {metric:<34}{difference:>+10.4f}   95 % {low:+.4f} to {high:+.4f}   p {p:.4f}")
    return lines


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Draws the training and validation losses of all runs."""
    figure, axes = new_figure("Loss: training (thin) and validation (dots)", "optimizer step", height=4.2)
    for color, run in zip(COLORS * (len(runs) // len(COLORS) + 1), runs, strict=False):
        for key, style in (("loss", "-"), ("eval_loss", "o--")):
            points = [(event["step"], event[key]) for event in run["history"] if event.get(key) is not None]
            if points:
                label = run["name"] if key == "loss" else None
                axes.plot(
                    *zip(*points, strict=True), style, color=color, linewidth=1, markersize=4, label=label
                )
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=DPI)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(argv)
    if options.plot is not None and (options.plot.suffix not in PLOTS or not options.plot.parent.is_dir()):
        parser.error(
            f"--plot {options.plot}: expected a name that ends in {', '.join(PLOTS)}, in a folder that exists"
        )
    try:
        runs = [read_run(folder) for folder in options.runs]
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(*report(runs), sep="\n")
    if options.plot is not None:
        plot(runs, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
