"""Switches kernels on, as --kernels and --padding_free request.

With --kernels reference none of our kernels is active:

- BigBird is transformers' own: a document's result depends on the padding of its batch, and one batch of at
  most 5 + 2 r blocks switches the model to full attention for the rest of the run (transformers issue 20031).
- Dropout is torch's (--dropout_by torch).
- Batches are padded, and embedding gradients are reallocated.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from samerun.errors import InputError
from samerun.kernels.bigbird import use_bigbird_attention
from samerun.kernels.padding_free import use_padding_free

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


def enable_kernels(model: nn.Module, *, kernels: str, padding_free: bool) -> None:
    """Switches our kernels on in `model` if `kernels` is auto; reference changes nothing. Parameters, state
    dict and exported configuration stay unchanged."""
    if kernels == "reference":
        return
    use_bigbird_attention(model)
    if padding_free:
        use_padding_free(model)
