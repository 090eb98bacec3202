"""The exported title model: plain transformers, checked by generating with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.errors import TrainingError
from finetune.task import Batch, Record
from models.titles import TitleTask


def plain_model(model: Any, task: TitleTask) -> Any:
    """An fp32 model without weights, to save others' weights with, whose generation configuration is the run's."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = torch.float32
    with torch.device("meta"):
        plain = type(model)(config)
    generation = plain.generation_config
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id"):
        setattr(generation, name, getattr(model.generation_config, name))
    asked = task.generation
    generation.num_beams, generation.max_length = asked.num_beams, asked.max_length + 2
    generation.no_repeat_ngram_size = asked.no_repeat_ngram_size
    if asked.min_length:
        generation.min_length = asked.min_length + 1
    if asked.num_beams > 1:  # they mean nothing to a greedy search, and saving complains about them
        generation.early_stopping, generation.length_penalty = True, asked.length_penalty
    return plain


def check_export(
    folder: Path, data: Any, collate: Callable[[np.ndarray], Batch], task: TitleTask, records: list[Record], precision: str
) -> None:
    """Generates titles of a few documents, one at a time, with the folder in plain transformers and compares them.

    Raises `TrainingError` if they differ. In half precision another rounding may choose another word, so there only the
    loading is checked.
    """
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    AutoTokenizer.from_pretrained(folder)
    if precision != "no":
        return
    for record in records:
        batch = collate(np.array([record["row"]]))
        real = int(batch.inputs["attention_mask"].sum())
        alone = {name: tensor[:, :real] for name, tensor in batch.inputs.items()}
        with torch.no_grad():
            title = task.decode(model.generate(**alone, do_sample=False).tolist())[0]
        if title != record["titles"][0]:
            raise TrainingError(
                f"the exported model writes {title!r} where the run wrote {record['titles'][0]!r} (row {record['row']}); "
                "nothing was replaced. Please report this with run.json"
            )
