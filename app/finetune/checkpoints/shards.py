"""Checkpoints in shards: each process of a ZeRO launch writes and reads its own part, and nothing is gathered. Level 5.

A shard holds one process's flat fp32 weights and moments as DeepSpeed shares them out, so that it fits the same number of
processes, ZeRO stage and order of parameters only; layout.json says which. No process waits for another in its writing: a
record beside a shard says that it is done, and rank 0, whose thread looks for these, makes the checkpoint of them.
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
from finetune.launching import zero
from finetune.launching.launch import Launch
from finetune.output.run_folder import file_record, write_json

LAYOUT = "layout.json"
POLL_SECONDS = 0.1
HURRIED_SECONDS = 10  # for a record of a shard that is written, or of a process that ends, to be seen by rank 0


def files(world_size: int) -> list[str]:
    """The shards' names, in the order of ranks."""
    return [_name(rank) for rank in range(world_size)]


def refusals(launch: Launch, shared_output_dir: bool) -> list[str]:
    """Why a launch cannot write checkpoints in shards; one message each."""
    asked, instead = "--checkpoint_format sharded", "leave it out (full), which every launch writes and reads"
    if launch.world_size == 1:
        return [f"{asked}: one process shares out nothing, so there are no shards; {instead}"]
    if launch.zero_stage == 0:
        return [f"{asked}: DDP shares out nothing, so there are no shards; {instead}, or use DeepSpeed (ds_configs/zero*.json)"]
    found = []
    if launch.world_size > launch.local_world_size and not shared_output_dir:
        found.append(
            f"{asked}: each machine would keep its own part, since no disk is shared; add --shared_output_dir if all machines "
            f"see --output_dir, or {instead}"
        )
    if zero.swaps_to_disk(launch.deepspeed_config):
        found.append(f"{asked}: {launch.deepspeed_file} keeps the optimizer or the weights on a disk (nvme); {instead}")
    return found


def check_launch(path: Path, launch: Launch) -> None:
    """Raises `InputError` for a checkpoint whose shards another launch wrote."""
    stored = _read_layout(path)
    then, now = (_in_words(*pair) for pair in ((stored["world_size"], stored["stage"]), (launch.world_size, launch.zero_stage)))
    if then != now:
        raise InputError(
            f"checkpoint {path} is in the shards of {then}, this launch is {now}. Go on from it once under that launch with "
            "--checkpoint_format full, which writes it anew for every launch; or go on from an earlier one"
        )


def write(place: Path, rank: int, tensors: dict[str, Any]) -> None:
    """Writes a process's shard into an unfinished checkpoint, flushes it, and then its record. Raises `OSError` and what
    safetensors raises."""
    place.mkdir(exist_ok=True)  # rank 0 has made it; a network file system may not show it yet
    path = place / _name(rank)
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    write_json(_record(place, rank), file_record(path))


def collect(place: Path, world_size: int, seconds: float, is_hurried: Callable[[], bool]) -> dict[str, dict[str, Any]]:
    """Waits for the records of all shards; returns them by the shards' names and removes them.

    Raises `OSError` for those that are not there after `seconds`, or `HURRIED_SECONDS` after `is_hurried`, and for a shard that
    is not as its process wrote it.
    """
    until, hurried, found = time.monotonic() + seconds, False, {}
    while len(found) < world_size:
        if is_hurried() and not hurried:
            until, hurried = min(until, time.monotonic() + HURRIED_SECONDS), True
        overdue = time.monotonic() > until
        for rank in range(world_size):
            if _name(rank) not in found and _record(place, rank).exists():
                found[_name(rank)] = json.loads(_record(place, rank).read_text(encoding="utf-8"))
        missing = [rank for rank in range(world_size) if _name(rank) not in found]
        if missing and overdue:
            raise OSError(f"no shard of rank {', '.join(map(str, missing))} came")
        if missing:
            time.sleep(POLL_SECONDS)
    for rank, (name, record) in enumerate(sorted(found.items())):
        if (place / name).stat().st_size != record["bytes"]:
            raise OSError(f"{name} has {(place / name).stat().st_size} bytes, its process wrote {record['bytes']}")
        _record(place, rank).unlink()
    return found


def clear(place: Path, seconds: float, is_hurried: Callable[[], bool]) -> None:
    """Removes a checkpoint that came to nothing, once the others have left it: `is_hurried` says so, or `seconds` are over."""
    until = time.monotonic() + seconds
    while not is_hurried() and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    shutil.rmtree(place, ignore_errors=True)


def layout(engine: Any, launch: Launch) -> dict[str, Any]:
    """Content of layout.json: what must be the same when the shards are read."""
    return {"world_size": launch.world_size, "stage": launch.zero_stage, "groups": zero.layout(engine)}


def restore(path: Path, launch: Launch, engine: Any, updates: int) -> None:
    """Puts this process's shard back, after a first step: moments, buffers, master weights and what the module makes of them.
    All processes must call it.

    Raises `InputError` for shards in another layout.
    """
    stored, ours = _read_layout(path)["groups"], zero.layout(engine)
    if stored != ours:
        raise InputError(
            f"checkpoint {path} is in shards of another layout: {_first_difference(stored, ours)}. Go on from it with the "
            "arguments, the DeepSpeed file and the libraries of the run that wrote it; --checkpoint_format full then writes it "
            "anew for every launch"
        )
    with safe_open(path / _name(0), "pt") as first, safe_open(path / _name(launch.rank), "pt") as mine:
        own = set(mine.keys())
        zero.restore_partition(engine, lambda name: (mine if name in own else first).get_tensor(name), updates)


def _name(rank: int) -> str:
    return f"shard_{rank:05d}.safetensors"


def _record(place: Path, rank: int) -> Path:
    return place / f"shard_{rank:05d}.written"


def _read_layout(path: Path) -> dict[str, Any]:
    return json.loads((path / LAYOUT).read_text(encoding="utf-8"))


def _in_words(world_size: int, stage: int) -> str:
    return f"{world_size} process(es) {f'under ZeRO-{stage}' if stage else 'without ZeRO'}"


def _first_difference(stored: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    """Both values of the first thing in which two layouts differ."""
    if len(stored) != len(ours):
        return f"there were {len(stored)} groups of parameters, now {len(ours)}"
    number, then, now = next((n, a, b) for n, (a, b) in enumerate(zip(stored, ours, strict=True)) if a != b)
    for before, after in zip(then["parameters"], now["parameters"], strict=False):
        if before != after:
            return f"in group {number} stood {before}, now {after} (name, shape, place)"
    before, after = (f"{len(group['parameters'])} parameters, {group['numel']} numbers a process" for group in (then, now))
    return f"group {number} had {before}, has {after}"
