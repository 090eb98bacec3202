"""Compares the first steps of a training command under several setups: does the job change when it moves?

    samerun parity [--setups NAME,...|all] [--steps N] [--output_dir FOLDER] classify ARGS

ARGS are the training command's own. Its first N optimizer steps run under each setup (launcher, sharding and
precision) on this machine, with one evaluation. The table shows the difference of each setup from the first
one, one process in fp32: final weights, losses and gradient norms (relative), predictions of the validation
rows such as logits and evaluation metrics (absolute), learning rates and rows of each step (equal or not).
fp32 setups may differ by rounding, 1e-5; bf16 and fp16 round more. Lines of code that draw random numbers,
other than for dropout by row, are named. The command's --output_dir is not touched.

    --setups NAME,...     setups to run, or all (default: one of each kind that this machine can run)
    --steps N             optimizer steps (default 6)
    --processes N         processes of a distributed setup (default 2)
    --device cpu          do not use GPUs
    --timeout SECONDS     time limit of a setup (default 1800)
    --output_dir FOLDER   folder and log of each setup, and parity.json (default runs/parity)

Exit codes: 0 every fp32 setup is the same; 1 a setup differs or failed; 2 bad input.
"""

import argparse
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samerun import task_scripts
from samerun.console import plain_table
from samerun.errors import InputError
from samerun.files import write_json
from samerun.parsing import as_dict
from samerun.plan import CPU_TOKENS, batch_of
from samerun.run_folder import library_versions
from samerun.tools.moving.outcome import METRICS_TOLERANCE, TOLERANCE, Difference, compare, read_outcome
from samerun.tools.moving.setups import (
    OVERRIDES,
    REFERENCE,
    SETUPS,
    Setup,
    launch_arguments,
    launcher,
    run_observed,
)

DIFFERS = 1
ADAM_TOLERANCE = 1e-3  # of weights, if all else is equal: rounding enlarged by Adam (see `verdict`)
HALF_TOLERANCE = 0.1  # of losses in fp16 and bf16
RANKING_TOLERANCE = 1e-3  # of metrics, if all else is equal: rounding that swaps rows of nearly equal scores


@dataclass(frozen=True)
class Row:
    """A setup's row in the table."""

    setup: Setup
    processes: int
    difference: Difference | None  # None for the first setup, and for one that failed
    verdict: str
    passed: bool


def main(argv: list[str]) -> int:
    options = read_options(argv)
    arguments, _ = task_scripts.read_command(options.script, options.arguments)
    setups = choose_setups(options.setups, options.processes, gpus(options.device))
    rows = run_setups(options, setups, arguments)
    print("", *table(rows), sep="\n")
    write_report(options, rows)
    print(f"\nwritten to {options.output_dir / 'parity.json'}")
    return 0 if all(row.passed for row in rows) else DIFFERS


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = task_scripts.tool_parser(__doc__)
    add = parser.add_argument
    add("--setups", metavar="NAME,...")
    add("--steps", type=task_scripts.at_least(1), default=6, metavar="N")
    add("--processes", type=task_scripts.at_least(2), default=2, metavar="N")
    add("--device", choices=("any", "cpu"), default="any")
    add("--timeout", type=float, default=1800, metavar="SECONDS")
    add("--output_dir", type=lambda p: Path(p).expanduser(), default=Path("runs/parity"), metavar="FOLDER")
    return parser.parse_args(argv)


def gpus(device: str) -> int:
    """The number of GPUs that setups may use."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def choose_setups(names: str | None, processes: int, num_gpus: int) -> list[Setup]:
    """The reference setup and the named ones; by default all usual setups that a machine with `num_gpus` GPUs
    can run. Raises `InputError` for an unknown name."""
    if names is None:
        few = 0 < num_gpus < processes
        usual = [setup for setup in SETUPS if setup.usual and not (few and setup.several)]
        return [setup for setup in usual if num_gpus or setup.precision != "fp16"]
    known = {setup.name: setup for setup in SETUPS}
    chosen = list(known) if names == "all" else [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise InputError(f"--setups {', '.join(unknown)}: no such setup; choose from {', '.join(known)}")
    return [REFERENCE, *(known[name] for name in dict.fromkeys(chosen) if name != REFERENCE.name)]


def run_setups(options: argparse.Namespace, setups: list[Setup], arguments: Any) -> list[Row]:
    """Runs the setups one after the other and prints each verdict. Raises `InputError` if the reference setup
    fails."""
    shutil.rmtree(options.output_dir / "observed", ignore_errors=True)
    rows: list[Row] = []
    for setup in setups:
        processes = options.processes if setup.several else 1
        problem = run_setup(options, setup, processes, arguments)
        if problem is None:
            try:
                outcome = read_outcome(options.output_dir / setup.name, options.output_dir / "observed")
            except (OSError, ValueError, KeyError) as error:
                problem = f"its files cannot be read: {error}"
        if problem is not None and not rows:
            raise InputError(
                f"the command fails in one process, so there is nothing to compare with: {problem}"
            )
        if problem is not None:
            rows.append(Row(setup, processes, None, f"failed: {problem}", False))
        elif not rows:
            reference = outcome
            rows.append(Row(setup, processes, None, "reference", True))
            for place in reference.random_calls:
                print(f"random numbers that are not by row, other ones in each setup: {place}")
        else:
            difference = compare(outcome, reference)
            rows.append(Row(setup, processes, difference, *verdict(setup, difference)))
        print(f"{setup.name:<16} {rows[-1].verdict}", flush=True)
    return rows


def run_setup(options: argparse.Namespace, setup: Setup, processes: int, arguments: Any) -> str | None:
    """Runs the command's first steps as a setup. Returns the reason if the run fails, else None."""
    folder = options.output_dir / setup.name
    try:
        start = launcher(setup, processes)
    except FileNotFoundError as error:
        return str(error)
    batch = batch_arguments(setup, processes, arguments, on_gpu=gpus(options.device) > 0)
    steps = options.steps
    warmup = {} if arguments.warmup_steps is None else {"warmup_steps": min(arguments.warmup_steps, steps)}
    changes = {
        **OVERRIDES, **launch_arguments(setup), **batch, **warmup, "output_dir": folder,
        "max_steps": steps, "eval_steps": steps, "save_steps": steps,
    }  # fmt: skip
    names = as_dict(arguments)  # some tasks lack the arguments that count tokens
    changed = {name: value for name, value in changes.items() if name in names}
    words = task_scripts.with_changes(options.arguments, changed)
    limits = {"timeout": options.timeout, "device": options.device}
    problem = run_observed(start, options.script, words, options.output_dir, setup.name, **limits)
    return problem and f"{problem} ({folder}.log)"


def batch_arguments(setup: Setup, processes: int, arguments: Any, on_gpu: bool) -> dict[str, Any]:
    """Arguments for the command's global batch in one process, in `accumulation` times as many
    micro-batches."""
    batch, rows = batch_of(arguments, 1), arguments.per_device_train_batch_size
    global_batch_size, tokens = batch.global_batch_size, batch.max_tokens
    if arguments.gradient_accumulation_steps:
        rows = batch.micro_batch_size
    elif "max_length" in as_dict(arguments) and rows is None and tokens is None and not on_gpu:
        # The default limit of tokens, in rows: accumulation then always makes micro-batches smaller.
        rows = max(1, CPU_TOKENS // (arguments.max_length or 512))
    process_rows = -(-global_batch_size // processes)
    rows = -(-min(process_rows, rows or process_rows) // setup.accumulation)
    return {
        "global_batch_size": global_batch_size,
        "gradient_accumulation_steps": "none",
        "per_device_train_batch_size": rows if tokens is None else "none",
        "max_tokens_per_micro_batch": "none" if tokens is None else max(1, tokens // setup.accumulation),
    }


def verdict(setup: Setup, difference: Difference) -> tuple[str, bool]:
    """(a setup's verdict in words, whether the setup passes).

    Adam divides a gradient by its own size. If an element's gradient almost cancels over the batch, its
    weight shows the rounding of the gradient enlarged many times, while losses and gradient norms stay close.
    Elements whose gradient is rounding alone are left out (`outcome.rounding_alone`). A metric that
    ranks rows or applies a threshold jumps where rounding moves one of two nearly equal scores, while the
    loss stays close.
    """
    d = difference
    if setup.precision != "no":
        if d.losses > HALF_TOLERANCE:
            return "differs", False
        note = "" if d.same_rows and d.same_learning_rates else "; other rows or learning rates"
        return f"rounding of {setup.precision}{note}", d.same_rows
    if d.is_rounding():
        return "the same", True
    if not d.is_rounding(ADAM_TOLERANCE, RANKING_TOLERANCE):
        return "differs", False
    reasons = [f"{d.where} shows rounding enlarged by Adam"] * (d.weights > TOLERANCE)
    reasons += ["rounding swaps rows of nearly equal scores in metrics"] * (d.metrics > METRICS_TOLERANCE)
    return f"the same steps; {'; '.join(reasons)}", True


def table(rows: list[Row]) -> list[str]:
    """The rows as lines of text."""
    numeric = ("weights", "losses", "grad_norms", "predictions", "metrics")
    titles = [name.replace("_", " ") for name in numeric]
    header = ["setup", "launcher", "processes", *titles, "rates", "rows", ""]
    lines = []
    for row in rows:
        numbers, same, d = ["-"] * 5, ["-"] * 2, row.difference
        if d is not None:
            numbers = [f"{getattr(d, name):.1e}" for name in numeric]
            same = ["same" if equal else "NOT" for equal in (d.same_learning_rates, d.same_rows)]
        lines.append([row.setup.name, row.setup.launcher, str(row.processes), *numbers, *same, row.verdict])
    left_out = max((row.difference.left_out for row in rows if row.difference), default=0.0)
    note = (
        "weights, losses, grad norms: relative; predictions, metrics: absolute; weights without the "
        f"{left_out:.2%} whose gradient is rounding alone"
    )
    return [*plain_table(header, lines), note]


def write_report(options: argparse.Namespace, rows: list[Row]) -> None:
    """Writes parity.json: the table, the command and the machine."""
    setups = []
    for row in map(asdict, rows):
        for name, value in (row["difference"] or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                row["difference"][name] = None
        setups.append(row.pop("setup") | row)
    report = {
        "command": [str(options.script), *options.arguments],
        "steps": options.steps,
        "gpus": gpus(options.device),
        "versions": library_versions(),
        "setups": setups,
    }
    write_json(options.output_dir / "parity.json", report)
