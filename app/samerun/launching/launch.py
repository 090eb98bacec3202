"""Describes the launch: launcher, processes, backend, precision, DeepSpeed or FSDP.

`describe_launch` only reads the environment and the arguments, so that bad input ends a job before a process
group exists; `processes.start` starts the run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_bf16_available
from torch.distributed import Backend

from samerun.errors import InputError
from samerun.launching import deepspeed_config, fsdp_config
from samerun.launching.fsdp_config import FsdpSettings, is_on

REPOSITORY = Path(__file__).resolve().parents[3]
LEFTOVER_ADVICE = "If the variable is left over in this shell: unset {}; else start the job with torchrun"
UNSUPPORTED_PLUGINS = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# Takes the place of a DeepSpeed file's name when the accelerate config itself has the settings.
INLINE = "deepspeed_config of the accelerate config"


@dataclass(frozen=True)
class Machine:
    """The devices of one machine."""

    gpus: int
    bf16: bool  # whether its GPUs support it
    kind: str = "cuda"  # torch's device type: cuda, xpu, npu, mps


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The launch that launcher and arguments request; known before a process group exists."""

    launcher: str  # python, torchrun, accelerate, deepspeed
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    use_cpu: bool
    backend: str  # of torch.distributed: nccl on CUDA, gloo on CPUs
    precision: str  # no, fp16, bf16
    timeout_seconds: int
    deepspeed_file: str | None
    deepspeed_config: dict[str, Any] | None
    max_grad_norm: float
    tf32: bool = False
    gpu: str = "cuda"  # torch's device type of the machine's accelerators
    torch_compile: bool = False  # the accelerate config requests it
    fsdp: FsdpSettings | None = None

    @property
    def device_type(self) -> str:
        return "cpu" if self.use_cpu else self.gpu

    @property
    def micro_batches_by_tokens(self) -> bool:
        """Whether micro-batches are sized in tokens by default: on CPUs without DeepSpeed, whose file may set
        the rows."""
        return self.use_cpu and self.deepspeed_config is None

    @property
    def gathers_weights(self) -> bool:
        """Whether forward passes gather weights (ZeRO-3, FSDP), so that all processes must make the same
        number of them."""
        return self.zero_stage == 3 or self.fsdp is not None

    @property
    def recomputes_activations(self) -> bool:
        """Whether the accelerate config requests activation checkpointing."""
        return self.fsdp is not None and self.fsdp.activation_checkpointing

    @property
    def zero_stage(self) -> int:
        return deepspeed_config.stage_of(self.deepspeed_config) if self.deepspeed_config else 0


def this_machine() -> Machine:
    """This machine's GPUs or other accelerators."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return Machine(0, True)
    return Machine(torch.accelerator.device_count(), is_bf16_available(), device.type)


def describe_launch(arguments: Any, machine: Machine | None = None) -> Launch:
    """Reads the launcher's variables and the arguments; starts nothing. `machine`: the machine of a launch
    that is only planned; None for this one.

    Raises `InputError` listing every contradiction between launcher, DeepSpeed file and arguments.
    """
    is_planned = machine is not None
    machine = machine or this_machine()
    rank, world_size, local_rank, local_world_size = _ranks_and_sizes()
    use_cpu = machine.gpus == 0 or arguments.use_cpu or is_on(os.environ, "ACCELERATE_USE_CPU")
    device_type = "cpu" if use_cpu else machine.kind

    problems: list[str] = _unsupported_plugins() + _unsupported_launchers(world_size)
    torch_compile = _torch_compile(problems)
    if not is_planned:
        problems += _rendezvous_problems(world_size)
    file, config = _deepspeed_config(arguments, problems)
    fsdp = fsdp_config.read_settings(os.environ, problems)
    precision = _precision(arguments, config, problems)
    if config is not None:
        problems += deepspeed_config.problems(
            config, file, arguments.max_grad_norm, arguments.mixed_precision
        )
    if fsdp is not None:
        problems += _fsdp_problems(fsdp, file, precision, device_type)
    problems += _precision_problems(precision, device_type, machine.bf16)
    backend = Backend.default_device_backend_map.get(device_type, "gloo")
    if arguments.ddp_backend not in (None, "gloo", backend):
        why = "needs GPUs" if use_cpu else f"is not the backend of {device_type} devices ({backend})"
        problems.append(f"--ddp_backend {arguments.ddp_backend} {why}; leave it out or use gloo")
    if not use_cpu and local_world_size > machine.gpus:
        problems.append(
            f"{local_world_size} processes on this machine but {machine.gpus} GPU(s); start one "
            "process per GPU"
        )
    if problems:
        raise InputError(*problems)
    return Launch(
        launcher=_launcher(arguments),
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        use_cpu=use_cpu,
        backend=arguments.ddp_backend or backend,
        precision=precision,
        timeout_seconds=arguments.ddp_timeout,
        deepspeed_file=file,
        deepspeed_config=config,
        max_grad_norm=arguments.max_grad_norm,
        tf32=arguments.tf32 and not use_cpu,
        gpu=machine.kind,
        torch_compile=torch_compile,
        fsdp=fsdp,
    )


def _ranks_and_sizes() -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local world size). Raises `InputError` naming an impossible value, which
    a shell may have kept from another job."""
    world_size = _whole_number("WORLD_SIZE", 1)
    local_size = _whole_number(
        "LOCAL_SIZE" if "LOCAL_SIZE" in os.environ else "LOCAL_WORLD_SIZE", 1
    )  # DeepSpeed's name first
    rank, local_rank = _whole_number("RANK", 0), _whole_number("LOCAL_RANK", 0)
    # Not every launcher sets the local size.
    sizes = {
        "RANK": (rank, world_size),
        "LOCAL_RANK": (local_rank, local_size if local_size > 1 else world_size),
    }
    for name, (number, size) in sizes.items():
        if number >= size:
            raise InputError(
                f"{name}={number} but there are only {size} process(es). {LEFTOVER_ADVICE.format(name)}"
            )
    return rank, world_size, local_rank, local_size


def _whole_number(variable: str, least: int) -> int:
    text = os.environ.get(variable, str(least))
    if not text.isdecimal() or int(text) < least:
        what = f"{variable}={text!r}: expected a whole number of at least {least}"
        raise InputError(f"{what}. {LEFTOVER_ADVICE.format(variable)}")
    return int(text)


def _rendezvous_problems(world_size: int) -> list[str]:
    """Missing or wrong variables that several processes need to find each other."""
    port, missing = (
        os.environ.get("MASTER_PORT", ""),
        [name for name in ("RANK", "MASTER_ADDR") if not os.environ.get(name)],
    )
    if world_size == 1 or (port.isdecimal() and 0 < int(port) < 65536 and not missing):
        return []
    what = (
        f"WORLD_SIZE={world_size} but {' and '.join(missing)} not set"
        if missing
        else f"MASTER_PORT={port!r} is no port"
    )
    return [f"{what}, so the processes cannot connect. {LEFTOVER_ADVICE.format('WORLD_SIZE')}"]


def _unsupported_plugins() -> list[str]:
    """Plugins by which Accelerate would wrap the model itself, so that checkpoints and exports could not read
    its weights."""
    return [
        f"the accelerate config asks for {name} ({variable}), which is not supported; use "
        "accelerate_configs/ddp.yaml, or "
        "zero2.yaml or zero3.yaml to save memory"
        for variable, name in UNSUPPORTED_PLUGINS.items()
        if is_on(os.environ, variable)
    ]


def _unsupported_launchers(world_size: int) -> list[str]:
    """Launchers under which every process would run as if it were the only one."""
    env, advice = (
        os.environ,
        "launch with accelerate_configs/cpu_ddp.yaml (MULTI_GPU with use_cpu: true), or torchrun",
    )
    by_mpi = next((name for name in MPI_SIZES if env.get(name, "1") not in ("", "0", "1")), None)
    if world_size == 1 and by_mpi is not None:
        return [f"MPI started {env[by_mpi]} processes ({by_mpi}), which is not supported; {advice}"]
    if (
        world_size == 1
        and is_on(env, "ACCELERATE_USE_CPU")
        and "MASTER_ADDR" in env
        and "WORLD_SIZE" not in env
    ):
        return [
            "the accelerate config asks for several processes on CPUs (MULTI_CPU) but Accelerate "
            f"starts one; {advice}"
        ]
    return []


def _torch_compile(problems: list[str]) -> bool:
    """Whether the accelerate config requests torch.compile; adds unsupported settings of it to `problems`."""
    env = os.environ
    backend, mode = (
        env.get("ACCELERATE_DYNAMO_BACKEND", "no").lower(),
        env.get("ACCELERATE_DYNAMO_MODE", "default"),
    )
    if backend in ("no", ""):
        return False
    if backend != "inductor" or mode != "default" or is_on(env, "ACCELERATE_DYNAMO_USE_FULLGRAPH"):
        problems.append(
            f"the accelerate config asks for dynamo_backend {backend}, dynamo_mode {mode}, "
            "dynamo_use_fullgraph "
            f"{env.get('ACCELERATE_DYNAMO_USE_FULLGRAPH', 'False').lower()}; only inductor in mode "
            "default without fullgraph "
            "is supported: leave dynamo_config out and give --torch_compile"
        )
    return True


def _launcher(arguments: Any) -> str:
    if any(name.startswith("ACCELERATE_") and name != "ACCELERATE_USE_DEEPSPEED" for name in os.environ):
        return "accelerate"
    if arguments.local_rank is not None or "CROSS_RANK" in os.environ:
        return "deepspeed"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "python"


def _deepspeed_config(arguments: Any, problems: list[str]) -> tuple[str | None, dict[str, Any] | None]:
    """(name of the DeepSpeed file, its content); None for each that is missing. Adds errors to `problems`."""
    requested = arguments.deepspeed or arguments.deepspeed_config
    by_launcher = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    is_enabled = is_on(os.environ, "ACCELERATE_USE_DEEPSPEED")
    file = requested or (by_launcher if is_enabled else None)
    if file is None:
        if not is_enabled:
            return None, None
        return INLINE, deepspeed_config.inline_config(os.environ, REPOSITORY, INLINE, problems)
    try:
        config = deepspeed_config.read_config(file, search=(REPOSITORY,))
        if (
            requested
            and by_launcher
            and deepspeed_config.read_config(by_launcher, search=(REPOSITORY,)) != config
        ):
            problems.append(
                f"--deepspeed {requested} but the accelerate config names {by_launcher}, which "
                "differs; keep one"
            )
        return file, config
    except InputError as error:
        problems += error.problems
        return file, None


def _fsdp_problems(
    settings: FsdpSettings, deepspeed_file: str | None, precision: str, device_type: str
) -> list[str]:
    problems = []
    if deepspeed_file is not None:
        problems.append(f"--deepspeed {deepspeed_file} but the accelerate config asks for FSDP; keep one")
    if precision == "fp16":
        problems.append(
            "fp16 is not supported under FSDP; use bf16, or ZeRO (accelerate_configs/zero3.yaml) in fp16"
        )
    if settings.offload_params and device_type not in ("cpu", "cuda"):
        problems.append(
            f"{fsdp_config.SOURCE}: fsdp_offload_params is not supported on {device_type}; leave it out"
        )
    return problems


def _precision_problems(precision: str, device_type: str, has_bf16: bool) -> list[str]:
    if precision == "fp16" and device_type in ("cpu", "mps"):
        return [
            f"fp16 is not available on {'a CPU' if device_type == 'cpu' else 'MPS'}; use bf16 or no "
            "mixed precision"
        ]
    if precision == "bf16" and device_type != "cpu" and not has_bf16:
        return ["bf16 is not available on this GPU; use fp16 or no mixed precision"]
    return []


def _precision(arguments: Any, config: dict[str, Any] | None, problems: list[str]) -> str:
    # "no" is also Accelerate's default, so it is no request.
    by_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    requested = arguments.mixed_precision
    if by_launcher not in ("no", "fp16", "bf16"):
        problems.append(
            f"the accelerate config asks for mixed_precision {by_launcher}; no, fp16 and bf16 are supported"
        )
    if requested is not None and by_launcher not in ("no", requested):
        problems.append(
            f"--mixed_precision {requested} but the accelerate config says {by_launcher}; keep one"
        )
    declared = deepspeed_config.declared_precision(config) if config is not None else None
    return declared or requested or by_launcher
