"""Processes, backend, precision: which launcher started us, what it asks for, and what is in force. Level 4.

`describe_launch` reads the environment before anything is started, so that bad input ends a job before a process group
exists; `start` then creates the one Accelerator of the run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from finetune import background, meeting, status, stop, zero
from finetune.failure import EXIT_STOPPED, EXIT_TRAINING_FAILED, InputError, StopRequested, TrainingError
from finetune.plan import BatchShape

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Machine:
    """The part of a machine that a launch depends on."""

    gpus: int
    bf16: bool  # whether its GPUs have it


@dataclass(frozen=True)
class Launch:
    """What the launcher and the arguments ask for; known before any process group exists."""

    launcher: str  # python, torchrun, accelerate, deepspeed
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    use_cpu: bool
    backend: str  # nccl or gloo
    precision: str  # no, fp16, bf16
    timeout_seconds: int
    deepspeed_file: str | None
    deepspeed_config: dict[str, Any] | None
    max_grad_norm: float

    @property
    def zero_stage(self) -> int:
        return zero.stage_of(self.deepspeed_config) if self.deepspeed_config else 0


@dataclass(frozen=True)
class Run:
    """A started run: the Accelerator and the few things that are done over all processes."""

    launch: Launch
    accelerator: Any
    deepspeed_config: dict[str, Any] | None  # complete, as DeepSpeed gets it

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def device(self) -> Any:
        return self.accelerator.device

    def print(self, *lines: str) -> None:
        """Prints on rank 0 only."""
        if self.is_main:
            print(*lines, sep="\n", flush=True)

    def sum(self, tensor: Any) -> Any:
        """The sum of a tensor over all processes, on every process."""
        return tensor if self.launch.world_size == 1 else self.accelerator.reduce(tensor, "sum")

    def gather(self, records: list) -> list:
        """Concatenates the processes' lists, on every process."""
        from accelerate.utils import gather_object

        return records if self.launch.world_size == 1 else gather_object(records)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every process."""
        from accelerate.utils import broadcast_object_list

        return value if self.launch.world_size == 1 else broadcast_object_list([value])[0]

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on rank 0 and gives its result to all; an exception there is raised on every process."""
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
        self.accelerator.wait_for_everyone()


def this_machine() -> Machine:
    """What is here."""
    import torch

    if not torch.cuda.is_available():
        return Machine(0, True)
    return Machine(torch.cuda.device_count(), torch.cuda.is_bf16_supported())


def describe_launch(arguments: Any, machine: Machine | None = None) -> Launch:
    """Reads what the launcher set and what the arguments ask for; starts nothing. `machine`: the one to be launched on, if it
    is not this one.

    Raises `InputError` listing every contradiction between launcher, DeepSpeed file and arguments.
    """
    env, machine = os.environ, machine or this_machine()
    world_size, rank = int(env.get("WORLD_SIZE", 1)), int(env.get("RANK", 0))
    local_rank, local_world = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", 1)))
    use_cpu = machine.gpus == 0 or env.get("ACCELERATE_USE_CPU", "").lower() == "true"

    found: list[str] = []
    file, config = _deepspeed_config(arguments, found)
    precision = _precision(arguments, config, found)
    if config is not None:
        found += zero.problems(config, file, arguments.max_grad_norm, arguments.mixed_precision)
    if precision == "fp16" and use_cpu:
        found.append("fp16 is not available on a CPU; use bf16 or no mixed precision")
    if precision == "bf16" and not use_cpu and not machine.bf16:
        found.append("bf16 is not available on this GPU; use fp16 or no mixed precision")
    if arguments.ddp_backend == "nccl" and use_cpu:
        found.append("--ddp_backend nccl needs GPUs; leave it out or use gloo")
    if not use_cpu and local_world > machine.gpus:
        found.append(f"{local_world} processes on this machine but {machine.gpus} GPU(s); start as many as GPUs")
    if found:
        raise InputError(*found)
    return Launch(
        launcher=_launcher(arguments),
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world,
        use_cpu=use_cpu,
        backend=arguments.ddp_backend or ("gloo" if use_cpu else "nccl"),
        precision=precision,
        timeout_seconds=arguments.ddp_timeout,
        deepspeed_file=file,
        deepspeed_config=config,
        max_grad_norm=arguments.max_grad_norm,
    )


def start(launch: Launch, batch: BatchShape | None, report_to: tuple[str, ...] = (), output_dir: str | None = None) -> Run:
    """Creates the process group and the Accelerator. `batch` is None for a run that does not train: then no DeepSpeed either,
    as evaluation has no optimizer state to share out and runs on full copies.
    """
    _quiet_libraries(launch)
    # A shell may well end before its `python`; a launcher must not. DeepSpeed's has a parent: the command that users know.
    stop.watch_launcher({"python": 0, "deepspeed": 2}.get(launch.launcher, 1))
    meeting.wait_until_ready(launch.timeout_seconds)
    if launch.use_cpu:
        # DeepSpeed looks for an accelerator when it is imported; Accelerate's own CPU switch would drop DeepSpeed silently.
        os.environ["DS_ACCELERATOR"] = "cpu"
        _share_cores(launch)

    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, ProjectConfiguration

    config = None
    if launch.deepspeed_config is not None and batch is not None:
        _single_process_group(launch)
        config = zero.complete_config(
            launch.deepspeed_config, launch.deepspeed_file, batch, launch.max_grad_norm, launch.precision
        )
    else:
        # Accelerate would read these again and start DeepSpeed from them.
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    timeout = timedelta(seconds=launch.timeout_seconds)
    # Buffers are constants in encoders; without their broadcast processes may evaluate at their own pace.
    handlers: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)]
    if launch.world_size > 1 or config is not None:
        handlers.append(InitProcessGroupKwargs(backend=launch.backend, timeout=timeout))
    # DeepSpeed prints on every process while it starts; what is printed is rank 0's.
    with contextlib.redirect_stdout(sys.stderr), _roads_explained(launch):
        accelerator = Accelerator(
            cpu=launch.use_cpu and config is None,
            mixed_precision=launch.precision,
            gradient_accumulation_steps=batch.accumulation if batch else 1,
            deepspeed_plugin=zero.plugin(config) if config else None,
            kwargs_handlers=handlers,
            log_with=[name for name in report_to if name != "none"] or None,
            project_config=ProjectConfiguration(project_dir=output_dir, logging_dir=output_dir),
        )
    if config is not None:
        zero.build_models_whole(accelerator)
    if accelerator.num_processes != launch.world_size:
        raise InputError(
            f"the launcher started {launch.world_size} processes but {accelerator.num_processes} found each other; "
            "check the launcher's addresses and ports"
        )
    meeting.closed()
    return Run(launch, accelerator, config)


def in_force(run: Run) -> list[str]:
    """What the launch came to, in words; printed before the first step."""
    launch = run.launch
    stage = f"ZeRO-{launch.zero_stage} ({launch.deepspeed_file})" if run.deepspeed_config else "no ZeRO"
    backend = launch.backend if launch.world_size > 1 or run.deepspeed_config else "no communication"
    return [
        f"launch         {launch.launcher}: {launch.world_size} process(es) on {run.device.type}, {backend}, {stage}",
        f"precision      {launch.precision if launch.precision != 'no' else 'fp32'}",
    ]


@contextlib.contextmanager
def failures_end_the_job(debug: bool) -> Iterator[None]:
    """Turns the exceptions of `failure.py` into one message and an exit code; any other keeps its stack trace.

    A message that every process of a machine has is printed by the first. The others wait a moment before they speak: the
    launcher has ended them by then, unless the first one is well, and then their message is the one that counts.
    """
    code = 0
    with stop.listen():
        try:
            yield
        except StopRequested as error:
            code = error.exit_code  # `stop_here` has told why
        except (InputError, TrainingError) as error:
            code = error.exit_code
            status.end("failed", str(error))
            stop.end_with(code, said=True)
            meeting.leave_word(getattr(error, "problems", [str(error)]), code)
            if os.environ.get("LOCAL_RANK", "0") != "0":
                time.sleep(3)
            if debug:
                traceback.print_exc()
            print(_message(error), file=sys.stderr, flush=True)
        except Exception as error:
            code = EXIT_TRAINING_FAILED
            status.end("failed", f"{type(error).__name__}: {error}")
            stop.end_with(code, said=True)
            meeting.leave_word([f"{type(error).__name__}: {error}"], code)
            # The echo of a failure elsewhere; it waits, so that the cause is printed first and the launcher ends this.
            # Nothing is left to say if the launcher has begun to.
            echo = any(word in str(error) for word in ("closed by peer", "reset by peer"))
            if echo and stop.requested() is None:
                time.sleep(3)
            if not echo or stop.requested() is None:
                traceback.print_exc()
                print(f"error on {_where()}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if code:
            sys.stdout.flush()
            background.finish_all()
            # Not sys.exit: a process group that lost its peers can hang in its destructors.
            stop.leave(code)


def stop_here(run: Run, where: str) -> NoReturn:
    """Says on rank 0, once, who asked the run to stop and `where` it does; raises `StopRequested` on every process, all of
    which must call it."""
    asked = [(rank, why) for rank, why in run.gather([(run.launch.rank, stop.requested())]) if why is not None]
    reason = ", ".join(sorted({why for _, why in asked}))
    message = f"stopped on request ({reason}; rank {', '.join(str(rank) for rank, _ in asked)}): {where}"

    def say() -> None:
        status.end("stopped", reason)
        print(message, file=sys.stderr, flush=True)

    run.on_main(say)
    stop.end_with(EXIT_STOPPED, said=True)
    for tracker in run.accelerator.trackers:
        tracker.finish()
    raise StopRequested(message)


def finish(run: Run) -> None:
    """Closes trackers and the process group, and ends a process that had one, with exit code 0.

    The interpreter is not torn down then: DeepSpeed keeps references to process groups whose threads outlive the
    interpreter, and one that wakes up too late aborts a process whose work is done ("terminate called without an active
    exception"; seen once, in a ZeRO-2 run over two launchers).
    """
    stop.end_with(0, said=True)
    status.end("done")
    run.accelerator.end_training()
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _message(error: Exception) -> str:
    problems = getattr(error, "problems", [str(error)])
    if len(problems) == 1:
        return f"error: {problems[0]}"
    return f"{len(problems)} errors:\n" + "\n".join(f"  - {problem}" for problem in problems)


def _where() -> str:
    return f"rank {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')} ({socket.gethostname()})"


def _launcher(arguments: Any) -> str:
    if any(name.startswith("ACCELERATE_") and name != "ACCELERATE_USE_DEEPSPEED" for name in os.environ):
        return "accelerate"
    if arguments.local_rank is not None or "CROSS_RANK" in os.environ:
        return "deepspeed"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "python"


def _deepspeed_config(arguments: Any, found: list[str]) -> tuple[str | None, dict[str, Any] | None]:
    asked = arguments.deepspeed or arguments.deepspeed_config
    by_launcher = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    uses = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    file = asked or (by_launcher if uses else None)
    try:
        config = zero.read_config(file, search=(REPOSITORY,)) if file else None
        if asked and by_launcher and zero.read_config(by_launcher, search=(REPOSITORY,)) != config:
            found.append(f"--deepspeed {asked} but the accelerate config names {by_launcher}, which differs; keep one")
        if file:
            return file, config
    except InputError as error:
        found += error.problems
        return file, None
    if uses:
        found.append(
            "the accelerate config asks for DeepSpeed without a file; name one: deepspeed_config_file: ds_configs/zero2.json"
        )
    return None, None


def _precision(arguments: Any, config: dict[str, Any] | None, found: list[str]) -> str:
    # Accelerate sets "no" where its config says nothing, so "no" from there is not a wish.
    by_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    asked = arguments.mixed_precision
    if config is not None:
        return zero.stated_precision(config) or asked or by_launcher
    if by_launcher not in ("no", "fp16", "bf16"):
        found.append(f"the accelerate config asks for mixed_precision {by_launcher}; no, fp16 and bf16 are supported")
    if asked is not None and by_launcher not in ("no", asked):
        found.append(f"--mixed_precision {asked} but the accelerate config says {by_launcher}; keep one")
    return asked or by_launcher


@contextlib.contextmanager
def _roads_explained(launch: Launch) -> Iterator[None]:
    """Says what to look at when processes that have met cannot connect to each other."""
    try:
        yield
    except RuntimeError as error:
        if launch.world_size == launch.local_world_size or launch.backend != "gloo" or not _of_a_network(str(error)):
            raise
        reason = str(error).strip().splitlines()[0][:300]
        raise InputError(
            f"{_where()}: met the others, but cannot connect to each of them over {_card()} ({reason}). Machines must reach "
            "each other on every port; GLOO_SOCKET_IFNAME names the network card that they share"
        ) from error


def _of_a_network(message: str) -> bool:
    return any(word in message.lower() for word in ("gloo", "connect", "address", "interface", "socket", "timed out"))


def _card() -> str:
    return f"network card {os.environ['GLOO_SOCKET_IFNAME']}" if "GLOO_SOCKET_IFNAME" in os.environ else "their host names"


def _share_cores(launch: Launch) -> None:
    if launch.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))


def _single_process_group(launch: Launch) -> None:
    """DeepSpeed needs a process group even for one process; `python` and a one-process launcher do not provide for one."""
    if launch.world_size > 1:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _quiet_libraries(launch: Launch) -> None:
    import logging
    import warnings

    # Rank 0 talks; the others would say the same again. transformers warns of every parameter that a new head lacks.
    level = logging.WARNING if launch.rank == 0 else logging.ERROR
    for name in ("accelerate", "torch.distributed"):
        logging.getLogger(name).setLevel(level)
    for name in ("transformers", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    warnings.filterwarnings("ignore", category=FutureWarning, message="`broadcast_buffers` is deprecated")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
