"""What is done to a model's layers one by one: --torch_compile, --gradient_checkpointing, no randomness."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from samerun.errors import InputError
from samerun.kernels.dropout import recomputing

# A layer is recompiled without gradients, for one row or several, as encoder or decoder, and in autocast.
VARIANTS_OF_A_LAYER = 64
# Attributes of modules. LayerDrop (Fan et al., arXiv 1909.11556) skips layers: DDP refuses parameters without
# gradients, processes that skip other layers would wait for each other under ZeRO-3 and FSDP, and optimizers
# would count other steps for each parameter. A router's noise (Fedus et al., arXiv 2101.03961) differs
# between micro-batches and processes.
RANDOM = {"layerdrop": "LayerDrop", "jitter_noise": "routers' noise"}


def outermost_members(module: nn.Module, containers: type | tuple[type, ...]) -> Iterator[nn.Module]:
    """The members of the outermost `containers`, such as `nn.ModuleList`: a model's repeated layers. Members
    without a forward pass, such as lists in lists, are looked into."""
    for child in module.children():
        if isinstance(module, containers) and has_forward(child):
            yield child
        else:
            yield from outermost_members(child, containers)


def has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def has_statistics(module: nn.Module) -> bool:
    """Whether `module` is a batch norm with running statistics."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats


def switch_off_randomness(model: nn.Module) -> list[str]:
    """Switches off what is RANDOM in a model's training. Returns its names, as far as it was on. The model's
    configuration keeps the values."""
    found = []
    for attribute, name in RANDOM.items():
        rates = {module: getattr(module, attribute, None) for module in model.modules()}
        random = [module for module, rate in rates.items() if isinstance(rate, int | float) and rate > 0]
        for module in random:
            setattr(module, attribute, 0.0)
        found += [name] if random else []
    return found


def checkpoint_activations(model: nn.Module, *, dropout_by_row: bool = False) -> None:
    """Recomputes activations in the backward pass instead of storing them. Raises `InputError` if the model
    has no layers for it. `dropout_by_row`: as in `Launch`.

    transformers' models have a method for it. In other models it applies to the members of the outermost
    `nn.ModuleList`s and `nn.Sequential`s, except those with batch norm: a second forward pass would update
    the statistics twice.
    """
    # transformers 5.23 deprecates the old name, 5.17 lacks the new one.
    switch = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    options: dict[str, Any] = {"use_reentrant": False}
    if dropout_by_row:
        options["context_fn"] = recomputing
    if switch is not None:
        try:
            switch(options)
        except ValueError as error:
            raise InputError(f"--gradient_checkpointing: {error}") from None
        return
    layers = [
        layer
        for layer in outermost_members(nn.ModuleDict({"model": model}), (nn.ModuleList, nn.Sequential))
        if any(True for _ in layer.parameters()) and not any(map(has_statistics, layer.modules()))
    ]
    if not layers:
        raise InputError(
            f"--gradient_checkpointing: {type(model).__name__} has no layers in an nn.ModuleList or "
            "nn.Sequential without batch norm; leave it out"
        )
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


def compile_layers(model: nn.Module) -> None:
    """Compiles every repeated layer of `model`, once for all lengths, or the whole model if it has none.
    Modules, parameters and state dict stay unchanged.

    Equal layers share compiled code, so compilation takes one layer's time. Each layer has its own backward
    pass, so that DDP can exchange one layer's gradients while the next one is computed. Generation with a
    cache is not compiled: torch would recompile for each layer's cache, for little work per token.
    """
    # By default torch stops after 8 variants, with a warning.
    torch._dynamo.config.recompile_limit = max(VARIANTS_OF_A_LAYER, torch._dynamo.config.recompile_limit)
    for module in list(outermost_members(model, nn.ModuleList)) or [model]:
        module.forward = _compiled(module.forward)


def _compiled(forward: Callable) -> Callable:
    compiled = torch.compile(forward, dynamic=True)

    @functools.wraps(forward)
    def dispatch(*inputs: Any, **named: Any) -> Any:
        # The name before, and from transformers 5.24.
        has_cache = any(named.get(name) is not None for name in ("past_key_values", "cache"))
        return (forward if has_cache else compiled)(*inputs, **named)

    return dispatch
