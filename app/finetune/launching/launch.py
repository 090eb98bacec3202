"""Which launcher started this process and what it requests: processes, backend, precision.

`describe_launch` reads the environment before anything is started, so that bad input ends a job before a process group
exists; `processes.start` starts the run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_bf16_available
from torch.distributed import Backend

from finetune.errors import InputError
from finetune.launching import deepspeed_config, fsdp_config
from finetune.launching.fsdp_config import FsdpSettings

REPOSITORY = Path(__file__).resolve().parents[3]
LEFT_OVER = "Variables of a launcher are set; if they are left over in this shell: unset {}. Else start by torchrun"
PLUGINS = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# DeepSpeed settings that stand in the accelerate config itself, as messages name their source.
INLINE = "deepspeed_config of the accelerate config"


@dataclass(frozen=True)
class Machine:
    """The part of a machine that a launch depends on."""

    gpus: int
    bf16: bool  # whether its GPUs support it
    kind: str = "cuda"  # torch's name of these devices: cuda, xpu, npu, mps


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launcher and the arguments request; known before any process group exists."""

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
    gpu: str = "cuda"  # torch's name of the devices, if it is not the CPU
    torch_compile: bool = False  # requested by the accelerate config
    fsdp: FsdpSettings | None = None

    @property
    def device_type(self) -> str:
        return "cpu" if self.use_cpu else self.gpu

    @property
    def micro_batches_by_tokens(self) -> bool:
        """Whether micro-batches are sized in tokens by default: on a CPU. A DeepSpeed file may declare their rows."""
        return self.use_cpu and self.deepspeed_config is None

    @property
    def gathers_weights(self) -> bool:
        """Whether weights are gathered while the model computes, so that all processes must make the same forward passes."""
        return self.zero_stage == 3 or self.fsdp is not None

    @property
    def recomputes_activations(self) -> bool:
        """Whether the accelerate config asks for what --gradient_checkpointing does."""
        return self.fsdp is not None and self.fsdp.activation_checkpointing

    @property
    def zero_stage(self) -> int:
        return deepspeed_config.stage_of(self.deepspeed_config) if self.deepspeed_config else 0


def this_machine() -> Machine:
    """The GPUs of this machine, or what torch has in place of them."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return Machine(0, True)
    return Machine(torch.accelerator.device_count(), is_bf16_available(), device.type)


def describe_launch(arguments: Any, machine: Machine | None = None) -> Launch:
    """Reads what the launcher set and what the arguments request; starts nothing. `machine`: the one to be launched on, if it
    is not this one.

    Raises `InputError` listing every contradiction between launcher, DeepSpeed file and arguments.
    """
    is_here, machine = machine is None, machine or this_machine()
    rank, world_size, local_rank, local_world = _place_in_job()
    use_cpu = machine.gpus == 0 or arguments.use_cpu or _is_on("ACCELERATE_USE_CPU")

    problems: list[str] = _unsupported_plugins() + _process_problems(world_size)
    compiles = _compiles(problems)
    if is_here:
        problems += _meeting_problems(world_size)
    file, config = _deepspeed_config(arguments, problems)
    settings = fsdp_config.read_settings(os.environ, problems)
    precision = _precision(arguments, config, problems)
    if config is not None:
        problems += deepspeed_config.problems(config, file, arguments.max_grad_norm, arguments.mixed_precision)
    if settings is not None:
        problems += _fsdp_problems(settings, file, precision, "cpu" if use_cpu else machine.kind)
    if precision == "fp16" and (use_cpu or machine.kind == "mps"):
        problems.append(f"fp16 is not available on {'a CPU' if use_cpu else 'MPS'}; use bf16 or no mixed precision")
    if precision == "bf16" and not use_cpu and not machine.bf16:
        problems.append("bf16 is not available on this GPU; use fp16 or no mixed precision")
    backend = "gloo" if use_cpu else Backend.default_device_backend_map.get(machine.kind, "gloo")
    if arguments.ddp_backend not in (None, "gloo", backend):
        found = "needs GPUs" if use_cpu else f"is not that of {machine.kind} devices ({backend})"
        problems.append(f"--ddp_backend {arguments.ddp_backend} {found}; leave it out or use gloo")
    if not use_cpu and local_world > machine.gpus:
        problems.append(f"{local_world} processes on this machine but {machine.gpus} GPU(s); start as many as GPUs")
    if problems:
        raise InputError(*problems)
    return Launch(
        launcher=_launcher(arguments),
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world,
        use_cpu=use_cpu,
        backend=arguments.ddp_backend or backend,
        precision=precision,
        timeout_seconds=arguments.ddp_timeout,
        deepspeed_file=file,
        deepspeed_config=config,
        max_grad_norm=arguments.max_grad_norm,
        tf32=arguments.tf32 and not use_cpu,
        gpu=machine.kind,
        torch_compile=compiles,
        fsdp=settings,
    )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("true", "1", "yes")


def _place_in_job() -> tuple[int, int, int, int]:
    """(rank, number of processes; the same on this machine). Raises `InputError` naming a variable that cannot be true: a shell
    keeps what was exported for another job."""
    world_size = _whole_number("WORLD_SIZE", 1)
    local_size = _whole_number("LOCAL_SIZE" if "LOCAL_SIZE" in os.environ else "LOCAL_WORLD_SIZE", 1)  # DeepSpeed's name first
    rank, local_rank = _whole_number("RANK", 0), _whole_number("LOCAL_RANK", 0)
    # A launcher may say nothing of the machine.
    sizes = {"RANK": (rank, world_size), "LOCAL_RANK": (local_rank, local_size if local_size > 1 else world_size)}
    for name, (number, size) in sizes.items():
        if number >= size:
            what = f"{name}={number} but there are {size} process(es), so there is no such one"
            raise InputError(f"{what}. {LEFT_OVER.format(name)}")
    return rank, world_size, local_rank, local_size


def _whole_number(variable: str, least: int) -> int:
    text = os.environ.get(variable, str(least))
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{variable}={text!r}: expected a whole number of at least {least}. {LEFT_OVER.format(variable)}")
    return int(text)


def _meeting_problems(world_size: int) -> list[str]:
    """What keeps several processes from finding each other: variables that every launcher sets."""
    port, missing = os.environ.get("MASTER_PORT", ""), [name for name in ("RANK", "MASTER_ADDR") if not os.environ.get(name)]
    if world_size == 1 or (port.isdecimal() and 0 < int(port) < 65536 and not missing):
        return []
    what = f"WORLD_SIZE={world_size} but {' and '.join(missing)} not set" if missing else f"MASTER_PORT={port!r} is no port"
    return [f"{what}, so the processes cannot meet. {LEFT_OVER.format('WORLD_SIZE')}"]


def _unsupported_plugins() -> list[str]:
    """What Accelerate would wrap the model in by itself, and a checkpoint or an export could not look into."""
    return [
        f"the accelerate config asks for {name} ({variable}), which is not supported; share out memory by a DeepSpeed file "
        "(accelerate_configs/zero2.yaml, zero3.yaml), or launch with accelerate_configs/ddp.yaml"
        for variable, name in PLUGINS.items()
        if _is_on(variable)
    ]


def _process_problems(world_size: int) -> list[str]:
    """What started several processes, or was to start them, so that each takes itself for the only one."""
    env, advice = os.environ, "launch with accelerate_configs/cpu_ddp.yaml (MULTI_GPU with use_cpu: true), or torchrun"
    by_mpi = next((name for name in MPI_SIZES if env.get(name, "1") not in ("", "0", "1")), None)
    if world_size == 1 and by_mpi is not None:
        return [f"MPI started {env[by_mpi]} processes ({by_mpi}), which is not supported; {advice}"]
    if world_size == 1 and _is_on("ACCELERATE_USE_CPU") and "MASTER_ADDR" in env and "WORLD_SIZE" not in env:
        return [f"the accelerate config asks for several processes on CPUs (MULTI_CPU) but Accelerate starts one; {advice}"]
    return []


def _compiles(problems: list[str]) -> bool:
    """Whether the accelerate config asks for what --torch_compile does."""
    env = os.environ
    backend, mode = env.get("ACCELERATE_DYNAMO_BACKEND", "no").lower(), env.get("ACCELERATE_DYNAMO_MODE", "default")
    if backend in ("no", ""):
        return False
    if backend != "inductor" or mode != "default" or _is_on("ACCELERATE_DYNAMO_USE_FULLGRAPH"):
        problems.append(
            f"the accelerate config asks for dynamo_backend {backend}, dynamo_mode {mode}, dynamo_use_fullgraph "
            f"{env.get('ACCELERATE_DYNAMO_USE_FULLGRAPH', 'False').lower()}; only inductor in mode default without fullgraph "
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
    requested = arguments.deepspeed or arguments.deepspeed_config
    by_launcher = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    uses = _is_on("ACCELERATE_USE_DEEPSPEED")
    file = requested or (by_launcher if uses else None)
    if uses and file is None:
        return INLINE, deepspeed_config.inline_config(os.environ, REPOSITORY, INLINE, problems)
    try:
        config = deepspeed_config.read_config(file, search=(REPOSITORY,)) if file else None
        if requested and by_launcher and deepspeed_config.read_config(by_launcher, search=(REPOSITORY,)) != config:
            problems.append(f"--deepspeed {requested} but the accelerate config names {by_launcher}, which differs; keep one")
        if file:
            return file, config
    except InputError as error:
        problems += error.problems
        return file, None
    return None, None


def _fsdp_problems(settings: FsdpSettings, deepspeed_file: str | None, precision: str, device_type: str) -> list[str]:
    """What FSDP cannot be combined with."""
    found = []
    if deepspeed_file is not None:
        found.append(f"--deepspeed {deepspeed_file} but the accelerate config asks for FSDP; keep one")
    if precision == "fp16":
        found.append("fp16 is not supported under FSDP; use bf16, or ZeRO (accelerate_configs/zero3.yaml) in fp16")
    if settings.offload_params and device_type not in ("cpu", "cuda"):
        found.append(f"{fsdp_config.SOURCE}: fsdp_offload_params is not supported on {device_type}; leave it out")
    return found


def _precision(arguments: Any, config: dict[str, Any] | None, problems: list[str]) -> str:
    # Accelerate sets "no" where its config says nothing, so "no" from there is no request.
    by_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    requested = arguments.mixed_precision
    if by_launcher not in ("no", "fp16", "bf16"):
        problems.append(f"the accelerate config asks for mixed_precision {by_launcher}; no, fp16 and bf16 are supported")
    if requested is not None and by_launcher not in ("no", requested):
        problems.append(f"--mixed_precision {requested} but the accelerate config says {by_launcher}; keep one")
    declared = deepspeed_config.declared_precision(config) if config is not None else None
    return declared or requested or by_launcher
