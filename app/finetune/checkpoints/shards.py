"""Sharded checkpoints: each process of a ZeRO launch writes and reads its own part, and nothing is gathered.

A shard holds one process's flat fp32 weights and moments as DeepSpeed partitions them. It therefore fits only the same number
of processes, ZeRO stage and order of parameters, which layout.json records. Processes write without waiting for each other:
a record beside a shard says that the shard is complete, and rank 0's writer collects the records.
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

from finetune.errors import InputError
from finetune.launching import deepspeed_config, deepspeed_state
from finetune.launching.launch import Launch
from finetune.output.files import file_record, write_json

LAYOUT = "layout.json"
POLL_SECONDS = 0.1
HURRIED_SECONDS = 10  # how long rank 0 still looks for records when all other processes have written, or this one ends


def files(world_size: int) -> list[str]:
    """The shards' file names, in the order of ranks."""
    return [name_of(rank) for rank in range(world_size)]


def name_of(rank: int) -> str:
    """The file name of a process's shard."""
    return f"shard_{rank:05d}.safetensors"


def refusals(launch: Launch, shared_output_dir: bool) -> list[str]:
    """Why a launch cannot write sharded checkpoints, if it cannot."""
    if launch.fsdp is not None:
        why = "shards are DeepSpeed's, not FSDP's; use DeepSpeed (accelerate_configs/zero3.yaml)"
    elif launch.world_size == 1 or launch.zero_stage == 0:
        why = "one process, or DDP, shares out nothing; use DeepSpeed on several processes (ds_configs/zero*.json)"
    elif launch.world_size > launch.local_world_size and not shared_output_dir:
        why = "each machine would keep its own part; add --shared_output_dir if all machines see --output_dir"
    elif deepspeed_config.swaps_to_disk(launch.deepspeed_config):
        why = f"{launch.deepspeed_file} keeps the optimizer or the weights on a disk (nvme)"
    else:
        return []
    return [f"--checkpoint_format sharded: {why}, or leave it out (full), which every launch writes and reads"]


def check_launch(path: Path, launch: Launch) -> None:
    """Raises `InputError` for a checkpoint whose shards another kind of launch wrote."""
    stored = _read_layout(path)
    then, now = _in_words(stored["world_size"], stored["stage"]), _in_words(launch.world_size, launch.zero_stage)
    if then != now:
        raise InputError(
            f"checkpoint {path} is in the shards of {then}, this launch is {now}. Resume once under that launch with "
            "--checkpoint_format full, which writes it anew for every launch; or resume from an earlier one"
        )


def write(place: Path, rank: int, tensors: dict[str, Any]) -> None:
    """Writes a process's shard into an unfinished checkpoint, flushes it, and then writes its record. Raises `OSError` and what
    safetensors raises."""
    place.mkdir(exist_ok=True)  # rank 0 has made it, but a network file system may not show it yet
    path = place / name_of(rank)
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    write_json(_record(place, rank), file_record(path))


def collect(place: Path, world_size: int, seconds: float, is_hurried: Callable[[], bool]) -> dict[str, dict[str, Any]]:
    """Waits for the records of all shards, removes them and returns {file name of the shard: record}.

    Raises `OSError` if records are missing after `seconds`, or `HURRIED_SECONDS` after `is_hurried`, and if a shard is not as
    its process wrote it.
    """
    deadline, hurried, records = time.monotonic() + seconds, False, {}
    while True:
        if is_hurried() and not hurried:
            deadline, hurried = min(deadline, time.monotonic() + HURRIED_SECONDS), True
        overdue = time.monotonic() > deadline  # before the look, so that the last look is after the deadline
        for rank in range(world_size):
            if name_of(rank) not in records and _record(place, rank).exists():
                records[name_of(rank)] = json.loads(_record(place, rank).read_text(encoding="utf-8"))
        missing = [rank for rank in range(world_size) if name_of(rank) not in records]
        if not missing:
            break
        if overdue:
            raise OSError(f"no shard of rank {', '.join(map(str, missing))} came")
        time.sleep(POLL_SECONDS)
    for rank, name in enumerate(files(world_size)):
        if (place / name).stat().st_size != records[name]["bytes"]:
            raise OSError(f"{name} has {(place / name).stat().st_size} bytes, its process wrote {records[name]['bytes']}")
        _record(place, rank).unlink()
    return {name: records[name] for name in files(world_size)}


def clear(place: Path, seconds: float, is_hurried: Callable[[], bool]) -> None:
    """Removes a failed checkpoint when no other process writes to it any more: after `is_hurried`, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_hurried() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    shutil.rmtree(place, ignore_errors=True)


def layout(engine: Any, launch: Launch) -> dict[str, Any]:
    """Content of layout.json: what must be equal when the shards are read."""
    return {"world_size": launch.world_size, "stage": launch.zero_stage, "groups": deepspeed_state.layout(engine)}


def restore(path: Path, launch: Launch, engine: Any, updates: int) -> None:
    """Restores moments, buffers, master weights and the module's own weights from this process's shard. The engine must have
    made a step. All processes must call it.

    Raises `InputError` for shards in another layout.
    """
    if _read_layout(path)["groups"] != deepspeed_state.layout(engine):
        raise InputError(
            f"checkpoint {path} is in shards of another layout than this run's. Resume with the arguments, the DeepSpeed file "
            "and the libraries of the run that wrote it; --checkpoint_format full then writes it anew for every launch"
        )
    with safe_open(path / name_of(0), "pt") as first, safe_open(path / name_of(launch.rank), "pt") as mine:
        own = set(mine.keys())
        deepspeed_state.restore_partition(engine, lambda name: (mine if name in own else first).get_tensor(name), updates)


def _record(place: Path, rank: int) -> Path:
    return place / f"shard_{rank:05d}.written"


def _read_layout(path: Path) -> dict[str, Any]:
    return json.loads((path / LAYOUT).read_text(encoding="utf-8"))


def _in_words(world_size: int, stage: int) -> str:
    return f"{world_size} process(es) {f'under ZeRO-{stage}' if stage else 'without ZeRO'}"
