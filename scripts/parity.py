#!/usr/bin/env python3
"""Will my job change if I move it? A few steps of a training command under several launches, compared.

    python scripts/parity.py [--cells NAME,...|all] [--steps N] [--output_dir FOLDER] app/classify.py ARGS

ARGS are the training command's own, unchanged. Its first N optimizer steps run under each launch ("cell") on this machine,
without dropout, with one evaluation. The table shows how far each cell is from the first one, one process in fp32: final
weights, losses and gradient norms (relative), learning rates and the rows of each step (the same or not), evaluation metrics.
In fp32 only rounding may differ, 1e-5; bf16 and fp16 round more. Nothing is written to the command's own --output_dir.

    --cells NAME,...      which cells, `all` of them, or, if it is left out, one per kind that this machine can run
    --steps N             optimizer steps (default 6)
    --processes N         of the cells that have several (default 2)
    --device cpu          leave the GPUs alone
    --timeout SECONDS     for one cell (default 1800)
    --output_dir FOLDER   a folder per cell with its log, and parity.json (default runs/parity)

Exit codes: 0 every fp32 cell is the same; 1 one is not, or a cell failed; 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "app"))

from moving.cells import CELLS, OBSERVED, REFERENCE, Cell, batch_arguments, launch_arguments, launcher  # noqa: E402
from moving.outcome import METRICS_WITHIN, WITHIN, Difference, Outcome, compare, read_outcome  # noqa: E402
from moving.task_script import load_task_script  # noqa: E402

from finetune.errors import EXIT_BAD_INPUT, InputError  # noqa: E402

DIFFERS = 1
ADAMS_SHARE = 1e-3  # weights that are this near, where all else is the same, are what Adam makes of rounding (see `verdict`)
SWAPPED_ROWS = 1e-3  # metrics that are this near, where all else is the same, are what two rows that change places make of it
# Whatever the command says of these, a cell neither resumes, nor predicts, nor reports to anybody.
SILENT = {
    "do_train": "true",
    "do_eval": "true",
    "do_predict": "false",
    "overwrite_output_dir": "true",
    "resume_from_checkpoint": "none",
    "push_to_hub": "false",
    "report_to": "none",
    "profile": "none",
    "checkpoint_format": "full",
    "max_train_time": "none",
    "early_stopping_patience": "none",
    "ddp_backend": "none",
    "logging_steps": "1",
    "eval_strategy": "steps",
}


@dataclass(frozen=True)
class Row:
    """A cell's line in the table."""

    cell: Cell
    processes: int
    difference: Difference | None  # None for the first cell, and for one that failed
    verdict: str
    passed: bool


def main(argv: list[str]) -> int:
    options = read_options(argv)
    try:
        arguments = read_arguments(options.script, options.arguments)
        cells = choose_cells(options.cells, options.processes, gpus(options.device))
        rows = run_cells(options, cells, arguments)
    except InputError as error:
        print(*(f"error: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return EXIT_BAD_INPUT
    print("", *table(rows), sep="\n")
    write_report(options, rows)
    print(f"\nwritten to {options.output_dir / 'parity.json'}")
    return 0 if all(row.passed for row in rows) else DIFFERS


def read_options(argv: list[str]) -> argparse.Namespace:
    """The options before the script, the script, and its arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", metavar="NAME,...")
    parser.add_argument("--steps", type=int, default=6, metavar="N")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--device", choices=("any", "cpu"), default="any")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS")
    parser.add_argument("--output_dir", type=lambda p: Path(p).expanduser(), default=Path("runs/parity"), metavar="FOLDER")
    parser.add_argument("script", type=Path, metavar="app/TASK.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    found = parser.parse_args(argv)
    for name, least in (("steps", 1), ("processes", 2)):
        if getattr(found, name) < least:
            parser.error(f"--{name} {getattr(found, name)}: at least {least}")
    if not found.script.is_file():
        parser.error(f"{found.script}: is no file; name a task's script, such as app/classify.py")
    return found


def read_arguments(script: Path, given: list[str]) -> Any:
    """The command's arguments. Raises `InputError` for those that the script would refuse."""
    from finetune.arguments.parsing import parse, validate

    arguments_class, _ = load_task_script(script)
    arguments = parse(arguments_class, given)
    validate(arguments)
    return arguments


def gpus(device: str) -> int:
    """How many GPUs the cells may use."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def choose_cells(names: str | None, processes: int, count: int) -> list[Cell]:
    """The first cell, and those that are named or that a machine with `count` GPUs can run. Raises `InputError` for a name that
    is none."""
    if names is None:
        here = [cell for cell in CELLS if cell.usual and not (cell.several and 0 < count < processes)]
        return [cell for cell in here if count or cell.precision != "fp16"]
    known = {cell.name: cell for cell in CELLS}
    chosen = list(known) if names == "all" else [name.strip() for name in names.split(",")]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise InputError(f"--cells {', '.join(unknown)}: no such cell; they are {', '.join(known)}")
    return [REFERENCE, *(known[name] for name in dict.fromkeys(chosen) if name != REFERENCE.name)]


def run_cells(options: argparse.Namespace, cells: list[Cell], arguments: Any) -> list[Row]:
    """Runs one cell after the other; each is printed when it is done. Raises `InputError` if the first one fails: there is
    nothing to compare with then."""
    shutil.rmtree(options.output_dir / "observed", ignore_errors=True)
    rows: list[Row] = []
    reference: Outcome | None = None
    for cell in cells:
        processes = options.processes if cell.several else 1
        problem = run_cell(options, cell, processes, arguments)
        outcome = None
        if problem is None:
            try:
                outcome = read_outcome(options.output_dir / cell.name, options.output_dir / "observed")
            except (OSError, ValueError, KeyError) as error:
                problem = f"left something unreadable: {error}"
        if reference is None:
            if outcome is None:
                raise InputError(f"the command fails under one process, so there is nothing to compare with: {problem}")
            reference = outcome
            rows.append(Row(cell, processes, None, "the others are compared with this", True))
        elif outcome is None:
            rows.append(Row(cell, processes, None, f"failed: {problem}", False))
        else:
            difference = compare(outcome, reference)
            rows.append(Row(cell, processes, difference, *verdict(cell, difference)))
        print(f"{cell.name:<16} {rows[-1].verdict}", flush=True)
    return rows


def run_cell(options: argparse.Namespace, cell: Cell, processes: int, arguments: Any) -> str | None:
    """Runs the command's first steps as a cell; returns what went wrong, if anything did."""
    from finetune.arguments.parsing import as_dict

    folder = options.output_dir / cell.name
    try:
        start = launcher(cell, processes)
    except FileNotFoundError as error:
        return str(error)
    batch = batch_arguments(cell, processes, *own_batch(arguments, gpus(options.device) > 0))
    steps = options.steps
    warmup = {} if arguments.warmup_steps is None else {"warmup_steps": min(arguments.warmup_steps, steps)}
    changed = {
        **SILENT, **launch_arguments(cell), **batch, **warmup, "output_dir": folder,
        "max_steps": steps, "eval_steps": steps, "save_steps": steps,
    }  # fmt: skip
    known = as_dict(arguments)  # only tasks with tokens have arguments that count them
    changes = [part for name, value in changed.items() if name in known for part in (f"--{name}", str(value))]
    observed = [str(OBSERVED), options.device, str(options.output_dir / "observed")]
    command = [*start, *observed, str(options.script), *options.arguments, *changes]
    log = options.output_dir / f"{cell.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        code = run_to_the_end(command, file, options.timeout, options.device)
    if code is None:
        return f"not done after {options.timeout:g} s ({log})"
    return f"{reason_of(log)} ({log})" if code else None


def own_batch(arguments: Any, on_gpu: bool) -> tuple[int, int | None, int | None]:
    """The command's global batch, and what bounds a micro-batch under one process: rows, or else tokens, or nothing."""
    from finetune.arguments.parsing import as_dict
    from finetune.plan import CPU_TOKENS, batch_of

    batch, rows = batch_of(arguments, 1), arguments.per_device_train_batch_size
    has_tokens = "max_length" in as_dict(arguments)
    if arguments.gradient_accumulation_steps:
        rows = batch.micro_batch_size
    elif has_tokens and rows is None and batch.max_tokens is None and not on_gpu:
        # In rows, of which there are fewer under more accumulation even where all of them fit into the tokens.
        rows = max(1, CPU_TOKENS // (arguments.max_length or 512))
    return batch.global_batch_size, rows, batch.max_tokens


def run_to_the_end(command: list[str], log: Any, timeout: float, device: str) -> int | None:
    """The exit code; None for a command that is not done in time, which is ended then, with what it started."""
    environment = dict(os.environ)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # workers outside of the group see their launcher gone, and end
            process.wait()


def reason_of(log: Path) -> str:
    """The line of a failed run that says why: the first error, or else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("error", "  - "))]
    return (errors or lines[-1:] or ["no output"])[0][:300]


def verdict(cell: Cell, difference: Difference) -> tuple[str, bool]:
    """A cell's verdict in words, and whether it is as it should be.

    Adam moves an element by its gradient over the gradient's own size, so an element whose gradient all but cancels over the
    batch shows the rounding of that gradient many times over, while losses and gradient norms show it once. Tensors of which
    that holds as a whole, such as biases before a norm, are left out (`Difference.no_gradient`). A metric that ranks rows, or
    compares scores with a threshold, jumps where rounding moves one of two nearly equal scores, while the loss shows it once.
    """
    if cell.precision != "no":
        same = "" if difference.same_rows and difference.same_learning_rates else "; other rows or learning rates"
        return f"the rounding of {cell.precision}{same}", difference.same_rows
    found = difference.no_gradient
    without = f"; without {len(found)} tensor(s) that have no gradient, such as {found[0]}" if found else ""
    if difference.is_rounding:
        return f"the same{without}", True
    near = max(difference.losses, difference.grad_norms) <= WITHIN and difference.eval_losses <= METRICS_WITHIN
    near = near and difference.weights <= ADAMS_SHARE and difference.metrics <= SWAPPED_ROWS
    if not (near and difference.same_rows and difference.same_learning_rates):
        return "differs", False
    enlarged = [f"{difference.where} shows rounding enlarged by Adam"] * (difference.weights > WITHIN)
    enlarged += ["rounding swaps rows of nearly equal scores in metrics"] * (difference.metrics > METRICS_WITHIN)
    return f"the same steps; {'; '.join(enlarged)}{without}", True


def table(rows: list[Row]) -> list[str]:
    """The rows as text, largest differences from the first cell."""
    titles = ("cell", "launcher", "processes", "weights", "losses", "grad norms", "metrics", "rates", "rows", "")
    lines = [titles]
    for row in rows:
        found = row.difference
        numbers = [found.weights, found.losses, found.grad_norms, found.metrics] if found else []
        shown = [f"{number:.1e}" for number in numbers] or ["-"] * 4
        same = [("same" if yes else "NOT") for yes in (found.same_learning_rates, found.same_rows)] if found else ["-"] * 2
        lines.append((row.cell.name, row.cell.launcher, str(row.processes), *shown, *same, row.verdict))
    widths = [max(len(line[place]) for line in lines) for place in range(len(titles) - 1)]
    text = [
        "  ".join([*(f"{part:<{width}}" for part, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    ]
    return [
        *text,
        "weights, losses, grad norms: relative; metrics: absolute; without attention's key biases, whose gradient is zero",
    ]


def write_report(options: argparse.Namespace, rows: list[Row]) -> None:
    """parity.json: the table, with the command and the machine."""
    from finetune.output.versions import library_versions

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    cells = [
        {
            **asdict(row.cell),
            "processes": row.processes,
            "difference": row.difference and {name: plain(value) for name, value in asdict(row.difference).items()},
            "verdict": row.verdict,
            "passed": row.passed,
        }
        for row in rows
    ]
    report = {
        "command": [str(options.script), *options.arguments],
        "steps": options.steps,
        "gpus": gpus(options.device),
        "versions": library_versions(),
        "cells": cells,
    }
    path = options.output_dir / "parity.json"
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
