"""Writes the exported model, a plain Hugging Face folder, and uploads it to the hub.

The folder is checked by loading it and replaced as a whole."""

import contextlib
import copy
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import CommitOperationAdd, HfApi
from transformers.utils import logging

from samerun.errors import InputError, TrainingError, in_short
from samerun.files import LIST, as_json, replace_folder
from samerun.run_folder import BEST, CARD, PLOTS
from samerun.runtime import QUIET_LOGGERS, Run

CHECKED_ROWS = 4  # of an exported model
ADAPTER_CONFIG, BASE_MODEL = "adapter_config.json", "base_model_name_or_path"  # peft's
# The card's code reads best/; before it in a repository, which has the files of best/ at its top.
DOWNLOAD = """```python
from huggingface_hub import snapshot_download
snapshot_download("{repository}", local_dir="best")
"""


def export_model(
    path: Path,
    model: Any,
    weights: dict[str, torch.Tensor],
    check: Callable[[Path], None],
    processor: Any,
    max_length: int | None = None,
) -> None:
    """Writes configuration, weights (fp32) and processor to the folder `path`; rank 0 only.

    `model` gives class and configuration, `weights` the full weights (`checkpoint.full_weights`). `check` is
    called with a temporary folder and raises if its model is not the trained one; then nothing is replaced.
    `processor`: a tokenizer, an image processor or None. A tokenizer is saved with `max_length` in tokens, so
    that `truncation=True` cuts as in training.
    """
    if max_length is not None:
        processor = copy.deepcopy(processor)
        processor.model_max_length = max_length
        if processor.is_fast:  # it would save the settings of its last call, which vary with the cache
            processor.backend_tokenizer.no_truncation()
            processor.backend_tokenizer.no_padding()

    def fill(folder: Path) -> None:
        model.save_pretrained(folder, state_dict=weights)
        if processor is not None:
            processor.save_pretrained(folder)
        check(folder)

    replace_folder(path, fill)


def hide_library_bars() -> None:
    """Turns off the progress bars of transformers and of the hub, which every process would draw."""
    logging.disable_progress_bar()


@contextlib.contextmanager
def libraries_as_before() -> Iterator[None]:
    """A context after which libraries warn and show progress as before it."""
    loggers = list(map(getLogger, QUIET_LOGGERS))
    levels = [logger.level for logger in loggers]
    with_bars = logging.is_progress_bar_enabled()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if with_bars:
            logging.enable_progress_bar()


def rows_to_check(rows: Sequence[int] | np.ndarray, most: int = CHECKED_ROWS) -> np.ndarray:
    """At most `most` evenly spaced ones of these rows of a file, for `check_agreement`. Longer texts come
    first: a short one turns transformers' BigBird to full attention for all later ones."""
    places = np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)
    return np.asarray(rows, dtype=int)[places]


def check_agreement(what: str, exported: Any, run: Any, tolerance: float) -> None:
    """Raises `TrainingError` if outputs of the exported model, which computes in fp32, and of the run differ
    by more than the rounding of the run's precision. `what`: their name."""
    difference = float(np.abs(np.asarray(exported) - np.asarray(run)).max())
    if not difference <= tolerance:
        raise TrainingError(
            f"the exported model does not give the run's {what} (difference {difference:.1e}); "
            "nothing was replaced. Please report this with run.json"
        )


def plain_model(model: Any) -> Any:
    """An fp32 model on the meta device, to export weights with: the trained model may be partitioned or in
    half precision."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = torch.float32
    with torch.device("meta"):
        return type(model)(config)


# The hub


def check_upload(arguments: Any) -> None:
    """With --push_to_hub, creates the repository and checks the right to write to it, before the training.
    Raises `InputError`."""
    if arguments.push_to_hub:
        try:
            HfApi().auth_check(_create_repository(arguments), write=True)
        except Exception as error:  # errors of the network, of the hub, and of invalid names
            raise InputError(
                f"--push_to_hub: cannot write to {_name(arguments)} on the hub ({in_short(error)}); "
                "log in with a token that "
                "may write (hf auth login), or leave --push_to_hub out and upload best/ later (hf upload)"
            ) from None


def push_to_hub(run: Run, arguments: Any) -> None:
    """With --push_to_hub, uploads best/, the model card and plots/. An error is a note: the run is done."""
    if arguments.push_to_hub:
        run.print(run.from_rank0(partial(_upload, arguments)))


def _create_repository(arguments: Any) -> str:
    private = arguments.hub_private_repo or None
    return HfApi().create_repo(_name(arguments), private=private, exist_ok=True).repo_id


def _upload(arguments: Any) -> str:
    """Uploads all files in one commit; returns a line for the console.

    Files that the repository or an interrupted upload already has are not sent again.
    """
    try:
        repository = _create_repository(arguments)
        files = [
            CommitOperationAdd(name, _as_published(name, path, repository))
            for name, path in _files(Path(arguments.output_dir)).items()
        ]
        HfApi().create_commit(repository, files, commit_message="Upload the best model of a run")
    except Exception as error:
        again = (
            "the same command with --resume_from_checkpoint auto repeats it and sends only what is missing"
        )
        return f"note           the upload to {_name(arguments)} failed ({in_short(error)}); {again}"
    return f"uploaded       {repository}"


def _as_published(name: str, path: Path, repository: str) -> Path | bytes:
    """A file of a run as others need it: the card's code gets the model from the hub, and an adapter does not
    name a folder of this machine."""
    if name == CARD:
        text = path.read_text(encoding="utf-8")
        return text.replace("```python\n", DOWNLOAD.format(repository=repository), 1).encode()
    if name == ADAPTER_CONFIG:
        config = json.loads(path.read_text(encoding="utf-8"))
        if Path(config[BASE_MODEL] or "").is_absolute():
            return as_json({**config, BASE_MODEL: Path(config[BASE_MODEL]).name}).encode()
    return path


def _files(folder: Path) -> dict[str, Path]:
    """Name in the repository -> file of a run to upload."""
    best = {path.relative_to(folder / BEST).as_posix(): path for path in sorted((folder / BEST).rglob("*"))}
    others = [*sorted((folder / PLOTS).glob("*")), folder / CARD]
    files = best | {path.relative_to(folder).as_posix(): path for path in others}
    return {name: path for name, path in files.items() if path.is_file() and path.name != LIST}


def _name(arguments: Any) -> str:
    return arguments.hub_model_id or Path(arguments.output_dir).resolve().name
