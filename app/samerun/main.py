"""Runs any task from its arguments to its output files."""

from pathlib import Path
from typing import Any

import torch

from samerun import checkpoint, mirror, runtime, signals, start
from samerun.console import Phase, duration, number_text, plain_table
from samerun.evaluate import eval_rows, evaluate, open_saved_parts, predict, score
from samerun.export import hide_library_bars, push_to_hub
from samerun.plan import Modes, make_plan
from samerun.predictions import write_metrics, write_split
from samerun.reports.page import write_reports
from samerun.run_folder import BEST, METRICS, by_split, merge_metrics, read_metrics
from samerun.runtime import Run
from samerun.start import make_fingerprint, open_run
from samerun.task import Data, Task, higher_is_better
from samerun.training import Training

BASELINE_SECONDS, BASELINE_SHARE = 60.0, 0.05
LEFT_TO_UPLOAD = (
    "the run is done; the same command with --resume_from_checkpoint auto uploads what the mirror lacks"
)


def run(task_class: type[Task], arguments: Any) -> None:
    """Trains, evaluates and predicts as the arguments request. Reports errors and ends the process with their
    exit code."""
    with signals.failures_end_the_job(debug=arguments.log_level == "debug"):
        run_task(task_class(arguments), arguments)
        signals.exit_done()


def run_task(task: Task, arguments: Any) -> None:
    """Executes a whole run. Raises `InputError` before it changes existing files, `TrainingError` and
    `StopRequested` later."""
    modes = arguments.modes
    hide_library_bars()
    launch = start.check(arguments)
    data = task.load(launch, modes)
    plan = make_plan(arguments, data.splits["train"], launch) if modes.train else None
    if modes.train:
        stream = data.splits["train"].stream
        if stream is not None and launch.local_rank == 0:
            stream.start_reading_ahead()
    run = runtime.start(launch, plan.batch if plan else None, arguments.report_to, arguments.output_dir)
    fingerprint = make_fingerprint(arguments, plan, task.name, data)
    # Before the output folder is opened: an error in the model must not harm existing files.
    model = build_model(task, arguments.seed) if modes.train else None
    opened = open_run(run, arguments, plan, fingerprint, data.notes, task.details)

    metrics: dict[str, Any] = {}
    if opened.complete:
        known = run.from_rank0(lambda: read_metrics(Path(arguments.output_dir) / METRICS))
        metrics |= {key: known[key] for key in known if not (modes.predict and key.startswith("test_"))}
    elif modes.train:
        training = Training(run, arguments, task, data, plan, model, opened=opened)
        del model
        metrics |= training.fit()
        metrics |= training.finish()
        training.release()
    if modes.predict or not modes.train:
        model = load_exported(run, arguments, task, modes.train)
    if modes.evaluate and not modes.train:
        scores, _ = evaluate(run, model, task, eval_rows(run, arguments, task, data.splits["validation"]))
        metrics |= {f"eval_{name}": value for name, value in scores.items()}
    if modes.evaluate:
        metrics |= baseline(run, task, data.splits["validation"], "eval", metrics)
    if modes.predict:
        metrics |= predict_test(run, arguments, task, model, data)
        if data.splits["test"].labelled:
            metrics |= baseline(run, task, data.splits["test"], "test", metrics)
    run.from_rank0(lambda: write_metrics(arguments, metrics))
    if modes.train:
        run.from_rank0(lambda: write_reports(run, arguments, task, data.splits))
    names = [name for name in metrics if name.startswith(("test_", "best_"))]
    final = {name: metrics[name] for name in names if isinstance(metrics[name], int | float)}
    if run.accelerator.trackers and final:
        run.accelerator.log(final, step=metrics.get("train_steps"))
    push_to_hub(run, arguments)
    if modes.train and not opened.complete:
        run.print(time_taken(run, arguments, metrics))
    report(run, arguments, task, metrics)
    signals.finish(run, LEFT_TO_UPLOAD if modes.train and arguments.mirror_to else None)
    mirror.upload(Path(arguments.output_dir))
    mirror.wait(mirror.END_SECONDS)


def build_model(task: Task, seed: int) -> torch.nn.Module:
    """Builds the model to train, with the same initial weights on every process."""
    torch.manual_seed(seed)
    return task.build()


def load_exported(run: Run, arguments: Any, task: Task, trained: bool) -> Any:
    """Loads this run's best model, or --model_name_or_path without training, and prepares it on every
    process."""
    if trained:
        folder = Path(arguments.output_dir) / BEST
        place = checkpoint.fetch(run, folder)  # a temporary copy on machines without a shared disk
        try:
            model = task.load_exported(place)
        finally:
            checkpoint.discard(run, place, folder)
    else:
        model = task.load_exported(arguments.model_name_or_path)
    return run.accelerator.prepare_model(model.to(run.device), evaluation_mode=True)


def baseline(run: Run, task: Task, split: Any, name: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """The baseline's metrics, prefixed with `name`. It may take a share of the training's time."""
    seconds = min(BASELINE_SECONDS, BASELINE_SHARE * (metrics.get("train_runtime") or 0))
    with Phase("baseline", shown=run.is_main):
        scores = run.from_rank0(lambda: task.baseline(split, seconds))
    return {f"{name}_baseline_{key}": value for key, value in scores.items()}


def baseline_remark(task: Task, metrics: dict[str, Any]) -> list[str]:
    """Says so if the model is not better than the baseline. `metrics`: of one split."""
    name = task.best_metric
    ours, simple = metrics.get(name), metrics.get(f"baseline_{name}")
    if ours is None or simple is None:
        return []
    if ours > simple if higher_is_better(task, name) else ours < simple:
        return []
    problem = f"{task.baseline_name} is not worse: {name} {number_text(simple)}."
    return [f"{problem} {task.baseline_advice}".rstrip()]


def predict_test(run: Run, arguments: Any, task: Task, model: Any, data: Data) -> dict[str, Any]:
    """Writes the predictions of all test rows, resuming an interrupted prediction. Returns test_* metrics,
    with scores if the rows are labelled."""
    split = data.splits["test"]
    rows = eval_rows(run, arguments, task, split)
    saved = open_saved_parts(run, arguments, data.fingerprint, rows)
    predictions, rate = predict(run, model, task, rows, saved=saved)
    path = run.from_rank0(lambda: write_split(arguments, task, split, predictions))
    run.print(f"predictions    {path}")
    if saved is not None:
        saved.remove()
    metrics = {"test_rows": len(split), "test_samples_per_second": rate}
    if split.labelled:
        with Phase("scoring", shown=run.is_main):
            scores = run.from_rank0(lambda: score(task, predictions, split))
        metrics |= {f"test_{name}": value for name, value in scores.items()}
    return metrics


def time_taken(run: Run, arguments: Any, metrics: dict[str, Any]) -> str:
    """A line on what this start took, beside what its first steps foretold. Adds the time before and after
    the training to metrics.json, for `samerun plan --like`."""
    total, foretold = signals.seconds_since_start(), metrics.get("train_runtime_forecast")
    outside = {"train_outside_runtime": total - metrics.get("train_fit_runtime", 0.0)}
    run.from_rank0(lambda: merge_metrics(Path(arguments.output_dir), outside))
    beside = f" ({duration(foretold)} foretold after the first)" if foretold is not None else ""
    return f"time           {duration(total)}; training steps {duration(metrics['train_runtime'])}{beside}"


def report(run: Run, arguments: Any, task: Task, metrics: dict[str, Any]) -> None:
    """Prints the main metrics."""
    scores = by_split(metrics)
    remarks = []
    for split, known in scores.items():
        remarks += [f"note           {split}: {line}" for line in baseline_remark(task, known)]
    # app/predict.py: its output folder is a temporary one.
    only_predicts = arguments.modes == Modes(train=False, evaluate=False, predict=True)
    place = (only_predicts and arguments.predictions_file) or arguments.output_dir
    simple = scores["baseline"]
    simple = [f"baseline       {task.baseline_name}, {simple['split']} rows"] if simple else []
    run.print(*metrics_table(scores, task.headline_metrics), *simple, *remarks, f"done           {place}")


def metrics_table(scores: dict[str, dict[str, Any]], names: tuple[str, ...]) -> list[str]:
    """Lines of a table with a row per metric and a column per split, which fits a terminal of 60 columns.
    Leaves out empty rows and columns."""
    shown = {split: known for split, known in scores.items() if any(known.get(x) is not None for x in names)}
    rows = [name for name in names if any(known.get(name) is not None for known in shown.values())]
    columns = [["", *rows]]
    for split, known in shown.items():
        cells = [split, *(number_text(known.get(name)) for name in rows)]
        columns.append([cell.rjust(max(map(len, cells))) for cell in cells])
    header, *body = map(list, zip(*columns, strict=True))
    lines = plain_table(header, body)
    return [f"{'' if number else 'results':<15}{line}" for number, line in enumerate(lines)] if shown else []
