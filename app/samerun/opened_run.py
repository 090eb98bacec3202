"""Opens a run: compares the processes, locks the output folder, finds the checkpoint to resume from, writes
run.json."""

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

from samerun import checkpoint, machines, optimizers, signals
from samerun.errors import InputError
from samerun.output import run_folder, status, written
from samerun.output.files import as_json, write_json
from samerun.output.run_folder import BEST, RUN_FILE, STATUS
from samerun.output.versions import library_versions
from samerun.parsing import as_dict, names_of
from samerun.plan import Plan, describe
from samerun.runtime import Run, launch_summary

# Arguments of a single start, not of the training.
OF_A_START = ("resume_from_checkpoint", "overwrite_output_dir", "max_train_time")
_lock: Any = None  # of the output folder; held until the process ends


@dataclass(frozen=True)
class OpenedRun:
    """A run that holds the lock of its output folder.

    `resume`: the checkpoint to resume from. `complete`: the folder holds this run, finished and without a
    checkpoint, so that there is nothing to train. `replace`, on rank 0 with --overwrite_output_dir: removes
    the previous run. Call it just before training, so that an error in preparing the model does not cost that
    run."""

    fingerprint: dict[str, Any]
    resume: Path | None
    replace: Callable[[], None] | None
    complete: bool = False


def make_fingerprint(arguments: Any, plan: Plan | None, task_fingerprint: dict[str, Any]) -> dict[str, Any]:
    """The values that must be equal on all machines and in a checkpoint to resume from."""
    if plan is None:
        return task_fingerprint
    order = {"global_batch_size": plan.batch.global_batch_size, "length_grouping": arguments.length_grouping}
    # These decide which tensors a checkpoint has.
    state = {"optim": optimizers.in_words(arguments), "ema_decay": arguments.ema_decay}
    return {**task_fingerprint, **order, "seed": arguments.seed, **state}


def open_run(
    run: Run,
    arguments: Any,
    plan: Plan | None,
    fingerprint: dict[str, Any],
    notes: list[str],
    details: dict[str, Any],
) -> OpenedRun:
    """Compares the processes' data, locks the folder, writes run.json and prints the launch, the plan and
    `notes`.

    `details`: the task's own entries of run.json. Raises `InputError`.
    """
    own = {"rank": run.launch.rank, "host": platform.node(), "compared": {"data": fingerprint}}
    differences = machines.differences(run.gather([own]))
    if differences:
        raise InputError(*differences)
    folder = Path(arguments.output_dir)
    description = {**_description(run, arguments, plan, fingerprint), **details} if plan is not None else {}
    signals.set_time_limit(arguments.max_train_time)
    resume, replaces, complete, changes = run.on_main(
        partial(_take_folder, run, arguments, plan, fingerprint, description)
    )
    if arguments.shared_output_dir:
        checkpoint.check_shared(run, folder)
    lines = [*launch_summary(run), *(describe(plan) if plan else [])]
    lines += [f"note           {note}" for note in [*notes, *changes]]
    if complete:
        lines.append(f"training       is complete in {folder}; nothing to do")
    elif plan and (resume is not None or arguments.resume_from_checkpoint is not None):
        lines.append(f"resume         {resume or 'no checkpoint yet, starting from the beginning'}")
    run.print(*lines)
    replace = partial(_replace_run, folder, description) if replaces else None
    return OpenedRun(fingerprint, resume, replace, complete)


def _take_folder(
    run: Run, arguments: Any, plan: Plan | None, fingerprint: dict[str, Any], description: dict[str, Any]
) -> tuple[Path | None, bool, bool, list[str]]:
    """Locks the folder and writes run.json, unless a previous run is to be replaced later or is complete;
    rank 0 only. Returns (checkpoint to resume from, whether to replace a previous run, whether it is
    complete, notes)."""
    global _lock
    folder = Path(arguments.output_dir)
    _lock = run_folder.lock(folder)
    written.add(folder)
    if plan is None:
        return None, False, False, []
    restarted = run_folder.was_restarted(folder)
    resume = "auto" if restarted else arguments.resume_from_checkpoint
    holds_a_run = run_folder.holds_a_run(folder)
    # Another run may have used the folder since the preflight check.
    run_folder.check_output_dir(folder, True, arguments.overwrite_output_dir, resume is not None)
    if arguments.overwrite_output_dir and not restarted and holds_a_run:
        return None, True, False, []
    if holds_a_run and resume not in (None, "auto"):
        _check_own_checkpoint(folder, Path(resume))
    if not holds_a_run:
        run_folder.clear(folder)
    run_folder.recover_folder(folder / BEST)
    for name in (checkpoint.FOLDER, run_folder.BEST_MODELS, run_folder.KEPT_WEIGHTS):
        checkpoint.tidy(folder / name)
    path = None if resume is None else checkpoint.find(folder / checkpoint.FOLDER, resume)
    if path is None and restarted and arguments.resume_from_checkpoint is not None:
        # Stopped before its first checkpoint: begins where it began before.
        path = checkpoint.find(folder / checkpoint.FOLDER, arguments.resume_from_checkpoint)
    if path is None and holds_a_run and not restarted and _is_complete(folder, plan, fingerprint):
        return None, False, True, _changed_arguments(folder / RUN_FILE, arguments)
    step, notes = 0, []
    if path is not None:
        notes = _changed_arguments(path.parent.parent / run_folder.RUN_FILE, arguments)
        step = checkpoint.load_state(path, fingerprint).step
    _begin(folder, description, step)
    return path, False, False, notes


def _check_own_checkpoint(folder: Path, path: Path) -> None:
    """Raises `InputError` for another run's checkpoint: histories and best models would be mixed."""
    own = (folder / checkpoint.FOLDER).resolve()
    if (path / checkpoint.MANIFEST).exists() and path.resolve().parent != own:
        raise InputError(
            f"--resume_from_checkpoint {path}: --output_dir {folder} already holds another run; name another "
            "--output_dir, or go on with that run by --resume_from_checkpoint auto"
        )


def _is_complete(folder: Path, plan: Plan, fingerprint: dict[str, Any]) -> bool:
    """Whether the run in `folder`, which has no checkpoint, is this one and finished. False if it ended
    before its first checkpoint was due.

    Raises `InputError` if it is another run, or if the checkpoint to go on from is missing.
    """
    way_out = "name another --output_dir, or replace that run by --overwrite_output_dir"
    try:
        before, state = (
            json.loads((folder / name).read_text(encoding="utf-8")) for name in (RUN_FILE, STATUS)
        )
        saved, steps, saves = (
            before["fingerprint"],
            before["plan"]["total_steps"],
            before["plan"]["save_steps"],
        )
        name, step = state["state"], state["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--output_dir {folder} holds a run without checkpoints, and its {RUN_FILE} or {STATUS} cannot "
            f"be read ({type(error).__name__}); {way_out}"
        ) from None
    # Through JSON: a tuple was written as a list.
    now = json.loads(as_json(fingerprint))
    differences = [
        f"--output_dir {folder} holds another run: {checkpoint.difference(key, saved.get(key), now.get(key))}"
        for key in {**now, **saved}
        if saved.get(key) != now.get(key)
    ]
    if differences:
        raise InputError(*differences[:-1], f"{differences[-1]}; {way_out}")
    if name == "done" and (folder / BEST).is_dir() and steps == plan.total_steps:
        return True
    if name != "done" and step == 0 and saves is not None:
        return False
    ended = f"finished after {steps} steps" if name == "done" else "is not finished"
    raise InputError(
        f"--output_dir {folder} holds a run that {ended}, without a checkpoint to go on from to step "
        f"{plan.total_steps}; {way_out}"
    )


def _changed_arguments(run_file: Path, arguments: Any) -> list[str]:
    """A note on the arguments that differ from those in run.json, which the checkpoint's run wrote when it
    last started."""
    try:
        before = json.loads(run_file.read_text(encoding="utf-8"))["arguments"]
    except (OSError, ValueError, KeyError):
        return []
    now = json.loads(as_json(as_dict(arguments)))
    names = [
        name
        for name in names_of(arguments, per_machine=False, reads=False)
        if name in before and name not in OF_A_START
    ]
    changes = [
        checkpoint.difference(f"--{name}", before[name], now[name])
        for name in names
        if before[name] != now[name]
    ]
    return [f"changed since the checkpoint: {'; '.join(changes)}"] if changes else []


def _replace_run(folder: Path, description: dict[str, Any]) -> None:
    run_folder.clear(folder)
    _begin(folder, description, 0)


def _begin(folder: Path, description: dict[str, Any], step: int) -> None:
    written.add(folder, folder / run_folder.RUN_FILE)
    write_json(folder / run_folder.RUN_FILE, description)
    status.begin(folder, step)
    signals.on_immediate_stop(partial(status.end, "stopped"))


def _description(run: Run, arguments: Any, plan: Plan, fingerprint: dict[str, Any]) -> dict[str, Any]:
    launch = run.launch
    return {
        "arguments": as_dict(arguments),
        "launcher": launch.launcher,
        "launcher_process": os.getppid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
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
    """Replaces infinities by "inf": DeepSpeed and Accelerate add them, and JSON has none."""
    return (
        None if config is None else json.loads(json.dumps(config, default=str).replace("Infinity", '"inf"'))
    )
