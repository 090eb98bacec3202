"""Starts a launch: the process group and the one Accelerator. `Run` has the collective operations."""

import contextlib
import logging
import os
import pickle
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
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
    patch_environment,
)
from torch.nn.parallel import DistributedDataParallel

from samerun import deepspeed, fsdp, machines, signals
from samerun.console import say
from samerun.errors import InputError, TrainingError, in_short, process_name
from samerun.fsdp import FsdpSettings
from samerun.kernels.products import use_fp32_for_bf16, use_openblas
from samerun.launch import Launch
from samerun.plan import BatchShape

GATHERED_BYTES = 2**26  # of predictions that rank 0 receives at once
PADDING = -100  # of predictions of different sizes, as in transformers' Trainer
NETWORK_WORDS = ("gloo", "connect", "address", "interface", "socket", "timed out")
QUIET_LOGGERS = ("accelerate", "torch.distributed", "transformers", "DeepSpeed", "bitsandbytes")
JOB_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_launcher_variables: dict[str, str | None] = {}  # what a run in this process has removed or replaced


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
        `join_rows`; the result is on rank 0's CPU, None elsewhere. In parts, because NCCL sends them from GPU
        to GPU, and one may hold its own rows, but not everybody's."""
        processes, received = self.launch.world_size, []
        if processes == 1:
            return tensor
        pieces = max(self.gather([1 + processes * tensor.nbytes // GATHERED_BYTES]))
        for piece in np.array_split(tensor.numpy(), pieces):
            parts = [None] * processes if self.is_main else None
            dist.gather_object(piece, parts)
            received.append(parts)
        if not self.is_main:
            return None
        return join_rows([torch.from_numpy(part) for parts in zip(*received, strict=True) for part in parts])

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
    handlers: list = [DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)]
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
    for name in JOB_VARIABLES:  # set below, or by Accelerate
        _launcher_variables.setdefault(name, os.environ.get(name))


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
    """Concatenates tensors of shape (rows, ...) along their rows. Narrower ones are filled up with PADDING (0
    for unsigned types) to the widest."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    if all(list(tensor.shape[1:]) == shape[1:] for tensor in tensors):
        return torch.cat(list(tensors))
    fill = PADDING if tensors[0].dtype.is_signed else 0
    joined = tensors[0].new_full((sum(map(len, tensors)), *shape[1:]), fill)
    for place, tensor in zip(joined.split(list(map(len, tensors))), tensors, strict=True):
        place[tuple(map(slice, tensor.shape))] = tensor
    return joined


@contextlib.contextmanager
def torch_as_at_start() -> Iterator[None]:
    """A context for a run in another program: gradients are on, inference mode and autocast off, and new
    tensors are fp32, whatever the program has set. Its settings come back afterwards."""
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def quiet_libraries(rank: int) -> None:
    """Silences warnings about intended behaviour."""
    # Other ranks would repeat rank 0's warnings. transformers warns about every parameter of a new head.
    level = logging.WARNING if rank == 0 else logging.ERROR
    for name in QUIET_LOGGERS:
        is_shared = name in ("accelerate", "torch.distributed")
        logging.getLogger(name).setLevel(level if is_shared else logging.ERROR)
    ignored = {"category": FutureWarning}
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    warnings.filterwarnings("ignore", module=r"torch\.distributed.*", **ignored)
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", **ignored)
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is", **ignored)  # by peft
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
