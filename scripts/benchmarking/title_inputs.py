"""What bench_titlegen.py works on: made once per benchmark, in a child."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarking.chinese_text import make_chinese
from benchmarking.title_models import make_model, make_writer
from benchmarking.title_rows import batch_size, cut_rows, document_lengths, read_rows, write_rows

SIZES_ON_CPU = {"hidden": 256, "layers": 4, "decoder_layers": 2, "tokens_per_step": 8192, "documents": 16}
SIZES_ON_GPU = {"hidden": 768, "layers": 12, "decoder_layers": 6, "tokens_per_step": 65536, "documents": 128}


def make_inputs(settings: dict[str, Any]) -> dict[str, Any]:
    """Makes what the settings' parts need below settings["inputs"] and returns the settings that depend on the device."""
    cuda = torch.cuda.is_available()
    sizes = SIZES_ON_GPU if cuda else SIZES_ON_CPU
    found = {name: settings[name] or value for name, value in sizes.items()}
    found["precision"] = settings["precision"] or ("bf16" if cuda and torch.cuda.is_bf16_supported() else "no")
    settings, inputs = settings | found, Path(settings["inputs"])
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
