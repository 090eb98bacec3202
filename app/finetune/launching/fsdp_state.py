"""FSDP2 (torch's `fully_shard`): a model sharded over the processes, and its state by parameter name.

Models are sharded here and not by `Accelerator.prepare`, which (1.15) shards on GPUs only, so that no test on CPUs would cover
it, and which refuses models whose decoder has its own tied embeddings. Accelerate does the rest, as under DDP. torch's part is
imported by the functions that need it: it takes a second, and other launches do without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from finetune.errors import InputError
from finetune.launching.fsdp_config import BY_SIZE, NO_WRAP, SOURCE, FsdpSettings


def shard(model: nn.Module, settings: FsdpSettings, device: torch.device, precision: torch.dtype | None) -> None:
    """Shards a model that is whole on every process over all of them, in place: weights, and with them gradients and optimizer
    state. Its parameters are other objects afterwards, so the optimizer must be built after it.

    `precision`: that in which weights are gathered and computed with; gradients are summed, and weights kept, in fp32. Raises
    `InputError` for layers that the model does not have.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Normalisation over a batch would mix half-precision weights and fp32 statistics, which kernels refuse.
    half = None if any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules()) else precision
    common: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        # Inputs keep their precision: casting an attention mask's fp32 minimum to bf16 gives minus infinity.
        "mp_policy": MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if settings.offload_params else OffloadPolicy(),
    }
    for layer in layers_to_shard(model, settings):
        fully_shard(layer, reshard_after_forward=settings.reshard_after_forward, **common)
    fully_shard(model, **common)


def layers_to_shard(model: nn.Module, settings: FsdpSettings) -> list[nn.Module]:
    """The modules whose weights are gathered when they compute, innermost first; the rest is gathered with the whole model.

    Raises `InputError` for layers that the model does not have.
    """
    names = settings.transformer_layer_cls_to_wrap
    if settings.auto_wrap_policy == NO_WRAP:
        chosen = []
    elif settings.auto_wrap_policy == BY_SIZE:
        chosen = [module for module in model.modules() if _size(module) > settings.min_num_params]
    elif names:
        chosen = [module for module in model.modules() if type(module).__name__ in names]
        missing = sorted(set(names) - {type(module).__name__ for module in chosen})
        if missing:
            repeated = sorted({type(module).__name__ for module in _repeated_layers(model)})
            raise InputError(
                f"{SOURCE}: fsdp_transformer_layer_cls_to_wrap is {','.join(names)} but the model has no {', '.join(missing)}; "
                f"its repeated layers are {', '.join(repeated) or 'none'}"
            )
    else:
        chosen = list(_repeated_layers(model))
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return [module for module in reversed(chosen) if module is not model and _can_be_a_unit(module, owners)]


def _repeated_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and _has_forward(child):
            yield child
        else:
            yield from _repeated_layers(child)


def _can_be_a_unit(module: nn.Module, owners: dict[nn.Parameter, list[nn.Module]]) -> bool:
    """Whether it has weights, none of which another module uses as well."""
    inside, parameters = set(module.modules()), list(module.parameters())
    return bool(parameters) and _has_forward(module) and all(inside.issuperset(owners[p]) for p in parameters)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def full(tensor: Any) -> Any:
    """A sharded tensor whole, on every process, all of which must call it; another tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    return tensor.detach().to(tensor.device_mesh.device_type).full_tensor()  # it may be in host memory


def part_of(tensor: torch.Tensor, parameter: Any) -> torch.Tensor:
    """What belongs to a parameter on this process, of a tensor of its full shape: a part if it is sharded."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        # From this process's own copy: nothing is sent.
        tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return tensor.to(parameter.device)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a sharded tensor, sharing its memory; another tensor whole."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()


def reshard(model: nn.Module) -> None:
    """Frees gathered weights, so that the next pass gathers those that the shards hold then."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_weights(model: nn.Module, wanted: bool) -> dict[str, torch.Tensor]:
    """Full fp32 weights and persistent buffers by name, on the CPU, tied ones as one tensor; empty where they are not `wanted`.
    All processes must call it."""
    copies: dict[int, torch.Tensor] = {}
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            copies[id(tensor)] = _to_host(full(tensor), wanted)
        weights[name] = copies[id(tensor)]
    return weights if wanted else {}


def full_moments(model: nn.Module, optimizer: torch.optim.Optimizer, wanted: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state, {"exp_avg": {parameter name: tensor}, ...}, full, on the CPU, without its number of updates; as
    `full_weights`."""
    reshard(model)  # the optimizer knows the sharded parameters; an evaluation leaves gathered ones
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if key != "step":
                moments.setdefault(key, {})[name] = _to_host(full(value), wanted)
    return moments if wanted else {}


def _to_host(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    if not wanted:
        return tensor.new_empty(0)
    tensor = tensor.detach()
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def is_sharded(tensor: Any) -> bool:
    """Whether it is a part of a tensor: torch's DTensor, whose module need not be imported."""
    return hasattr(tensor, "full_tensor")
