"""How long a training will take: by measured steps (`meter.py`), or by the times of an earlier run."""

import datetime
import json
import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from samerun import task_scripts
from samerun.console import duration, plain_table
from samerun.errors import InputError
from samerun.parsing import as_dict
from samerun.plan import Plan
from samerun.run_folder import METRICS, read_metrics
from samerun.tools.moving.observer import MEASURE, TIMES
from samerun.tools.moving.setups import OVERRIDES, SETUPS, Setup, launch_arguments, launcher, run_observed

HERE = "here"  # the planned launcher
MEASURED = {setup.name: setup for setup in SETUPS if setup.accumulation == 1}
ROWS = 256  # of an evaluation, at most: the time of the others follows
TIMEOUT = 3600.0  # seconds
# Besides parity's: a measured run takes the time of its own scores and reports.
CHANGES = {
    name: value
    for name, value in OVERRIDES.items()
    if name not in ("do_eval", "do_predict", "logging_steps", "eval_strategy", "report_to", "ddp_backend")
} | {"overwrite_output_dir": False}


class Times(NamedTuple):
    """Seconds of a mean step; of an evaluation with the export of its model; for which a checkpoint blocks;
    before and after the training."""

    step: float
    evaluation: float
    save: float
    outside: float


def parts(plan: Plan, times: Times, evaluates: bool) -> dict[str, float]:
    """The seconds of a run by its parts. `evaluates`: there are validation rows."""
    evaluations, saves = (
        math.ceil(plan.total_steps / interval) if interval else 0
        for interval in (plan.eval_steps if evaluates else None, plan.save_steps)
    )
    return {
        "steps": plan.total_steps * times.step,
        f"{evaluations} evaluation(s)": evaluations * times.evaluation,
        f"{saves} checkpoint(s)": saves * times.save,
        "before and after": times.outside,
    }


def lines(plan: Plan, times: Times, evaluates: bool, now: datetime.datetime) -> list[str]:
    """The forecast as lines for the console."""
    found = parts(plan, times, evaluates)
    total, epoch = sum(found.values()), plan.steps_per_epoch * times.step
    end = now + datetime.timedelta(seconds=total)
    return [
        f"time           {duration(total)}, until {end:%Y-%m-%d %H:%M:%S} if it starts now; an epoch's steps "
        f"take {duration(epoch)}, {plan.num_rows / epoch:,.1f} rows/s",
        f"               ({', '.join(f'{name} {duration(seconds)}' for name, seconds in found.items())})",
    ]


def of_earlier_run(run: Path, work: float, rows: int) -> Times:
    """The times of an earlier run of such a model on such a machine. `work`: of a mean step
    (`TrainBatches.mean_work`); `rows`: of the validation. Raises `InputError` if it has none."""
    metrics = read_metrics(run / METRICS)
    rate = metrics.get("train_samples_per_second")
    if metrics.get("train_tokens_per_second"):
        rate = metrics["train_tokens_per_second"] / (1 - metrics["train_padding_share"])
    if not rate:
        raise InputError(f"--like {run}: {METRICS} has no speed; name the folder of a finished training")
    evaluation = metrics.get("train_evaluation_stall") or 0.0
    evaluation *= rows / (metrics.get("train_evaluation_rows") or rows or 1)
    others = (metrics.get(f"train_{name}") or 0.0 for name in ("save_stall", "outside_runtime"))
    return Times(work / rate, evaluation, *others)


def of_measurement(found: dict[str, Any], metrics: dict[str, Any], seconds: float, rows: Any) -> Times:
    """The times of a measured run. `found`: by `meter`; `metrics`: the run's; `seconds`: of the whole;
    `rows`: of all splits."""
    evaluation, share = metrics.get("train_evaluation_stall") or 0.0, 1.0
    if evaluation:
        share = rows["validation"] / metrics["train_evaluation_rows"]
    left, rate = rows.get("test", 0) - metrics.get("test_rows", 0), metrics.get("test_samples_per_second")
    return Times(
        found["trials"][0]["step"],
        found["export"] + (evaluation - found["export"]) * share,
        metrics.get("train_save_stall") or 0.0,
        seconds - found["seconds"] + (left / rate if rate else 0.0),
    )


def choose(names: str) -> list[Setup | None]:
    """The setups of --measure; None: the planned launcher. Raises `InputError` for an unknown one."""
    known = {HERE: None, **MEASURED}
    usual = [name for name, setup in MEASURED.items() if setup.usual and setup.precision == "no"]
    chosen = usual if names == "all" else [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise InputError(f"--measure {', '.join(unknown)}: no such setup; there are all, {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(chosen)]


class Job(NamedTuple):
    """A training command and its plan."""

    script: Path
    arguments: Any
    plan: Plan
    rows: dict[str, int]  # by split
    launch_file: Path | None
    processes: int


def measure(job: Job, setups: list[Setup | None]) -> tuple[Times, list[str]]:
    """Measures a job under each setup. Returns (the times of the first; lines for the console). Raises
    `InputError` if all fail."""
    evaluates = "validation" in job.rows
    first, rows, failures = None, [], []
    for setup in setups:
        several = max(2, job.processes) if setup is not None and setup.several else 1
        name = HERE if setup is None else f"{setup.name} x {several}"
        try:
            found, metrics, seconds = _run(job, setup, several)
        except (InputError, FileNotFoundError) as error:
            failures.append(f"--measure {name}: {error}")
            continue
        times = of_measurement(found, metrics, seconds, job.rows)
        first = first or times
        fastest = min(trial["step"] for trial in found["trials"])
        for trial in found["trials"]:
            total = sum(parts(job.plan, times._replace(step=trial["step"]), evaluates).values())
            memory, mark = "", "fastest" if trial["step"] == fastest else ""
            if trial["memory"]:
                memory = f"{trial['memory'] / 2**30:.2f}, {metrics['peak_memory_mb'] / 1024:.2f}"
            rate = job.plan.num_rows / job.plan.steps_per_epoch / trial["step"]
            rows.append([name, _argument(trial), f"{rate:,.1f}", duration(total), memory, mark])
    if first is None:
        raise InputError(*failures)
    header = ["launcher", "micro-batch", "rows/s", "whole run", "GiB estimated, used", ""]
    table = [*plain_table(header, rows), "used: by a process in all trials, with its libraries"]
    own = [*lines(job.plan, first, evaluates, datetime.datetime.now()), ""] if len(setups) == 1 else []
    return first, [*own, *table, *(f"failed         {failure}" for failure in failures)]


def _argument(trial: dict[str, Any]) -> str:
    if trial["max_tokens"] is not None:
        return f"--max_tokens_per_micro_batch {trial['max_tokens']}"
    return f"--per_device_train_batch_size {trial['micro_batch_size']}"


def _run(job: Job, setup: Setup | None, processes: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """(what `meter` found, the run's metrics, seconds) of a measured run. Its folder, beside --output_dir for
    the same disk, is removed. Raises `InputError` if it fails."""
    place = next(path for path in Path(job.arguments.output_dir).absolute().parents if path.is_dir())
    folder = Path(tempfile.mkdtemp(prefix=".samerun-plan-", dir=place))
    own = as_dict(job.arguments)
    changes = {**CHANGES, "output_dir": str(folder / "run")}
    changes["report_to"] = [name for name in own["report_to"] if name in ("html", "tensorboard")] or ["none"]
    for name in ("max_eval_samples", "max_predict_samples"):
        changes[name] = min(own.get(name) or ROWS, ROWS)
    if setup is not None:
        changes["deepspeed"] = launch_arguments(setup)["deepspeed"]
        changes["global_batch_size"] = job.plan.batch.global_batch_size
        changes["gradient_accumulation_steps"] = None
        if setup.precision != "no":
            changes["mixed_precision"] = setup.precision
    settings = {**own, **{name: value for name, value in changes.items() if name in own}}
    try:
        task_scripts.write_settings(folder / "settings.json", settings)
        if setup is None:
            several = "torchrun" if job.processes > 1 else "python"
            planned = Setup(HERE, several if job.launch_file is None else "accelerate")
            start = launcher(planned, job.processes, job.launch_file)
        else:
            start = launcher(setup, processes)
        words, limits = ["--config", str(folder / "settings.json")], {"steps": MEASURE, "timeout": TIMEOUT}
        began = time.perf_counter()
        problem = run_observed(start, job.script, words, folder, "run", **limits)
        seconds = time.perf_counter() - began
        if problem is not None:
            raise InputError(problem)
        found = json.loads((folder / "observed" / TIMES).read_text(encoding="utf-8"))
        return found, read_metrics(folder / "run" / METRICS), seconds
    finally:
        shutil.rmtree(folder)
