"""The results of a run: predictions, tables of metrics, final values for trackers, upload to the hub."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi

from samerun import predictions as output
from samerun.errors import InputError, in_short
from samerun.files import LIST
from samerun.run_folder import BEST, CARD, PLOTS
from samerun.runtime import Run
from samerun.task import Predictions, Split, Task

FINAL_PREFIXES = ("test_", "best_")  # of the metrics that trackers get at the end


def write_predictions(
    run: Run, arguments: Any, task: Task, split: Split, predictions: Predictions | None
) -> None:
    """Writes the predictions, one line per row, in the input's order. `predictions`: needed on rank 0
    only."""
    run.print(f"predictions    {run.from_rank0(partial(_write, arguments, task, split, predictions))}")


def _write(arguments: Any, task: Task, split: Split, predictions: Predictions) -> Path:
    path, folder = output.path_of(arguments), Path(arguments.output_dir)
    return output.write(path, folder, _lines(task, split, predictions), task.list_separator)


def _lines(task: Task, split: Split, predictions: Predictions) -> Iterator[dict[str, Any]]:
    ids = range(len(split)) if split.ids is None else split.ids
    for name, line in zip(ids, task.lines(predictions, split), strict=True):
        yield {"id": name, **line}


def by_split(metrics: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The metrics eval_* and test_* of a run, by split and without their prefixes."""
    return {
        split: {
            name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)
        }
        for split, prefix in (("validation", "eval_"), ("test", "test_"))
    }


def table(scores: dict[str, dict[str, Any]], names: tuple[str, ...]) -> list[str]:
    """Lines of a table with a row per metric and a column per split, which fits a terminal of 60 columns.
    Leaves out empty rows and columns."""
    shown = {
        split: known for split, known in scores.items() if any(known.get(name) is not None for name in names)
    }
    rows = [name for name in names if any(known.get(name) is not None for known in shown.values())]
    columns = [["", *rows]]
    for split, known in shown.items():
        cells = [split, *("-" if known.get(name) is None else f"{known[name]:.4f}" for name in rows)]
        columns.append([cell.rjust(max(map(len, cells))) for cell in cells])
    header, *body = map(list, zip(*columns, strict=True))
    lines = plain_table(header, body)
    return [f"{'' if number else 'results':<15}{line}" for number, line in enumerate(lines)] if shown else []


def plain_table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]


def track(run: Run, metrics: dict[str, Any]) -> None:
    """Sends the final metrics, of the test rows and the best model, to trackers."""
    final = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and name.startswith(FINAL_PREFIXES)
    }
    if run.accelerator.trackers and final:
        run.accelerator.log(final, step=metrics.get("train_steps"))


def check_upload(arguments: Any) -> None:
    """With --push_to_hub, creates the repository and checks the right to write to it, before the training.
    Raises `InputError`."""
    if arguments.push_to_hub and not arguments.hub_dry_run:
        try:
            HfApi().auth_check(_repository(arguments), write=True)
        except Exception as error:  # errors of the network, of the hub, and of invalid names
            raise InputError(
                f"--push_to_hub: cannot write to {_name(arguments)} on the hub ({in_short(error)}); "
                "log in with a token that "
                "may write (hf auth login), or leave --push_to_hub out and upload best/ later (hf upload)"
            ) from None


def push_to_hub(run: Run, arguments: Any) -> None:
    """With --push_to_hub, uploads best/, the model card and plots/. An error is a note: the run is done."""
    if arguments.push_to_hub:
        run.print(*run.from_rank0(partial(_describe_upload if arguments.hub_dry_run else _upload, arguments)))


def _upload(arguments: Any) -> list[str]:
    """Uploads all files in one commit; returns lines for the console.

    Files that the repository or an interrupted upload already has are not sent again.
    """
    try:
        repository = _repository(arguments)
        files = [CommitOperationAdd(name, path) for name, path in _files(arguments).items()]
        HfApi().create_commit(repository, files, commit_message="Upload the best model of a run")
    except Exception as error:
        again = (
            "the same command with --resume_from_checkpoint auto repeats it and sends only what is missing"
        )
        return [f"note           the upload to {_name(arguments)} failed ({in_short(error)}); {again}"]
    return [f"uploaded       {repository}"]


def _describe_upload(arguments: Any) -> list[str]:
    sizes = {name: path.stat().st_size for name, path in _files(arguments).items()}
    private = (
        "a private repository"
        if arguments.hub_private_repo
        else "a public repository, unless it exists as a private one"
    )
    first = (
        f"would upload   {len(sizes)} files, {sum(sizes.values()):,} bytes, to {_name(arguments)}, {private}"
    )
    return [first, *(f"{'':<15}{size:>15,} {name}" for name, size in sizes.items())]


def _files(arguments: Any) -> dict[str, Path]:
    """Name in the repository -> file to upload."""
    folder = Path(arguments.output_dir)
    best = {path.relative_to(folder / BEST).as_posix(): path for path in sorted((folder / BEST).rglob("*"))}
    others = [*sorted((folder / PLOTS).glob("*")), folder / CARD]
    files = best | {path.relative_to(folder).as_posix(): path for path in others}
    return {name: path for name, path in files.items() if path.is_file() and path.name != LIST}


def _repository(arguments: Any) -> str:
    return (
        HfApi()
        .create_repo(_name(arguments), private=arguments.hub_private_repo or None, exist_ok=True)
        .repo_id
    )


def _name(arguments: Any) -> str:
    return arguments.hub_model_id or Path(arguments.output_dir).resolve().name
