"""DeepSpeed's configuration file: read, checked, completed, and put in force.

Together with `deepspeed_state` this is the only place that knows DeepSpeed, which is imported by the functions that need it:
other launches do without. The run's arguments own every optimization number; a DeepSpeed file owns how memory is laid out. So
"auto" is filled in here, and a number that differs from the run's is an error.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from finetune.errors import InputError
from finetune.reading.json_files import read_object

# Bucket sizes only shape communication. Accelerate derives "auto" from `config.hidden_size`, which composite models lack.
BUCKETS = {
    "reduce_bucket_size": 50_000_000,
    "allgather_bucket_size": 50_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
OWNED_BY_ARGUMENTS = {
    "optimizer": "--optim, --learning_rate, --weight_decay and --adam_* own it",
    "scheduler": "--lr_scheduler_type and --warmup_steps own it",
}
OURS = "--learning_rate, --lr_scheduler_type and the like decide"
OPTIMIZERS = ("Adam", "AdamW")  # types of an "optimizer" section that are ours; DeepSpeed's Adam is AdamW
# What `accelerate launch` makes of settings that stand in its own config file.
INLINE_SETTINGS = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}


def read_config(path: str, search: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads a DeepSpeed file; a relative path is looked for in the working directory, then in `search`.

    Raises `InputError` naming file, line and reason.
    """
    candidates = [Path(path), *(folder / path for folder in search)]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        what = "is a folder" if any(candidate.is_dir() for candidate in candidates) else "does not exist"
        raise InputError(f"DeepSpeed file {path} {what} (the shipped ones are in ds_configs/)")
    config = read_object(file)
    for key in ("zero_optimization", "fp16", "bf16"):
        if not isinstance(config.get(key, {}), dict):
            raise InputError(f"{path}: {key} must be an object, found {config[key]!r}")
    return config


def inline_config(environment: Mapping[str, str], repository: Path, source: str, problems: list[str]) -> dict[str, Any] | None:
    """The DeepSpeed file that settings of an accelerate config stand for: the shipped file of that stage, and the offloading
    that they ask for. None, and an entry in `problems`, for settings that cannot be honoured."""
    given = {name: environment[variable] for name, variable in INLINE_SETTINGS.items() if variable in environment}
    stage = given.get("zero_stage", "2")
    places = {name: given.get(f"offload_{name}_device", "none") for name in ("optimizer", "param")}
    if stage not in ("1", "2", "3"):
        found = f"zero_stage is {stage}, expected 1, 2 or 3 (without ZeRO, launch with accelerate_configs/ddp.yaml)"
    elif "nvme" in places.values():
        found = (
            "offloading to nvme needs a file; write deepspeed_config_file instead (start from ds_configs/zero3_offload.json)"
        )
    elif places["param"] != "none" and stage != "3":
        found = f"offload_param_device is {places['param']} but zero_stage is {stage}; ZeRO-3 alone offloads parameters"
    elif "deepspeed_moe_layer_cls_names" in given:
        found = "mixture-of-experts models are not supported; remove deepspeed_moe_layer_cls_names"
    else:
        config = read_config(str(repository / "ds_configs" / f"zero{stage}.json"))
        offloaded = {
            f"offload_{name}": {"device": place, "pin_memory": True} for name, place in places.items() if place != "none"
        }
        config["zero_optimization"].update(offloaded)
        clipping, accumulation = given.get("gradient_clipping", "auto"), given.get("gradient_accumulation_steps", "1")
        config["gradient_clipping"] = clipping if clipping == "auto" else float(clipping)
        # The wizard asks how much the script is told to accumulate, and writes 1 where nobody answers.
        config["gradient_accumulation_steps"] = "auto" if accumulation in ("1", "auto") else int(accumulation)
        return config
    problems.append(f"{source}: {found}")
    return None


def declared_precision(config: dict[str, Any]) -> str | None:
    """The precision that the file switches on: "fp16" or "bf16"; "no" if it switches both off, None if it leaves it open."""
    enabled = {kind: config.get(kind, {}).get("enabled", "auto") for kind in ("fp16", "bf16")}
    for kind, value in enabled.items():
        if value is True:
            return kind
    return "no" if all(value is False for value in enabled.values()) else None


def stage_of(config: dict[str, Any]) -> int:
    """The ZeRO stage the file asks for; 0 when it asks for none."""
    stage = config.get("zero_optimization", {}).get("stage", 0)
    return stage if type(stage) is int else 0


def swaps_to_disk(config: dict[str, Any]) -> bool:
    """Whether weights or the optimizer's state are kept on a disk (ZeRO-Infinity)."""
    memory = config.get("zero_optimization", {})
    return '"nvme"' in json.dumps([memory.get("offload_optimizer"), memory.get("offload_param")])


def problems(config: dict[str, Any], source: str, max_grad_norm: float, mixed_precision: str | None) -> list[str]:
    """What in a DeepSpeed file cannot be run as the arguments ask, batch sizes apart; one message each."""
    messages = [
        f"{source}: remove the section {key!r}: {why}"
        for key, why in OWNED_BY_ARGUMENTS.items()
        if key in config and not _is_ours(config, key)
    ]
    enabled_kinds = {kind: config.get(kind, {}).get("enabled", "auto") for kind in ("fp16", "bf16")}
    for kind, enabled in enabled_kinds.items():
        if enabled not in (True, False, "auto"):
            messages.append(f'{source}: {kind}.enabled must be true, false or "auto", found {enabled!r}')
    if stage_of(config) not in (1, 2, 3):
        messages.append(f"{source}: zero_optimization.stage must be 1, 2 or 3 (without ZeRO, launch with ddp.yaml instead)")
    clipping = config.get("gradient_clipping", "auto")
    if clipping not in ("auto", max_grad_norm):
        messages.append(f'{source}: gradient_clipping is {clipping} but --max_grad_norm is {max_grad_norm:g}; make it "auto"')
    if config.get("zero_optimization", {}).get("round_robin_gradients") is True:
        # DeepSpeed 0.19 then looks for a weight's master copy where another weight's is.
        messages.append(f"{source}: remove zero_optimization.round_robin_gradients: DeepSpeed confuses weights with it")
    declared = declared_precision(config)
    if all(enabled is True for enabled in enabled_kinds.values()):
        messages.append(f"{source}: fp16 and bf16 are both enabled; keep one")
    if mixed_precision not in (None, declared) and declared is not None:
        contradiction = f"its precision is {declared} but --mixed_precision is {mixed_precision}"
        messages.append(f'{source}: {contradiction}; make "enabled" "auto"')
    return messages


def complete_config(config: dict[str, Any], source: str, batch: Any, max_grad_norm: float, precision: str) -> dict[str, Any]:
    """Returns the file with every "auto" filled in from the run. `batch` is a `plan.BatchShape`.

    Raises `InputError` listing each number that contradicts the run's, and each "auto" that nothing fills in.
    """
    full = {key: value for key, value in json.loads(json.dumps(config)).items() if key not in OWNED_BY_ARGUMENTS}
    own = {
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
    }
    messages = [
        f'{source}: {key} is {full[key]} but the run\'s is {value}; make it "auto"'
        for key, value in own.items()
        if full.get(key, "auto") not in ("auto", value)
    ]
    if full.get("train_batch_size", "auto") not in ("auto", batch.global_batch_size):
        declared, ours = full["train_batch_size"], batch.global_batch_size
        messages.append(f'{source}: train_batch_size is {declared} but --global_batch_size is {ours}; make it "auto"')
    # DeepSpeed checks this product and uses it for nothing else; an uneven global batch is a little smaller.
    full.update(own, train_batch_size=batch.micro_batch_size * batch.accumulation * batch.world_size)
    full["gradient_clipping"] = float(max_grad_norm)
    for kind in ("fp16", "bf16"):
        full.setdefault(kind, {})["enabled"] = precision == kind
    zero = full["zero_optimization"]
    zero.update({key: value for key, value in BUCKETS.items() if zero.get(key) == "auto"})
    # Without it a torch optimizer beside an offload section would be exchanged for one that must be compiled.
    full.setdefault("zero_force_ds_cpu_optimizer", False)
    full["zero_allow_untested_optimizer"] = True  # `finetune.optimizers` says which ones work
    messages += [f'{source}: {path} is "auto", which nothing fills in; write a value' for path in _autos(full)]
    if messages:
        raise InputError(*messages)
    return full


def check_by_deepspeed(config: dict[str, Any], source: str) -> None:
    """Raises `InputError` with what DeepSpeed itself does not take in a complete configuration; it would say so only when the
    model is handed over."""
    from deepspeed.runtime.config import DeepSpeedConfig

    copy = json.loads(json.dumps(config))
    # Before there is a process group DeepSpeed counts one process.
    copy["train_batch_size"] = copy["train_micro_batch_size_per_gpu"] * copy["gradient_accumulation_steps"]
    try:
        DeepSpeedConfig(copy)
    except Exception as error:  # pydantic's, assertions and DeepSpeed's own
        each = getattr(error, "errors", None)
        if each is None:
            raise InputError(f"{source}: DeepSpeed does not take it: {' '.join(str(error).split())[:300]}") from None
        raise InputError(
            *(f"{source}: {'.'.join(map(str, e['loc']))} is {e['input']!r:.60}: {e['msg'].lower()}" for e in each())
        ) from None


def plugin(config: dict[str, Any]) -> Any:
    """Accelerate's DeepSpeed plugin around a complete configuration."""
    from accelerate.utils import DeepSpeedPlugin

    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)


def build_models_whole(accelerator: Any) -> None:
    """Stops transformers from partitioning a model while it is built.

    It does so whatever `zero3_init_flag` says. Weights built whole on every process are the same under every launch, and
    DeepSpeed partitions them when the model is prepared; the price is one full copy in host memory for a moment.
    """
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    accelerator.state.deepspeed_plugin.dschf = None


def skip_shared_memory_operator() -> None:
    """Keeps DeepSpeed from compiling its shared-memory operator for CPUs, which takes minutes, a compiler and ninja.

    Only `inference_all_reduce` uses it. Call this before DeepSpeed starts its communication.
    """
    # Not an import statement: in `deepspeed.comm`, the name `torch` stands for torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = _no_operator


def _no_operator() -> None:
    """What DeepSpeed's own function returns where the operator cannot be built."""


def bound_waits(timeout: Any) -> None:
    """Makes DeepSpeed's copy of the process group, over which it exchanges gradients, wait no longer than the group itself."""
    from deepspeed.utils import groups

    groups._WORLD_GROUP = dist.new_group(timeout=timeout)


def _is_ours(config: dict[str, Any], key: str) -> bool:
    """Whether an "optimizer" or a "scheduler" section leaves all numbers to the run."""
    section = config[key] if isinstance(config[key], dict) else {}
    params, known = section.get("params"), key != "optimizer" or section.get("type") in OPTIMIZERS
    return known and bool(params) and isinstance(params, dict) and all(value == "auto" for value in params.values())


def _autos(config: dict[str, Any], prefix: str = "") -> list[str]:
    paths = []
    for key, value in config.items():
        if value == "auto":
            paths.append(prefix + key)
        elif isinstance(value, dict):
            paths += _autos(value, f"{prefix}{key}.")
    return paths
