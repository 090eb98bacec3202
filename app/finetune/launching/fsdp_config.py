"""FSDP2's settings, as an accelerate config has them; `fsdp_state` shards models by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SOURCE = "fsdp_config of the accelerate config"
SWITCH = "ACCELERATE_USE_FSDP"
# Under it transformers would build models without weights on every process but the first.
BUILDS_ON_ONE_PROCESS = "FSDP_CPU_RAM_EFFICIENT_LOADING"
TRANSFORMER, BY_SIZE, NO_WRAP = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"
# The launcher sets FULL_SHARD, version 1's word, where the file says nothing.
RESHARDS = {"true": True, "full_shard": True, "false": False, "shard_grad_op": False}


@dataclass(frozen=True)
class FsdpSettings:
    """What the `fsdp_config` of an accelerate config asks for, by its names."""

    reshard_after_forward: bool = True
    offload_params: bool = False
    auto_wrap_policy: str = TRANSFORMER
    transformer_layer_cls_to_wrap: tuple[str, ...] = ()  # none: the model's repeated layers
    min_num_params: int = 100_000_000
    activation_checkpointing: bool = False
    cpu_ram_efficient_loading: bool = False  # noted only: every process builds the whole model, as under every launch


def read_settings(environment: Mapping[str, str], problems: list[str]) -> FsdpSettings | None:
    """The settings that `accelerate launch` put into `environment`; None without FSDP. What cannot be honoured is added to
    `problems`. Where checkpoints are concerned there is nothing to ask for: they are by parameter name under every launch."""
    if not _is_on(environment, SWITCH):
        return None
    given = {name.removeprefix("FSDP_").lower(): value for name, value in environment.items() if name.startswith("FSDP_")}
    found = []
    if given.get("version", "1") != "2":
        found.append(f"fsdp_version is {given.get('version', '1')}; write fsdp_version: 2 (see accelerate_configs/fsdp.yaml)")
        given.pop("reshard_after_forward", None)  # it has other values in version 1
    reshards = RESHARDS.get(given.get("reshard_after_forward", "true").lower())
    if reshards is None:
        found.append(f"fsdp_reshard_after_forward is {given['reshard_after_forward']}, expected true or false")
    policy = given.get("auto_wrap_policy", NO_WRAP).upper()  # Accelerate's default
    if policy not in (TRANSFORMER, BY_SIZE, NO_WRAP):
        found.append(f"fsdp_auto_wrap_policy is {policy}, expected {TRANSFORMER}, {BY_SIZE} or {NO_WRAP}")
    least = given.get("min_num_params", "100000000")
    if not least.isdecimal():
        found.append(f"fsdp_min_num_params is {least!r}, expected a whole number")
    for name in ("ignored_modules", "activation_checkpointing_offload"):
        if given.get(name, "false").lower() not in ("false", "none", ""):
            found.append(f"fsdp_{name} is not supported; leave it out")
    problems += [f"{SOURCE}: {problem}" for problem in found]
    layers = given.get("transformer_cls_to_wrap", "")
    return FsdpSettings(
        reshard_after_forward=bool(reshards),
        offload_params=_is_on(given, "offload_params"),
        auto_wrap_policy=policy,
        transformer_layer_cls_to_wrap=tuple(name.strip() for name in layers.split(",") if name.strip()),
        min_num_params=int(least) if least.isdecimal() else 0,
        activation_checkpointing=_is_on(given, "activation_checkpointing"),
        cpu_ram_efficient_loading=_is_on(environment, BUILDS_ON_ONE_PROCESS),
    )


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("true", "1", "yes")
