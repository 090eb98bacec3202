"""Activations that are computed again in the backward pass instead of kept. Level 1."""

from __future__ import annotations

from typing import Any

from finetune.errors import InputError


def checkpoint_activations(model: Any) -> None:
    """Switches activation checkpointing on (--gradient_checkpointing). Raises `InputError` for a model that cannot."""
    # transformers 5.23 warns of the old name, 5.17 does not know the new one.
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        switch()
    except ValueError as error:
        raise InputError(f"--gradient_checkpointing: {error}") from None
