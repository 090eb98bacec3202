"""Settings of the beam search: defaults from an exported model, and --generation_config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process

from samerun.data.files import read_object
from samerun.errors import InputError, in_short, nearest
from samerun.text.arguments import SEARCH

# Supported fields of --generation_config: (value, end token ids) -> logits processor. None of them samples or
# depends on the padding of a batch, so titles are the same under every launch.
SETTINGS: dict[str, Callable[[Any, list[int]], Any]] = {
    "repetition_penalty": lambda value, _: logits_process.RepetitionPenaltyLogitsProcessor(value),
    "encoder_no_repeat_ngram_size": lambda value, _: logits_process.EncoderNoRepeatNGramLogitsProcessor(
        value, torch.ones(1, 9)
    ),
    "exponential_decay_length_penalty": lambda value, end: logits_process.ExponentialDecayLengthPenalty(
        value, end, 1
    ),
    "bad_words_ids": lambda value, end: logits_process.NoBadWordsLogitsProcessor(value, end),
    "sequence_bias": lambda value, _: logits_process.SequenceBiasLogitsProcessor(value),
    "suppress_tokens": lambda value, _: logits_process.SuppressTokensLogitsProcessor(value),
    "begin_suppress_tokens": lambda value, _: logits_process.SuppressTokensAtBeginLogitsProcessor(value, 1),
}
# Fields of GenerationConfig that are arguments.
ARGUMENTS = {
    **{
        name: name for name in ("num_beams", "length_penalty", "no_repeat_ngram_size", "num_return_sequences")
    },
    **dict.fromkeys(("max_length", "max_new_tokens"), "max_title_length"),
    **dict.fromkeys(("min_length", "min_new_tokens"), "min_title_length"),
}
WRITTEN_BY_TRANSFORMERS = ("_from_model_config", "transformers_version")


def with_search_defaults(arguments: Any) -> Any:
    """The arguments with values for search settings that are None: the exported model's, so that its
    evaluation repeats the metrics of its training; else those of `SEARCH`."""
    own = (
        {}
        if arguments.modes.train
        else _exported_search(Path(arguments.model_name_or_path or "") / "generation_config.json")
    )
    defaults = {
        name: own.get(name, value) for name, value in SEARCH.items() if getattr(arguments, name) is None
    }
    return replace(arguments, **defaults)


def _exported_search(file: Path) -> dict[str, Any]:
    """The search settings in a generation_config.json, {} without a file. transformers counts the start token
    in `min_length`, and the start and the end token in `max_length`."""
    stored = read_object(file) if file.is_file() else {}
    lengths = {"min_title_length": ("min_length", 1), "max_title_length": ("max_length", 2)}
    settings = {
        name: stored[field] - special for name, (field, special) in lengths.items() if stored.get(field)
    }
    return settings | {
        name: stored[name] for name in SEARCH if name not in lengths and stored.get(name) is not None
    }


def generation_config(arguments: Any, further: dict[str, Any]) -> GenerationConfig:
    """The settings of `SearchArguments`, and `further` ones (`read_generation_config`). Lengths count the
    start and the end token."""
    return GenerationConfig(
        do_sample=False,
        num_beams=arguments.num_beams,
        length_penalty=arguments.length_penalty,
        no_repeat_ngram_size=arguments.no_repeat_ngram_size,
        min_length=arguments.min_title_length + 1 if arguments.min_title_length else 0,
        max_length=arguments.max_title_length + 2,
        early_stopping=arguments.num_beams > 1,  # transformers warns about it in greedy search
        **further,
    )


def read_generation_config(path: str | None, tokenizer: Any) -> dict[str, Any]:
    """The fields of the file of --generation_config; {} without a file.

    Raises `InputError` for fields that are unknown, unsupported or arguments, and for values that
    transformers rejects.
    """
    if path is None:
        return {}
    settings = {
        name: value
        for name, value in read_object(path).items()
        if name not in WRITTEN_BY_TRANSFORMERS and value is not None
    }
    problems = [
        f"--generation_config {path}: {name} {problem}" for name in settings if (problem := _problem_of(name))
    ]
    if problems:
        raise InputError(*problems)
    for name, value in settings.items():
        tokens = torch.ones(1, 9, dtype=torch.long)
        try:
            SETTINGS[name](value, [tokenizer.sep_token_id or tokenizer.eos_token_id])(
                tokens, torch.zeros(1, len(tokenizer))
            )
        except Exception as error:
            raise InputError(
                f"--generation_config {path}: transformers rejects {name} {value!r:.80} "
                f"({in_short(error)}); the tokenizer has "
                f"{len(tokenizer)} tokens"
            ) from error
    return settings


def _problem_of(name: str) -> str | None:
    if name in SETTINGS:
        return None
    if name in ARGUMENTS:
        return f"is an argument: give --{ARGUMENTS[name]} and take it out of the file"
    supported = f"supported are {', '.join(SETTINGS)}"
    if hasattr(GenerationConfig(), name):
        return (
            "is not supported (it would sample, change with the launch, or replace the model's ids); "
            f"{supported}"
        )
    near = nearest(name, [*SETTINGS, *ARGUMENTS])
    return (
        "is no field of transformers' GenerationConfig; "
        f"{f'did you mean {near}? ' if near else ''}{supported}"
    )
