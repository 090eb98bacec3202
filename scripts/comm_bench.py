"""Measures the communication between the processes of a launch, and estimates its time in a model's training
step.

    torchrun --nproc_per_node 8 scripts/comm_bench.py --model_name_or_path bert-base-uncased
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/comm_bench.py --config_name FOLDER
    deepspeed --num_gpus 8 scripts/comm_bench.py --deepspeed ds_configs/zero3.json --mixed_precision bf16
    --config_name FOLDER

Launch it like the training. It measures all-reduce and broadcast for messages of growing size on the launch's
backend (NCCL on GPUs; gloo elsewhere or with --ddp_backend gloo). For each it prints the time, the median
over repeats of the slowest process, and the bus bandwidth, which is comparable with a link's speed for any
number of processes n:

    all-reduce  size / time * 2 (n - 1) / n        broadcast  size / time

(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

With a model, it also estimates the communication time of one optimizer step: the gradients in buckets, as DDP
sends them. ZeRO-1 and 2 send as much, ZeRO-3 1.5 times as much (arXiv:1910.02054, section 7). Gradient
accumulation does not multiply this time, and most of it overlaps with the backward pass.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app"))

from samerun.arguments import LaunchArguments, ModelArguments
from samerun.errors import InputError
from samerun.parsing import option, parse
from samerun.runtime import connect, describe_launch, start
from samerun.signals import exit_done, failures_end_the_job, finish

BUCKET = 25 * 2**20  # bytes; DistributedDataParallel's default bucket_cap_mb
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, kw_only=True)
class BenchArguments:
    """Benchmark"""

    max_size_mb: int = option(256, at_least=1, help="largest message, in MiB")
    repeats: int = option(20, at_least=1, help="how often each message is sent")
    output: str | None = option(help="write the measurements to this json file too")
    debug: bool = option(False, help="show the stack trace of an error")
    max_grad_norm: float = option(1.0, help="what a DeepSpeed file may state", hidden=True)
    torch_compile: bool = option(False, help="nothing is compiled", hidden=True)
    dropout_by: str | None = option(help="nothing is dropped", hidden=True)


@dataclass(frozen=True, kw_only=True)
class Arguments(LaunchArguments, ModelArguments, BenchArguments):
    """Communication benchmark; of the model, only the configuration is read"""


def main(arguments: Arguments) -> None:
    launch = describe_launch(arguments)
    if launch.world_size < 2:
        raise InputError(
            "found one process, expected two or more; launch with torchrun --nproc_per_node 2, for example"
        )
    parameters = count_parameters(arguments) if launch.rank == 0 else None
    connect(launch, {}, arguments.start_timeout)
    run = start(launch, None)
    machines = len(set(run.gather([launch.rank - launch.local_rank])))
    run.print(
        f"communication  {launch.world_size} processes on {machines} machine(s), {launch.backend} "
        f"on {run.device.type}"
    )
    run.print(f"{'size':>10}{'all-reduce':>14}{'bus':>14}{'broadcast':>14}{'bus':>14}")
    rows = []
    for size in sizes(arguments.max_size_mb):
        rows.append(measure(run, size, arguments.repeats))
        run.print(line(rows[-1]))
    measured: dict[str, Any] = {
        "processes": launch.world_size,
        "machines": machines,
        "backend": launch.backend,
        "sizes": rows,
    }
    parameters = run.broadcast(parameters)
    if parameters is not None:
        measured |= step_communication(run, parameters, arguments.repeats)
        run.print(*explain(measured))
    if arguments.output:
        run.from_rank0(
            lambda: Path(arguments.output).write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
        )
    if finish(run):
        exit_done()


def sizes(max_size_mb: int) -> list[int]:
    """1 KiB, 4 KiB, ... and the largest size, in bytes."""
    largest = max_size_mb * MIB
    return [*(KIB * 4**power for power in range(32) if KIB * 4**power < largest), largest]


def bus_bandwidth(operation: str, size: int, seconds: float, processes: int) -> float:
    """Bytes per second, by the formulas of nccl-tests (see the module's docstring)."""
    factor = 2 * (processes - 1) / processes if operation == "all_reduce" else 1.0
    return size / seconds * factor


def measure(run: Any, size: int, repeats: int) -> dict[str, Any]:
    """One row of the table: times in seconds, bandwidths in bytes per second."""
    import torch

    tensor = torch.zeros(size // 4, dtype=torch.float32, device=run.device)
    row: dict[str, Any] = {"bytes": size}
    for name, send in (
        ("all_reduce", partial(torch.distributed.all_reduce, tensor)),
        ("broadcast", partial(torch.distributed.broadcast, tensor, 0)),
    ):
        seconds = median_seconds(run, send, repeats)
        bandwidth = bus_bandwidth(name, size, seconds, run.launch.world_size)
        row |= {f"{name}_seconds": seconds, f"{name}_bus_bytes_per_second": bandwidth}
    return row


def median_seconds(run: Any, send: Callable[[], Any], repeats: int) -> float:
    """Median seconds of the slowest process, after two warm-up calls; the same on every process."""
    import torch

    synchronize = torch.cuda.synchronize if run.device.type == "cuda" else torch.cpu.synchronize
    times = []
    for _ in range(repeats + 2):
        torch.distributed.barrier()
        synchronize()
        started = time.perf_counter()
        send()
        synchronize()
        times.append(time.perf_counter() - started)
    slowest = torch.tensor(times[2:], dtype=torch.float64, device=run.device)
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def count_parameters(arguments: Any) -> int | None:
    """The number of the model's parameters, without reading its weights; None without a model."""
    if not (arguments.config_name or arguments.model_name_or_path):
        return None
    import torch
    from transformers import AutoModel

    from samerun.models.pretrained import load_config

    config = load_config(arguments)
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config, trust_remote_code=arguments.trust_remote_code)
    except Exception as error:
        raise InputError(
            f"cannot build a model from the {config.model_type} configuration ({error})"
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def step_communication(run: Any, parameters: int, repeats: int) -> dict[str, Any]:
    """The bytes of the gradients of one optimizer step, and the seconds to send them at the speed of one
    bucket."""
    half = run.launch.deepspeed_config is not None and run.launch.precision != "no"
    gradient_bytes = parameters * (2 if half else 4)  # DDP keeps fp32 gradients under bf16 and fp16
    bucket = min(BUCKET, max(4, gradient_bytes // 4 * 4))
    seconds = measure(run, bucket, repeats)["all_reduce_seconds"] / bucket * gradient_bytes
    seconds *= 1.5 if run.launch.zero_stage == 3 else 1.0
    return {
        "parameters": parameters,
        "gradient_bytes": gradient_bytes,
        "bucket_bytes": bucket,
        "zero_stage": run.launch.zero_stage,
        "step_communication_seconds": seconds,
    }


def line(row: dict[str, Any]) -> str:
    cells = [
        f"{1000 * row[f'{name}_seconds']:>11.3f} ms{row[f'{name}_bus_bytes_per_second'] / 1e9:>9.3f} GB/s"
        for name in ("all_reduce", "broadcast")
    ]
    return f"{in_units(row['bytes']):>10}{''.join(cells)}"


def explain(measured: dict[str, Any]) -> list[str]:
    mode = f"ZeRO-{measured['zero_stage']}" if measured["zero_stage"] else "DDP"
    return [
        f"gradients      {in_units(measured['gradient_bytes'])} ({measured['parameters'] / 1e6:.3g} "
        "M parameters), in buckets "
        f"of {in_units(measured['bucket_bytes'])}",
        f"{mode:<15}communication should take about "
        f"{1000 * measured['step_communication_seconds']:.1f} ms of a step",
    ]


def in_units(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


if __name__ == "__main__":
    with failures_end_the_job(debug="--debug" in sys.argv):
        main(parse(Arguments, description=__doc__))
