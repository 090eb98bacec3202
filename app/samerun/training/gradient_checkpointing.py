"""--gradient_checkpointing: recomputes activations in the backward pass instead of storing them."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from samerun.errors import InputError


def checkpoint_activations(model: nn.Module) -> None:
    """Switches activation checkpointing on. Raises `InputError` if the model has no layers for it.

    transformers' models have a method for it. In other models it applies to the members of the outermost
    `nn.ModuleList`s and `nn.Sequential`s, except those with batch norm: a second forward pass would update
    the statistics twice.
    """
    # transformers 5.23 deprecates the old name, 5.17 lacks the new one.
    switch = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if switch is not None:
        try:
            switch()
        except ValueError as error:
            raise InputError(f"--gradient_checkpointing: {error}") from None
        return
    layers = [layer for layer in _layers(model) if not any(map(has_statistics, layer.modules()))]
    if not layers:
        raise InputError(
            f"--gradient_checkpointing: {type(model).__name__} has no layers in an nn.ModuleList or "
            "nn.Sequential without "
            "batch norm; leave it out"
        )
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def _layers(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return [layer for layer in module if any(True for _ in layer.parameters())]
    return [layer for child in module.children() for layer in _layers(child)]


def has_statistics(module: nn.Module) -> bool:
    """Whether `module` is a batch norm with running statistics."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
