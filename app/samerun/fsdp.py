"""FSDP2 (torch's `fully_shard`): reads its settings, shards a model and gathers its state by parameter name.

`Accelerator.prepare` (1.15) is not used: it shards on GPUs only, so tests on CPUs could not cover it, and it
refuses models whose decoder has its own tied embeddings. The functions on states also work without FSDP.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import distribute_tensor

from samerun.errors import InputError
from samerun.layers import has_forward, outermost_members

SOURCE = "fsdp_config of the accelerate config"
SWITCH = "ACCELERATE_USE_FSDP"
# With it transformers builds models without weights on all processes but the first.
BUILDS_ON_ONE_PROCESS = "FSDP_CPU_RAM_EFFICIENT_LOADING"
TRANSFORMER, BY_SIZE, NO_WRAP = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"
# The launcher's default is FULL_SHARD, version 1's word.
RESHARDS = {"true": True, "full_shard": True, "false": False, "shard_grad_op": False}


@dataclass(frozen=True)
class FsdpSettings:
    """The `fsdp_config` of an accelerate config, with its names."""

    reshard_after_forward: bool = True
    offload_params: bool = False
    auto_wrap_policy: str = TRANSFORMER
    transformer_layer_cls_to_wrap: tuple[str, ...] = ()  # empty: the model's repeated layers
    min_num_params: int = 100_000_000
    activation_checkpointing: bool = False
    cpu_ram_efficient_loading: bool = False  # not used: every process builds the whole model


def read_settings(environment: Mapping[str, str], problems: list[str]) -> FsdpSettings | None:
    """The FSDP settings that `accelerate launch` put into `environment`; None without FSDP. Adds unsupported
    settings to `problems`. Ignores settings of checkpoints: their format is the same everywhere."""
    if not is_on(environment, SWITCH):
        return None
    names = [name for name in environment if name.startswith("FSDP_")]
    settings = {name.removeprefix("FSDP_").lower(): environment[name] for name in names}
    messages = []
    version = settings.get("version", "1")
    if version != "2":
        messages.append(
            f"fsdp_version is {version}; write fsdp_version: 2 (see accelerate_configs/fsdp.yaml)"
        )
        settings.pop("reshard_after_forward", None)  # has other values in version 1
    reshards = RESHARDS.get(settings.get("reshard_after_forward", "true").lower())
    if reshards is None:
        messages.append(
            f"fsdp_reshard_after_forward is {settings['reshard_after_forward']}, expected true or false"
        )
    policy = settings.get("auto_wrap_policy", NO_WRAP).upper()  # Accelerate's default
    if policy not in (TRANSFORMER, BY_SIZE, NO_WRAP):
        messages.append(f"fsdp_auto_wrap_policy is {policy}, expected {TRANSFORMER}, {BY_SIZE} or {NO_WRAP}")
    min_num_params = settings.get("min_num_params", "100000000")
    if not min_num_params.isdecimal():
        messages.append(f"fsdp_min_num_params is {min_num_params!r}, expected a whole number")
    strategy = settings.get("sharding_strategy", "").upper()
    if version == "2" and strategy not in ("", "NONE", "FULL_SHARD", "1"):
        messages.append(
            f"fsdp_sharding_strategy is {strategy}, of version 1; write fsdp_reshard_after_forward: true or "
            "false, or use accelerate_configs/ddp.yaml, which does not shard"
        )
    for name in ("ignored_modules", "activation_checkpointing_offload"):
        if settings.get(name, "false").lower() not in ("false", "none", ""):
            messages.append(f"fsdp_{name} is not supported; leave it out")
    problems += [f"{SOURCE}: {message}" for message in messages]
    layers = settings.get("transformer_cls_to_wrap", "")
    return FsdpSettings(
        reshard_after_forward=bool(reshards),
        offload_params=is_on(settings, "offload_params"),
        auto_wrap_policy=policy,
        transformer_layer_cls_to_wrap=tuple(name.strip() for name in layers.split(",") if name.strip()),
        min_num_params=int(min_num_params) if min_num_params.isdecimal() else 0,
        activation_checkpointing=is_on(settings, "activation_checkpointing"),
        cpu_ram_efficient_loading=is_on(environment, BUILDS_ON_ONE_PROCESS),
    )


def is_on(environment: Mapping[str, str], name: str) -> bool:
    """Whether a variable of a launcher is set to true."""
    return environment.get(name, "").lower() in ("true", "1", "yes")


def shard(
    model: nn.Module, settings: FsdpSettings, device: torch.device, precision: torch.dtype | None
) -> None:
    """Shards in place a model that is whole on every process: weights, and so gradients and optimizer state.
    It replaces the parameter objects, so build the optimizer afterwards.

    `precision`: the dtype in which weights are gathered and used; weights are kept and gradients reduced in
    fp32. Raises `InputError` for layers that the model does not have.
    """
    # Batch norm would mix half-precision weights with fp32 statistics, which its kernels refuse.
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())
    half = None if has_batch_norm else precision
    common: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        # No cast of inputs: an attention mask's fp32 minimum becomes minus infinity in bf16.
        "mp_policy": MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False),
        "offload_policy": OffloadPolicy(),
    }
    if settings.offload_params:
        common["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for layer in layers_to_shard(model, settings):
        fully_shard(layer, reshard_after_forward=settings.reshard_after_forward, **common)
    fully_shard(model, **common)


def layers_to_shard(model: nn.Module, settings: FsdpSettings) -> list[nn.Module]:
    """The modules that `fully_shard` wraps one by one, innermost first; the root gathers all other weights.

    Raises `InputError` for layers that the model does not have.
    """
    names = settings.transformer_layer_cls_to_wrap
    if settings.auto_wrap_policy == NO_WRAP:
        layers = []
    elif settings.auto_wrap_policy == BY_SIZE:
        sizes = {module: sum(p.numel() for p in module.parameters()) for module in model.modules()}
        layers = [module for module, size in sizes.items() if size > settings.min_num_params]
    elif names:
        layers = [module for module in model.modules() if type(module).__name__ in names]
        missing = sorted(set(names) - {type(module).__name__ for module in layers})
        if missing:
            repeated = sorted({type(module).__name__ for module in outermost_members(model, nn.ModuleList)})
            raise InputError(
                f"{SOURCE}: fsdp_transformer_layer_cls_to_wrap is {','.join(names)} but the model has no "
                f"{', '.join(missing)}; its repeated layers are {', '.join(repeated) or 'none'}"
            )
    else:
        layers = list(outermost_members(model, nn.ModuleList))
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    shardable = []  # with a forward and weights, none of which modules outside share
    for module in reversed(layers):
        inside, parameters = set(module.modules()), list(module.parameters())
        alone = all(inside.issuperset(owners[parameter]) for parameter in parameters)
        if module is not model and parameters and has_forward(module) and alone:
            shardable.append(module)
    return shardable


def full_tensor(tensor: Any) -> Any:
    """Gathers a sharded tensor on every process; all must call it."""
    if not is_sharded(tensor):
        return tensor
    # Offloaded tensors are in host memory.
    return tensor.detach().to(tensor.device_mesh.device_type).full_tensor()


def distribute_like(tensor: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Cuts a tensor of a parameter's full shape to the parameter's shard on this process, and moves it to its
    device."""
    if is_sharded(parameter):
        # src_data_rank=None: every process cuts its own copy, nothing is sent.
        tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return tensor.to(parameter.device)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, as a view of its memory."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()


def reshard(model: nn.Module) -> None:
    """Frees gathered weights. The next forward pass gathers them again from the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_weights(model: nn.Module, wanted: bool) -> dict[str, torch.Tensor]:
    """Full fp32 weights and persistent buffers by name, on the CPU; tied weights are one tensor. Empty unless
    `wanted`. All processes must call it."""
    copies: dict[int, Any] = {}
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            copies[id(tensor)] = _gather(tensor, wanted)
        weights[name] = copies[id(tensor)]
    return weights if wanted else {}


def full_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, wanted: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's full state on the CPU, {"exp_avg": {parameter name: tensor}, ...}, without "step".
    Empty unless `wanted`. All processes must call it, after `reshard` under FSDP: the optimizer knows the
    sharded parameters only."""
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if key != "step":
                moments.setdefault(key, {})[name] = _gather(value, wanted)
    return moments if wanted else {}


def _gather(tensor: Any, wanted: bool) -> torch.Tensor | None:
    gathered = full_tensor(tensor)
    return to_host(gathered) if wanted else None


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, in fp32 unless it holds integers."""
    tensor = tensor.detach()
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "full_tensor")
