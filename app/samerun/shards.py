"""Sharded checkpoints: each process of a ZeRO launch writes and reads its own shard; nothing is gathered.

A shard holds one process's flat fp32 weights and moments as DeepSpeed partitions them. It fits only the same
number of processes, ZeRO stage and order of parameters; layout.json records these. Each process writes a
record after its shard, and rank 0's writer waits for all records.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from samerun import deepspeed
from samerun.errors import InputError
from samerun.output.files import file_record, write_json
from samerun.runtime import Launch

LAYOUT = "layout.json"
POLL_SECONDS = 0.1
HURRIED_SECONDS = (
    10  # rank 0's last wait for records, once the other processes have written or this one exits
)


def files(world_size: int) -> list[str]:
    """The shards' file names by rank."""
    return [name_of(rank) for rank in range(world_size)]


def name_of(rank: int) -> str:
    """The file name of a process's shard."""
    return f"shard_{rank:05d}.safetensors"


def refusals(launch: Launch, shared_output_dir: bool) -> list[str]:
    """The reason why a launch cannot write sharded checkpoints; empty if it can."""
    if launch.fsdp is not None:
        why = "FSDP is not supported; use DeepSpeed (accelerate_configs/zero3.yaml)"
    elif launch.world_size == 1 or launch.zero_stage == 0:
        why = "one process or DDP has no shards; use DeepSpeed on several processes (ds_configs/zero*.json)"
    elif launch.world_size > launch.local_world_size and not shared_output_dir:
        why = (
            "each machine would keep its own shards; add --shared_output_dir if all machines see --output_dir"
        )
    elif deepspeed.uses_nvme(launch.deepspeed_config):
        why = f"{launch.deepspeed_file} offloads to nvme; offload to cpu"
    else:
        return []
    return [f"--checkpoint_format sharded: {why}, or leave it out: every launch supports full checkpoints"]


def check_launch(path: Path, launch: Launch) -> None:
    """Raises `InputError` for a checkpoint that another number of processes or ZeRO stage wrote."""
    stored = _read_layout(path)
    then, now = (
        _in_words(stored["world_size"], stored["stage"]),
        _in_words(launch.world_size, launch.zero_stage),
    )
    if then != now:
        raise InputError(
            f"checkpoint {path} has the shards of {then}, this launch is {now}. Resume once under "
            "that launch with "
            "--checkpoint_format full to make a checkpoint for every launch, or resume from an earlier one"
        )


def write(folder: Path, rank: int, tensors: dict[str, Any]) -> None:
    """Writes a process's shard into an unfinished checkpoint, flushes it, then writes its record. Raises
    `OSError` and `SafetensorError`."""
    folder.mkdir(exist_ok=True)  # rank 0 has made it, but a network file system may not show it yet
    path = folder / name_of(rank)
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    write_json(_record(folder, rank), file_record(path))


def collect(
    folder: Path, world_size: int, seconds: float, is_hurried: Callable[[], bool]
) -> dict[str, dict[str, Any]]:
    """Waits for the records of all shards, removes them and returns {file name of the shard: record}.

    Raises `OSError` if records are missing after `seconds` or `HURRIED_SECONDS` after `is_hurried`, or if a
    shard's size is not that of its record.
    """
    deadline, hurried, records = time.monotonic() + seconds, False, {}
    while True:
        if is_hurried() and not hurried:
            deadline, hurried = min(deadline, time.monotonic() + HURRIED_SECONDS), True
        overdue = time.monotonic() > deadline  # taken first, so that the last look follows the deadline
        for rank in range(world_size):
            if name_of(rank) not in records and _record(folder, rank).exists():
                records[name_of(rank)] = json.loads(_record(folder, rank).read_text(encoding="utf-8"))
        missing = [rank for rank in range(world_size) if name_of(rank) not in records]
        if not missing:
            break
        if overdue:
            raise OSError(f"rank {', '.join(map(str, missing))} did not write its shard")
        time.sleep(POLL_SECONDS)
    for rank, name in enumerate(files(world_size)):
        if (folder / name).stat().st_size != records[name]["bytes"]:
            raise OSError(
                f"{name} has {(folder / name).stat().st_size} bytes, its process wrote "
                f"{records[name]['bytes']}"
            )
        _record(folder, rank).unlink()
    return {name: records[name] for name in files(world_size)}


def clear(folder: Path, seconds: float, is_hurried: Callable[[], bool]) -> None:
    """Removes a failed checkpoint once no other process writes to it: after `is_hurried` or `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_hurried() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


def layout(engine: Any, launch: Launch) -> dict[str, Any]:
    """The content of layout.json, which must be the same when the shards are read."""
    return {
        "world_size": launch.world_size,
        "stage": launch.zero_stage,
        "groups": deepspeed.layout(engine),
    }


def restore(path: Path, launch: Launch, engine: Any, updates: int) -> None:
    """Restores moments, buffers, master weights and the module's weights from this process's shard. The
    engine must have made a step. All processes must call it.

    Raises `InputError` for shards in another layout.
    """
    if _read_layout(path)["groups"] != deepspeed.layout(engine):
        raise InputError(
            f"checkpoint {path} has shards of another layout. Resume with the arguments, the "
            "DeepSpeed file and libraries of "
            "the run that wrote it; add --checkpoint_format full to make a checkpoint for every launch"
        )
    # Only rank 0's shard has the frozen weights that are not partitioned.
    with safe_open(path / name_of(0), "pt") as first, safe_open(path / name_of(launch.rank), "pt") as own:
        own_names = set(own.keys())
        deepspeed.restore_partition(
            engine, lambda name: (own if name in own_names else first).get_tensor(name), updates
        )


def _record(folder: Path, rank: int) -> Path:
    return folder / f"shard_{rank:05d}.written"


def _read_layout(path: Path) -> dict[str, Any]:
    return json.loads((path / LAYOUT).read_text(encoding="utf-8"))


def _in_words(world_size: int, stage: int) -> str:
    return f"{world_size} process(es) {f'under ZeRO-{stage}' if stage else 'without ZeRO'}"
