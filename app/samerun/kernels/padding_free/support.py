"""Which runs can compute without padding. Imports no torch."""

from __future__ import annotations

from typing import Any

from samerun.errors import InputError

SUPPORTED = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")


def check_padding_free(*, kernels: str, config: Any, device_type: str, padding_side: str) -> None:
    """Raises `InputError` if --padding_free is impossible with the model, the tokenizer, the device or
    --kernels reference. `config`: of the encoder; `padding_side`: of the tokenizer."""
    if kernels == "reference":
        raise InputError(
            "--padding_free is one of the kernels that --kernels reference turns off; leave one of them out"
        )
    reason = _reason(config, device_type, padding_side)
    if reason is not None:
        raise InputError(f"--padding_free: {reason}; leave it out")


def _reason(config: Any, device_type: str, padding_side: str) -> str | None:
    if device_type != "cpu":
        return f"it is for CPUs, and this run computes on {device_type}"
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
