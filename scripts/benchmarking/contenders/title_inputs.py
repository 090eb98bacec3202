"""What the sections on titles work on: made once per section, in a child."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarking.contenders.chinese_text import make_chinese
from benchmarking.contenders.title_models import make_model, make_writer
from benchmarking.contenders.title_rows import batch_size, cut_rows, document_lengths, read_rows, write_rows


def make_inputs(settings: dict[str, Any]) -> dict[str, Any]:
    """Makes what the settings ask for below settings["inputs"]: rows of settings["train_lengths"], documents and a model that
    writes titles (settings["generate_length"]), Chinese text (settings["characters"])."""
    found, inputs = {}, Path(settings["inputs"])
    inputs.mkdir(parents=True, exist_ok=True)
    rows = read_rows(settings["train_file"])
    if settings["train_lengths"] or settings["generate_length"]:
        tokenizer = make_model(settings, rows, inputs)
        found["vocabulary"] = len(tokenizer)
        for length in settings["train_lengths"]:
            count = settings["max_steps"] * batch_size(settings, length)
            write_rows(inputs / f"train_{length}.jsonl", cut_rows(rows, tokenizer, [length + 8] * count))
    if settings["generate_length"]:
        made = cut_rows(rows, tokenizer, document_lengths(settings))
        write_rows(inputs / "documents.jsonl", made)
        make_writer(settings, inputs)
    if settings["characters"]:
        found["chinese"] = make_chinese(settings, rows, inputs)
    return found


CONTENDERS = {"inputs": make_inputs}
