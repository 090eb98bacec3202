"""Reads and restores the state that a DeepSpeed engine partitions over processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def grad_norm(engine: Any) -> Any:
    """The last update's gradient norm before clipping, without loss scale; a float or a tensor."""
    return engine.get_global_grad_norm()


def full_parameters(engine: Any, wanted: bool) -> dict[str, Any]:
    """Full fp32 weights by parameter name, on the CPU; empty unless `wanted`. All processes must call it."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = {}
    for name, parameter in engine.module.named_parameters():
        full = safe_get_full_fp32_param(parameter)
        # Frozen parameters have no master copy; under ZeRO-3 they may still be partitioned, and empty here.
        is_partitioned = full is None and hasattr(parameter, "ds_id") and not parameter.numel()
        with GatheredParameters([parameter] if is_partitioned else []):
            if wanted:
                parameters[name] = _fp32_copy(parameter if full is None else full)
    return parameters


def full_moments(engine: Any, wanted: bool) -> dict[str, dict[str, Any]]:
    """Full fp32 moments of the trained weights on the CPU, for Adam {"exp_avg": {name: tensor}, "exp_avg_sq":
    {...}}; empty unless `wanted`. All processes must call it."""
    from deepspeed.utils import safe_get_full_optimizer_state

    _link_moments(engine)
    moments: dict[str, dict[str, Any]] = {}
    for key in _moment_keys(engine):
        for name, parameter in _trained(engine):
            full = safe_get_full_optimizer_state(parameter, key)
            if wanted:
                moments.setdefault(key, {})[name] = _fp32_copy(full)
    return moments


def restore_moments(engine: Any, moments: dict[str, dict[str, Any]], updates: int) -> None:
    """Restores moments and number of updates in an engine that has made one idle step since it was built (see
    `checkpoint.restore_optimizer`): DeepSpeed's optimizers create their state in their first step."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    _link_moments(engine)
    for key, tensors in moments.items():
        for name, parameter in _trained(engine):
            if hasattr(parameter, "ds_tensor"):
                safe_set_local_optimizer_state(parameter, _local_part(parameter, tensors[name]), key)
            else:
                safe_set_full_optimizer_state(parameter, tensors[name], key)
    _set_updates(engine, updates)


def restore_weights(engine: Any, weights: dict[str, Any]) -> None:
    """Restores full fp32 weights in an engine whose module is in half precision: it made its master weights
    from the module's rounded ones. `weights` may name a tied weight by any of its names. All processes must
    call it."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    names: dict[int, str] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if name in weights:
            names.setdefault(id(parameter), name)
    for _, parameter in _trained(engine):
        weight = weights[names[id(parameter)]]
        if hasattr(parameter, "ds_tensor"):
            safe_set_local_fp32_param(parameter, _local_part(parameter, weight))
        else:
            safe_set_full_fp32_param(parameter, weight)
    copy_to_module(engine)


def local_weights(engine: Any) -> list[Any]:
    """This process's flat part of each group's fp32 master weights. Does not support offloading to nvme."""
    return [part.detach() for part in _groups(engine.optimizer)[1]]


def copy_to_module(engine: Any) -> None:
    """Copies the master weights to the module's weights, as an update does. All processes must call it."""
    optimizer = engine.optimizer
    _, master, module = _groups(optimizer)
    if module is not None:
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()  # frees gathered weights
    for number in range(len(master)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer.checkpoint_event_epilogue()  # gathers the weights below DeepSpeed's persistence threshold again


def _local_part(parameter: Any, value: Any) -> Any:
    """This process's part of a full tensor under ZeRO-3; the last part is padded with zeros. DeepSpeed's
    functions for full tensors (0.19) fail if the number of elements is not a multiple of the number of
    processes."""
    size = parameter.ds_tensor.numel()
    padded = torch.nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
    return padded.narrow(0, size * dist.get_rank(), size)


def layout(engine: Any) -> list[dict[str, Any]]:
    """The layout of the flat tensors of `partition`: one entry per parameter group, {"numel": size of this
    process's part, "parameters": [[name, shape, offset in the group], ...]}. Under ZeRO-3, the size of this
    process's part of the parameter takes the place of the offset."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    groups, master, module = _groups(optimizer)
    if module is None:
        entries = [[[names[id(p)], list(p.ds_shape), p.partition_numel()] for p in group] for group in groups]
    else:
        starts = [tensor.storage_offset() for tensor in module]
        entries = [
            [[names[id(p)], list(p.shape), p.data.storage_offset() - start] for p in group]
            for group, start in zip(groups, starts, strict=True)
        ]
    return [{"numel": part.numel(), "parameters": group} for part, group in zip(master, entries, strict=True)]


def partition(engine: Any, updates: int) -> dict[str, Any]:
    """Copies this process's part of the state to the CPU:

    - weights/N and the moments, for Adam exp_avg/N and exp_avg_sq/N: flat tensors of parameter group N in the
      optimizer's precision; no moments if `updates` is 0
    - buffer/NAME: the persistent buffers
    - frozen/NAME: frozen weights; a part under ZeRO-3, else whole and on rank 0 only
    """
    states, tensors = engine.optimizer.optimizer.state, {}
    for number, flat in enumerate(_groups(engine.optimizer)[1]):
        tensors[f"weights/{number}"] = _copy(flat)
        if updates:
            tensors |= {f"{key}/{number}": _copy(states[flat][key]) for key in _moment_keys(engine)}
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    state = engine.module.state_dict()
    tensors |= {f"buffer/{name}": _copy(tensor) for name, tensor in state.items() if name not in parameters}
    for name, parameter in _frozen(engine):
        if hasattr(parameter, "ds_tensor"):
            tensors[f"frozen/{name}"] = _copy(parameter.ds_tensor)
        elif engine.global_rank == 0:
            tensors[f"frozen/{name}"] = _copy(parameter)
    return tensors


def restore_partition(engine: Any, read: Callable[[str], Any], updates: int) -> None:
    """Restores the tensors of `partition`, which `read` returns by name, in an engine that has made one idle
    step (see `restore_moments`). All processes must call it."""
    states = engine.optimizer.optimizer.state
    for name, parameter in _frozen(engine):
        getattr(parameter, "ds_tensor", parameter).data.copy_(read(f"frozen/{name}"))
    persistent = engine.module.state_dict().keys()
    for name, buffer in engine.module.named_buffers():
        if name in persistent:
            buffer.data.copy_(read(f"buffer/{name}"))
    for number, part in enumerate(_groups(engine.optimizer)[1]):
        part.data.copy_(read(f"weights/{number}"))
        for key in _moment_keys(engine):
            moment = states[part][key]
            moment.copy_(read(f"{key}/{number}")) if updates else moment.zero_()
    _set_updates(engine, updates)
    copy_to_module(engine)


def _moment_keys(engine: Any) -> tuple[str, ...]:
    """The optimizer's state keys other than "step"."""
    optimizer = engine.optimizer.optimizer
    kind = type(optimizer).__name__
    if kind == "SGD":
        return ("momentum_buffer",) if optimizer.param_groups[0]["momentum"] else ()
    if kind == "RMSprop":
        group = optimizer.param_groups[0]
        optional = {"momentum_buffer": group["momentum"], "grad_avg": group["centered"]}
        return "square_avg", *(name for name, is_used in optional.items() if is_used)
    return ("state1",) if kind == "Lion" else ("exp_avg", "exp_avg_sq")


def _groups(optimizer: Any) -> tuple[list, list, list | None]:
    """Three lists by parameter group: the module's parameters; this process's flat fp32 part of their master
    weights; the flat tensor that the module's parameters are views of (None in place of this list under
    ZeRO-3)."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3
        return optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, None
    if hasattr(optimizer, "fp32_groups_flat_partition"):  # ZeRO-1 in bf16 with gradients summed in fp32
        return optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, optimizer.bf16_groups_flat
    return optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat


def _trained(engine: Any) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]


def _frozen(engine: Any) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in engine.module.named_parameters() if not p.requires_grad]


def _set_updates(engine: Any, updates: int) -> None:
    for state in engine.optimizer.optimizer.state.values():
        if "step" in state:
            step = state["step"]
            state["step"] = step.new_full(step.shape, updates) if isinstance(step, torch.Tensor) else updates


def _link_moments(engine: Any) -> None:
    """Links parameters to their moments again. ZeRO-1 and 2 (DeepSpeed 0.19) do this once, after the first
    parameter group has stepped, when the other groups have no moments yet."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    optimizer = engine.optimizer
    if hasattr(optimizer, "bit16_groups"):
        for group, partition in zip(
            optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True
        ):
            lazy_init_hp_params_optimizer_state(group, partition, optimizer.optimizer.state)


def loss_scale(engine: Any) -> dict[str, Any] | None:
    """The state of a dynamic loss scaler (fp16); None without one."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or not getattr(scaler, "dynamic", False):
        return None
    return {key: value for key, value in vars(scaler).items() if isinstance(value, int | float | bool)}


def restore_loss_scale(engine: Any, numbers: dict[str, Any]) -> None:
    """Restores the state that `loss_scale` returned."""
    vars(engine.optimizer.loss_scaler).update(numbers)


def _fp32_copy(tensor: Any) -> Any:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _copy(tensor: Any) -> Any:
    return tensor.detach().to("cpu", copy=True)
