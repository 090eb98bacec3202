"""--torch_compile: compiles the layers of a model one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# A layer is recompiled with and without gradients, for one row or several, as encoder or decoder, in fp32 or
# autocast.
VARIANTS_OF_A_LAYER = 64


def compile_layers(model: nn.Module) -> None:
    """Compiles every repeated layer of `model`, once for all lengths, or the whole model if it has none.
    Modules, parameters and state dict stay unchanged.

    Equal layers share compiled code, so compilation takes one layer's time. Each layer has its own backward
    pass, so that DDP can exchange one layer's gradients while the next one is computed. Generation with a
    cache is not compiled: torch would recompile for each layer's cache, for little work per token.
    """
    # By default torch stops after 8 variants, with a warning.
    torch._dynamo.config.recompile_limit = max(VARIANTS_OF_A_LAYER, torch._dynamo.config.recompile_limit)
    for module in list(_layers(model)) or [model]:
        module.forward = _compiled(module.forward)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost `nn.ModuleList`s."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def _compiled(forward: Callable) -> Callable:
    compiled = torch.compile(forward, dynamic=True)

    @functools.wraps(forward)
    def dispatch(*inputs: Any, **named: Any) -> Any:
        has_cache = named.get("past_key_values") is not None
        return (forward if has_cache else compiled)(*inputs, **named)

    return dispatch
