"""Reads the FSDP2 settings of an accelerate config; `fsdp_state` shards models by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    settings to `problems`. Ignores settings of checkpoints: they have the same format under every launch."""
    if not is_on(environment, SWITCH):
        return None
    settings = {
        name.removeprefix("FSDP_").lower(): value
        for name, value in environment.items()
        if name.startswith("FSDP_")
    }
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
