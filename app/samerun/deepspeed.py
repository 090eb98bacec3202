"""DeepSpeed: its configuration file, and the state that an engine partitions over processes.

The run's arguments decide every optimization number, a DeepSpeed file the memory layout. So every "auto" is
filled in here, and a number that differs from the run's is an error. Only this module uses DeepSpeed;
functions import it because other launches do not need it.
"""

import copy
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samerun import fsdp
from samerun.data.files import read_object
from samerun.errors import InputError, raise_problems
from samerun.files import shipped

# Bucket sizes only shape communication. Accelerate derives "auto" from `config.hidden_size`, which composite
# models lack.
BUCKETS = {
    "reduce_bucket_size": 50_000_000,
    "allgather_bucket_size": 50_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
OWNED_BY_ARGUMENTS = {
    "optimizer": "--optim, --optim_args, --learning_rate and --weight_decay",
    "scheduler": "--lr_scheduler_type and --warmup_steps",
}
SHIPPED = shipped("ds_configs")
# Takes the place of a DeepSpeed file's name when the accelerate config itself has the settings.
INLINE = "deepspeed_config of the accelerate config"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # DeepSpeed's other names
OPTIMIZERS = ("Adam", "AdamW")  # accepted in an "optimizer" section; DeepSpeed's Adam is AdamW
# Environment variables by which `accelerate launch` passes the DeepSpeed settings of its own config file.
INLINE_SETTINGS = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}


def read_config(path: str) -> dict[str, Any]:
    """Reads a DeepSpeed file. A relative path is searched in the working directory, then beside the shipped
    ds_configs/. Raises `InputError` naming file, line and reason."""
    candidates = [Path(path), SHIPPED.parent / path]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        what = "is a folder" if any(candidate.is_dir() for candidate in candidates) else "does not exist"
        raise InputError(f"DeepSpeed file {path} {what} (the shipped ones are in ds_configs/)")
    config = read_object(file)
    for key in ("zero_optimization", "fp16", "bf16", "data_types"):
        if not isinstance(config.get(key, {}), dict):
            raise InputError(f"{path}: {key} must be an object, found {config[key]!r}")
    return config


def inline_config(environment: Mapping[str, str]) -> dict[str, Any]:
    """Builds a configuration from the DeepSpeed settings of an accelerate config: the shipped file of their
    ZeRO stage with their offloading. `beside_file` adds their numbers. Raises `InputError` for nvme."""
    stage = environment.get(INLINE_SETTINGS["zero_stage"], "2")
    config = read_config(str(SHIPPED / f"zero{stage if stage in ('1', '2', '3') else 2}.json"))
    config["zero_optimization"]["stage"] = int(stage) if stage.isdecimal() else stage
    for name in ("offload_optimizer", "offload_param"):
        device = environment.get(INLINE_SETTINGS[f"{name}_device"], "none")
        if device == "nvme":
            raise InputError(
                f"{INLINE}: offloading to nvme needs a file; write deepspeed_config_file instead (start from "
                "ds_configs/zero3_offload.json)"
            )
        if device != "none":
            config["zero_optimization"][name] = {"device": device, "pin_memory": True}
    return config


def declared_precision(config: dict[str, Any]) -> str | None:
    """The precision that the file enables: "fp16" or "bf16"; "no" if it disables both, None if it declares
    none."""
    enabled = _enabled(config)
    for kind, value in enabled.items():
        if value is True:
            return kind
    return "no" if all(value is False for value in enabled.values()) else None


def _enabled(config: dict[str, Any]) -> dict[str, Any]:
    return {kind: config.get(kind, {}).get("enabled", "auto") for kind in ("fp16", "bf16")}


def stage_of(config: dict[str, Any]) -> int:
    """The file's ZeRO stage; 0 without one."""
    stage = config.get("zero_optimization", {}).get("stage", 0)
    return stage if type(stage) is int else 0


def offload_device(config: dict[str, Any], part: str) -> Any:
    """Where the "optimizer" or the "param" part is offloaded to; "none" for the accelerator's own memory."""
    offload = config.get("zero_optimization", {}).get(f"offload_{part}")
    return offload.get("device") or "none" if isinstance(offload, dict) else "none"


def uses_nvme(config: dict[str, Any]) -> bool:
    """Whether weights or the optimizer's state are offloaded to a disk (ZeRO-Infinity)."""
    return "nvme" in [offload_device(config, part) for part in ("optimizer", "param")]


def beside_file(config: dict[str, Any], source: str, environment: Mapping[str, str]) -> list[str]:
    """Settings of an accelerate config that contradict the DeepSpeed file. Numbers that the file leaves to
    the run are filled in, to be compared with the run's."""
    own = {name: config.get(name, "auto") for name in ("gradient_clipping", "gradient_accumulation_steps")}
    own["zero_stage"], contradictions = stage_of(config), []
    own |= {f"offload_{part}_device": offload_device(config, part) for part in ("optimizer", "param")}
    for name, key in INLINE_SETTINGS.items():
        value, known = environment.get(key, "auto"), own.get(name)
        # 1 is the default of `accelerate config`, so it is no request.
        is_default = name == "gradient_accumulation_steps" and value == "1"
        if value == "auto" or is_default or _number(value) == _number(known):
            continue
        if known == "auto":
            config[name] = json.loads(value)
        elif known is None:
            contradictions.append(
                f"the accelerate config has {name} {value}, which is not supported; remove it"
            )
        else:
            contradictions.append(f"the accelerate config has {name} {value}, but {source} {known}; keep one")
    return contradictions


def _number(value: Any) -> Any:
    """The number of a text that has one; anything else as it is."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def problems(config: dict[str, Any], source: str, max_grad_norm: float, precision: str) -> list[str]:
    """Contradictions between a DeepSpeed file and the run, and values that are not supported; batch sizes
    apart."""
    messages = [
        f"remove the section {key!r}; use {names} instead"
        for key, names in OWNED_BY_ARGUMENTS.items()
        if key in config and not _has_only_autos(config, key)
    ]
    enabled = _enabled(config)
    for kind, value in enabled.items():
        if value not in (True, False, "auto"):
            messages.append(f'{kind}.enabled must be true, false or "auto", found {value!r}')
    if stage_of(config) not in (1, 2, 3):
        messages.append(
            "zero_optimization.stage must be 1, 2 or 3 (without ZeRO, launch with "
            "accelerate_configs/ddp.yaml)"
        )
    if stage_of(config) in (1, 2) and offload_device(config, "param") != "none":
        messages.append("zero_optimization.offload_param is for stage 3: only ZeRO-3 offloads parameters")
    clipping = config.get("gradient_clipping", "auto")
    if clipping not in ("auto", max_grad_norm):
        messages.append(
            f'gradient_clipping is {clipping} but --max_grad_norm is {max_grad_norm:g}; make it "auto"'
        )
    if config.get("zero_optimization", {}).get("round_robin_gradients") is True:
        # DeepSpeed 0.19 then returns the master copy of another weight.
        messages.append("remove zero_optimization.round_robin_gradients: DeepSpeed confuses weights with it")
    if config.get("zero_optimization", {}).get("compute_grad_norm", True) is not True:
        messages.append("remove zero_optimization.compute_grad_norm: every step's gradient norm is checked")
    types = {
        "communication_data_type": config.get("communication_data_type"),
        "data_types.grad_accum_dtype": config.get("data_types", {}).get("grad_accum_dtype"),
    }
    messages += [
        f"{name} is {value!r} but the run's precision is {'fp32' if precision == 'no' else precision}: "
        "gradients would be rounded otherwise; remove it"
        for name, value in types.items()
        if value is not None and DTYPES.get(str(value), value) not in ("fp32", precision)
    ]
    if all(value is True for value in enabled.values()):
        messages.append("fp16 and bf16 are both enabled; keep one")
    return [f"{source}: {message}" for message in messages]


def complete_config(
    config: dict[str, Any], source: str, batch: Any, max_grad_norm: float, precision: str
) -> dict[str, Any]:
    """Returns the configuration with every "auto" filled in from the run. `batch` is a `plan.BatchShape`.

    Raises `InputError` listing all numbers that contradict the run's, and every "auto" that has no value in
    the run.
    """
    full = {key: value for key, value in copy.deepcopy(config).items() if key not in OWNED_BY_ARGUMENTS}
    expected = {  # and whose number it is
        "train_micro_batch_size_per_gpu": (batch.micro_batch_size, "the run's"),
        "gradient_accumulation_steps": (batch.accumulation, "the run's"),
        "train_batch_size": (batch.global_batch_size, "--global_batch_size"),
    }
    messages = [
        f'{source}: {key} is {full[key]} but {whose} is {value}; make it "auto"'
        for key, (value, whose) in expected.items()
        if full.get(key, "auto") not in ("auto", value)
    ]
    full |= {key: value for key, (value, _) in expected.items()}
    # DeepSpeed only checks this product; a global batch that does not divide evenly is a little smaller.
    full["train_batch_size"] = batch.micro_batch_size * batch.accumulation * batch.world_size
    full["gradient_clipping"] = float(max_grad_norm)
    for kind in ("fp16", "bf16"):
        full.setdefault(kind, {})["enabled"] = precision == kind
    zero = full["zero_optimization"]
    zero.update({key: value for key, value in BUCKETS.items() if zero.get(key) == "auto"})
    # Else DeepSpeed replaces a torch optimizer under offloading by one that must be compiled.
    full.setdefault("zero_force_ds_cpu_optimizer", False)
    full["zero_allow_untested_optimizer"] = True  # `samerun.optim_arguments` refuses those that fail
    messages += [
        f'{source}: {path} is "auto", which the run cannot fill in; write a value' for path in _autos(full)
    ]
    raise_problems(messages)
    return full


def check_by_deepspeed(config: dict[str, Any], source: str) -> None:
    """Raises `InputError` if DeepSpeed itself refuses a complete configuration. Otherwise DeepSpeed would
    raise only after the model is built."""
    from deepspeed.runtime.config import DeepSpeedConfig

    # DeepSpeed derives the batch size: without a process group it counts one process.
    checked = {key: value for key, value in copy.deepcopy(config).items() if key != "train_batch_size"}
    try:
        DeepSpeedConfig(checked)
    except Exception as error:  # pydantic's, assertions and DeepSpeed's own
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{source}: DeepSpeed refuses it: {reason}") from None


def correct(accelerator: Any, timeout: Any) -> None:
    """Stops transformers from partitioning a model while it is built; transformers ignores `zero3_init_flag`.
    Gives DeepSpeed's own process group, which reduces gradients, the run's timeout.

    Every process builds the whole model, so initial weights are the same under every launcher. DeepSpeed
    partitions them in `prepare`. The cost is one full copy in host memory until then.
    """
    from deepspeed.utils import groups
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    accelerator.state.deepspeed_plugin.dschf = None
    groups._WORLD_GROUP = dist.new_group(timeout=timeout)


def skip_shared_memory_operator() -> None:
    """Stops DeepSpeed from compiling its shared-memory operator for CPUs, which takes minutes, a compiler and
    ninja.

    Only `inference_all_reduce` uses it. Call this before DeepSpeed starts its communication.
    """
    # Not an import statement: in `deepspeed.comm`, the name `torch` is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # as if it could not be built


def _has_only_autos(config: dict[str, Any], key: str) -> bool:
    """Whether an "optimizer" or a "scheduler" section leaves all numbers to the run."""
    section = config[key] if isinstance(config[key], dict) else {}
    if key == "optimizer" and section.get("type") not in OPTIMIZERS:
        return False
    params = section.get("params")
    has_numbers = isinstance(params, dict) and bool(params)
    return has_numbers and all(value == "auto" for value in params.values())


def _autos(config: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths of all values "auto"."""
    paths = []
    for key, value in config.items():
        if value == "auto":
            paths.append(prefix + key)
        elif isinstance(value, dict):
            paths += _autos(value, f"{prefix}{key}.")
    return paths


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
                parameters[name] = fsdp.to_host(parameter if full is None else full)
    return parameters


def full_moments(engine: Any, wanted: bool) -> dict[str, dict[str, Any]]:
    """Full fp32 moments of the trained weights on the CPU, for Adam {"exp_avg": {name: tensor}, "exp_avg_sq":
    {...}}; empty unless `wanted`. All processes must call it."""
    from deepspeed.utils import safe_get_full_optimizer_state

    _link_moments(engine)
    moments: dict[str, dict[str, Any]] = {}
    states = engine.optimizer.optimizer.state.values()
    for key in sorted({key for state in states for key in state} - {"step"}):  # in one order everywhere
        for name, parameter in _trained(engine):
            full = safe_get_full_optimizer_state(parameter, key)
            if wanted:
                moments.setdefault(key, {})[name] = fsdp.to_host(full)
    return moments


def restore_moments(engine: Any, moments: dict[str, dict[str, Any]], updates: int) -> None:
    """Restores moments and number of updates in an engine that has made one idle step since it was built (see
    `Training._idle_step`): DeepSpeed's optimizers create their state in their first step."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    _link_moments(engine)
    for key, tensors in moments.items():
        for name, parameter in _trained(engine):
            if name not in tensors:  # no step has used it
                continue
            if hasattr(parameter, "ds_tensor"):
                safe_set_local_optimizer_state(parameter, _local_part(parameter, tensors[name]), key)
            else:
                safe_set_full_optimizer_state(parameter, tensors[name], key)
    for state in engine.optimizer.optimizer.state.values():
        if "step" in state:
            step = state["step"]
            state["step"] = step.new_full(step.shape, updates) if isinstance(step, torch.Tensor) else updates


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
    optimizer = engine.optimizer
    # Under ZeRO-3; ZeRO-1 in bf16 with gradients summed in fp32; otherwise.
    names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
    name = next(name for name in names if hasattr(optimizer, name))
    return [part.detach() for part in getattr(optimizer, name)]


def copy_to_module(engine: Any) -> None:
    """Copies the master weights to the module's weights, as an update does. All processes must call it."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):  # not ZeRO-3
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()  # frees gathered weights
    for number in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    optimizer.checkpoint_event_epilogue()  # gathers the weights below DeepSpeed's persistence threshold again


def _local_part(parameter: Any, value: Any) -> Any:
    """This process's part of a full tensor under ZeRO-3; the last part is padded with zeros. DeepSpeed's
    functions for full tensors (0.19) fail if the number of elements is not a multiple of the number of
    processes."""
    size = parameter.ds_tensor.numel()
    padded = torch.nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
    return padded.narrow(0, size * dist.get_rank(), size)


def _trained(engine: Any) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]


def _link_moments(engine: Any) -> None:
    """Links parameters to their moments again. ZeRO-1 and 2 (DeepSpeed 0.19) do this once, after the first
    parameter group has stepped, when the other groups have no moments yet."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    optimizer = engine.optimizer
    if hasattr(optimizer, "bit16_groups"):
        partitions = optimizer.single_partition_of_fp32_groups
        for group, partition in zip(optimizer.bit16_groups, partitions, strict=True):
            lazy_init_hp_params_optimizer_state(group, partition, optimizer.optimizer.state)


def loss_scale(engine: Any) -> dict[str, Any] | None:
    """The state of a dynamic loss scaler (fp16); None without one."""
    state = _scaler_state(engine)
    return {key: value for key, value in state.items() if isinstance(value, int | float | bool)} or None


def restore_loss_scale(engine: Any, numbers: dict[str, Any]) -> None:
    """Restores the state that `loss_scale` returned; of another scaler's state, what this one has, too."""
    state = _scaler_state(engine)
    state.update({key: value for key, value in numbers.items() if key in state})
    stay_at_smallest_scale(engine)


def stay_at_smallest_scale(engine: Any) -> None:
    """Stops DeepSpeed from raising if an update overflows at the smallest loss scale: `samerun.training`
    counts the updates that are skipped, and says what to do."""
    if state := _scaler_state(engine):
        state["raise_error_at_min_scale"] = False


def _scaler_state(engine: Any) -> dict[str, Any]:
    """The attributes of a dynamic loss scaler, to be changed in place; {} without one."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return vars(scaler) if getattr(scaler, "dynamic", False) else {}
