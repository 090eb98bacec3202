"""What a run leaves for others: predictions, a copy on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from finetune.launching.processes import Run
from finetune.output import run_folder
from finetune.output.run_folder import BEST
from finetune.task import Predictions, Split, Task


def write_predictions(run: Run, arguments: Any, task: Task, split: Split, predictions: Predictions | None) -> None:
    """Writes the predictions, one JSON object per row, in the input's order. `predictions`: on rank 0."""
    name = arguments.predictions_file
    path = Path(name) if name else Path(arguments.output_dir) / "predictions.jsonl"
    run.on_main(lambda: run_folder.write_text(path, _lines(task, split, predictions)))
    run.print(f"predictions    {path}")


def _lines(task: Task, split: Split, predictions: Predictions) -> Iterator[str]:
    ids = range(len(split)) if split.ids is None else split.ids
    for name, line in zip(ids, task.prediction_lines(predictions, split), strict=True):
        yield as_line({"id": name, **line})


def as_line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


def push_to_hub(run: Run, arguments: Any) -> None:
    """Uploads best/ and the run's card, if --push_to_hub asks for it."""
    if arguments.push_to_hub:
        run.print(f"uploaded       {run.on_main(partial(_upload, Path(arguments.output_dir), arguments.hub_model_id))}")


def _upload(folder: Path, name: str | None) -> str:
    api = HfApi()
    repository = api.create_repo(name or folder.resolve().name, exist_ok=True).repo_id
    api.upload_folder(repo_id=repository, folder_path=folder / BEST)
    card = folder / "README.md"
    if card.exists():
        api.upload_file(repo_id=repository, path_or_fileobj=card, path_in_repo="README.md")
    return repository
