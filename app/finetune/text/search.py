"""How titles are searched for: the arguments, completed by what an exported model was trained with, and --generation_config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process

from finetune.errors import InputError, in_short
from finetune.reading.json_files import read_object
from finetune.reading.problems import nearest
from finetune.text.arguments import SEARCH

# What each does to the scores of the next token, made of its value and the ids of the tokens that end a title. None of them
# draws or depends on the padding of a batch: titles are the same under every launch.
SETTINGS: dict[str, Callable[[Any, list[int]], Any]] = {
    "repetition_penalty": lambda value, _: logits_process.RepetitionPenaltyLogitsProcessor(value),
    "encoder_no_repeat_ngram_size": lambda value, _: logits_process.EncoderNoRepeatNGramLogitsProcessor(
        value, torch.ones(1, 9)
    ),
    "exponential_decay_length_penalty": lambda value, end: logits_process.ExponentialDecayLengthPenalty(value, end, 1),
    "bad_words_ids": lambda value, end: logits_process.NoBadWordsLogitsProcessor(value, end),
    "sequence_bias": lambda value, _: logits_process.SequenceBiasLogitsProcessor(value),
    "suppress_tokens": lambda value, _: logits_process.SuppressTokensLogitsProcessor(value),
    "begin_suppress_tokens": lambda value, _: logits_process.SuppressTokensAtBeginLogitsProcessor(value, 1),
}
ARGUMENTS = {
    **{name: name for name in ("num_beams", "length_penalty", "no_repeat_ngram_size", "num_return_sequences")},
    **dict.fromkeys(("max_length", "max_new_tokens"), "max_title_length"),
    **dict.fromkeys(("min_length", "min_new_tokens"), "min_title_length"),
}
WRITTEN = ("_from_model_config", "transformers_version")  # by transformers, into the files that it saves


def completed(arguments: Any) -> Any:
    """The arguments with the settings of the search that they leave open: those of the exported model that they name, so that
    evaluating it gives the metrics of its training; else `SEARCH`."""
    own = {} if arguments.modes.train else _exported(Path(arguments.model_name_or_path or "") / "generation_config.json")
    left_open = {name: own.get(name, value) for name, value in SEARCH.items() if getattr(arguments, name) is None}
    return replace(arguments, **left_open)


def _exported(file: Path) -> dict[str, Any]:
    """What `titles.plain_model` stored: lengths with the start token, the longest with the end token, too."""
    stored = read_object(file) if file.is_file() else {}
    lengths = {"min_title_length": ("min_length", 1), "max_title_length": ("max_length", 2)}
    found = {name: stored[of] - more for name, (of, more) in lengths.items() if stored.get(of)}
    return found | {name: stored[name] for name in SEARCH if name not in lengths and stored.get(name) is not None}


def read_settings(path: str | None, tokenizer: Any) -> dict[str, Any]:
    """The settings in the file of --generation_config, by their names; none without a file.

    Raises `InputError` for names that transformers does not have, those that are arguments or are not passed on, and values
    that it does not take for this tokenizer.
    """
    if path is None:
        return {}
    given = {name: value for name, value in read_object(path).items() if name not in WRITTEN and value is not None}
    problems = [f"--generation_config {path}: {name} {problem}" for name in given if (problem := _problem_of(name))]
    if problems:
        raise InputError(*problems)
    for name, value in given.items():
        tokens = torch.ones(1, 9, dtype=torch.long)
        try:
            SETTINGS[name](value, [tokenizer.sep_token_id or tokenizer.eos_token_id])(tokens, torch.zeros(1, len(tokenizer)))
        except Exception as error:
            raise InputError(
                f"--generation_config {path}: {name} {value!r:.80} is not what transformers takes ({in_short(error)}); the "
                f"tokenizer has {len(tokenizer)} tokens"
            ) from error
    return given


def _problem_of(name: str) -> str | None:
    if name in SETTINGS:
        return None
    if name in ARGUMENTS:
        return f"is an argument: give --{ARGUMENTS[name]} and take it out of the file"
    supported = f"it may have {', '.join(SETTINGS)}"
    if hasattr(GenerationConfig(), name):
        return f"is not passed on (titles must be the same under every launch, and ids are the model's); {supported}"
    near = nearest(name, [*SETTINGS, *ARGUMENTS])
    return f"is no setting of transformers' GenerationConfig; {f'did you mean {near}? ' if near else ''}{supported}"
