"""The exported model: a plain Hugging Face folder, whole or absent, checked by loading it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finetune.output.run_folder import replace_folder


def export_model(
    path: Path,
    model: Any,
    weights: dict[str, torch.Tensor],
    tokenizer: Any,
    max_length: int,
    check: Callable[[Path], None],
) -> None:
    """Writes config, weights (fp32), tokenizer and generation config to `path`; rank 0 only.

    `model` gives class and configuration, `weights` the full weights (see `checkpoint.full_weights`). The tokenizer is
    saved with the run's `max_length`, so that `truncation=True` cuts where training cut. `check` is called with the folder
    before it takes its place, and raises if what it loads is not the model that was trained.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = max_length
    if tokenizer.is_fast:  # it saves how it was last called, which tokens that were kept from an earlier run leave out
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()

    def fill(place: Path) -> None:
        model.save_pretrained(place, state_dict=weights)
        tokenizer.save_pretrained(place)
        check(place)

    replace_folder(path, fill)
