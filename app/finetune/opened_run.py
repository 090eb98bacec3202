"""The run's folder is taken: processes compared, checkpoint found, run.json written."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune import optimizers
from finetune.arguments.parsing import as_dict
from finetune.checkpoints import checkpoint, local_copy, shards
from finetune.errors import InputError
from finetune.launching import rendezvous, signals
from finetune.launching.processes import Run, in_force
from finetune.output import run_folder, status, written
from finetune.output.files import write_json
from finetune.output.run_folder import BEST
from finetune.output.versions import library_versions
from finetune.plan import Plan, describe

_lock: Any = None  # of the folder, held until the process ends


@dataclass(frozen=True)
class OpenedRun:
    """A folder that a run has taken.

    `fingerprint`: what a checkpoint must share with the run. `resume`: the checkpoint to resume from. `replace`, on rank 0:
    removes the run that --overwrite_output_dir gives up. That is the last thing before the training: a model that does not fit
    on its device, or into DeepSpeed, must not cost it.
    """

    fingerprint: dict[str, Any]
    resume: Path | None
    replace: Callable[[], None] | None


def make_fingerprint(arguments: Any, plan: Plan | None, of_task: dict[str, Any]) -> dict[str, Any]:
    """What must be equal on every machine, and for a checkpoint to be this run's: the task's part, the order of rows, and
    the optimizer and the average of weights, on which it depends what a checkpoint holds."""
    if plan is None:
        return of_task
    order = {"global_batch_size": plan.batch.global_batch_size, "length_grouping": arguments.length_grouping}
    of_state = {"optim": optimizers.in_words(arguments), "ema_decay": arguments.ema_decay}
    return {**of_task, **order, "seed": arguments.seed, **of_state}


def open_run(
    run: Run, arguments: Any, plan: Plan | None, fingerprint: dict[str, Any], notes: list[str], details: dict[str, Any]
) -> OpenedRun:
    """Compares the processes' data, takes the folder, prints what is requested and what is in force, writes run.json.

    `fingerprint` may not change over a resume; `details` is what the task wants in run.json besides. Raises `InputError`.
    """
    own = {"rank": run.launch.rank, "host": platform.node(), "compared": {"data": fingerprint}}
    differences = rendezvous.differences(run.gather([own]))
    if differences:
        raise InputError(*differences)
    folder = Path(arguments.output_dir)
    description = {**_description(run, arguments, plan, fingerprint), **details} if plan is not None else {}
    signals.limit(arguments.max_train_time)
    resume, replaces = run.on_main(partial(_take, run, arguments, plan, fingerprint, description))
    if arguments.shared_output_dir:
        local_copy.check_shared(run, folder)
    lines = [*in_force(run), *(describe(plan) if plan else [])]
    lines += [f"note           {note}" for note in notes]
    if plan and (resume is not None or arguments.resume_from_checkpoint is not None):
        lines.append(f"resume         {resume or 'no checkpoint yet, starting from the beginning'}")
    run.print(*lines)
    return OpenedRun(fingerprint, resume, partial(_replace, folder, description) if replaces else None)


def _take(
    run: Run, arguments: Any, plan: Plan | None, fingerprint: dict[str, Any], description: dict[str, Any]
) -> tuple[Path | None, bool]:
    """(the checkpoint to resume from, whether the run that is there is to be replaced later); rank 0 only."""
    global _lock
    folder = Path(arguments.output_dir)
    _lock = run_folder.lock(folder)
    written.add(folder)
    if plan is None:
        return None, False
    restarted = run_folder.was_restarted(folder)
    resume = "auto" if restarted else arguments.resume_from_checkpoint
    holds_a_run = run_folder.holds_a_run(folder)
    run_folder.check_output_dir(folder, True, arguments.overwrite_output_dir, resume is not None)  # others may have come since
    if arguments.overwrite_output_dir and not restarted and holds_a_run:
        return None, True
    if not holds_a_run:
        run_folder.clear(folder)
    run_folder.recover_folder(folder / BEST)
    for name in (checkpoint.FOLDER, run_folder.BEST_MODELS, run_folder.KEPT_WEIGHTS):
        checkpoint.tidy(folder / name)
    found = None if resume is None else checkpoint.find(folder / checkpoint.FOLDER, resume)
    step = 0
    if found is not None:
        step = checkpoint.load_state(found, fingerprint).step
        if checkpoint.is_sharded(found):
            shards.check_launch(found, run.launch)
    _begin(folder, description, step)
    return found, False


def _replace(folder: Path, description: dict[str, Any]) -> None:
    run_folder.clear(folder)
    _begin(folder, description, 0)


def _begin(folder: Path, description: dict[str, Any], step: int) -> None:
    written.add(folder, folder / run_folder.RUN_FILE)
    write_json(folder / run_folder.RUN_FILE, description)
    status.begin(folder, step)
    signals.on_end(partial(status.end, "stopped"))


def _description(run: Run, arguments: Any, plan: Plan, fingerprint: dict[str, Any]) -> dict[str, Any]:
    launch = run.launch
    return {
        "arguments": as_dict(arguments),
        "launcher": launch.launcher,
        "launcher_process": os.getppid(),
        "world_size": launch.world_size,
        "device": run.device.type,
        "hardware": _hardware(run.device),
        "backend": launch.backend,
        "mixed_precision": launch.precision,
        "zero_stage": launch.zero_stage,
        "fsdp": asdict(run.fsdp) if run.fsdp is not None else None,
        "deepspeed_file": launch.deepspeed_file,
        "deepspeed_config": _as_json_values(run.deepspeed_config),
        "plan": asdict(plan),
        "fingerprint": fingerprint,
        "versions": library_versions(),
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores" if device.type == "cpu" else device.type


def _as_json_values(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """DeepSpeed's and Accelerate's additions include infinities, which JSON does not have."""
    return None if config is None else json.loads(json.dumps(config, default=str).replace("Infinity", '"inf"'))
