"""The state that a DeepSpeed engine shares out over processes, by parameter name: taken from it and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def grad_norm(engine: Any) -> Any:
    """The norm of the gradient that the last update used, before clipping, unscaled; a float or a tensor."""
    return engine.get_global_grad_norm()


def full_parameters(engine: Any, wanted: bool) -> dict[str, Any]:
    """Full fp32 weights by parameter name, on the CPU; every process must call this, and gets them if they are `wanted`."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = {}
    for name, parameter in engine.module.named_parameters():
        full = safe_get_full_fp32_param(parameter)
        # A frozen one has no master copy; under ZeRO-3 it may be shared out all the same, and empty here.
        shared_out = full is None and hasattr(parameter, "ds_id") and not parameter.numel()
        with GatheredParameters([parameter] if shared_out else []):
            parameters[name] = _cpu(full, parameter, wanted)
    return parameters


def full_moments(engine: Any, wanted: bool) -> dict[str, dict[str, Any]]:
    """The optimizer's moments, for Adam {"exp_avg": {name: tensor}, "exp_avg_sq": {...}}, full, fp32, on the CPU, of weights
    that are trained; as `full_parameters`."""
    from deepspeed.utils import safe_get_full_optimizer_state

    _link_moments(engine)
    keys = _moments(engine)
    return {key: {n: _cpu(safe_get_full_optimizer_state(p, key), None, wanted) for n, p in _trained(engine)} for key in keys}


def restore_moments(engine: Any, moments: dict[str, dict[str, Any]], updates: int) -> None:
    """Puts the optimizer's moments and its number of updates back into an engine that has not stepped since it was built.

    DeepSpeed's optimizers create their state in the first step, so one step with zero gradients and learning rate 0 is done
    before the moments are written over; weights do not move in it.
    """
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    _link_moments(engine)
    for key, tensors in moments.items():
        for name, parameter in _trained(engine):
            if hasattr(parameter, "ds_tensor"):
                safe_set_local_optimizer_state(parameter, _own_part(parameter, tensors[name]), key)
            else:
                safe_set_full_optimizer_state(parameter, tensors[name], key)
    _set_updates(engine, updates)


def restore_weights(engine: Any, weights: dict[str, Any]) -> None:
    """Puts full fp32 weights back into an engine whose module computes in half precision: its master copies were made of the
    module's rounded weights. `weights` may know a tied one by any of its names. All processes must call it."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    names: dict[int, str] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if name in weights:
            names.setdefault(id(parameter), name)
    for _, parameter in _trained(engine):
        weight = weights[names[id(parameter)]]
        if hasattr(parameter, "ds_tensor"):
            safe_set_local_fp32_param(parameter, _own_part(parameter, weight))
        else:
            safe_set_full_fp32_param(parameter, weight)
    copy_to_module(engine)


def own_weights(engine: Any) -> list[Any]:
    """This process's flat fp32 part of each group's weights, which updates change; not of weights on a disk."""
    return [part.detach() for part in _groups(engine.optimizer)[1]]


def copy_to_module(engine: Any) -> None:
    """Makes what the module computes with of the master weights, as an update does. All processes must call it."""
    optimizer = engine.optimizer
    _, flat, whole = _groups(optimizer)
    if whole is not None:
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()  # lets go of the weights that are gathered
    for number in range(len(flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer.checkpoint_event_epilogue()  # gathers those again that are too small to be shared out


def _own_part(parameter: Any, value: Any) -> Any:
    """This process's part of a full tensor under ZeRO-3, the last one padded with zeros. DeepSpeed's own functions for full
    tensors fail where the elements do not divide by the number of processes (0.19)."""
    size = parameter.ds_tensor.numel()
    padded = torch.nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
    return padded.narrow(0, size * dist.get_rank(), size)


def layout(engine: Any) -> list[dict[str, Any]]:
    """How parameters lie in the flat tensors of `partition`, group by group: {"numel": of this process's part, "parameters":
    [name, shape, place]}, where the place is an offset in the whole group, or, under ZeRO-3, the size of the part."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    groups, flat, whole = _groups(optimizer)
    if whole is None:
        lists = [[[names[id(p)], list(p.ds_shape), p.partition_numel()] for p in group] for group in groups]
    else:
        starts = [tensor.storage_offset() for tensor in whole]
        lists = [
            [[names[id(p)], list(p.shape), p.data.storage_offset() - start] for p in group]
            for group, start in zip(groups, starts, strict=True)
        ]
    return [{"numel": part.numel(), "parameters": group} for part, group in zip(flat, lists, strict=True)]


def partition(engine: Any, updates: int) -> dict[str, Any]:
    """This process's part of the state, copied to the CPU: weights/N, and of Adam exp_avg/N and exp_avg_sq/N, of each group,
    flat, in the optimizer's precision (before the first of the `updates` there are no moments); buffer/NAME, the persistent
    buffers; frozen/NAME, what this process has of the weights that are not trained: a part under ZeRO-3, else rank 0 has
    them."""
    states, tensors = engine.optimizer.optimizer.state, {}
    for number, flat in enumerate(_groups(engine.optimizer)[1]):
        tensors[f"weights/{number}"] = _copied(flat)
        if updates:
            tensors |= {f"{key}/{number}": _copied(states[flat][key]) for key in _moments(engine)}
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    state = engine.module.state_dict()
    tensors |= {f"buffer/{name}": _copied(tensor) for name, tensor in state.items() if name not in parameters}
    for name, parameter in _frozen(engine):
        if hasattr(parameter, "ds_tensor"):
            tensors[f"frozen/{name}"] = _copied(parameter.ds_tensor)
        elif engine.global_rank == 0:
            tensors[f"frozen/{name}"] = _copied(parameter)
    return tensors


def restore_partition(engine: Any, read: Callable[[str], Any], updates: int) -> None:
    """Puts back what `partition` gave, by names that are given to `read`, into an engine that has made the first step of
    `restore_moments`, and makes the weights that the module computes with of it. All processes must call it."""
    states = engine.optimizer.optimizer.state
    for name, parameter in _frozen(engine):
        getattr(parameter, "ds_tensor", parameter).data.copy_(read(f"frozen/{name}"))
    kept_buffers = engine.module.state_dict().keys()
    for name, buffer in engine.module.named_buffers():
        if name in kept_buffers:
            buffer.data.copy_(read(f"buffer/{name}"))
    for number, part in enumerate(_groups(engine.optimizer)[1]):
        part.data.copy_(read(f"weights/{number}"))
        for key in _moments(engine):
            kept = states[part][key]
            kept.copy_(read(f"{key}/{number}")) if updates else kept.zero_()
    _set_updates(engine, updates)
    copy_to_module(engine)


def _moments(engine: Any) -> tuple[str, ...]:
    """What the optimizer keeps of each weight beside its number of updates."""
    optimizer = engine.optimizer.optimizer
    kind = type(optimizer).__name__
    if kind == "SGD":
        return ("momentum_buffer",) if optimizer.param_groups[0]["momentum"] else ()
    if kind == "RMSprop":
        group = optimizer.param_groups[0]
        optional = {"momentum_buffer": group["momentum"], "grad_avg": group["centered"]}
        return "square_avg", *(name for name, is_kept in optional.items() if is_kept)
    return ("state1",) if kind == "Lion" else ("exp_avg", "exp_avg_sq")


def _groups(optimizer: Any) -> tuple[list, list, list | None]:
    """(groups of the module's parameters; of each this process's flat fp32 part; the flat tensor whose views the parameters
    are, None under ZeRO-3)."""
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
            kept = state["step"]
            state["step"] = kept.new_full(kept.shape, updates) if hasattr(kept, "new_full") else updates


def _link_moments(engine: Any) -> None:
    """ZeRO-1 and 2 tie parameters to their moments once, after the first parameter group has stepped: the groups that step
    after it have no moments then, and are never tied (DeepSpeed 0.19). So it is done again here."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    optimizer = engine.optimizer
    if hasattr(optimizer, "bit16_groups"):
        for group, partition in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            lazy_init_hp_params_optimizer_state(group, partition, optimizer.optimizer.state)


def loss_scale(engine: Any) -> dict[str, Any] | None:
    """The fp16 loss scaler's numbers, or None where nothing is scaled."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or not getattr(scaler, "dynamic", False):
        return None
    return {key: value for key, value in vars(scaler).items() if isinstance(value, int | float | bool)}


def restore_loss_scale(engine: Any, numbers: dict[str, Any]) -> None:
    """Puts the numbers of `loss_scale` back."""
    vars(engine.optimizer.loss_scaler).update(numbers)


def _cpu(tensor: Any, fallback: Any, wanted: bool) -> Any:
    tensor = fallback.detach() if tensor is None else tensor
    return tensor.to("cpu", torch.float32, copy=True) if wanted else None


def _copied(tensor: Any) -> Any:
    return tensor.detach().to("cpu", copy=True)
