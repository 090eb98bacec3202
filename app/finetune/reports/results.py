"""What a run leaves beside its checkpoints: figures, predictions, a copy on the hub. Level 6."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from finetune.launching.processes import Run
from finetune.output import run_folder
from finetune.output.run_folder import BEST


def write_metrics(run: Run, arguments: Any, figures: dict[str, Any]) -> None:
    """Writes metrics.json on rank 0 (see `merge_metrics`)."""
    run.on_main(lambda: merge_metrics(Path(arguments.output_dir), figures))


def merge_metrics(folder: Path, figures: dict[str, Any]) -> None:
    """Adds figures to metrics.json; those that an earlier command made in the same folder and this one did not are kept."""
    path = folder / "metrics.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    run_folder.write_json(path, {**earlier, **figures})


def write_predictions(run: Run, arguments: Any, lines: Callable[[], Iterable[dict[str, Any]]]) -> None:
    """Writes the predictions, one JSON object per row, in the input's order. `lines` is called on rank 0 only."""
    name = arguments.predictions_file
    path = Path(name) if name else Path(arguments.output_dir) / "predictions.jsonl"
    run.on_main(lambda: run_folder.write_text(path, (as_line(line) for line in lines())))
    run.print(f"predictions    {path}")


def as_line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


def push_to_hub(run: Run, arguments: Any) -> None:
    """Uploads best/ and the run's card, if --push_to_hub asks for it."""
    if not arguments.push_to_hub:
        return
    from huggingface_hub import HfApi

    folder = Path(arguments.output_dir)

    def upload() -> str:
        api = HfApi()
        name = api.create_repo(arguments.hub_model_id or folder.resolve().name, exist_ok=True).repo_id
        api.upload_folder(repo_id=name, folder_path=folder / BEST)
        card = folder / "README.md"
        if card.exists():
            api.upload_file(repo_id=name, path_or_fileobj=card, path_in_repo="README.md")
        return name

    run.print(f"uploaded       {run.on_main(upload)}")
