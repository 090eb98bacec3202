"""Training and prediction from a Python program or a notebook.

    from samerun import predict, train

    run = train("classify", model_name_or_path="MODEL", train_file="train.csv", output_dir="runs/a")
    run.metrics["eval_f1_micro"], run.best, run.report
    predict(run.best, ["The team won the cup"])

Arguments are those of the command line. Where they name files, they also take rows: a list of dicts, a
`datasets.Dataset`, or a `DataFrame` of pandas or polars. Errors are exceptions with the command line's
messages (`samerun.InputError`, `samerun.TrainingError`); nothing here ends the process or handles signals, so
that it works in any thread, one training at a time. Several processes: call `train` on each of them, for
example through Accelerate's `notebook_launcher`.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from samerun import signals, task_scripts
from samerun.cli import set_quiet
from samerun.console import STDOUT
from samerun.errors import SHOWN_AS, InputError, described, in_short
from samerun.files import ROWS, as_line, finish_all, read_lines
from samerun.parsing import kind_of, parse, validate
from samerun.run_folder import BEST, HISTORY, METRICS, REPORT, read_metrics, status

if TYPE_CHECKING:
    import pandas

    from samerun.serving.predictor import Predictor

_training = threading.Lock()  # Accelerate's state, torch's random generator and ours are the process's


@dataclass(frozen=True)
class TrainedRun:
    """A finished run. `metrics_file`: the name of its metrics file. `predictions`: the file of its
    predictions; None without them."""

    output_dir: Path
    metrics_file: str = METRICS
    predictions: Path | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of metrics.json: `train_*`, `eval_*`, `test_*`, `best_step`, `best_metric`. Of a call
        that only predicts or evaluates in the folder of a run, that of metrics_NAME.json."""
        return read_metrics(self.output_dir / self.metrics_file)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of history.jsonl; [] if nothing was trained."""
        path = self.output_dir / HISTORY
        return list(read_lines(path)) if path.exists() else []

    @property
    def best(self) -> Path | None:
        """The folder of the best model; None if nothing was trained."""
        path = self.output_dir / BEST
        return path if path.exists() else None

    @property
    def report(self) -> Path | None:
        """report.html; None if `report_to` does not name it."""
        path = self.output_dir / REPORT
        return path if path.exists() else None


def train(
    task: str | Path,
    on_evaluation: Callable[[int, dict[str, float | None]], None] | None = None,
    **values: Any,
) -> TrainedRun:
    """Runs a task as its command does: trains, evaluates, and predicts with `do_predict=True`.

    `task`: a name, such as "classify", or the path of a script of your own. `on_evaluation`: called on every
    process after each evaluation with the step and the metrics, without the prefix `eval_`. Raises
    `InputError`, `TrainingError`, and `StopRequested` after `max_train_time`.
    """
    arguments_class, task_class = task_scripts.load(task_scripts.path_of(str(task)))
    if not _training.acquire(blocking=False):
        raise InputError("another training runs in this process: wait for its end, or start a process")
    with contextlib.ExitStack() as at_end:
        at_end.callback(_training.release)
        arguments = parse(arguments_class, _words(arguments_class, values, at_end))
        validate(arguments)
        set_quiet(arguments)
        from samerun import export, launch, main, mirror, predictions, runtime, start

        # Absolute: the program may change its working directory afterwards.
        folder = Path(os.path.abspath(arguments.output_dir))
        path = Path(os.path.abspath(predictions.path_of(arguments)))
        is_file = arguments.modes.predict and arguments.predictions_file not in STDOUT
        result = TrainedRun(folder, predictions.metrics_name(arguments), path if is_file else None)
        at_end.enter_context(runtime.torch_as_at_start())
        at_end.enter_context(export.libraries_as_before())
        launch.describe_group()
        signals.forget()
        runtime.forget_accelerator()
        try:
            job = task_class(arguments)
            job.on_evaluation = on_evaluation
            main.run_task(job, arguments)
        except BaseException as error:
            status.end("stopped" if isinstance(error, KeyboardInterrupt) else "failed", in_short(error))
            raise
        finally:
            finish_all()
            start.unlock()
            mirror.connect(None)
            runtime.forget_accelerator()
    return result


def load(model: str | Path, **values: Any) -> Predictor:
    """An exported model in memory: a function from texts, or images as bytes, to lines as those of
    predictions.jsonl, without ids. `values`: arguments of its task. Raises `InputError`."""
    from samerun import export
    from samerun.serving.predictor import load_predictor

    name = task_scripts.task_of(Path(model))
    arguments_class, _ = task_scripts.load(task_scripts.scripts()[name])
    with contextlib.ExitStack() as at_end, export.libraries_as_before():
        return load_predictor(name, str(model), _words(arguments_class, values, at_end))


def predict(model: str | Path, items: Iterable[Any], **values: Any) -> list[dict[str, Any]]:
    """Predicts texts, or images as bytes, with an exported model, as `load(model, **values)(items)`."""
    return load(model, **values)(items)


def _words(cls: type, values: dict[str, Any], at_end: contextlib.ExitStack) -> list[str]:
    """The command line with these values. Rows are written to temporary files, which `at_end` removes."""
    words = []
    for name, value in values.items():
        field = cls.__dataclass_fields__.get(name)
        if field is not None and field.metadata["reads"] and not _is_plain(value):
            folder = tempfile.TemporaryDirectory(prefix=ROWS, ignore_cleanup_errors=True)
            value = _written(Path(at_end.enter_context(folder)), name, value)
            SHOWN_AS[value] = name
            at_end.callback(SHOWN_AS.pop, value)
        parts = _parts(name, field, value)
        words += [f"--{name}={''.join(parts[:1])}", *parts[1:]]
    return words


def _parts(name: str, field: Field | None, value: Any) -> list[str]:
    """The words of a value on the command line. `field`: None for another name of transformers."""
    kind = None if field is None else kind_of(field)
    takes_file = kind and field.metadata["path"]  # then the file's content, in JSON
    if hasattr(value, "tolist"):  # of numpy and pandas
        value = value.tolist()
    if isinstance(value, dict) and kind and kind.metavar != "JSON" and (kind.several or not takes_file):
        value = [f"{key}={_word(part)}" for key, part in value.items()]
    elif isinstance(value, set | frozenset):
        value = sorted(value)  # in the same order on every process
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | dict):
        return [_word(value)]
    parts = list(map(_word, value))
    if kind and kind.several is tuple and (wrong := next((part for part in parts if "," in part), None)):
        raise InputError(f"{name}: {wrong!r} has a comma, which separates values; rename it")
    return [",".join(parts)] if kind and not kind.several else parts


def _word(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | bool) else str(value)


def _is_plain(value: Any) -> bool:
    """Whether a value names files."""
    parts = value if isinstance(value, list | tuple) else [value]
    return all(part is None or isinstance(part, str | Path) for part in parts)


def _written(folder: Path, name: str, rows: Any) -> str:
    """The path of a file with these rows."""
    if hasattr(rows, "to_dicts"):  # of polars
        rows = rows.to_dicts()
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        rows = _rows_of_frame(name, rows)
    elif getattr(rows, "features", None) and getattr(rows, "format", {}).get("type") != "custom":
        import datasets

        path = folder / f"{name}.parquet"
        datasets.disable_progress_bars()
        rows.with_format(None).to_parquet(path)  # whose schema keeps the names of classes
        return str(path)
    if not isinstance(rows, Iterable):
        raise InputError(f"{name}: is {described(rows)}, expected rows or the name of a file")
    path = folder / f"{name}.jsonl"
    with path.open("wb") as file:
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise InputError(f"{name}:{number}: not a dict of columns but {type(row).__name__}")
            file.write(_line(f"{name}:{number}", row))
    return str(path)


def _line(where: str, row: dict[Any, Any]) -> bytes:
    try:
        return as_line(row, _as_json).encode()
    except (TypeError, ValueError) as error:
        for column, cell in row.items() if len(row) > 1 else ():
            _line(where, {column: cell})  # names it
        raise InputError(f"{where}: column {next(iter(row))!r} cannot be written as JSON ({error})") from None


def _as_json(cell: Any) -> Any:
    if hasattr(cell, "tolist"):  # of numpy
        return cell.tolist()
    if isinstance(cell, date | time):  # also of pandas
        return cell.isoformat()
    if isinstance(cell, Decimal | UUID):
        return str(cell)
    raise TypeError(f"it is {described(cell)}")


def _rows_of_frame(name: str, frame: pandas.DataFrame) -> list[dict[str, Any]]:
    for column, count in Counter(frame.columns).items():
        if count > 1:
            raise InputError(f"{name}: column {column!r} appears {count} times: rename or remove all but one")
    if frame.index.name is not None and frame.index.name not in frame.columns:
        frame = frame.reset_index()  # such as ids
    # An empty cell is NaN there, which JSON lacks; in a csv file it is an empty text.
    return frame.astype(object).where(frame.notna(), "").to_dict("records")
