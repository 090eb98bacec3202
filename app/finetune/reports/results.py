"""What a run leaves for others: predictions, a copy on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from finetune.launching.processes import Run
from finetune.output import predictions as output
from finetune.output.run_folder import BEST, PICTURES
from finetune.task import Predictions, Split, Task


def write_predictions(run: Run, arguments: Any, task: Task, split: Split, predictions: Predictions | None) -> None:
    """Writes the predictions, one line per row, in the input's order. `predictions`: on rank 0."""
    run.print(f"predictions    {run.on_main(partial(_write, arguments, task, split, predictions))}")


def _write(arguments: Any, task: Task, split: Split, predictions: Predictions) -> Path:
    path, folder = output.path_of(arguments), Path(arguments.output_dir)
    return output.write(path, folder, _lines(task, split, predictions), task.list_separator)


def _lines(task: Task, split: Split, predictions: Predictions) -> Iterator[dict[str, Any]]:
    ids = range(len(split)) if split.ids is None else split.ids
    for name, line in zip(ids, task.prediction_lines(predictions, split), strict=True):
        yield {"id": name, **line}


def push_to_hub(run: Run, arguments: Any) -> None:
    """Uploads best/ and the run's card, if --push_to_hub asks for it."""
    if arguments.push_to_hub:
        run.print(f"uploaded       {run.on_main(partial(_upload, Path(arguments.output_dir), arguments.hub_model_id))}")


def _upload(folder: Path, name: str | None) -> str:
    api = HfApi()
    repository = api.create_repo(name or folder.resolve().name, exist_ok=True).repo_id
    api.upload_folder(repo_id=repository, folder_path=folder / BEST)
    if (folder / PICTURES).is_dir():
        api.upload_folder(repo_id=repository, folder_path=folder / PICTURES, path_in_repo=PICTURES)
    card = folder / "README.md"
    if card.exists():
        api.upload_file(repo_id=repository, path_or_fileobj=card, path_in_repo="README.md")
    return repository
