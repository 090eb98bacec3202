"""--torch_compile: the layers of a model, compiled one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# With and without gradients, one row or several, as encoder or decoder, in fp32 or autocast.
VARIANTS_OF_A_LAYER = 64


def compile_layers(model: nn.Module) -> None:
    """Makes every repeated layer of `model` compute in compiled kernels, the same ones for all lengths; the whole model, if it
    has none. Modules, parameters and state dict stay as they are.

    Equal layers share what is compiled: one layer's time is spent and not a model's. And each has a backward pass of its own,
    so that DDP exchanges the gradients of one layer while the one below is computed. A search for titles, which hands a cache
    from token to token, is left as it is: each layer's part of the cache would be compiled anew, for little work a step.
    """
    # torch stops compiling a function of which there are more than 8, with a warning of its own.
    torch._dynamo.config.recompile_limit = max(VARIANTS_OF_A_LAYER, torch._dynamo.config.recompile_limit)
    for module in list(_layers(model)) or [model]:
        module.forward = _compiled(module.forward)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def _compiled(forward: Callable) -> Callable:
    compiled = torch.compile(forward, dynamic=True)

    @functools.wraps(forward)
    def chosen(*inputs: Any, **named: Any) -> Any:
        searches = named.get("past_key_values") is not None  # a cache, by the name that Hugging Face's layers have for it
        return (forward if searches else compiled)(*inputs, **named)

    return chosen
