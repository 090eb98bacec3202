"""--gradient_checkpointing: activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from finetune.errors import InputError


def checkpoint_activations(model: nn.Module) -> None:
    """Switches activation checkpointing on. Raises `InputError` for a model that has no layers to do it for.

    transformers' models do it themselves. In any other the members of its outermost `nn.ModuleList`s and `nn.Sequential`s are
    computed again, but for those with batch norm, whose statistics a second forward pass would count twice.
    """
    # transformers 5.23 warns of the old name, 5.17 does not know the new one.
    switch = getattr(model, "activation_checkpointing_enable", None) or getattr(model, "gradient_checkpointing_enable", None)
    if switch is not None:
        try:
            switch()
        except ValueError as error:
            raise InputError(f"--gradient_checkpointing: {error}") from None
        return
    layers = [layer for layer in _layers(model) if not any(map(has_statistics, layer.modules()))]
    if not layers:
        raise InputError(
            f"--gradient_checkpointing: {type(model).__name__} has no layers in an nn.ModuleList or nn.Sequential without "
            "batch norm; leave it out"
        )
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def _layers(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return [layer for layer in module if any(True for _ in layer.parameters())]
    return [layer for child in module.children() for layer in _layers(child)]


def has_statistics(module: nn.Module) -> bool:
    """Whether it is a batch norm that keeps running statistics."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
