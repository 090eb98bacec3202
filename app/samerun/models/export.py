"""Writes the exported model, a plain Hugging Face folder. The folder is checked by loading it and replaced as
a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from samerun.errors import TrainingError
from samerun.files import replace_folder

CHECKED_ROWS = 4


def export_model(
    path: Path,
    model: Any,
    weights: dict[str, torch.Tensor],
    check: Callable[[Path], None],
    processor: Any = None,
    max_length: int | None = None,
) -> None:
    """Writes configuration, weights (fp32) and processor to the folder `path`; rank 0 only.

    `model` gives class and configuration, `weights` the full weights (`checkpoint.full_weights`). `check` is
    called with a temporary folder and raises if its model is not the trained one; then nothing is replaced.
    `processor`: a tokenizer, an image processor or None. A tokenizer is saved with `max_length` in tokens, so
    that `truncation=True` cuts as in training.
    """
    logging.disable_progress_bar()
    if max_length is not None:
        processor = _tokenizer_to_save(processor, max_length)
    replace_folder(path, partial(_fill, model, weights, processor, check))


def rows_to_check(num_rows: int) -> np.ndarray:
    """A few evenly spaced rows of a file, for `check_agreement`."""
    return np.linspace(0, num_rows - 1, min(CHECKED_ROWS, num_rows)).astype(int)


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


def _fill(
    model: Any, weights: dict[str, torch.Tensor], processor: Any, check: Callable[[Path], None], folder: Path
) -> None:
    model.save_pretrained(folder, state_dict={**_unused_poolers(model, weights), **weights})
    if processor is not None:
        processor.save_pretrained(folder)
    check(folder)


def _tokenizer_to_save(tokenizer: Any, max_length: int) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = max_length
    if tokenizer.is_fast:  # it would save the settings of its last call, which vary with the cache
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _unused_poolers(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros for the weights of poolers that `pretrained.drop_pooler` removed. They are never used, but
    without them transformers reports missing weights."""
    return {
        name: torch.zeros(parameter.shape)
        for name, parameter in model.named_parameters()
        if name not in weights and "pooler" in name.split(".")
    }
