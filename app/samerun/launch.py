"""Describes a launch before anything is started: launcher, processes, backend, precision, DeepSpeed or FSDP.

Only the environment and the arguments are read, so that bad input ends a job before a process group exists.
"""

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from samerun import deepspeed, fsdp
from samerun.errors import InputError, raise_problems
from samerun.fsdp import FsdpSettings, is_on

LEFTOVER_ADVICE = "If the variable is left over in this shell: unset {}; else start the job with torchrun"
# Plugins by which Accelerate would wrap the model, so that checkpoints and exports cannot read it.
UNSUPPORTED_PLUGINS = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
# The number of processes by MPI and, the last one, by srun.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
# With other workspaces cuBLAS may give other results when several streams run (its documentation,
# "Results Reproducibility").
DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")


@dataclass(frozen=True)
class Machine:
    """The CUDA devices of one machine; it computes on its CPU in place of any others."""

    gpus: int
    bf16: bool  # whether its GPUs support it


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The launch that launcher and arguments request; known before a process group exists. The defaults are
    those of one process on a CPU."""

    launcher: str = "python"  # or torchrun, accelerate, deepspeed
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    use_cpu: bool = True
    backend: str = "gloo"  # of torch.distributed: nccl on CUDA, gloo on CPUs
    precision: str = "no"  # or fp16, bf16
    timeout_seconds: int = 1800
    deepspeed_file: str | None = None
    deepspeed_config: dict[str, Any] | None = None
    max_grad_norm: float = 1.0
    tf32: bool = False
    full_determinism: bool = False
    torch_compile: bool = False  # the accelerate config requests it
    fsdp: FsdpSettings | None = None
    dropout_by_row: bool = False  # otherwise dropout is torch's (see `kernels.dropout`)

    @property
    def device_type(self) -> str:
        return "cpu" if self.use_cpu else "cuda"

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
        return deepspeed.stage_of(self.deepspeed_config) if self.deepspeed_config else 0


# Describing a launch


def this_machine() -> Machine:
    if not torch.cuda.is_available():
        return Machine(0, True)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)  # emulation is slow
    return Machine(torch.cuda.device_count(), bf16)


def describe_launch(arguments: Any, machine: Machine | None = None) -> Launch:
    """Reads the launcher's variables and the arguments; starts nothing. `machine`: the machine of a launch
    that is only planned; None for this one.

    Raises `InputError` listing every contradiction between launcher, DeepSpeed file and arguments.
    """
    is_planned = machine is not None
    if arguments.full_determinism:  # before CUDA starts; libraries read them once
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_CUBLAS[0])
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    machine = machine or this_machine()
    rank, world_size, local_rank, local_world_size = _ranks_and_sizes()
    use_cpu = machine.gpus == 0 or arguments.use_cpu or is_on(os.environ, "ACCELERATE_USE_CPU")

    problems = _unsupported_launchers(world_size)
    torch_compile = _torch_compile(problems)
    if (world_size > 1 or "LOCAL_RANK" in os.environ) and not is_planned:
        problems += _missing_addresses(world_size)
    file, config = _read_deepspeed_config(arguments, problems)
    settings = fsdp.read_settings(os.environ, problems)
    precision = _precision(arguments.mixed_precision, file, config, problems)
    if config is not None:
        problems += deepspeed.problems(config, file, arguments.max_grad_norm, precision)
    if settings is not None and file is not None:
        problems.append(f"--deepspeed {file} but the accelerate config asks for FSDP; keep one")
    if settings is not None and precision == "fp16":
        problems.append(
            "fp16 is not supported under FSDP; use bf16, or ZeRO (accelerate_configs/zero3.yaml) in fp16"
        )
    if precision == "fp16" and use_cpu:
        problems.append("fp16 is not available on a CPU; use bf16 or no mixed precision")
    if precision == "bf16" and not use_cpu and not machine.bf16:
        problems.append("bf16 is not available on this GPU; use fp16 or no mixed precision")
    compiles = (arguments.torch_compile or torch_compile) and deepspeed.stage_of(config or {}) != 3
    by_row = _dropout_by_row(arguments, use_cpu, compiles, problems)
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if arguments.full_determinism and not use_cpu and workspace not in DETERMINISTIC_CUBLAS:
        problems.append(
            f"--full_determinism but CUBLAS_WORKSPACE_CONFIG is {workspace}; unset it, or set it to "
            f"{' or '.join(DETERMINISTIC_CUBLAS)}"
        )
    if arguments.ddp_backend == "nccl" and use_cpu:
        problems.append("--ddp_backend nccl needs GPUs; leave it out or use gloo")
    processes = max(local_world_size, local_rank + 1)
    if not use_cpu and processes > machine.gpus:
        problems.append(
            f"{processes} processes on this machine but {machine.gpus} GPU(s); start one process per GPU"
        )
    raise_problems(problems)
    return Launch(
        launcher=_launcher(arguments.local_rank),
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        use_cpu=use_cpu,
        backend=arguments.ddp_backend or ("gloo" if use_cpu else "nccl"),
        precision=precision,
        timeout_seconds=arguments.ddp_timeout,
        deepspeed_file=file,
        deepspeed_config=config,
        max_grad_norm=arguments.max_grad_norm,
        tf32=arguments.tf32 and not use_cpu,
        full_determinism=arguments.full_determinism,
        torch_compile=torch_compile,
        fsdp=settings,
        dropout_by_row=by_row,
    )


def _dropout_by_row(arguments: Any, use_cpu: bool, compiles: bool, problems: list[str]) -> bool:
    """Whether dropout is by row; adds what prevents --dropout_by row to `problems`."""
    attention = getattr(arguments, "attn_implementation", None)
    obstacles = {
        "torch.compile": compiles,
        f"--attn_implementation {attention}": attention not in (None, "eager", "sdpa"),
    }
    obstacle = next((name for name, present in obstacles.items() if present), None)
    if arguments.dropout_by == "row" and obstacle is not None:
        problems.append(f"--dropout_by row does not work with {obstacle}; leave one of them out")
    if arguments.dropout_by is None:
        return use_cpu and obstacle is None
    return arguments.dropout_by == "row"


def _ranks_and_sizes() -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local world size). Raises `InputError` for values that a shell may have
    kept from another job."""
    names, env = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), os.environ
    if wrong := [name for name in names if not (env.get(name) or "0").isdecimal()]:
        advice = LEFTOVER_ADVICE.format(wrong[0])
        raise InputError(f"{wrong[0]}={env[wrong[0]]!r}: expected a whole number. {advice}")
    world_size = int(env.get("WORLD_SIZE") or 1)
    rank, local_rank = (int(env.get(name) or 0) for name in ("RANK", "LOCAL_RANK"))
    # DeepSpeed's name first.
    local_size = int(env.get("LOCAL_SIZE") or env.get("LOCAL_WORLD_SIZE") or 1)
    # Not every launcher sets the local size.
    most_local = local_size if local_size > 1 else world_size
    for name, number, size in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, most_local)):
        if number >= size:
            raise InputError(
                f"{name}={number} but there are only {size} process(es). {LEFTOVER_ADVICE.format(name)}"
            )
    return rank, world_size, local_rank, local_size


def _missing_addresses(world_size: int) -> list[str]:
    """Missing variables that several processes need to find each other."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    return missing and [
        f"WORLD_SIZE={world_size} but {' and '.join(missing)} not set, so the processes cannot connect. "
        f"{LEFTOVER_ADVICE.format('WORLD_SIZE')}"
    ]


def _unsupported_launchers(world_size: int) -> list[str]:
    """Plugins of Accelerate, and launchers under which every process would run as if it were the only one."""
    env = os.environ
    problems = [
        f"the accelerate config asks for {name} ({variable}), which is not supported; use "
        "accelerate_configs/ddp.yaml, or zero2.yaml or zero3.yaml to save memory"
        for variable, name in UNSUPPORTED_PLUGINS.items()
        if is_on(env, variable)
    ]
    sized = [name for name in SIZES if env.get(name, "1") not in ("", "0", "1")]
    if world_size == 1 and sized:
        problems.append(
            f"MPI or srun started {env[sized[0]]} processes ({sized[0]}), each of which would train alone; "
            "have it start one torchrun on each machine (scripts/slurm/), or for independent runs unset "
            f"{' and '.join(sized)}"
        )
    elif is_on(env, "ACCELERATE_USE_CPU") and "MASTER_ADDR" in env and "WORLD_SIZE" not in env:
        problems.append(
            "the accelerate config asks for several processes on CPUs (MULTI_CPU) but Accelerate starts one; "
            "launch with accelerate_configs/cpu_ddp.yaml (MULTI_GPU with use_cpu: true), or torchrun"
        )
    return problems


def _torch_compile(problems: list[str]) -> bool:
    """Whether the accelerate config requests torch.compile; adds unsupported settings of it to `problems`."""
    env = os.environ
    backend = env.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend in ("no", ""):
        return False
    mode = env.get("ACCELERATE_DYNAMO_MODE", "default")
    if backend != "inductor" or mode != "default" or is_on(env, "ACCELERATE_DYNAMO_USE_FULLGRAPH"):
        problems.append(
            f"the accelerate config asks for dynamo_backend {backend} in dynamo_mode {mode}; only inductor "
            "in mode default without fullgraph is supported: leave dynamo_config out and give --torch_compile"
        )
    return True


def _launcher(local_rank: int | None) -> str:
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # users set others, such as ACCELERATE_LOG_LEVEL
        return "accelerate"
    if local_rank is not None or "CROSS_RANK" in os.environ:
        return "deepspeed"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "python"


def _read_deepspeed_config(arguments: Any, problems: list[str]) -> tuple[str | None, dict[str, Any] | None]:
    """(name of the DeepSpeed file, its content); None for each that is missing. Adds errors to `problems`."""
    requested, by_launcher = arguments.deepspeed, os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if not requested and not is_on(os.environ, "ACCELERATE_USE_DEEPSPEED"):
        return None, None
    file = requested or by_launcher or deepspeed.INLINE
    try:
        inline = file == deepspeed.INLINE
        config = deepspeed.inline_config(os.environ) if inline else deepspeed.read_config(file)
        if requested and by_launcher and deepspeed.read_config(by_launcher) != config:
            problems.append(
                f"--deepspeed {requested} but the accelerate config names {by_launcher}, which differs; keep "
                "one"
            )
        if is_on(os.environ, "ACCELERATE_USE_DEEPSPEED"):
            problems += deepspeed.beside_file(config, file, os.environ)
        return file, config
    except InputError as error:
        problems += error.problems
        return file, None


def _precision(
    requested: str | None, file: str | None, config: dict[str, Any] | None, problems: list[str]
) -> str:
    """The precision that the DeepSpeed file, --mixed_precision or the accelerate config requests, in this
    order. Adds contradictions to `problems`."""
    by_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if by_launcher not in ("no", "fp16", "bf16"):
        problems.append(
            f"the accelerate config asks for mixed_precision {by_launcher}; no, fp16 and bf16 are supported"
        )
    if requested is not None and by_launcher not in ("no", requested):
        problems.append(
            f"--mixed_precision {requested} but the accelerate config says {by_launcher}; keep one"
        )
    declared = deepspeed.declared_precision(config) if config is not None else None
    asked = {"--mixed_precision is": requested}
    if by_launcher != "no":  # the default of `accelerate launch`
        asked["the accelerate config says"] = by_launcher
    problems += [
        f'{file}: its precision is {declared} but {who} {precision}; make "enabled" "auto"'
        for who, precision in asked.items()
        if None not in (precision, declared) and precision != declared
    ]
    return declared or requested or by_launcher


def describe_group() -> None:
    """Sets the variables of a launcher for the process group that another library has opened, if any, such as
    Ray or Accelerate's `debug_launcher`."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    rank, hosts = dist.get_rank(), [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    sizes = {"WORLD_SIZE": len(hosts), "LOCAL_WORLD_SIZE": hosts.count(hosts[rank])}
    ranks = {"RANK": rank, "LOCAL_RANK": hosts[:rank].count(hosts[rank])}
    os.environ |= {name: str(number) for name, number in {**sizes, **ranks}.items()}
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        os.environ.setdefault(name, value)
