"""Describes and starts a launch: launcher, processes, backend, precision, DeepSpeed or FSDP.

`describe_launch` only reads the environment and the arguments, so that bad input ends a job before a process
group exists. `connect` and `start` create the group and the one Accelerator; `Run` has the collective
operations.
"""

import contextlib
import itertools
import logging
import os
import pickle
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    broadcast_object_list,
    gather_object,
    is_bf16_available,
    patch_environment,
)
from torch.distributed import Backend
from torch.nn.parallel import DistributedDataParallel

from samerun import deepspeed, fsdp, machines, signals
from samerun.console import say
from samerun.errors import InputError, TrainingError, in_short, process_name, raise_problems
from samerun.fsdp import FsdpSettings, is_on
from samerun.kernels.products import use_fp32_for_bf16, use_openblas
from samerun.plan import BatchShape

LEFTOVER_ADVICE = "If the variable is left over in this shell: unset {}; else start the job with torchrun"
# Plugins by which Accelerate would wrap the model, so that checkpoints and exports cannot read it.
UNSUPPORTED_PLUGINS = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# With other workspaces cuBLAS may give other results when several streams run (its documentation,
# "Results Reproducibility").
DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")
GATHERED_BYTES = 2**26  # of predictions that rank 0 receives at once
PADDING = -100  # of predictions of different sizes, as in transformers' Trainer
NETWORK_WORDS = ("gloo", "connect", "address", "interface", "socket", "timed out")
_launcher_variables: dict[str, str | None] = {}  # what a run in this process has removed


@dataclass(frozen=True)
class Machine:
    """The devices of one machine."""

    gpus: int
    bf16: bool  # whether its GPUs support it
    kind: str = "cuda"  # torch's device type: cuda, xpu, npu, mps


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
    gpu: str = "cuda"  # torch's device type of the machine's accelerators
    torch_compile: bool = False  # the accelerate config requests it
    fsdp: FsdpSettings | None = None
    dropout_by_row: bool = False  # otherwise dropout is torch's (see `kernels.dropout`)

    @property
    def device_type(self) -> str:
        return "cpu" if self.use_cpu else self.gpu

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
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return Machine(0, True)
    if device.type == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)  # emulation is slow
    else:
        bf16 = is_bf16_available()
    return Machine(torch.accelerator.device_count(), bf16, device.type)


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
    device_type = "cpu" if use_cpu else machine.kind

    problems = _unsupported_launchers(world_size)
    torch_compile = _torch_compile(problems)
    if world_size > 1 and not is_planned:
        problems += _missing_addresses(world_size)
    file, config = _read_deepspeed_config(arguments, problems)
    settings = fsdp.read_settings(os.environ, problems)
    precision = _precision(arguments.mixed_precision, config, problems)
    if config is not None:
        problems += deepspeed.problems(config, file, arguments.max_grad_norm, arguments.mixed_precision)
    if settings is not None and file is not None:
        problems.append(f"--deepspeed {file} but the accelerate config asks for FSDP; keep one")
    if settings is not None and precision == "fp16":
        problems.append(
            "fp16 is not supported under FSDP; use bf16, or ZeRO (accelerate_configs/zero3.yaml) in fp16"
        )
    if settings is not None and settings.offload_params and device_type not in ("cpu", "cuda"):
        problems.append(f"{fsdp.SOURCE}: fsdp_offload_params is not supported on {device_type}; leave it out")
    if precision == "fp16" and device_type in ("cpu", "mps"):
        device = "a CPU" if device_type == "cpu" else "MPS"
        problems.append(f"fp16 is not available on {device}; use bf16 or no mixed precision")
    if precision == "bf16" and device_type != "cpu" and not machine.bf16:
        problems.append("bf16 is not available on this GPU; use fp16 or no mixed precision")
    compiles = (arguments.torch_compile or torch_compile) and deepspeed.stage_of(config or {}) != 3
    by_row = _dropout_by_row(arguments, device_type, compiles, problems)
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if arguments.full_determinism and not use_cpu and workspace not in DETERMINISTIC_CUBLAS:
        problems.append(
            f"--full_determinism but CUBLAS_WORKSPACE_CONFIG is {workspace}; unset it, or set it to "
            f"{' or '.join(DETERMINISTIC_CUBLAS)}"
        )
    backend = Backend.default_device_backend_map.get(device_type, "gloo")
    if arguments.ddp_backend not in (None, "gloo", backend):
        why = "needs GPUs" if use_cpu else f"is not the backend of {device_type} devices ({backend})"
        problems.append(f"--ddp_backend {arguments.ddp_backend} {why}; leave it out or use gloo")
    if not use_cpu and local_world_size > machine.gpus:
        problems.append(
            f"{local_world_size} processes on this machine but {machine.gpus} GPU(s); start one process per "
            "GPU"
        )
    raise_problems(problems)
    return Launch(
        launcher=_launcher(arguments.local_rank),
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
        full_determinism=arguments.full_determinism,
        gpu=machine.kind,
        torch_compile=torch_compile,
        fsdp=settings,
        dropout_by_row=by_row,
    )


def _dropout_by_row(arguments: Any, device_type: str, compiles: bool, problems: list[str]) -> bool:
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
        return device_type == "cpu" and obstacle is None
    return arguments.dropout_by == "row"


def _ranks_and_sizes() -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local world size). Raises `InputError` naming an impossible value, which
    a shell may have kept from another job."""
    world_size = _whole_number("WORLD_SIZE", 1)
    # DeepSpeed's name first.
    local_size = _whole_number("LOCAL_SIZE" if "LOCAL_SIZE" in os.environ else "LOCAL_WORLD_SIZE", 1)
    rank, local_rank = _whole_number("RANK", 0), _whole_number("LOCAL_RANK", 0)
    # Not every launcher sets the local size.
    most_local = local_size if local_size > 1 else world_size
    for name, number, size in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, most_local)):
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


def _missing_addresses(world_size: int) -> list[str]:
    """Missing or wrong variables that several processes need to find each other."""
    port = os.environ.get("MASTER_PORT", "")
    missing = [name for name in ("RANK", "MASTER_ADDR") if not os.environ.get(name)]
    if missing:
        what = f"WORLD_SIZE={world_size} but {' and '.join(missing)} not set"
    elif not port.isdecimal() or not 0 < int(port) < 65536:
        what = f"MASTER_PORT={port!r} is no port"
    else:
        return []
    return [f"{what}, so the processes cannot connect. {LEFTOVER_ADVICE.format('WORLD_SIZE')}"]


def _unsupported_launchers(world_size: int) -> list[str]:
    """Plugins of Accelerate, and launchers under which every process would run as if it were the only one."""
    env = os.environ
    problems = [
        f"the accelerate config asks for {name} ({variable}), which is not supported; use "
        "accelerate_configs/ddp.yaml, or zero2.yaml or zero3.yaml to save memory"
        for variable, name in UNSUPPORTED_PLUGINS.items()
        if is_on(env, variable)
    ]
    advice = "launch with accelerate_configs/cpu_ddp.yaml (MULTI_GPU with use_cpu: true), or torchrun"
    by_mpi = next((name for name in MPI_SIZES if env.get(name, "1") not in ("", "0", "1")), None)
    if world_size == 1 and by_mpi is not None:
        problems.append(f"MPI started {env[by_mpi]} processes ({by_mpi}), which is not supported; {advice}")
    elif is_on(env, "ACCELERATE_USE_CPU") and "MASTER_ADDR" in env and "WORLD_SIZE" not in env:
        problems.append(
            "the accelerate config asks for several processes on CPUs (MULTI_CPU) but Accelerate starts "
            f"one; {advice}"
        )
    return problems


def _torch_compile(problems: list[str]) -> bool:
    """Whether the accelerate config requests torch.compile; adds unsupported settings of it to `problems`."""
    env = os.environ
    backend = env.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    mode = env.get("ACCELERATE_DYNAMO_MODE", "default")
    fullgraph = env.get("ACCELERATE_DYNAMO_USE_FULLGRAPH", "False").lower()
    if backend in ("no", ""):
        return False
    if backend != "inductor" or mode != "default" or is_on(env, "ACCELERATE_DYNAMO_USE_FULLGRAPH"):
        problems.append(
            f"the accelerate config asks for dynamo_backend {backend}, dynamo_mode {mode}, "
            f"dynamo_use_fullgraph {fullgraph}; only inductor in mode default without fullgraph is "
            "supported: leave dynamo_config out and give --torch_compile"
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
    requested = arguments.deepspeed
    by_launcher = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    is_enabled = is_on(os.environ, "ACCELERATE_USE_DEEPSPEED")
    file = requested or (by_launcher if is_enabled else None)
    if file is None:
        if not is_enabled:
            return None, None
        return deepspeed.INLINE, deepspeed.inline_config(os.environ, problems)
    try:
        config = deepspeed.read_config(file)
        if requested and by_launcher and deepspeed.read_config(by_launcher) != config:
            problems.append(
                f"--deepspeed {requested} but the accelerate config names {by_launcher}, which differs; keep "
                "one"
            )
        return file, config
    except InputError as error:
        problems += error.problems
        return file, None


def _precision(requested: str | None, config: dict[str, Any] | None, problems: list[str]) -> str:
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
    return declared or requested or by_launcher


# A started run


@dataclass(frozen=True)
class Run:
    """A started run: its launch, its Accelerator and its collective operations.

    All processes must call `prepare`, `sum`, `any`, `gather`, `gather_rows`, `broadcast`, `from_rank0` and
    `wait`.
    """

    launch: Launch
    accelerator: Accelerator
    deepspeed_config: dict[str, Any] | None  # complete; None without DeepSpeed or training
    fsdp: FsdpSettings | None = None  # None without FSDP or training

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def unwrapped(self, model: Any) -> Any:
        """The model without its DDP or DeepSpeed wrapper; FSDP2 has none."""
        if self.deepspeed_config is not None:
            return self.accelerator.unwrap_model(model)
        # Not `unwrap_model`: it imports an installed DeepSpeed, which takes half a second.
        return model.module if isinstance(model, DistributedDataParallel) else model

    def prepare(
        self, model: torch.nn.Module, build_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    ) -> tuple[Any, Any]:
        """Prepares a model that is whole on every process, and its optimizer, with Accelerate; under FSDP
        shards the model first. Raises `InputError` for FSDP settings that do not fit the model."""
        if self.fsdp is None:
            model, optimizer = self.accelerator.prepare(model, build_optimizer(model))
            if self.deepspeed_config is not None:
                deepspeed.stay_at_smallest_scale(model)
            return model, optimizer
        fsdp.shard(model, self.fsdp, self.device, torch.bfloat16 if self.launch.precision == "bf16" else None)
        # Adds autocast; evaluation_mode: no DDP.
        model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return model, self.accelerator.prepare_optimizer(build_optimizer(model))

    def print(self, *lines: str) -> None:
        if self.is_main:
            say(*lines)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes."""
        machines.progress()
        return tensor if self.launch.world_size == 1 else self.accelerator.reduce(tensor, "sum")

    def any(self, condition: bool) -> bool:
        """Whether a condition holds on any process."""
        return self.sum(torch.tensor(float(condition), device=self.device)).item() > 0

    def gather(self, records: list) -> list:
        """Concatenates the processes' lists."""
        machines.progress()
        return records if self.launch.world_size == 1 else gather_object(records)

    def gather_rows(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Concatenates the processes' tensors, each (own rows, ...) on the CPU, along their rows, as
        `join_rows`; the result is on rank 0's CPU, None elsewhere. In parts, because a GPU may hold its own
        rows, but not everybody's."""
        machines.progress()
        processes = self.launch.world_size
        if processes == 1:
            return tensor
        shape = torch.tensor(tensor.shape, device=self.device)
        counts = [int(count) for count in self._gather_equal(shape[:1])]
        dist.all_reduce(shape, dist.ReduceOp.MAX)
        rows, *sizes = shape.tolist()
        padded = widened(tensor, [rows, *sizes])
        received = [[padded[:0].cpu()] for _ in counts]
        step = max(1, GATHERED_BYTES // (processes * max(1, padded[:1].nbytes)))
        for first in range(0, rows, step):
            parts = self._gather_equal(padded[first : first + step].to(self.device))
            for own, count, part in zip(received, counts, parts, strict=True):
                own.append(part[: max(0, count - first)].cpu())
        return torch.cat(list(itertools.chain(*received))) if self.is_main else None

    def _gather_equal(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The processes' tensors, of one shape, on rank 0; an empty list elsewhere."""
        parts = [torch.empty_like(tensor) for _ in range(self.launch.world_size)] if self.is_main else []
        dist.gather(tensor.contiguous(), parts or None)
        return parts

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value."""
        machines.progress()
        return value if self.launch.world_size == 1 else broadcast_object_list([value])[0]

    def from_rank0(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on rank 0 and returns its result, or raises its exception, on every process."""
        result = own = None
        if self.is_main:
            try:
                result = work()
            except Exception as error:
                own = error
        result, error = self.broadcast((result, None if own is None else _to_send(own)))
        if error is not None:
            raise error if own is None else own
        return result

    def wait(self) -> None:
        """Waits for the other processes. Not Accelerate's barrier: it names a CUDA device also for gloo on
        CPUs, wherever torch is built for CUDA."""
        self.any(False)

    def close_process_group(self) -> None:
        """Destroys NCCL's group."""
        if self.launch.backend == "nccl" and dist.is_initialized():
            dist.destroy_process_group()

    def summary(self) -> list[str]:
        """Describes launcher, processes, backend and precision; printed before the first step."""
        launch = self.launch
        stage = f"ZeRO-{launch.zero_stage} ({launch.deepspeed_file})" if self.deepspeed_config else "no ZeRO"
        if self.fsdp is not None:
            stage = f"FSDP2{', weights and optimizer in host memory' if self.fsdp.offload_params else ''}"
        backend = launch.backend if launch.world_size > 1 or self.deepspeed_config else "no communication"
        precision = launch.precision if launch.precision != "no" else "fp32"
        lines = [
            f"launcher       {launch.launcher}: {launch.world_size} process(es) on {self.device.type}, "
            f"{backend}, {stage}",
            f"precision      {precision}{', matrix products in TF32' if launch.tf32 else ''}"
            f"{', deterministic algorithms' if launch.full_determinism and not launch.use_cpu else ''}",
        ]
        if launch.full_determinism and launch.use_cpu:
            lines.append(
                "note           --full_determinism: changes nothing on a CPU, where runs repeat anyway"
            )
        owned = [key for key in deepspeed.OWNED_BY_ARGUMENTS if key in (launch.deepspeed_config or {})]
        if owned:
            lines.append(
                f"note           {' and '.join(owned)} of {launch.deepspeed_file}: ignored; --learning_rate "
                "etc. decide"
            )
        if self.fsdp is not None and self.fsdp.cpu_ram_efficient_loading:
            lines.append(
                "note           fsdp_cpu_ram_efficient_loading: ignored; every process builds the whole model"
            )
        return lines


def _to_send(error: Exception) -> Exception:
    """The exception, or one with its message if the other processes could not unpickle it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TrainingError(f"rank 0: {type(error).__name__}: {in_short(error)}")
    return error


def connect(launch: Launch, compared: dict[str, Any], timeout: float) -> None:
    """Waits until every process of a job on several machines has started, compares their inputs (see
    `machines.meet`) and opens the process group. Does nothing on one machine.

    Raises `InputError` naming the machines that did not come within `timeout` seconds, or every difference.
    """
    if launch.world_size > launch.local_world_size and not dist.is_initialized():
        store = machines.open_store(launch, timeout)
        machines.meet(store, launch, compared, timeout)
        _open_group(launch, store)


def start(
    launch: Launch, batch: BatchShape | None, report_to: tuple[str, ...] = (), output_dir: str | None = None
) -> Run:
    """Creates the process group, unless there is one, and the Accelerator.

    `batch` is None for a run that does not train; it uses neither DeepSpeed nor FSDP, because without
    optimizer state every process can hold the whole model.

    Raises `InputError` for a DeepSpeed file that contradicts the run, and for processes that cannot connect.
    """
    quiet_libraries(launch.rank)
    # Plain python has no launcher. DeepSpeed's launcher process is a child of the `deepspeed` command.
    signals.watch_launcher({"python": 0, "deepspeed": 2}.get(launch.launcher, 1))
    if launch.world_size > 1 and not dist.is_initialized():  # `connect` has opened that of several machines
        _open_group(launch, machines.open_store(launch, launch.timeout_seconds))
    if launch.use_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads this when it is imported
        if launch.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))
    if launch.full_determinism and not launch.use_cpu:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    set_products(launch)
    config = None
    if launch.deepspeed_config is not None and batch is not None:
        config = deepspeed.complete_config(
            launch.deepspeed_config, launch.deepspeed_file, batch, launch.max_grad_norm, launch.precision
        )
        deepspeed.check_by_deepspeed(config, launch.deepspeed_file)
        deepspeed.skip_shared_memory_operator()
    settings = launch.fsdp if batch is not None else None
    _clear_launcher_variables()
    # No broadcast of buffers: in encoders they are constants, and processes may evaluate different numbers of
    # batches.
    handlers: list[Any] = [
        DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    ]
    timeout = timedelta(seconds=launch.timeout_seconds)
    if launch.world_size > 1 or config is not None or settings is not None:
        handlers.append(InitProcessGroupKwargs(backend=_group_backend(launch), timeout=timeout))
        if launch.world_size == 1:
            _set_single_process_variables(launch.launcher)
    if launch.world_size > 1:  # without it Accelerate takes each process of a job on GPUs for the only one
        os.environ.setdefault("LOCAL_RANK", str(launch.local_rank))
    device = {"ACCELERATE_TORCH_DEVICE": "cpu"} if launch.use_cpu and config is not None else {}
    # DeepSpeed prints on every process while it starts; stdout belongs to rank 0.
    with contextlib.redirect_stdout(sys.stderr), patch_environment(**device):
        accelerator = Accelerator(
            cpu=launch.use_cpu and config is None,  # it would disable DeepSpeed
            mixed_precision=launch.precision,
            gradient_accumulation_steps=batch.accumulation if batch else 1,
            deepspeed_plugin=DeepSpeedPlugin(config, zero3_init_flag=False) if config else None,
            kwargs_handlers=handlers,
            log_with=[name for name in report_to if name not in ("none", "html")] or None,
            project_config=ProjectConfiguration(project_dir=output_dir, logging_dir=output_dir),
        )
    if launch.world_size > 1 and accelerator.distributed_type == DistributedType.NO:
        raise InputError(
            f"the launcher started {launch.world_size} processes, but Accelerate would have each train "
            "alone; launch with torchrun or accelerate launch"
        )
    if config is not None:
        deepspeed.correct(accelerator, timeout)
    return Run(launch, accelerator, config, settings)


def set_products(launch: Launch) -> None:
    """Lets a GPU compute fp32 products in TF32 only if --tf32 asks for it: torch's own default is TF32 for
    convolutions. On a CPU OpenBLAS computes them where it is faster, and in bf16 fp32 products replace those
    of a CPU without instructions for it."""
    if launch.use_cpu and launch.precision == "bf16":
        use_fp32_for_bf16()
    elif launch.use_cpu:
        use_openblas()
    else:
        torch.set_float32_matmul_precision("high" if launch.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = launch.tf32


def _open_group(launch: Launch, store: Any) -> None:
    """Opens the process group in a job's store, and starts the heartbeat. Accelerate uses an existing group.

    Raises `InputError` if machines cannot connect to each other.
    """
    timeout = timedelta(seconds=launch.timeout_seconds)
    store.set_timeout(timeout)
    try:
        dist.init_process_group(
            _group_backend(launch),
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
    except RuntimeError as error:
        is_network_error = any(word in str(error).lower() for word in NETWORK_WORDS)
        if launch.world_size == launch.local_world_size or launch.backend != "gloo" or not is_network_error:
            raise
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        over = f"network interface {interface}" if interface else "their host names"
        raise InputError(
            f"{process_name()}: cannot connect to all other processes over {over} ({in_short(error)}). "
            "Machines must reach each other on every port; set GLOO_SOCKET_IFNAME to the network interface "
            "that they share"
        ) from error
    store = dist.PrefixStore("heartbeat", store.clone())
    machines.start(store, launch, signals.end_after_lost_peer)


def _group_backend(launch: Launch) -> str:
    # With FSDP's offloading, gradients are in host memory and their norm needs gloo.
    needs_gloo = launch.fsdp is not None and launch.fsdp.offload_params and launch.backend == "nccl"
    return "cuda:nccl,cpu:gloo" if needs_gloo else launch.backend


def _clear_launcher_variables() -> None:
    """Removes the variables whose settings the run applies itself: Accelerate would apply them again, such as
    DeepSpeed with the launcher's file. `forget_accelerator` restores them."""
    for name in (
        "ACCELERATE_DYNAMO_BACKEND",
        fsdp.SWITCH,
        fsdp.BUILDS_ON_ONE_PROCESS,
        "ACCELERATE_CONFIG_DS_FIELDS",
        *deepspeed.INLINE_SETTINGS.values(),
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_USE_CPU",  # switches DeepSpeed off
    ):
        _launcher_variables.setdefault(name, os.environ.pop(name, None))


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


def forget_accelerator() -> None:
    """Lets the next run in this process have its own Accelerator, and the launcher's settings: Accelerate
    keeps one state per process, and sets ACCELERATE_USE_DEEPSPEED."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name, value in _launcher_variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    _launcher_variables.clear()


def _set_single_process_variables(launcher: str) -> None:
    """Sets the variables of a process group of one process, which DeepSpeed and FSDP need, if no launcher
    has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    defaults |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    # Under plain python existing values are from another job in the same shell.
    os.environ.update(defaults if launcher == "python" else {**defaults, **os.environ})


def join_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates tensors of shape (rows, ...) along their rows. Narrower ones are filled up with PADDING to
    the widest."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    return torch.cat([widened(tensor, [len(tensor), *shape[1:]]) for tensor in tensors])


def widened(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor in a corner of one of this shape, which is PADDING elsewhere (0 for unsigned types)."""
    if list(tensor.shape) == list(shape):
        return tensor
    wide = tensor.new_full(tuple(shape), PADDING if tensor.dtype.is_signed else 0)
    wide[tuple(slice(size) for size in tensor.shape)] = tensor
    return wide


def quiet_libraries(rank: int) -> None:
    """Silences warnings about intended behaviour."""
    # Other ranks would repeat rank 0's warnings. transformers warns about every parameter of a new head.
    level = logging.WARNING if rank == 0 else logging.ERROR
    for name in ("accelerate", "torch.distributed"):
        logging.getLogger(name).setLevel(level)
    for name in ("transformers", "DeepSpeed", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ignored = {"category": FutureWarning}
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    warnings.filterwarnings("ignore", module=r"torch\.distributed.*", **ignored)
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", **ignored)
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is", **ignored)  # by peft
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
