"""The launch settings under which `samerun parity` compares a job ("cells")."""

from __future__ import annotations

import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from samerun.task_scripts import shipped

RUN_OBSERVED = Path(__file__).resolve().with_name("run_observed.py")


@dataclass(frozen=True)
class Cell:
    """One launch setting. `memory`: the name of a file in ds_configs/, or for FSDP in accelerate_configs/."""

    name: str
    launcher: str  # python, torchrun, accelerate, deepspeed
    several: bool = False  # processes
    accumulation: int = 1
    memory: str | None = None
    precision: str = "no"
    usual: bool = True  # runs without --cells


CELLS = (
    Cell("one", "python"),
    Cell("accumulate2", "python", accumulation=2),
    Cell("accumulate4", "python", accumulation=4, usual=False),
    Cell("ddp", "torchrun", several=True),
    Cell("ddp_accumulate2", "accelerate", several=True, accumulation=2, usual=False),
    Cell("zero1", "accelerate", several=True, memory="zero1"),
    Cell("zero2", "deepspeed", several=True, memory="zero2"),
    Cell("zero3", "deepspeed", several=True, memory="zero3"),
    Cell("fsdp", "accelerate", several=True, memory="fsdp"),
    Cell("fsdp_offload", "accelerate", several=True, memory="fsdp_offload", usual=False),
    Cell("zero2_offload", "torchrun", several=True, memory="zero2_offload", usual=False),
    Cell("zero3_offload", "accelerate", several=True, memory="zero3_offload", usual=False),
    Cell("bf16", "python", precision="bf16"),
    Cell("bf16_ddp", "accelerate", several=True, precision="bf16", usual=False),
    Cell("bf16_zero2", "deepspeed", several=True, memory="zero2", precision="bf16"),
    Cell("bf16_fsdp", "accelerate", several=True, memory="fsdp", precision="bf16", usual=False),
    Cell("fp16", "python", precision="fp16"),
    Cell("fp16_zero2", "deepspeed", several=True, memory="zero2", precision="fp16"),
)
REFERENCE = CELLS[0]


def launcher(cell: Cell, processes: int) -> list[str]:
    """The launcher with its options, up to the script. Raises `FileNotFoundError` if the launcher is not
    installed."""
    port = str(_free_port())
    if cell.launcher == "python":
        return [sys.executable]
    if cell.launcher == "torchrun":
        return [_tool("torchrun"), "--nproc_per_node", str(processes), "--master_port", port]
    if cell.launcher == "deepspeed":
        return [_tool("deepspeed"), "--num_gpus", str(processes), "--master_port", port]
    file = f"{cell.memory or ('ddp_bf16' if cell.precision == 'bf16' else 'ddp')}.yaml"
    config = [
        "--config_file",
        str(shipped("accelerate_configs") / file),
        "--num_processes",
        str(processes),
    ]
    return [_tool("accelerate"), "launch", *config, "--main_process_port", port]


def launch_arguments(cell: Cell) -> dict[str, str]:
    """The script's arguments for the cell's DeepSpeed file and precision."""
    file = f"ds_configs/{cell.memory}.json" if cell.memory and cell.launcher != "accelerate" else "none"
    return {"deepspeed": file, "mixed_precision": cell.precision}


def batch_arguments(
    cell: Cell, processes: int, global_batch_size: int, micro_batch_size: int | None, max_tokens: int | None
) -> dict[str, str]:
    """Arguments for the same global batch in `accumulation` times as many micro-batches. `micro_batch_size`
    (rows) or `max_tokens`: the command's own limit of a micro-batch."""
    rows, tokens = "none", "none"
    if max_tokens is not None:
        tokens = max(1, max_tokens // cell.accumulation)
    else:
        process_rows = -(-global_batch_size // processes)
        rows = -(-min(process_rows, micro_batch_size or process_rows) // cell.accumulation)
    return {
        "global_batch_size": str(global_batch_size),
        "gradient_accumulation_steps": "none",
        "per_device_train_batch_size": str(rows),
        "max_tokens_per_micro_batch": str(tokens),
    }


def _tool(name: str) -> str:
    """The path of a launcher in this Python's environment, or else in PATH."""
    own = Path(sys.executable).with_name(name)
    path = str(own) if own.exists() else shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed beside {sys.executable}")
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
