"""The exported model: a plain Hugging Face folder, complete or absent, checked by loading it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from finetune.output.run_folder import replace_folder


def export_model(
    path: Path,
    model: Any,
    weights: dict[str, torch.Tensor],
    check: Callable[[Path], None],
    processor: Any = None,
    max_length: int | None = None,
) -> None:
    """Writes configuration, weights (fp32) and processor to the folder `path`; rank 0 only.

    `model` gives class and configuration, `weights` the full weights (see `saving.full_weights`). `check` is called with the
    folder before it takes its place, and raises if what it loads is not the model that was trained. `processor`: a tokenizer,
    an image processor or None. A tokenizer is saved with the run's `max_length` in tokens, so that `truncation=True` cuts where
    training cut.
    """
    logging.disable_progress_bar()
    if max_length is not None:
        processor = _tokenizer_to_save(processor, max_length)
    replace_folder(path, partial(_fill, model, weights, processor, check))


def _fill(model: Any, weights: dict[str, torch.Tensor], processor: Any, check: Callable[[Path], None], folder: Path) -> None:
    model.save_pretrained(folder, state_dict={**_unused_poolers(model, weights), **weights})
    if processor is not None:
        processor.save_pretrained(folder)
    check(folder)


def _tokenizer_to_save(tokenizer: Any, max_length: int) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = max_length
    if tokenizer.is_fast:  # it would save how it was last called, which depends on whether the tokens came from the cache
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _unused_poolers(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros for poolers that the model's class has and training removed (`pretrained.drop_pooler`): nothing reads them, but
    without them transformers reports weights that are missing."""
    return {
        name: torch.zeros(parameter.shape)
        for name, parameter in model.named_parameters()
        if name not in weights and "pooler" in name.split(".")
    }
