"""Decides whether a run computes without padding. Imports no torch."""

from __future__ import annotations

from typing import Any

from samerun.errors import InputError

SUPPORTED = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")


def check_padding_free(
    padding_free: str, *, kernels: str, config: Any, on_gpu: bool, padding_side: str
) -> bool:
    """Resolves --padding_free (auto, on, off); auto means on a GPU, if possible. `config`: of the encoder;
    `padding_side`: of the tokenizer. Raises `InputError` if on is impossible with the model, the tokenizer or
    --kernels reference.
    """
    reason = _reason(config, padding_side)
    if padding_free == "on" and kernels == "reference":
        raise InputError(
            "--padding_free on is one of the kernels that --kernels reference turns off; leave one "
            "of them out"
        )
    if padding_free == "on" and reason is not None:
        raise InputError(f"--padding_free on: {reason}; leave it out (auto)")
    automatic = padding_free == "auto" and on_gpu and kernels == "auto"
    return reason is None and (padding_free == "on" or automatic)


def _reason(config: Any, padding_side: str) -> str | None:
    if config.model_type not in SUPPORTED:
        return (
            f"a {config.model_type} model cannot: only {', '.join(SUPPORTED)} encoders can compute "
            "without padding"
        )
    if getattr(config, "auto_map", None):
        return "the model has custom code"
    if padding_side != "right":
        return "the tokenizer puts padding before the text"
    if getattr(config, "chunk_size_feed_forward", 0):
        return (
            "the configuration computes feed-forward layers in chunks of the padded row "
            "(chunk_size_feed_forward)"
        )
    return None
