"""Hyperparameter search with Optuna over a task's own command.

    pip install -r requirements-sweep.txt
    samerun sweep --trials 20 --search learning_rate=log:1e-5:1e-3 --search num_train_epochs=1,2,3 \\
        app/classify.py --train_file train.csv --output_dir runs/sweep ARGS

ARGS are the training command's own. Each trial runs that command with other values in its own folder
(--output_dir/trial_0, trial_1, ...). Trials are compared by --metric_for_best_model on the validation data.
The same command continues a stopped sweep: finished trials are kept, stopped ones resume.

    --search NAME=VALUES   an argument and its values: A,B,C (choices), LOW:HIGH (a range; of integers if
                           both are) or log:LOW:HIGH (a logarithmic range); repeat it for each argument
    --trials N             total number of trials (default 20)
    --processes N          trials at a time (default 1)
    --seed N               seed of the search (default 0)
    --launch "..."         a launcher with its options, such as "torchrun --nproc_per_node 2"

Exit codes: 0 done; 2 bad input; 75 stopped.
"""

import argparse
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from samerun import task_scripts
from samerun.console import number_text
from samerun.data.cache import content_hash, content_key
from samerun.data.splits import expand_patterns
from samerun.errors import InputError
from samerun.task import check_metric, higher_is_better
from samerun.tools.trials import Command, claim, has_runs, print_table, run_all, run_script

try:
    import optuna
except ImportError as error:
    raise InputError(f"{error.name} is not installed: pip install -r requirements-sweep.txt") from None

REFUSED = 3  # so many refused trials without any run mean that the command itself is at fault

Space = dict[str, optuna.distributions.BaseDistribution]


def read_space(searches: list[str]) -> Space:
    """The arguments to search over. Raises `InputError`."""
    space: Space = {}
    for text in searches:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        is_range = values.count(":") in (1, 2) and "," not in values
        *log, low, high = values.split(":") if is_range else ("", "")
        try:
            if name in space:
                raise ValueError("is given twice")
            if name == "output_dir":
                raise ValueError("each trial has a folder of its own")
            if low and (not log or log == ["log"]):
                space[name] = _between(low, high, bool(log))
            elif len(choices := [choice for choice in values.split(",") if choice]) > 1:
                space[name] = optuna.distributions.CategoricalDistribution(choices)
            else:
                raise ValueError("has only one value")
        except ValueError as error:
            raise InputError(
                f"--search {text}: {error}; expected NAME=A,B,C, NAME=LOW:HIGH or NAME=log:LOW:HIGH"
            ) from None
    return space


def _between(low: str, high: str, log: bool) -> optuna.distributions.BaseDistribution:
    if all(text.lstrip("-").isdigit() for text in (low, high)):
        return optuna.distributions.IntDistribution(int(low), int(high), log)
    return optuna.distributions.FloatDistribution(float(low), float(high), log)


def _values(values: optuna.distributions.BaseDistribution) -> tuple:
    """The choices, or both ends of a range."""
    return getattr(values, "choices", None) or (values.low, values.high)


def open_study(folder: Path, space: Space, metric: str, greater_is_better: bool, seed: int) -> optuna.Study:
    """The folder's study, new or of an earlier sweep. Raises `InputError` if the earlier sweep used another
    metric or other arguments, or other choices or another kind of range for one."""
    log = optuna.storages.journal.JournalFileBackend(str(folder / "sweep.log"))
    storage = optuna.storages.JournalStorage(log)
    direction = "maximize" if greater_is_better else "minimize"
    study = optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)
    known = study.user_attrs.get("metric", metric)
    if known != metric:
        raise InputError(f"{folder}: holds a sweep by {known}, not by {metric}; name another --output_dir")
    study.set_user_attr("metric", metric)
    for trial in study.trials:
        known = trial.distributions.keys()
        # A killed sweep may have drawn a part of a trial's arguments.
        others = known ^ space.keys() if trial.state.is_finished() else known - space.keys()
        if others:
            raise InputError(
                f"--search: the sweep in {folder} does not have the same arguments "
                f"({', '.join(sorted(others))}); trials of both cannot be ranked together; name another "
                "--output_dir"
            )
        for name in known & space.keys():
            try:
                optuna.distributions.check_distribution_compatibility(trial.distributions[name], space[name])
            except ValueError:
                known = trial.distributions[name]
                values = ("," if hasattr(known, "choices") else ":").join(map(str, _values(known)))
                raise InputError(
                    f"--search {name}: the sweep in {folder} has trials with other values of it "
                    f"({values}); give those, or name another --output_dir"
                ) from None
    # A resumed sweep needs another seed, or it would sample the same values again.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials), constant_liar=True)
    return study


def run_trial(study: optuna.Study, command: Command, folder: Path, space: Space, trial: Any) -> None:
    """Runs one trial: a new one, or `trial` of a stopped sweep.

    A trial that the run refuses has failed: perhaps only its values are at fault. Raises `InputError` if the
    first `REFUSED` trials are all refused."""
    trial, refusal = trial or study.ask(space), None
    try:
        metrics = command.run(folder / f"trial_{trial.number}", trial.params)
    except InputError as error:
        metrics, refusal = None, error
    # Not best_metric: a run whose validation rows do not have the metric chose its model by the loss.
    value = (metrics or {}).get(f"eval_{study.user_attrs['metric']}")
    if value is None:
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        print(f"trial {trial.number} failed: {folder / f'trial_{trial.number}.log'}", flush=True)
        if refusal is not None and trial.number + 1 >= REFUSED and not has_runs(folder):
            raise refusal
    else:
        study.tell(trial.number, value)
        values = ", ".join(f"{name} {own}" for name, own in trial.params.items())
        print(f"trial {trial.number}: {number_text(value)} by {values}", flush=True)


def report(study: optuna.Study, command: Command, folder: Path, space: Space) -> None:
    """Prints all finished trials, best first, and the command of the best one."""
    sign = -1 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1
    done = [trial for trial in study.trials if trial.state.is_finished()]
    done.sort(key=lambda trial: (trial.value is None, sign * (trial.value or 0)))
    # Four significant digits: four decimals would show nothing of a learning rate of 7e-5.
    values = [[trial.params.get(name) for name in space] for trial in done]
    values = [[f"{each:.4g}" if isinstance(each, float) else each for each in row] for row in values]
    rows = [[trial.number, trial.value, *row] for trial, row in zip(done, values, strict=True)]
    print_table(["trial", study.user_attrs["metric"], *space], rows)
    if done and done[0].value is not None:
        print(f"\nthe best model is in {folder / f'trial_{done[0].number}' / 'best'}; its command:")
        print(shlex.join(command.with_changes({**done[0].params, "output_dir": folder / "again"})))


def sweep(options: argparse.Namespace, command: Command, folder: Path) -> None:
    """Runs the remaining trials, stopped ones first. Raises `InputError`, `StopRequested`."""
    space = read_space(options.search)
    for changes in ({name: value} for name, values in space.items() for value in _values(values)):
        command.arguments(changes)
    arguments = command.arguments({})
    plain = replace(arguments, metrics=None, metric_for_best_model=None)  # --metrics are slow to load
    task = command.task_class(plain)
    metric = (arguments.metric_for_best_model or task.default_metric).removeprefix("eval_")
    if task.metric_names:
        check_metric(metric, task.metric_names, arguments)
    data = []
    for name in ("train_file", "validation_file"):
        paths = expand_patterns(f"--{name}", getattr(arguments, name, None) or ())
        data += [content_hash(path) for path, _ in paths if Path(path).is_file()]
    claim(folder, command, data=content_key(data))
    study = open_study(folder, space, metric, higher_is_better(task, metric), options.seed)
    stopped = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.RUNNING]
    remaining = [*stopped, *[None] * (options.trials - len(study.trials))]
    jobs = [partial(run_trial, study, command, folder, space, trial) for trial in remaining]
    try:
        run_all(jobs, options.processes)
    finally:
        report(study, command, folder, space)


def main(argv: list[str]) -> int:
    parser = task_scripts.tool_parser(__doc__)
    parser.add_argument("--search", action="append", required=True, metavar="NAME=VALUES")
    parser.add_argument("--trials", type=task_scripts.at_least(1), default=20)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return run_script(parser, argv, sweep)
