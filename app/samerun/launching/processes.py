"""Starts a run: process group and Accelerator."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    broadcast_object_list,
    gather_object,
)
from torch.nn.parallel import DistributedDataParallel

from samerun.errors import InputError, process_name
from samerun.launching import deepspeed_config, fsdp_config, fsdp_state, heartbeat, rendezvous, signals
from samerun.launching.fsdp_config import FsdpSettings
from samerun.launching.launch import Launch
from samerun.output.console import say
from samerun.plan import BatchShape

NETWORK_WORDS = ("gloo", "connect", "address", "interface", "socket", "timed out")


@dataclass(frozen=True)
class Run:
    """A started run: its launch, its Accelerator and its collective operations.

    All processes must call `prepare`, `sum`, `any`, `gather`, `gather_rows`, `broadcast`, `on_main` and
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
            return self.accelerator.prepare(model, build_optimizer(model))
        fsdp_state.shard(
            model, self.fsdp, self.device, torch.bfloat16 if self.launch.precision == "bf16" else None
        )
        # Adds autocast; evaluation_mode: no DDP.
        model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return model, self.accelerator.prepare_optimizer(build_optimizer(model))

    def print(self, *lines: str) -> None:
        """Prints on rank 0 only."""
        if self.is_main:
            say(*lines)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes."""
        heartbeat.progress()
        return tensor if self.launch.world_size == 1 else self.accelerator.reduce(tensor, "sum")

    def any(self, condition: bool) -> bool:
        """Whether a condition holds on any process."""
        return self.sum(torch.tensor(float(condition), device=self.device)).item() > 0

    def gather(self, records: list) -> list:
        """Concatenates the processes' lists."""
        heartbeat.progress()
        return records if self.launch.world_size == 1 else gather_object(records)

    def gather_rows(self, tensor: Any) -> Any:
        """Concatenates the processes' tensors, each (own rows, ...) on the CPU, along their rows; the result
        is on the CPU."""
        heartbeat.progress()
        if self.launch.world_size == 1:
            return tensor
        rows = torch.tensor([len(tensor)], device=self.device)
        counts = self.accelerator.gather(rows).tolist()
        padded = self.accelerator.pad_across_processes(tensor.to(self.device), dim=0)
        gathered = self.accelerator.gather_for_metrics(padded).cpu().split(max(counts))
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's value."""
        heartbeat.progress()
        return value if self.launch.world_size == 1 else broadcast_object_list([value])[0]

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on rank 0 and returns its result, or raises its exception, on every process."""
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.is_main:
            try:
                outcome = (work(), None)
            except Exception as error:
                outcome = (None, error)
        result, error = self.broadcast(outcome)
        if error is not None:
            raise error
        return result

    def wait(self) -> None:
        heartbeat.progress()
        self.accelerator.wait_for_everyone()

    def leave_process_group(self) -> bool:
        """Waits for the other processes and destroys NCCL's group. Returns whether there is a process
        group."""
        if not (dist.is_available() and dist.is_initialized()):
            return False
        self.wait()
        if self.launch.backend == "nccl":
            dist.destroy_process_group()
        return True


def start(
    launch: Launch, batch: BatchShape | None, report_to: tuple[str, ...] = (), output_dir: str | None = None
) -> Run:
    """Creates the process group and the Accelerator. `batch` is None for a run that does not train; it uses
    neither DeepSpeed nor FSDP, because without optimizer state every process can hold the whole model.

    Raises `InputError` for a DeepSpeed file that contradicts the run, and for machines that cannot reach each
    other.
    """
    quiet_libraries(launch)
    # Plain python has no launcher. DeepSpeed's launcher process is a child of the `deepspeed` command.
    signals.watch_launcher({"python": 0, "deepspeed": 2}.get(launch.launcher, 1))
    rendezvous.wait_until_ready(launch.timeout_seconds)
    if launch.use_cpu:
        # DeepSpeed reads this when it is imported. Accelerate's own CPU switch would silently disable
        # DeepSpeed.
        os.environ["DS_ACCELERATOR"] = "cpu"
        _divide_cores(launch)
    if launch.tf32:
        torch.set_float32_matmul_precision("high")
    config = _deepspeed_config(launch, batch)
    fsdp = launch.fsdp if batch is not None else None
    _clear_launcher_variables()
    handlers = _process_group_handlers(launch, config, fsdp)
    # DeepSpeed prints on every process while it starts; stdout belongs to rank 0.
    with contextlib.redirect_stdout(sys.stderr), _explain_connection_errors(launch):
        accelerator = Accelerator(
            cpu=launch.use_cpu and config is None,
            mixed_precision=launch.precision,
            gradient_accumulation_steps=batch.accumulation if batch else 1,
            deepspeed_plugin=deepspeed_config.plugin(config) if config else None,
            kwargs_handlers=handlers,
            log_with=[name for name in report_to if name not in ("none", "html")] or None,
            project_config=ProjectConfiguration(project_dir=output_dir, logging_dir=output_dir),
        )
    if config is not None:
        deepspeed_config.disable_partitioned_init(accelerator)
        deepspeed_config.set_group_timeout(timedelta(seconds=launch.timeout_seconds))
    if accelerator.num_processes != launch.world_size:
        raise InputError(
            f"the launcher started {launch.world_size} processes but {accelerator.num_processes} "
            "found each other; "
            "check the launcher's addresses and ports"
        )
    rendezvous.complete()
    if launch.world_size > 1:
        store = dist.PrefixStore("heartbeat", dist.distributed_c10d._get_default_store().clone())
        heartbeat.start(store, launch.rank, launch.world_size, launch.timeout_seconds)
        signals.on_immediate_stop(heartbeat.send_shutdown_notice)
    return Run(launch, accelerator, config, fsdp)


def launch_summary(run: Run) -> list[str]:
    """Describes launcher, processes, backend and precision; printed before the first step."""
    launch = run.launch
    stage = f"ZeRO-{launch.zero_stage} ({launch.deepspeed_file})" if run.deepspeed_config else "no ZeRO"
    if run.fsdp is not None:
        stage = f"FSDP2{', weights and optimizer in host memory' if run.fsdp.offload_params else ''}"
    tf32 = ", matrix products in TF32" if launch.tf32 else ""
    backend = launch.backend if launch.world_size > 1 or run.deepspeed_config else "no communication"
    owned = [key for key in deepspeed_config.OWNED_BY_ARGUMENTS if key in (launch.deepspeed_config or {})]
    notes = []
    if owned:
        notes.append(
            f"note           {' and '.join(owned)} of {launch.deepspeed_file}: ignored; "
            "--learning_rate etc. decide"
        )
    if run.fsdp is not None and run.fsdp.cpu_ram_efficient_loading:
        notes.append(
            "note           fsdp_cpu_ram_efficient_loading: ignored; every process builds the whole model"
        )
    return [
        f"launch         {launch.launcher}: {launch.world_size} process(es) on {run.device.type}, "
        f"{backend}, {stage}",
        f"precision      {launch.precision if launch.precision != 'no' else 'fp32'}{tf32}",
        *notes,
    ]


def _clear_launcher_variables() -> None:
    """Removes the variables whose settings the run applies itself: Accelerate would apply them again."""
    own = (
        "ACCELERATE_DYNAMO_BACKEND",
        fsdp_config.SWITCH,
        fsdp_config.BUILDS_ON_ONE_PROCESS,
        "ACCELERATE_CONFIG_DS_FIELDS",
    )
    for name in (*own, *deepspeed_config.INLINE_SETTINGS.values()):
        os.environ.pop(name, None)


def _process_group_handlers(
    launch: Launch, config: dict[str, Any] | None, fsdp: FsdpSettings | None
) -> list[Any]:
    """Accelerate's settings of DDP and of the process group. Opens the group itself after a restart."""
    # No broadcast of buffers: in encoders they are constants, and processes may evaluate different numbers of
    # batches.
    handlers: list[Any] = [
        DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    ]
    is_sharded = config is not None or fsdp is not None
    if is_sharded and launch.world_size == 1:
        _set_single_process_variables(launch)
    # With FSDP's offloading, gradients are in host memory and their norm needs gloo.
    needs_gloo = fsdp is not None and fsdp.offload_params and launch.backend == "nccl"
    backend, timeout = (
        "cuda:nccl,cpu:gloo" if needs_gloo else launch.backend,
        timedelta(seconds=launch.timeout_seconds),
    )
    _start_group_after_restart(launch, backend, timeout)
    if is_sharded or launch.world_size > 1:
        handlers.append(InitProcessGroupKwargs(backend=backend, timeout=timeout))
    return handlers


def _deepspeed_config(launch: Launch, batch: BatchShape | None) -> dict[str, Any] | None:
    """The complete DeepSpeed configuration; None if the run does not train under DeepSpeed."""
    if launch.deepspeed_config is None or batch is None:
        # With this variable Accelerate would start DeepSpeed with the launcher's file.
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        return None
    config = deepspeed_config.complete_config(
        launch.deepspeed_config, launch.deepspeed_file, batch, launch.max_grad_norm, launch.precision
    )
    deepspeed_config.check_by_deepspeed(config, launch.deepspeed_file)
    deepspeed_config.skip_shared_memory_operator()
    return config


@contextlib.contextmanager
def _explain_connection_errors(launch: Launch) -> Iterator[None]:
    """Raises `InputError` if the port is in use, or if machines cannot connect to each other after the
    rendezvous."""
    try:
        yield
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            port, host = os.environ.get("MASTER_PORT"), socket.gethostname()
            raise InputError(
                f"port {port} of {host} is in use, perhaps by another run; choose another "
                f"{rendezvous.PORT_OPTIONS}"
            ) from error
        is_network_error = any(word in str(error).lower() for word in NETWORK_WORDS)
        if launch.world_size == launch.local_world_size or launch.backend != "gloo" or not is_network_error:
            raise
        reason = str(error).strip().splitlines()[0][:300]
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        over = f"network interface {interface}" if interface else "their host names"
        raise InputError(
            f"{process_name()}: cannot connect to all other processes over {over} ({reason}). "
            "Machines must reach each "
            "other on every port; set GLOO_SOCKET_IFNAME to the network interface that they share"
        ) from error


def _divide_cores(launch: Launch) -> None:
    if launch.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))


def _set_single_process_variables(launch: Launch) -> None:
    """Sets the variables of a process group of one process, which DeepSpeed and FSDP need, if no launcher
    has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    defaults = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    # Under plain python existing values are from another job in the same shell.
    os.environ.update(defaults if launch.launcher == "python" else {**defaults, **os.environ})


def _start_group_after_restart(launch: Launch, backend: str, timeout: timedelta) -> None:
    """Opens the process group of a job that torchrun has restarted, under a new prefix in the store.

    With a static rendezvous (`--master_port`, `accelerate launch`) the launcher keeps its store over restarts
    (torch 2.13), and new processes would read the addresses of dead ones. Accelerate uses an existing group.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*address, launch.world_size, is_master=False, timeout=timeout)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"restart {restarts}", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )


def quiet_libraries(launch: Launch) -> None:
    """Silences warnings about intended behaviour."""
    # Other ranks would repeat rank 0's warnings. transformers warns about every parameter of a new head.
    level = logging.WARNING if launch.rank == 0 else logging.ERROR
    for name in ("accelerate", "torch.distributed"):
        logging.getLogger(name).setLevel(level)
    for name in ("transformers", "DeepSpeed", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    warnings.filterwarnings("ignore", category=FutureWarning, message="`broadcast_buffers` is deprecated")
    warnings.filterwarnings(
        "ignore", category=FutureWarning, message="`is_gradient_checkpointing` is deprecated"
    )  # by peft
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
